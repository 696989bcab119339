"""The allocation cache: which device IDs each container has. In memory, changed only by the synchronous methods below.

State owned: `_allocations` by container, and for each resource the holders of each device ID. An ID may have several
holders, all of one pod: the kubelet passes an init container's IDs on to the containers after it without any release
(measured, docs/explanation/architecture.md), so a pod is charged for distinct IDs. The charges of each pod and their sums by
GPU are held too, because every admission call reads them and a node has thousands of IDs.

The kubelet's records are the truth; the cache is rebuilt from them at start and reconciled with them later. It
exists because the kubelet may offer an ID that it has forgotten to be taken.

`_resized` has the shares whose size was changed while they run (admission/resizing.py decides and calls). The kubelet's IDs
stay the same, so a GPU has two counts. Only growth may fill it up to what is charged. New containers see what is used: the
greater of what is charged and the IDs that the kubelet has handed out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.ledger import Ledger
from gpushare_agent.core.model.allocations import (
    NO_CHARGE,
    Allocation,
    Charge,
    ContainerKey,
    ResizedShare,
    add_charges,
    charges_of,
)
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.resources import Measure, ResourceKind


class AllocationCache:
    """All allocations of the node. Not thread-safe: event loop only."""

    def __init__(self) -> None:
        self._allocations: dict[ContainerKey, Allocation] = {}
        self._pods: dict[PodUid, dict[ContainerKey, None]] = {}
        self._holders: defaultdict[ResourceKind, dict[DeviceId, frozenset[ContainerKey]]] = defaultdict(dict)
        self._of_pod: dict[PodUid, dict[GpuUuid, Charge]] = {}
        self._charges: dict[GpuUuid, Charge] = {}
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
        """The resized shares by container, also those that the kubelet's records do not show (yet); valid until the next
        change."""
        return self._resized

    def put(self, allocation: Allocation) -> None:
        """Replace a container's allocation. A resized share stays resized if the GPU is the same."""
        resized, resized_to = self._resized.get(allocation.key), None
        # Another allocation under the same key: a container that was admitted again, perhaps on another GPU.
        if resized is not None and not _is_of(resized, allocation):
            del self._resized[allocation.key]
        elif resized is not None:
            known = self._allocations.get(allocation.key)
            resized_to = known.resized_to if known is not None else resized.target
        allocation = replace(allocation, resized_to=resized_to)
        # Dropped whole and entered again: the IDs that it no longer has must lose it as their holder.
        old = self._drop(allocation.key)
        self._allocations[allocation.key] = allocation
        self._pods.setdefault(allocation.key.pod_uid, {})[allocation.key] = None
        # One set for all its IDs, which are thousands: most have no other holder.
        own = frozenset({allocation.key})
        for kind, ids in allocation.ids.items():
            holders = self._holders[kind]
            for device in ids:
                others = holders.get(device)
                holders[device] = own if others is None else others | own
        self._charge_pod(allocation.key.pod_uid)
        self._changed(old, allocation)

    def release(self, key: ContainerKey) -> Allocation | None:
        """Forget a container; returns its allocation, None if it had none."""
        # Also without an allocation: a restored size may wait for records that never come.
        self._resized.pop(key, None)
        old = self._drop(key)
        if old is not None:
            self._charge_pod(key.pod_uid)
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

    def charge(self, share: ResizedShare) -> None:
        """Charge a share's GPU for `share.charged` from now on. What is enforced changes with `resize` alone."""
        self._resized[share.key] = share
        self._resized_changed(share.key)

    def resize(self, key: ContainerKey) -> None:
        """The isolation is to enforce the share's target from now on: its growth is charged, also on the disk."""
        self._resized_changed(key, is_resized=True)

    def forget_resized(self, key: ContainerKey) -> None:
        """The share has the size that the kubelet allocated, or the container is gone."""
        if self._resized.pop(key, None) is not None:
            self._resized_changed(key)

    def restore_resized(self, shares: Iterable[ResizedShare]) -> None:
        """Adds what was resized before a restart to the kubelet's records. Those that contradict them are left out."""
        for share in shares:
            allocation = self._allocations.get(share.key)
            # Without one it counts too: the kubelet's records may not show the container yet, and its capacity is in
            # use.
            if allocation is None or _is_of(share, allocation):
                self._resized[share.key] = share
                self._resized_changed(share.key, is_resized=True)

    def charges(self, *, without: ContainerKey | None = None) -> dict[GpuUuid, Charge]:
        """What no new container can have of each GPU: what is allocated, and what shares that have grown
        borrow beyond it; less what only `without` has."""
        found = self._allocated(without)
        add_charges(found, {gpu: net.grown() for gpu, net in self._net(without).items()})
        return found

    def charges_of_pod(self, uid: PodUid) -> Mapping[GpuUuid, Charge]:
        """What is allocated to a pod, of each GPU; valid until the next change."""
        return self._of_pod.get(uid, {})

    def charges_for_growth(self) -> dict[GpuUuid, Charge]:
        """The same as `charges`, but the part of a GPU that shares have given back counts as free. For growth only: the
        kubelet still counts its IDs as taken."""
        found = self._allocated(None)
        add_charges(found, self._net(None))
        return found

    def charged_alone(self, key: ContainerKey) -> Charge:
        """What is charged of the GPU for this share alone. Without the share the GPU would be used by so much less."""
        gpu, share = self._allocations[key].gpus[0], self._resized.get(key)
        own = self._of_pod[key.pod_uid].get(gpu, NO_CHARGE)
        alone = own.plus(self._charges_of_pod(key.pod_uid, without=key).get(gpu, NO_CHARGE), -1)
        return alone if share is None else alone.plus(self._extra(share))

    def borrowed(self) -> dict[GpuUuid, Charge]:
        """What is charged on each GPU beyond its allocated IDs. No free ID stands for it."""
        return {gpu: borrowed for gpu, net in self._net(None).items() if (borrowed := net.grown()) != NO_CHARGE}

    def charge_differences(self) -> dict[ContainerKey, Charge]:
        """The difference between what is charged for each container and its allocated IDs, where there is one."""
        return {key: extra for key, share in self._resized.items() if (extra := self._extra(share)) != NO_CHARGE}

    def ledger(self, inventory: GpuInventory, *, without: ContainerKey | None = None) -> Ledger:
        """What is allocated, except what only `without` has; valid until the next change."""
        return Ledger(
            inventory=inventory,
            charges=self.charges(without=without),
            holders=self._holders,
            allocations=self._allocations,
        )

    def _allocated(self, without: ContainerKey | None) -> dict[GpuUuid, Charge]:
        found = dict(self._charges)
        if without is not None and without in self._allocations:
            add_charges(found, self._of_pod[without.pod_uid], -1)
            add_charges(found, self._charges_of_pod(without.pod_uid, without=without))
        return found

    def _charges_of_pod(self, uid: PodUid, *, without: ContainerKey | None = None) -> dict[GpuUuid, Charge]:
        return charges_of([self._allocations[key] for key in self._pods.get(uid, ()) if key != without])

    def _charge_pod(self, uid: PodUid) -> None:
        # Taken out and put in by pod: distinct IDs are counted in a pod, so a container alone has no charge to add.
        add_charges(self._charges, self._of_pod.pop(uid, {}), -1)
        if uid in self._pods:
            charges = self._of_pod[uid] = self._charges_of_pod(uid)
            add_charges(self._charges, charges)

    def _net(self, without: ContainerKey | None) -> dict[GpuUuid, Charge]:
        """The difference between what is charged on each GPU and its allocated IDs."""
        net: dict[GpuUuid, Charge] = {}
        for key, share in self._resized.items():
            if key != without:
                add_charges(net, {share.gpu: self._extra(share)})
        return net

    def _extra(self, share: ResizedShare) -> Charge:
        """The difference of one share. In two cases less is given back than its size says:

        - The kubelet's records do not show the container: another, without a UID yet, has its IDs, all of them.
        - An init container of its pod has the same IDs: it runs again, with its whole share, when the pod's sandbox is made
          again.
        """
        allocation = self._allocations.get(share.key)

        def extra(kind: ResourceKind, charged: int, allocated: int) -> int:
            if allocation is None:
                return max(0, charged - allocated)
            if allocation.claim is not None:
                return charged - allocated
            own = allocation.ids_of(kind)
            if charged < len(own):
                charged = max(charged, sum(len(self._holders[kind][device]) > 1 for device in own))
            return charged - len(own)

        cores = extra(ResourceKind.VCORE, share.charged.cores, share.allocated.cores)
        memory = extra(share.kind, share.charged.memory, share.allocated.memory)
        if share.kind.measure is Measure.UNITS:
            return Charge(cores=cores, units=memory)
        return Charge(cores=cores, blocks=memory)

    def _resized_changed(self, key: ContainerKey, *, is_resized: bool = False) -> None:
        """Subscribers are called as if the allocation had changed, even if no record shows the container."""
        allocation, share = self._allocations.get(key), self._resized.get(key)
        new = allocation
        if allocation is not None:
            resized_to = None if share is None else share.target if is_resized else allocation.resized_to
            new = self._allocations[key] = replace(allocation, resized_to=resized_to)
        self._changed(allocation, new)

    def _drop(self, key: ContainerKey) -> Allocation | None:
        old = self._allocations.pop(key, None)
        if old is None:
            return None
        keys = self._pods[key.pod_uid]
        del keys[key]
        if not keys:
            del self._pods[key.pod_uid]
        # As in `put`, one set for all IDs with the same holders: those that a container is named by after a restart.
        same = dict[frozenset[ContainerKey], frozenset[ContainerKey]]()
        for kind, ids in old.ids.items():
            holders = self._holders[kind]
            for device in ids:
                left = holders[device] - {key}
                if left:
                    holders[device] = same.setdefault(left, left)
                else:
                    del holders[device]
        return old

    def _changed(self, old: Allocation | None, new: Allocation | None) -> None:
        self.version += 1
        for callback in self._on_change:
            callback(old, new)


def _is_of(share: ResizedShare, allocation: Allocation) -> bool:
    """The share has these devices or some of them: the kubelet allocates one resource after the other."""
    return not allocation.is_whole and allocation.gpus[:1] in ((), (share.gpu,))
