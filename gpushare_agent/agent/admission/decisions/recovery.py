"""Rebuilds the allocation cache from the kubelet's records at the start, and compares it with them later. Pure.

| record | has | lacks |
|---|---|---|
| PodResources | pod names, present allocations | UIDs, ordinary init containers |
| the kubelet's checkpoint | UIDs, init containers | pod names; it keeps entries of ended pods until the next Allocate |
| the pod store | pod names, UIDs, phases | everything, until it has listed |

`rebuild` joins the three; what cannot be decided yet stays provisional until the next `reconcile`, which says what to add
to the cache, to change or to release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.former_devices import FormerDevices, texts
from gpushare_agent.agent.kubelet.records import CheckpointEntry, ListedPod
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    DeviceId,
    GpuUuid,
    PodUid,
    has_kubelet_text,
    is_one_of,
    kubelet_text,
    read_former_id,
    split_device_id,
    unit_suffix,
)
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames, replica_layout

UNNAMED = "unnamed:"
"""Prefix of the provisional UID of a pod that PodResources lists and whose UID is not known yet."""


class Records(Struct, frozen=True, kw_only=True):
    """What is on record at one moment. `pods` is None while the pod store has not listed."""

    listed: Sequence[ListedPod]
    checkpoint: Sequence[CheckpointEntry]
    pods: Sequence[Pod] | None


_Uids = dict[tuple[str, frozenset[tuple[ResourceKind, frozenset[DeviceId]]]], tuple[int, PodUid]]
"""The UID that the checkpoint has first for a container with these devices, and its place there."""


class _Recorded(Struct):
    """One container's allocation by the records."""

    ids: dict[ResourceKind, frozenset[DeviceId]] = field(default_factory=dict)
    is_listed: bool = False
    namespace: str = ""
    pod_name: str = ""


def rebuild(records: Records, names: ResourceNames, inventory: GpuInventory, now: float) -> list[Allocation]:
    """The allocations that the records show, sorted by container:

    1. of every container that PodResources lists with devices, under the UID that `_uid` finds;
    2. of containers in the checkpoint alone, where `_is_retained` is true;
    3. less the pods that are terminal in the pod store: kubelets list devices in an ended or half refused pod for a while.
    """
    former = FormerDevices(records.checkpoint, records.pods or (), names, inventory)
    records = replace(records, checkpoint=former.checkpoint, listed=[former.listed(pod) for pod in records.listed])
    written = _from_checkpoint(records.checkpoint, names)
    # Looked up, not searched: a full node has thousands.
    uids: _Uids = {}
    for key, ids in written.items():
        uids.setdefault((key.container, frozenset(ids.items())), (len(uids), key.pod_uid))
    found = {key: one for pod in records.listed for key, one in _from_listed(pod, records, names, uids).items()}
    listed_uids = {key.pod_uid for key in found}
    listed_ids = {kind: {d for one in found.values() for d in one.ids.get(kind, ())} for kind in names.table}
    by_uid = {pod.uid: pod for pod in records.pods or ()}
    # None is not the empty set: a pod store that has not listed says nothing of any pod.
    live = None if records.pods is None else {uid for uid, pod in by_uid.items() if not pod.is_terminal}
    for key, ids in written.items():
        # PodResources comes first: it shows the present, the checkpoint perhaps a pod that has ended.
        if key not in found and _is_retained(key, ids, live, listed_uids, listed_ids):
            found[key] = _Recorded(ids=ids)
    resources, gpu_names = _unit_resources(records, names), _gpu_names(records.checkpoint)
    ended = {uid for uid, pod in by_uid.items() if pod.is_terminal}
    return [
        _allocation(key, found[key], by_uid.get(key.pod_uid), inventory, now, resources, gpu_names)
        for key in sorted(found)
        if key.pod_uid not in ended
    ]


def _is_retained(
    key: ContainerKey,
    ids: Mapping[ResourceKind, frozenset[DeviceId]],
    live: Collection[PodUid] | None,
    listed_uids: Collection[PodUid],
    listed_ids: Mapping[ResourceKind, Collection[DeviceId]],
) -> bool:
    """True if a container that only the checkpoint has counts:

    | pod store | the pod | kept |
    |---|---|---|
    | has listed | is live: an init container's entry, or the kubelet has not admitted the pod again yet | yes |
    | has listed | has ended or is unknown | no |
    | has not listed | is listed by PodResources: an init container's entry | yes |
    | has not listed | is not, and another container is listed with one of the IDs: they were allocated again | no |
    | has not listed | is not, and the IDs are free | yes, until the pod store has listed |
    """
    if live is not None:
        return key.pod_uid in live
    return key.pod_uid in listed_uids or not any(not of_kind.isdisjoint(listed_ids[k]) for k, of_kind in ids.items())


