"""Compares the allocation cache with the kubelet's records and decides what to change. Pure.

What counts as ended: the pod is deleted or terminal in the pod store, or a kubelet that has been up for a while lists the
pod, which has not started, without the container's devices, or has not listed the pod twice in a row. Doubt keeps the
allocation: an ID released too early goes to two containers, one released late costs free capacity for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, StrEnum, auto

from msgspec import Struct

from gpushare_agent.admission.decisions.recovery import UNNAMED
from gpushare_agent.kubelet.records import ListedPod
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerKind, Pod


class Evidence(Struct, frozen=True, kw_only=True):
    """One poll of the kubelet.

    `rebuilt` is what its records show (admission/decisions/recovery.py). `pods` is None while the pod store has not listed.
    `scope` names the pods that were asked about, None for all. `is_trusted` is false for a kubelet that has just started: it
    lists a pod only after it has admitted it again. `missing_before` are the containers missing at the last poll. `fresh`
    are containers allocated so lately that the kubelet may not have recorded it yet.
    """

    listed: Sequence[ListedPod]
    rebuilt: Sequence[Allocation]
    pods: Mapping[PodUid, Pod] | None
    scope: Collection[PodUid] | None
    is_trusted: bool
    missing_before: Collection[ContainerKey]
    fresh: Collection[ContainerKey] = ()


class CorrectionKind(StrEnum):
    """The values are labels of a metric."""

    ADOPTED = "adopted"
    CHANGED = "changed"
    ENDED = "ended"
    UNLISTED = "unlisted"
    NAMED = "named"
    """The IDs were right, only the pod's name or the container's kind was unknown."""


class Correction(Struct, frozen=True, kw_only=True):
    """One difference. `allocation` is what the container has by the kubelet, None where it has nothing."""

    kind: CorrectionKind
    key: ContainerKey
    allocation: Allocation | None = None


class Reconciliation(Struct, frozen=True, kw_only=True):
    """Corrections in order of container, the containers missing now, and deleted pods whose processes may still run."""

    corrections: tuple[Correction, ...]
    missing: frozenset[ContainerKey]
    deleted: frozenset[PodUid]


class _Verdict(Enum):
    """On a container that the cache has and the kubelet's records do not show."""

    KEPT = auto()
    DELETED = auto()
    MISSING = auto()
    ENDED = auto()
    UNLISTED = auto()


_RELEASED = {_Verdict.ENDED: CorrectionKind.ENDED, _Verdict.UNLISTED: CorrectionKind.UNLISTED}


def reconcile(present: Mapping[ContainerKey, Allocation], evidence: Evidence) -> Reconciliation:
    """What to change so that the cache (`present`) equals the kubelet's records."""
    corrections = [c for found in evidence.rebuilt if (c := _compare(present, found, evidence)) is not None]
    shown = {found.key for found in evidence.rebuilt}
    listed = {(p.namespace, p.name) for p in evidence.listed}
    missing: set[ContainerKey] = set()
    deleted: set[PodUid] = set()
    for key, allocation in sorted(present.items()):
        if allocation.claim is not None:
            continue  # the kubelet ends claims by a call of its own
        if key in shown or key in evidence.fresh or (evidence.scope is not None and key.pod_uid not in evidence.scope):
            continue
        verdict = _verdict(key, allocation, listed, evidence)
        if verdict is _Verdict.DELETED:
            deleted.add(key.pod_uid)
        elif verdict is _Verdict.MISSING:
            missing.add(key)
        elif verdict in _RELEASED:
            corrections.append(Correction(kind=_RELEASED[verdict], key=key))
    return Reconciliation(
        corrections=tuple(sorted(corrections, key=lambda c: c.key)),
        missing=frozenset(missing),
        deleted=frozenset(deleted),
    )


def _compare(present: Mapping[ContainerKey, Allocation], found: Allocation, evidence: Evidence) -> Correction | None:
    """A container that the kubelet's records show. In this order:

    | cache | container | correction |
    |---|---|---|
    | any | allocated a moment ago | none: the records lag |
    | has it not | init container of a pod that is not live | none: the checkpoint keeps entries of ended pods |
    | has it not | pod without a UID, another container has the same IDs | none: that is it, under its UID |
    | has it not | else | adopted |
    | same IDs | name and kind known | none |
    | same IDs | else | named |
    | other IDs | init container | none: its record is the checkpoint's, which lags |
    | other IDs | else | changed |
    """
    if found.key in evidence.fresh:
        return None
    known = present.get(found.key)
    is_init = found.kind is ContainerKind.INIT
    if known is None:
        if is_init and not _is_live(found.key.pod_uid, evidence):
            return None
        if found.key.pod_uid.startswith(UNNAMED) and any(a.ids == found.ids for a in present.values()):
            return None
        return Correction(kind=CorrectionKind.ADOPTED, key=found.key, allocation=found)
    if known.ids == found.ids:
        is_named = (known.pod_name or not found.pod_name) and known.kind is found.kind
        return None if is_named else Correction(kind=CorrectionKind.NAMED, key=found.key, allocation=found)
    return None if is_init else Correction(kind=CorrectionKind.CHANGED, key=found.key, allocation=found)


def _verdict(
    key: ContainerKey, allocation: Allocation, listed: Collection[tuple[str, str]], evidence: Evidence
) -> _Verdict:
    """A container of the cache that the records do not show. In this order:

    1. Its pod has no UID: ended once the pod store has listed, for then the records show it under its UID.
    2. The pod store has not listed: kept.
    3. The pod is deleted: its processes decide, see Reconciliation.
    4. The pod is terminal: ended.
    5. The kubelet has just started: kept.
    6. The pod is listed, this is an init container: kept, for these are never listed.
    7. The pod is listed without the devices: kept if it has started, for a kubelet that lost its checkpoint lists running
       containers like this; else unlisted.
    8. The whole List is empty: kept, for the kubelet may not have admitted any pod again.
    9. The pod is not listed: missing, and unlisted at the second time in a row.
    """
    if key.pod_uid.startswith(UNNAMED):
        return _Verdict.ENDED if evidence.pods is not None else _Verdict.KEPT
    if evidence.pods is None:
        return _Verdict.KEPT
    pod = evidence.pods.get(key.pod_uid)
    if pod is None:
        return _Verdict.DELETED
    if pod.is_terminal:
        return _Verdict.ENDED
    is_listed = (pod.namespace, pod.name) in listed
    if not evidence.is_trusted or (is_listed and allocation.kind is ContainerKind.INIT):
        return _Verdict.KEPT
    if is_listed:
        return _Verdict.KEPT if pod.has_started else _Verdict.UNLISTED
    if not evidence.listed and evidence.scope is None:
        return _Verdict.KEPT
    return _Verdict.UNLISTED if key in evidence.missing_before else _Verdict.MISSING


def _is_live(uid: PodUid, evidence: Evidence) -> bool:
    return evidence.pods is not None and (pod := evidence.pods.get(uid)) is not None and not pod.is_terminal
