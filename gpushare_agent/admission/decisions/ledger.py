"""The ledger as one container sees them: what is free for it on each GPU, which offered IDs nobody else holds. Pure.

What the pod's own init containers hold counts as free: the kubelet hands it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.admission.decisions.identity import Target, initial_ids
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid, split_device_id
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuState


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings that bear on placement."""

    names: ResourceNames
    share_policy: Literal["binpack", "spread"] = "binpack"
    share_mode: bool = True
    max_shares_of_gpu: int | None = None
    """Sharing containers that one GPU can serve: MPS has a bound on its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What is taken, as seen by one container: use by others on each GPU, and who holds each ID."""

    inventory: GpuInventory
    used_cores: Mapping[GpuUuid, int]
    used_blocks: Mapping[GpuUuid, int]
    holders: Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]
    allocations: Mapping[ContainerKey, Allocation]
    used_gpu_mem: Mapping[GpuUuid, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the kubelet offers in one GetPreferredAllocation. Its "available" is a claim to check."""

    kind: ResourceKind
    available: Sequence[str]
    must_include: Sequence[str]
    size: int


def gpu_states(
    target: Target | None, ledger: Ledger, policy: Policy, *, offered: Collection[DeviceId] | None = None
) -> list[GpuState]:
    """Each GPU as `target` may use it: what the pod's own init containers hold counts as free for it.

    `offered`, where given, are the vcore IDs that the kubelet can hand out: a GPU has no more room than that.
    """
    per_gpu: dict[GpuUuid, int] | None = None
    if offered is not None:
        per_gpu = {}
        for device in offered:
            uuid = GpuUuid(device.partition("::")[0])
            per_gpu[uuid] = per_gpu.get(uuid, 0) + 1
    own_cores, own_blocks = _own_initial(target, ledger) if target is not None else ({}, {})
    full = full_of_shares(target, ledger, policy) if target is not None else frozenset()
    whole = _whole_of_others(target, ledger)
    states = []
    for gpu in ledger.inventory.gpus:
        total = policy.names.units(gpu, ResourceKind.VMEMORY)
        free = CORES_PER_GPU - ledger.used_cores.get(gpu.uuid, 0) + own_cores.get(gpu.uuid, 0)
        if gpu.uuid in full:
            free = 0
        if per_gpu is not None:
            free = min(free, per_gpu.get(gpu.uuid, 0))
        left = total - ledger.used_blocks.get(gpu.uuid, 0) + own_blocks.get(gpu.uuid, 0)
        left -= memory_share.blocks_taken(ledger.used_gpu_mem.get(gpu.uuid, 0), policy.names)
        states.append(
            GpuState(
                index=gpu.index,
                uuid=gpu.uuid,
                healthy=gpu.is_healthy,
                free_cores=max(0, free),
                free_blocks=0 if gpu.uuid in whole else max(0, min(total, left)),
                total_blocks=total,
            )
        )
    return states


def memory_states(target: Target, ledger: Ledger, policy: Policy) -> list[memory_share.MemoryState]:
    """Each GPU as `target` may use it: what the pod's own init containers hold counts as free for it."""
    use = memory_share.MemoryUse(
        blocks=ledger.used_blocks,
        gpu_mem=ledger.used_gpu_mem,
        whole=memory_share.whole_gpus(ledger.allocations.values()),
    )
    own: Counter[GpuUuid] = Counter()
    for device in initial_ids(target.pod.uid, ResourceKind.GPU_MEM, ledger.allocations):
        keys = ledger.holders[ResourceKind.GPU_MEM].get(DeviceId(device), frozenset())
        if keys != {target.key} and may_take_over(target, keys, ledger):
            own[GpuUuid(device.partition("::")[0])] += 1
    full = full_of_shares(target, ledger, policy)
    states = []
    for gpu in ledger.inventory.gpus:
        total = policy.names.units(gpu, ResourceKind.GPU_MEM)
        free = memory_share.free_gpu_mem(gpu, use, policy.names) + own[gpu.uuid]
        states.append(
            memory_share.MemoryState(
                index=gpu.index,
                uuid=gpu.uuid,
                is_healthy=gpu.is_healthy,
                free_units=0 if gpu.uuid in full else min(total, free),
                total_units=total,
            )
        )
    return states


def free_ids(target: Target, kind: ResourceKind, available: Sequence[str], ledger: Ledger) -> list[DeviceId]:
    """The offered IDs that no other container holds by our ledger, whatever the kubelet says.

    The rest of the offer is taken: the kubelet forgot a holder, which is the fault that this check exists to catch.
    """
    holders = ledger.holders[kind]
    return [
        DeviceId(device)
        for device in available
        if (keys := holders.get(DeviceId(device))) is None or may_take_over(target, keys, ledger)
    ]


def must_gpus(
    target: Target, offer: Offer, ledger: Ledger, kind: ResourceKind = ResourceKind.VCORE
) -> tuple[GpuUuid, ...]:
    """GPUs that the container cannot avoid: of the IDs to include, and of what init containers leave to it. `kind` is the
    resource whose IDs bind the GPU."""
    ids: set[str] = set()
    if offer.kind is kind:
        ids.update(offer.must_include)
    held = ledger.allocations.get(target.key)
    if held is not None:
        ids |= held.ids(kind)
    if not ids and target.container.kind is not ContainerKind.INIT:
        holders = ledger.holders[kind]
        ids |= {
            device
            for device in initial_ids(target.pod.uid, kind, ledger.allocations)
            if may_take_over(target, holders.get(DeviceId(device), frozenset()), ledger)
        }
    known = ledger.inventory.by_uuid()
    found = {split[0] for device in ids if (split := split_device_id(device)) is not None and split[0] in known}
    return tuple(sorted(found, key=lambda uuid: known[uuid].index))


def full_of_shares(target: Target, ledger: Ledger, policy: Policy) -> frozenset[GpuUuid]:
    """GPUs that have as many sharing containers as they can serve. Init containers are over before the others start."""
    if policy.max_shares_of_gpu is None or policy.names.wanted(target.container, ResourceKind.VCORE) >= CORES_PER_GPU:
        return frozenset()
    shares = Counter(
        gpu
        for key, held in ledger.allocations.items()
        if not held.is_whole and held.kind is not ContainerKind.INIT and key != target.key
        for gpu in held.gpus[:1]
    )
    return frozenset(gpu for gpu, count in shares.items() if count >= policy.max_shares_of_gpu)


def _whole_of_others(target: Target | None, ledger: Ledger) -> frozenset[GpuUuid]:
    """Whole GPUs come with all their memory, whether it was asked for or not. Those of the pod's own init containers are
    handed on."""
    return memory_share.whole_gpus(
        held
        for key, held in ledger.allocations.items()
        if target is None or not may_take_over(target, frozenset({key}), ledger)
    )


def _own_initial(target: Target, ledger: Ledger) -> tuple[dict[GpuUuid, int], dict[GpuUuid, int]]:
    """Cores and blocks by GPU that only the pod's init containers hold: the kubelet hands them on."""
    cores: dict[GpuUuid, int] = {}
    blocks: dict[GpuUuid, set[DeviceId]] = {}
    for key, held in ledger.allocations.items():
        if key.pod_uid != target.pod.uid or held.kind is not ContainerKind.INIT or key == target.key:
            continue
        for device in held.vmemory_ids if held.gpus and not held.is_whole else ():
            if may_take_over(target, ledger.holders[ResourceKind.VMEMORY].get(device, frozenset()), ledger):
                blocks.setdefault(held.gpus[0], set()).add(device)
    for core in initial_ids(target.pod.uid, ResourceKind.VCORE, ledger.allocations):
        keys = ledger.holders[ResourceKind.VCORE].get(DeviceId(core), frozenset())
        if keys != {target.key} and may_take_over(target, keys, ledger):
            gpu = GpuUuid(core.partition("::")[0])
            cores[gpu] = cores.get(gpu, 0) + 1
    return cores, {gpu: len(ids) for gpu, ids in blocks.items()}


def may_take_over(target: Target, keys: frozenset[ContainerKey], ledger: Ledger) -> bool:
    """All holders are the container itself or init containers of its pod, whose IDs the kubelet hands on."""
    return all(
        key == target.key
        or (
            key.pod_uid == target.pod.uid
            and (held := ledger.allocations.get(key)) is not None
            and held.kind is ContainerKind.INIT
        )
        for key in keys
    )
