"""What the node's object should have of the allocations: one annotation, for the scheduler extender. Pure.

The extender takes it for the truth in the place of what it has planned, so a pod is named only when its admission is over:
half a pod would set the other half free for another. Format: docs/reference/node-facts.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from msgspec import Struct

from gpushare_agent.cluster.decisions.node_annotations import ALLOCATIONS_SCHEMA, MAX_PODS
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, PodUid, split_device_id
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.units import parts_of

MAX_CHARS = 200 * 1024
"""All annotations of an object together may have 256 KiB; the rest is for the GPUs and for others."""


Extras = Mapping[ResourceKind, Mapping[ContainerKey, int]]


class AllocatedTo(Struct, frozen=True, kw_only=True):
    """What one pod has of each GPU, by index: cores, blocks, units and 1 for a whole GPU, trailing zeros left out."""

    pod_uid: PodUid
    gpus: Mapping[int, tuple[int, ...]]
    since: float
    """Monotonic seconds, of its newest container."""


def allocations_by_pod(
    allocations: Iterable[Allocation],
    gpus: Sequence[Gpu],
    pod_of: Callable[[PodUid], Pod | None],
    names: ResourceNames,
    extras: Extras | None = None,
) -> list[AllocatedTo]:
    """The pods with allocations whose admission is over, sorted by UID.

    Counts are of distinct device IDs of the pod on the GPU, memory charged as the allocation cache charges it; replicas
    under NVIDIA's names are counted in cores and blocks, a part of one as one. `extras` has
    by resource how much more or less than that is booked for a container that was resized.
    """
    allocations = list(allocations)
    shown = {kind: _shown_extras(allocations, by_key) for kind, by_key in (extras or {}).items()}
    of_pod: dict[PodUid, list[Allocation]] = {}
    for allocation in allocations:
        of_pod.setdefault(allocation.key.pod_uid, []).append(allocation)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    found = []
    for uid, own in sorted(of_pod.items()):
        pod = pod_of(uid)
        if not _is_admitted(pod, own, names):
            continue
        gpus_of_pod = _allocated(own, by_uuid, names.memory_block_mib, shown)
        if gpus_of_pod:
            # The extender has a static pod under the UID of its mirror pod.
            uid = (pod.object_uid if pod is not None else None) or uid
            found.append(AllocatedTo(pod_uid=uid, gpus=gpus_of_pod, since=max(one.allocated_at for one in own)))
    return found


def allocations_annotation(
    allocated: Iterable[AllocatedTo], *, max_chars: int = MAX_CHARS, max_pods: int = MAX_PODS
) -> str:
    """Compact JSON. Where not all fit, it has the newest, for the extender waits for those, and is marked as truncated."""
    newest = sorted(allocated, key=lambda one: (-one.since, one.pod_uid))
    chars = len(_document([], is_truncated=True))
    chosen: list[AllocatedTo] = []
    for one in newest[:max_pods]:
        chars += len(_entry(one))
        if chars > max_chars:
            break
        chosen.append(one)
    return _document(chosen, is_truncated=len(chosen) < len(newest))


def _is_admitted(pod: Pod | None, own: Sequence[Allocation], names: ResourceNames) -> bool:
    """A pod that the API server no longer knows counts with what it has: its processes may live on."""
    if pod is None or pod.has_started:
        return True
    by_name = {one.key.container: one for one in own}
    for container in pod.containers:
        for kind in names.kinds:
            wanted = names.wanted(container, kind)
            if wanted and (one := by_name.get(container.name)) is not None and len(one.ids_of(kind)) >= wanted:
                continue
            if wanted:
                return False
    return True


def _shown_extras(allocations: Iterable[Allocation], extras: Mapping[ContainerKey, int]) -> dict[ContainerKey, int]:
    """What a GPU's shares give back is shown only as far as others there have grown into it: the kubelet still counts the
    rest as taken, so no scheduler may think it free."""
    shown: dict[ContainerKey, int] = {}
    on_gpu: dict[GpuUuid, list[ContainerKey]] = {}
    for one in allocations:
        if one.gpus and extras.get(one.key):
            on_gpu.setdefault(one.gpus[0], []).append(one.key)
    for keys in on_gpu.values():
        grown = sum(max(0, extras[key]) for key in keys)
        for key in sorted(keys):
            shown[key] = max(extras[key], -grown)
            grown += min(0, shown[key])
    return shown


def _allocated(
    own: Sequence[Allocation],
    gpus: Mapping[GpuUuid, Gpu],
    block_mib: int,
    extras: Mapping[ResourceKind, Mapping[ContainerKey, int]],
) -> dict[int, tuple[int, ...]]:
    cores = _by_gpu((one.gpus, one.ids_of(ResourceKind.VCORE)) for one in own)
    units = _by_gpu((one.gpus, one.ids_of(ResourceKind.GPU_MEM)) for one in own)
    blocks: dict[GpuUuid, set[DeviceId]] = {}
    for one in own:
        if one.gpus and not one.is_whole:
            blocks.setdefault(one.gpus[0], set()).update(one.ids_of(ResourceKind.VMEMORY))
    whole = {gpu for one in own if one.is_whole for gpu in one.gpus}
    parts = parts_of({device for one in own for device in one.unit_ids})

    def more(kind: ResourceKind, gpu: GpuUuid) -> int:
        return sum(extras.get(kind, {}).get(one.key, 0) for one in own if one.gpus[:1] == (gpu,))

    found = {}
    named = {*cores, *units, *blocks, *whole, *parts, *(one.gpus[0] for one in own if one.gpus)}
    for uuid, gpu in sorted(((uuid, gpus[uuid]) for uuid in named if uuid in gpus), key=lambda item: item[0]):
        index, part = gpu.index, parts.get(uuid, Fraction(0))
        part_cores, part_mib = ceil(part * CORES_PER_GPU), ceil(part * gpu.memory_mib) if uuid not in whole else 0
        counts = [
            min(len(cores.get(uuid, ())) + part_cores + more(ResourceKind.VCORE, uuid), CORES_PER_GPU),
            len(blocks.get(uuid, ())) + -(-part_mib // block_mib) + more(ResourceKind.VMEMORY, uuid),
            len(units.get(uuid, ())) + more(ResourceKind.GPU_MEM, uuid),
            int(uuid in whole),
        ]
        while counts and not counts[-1]:
            counts.pop()
        if counts:
            found[index] = tuple(counts)
    return found


def _by_gpu(allocated: Iterable[tuple[Sequence[GpuUuid], frozenset[DeviceId]]]) -> dict[GpuUuid, set[DeviceId]]:
    """`allocated` are the GPUs and the IDs of each container; those of one GPU need no splitting, and are most."""
    found: dict[GpuUuid, set[DeviceId]] = {}
    for gpus, devices in allocated:
        if len(gpus) == 1 and devices:
            found.setdefault(gpus[0], set()).update(devices)
            continue
        for device in devices:
            if (parts := split_device_id(device)) is not None:
                found.setdefault(parts[0], set()).add(device)
    return found


def _entry(one: AllocatedTo) -> str:
    return json.dumps({one.pod_uid: {str(index): list(counts) for index, counts in sorted(one.gpus.items())}})


def _document(allocated: Iterable[AllocatedTo], *, is_truncated: bool) -> str:
    document: dict[str, object] = {
        "schema": ALLOCATIONS_SCHEMA,
        "held": {
            one.pod_uid: {str(index): list(counts) for index, counts in sorted(one.gpus.items())}
            for one in sorted(allocated, key=lambda one: one.pod_uid)
        },
    }
    return json.dumps({**document, **({"truncated": True} if is_truncated else {})}, separators=(",", ":"))
