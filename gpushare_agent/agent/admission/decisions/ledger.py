"""The ledger as one container sees it: the account of each GPU, and which IDs no other container has. Pure.

What the pod's own init containers have is reusable: the kubelet passes it on. The arithmetic is placement/gpu_account.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from gpushare_agent.agent.admission.decisions.identity import Target, initial_allocations, initial_ids
from gpushare_agent.core.model.allocations import NO_CHARGE, Allocation, Charge, ContainerKey, add_charges, charges_of
from gpushare_agent.core.model.device_ids import OfferedIds
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import CORES_PER_GPU, DeviceId, GpuUuid, named_gpus
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import Request, ResourceKind, ResourceNames, ServedUnits, request_of
from gpushare_agent.core.placement.gpu_account import GpuAccount, account_of
from gpushare_agent.core.placement.gpu_choice import accepting, choice_of
from gpushare_agent.core.placement.place import SharePolicy


class Policy(Struct, frozen=True, kw_only=True):
    """The settings that decide placement."""

    names: ResourceNames
    share_policy: SharePolicy = "binpack"
    share_mode: bool = True
    max_shares_of_gpu: int | None = None
    """Sharing containers that one GPU can serve: MPS has a bound on its clients."""
    node_name: str = ""
    """If an extender has chosen this node for a pod, its choice of GPUs counts."""


class Ledger(Struct, frozen=True, kw_only=True):
    """What is allocated, as seen by one container: by others on each GPU, and the containers that have each ID."""

    inventory: GpuInventory
    charges: Mapping[GpuUuid, Charge]
    holders: Mapping[ResourceKind, Mapping[DeviceId, frozenset[ContainerKey]]]
    allocations: Mapping[ContainerKey, Allocation]

    def accounts(self, names: ResourceNames) -> list[GpuAccount]:
        """Each GPU as everybody sees it."""
        return [account_of(gpu, names, self.charges.get(gpu.uuid, NO_CHARGE)) for gpu in self.inventory.gpus]


class Case(Struct, frozen=True, dict=True):
    """One container, the IDs of one resource that the kubelet offers or has allocated to it, and the ledger without it. The
    IDs are checked against the ledger. What follows from these is worked out once, when it is asked for."""

    target: Target
    kind: ResourceKind
    ids: Collection[DeviceId]
    ledger: Ledger
    policy: Policy
    must_include: Sequence[DeviceId] = ()

    def __str__(self) -> str:
        return f"pod {self.target.pod.namespace}/{self.target.pod.name}, container {self.target.container.name}"

    @cached_property
    def asked(self) -> Mapping[ResourceKind, int]:
        """Units of each resource that the container asks for."""
        return self.policy.names.asked(self.target.container)

    @cached_property
    def request(self) -> Request:
        return request_of(self.target.container, self.policy.names)

    @cached_property
    def part_kind(self) -> ResourceKind | None:
        """The resource of parts of GPUs that the container asks for."""
        return self.policy.names.part_kind(self.target.container)

    @cached_property
    def resource(self) -> str:
        """The name by which the container asks for what the IDs are of."""
        return self.policy.names.name_in(self.target.container, self.kind)

    @cached_property
    def own(self) -> Allocation | None:
        return self.ledger.allocations.get(self.target.key)

    @cached_property
    def free(self) -> OfferedIds:
        """The IDs that no other container has by our ledger.

        The rest of an offer is allocated: the kubelet forgot a container. This check exists to catch that fault.
        """
        offered = self.ids if isinstance(self.ids, OfferedIds) else OfferedIds(self.ids)
        holders = self.ledger.holders[self.kind]
        taken = [device for device in offered.of(holders) if not self._may_take_over(holders[device])]
        return offered.but(taken) if taken else offered

    @cached_property
    def must_gpus(self) -> tuple[GpuUuid, ...]:
        """GPUs that the container cannot avoid: those of the IDs to include and of what init containers leave to it."""
        kind = next((one for one in self.asked if one.binds_gpu), ResourceKind.VCORE)
        ids = set(self.must_include) if self.kind is kind else set[DeviceId]()
        if self.own is not None:
            ids |= self.own.ids_of(kind)
        # The kubelet passes an init container's IDs on to this container before new ones, though it has not said so yet.
        if not ids and self.target.container.kind is not ContainerKind.INIT:
            holders = self.ledger.holders[kind]
            handed_on = initial_ids(self.target.pod, kind, self.ledger.allocations)
            ids |= {device for device in handed_on if self._may_take_over(holders.get(device, frozenset()))}
        named = set(named_gpus(ids))
        return tuple(
            [uuid for _, uuid in sorted([(g.index, g.uuid) for g in self.ledger.inventory.gpus if g.uuid in named])]
        )

    @cached_property
    def served(self) -> Mapping[GpuUuid, ServedUnits]:
        """The GPUs that serve the resource of parts by which the container asks for units."""
        names, container = self.policy.names, self.target.container
        if (kind := self.part_kind) is None:
            return {}
        resource, layout = names.name_in(container, kind), kind.layout(names)
        found = ((gpu.uuid, layout.served(gpu)) for gpu in self.ledger.inventory.gpus)
        # By name: a GPU serves one of NVIDIA's names, and the container asks for one.
        return {uuid: served for uuid, served in found if served is not None and served.resource == resource}

    def accounts(
        self, *, offered: OfferedIds | None = None, only: Collection[GpuUuid] | None = None
    ) -> Sequence[GpuAccount]:
        """Each GPU as the container may use it: what the pod's own init containers hold is reusable, and a GPU
        that its annotations leave out has nothing free.

        `offered`, where not None, are the vcore IDs that the kubelet can hand out: a GPU has no more free cores than that.
        `only`, where not None, are the GPUs that are asked about.
        """
        names, kind, handed_on = self.policy.names, self.part_kind, self._handed_on()
        per_gpu = offered.by_gpu if offered is not None else None
        # A container that asks for no share opens no client of MPS: the bound on clients does not concern it.
        is_unlimited = self.request.cores >= CORES_PER_GPU
        if kind is not None:
            is_unlimited = kind.layout(names).sharing is Sharing.TIME_SLICING
        max_shares = None if is_unlimited else self.policy.max_shares_of_gpu
        found = []
        for gpu in self.ledger.inventory.gpus:
            if only is not None and gpu.uuid not in only:
                continue
            charge, reusable = self.ledger.charges.get(gpu.uuid, NO_CHARGE), handed_on.get(gpu.uuid, NO_CHARGE)
            if kind is not None:  # those that init containers hand on are free for it
                charge = charge.plus(Charge(part=reusable.part), -1)
            cores = CORES_PER_GPU if per_gpu is None else per_gpu[gpu.uuid]
            found.append(account_of(gpu, names, charge, reusable, max_shares=max_shares, offered_cores=cores))
        return accepting(choice_of(self.target.pod.annotations), found)

    def _handed_on(self) -> dict[GpuUuid, Charge]:
        """What only the pod's init containers have, without the container itself: the kubelet hands it on."""
        target, allocations = self.target, self.ledger.allocations
        inits = {one.key for one in initial_allocations(target.pod, allocations)} - {target.key}
        # Most pods have no init container with a GPU; the sums below are for those that have one.
        if not inits:
            return {}
        others = [one for key, one in allocations.items() if key.pod_uid == target.pod.uid and key != target.key]
        found = charges_of(others)
        add_charges(found, charges_of(one for one in others if one.key not in inits), -1)
        return found

    def _may_take_over(self, keys: frozenset[ContainerKey]) -> bool:
        """The containers are this one itself or init containers of its pod, whose IDs the kubelet hands on."""
        return all(
            key == self.target.key
            or (
                key.pod_uid == self.target.pod.uid
                and (allocation := self.ledger.allocations.get(key)) is not None
                and allocation.kind is ContainerKind.INIT
            )
            for key in keys
        )
