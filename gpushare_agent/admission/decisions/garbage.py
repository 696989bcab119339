"""Compares the allocation cache with the kubelet's records and says what to change. Pure.

What counts as ended: the pod is gone or terminal in the pod store, or a kubelet that has had time to look lists the pod,
which has not started, without the container's devices, or has not listed the pod twice in a row. Doubt keeps the
allocation: an ID freed too early goes to two containers, one freed late costs room for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpushare_agent.admission.decisions.recovery import UNNAMED
from gpushare_agent.kubelet.records import ListedPod
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import DeviceId, PodUid
from gpushare_agent.model.pods import ContainerKind, Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One look at the kubelet.

    `rebuilt` is what its records show (admission/decisions/recovery.py). `pods` is None while the pod store has not listed.
    `scope` names the pods that were looked at, None for all. `is_trusted` is false for a kubelet that has just started: it
    lists a pod only once it has admitted it again. `missing_before` are the containers missing at the last look. `fresh` are
    containers allocated so lately that the kubelet may not have written it down yet.
    """

    listed: Sequence[ListedPod]
    rebuilt: Sequence[Allocation]
    pods: Mapping[PodUid, Pod] | None
    scope: Collection[PodUid] | None
    is_trusted: bool
    missing_before: Collection[ContainerKey]
    fresh: Collection[ContainerKey] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One difference, named for its metric label: `adopted`, `changed`, `ended`, `unlisted`; or `named`, where the IDs
    were right and only the pod's name or the container's kind was not known yet."""

    kind: str
    key: ContainerKey
    allocation: Allocation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Corrections in order of container, the containers missing now, and pods gone whose processes may live on."""

    corrections: tuple[Correction, ...]
    missing: frozenset[ContainerKey]
    gone: frozenset[PodUid]


def reconcile(present: Mapping[ContainerKey, Allocation], evidence: Evidence) -> Reconciliation:
    """What to change so that the cache says what the kubelet says."""
    corrections = [c for found in evidence.rebuilt if (c := _compare(present, found, evidence)) is not None]
    shown = {found.key for found in evidence.rebuilt}
    listed = {(p.namespace, p.name) for p in evidence.listed}
    missing: set[ContainerKey] = set()
    gone: set[PodUid] = set()
    for key, held in sorted(present.items()):
        if key in shown or key in evidence.fresh or (evidence.scope is not None and key.pod_uid not in evidence.scope):
            continue
        verdict = _verdict(key, held, listed, evidence)
        if verdict == "gone":
            gone.add(key.pod_uid)
        elif verdict == "missing":
            missing.add(key)
        elif verdict:
            corrections.append(Correction(kind=verdict, key=key))
    return Reconciliation(
        corrections=tuple(sorted(corrections, key=lambda c: c.key)), missing=frozenset(missing), gone=frozenset(gone)
    )


def _compare(present: Mapping[ContainerKey, Allocation], found: Allocation, evidence: Evidence) -> Correction | None:
    held = present.get(found.key)
    if found.key in evidence.fresh:
        return None
    if held is None:
        if found.kind is ContainerKind.INIT and not _is_live(found.key.pod_uid, evidence):
            return None
        if found.key.pod_uid.startswith(UNNAMED) and any(_ids(a) == _ids(found) for a in present.values()):
            return None
        return Correction(kind="adopted", key=found.key, allocation=found)
    same = _ids(held) == _ids(found)
    if same and (held.pod_name or not found.pod_name) and held.kind is found.kind:
        return None
    if found.kind is ContainerKind.INIT and not same:
        return None  # an init container's record comes from the checkpoint, which lags behind
    return Correction(kind="named" if same else "changed", key=found.key, allocation=found)


def _verdict(key: ContainerKey, held: Allocation, listed: Collection[tuple[str, str]], evidence: Evidence) -> str:
    if key.pod_uid.startswith(UNNAMED):
        return "ended" if evidence.pods is not None else ""
    if evidence.pods is None:
        return ""
    pod = evidence.pods.get(key.pod_uid)
    if pod is None:
        return "gone"
    if pod.is_terminal:
        return "ended"
    is_listed = (pod.namespace, pod.name) in listed
    if not evidence.is_trusted or (is_listed and held.kind is ContainerKind.INIT):
        return ""
    if is_listed:
        # A kubelet that lost its checkpoint lists running containers without their devices; they use them all the same.
        return "" if pod.has_started else "unlisted"
    if not evidence.listed and evidence.scope is None:
        return ""  # an empty answer means "not known yet"
    return "unlisted" if key in evidence.missing_before else "missing"


def _ids(held: Allocation) -> tuple[frozenset[DeviceId], ...]:
    return held.vcore_ids, held.vmemory_ids, held.gpu_mem_ids


def _is_live(uid: PodUid, evidence: Evidence) -> bool:
    return evidence.pods is not None and (pod := evidence.pods.get(uid)) is not None and not pod.is_terminal
