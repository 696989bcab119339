"""The MIG instances of simulated GPUs: those that the hardware has, and how they stand in the inventory.

`SimulatedHardware` answers as NVML does: an instance is where its slices, its count and its engines have room; the ID of a
GPU instance is used again; a UUID is new with each life of an instance. Instances of the faults file lie at the first place
with room, and stay there. State owned: the file next to the faults file (core/formats/simulated_gpus.py).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.json import encode
from msgspec.structs import replace

from gpushare_agent.agent.runtime.machine import this_boot
from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles
from gpushare_agent.core.formats.simulated_gpus import (
    PROFILE,
    Faults,
    MigFault,
    SimulatedInstance,
    SimulatedMig,
    parse_mig,
    read_regular,
)
from gpushare_agent.core.kit.regular_file import replace_whole
from gpushare_agent.core.model.errors import Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health, Link, LinkKind, Topology
from gpushare_agent.core.model.mig import (
    MigAttributes,
    MigComputeInstance,
    MigGpuInstance,
    MigLayout,
    MigPlace,
    MigPlacement,
    MigProfile,
)
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.placement.topology import build_topology

_MULTIPROCESSORS_PER_SLICE = 14
"""As an A100 has."""
_MIG_UUID_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "simulated-mig.gpushare-agent")
_GONE = "the MIG instance does not exist any more: its GPU was repartitioned while a container had it (simulated)"
_NO_INSTANCES = "MIG mode is enabled and the GPU has no instances (simulated)"

OfGpus = Mapping[int, Sequence[SimulatedInstance]]


class SimulatedHardware:
    """Its methods block, and may be called in several threads. `faults_file` None: there is no MIG."""

    def __init__(self, faults_file: Path | None) -> None:
        self._path = None if faults_file is None else faults_file.with_name(f"{faults_file.name}.mig")
        self._lock = threading.Lock()

    def instances(self, gpus: Iterable[Gpu], faults: Faults) -> OfGpus:
        """Those of each GPU in MIG mode, by its index."""
        with self._lock:
            return self._instances(gpus, faults)

    def create(
        self, gpus: Sequence[Gpu], faults: Faults, place: MigPlacement, *, is_new: bool = False
    ) -> MigGpuInstance:
        """As NodeDriver has it."""
        gpu, fault = _in_mig_mode(gpus, faults, place.parent)
        time.sleep(fault.create_s)
        with self._lock:
            found = self._instances(gpus, faults)
            profiles, own = mig_profiles(gpu.name, gpu.memory_mib), found[gpu.index]
            profile = next((one for one in profiles if one.id == place.profile and place.start in one.starts), None)
            if profile is None:
                raise NotFound(f"GPU {gpu.index} has no place for profile {place.profile} at {place.start} (simulated)")
            # Half of one is made whole.
            half = next(
                (one for one in own if (one.profile, one.start, one.uuid) == (profile.id, place.start, "")), None
            )
            if (half is None or is_new) and not has_room(profiles, _placed(profiles, own), profile, place.start):
                raise Conflict(f"no room for {profile.name} at {place.start} of GPU {gpu.index} (simulated)")
            gi = _free_id(own) if half is None else half.gi
            made = SimulatedInstance(
                gi=gi, name=profile.name, profile=profile.id, start=place.start, uuid=f"MIG-{uuid.uuid4()}"
            )  # fmt: skip
            self._save({**found, gpu.index: [*(one for one in own if one.gi != gi), made]})
        return _gpu_instance(made, profile, place.start)

    def destroy(self, gpus: Sequence[Gpu], faults: Faults, parent: GpuUuid, instance: MigGpuInstance) -> None:
        """As NodeDriver has it."""
        gpu, fault = _in_mig_mode(gpus, faults, parent)
        with self._lock:
            found = self._instances(gpus, faults)
            own = found[gpu.index]
            wanted = (instance.gi, instance.profile, instance.start)
            there = next((one for one in own if (one.gi, one.profile, one.start) == wanted), None)
            # Another life of it has another UUID: what was to go is gone.
            if there is None or (there.uuid and there.uuid not in {one.uuid for one in instance.compute}):
                return
            if there.number is not None:
                raise Rejected(f"the MIG instance {there.uuid} is one of the faults file: remove it there (simulated)")
            half = [replace(there, uuid="")] if fault.in_use == "gpu" else []
            if fault.in_use != "compute":
                self._save({**found, gpu.index: [*(one for one in own if one is not there), *half]})
            if fault.in_use:
                raise Conflict(f"the {fault.in_use} instance is in use by another client (simulated)")

    def _instances(self, gpus: Iterable[Gpu], faults: Faults) -> OfGpus:
        saved = self._read()
        if saved.keys() - faults.mig.keys():
            # A GPU that leaves MIG mode has no instance when it is back.
            saved = {index: own for index, own in saved.items() if index in faults.mig}
            with suppress(OSError):
                self._save(saved)
        return {
            gpu.index: tuple(_of_gpu(gpu, faults.mig[gpu.index], saved.get(gpu.index, ())))
            for gpu in gpus
            if gpu.index in faults.mig
        }

    def _read(self) -> OfGpus:
        """Nothing of an earlier boot, or of a file that is none: as a GPU after a reboot."""
        if self._path is not None:
            with suppress(OSError, ValueError, RecursionError):
                saved = parse_mig(read_regular(self._path))
                if saved.boot_id == this_boot():
                    return saved.gpus
        return {}

    def _save(self, gpus: OfGpus) -> None:
        if self._path is None:  # without a faults file no GPU is in MIG mode
            return
        saved = SimulatedMig(boot_id=this_boot(), gpus={index: tuple(own) for index, own in gpus.items()})
        replace_whole(self._path, encode(saved))


def _in_mig_mode(gpus: Iterable[Gpu], faults: Faults, parent: GpuUuid) -> tuple[Gpu, MigFault]:
    gpu = next((one for one in gpus if one.uuid == parent), None)
    if gpu is None or gpu.index not in faults.mig:
        raise NotFound(f"there is no GPU {parent} in MIG mode (simulated)")
    if gpu.index in faults.lost:
        raise Unavailable(f"GPU {gpu.index} is lost: {faults.lost[gpu.index]} (simulated)")
    fault = faults.mig_faults.get(gpu.index, MigFault())
    if fault.refused:
        raise Rejected(fault.refused)
    return gpu, fault


def _of_gpu(gpu: Gpu, names: Sequence[str], saved: Sequence[SimulatedInstance]) -> Iterator[SimulatedInstance]:
    """Those of the list in its order, then those that were made: these are where the file says, also if it was changed."""
    profiles = mig_profiles(gpu.name, gpu.memory_mib)
    made = [one for one in saved if one.number is None]
    listed = {one.number: one for one in saved if one.number is not None}
    # One that is in the list as before keeps its place, whatever was made or removed next to it.
    kept = {number: one for number, one in listed.items() if names[number : number + 1] == (one.name,)}
    for number, name in enumerate(names):
        if number not in kept:
            kept[number] = _listed(gpu, number, name, profiles, [*made, *kept.values()])
        yield kept[number]
    yield from sorted(made, key=lambda one: one.gi)


def _listed(
    gpu: Gpu, number: int, name: str, profiles: Sequence[MigProfile], others: Sequence[SimulatedInstance]
) -> SimulatedInstance:
    # `1c.3g.40gb` is a part of the computing of a `3g.40gb`.
    gi_name = name.partition("c.")[2] or name
    placed = _placed(profiles, others)
    profile = next((one for one in profiles if one.name == gi_name), None)
    free = (
        [start for start in profile.starts if has_room(profiles, placed, profile, start)] if profile is not None else []
    )
    return SimulatedInstance(
        gi=_free_id(others), name=name, number=number, start=free[0] if free else None,
        profile=profile.id if profile is not None and free else None,
        uuid=f"MIG-{uuid.uuid5(_MIG_UUID_SPACE, f'{gpu.uuid}/{number}/{name}')}",
    )  # fmt: skip


def _placed(profiles: Sequence[MigProfile], own: Iterable[SimulatedInstance]) -> list[tuple[MigProfile, int]]:
    by_id = {one.id: one for one in profiles}
    return [(by_id[one.profile], one.start) for one in own if one.profile in by_id and one.start is not None]


def _free_id(own: Sequence[SimulatedInstance]) -> int:
    taken = {one.gi for one in own}
    return next(gi for gi in range(1, len(taken) + 2) if gi not in taken)


def _gpu_instance(one: SimulatedInstance, profile: MigProfile, start: int) -> MigGpuInstance:
    compute = (MigComputeInstance(ci=0, uuid=one.uuid, slices=_sizes(one.name)[1]),) if one.uuid else ()
    return MigGpuInstance(gi=one.gi, profile=profile.id, start=start, size=profile.size, compute=compute)


def layout_of(gpu: Gpu, own: Iterable[SimulatedInstance], problem: str) -> MigLayout:
    """The GPU in MIG mode as NVML describes it."""
    profiles = mig_profiles(gpu.name, gpu.memory_mib)
    return MigLayout(
        parent=gpu.uuid,
        slices=max(one.size for one in profiles),
        profiles=profiles,
        instances=tuple(_gpu_instance(one, *placed) for one in own for placed in _placed(profiles, [one])),
        problem=problem,
    )


class SimulatedInstances:
    """State owned: the instances of the last poll, with their indexes."""

    def __init__(self) -> None:
        self._known: dict[GpuUuid, Gpu] = {}

    def partition(
        self, inventory: GpuInventory, instances: OfGpus, on_demand: Collection[int], in_use: Collection[GpuUuid]
    ) -> GpuInventory:
        """The inventory with the GPUs of `instances`, by index, partitioned; those of `on_demand` also without instances."""
        # No MIG at all: nothing is compared.
        if not instances and not self._known:
            return inventory
        before, self._known = self._known, {}
        modes = tuple(replace(gpu, mig_mode=gpu.index in instances) for gpu in inventory.gpus)
        inventory = replace(inventory, gpus=modes)
        for parent in inventory.gpus:
            # Without a compute instance it is no MIG device.
            devices = [one for one in instances.get(parent.index, ()) if one.uuid]
            for number, one in enumerate(devices):
                self._add(_instance(parent, number, one), before, len(inventory.gpus))
        for gpu in before.values():
            # As with NVML: its IDs are in the kubelet's records while a container has them.
            if gpu.uuid not in self._known and gpu.uuid in in_use:
                mig = replace(gpu.mig, is_gone=True) if gpu.mig is not None else None
                self._known[gpu.uuid] = unhealthy(replace(gpu, mig=mig), _GONE)
        partitioned = {gpu.mig.parent for gpu in self._known.values() if gpu.mig is not None}
        partitioned |= {gpu.uuid for gpu in inventory.gpus if gpu.index in on_demand}
        gpus = [
            replace(unhealthy(gpu, _NO_INSTANCES), is_withheld=True) if gpu.index in instances else gpu
            for gpu in inventory.gpus
            if gpu.uuid not in partitioned
        ]
        return replace(
            inventory,
            gpus=(*gpus, *sorted(self._known.values(), key=lambda gpu: gpu.index)),
            mig_partitioned=tuple(gpu for gpu in inventory.gpus if gpu.uuid in partitioned),
            topology=_topology(inventory, self._known.values()),
        )

    def _add(self, gpu: Gpu, before: Mapping[GpuUuid, Gpu], first: int) -> None:
        taken = {known.index for known in (*before.values(), *self._known.values())}
        free = next(index for index in range(first, first + len(taken) + 1) if index not in taken)
        self._known[gpu.uuid] = replace(gpu, index=before[gpu.uuid].index if gpu.uuid in before else free)


def unhealthy(gpu: Gpu, reason: str) -> Gpu:
    return replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason)


def _instance(parent: Gpu, number: int, one: SimulatedInstance) -> Gpu:
    attributes = _attributes(parent, one)
    # As a host's file of minors has them: 15 GPU instances a GPU, and 8 compute instances in each.
    cap = 9 * (15 * parent.minor + one.gi) + 3
    return replace(
        parent,
        uuid=GpuUuid(one.uuid),
        name=f"{parent.name} MIG {one.name}",
        memory_mib=attributes.memory_mib,
        nvlinks=(),
        mig=MigPlace(
            profile=one.name, number=number, parent=parent.uuid, parent_index=parent.index, gi=one.gi, ci=0, gi_cap=cap,
            ci_cap=cap + 1, attributes=attributes, profile_id=one.profile, start=one.start,
        ),
    )  # fmt: skip


def _attributes(parent: Gpu, one: SimulatedInstance) -> MigAttributes:
    gi_slices, slices, gb = _sizes(one.name)
    profile = next((p for p in mig_profiles(parent.name, parent.memory_mib) if p.id == one.profile), None)
    if profile is not None:
        whole = profile.attributes
        return replace(whole, ci_slices=slices, multiprocessors=whole.multiprocessors * slices // whole.ci_slices)
    return MigAttributes(
        memory_mib=gb * 1024, gi_slices=gi_slices, ci_slices=slices, copy_engines=gi_slices,
        multiprocessors=_MULTIPROCESSORS_PER_SLICE * slices,
    )  # fmt: skip


def _sizes(profile: str) -> tuple[int, int, int]:
    """Computing slices of the GPU instance and of the compute instance, and gigabytes, as the name has them."""
    size = PROFILE.fullmatch(profile)
    return (int(size["gi"]), int(size["ci"] or size["gi"]), int(size["gb"])) if size else (0, 0, 0)


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
        # MIG instances have no NVLinks.
        return Link(kind=LinkKind.NODE) if found.kind is LinkKind.NVLINK and {a, b} & of.keys() else found

    return build_topology([[link(a, b) for b in range(size)] for a in range(size)], numa)