def adopt(
    entries: Sequence[CheckpointEntry],
    kind: ResourceKind,
    ids: frozenset[DeviceId],
    present: Mapping[ContainerKey, Allocation],
    names: ResourceNames,
    inventory: GpuInventory,
    now: float,
) -> list[Allocation] | Refused:
    """The allocations of the containers that have exactly these IDs of one resource in the kubelet's checkpoint."""
    # The kubelet writes the checkpoint before it starts the container, so this start's entry is there.
    entries = FormerDevices(entries, (), names, inventory).checkpoint
    written = _from_checkpoint(entries, names)
    keys = sorted(key for key, recorded in written.items() if texts(recorded.get(kind, ())) == texts(ids))
    if not keys:
        return Refused(
            RefusalReason.NOT_READY,
            f"a container is to start with {len(ids)} {kind} units that are in neither this agent's records nor the "
            "kubelet's checkpoint. The kubelet tries again; if it persists, delete the pod.",
        )
    # Containers of the same pod may share IDs, as an init container's are passed on; others must not.
    others = sorted(
        k for k, a in present.items() if a.ids_of(kind) & ids and k.pod_uid not in {key.pod_uid for key in keys}
    )
    if others:
        return Refused(
            RefusalReason.DEVICE_IN_USE,
            f"a container is to start with {kind} units that are allocated to container "
            f"{others[0].container} of pod {others[0].pod_uid}. Nothing was allocated twice: delete the pod and create it "
            "again.",
        )
    resources = _unit_resources(Records(listed=(), checkpoint=entries, pods=None), names)
    gpu_names = _gpu_names(entries)
    return [_allocation(key, _Recorded(ids=written[key]), None, inventory, now, resources, gpu_names) for key in keys]


_GpuNames = Mapping[tuple[ContainerKey, frozenset[DeviceId]], frozenset[str]]


def _gpu_names(entries: Sequence[CheckpointEntry]) -> _GpuNames:
    """What the answers with these devices of a container name GPUs by: another plugin's entry names others."""
    ids = (frozenset(map(DeviceId, entry.device_ids)) for entry in entries)
    return {(ContainerKey(e.pod_uid, e.container), own): e.gpu_names for e, own in zip(entries, ids, strict=True)}


def _unit_resources(records: Records, names: ResourceNames) -> dict[DeviceId, str]:
    """The names under which containers have units, the present names first."""
    recorded = [(entry.resource, entry.device_ids) for entry in records.checkpoint]
    for pod in records.listed:
        recorded += [found for container in pod.containers for found in container.devices.items()]
    return {
        DeviceId(device): resource
        for resource, devices in recorded
        if (kind := names.by_name.get(resource)) is None or kind.is_part
        for device in devices
    }


def gpus_of(ids: frozenset[DeviceId], inventory: GpuInventory) -> tuple[GpuUuid, ...]:
    """The GPUs that vcore, gpu-mem or NVIDIA's IDs name, by index; GPUs that the inventory lacks come last."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None}
    return tuple(sorted(found, key=lambda uuid: (index.get(uuid, len(index)), uuid)))


def _from_checkpoint(
    entries: Sequence[CheckpointEntry], names: ResourceNames
) -> dict[ContainerKey, dict[ResourceKind, frozenset[DeviceId]]]:
    written: dict[ContainerKey, dict[ResourceKind, frozenset[DeviceId]]] = {}
    for entry in entries:
        if ids := _ids(entry.resource, entry.device_ids, names):
            written.setdefault(ContainerKey(entry.pod_uid, entry.container), {}).update(ids)
    return written


def _ids(resource: str, devices: Collection[str], names: ResourceNames) -> dict[ResourceKind, frozenset[DeviceId]]:
    """The devices of one resource that are ours, by its kind; empty where none is."""
    ours = [DeviceId(device) for device in devices if split_device_id(device) is not None]
    # The records are kept, too: one set for both.
    ids = devices if isinstance(devices, frozenset) and len(ours) == len(devices) else frozenset(ours)
    kind = _kind(resource, ids, names)
    return {kind: ids} if kind is not None and ids else {}


_FORMER_KINDS = {"core": ResourceKind.VCORE, "memory": ResourceKind.VMEMORY, "unit": ResourceKind.GPU_MEM}


def _kind(resource: str, ids: frozenset[DeviceId], names: ResourceNames) -> ResourceKind | None:
    """The kind of a resource that the node offers, or of units under a name that it no longer offers: their containers still
    have their GPUs. Texts of NVIDIA's plugin count only if this agent replaces it."""
    kind = names.by_name.get(resource)
    if kind is not None or not ids:
        return kind
    if (former := read_former_id(kubelet_text(next(iter(ids))) or "")) is not None:
        return _FORMER_KINDS[former.what]
    if not names.gpu and has_kubelet_text(ids):
        return None
    return ResourceKind.GPU if all(map(unit_suffix, ids)) else None


def _from_listed(pod: ListedPod, records: Records, names: ResourceNames, uids: _Uids) -> dict[ContainerKey, _Recorded]:
    by_container: dict[str, dict[ResourceKind, frozenset[DeviceId]]] = {}
    for container in pod.containers:
        for resource, devices in container.devices.items():
            if ids := _ids(resource, devices, names):
                by_container.setdefault(container.name, {}).update(ids)
    if not by_container:
        return {}
    uid = _uid(pod, by_container, records.pods, uids)
    return {
        ContainerKey(uid, name): _Recorded(ids=ids, is_listed=True, namespace=pod.namespace, pod_name=pod.name)
        for name, ids in by_container.items()
    }


