"""The allocation cache: which device IDs each container has. In memory, changed only by the synchronous methods below.

State owned: `_allocations` by container, and for each resource the holders of each device ID. An ID may have several
holders, all of one pod: the kubelet passes an init container's IDs on to the containers after it without any release
(measured, docs/explanation/architecture.md), so use is counted by distinct IDs. The counts by GPU are kept too, because
every admission call reads them and a node has thousands of IDs.

The kubelet's records are the truth; this cache is rebuilt from them at start and reconciled with them afterwards. It
exists because the kubelet may offer an ID that it has forgotten to be taken.

`_resized` has the shares whose size was changed while they run (admission/resizing.py decides and calls). The kubelet's IDs
stay what they are, so a GPU has two counts: what is booked, which only growth may fill up, and what is used, which new
containers see: the greater of what is booked and of the IDs that the kubelet has handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

from msgspec.structs import replace

from gpushare_agent.admission.decisions.ledger import Ledger
from gpushare_agent.model.allocations import Allocation, ContainerKey, ResizedShare
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import DeviceId, GpuUuid, PodUid, gpu_of
from gpushare_agent.model.resources import ResourceKind
from gpushare_agent.model.units import parts_of

K = TypeVar("K", GpuUuid, DeviceId)


class AllocationCache:
    """All allocations of the node. Not thread-safe: event loop only."""

    def __init__(self) -> None:
        self._allocations: dict[ContainerKey, Allocation] = {}
        self._pods: dict[PodUid, dict[ContainerKey, None]] = {}
        self._holders: dict[ResourceKind, dict[DeviceId, frozenset[ContainerKey]]] = {kind: {} for kind in ResourceKind}
        self._on_gpu: dict[ResourceKind, dict[GpuUuid, int]] = {kind: {} for kind in ResourceKind if kind.binds_gpu}
        self._charges: dict[GpuUuid, dict[DeviceId, int]] = {}
        self._parts: dict[GpuUuid, Fraction] = {}
        self._resized: dict[ContainerKey, ResizedShare] = {}
        self._on_change: list[Callable[[Allocation | None, Allocation | None], None]] = []
        self.version = 0

    def subscribe(self, callback: Callable[[Allocation | None, Allocation | None], None]) -> None:
        """Call `callback(old, new)` synchronously after each change of a container; None stands for no allocation."""
        self._on_change.append(callback)

    def __len__(self) -> int:
        return len(self._allocations)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(sorted(self._allocations.values(), key=lambda a: a.key))

    def get(self, key: ContainerKey) -> Allocation | None:
        return self._allocations.get(key)

    def view(self) -> Mapping[ContainerKey, Allocation]:
        """The present allocations by container; valid until the next change."""
        return self._allocations

    def of_pod(self, uid: PodUid) -> tuple[Allocation, ...]:
        return tuple(self._allocations[key] for key in sorted(self._pods.get(uid, ())))

    def holders(self, kind: ResourceKind) -> Mapping[DeviceId, frozenset[ContainerKey]]:
        """The containers that have each ID; free IDs are absent."""
        return self._holders[kind]

    @property
    def resized(self) -> Mapping[ContainerKey, ResizedShare]:
        """By container, also of containers that the kubelet's records do not show (yet); valid until the next change."""
        return self._resized

    def put(self, allocation: Allocation) -> None:
        """Record a container's allocation in place of the one it had. A resized share stays so on the same GPU."""
        resized, granted = self._resized.get(allocation.key), None
        if resized is not None and not _is_of(resized, allocation):
            del self._resized[allocation.key]
        elif resized is not None:
            known = self._allocations.get(allocation.key)
            granted = known.granted if known is not None else resized.target
        allocation = replace(allocation, granted=granted)
        old = self._drop(allocation.key)
        self._allocations[allocation.key] = allocation
        self._pods.setdefault(allocation.key.pod_uid, {})[allocation.key] = None
        own = frozenset({allocation.key})
        for kind, ids in allocation.ids.items():
            holders = self._holders[kind]
            self._count(kind, [device for device in ids if device not in holders], 1)
            for device in ids:
                others = holders.get(device)
                holders[device] = own if others is None else others | own
        self._charge(allocation, 1)
        self._changed(old, allocation)

    def release(self, key: ContainerKey) -> Allocation | None:
        """Forget a container; returns its allocation, None where it had none."""
        self._resized.pop(key, None)
        old = self._drop(key)
        if old is not None:
            self._changed(old, None)
        return old

    def release_pod(self, uid: PodUid) -> tuple[Allocation, ...]:
        return tuple(old for key in sorted(self._pods.get(uid, ())) if (old := self.release(key)) is not None)

    def replace_all(self, allocations: Iterable[Allocation]) -> None:
        """Start over with the allocations that the kubelet's records show."""
        for key in list(self._allocations):
            self.release(key)
        for allocation in allocations:
            self.put(allocation)

    def book(self, share: ResizedShare) -> None:
        """Charge a share's GPU for `share.booked` from now on. What is enforced changes with `grant` alone."""
        self._resized[share.key] = share
        self._resized_changed(share.key)

    def grant(self, key: ContainerKey) -> None:
        """The isolation is to enforce the share's target from now on: its growth is booked, also on the disk."""
        self._resized_changed(key, is_granted=True)

    def forget_resized(self, key: ContainerKey) -> None:
        """The share has the size that the kubelet allocated, or the container is gone."""
        if self._resized.pop(key, None) is not None:
            self._resized_changed(key)

    def restore_resized(self, shares: Iterable[ResizedShare]) -> None:
        """What an earlier agent had granted, on top of the kubelet's records. Those that contradict them are left out."""
        for share in shares:
            allocation = self._allocations.get(share.key)
            if allocation is None or _is_of(share, allocation):
                self._resized[share.key] = share
                self._resized_changed(share.key, is_granted=True)

    def used_cores(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """Cores of each GPU that no new container can have: distinct allocated vcore IDs, and what is lent beyond them to
        shares that have grown; less what only `without` has."""
        return self._with_lent(self._id_counts(ResourceKind.VCORE, without), ResourceKind.VCORE, without)

    def used_gpu_mem(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """The same of gpu-mem units."""
        return self._with_lent(self._id_counts(ResourceKind.GPU_MEM, without), ResourceKind.GPU_MEM, without)

    def lent(self, kind: ResourceKind) -> dict[GpuUuid, int]:
        """Units of each GPU that are booked beyond its allocated IDs: no free ID stands for them."""
        return {gpu: count for gpu, count in self._net(kind, None).items() if count > 0}

    def extras(self, kind: ResourceKind) -> dict[ContainerKey, int]:
        """By container, by how much what is booked for it differs from its allocated IDs."""
        return {key: extra for key, share in self._resized.items() if (extra := self._extra(share, kind))}

    def _id_counts(self, kind: ResourceKind, without: ContainerKey | None) -> dict[GpuUuid, int]:
        used = dict(self._on_gpu[kind])
        left_out = self._allocations.get(without) if without is not None else None
        for device in left_out.ids_of(kind) if left_out is not None else ():
            if len(self._holders[kind][device]) == 1:
                _add(used, gpu_of(device), -1)
        return used

    def used_blocks(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, int]:
        """The same of memory blocks, which are charged to the GPU of the container's cores; GPUs that are shared only."""
        return self._with_lent(self._block_counts(without), ResourceKind.VMEMORY, without)

    def _block_counts(self, without: ContainerKey | None) -> dict[GpuUuid, int]:
        used = {gpu: len(charges) for gpu, charges in self._charges.items()}
        left_out = self._allocations.get(without) if without is not None else None
        if left_out is not None and (gpu := _charged_gpu(left_out)) is not None:
            charges = self._charges[gpu]
            _add(used, gpu, -sum(charges[device] == 1 for device in left_out.ids_of(ResourceKind.VMEMORY)))
        return used

    def ledger(self, inventory: GpuInventory, *, without: ContainerKey | None = None) -> Ledger:
        """What is allocated, less what only `without` has; valid until the next change."""
        return Ledger(
            inventory=inventory,
            used_cores=self.used_cores(without=without),
            used_blocks=self.used_blocks(without=without),
            used_gpu_mem=self.used_gpu_mem(without=without),
            used_parts=self.used_parts(without=without) if self._parts else {},
            holders=self._holders,
            allocations=self._allocations,
        )

    def booked_ledger(self, inventory: GpuInventory) -> Ledger:
        """As `ledger`, by what is booked: the part of a GPU that shares have given back counts as free. For growth only, for
        the kubelet still counts its IDs as taken."""
        kinds = (ResourceKind.VCORE, ResourceKind.VMEMORY, ResourceKind.GPU_MEM)
        cores, blocks, units = (self._net(kind, None) for kind in kinds)
        return replace(
            self.ledger(inventory),
            used_cores=_sum(self._id_counts(ResourceKind.VCORE, None), cores),
            used_blocks=_sum(self._block_counts(None), blocks),
            used_gpu_mem=_sum(self._id_counts(ResourceKind.GPU_MEM, None), units),
        )

    def booked_alone(self, key: ContainerKey) -> dict[ResourceKind, int]:
        """What is booked for a share and for no other container: by so much its GPU would have less used without it."""
        allocation, share = self._allocations[key], self._resized.get(key)
        gpu = _charged_gpu(allocation)
        charges = self._charges[gpu] if gpu is not None else {}
        alone = {
            kind: sum(len(self._holders[kind][device]) == 1 for device in allocation.ids_of(kind))
            for kind in (ResourceKind.VCORE, ResourceKind.GPU_MEM)
        }
        alone[ResourceKind.VMEMORY] = sum(
            charges.get(device) == 1 for device in allocation.ids_of(ResourceKind.VMEMORY)
        )
        return alone if share is None else {kind: count + self._extra(share, kind) for kind, count in alone.items()}

    def _with_lent(
        self, counts: dict[GpuUuid, int], kind: ResourceKind, without: ContainerKey | None
    ) -> dict[GpuUuid, int]:
        for gpu, net in self._net(kind, without).items():
            _add(counts, gpu, max(0, net))
        return counts

    def _net(self, kind: ResourceKind, without: ContainerKey | None) -> dict[GpuUuid, int]:
        """By how much what is booked on each GPU differs from its allocated IDs."""
        net: dict[GpuUuid, int] = {}
        for key, share in self._resized.items():
            if key != without:
                _add(net, share.gpu, self._extra(share, kind))
        return net

    def _extra(self, share: ResizedShare, kind: ResourceKind) -> int:
        """Of one share. Two cases in which less is given back than its size says:

        - The kubelet's records do not show the container: another, without a UID yet, has its IDs, and has them whole.
        - An init container of its pod has the same IDs: it runs again, with its whole share, when the pod's sandbox is made
          anew.
        """
        if kind is not ResourceKind.VCORE and kind is not share.kind:
            return 0
        booked, allocated = (
            (share.booked.cores, share.allocated.cores)
            if kind is ResourceKind.VCORE
            else (share.booked.memory, share.allocated.memory)
        )
        allocation = self._allocations.get(share.key)
        if allocation is None:
            return max(0, booked - allocated)
        own = allocation.ids_of(kind)
        if booked < len(own):
            booked = max(booked, sum(len(self._holders[kind][device]) > 1 for device in own))
        return booked - len(own)

    def _resized_changed(self, key: ContainerKey, *, is_granted: bool = False) -> None:
        """Subscribers hear of it as of a change of the allocation, also where no record shows the container."""
        allocation, share = self._allocations.get(key), self._resized.get(key)
        new = allocation
        if allocation is not None:
            granted = None if share is None else share.target if is_granted else allocation.granted
            new = self._allocations[key] = replace(allocation, granted=granted)
        self._changed(allocation, new)

    def _count(self, kind: ResourceKind, devices: Sequence[DeviceId], by: int) -> None:
        if not kind.binds_gpu:
            return
        on_gpu = self._on_gpu[kind]
        for device in devices:
            _add(on_gpu, gpu_of(device), by)
        if kind is ResourceKind.GPU:
            for gpu, part in parts_of(devices).items():
                self._parts[gpu] = self._parts.get(gpu, Fraction(0)) + by * part
                if not self._parts[gpu]:
                    del self._parts[gpu]

    def used_parts(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, Fraction]:
        """Of each GPU that units under NVIDIA's names have, less what only `without` has."""
        used = dict(self._parts)
        left_out = self._allocations.get(without) if without is not None else None
        own = left_out.unit_ids if left_out is not None else ()
        for gpu, part in parts_of(d for d in own if len(self._holders[ResourceKind.GPU][d]) == 1).items():
            used[gpu] -= part
        return {gpu: part for gpu, part in used.items() if part}

    def _charge(self, allocation: Allocation, by: int) -> None:
        gpu = _charged_gpu(allocation)
        if gpu is None:
            return
        charges = self._charges.setdefault(gpu, {})
        for device in allocation.ids_of(ResourceKind.VMEMORY):
            _add(charges, device, by)
        if not charges:
            del self._charges[gpu]

    def _drop(self, key: ContainerKey) -> Allocation | None:
        old = self._allocations.pop(key, None)
        if old is None:
            return None
        keys = self._pods[key.pod_uid]
        del keys[key]
        if not keys:
            del self._pods[key.pod_uid]
        for kind, ids in old.ids.items():
            holders = self._holders[kind]
            for device in ids:
                left = holders[device] - {key}
                if left:
                    holders[device] = left
                    continue
                del holders[device]
            self._count(kind, [device for device in ids if device not in holders], -1)
        self._charge(old, -1)
        return old

    def _changed(self, old: Allocation | None, new: Allocation | None) -> None:
        self.version += 1
        for callback in self._on_change:
            callback(old, new)


def _is_of(share: ResizedShare, allocation: Allocation) -> bool:
    """The share is of these devices, or of a part of them: the kubelet allocates one resource after the other."""
    return not allocation.is_whole and allocation.gpus[:1] in ((), (share.gpu,))


def _sum(counts: dict[GpuUuid, int], more: Mapping[GpuUuid, int]) -> dict[GpuUuid, int]:
    for gpu, count in more.items():
        _add(counts, gpu, count)
    return counts


def _charged_gpu(allocation: Allocation) -> GpuUuid | None:
    """The GPU to which its memory is charged block by block; None for whole GPUs, which come with all of it."""
    has_charge = allocation.gpus and allocation.memory_blocks and not allocation.is_whole
    return allocation.gpus[0] if has_charge else None


def _add(counts: dict[K, int], key: K, by: int) -> None:
    """Entries of zero are removed."""
    count = counts.get(key, 0) + by
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
