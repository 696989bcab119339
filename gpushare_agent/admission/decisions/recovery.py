"""Rebuilds the allocation cache from the kubelet's records. Pure.

PodResources names pods and shows what is held now, but not UIDs and not ordinary init containers. The kubelet's checkpoint
has both, but not names, and keeps what has ended until the next Allocate. The pod store has names and UIDs, but may not
have listed yet. The three are joined here; what cannot be told yet is left provisional and settled by the next reconcile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_agent.kubelet.records import CheckpointEntry, ListedPod
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, PodUid, split_device_id
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames

UNNAMED = "unnamed:"
"""Prefix of the stand-in UID of a pod that PodResources lists and nobody has told the UID of yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is on record at one moment. `pods` is None while the pod store has not listed."""

    listed: Sequence[ListedPod]
    checkpoint: Sequence[CheckpointEntry]
    pods: Sequence[Pod] | None


@dataclass(slots=True)
class _Held:
    """What one container holds, gathered from the records."""

    ids: dict[ResourceKind, frozenset[DeviceId]] = field(default_factory=dict)
    is_listed: bool = False
    namespace: str = ""
    pod_name: str = ""


def rebuild(records: Records, names: ResourceNames, inventory: GpuInventory, now: float) -> list[Allocation]:
    """The allocations that the records show, sorted by container."""
    written = _from_checkpoint(records.checkpoint, names)
    found = {key: held for pod in records.listed for key, held in _from_listed(pod, records, names, written).items()}
    live = None if records.pods is None else {pod.uid: pod for pod in records.pods if not pod.is_terminal}
    listed_uids = {key.pod_uid for key in found}
    listed_ids = {kind: {d for held in found.values() for d in held.ids.get(kind, ())} for kind in ResourceKind}
    for key, ids in written.items():
        if key in found:
            continue
        # Not listed: an ordinary init container of a pod that is, or a pod that the kubelet has not admitted again yet,
        # or one that has ended. The pod store decides where it can; without it the entry stays until it can.
        if live is not None and key.pod_uid not in live:
            continue
        is_reused = any(ids_of & listed_ids[kind] for kind, ids_of in ids.items())
        if live is None and key.pod_uid not in listed_uids and is_reused:
            continue  # the kubelet has given them to another pod since
        found[key] = _Held(ids=ids)
    by_uid = {pod.uid: pod for pod in records.pods or ()}
    # A pod that ended, or was refused half-way, holds nothing, though kubelets go on showing devices in it for a while.
    ended = {uid for uid, pod in by_uid.items() if pod.is_terminal}
    return [
        _allocation(key, found[key], by_uid.get(key.pod_uid), inventory, now)
        for key in sorted(found)
        if key.pod_uid not in ended
    ]


def adopt(
    entries: Sequence[CheckpointEntry],
    kind: ResourceKind,
    ids: frozenset[DeviceId],
    present: Mapping[ContainerKey, Allocation],
    names: ResourceNames,
    inventory: GpuInventory,
    now: float,
) -> list[Allocation] | Refused:
    """The allocation of the container that the kubelet's checkpoint says holds exactly these IDs of one resource."""
    written = _from_checkpoint(entries, names)
    keys = sorted(key for key, held in written.items() if held.get(kind) == ids)
    if not keys:
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"a container is to start with {len(ids)} {kind} units that neither this agent nor the kubelet's "
            "checkpoint knows. The kubelet will try again; if it persists, delete the pod.",
        )
    others = sorted(
        k for k, a in present.items() if a.ids(kind) & ids and k.pod_uid not in {key.pod_uid for key in keys}
    )
    if others:
        return Refused(
            reason=RefusalReason.DEVICE_IN_USE,
            detail=f"a container is to start with {kind} units that container {others[0].container} of pod "
            f"{others[0].pod_uid} holds. Nothing was given twice: delete the pod and create it again.",
        )
    return [_allocation(key, _Held(ids=written[key]), None, inventory, now) for key in keys]


def gpus_of(ids: frozenset[DeviceId], inventory: GpuInventory) -> tuple[GpuUuid, ...]:
    """The GPUs that vcore or gpu-mem IDs name, by index; GPUs that are gone come last."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None}
    return tuple(sorted(found, key=lambda uuid: (index.get(uuid, len(index)), uuid)))


def _from_checkpoint(
    entries: Sequence[CheckpointEntry], names: ResourceNames
) -> dict[ContainerKey, dict[ResourceKind, frozenset[DeviceId]]]:
    written: dict[ContainerKey, dict[ResourceKind, frozenset[DeviceId]]] = {}
    for entry in entries:
        kind = names.kind(entry.resource)
        ids = frozenset(DeviceId(d) for d in entry.device_ids if split_device_id(d) is not None)
        if kind is not None and ids:
            written.setdefault(ContainerKey(entry.pod_uid, entry.container), {})[kind] = ids
    return written


def _from_listed(
    pod: ListedPod,
    records: Records,
    names: ResourceNames,
    written: Mapping[ContainerKey, Mapping[ResourceKind, frozenset[DeviceId]]],
) -> dict[ContainerKey, _Held]:
    holdings: dict[str, dict[ResourceKind, frozenset[DeviceId]]] = {}
    for container in pod.containers:
        for resource, raw_ids in container.devices.items():
            kind = names.kind(resource)
            ids = frozenset(DeviceId(d) for d in raw_ids if split_device_id(d) is not None)
            if kind is not None and ids:
                holdings.setdefault(container.name, {})[kind] = ids
    if not holdings:
        return {}
    uid = _uid(pod, holdings, records.pods, written)
    return {
        ContainerKey(uid, name): _Held(ids=ids, is_listed=True, namespace=pod.namespace, pod_name=pod.name)
        for name, ids in holdings.items()
    }


def _uid(
    listed: ListedPod,
    holdings: Mapping[str, Mapping[ResourceKind, frozenset[DeviceId]]],
    pods: Sequence[Pod] | None,
    written: Mapping[ContainerKey, Mapping[ResourceKind, frozenset[DeviceId]]],
) -> PodUid:
    """The checkpoint's entry with the same container and IDs tells the UID; it outlives a name used again."""
    for key, ids in written.items():
        if key.container in holdings and ids == holdings[key.container]:
            return key.pod_uid
    named = [p for p in pods or () if (p.namespace, p.name) == (listed.namespace, listed.name)]
    named.sort(key=lambda p: (not p.is_terminal, not p.is_deleting))
    return named[-1].uid if named else PodUid(f"{UNNAMED}{listed.namespace}/{listed.name}")


def _allocation(key: ContainerKey, held: _Held, pod: Pod | None, inventory: GpuInventory, now: float) -> Allocation:
    vcore_ids = held.ids.get(ResourceKind.VCORE, frozenset())
    gpu_mem_ids = held.ids.get(ResourceKind.GPU_MEM, frozenset())
    spec = pod.container(key.container) if pod is not None else None
    assumed = ContainerKind.MAIN if held.is_listed else ContainerKind.INIT
    return Allocation(
        key=key,
        namespace=pod.namespace if pod is not None else held.namespace,
        pod_name=pod.name if pod is not None else held.pod_name,
        kind=spec.kind if spec is not None else assumed,
        gpus=gpus_of(vcore_ids or gpu_mem_ids, inventory),
        vcore_ids=vcore_ids,
        gpu_mem_ids=gpu_mem_ids,
        vmemory_ids=held.ids.get(ResourceKind.VMEMORY, frozenset()),
        is_whole=bool(vcore_ids) and len(vcore_ids) % CORES_PER_GPU == 0,
        allocated_at=now,
    )