def _uid(
    listed: ListedPod,
    by_container: Mapping[str, Mapping[ResourceKind, frozenset[DeviceId]]],
    pods: Sequence[Pod] | None,
    uids: _Uids,
) -> PodUid:
    """The UID of the checkpoint's entry with the same container and IDs, because a name may be used again; else by name from
    the pod store, the live pod first; else provisional."""
    written = [uids.get((container, frozenset(ids.items()))) for container, ids in by_container.items()]
    if first := min(filter(None, written), default=None):
        return first[1]
    named = [p for p in pods or () if (p.namespace, p.name) == (listed.namespace, listed.name)]
    # A StatefulSet gives its pods the same names again: the old one may still be ending.
    named.sort(key=lambda p: (not p.is_terminal, not p.is_deleting))
    return named[-1].uid if named else PodUid(f"{UNNAMED}{listed.namespace}/{listed.name}")


def _allocation(
    key: ContainerKey,
    recorded: _Recorded,
    pod: Pod | None,
    inventory: GpuInventory,
    now: float,
    resources: Mapping[DeviceId, str],
    gpu_names: _GpuNames,
) -> Allocation:
    spec = pod.container(key.container) if pod is not None else None
    assumed = ContainerKind.MAIN if recorded.is_listed else ContainerKind.INIT
    found = Allocation(
        key=key,
        namespace=pod.namespace if pod is not None else recorded.namespace,
        pod_name=pod.name if pod is not None else recorded.pod_name,
        kind=spec.kind if spec is not None else assumed,
        gpus=(),
        ids=recorded.ids,
        allocated_at=now,
    )
    units, cores = found.unit_ids, len(found.ids_of(ResourceKind.VCORE))
    return replace(
        found,
        gpus=gpus_of(found.bound_ids, inventory),
        gpu_names=gpu_names.get((key, found.bound_ids)),
        gpu_resource=resources[min(units)] if units else "",
        is_whole=all(replica_layout(device).is_whole for device in units)
        if units
        else cores > 0 and cores % CORES_PER_GPU == 0,
    )


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
    """One difference. `allocation` is what the container has by the kubelet's records, None if nothing."""

    kind: CorrectionKind
    key: ContainerKey
    allocation: Allocation | None = None


class Reconciliation(Struct, frozen=True, kw_only=True):
    """Corrections in order of container, the containers missing now, and deleted pods that may still run."""

    corrections: tuple[Correction, ...]
    missing: frozenset[ContainerKey]
    deleted: frozenset[PodUid]


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
        # A fresh one is not in the records yet: the kubelet writes them after our answer.
        if key in shown or key in evidence.fresh or (evidence.scope is not None and key.pod_uid not in evidence.scope):
            continue
        match _verdict(key, allocation, listed, evidence):
            case CorrectionKind() as kind:
                corrections.append(Correction(kind=kind, key=key))
            case "deleted":
                deleted.add(key.pod_uid)
            case "missing":
                missing.add(key)
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
    | other IDs | init container whose GPU is known | none: its record is the checkpoint's, which lags |
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
    if is_init and not any(map(is_one_of, known.gpus)):
        return None
    return Correction(kind=CorrectionKind.CHANGED, key=found.key, allocation=found)


def _verdict(
    key: ContainerKey, allocation: Allocation, listed: Collection[tuple[str, str]], evidence: Evidence
) -> CorrectionKind | Literal["deleted", "missing"] | None:
    """A container of the cache that the records do not show; None: it stays unchanged. In this order:

    1. Its pod has no UID: ended once the pod store has listed, because the records show it under its UID then.
    2. The pod store has not listed: unchanged.
    3. The pod is deleted: its processes decide, see Reconciliation.
    4. The pod is terminal: ended.
    5. The kubelet has just started: unchanged.
    6. The pod is listed, this is an init container: unchanged, because these are never listed.
    7. The pod is listed without the devices: unchanged if it has started, because a kubelet that lost its checkpoint lists
       running containers like this; else unlisted.
    8. The whole List is empty: unchanged, because the kubelet may not have admitted any pod again.
    9. The pod is not listed: missing, and unlisted at the second time in a row.
    """
    if key.pod_uid.startswith(UNNAMED):
        return CorrectionKind.ENDED if evidence.pods is not None else None
    if evidence.pods is None:
        return None
    pod = evidence.pods.get(key.pod_uid)
    if pod is None:
        return "deleted"
    if pod.is_terminal:
        return CorrectionKind.ENDED
    is_listed = (pod.namespace, pod.name) in listed
    if not evidence.is_trusted or (is_listed and allocation.kind is ContainerKind.INIT):
        return None
    if is_listed:
        return None if pod.has_started else CorrectionKind.UNLISTED
    if not evidence.listed and evidence.scope is None:
        return None
    return CorrectionKind.UNLISTED if key in evidence.missing_before else "missing"


def _is_live(uid: PodUid, evidence: Evidence) -> bool:
    return evidence.pods is not None and (pod := evidence.pods.get(uid)) is not None and not pod.is_terminal
