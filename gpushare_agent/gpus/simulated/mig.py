"""MIG instances of simulated GPUs: made of the profiles that the faults file names, followed as the file changes.

State owned: the instances seen so far. As with NVML an instance that is gone stays while a container has it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from gpushare_agent.model.gpus import Gpu, GpuInventory, Health, MigAttributes, MigPlace
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.topology import Link, LinkKind, Topology
from gpushare_agent.placement.topology_tree import build_topology

PROFILE = re.compile(r"(?:(?P<ci>\d)c\.)?(?P<gi>\d)g\.(?P<gb>\d{1,3})gb(?:[+-][a-z.]{2,6})?")
MAX_INSTANCES = 7
"""Of one GPU."""
_MULTIPROCESSORS_PER_SLICE = 14
"""As an A100 has."""

_UUID_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated-mig.gpushare-agent")
_GONE = "the MIG instance does not exist any more: its GPU was repartitioned while a container had it (simulated)"
_NO_INSTANCES = "MIG mode is enabled and the GPU has no instances (simulated)"


class SimulatedInstances:
    def __init__(self) -> None:
        self._known: dict[GpuUuid, Gpu] = {}

    def divide(
        self, inventory: GpuInventory, profiles: Mapping[int, Sequence[str]], in_use: Collection[GpuUuid]
    ) -> GpuInventory:
        """The inventory with the GPUs of `profiles`, by index, divided."""
        if not profiles and not self._known:
            return inventory
        before, self._known = self._known, {}
        modes = tuple(replace(gpu, mig_mode=gpu.index in profiles) for gpu in inventory.gpus)
        inventory = replace(inventory, gpus=modes)
        for parent in inventory.gpus:
            for number, profile in enumerate(profiles.get(parent.index, ())):
                self._add(_instance(parent, number, profile), before, len(inventory.gpus))
        for gpu in before.values():
            if gpu.uuid not in self._known and gpu.uuid in in_use:
                mig = replace(gpu.mig, is_gone=True) if gpu.mig is not None else None
                self._known[gpu.uuid] = replace(gpu, mig=mig, health=Health.UNHEALTHY, unhealthy_reason=_GONE)
        divided = {gpu.mig.parent for gpu in self._known.values() if gpu.mig is not None}
        empty = {index for index, of_gpu in profiles.items() if not of_gpu}
        gpus = [
            replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=_NO_INSTANCES) if gpu.index in empty else gpu
            for gpu in inventory.gpus
            if gpu.uuid not in divided
        ]
        return replace(
            inventory,
            gpus=(*gpus, *sorted(self._known.values(), key=lambda gpu: gpu.index)),
            divided=tuple(gpu for gpu in inventory.gpus if gpu.uuid in divided),
            topology=_topology(inventory, self._known.values()),
        )

    def _add(self, gpu: Gpu, before: Mapping[GpuUuid, Gpu], first: int) -> None:
        taken = {known.index for known in (*before.values(), *self._known.values())}
        free = next(index for index in range(first, first + len(taken) + 1) if index not in taken)
        self._known[gpu.uuid] = replace(gpu, index=before[gpu.uuid].index if gpu.uuid in before else free)


def _instance(parent: Gpu, number: int, profile: str) -> Gpu:
    size = PROFILE.fullmatch(profile)
    memory_mib = int(size["gb"]) * 1024 if size else 0
    gi_slices = int(size["gi"]) if size else 0
    ci_slices = int(size["ci"] or gi_slices) if size else 0
    own = uuid.uuid5(_UUID_SPACE, f"{parent.uuid}/{number}/{profile}")
    return replace(
        parent,
        uuid=GpuUuid(f"MIG-{own}"),
        name=f"{parent.name} MIG {profile}",
        memory_mib=memory_mib,
        nvlinks=(),
        mig=MigPlace(
            profile=profile, number=number, parent=parent.uuid, parent_index=parent.index, gi=number + 1, ci=0,
            gi_cap=9 * (number + 1) + 3, ci_cap=9 * (number + 1) + 4,
            attributes=MigAttributes(
                memory_mib=memory_mib, gi_slices=gi_slices, ci_slices=ci_slices,
                multiprocessors=_MULTIPROCESSORS_PER_SLICE * ci_slices, copy_engines=gi_slices,
            ),
        ),
    )  # fmt: skip


def _topology(inventory: GpuInventory, instances: Collection[Gpu]) -> Topology:
    of = {gpu.index: gpu.mig.parent_index for gpu in instances if gpu.mig is not None}
    size = max((*(gpu.index for gpu in inventory.gpus), *of)) + 1
    physical = [of.get(index, index if index < len(inventory.gpus) else None) for index in range(size)]
    numa = [inventory.gpus[index].numa_node if index is not None else None for index in physical]

    def link(a: int, b: int) -> Link:
        first, second = physical[a], physical[b]
        if a == b:
            return Link(kind=LinkKind.SELF)
        if first is None or second is None:
            return Link(kind=LinkKind.SYS)
        if first == second:
            return Link(kind=LinkKind.PIX)
        found = inventory.topology.link(first, second)
        return Link(kind=LinkKind.NODE) if found.kind is LinkKind.NVLINK and {a, b} & of.keys() else found

    return build_topology([[link(a, b) for b in range(size)] for a in range(size)], numa)
