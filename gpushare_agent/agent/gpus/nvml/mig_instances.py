"""MIG on demand through NVML: how a GPU can be divided and is, and one instance made or removed. Blocking.

This needs the driver's capability mig/config, and mig/monitor to see the MIG devices that others made. NVML answers
INSUFFICIENT_RESOURCES for a place that is taken and for whatever else is used up, and IN_USE while a process, or another
client of NVML, has the instance open. It may remove a compute instance and then refuse that of the GPU instance. GPU
instance IDs are used again: an instance is removed only while its profile, its start, and the UUIDs of its compute instances
are those that the caller means. Handles of instances are asked for in each call, because others remove instances, too.

State owned, by `MigLayouts`: the profiles and places of each GPU, for one opening of NVML, and the last layouts.

Source: NVML API reference, "Multi Instance GPU Management"; who may list what: NVIDIA's open kernel modules,
kernel_mig_manager.c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_uint
from functools import partial
from typing import Any

import pynvml
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.gpus.nvml.mig import DriverProfile, call_versions, find_instances, profile_name, read_profiles
from gpushare_agent.agent.gpus.nvml.session import UUID_TEXT, CallError, NvmlSession, ask, call, unusable
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.mig import MigComputeInstance, MigGpuInstance, MigLayout, MigPlacement, MigProfile
from gpushare_agent.core.model.names import GpuUuid

_ROOM = 64
"""Entries of a list, and memory slices: more than any GPU has."""
_GONE = ("NOT_FOUND", "INVALID_ARGUMENT")
"""Of an instance that was removed meanwhile."""
_NO_SUCH = ("NOT_SUPPORTED", "INVALID_ARGUMENT")
"""Of a profile that the GPU does not have."""
_NO_RIGHT = (
    "the driver does not let this process make, remove or list MIG instances (NVML: {error}): give it the driver's"
    " capabilities mig/config and mig/monitor, by the component driver-from-host or by nvidia-mig-monitor"
)
_TAKEN = "another instance lies there, or has the last engine of a kind: see `nvidia-smi mig -lgi`"
_USED = "a process, or a program that reads its state, has it open"

Devices = Mapping[tuple[int, int], str]
"""The UUIDs of MIG devices by GPU instance and compute instance."""


class MigLayouts(Struct, eq=False):
    session: NvmlSession
    _opening: int = 0
    _profiles: dict[GpuUuid, dict[int, DriverProfile]] = field(default_factory=dict)
    _placed: dict[GpuUuid, tuple[MigProfile, ...]] = field(default_factory=dict)
    _compute_profiles: dict[tuple[GpuUuid, int], dict[int, int]] = field(default_factory=dict)
    """By the ID of the GPU instance profile."""
    _last: dict[GpuUuid, MigLayout] = field(default_factory=dict)

    def profiles(self, uuid: GpuUuid, handle: Any) -> Mapping[int, DriverProfile]:
        """The profiles of a GPU by ID. Raises CallError, DriverLostError."""
        if self._opening != self.session.openings:
            self._opening = self.session.openings
            for known in (self._profiles, self._placed, self._compute_profiles):
                known.clear()
        if uuid not in self._profiles:
            self._profiles[uuid] = read_profiles(handle)
        return self._profiles[uuid]

    def read(self, gpu: Gpu, handle: Any, devices: Devices) -> None:
        """Reads a GPU in MIG mode with these MIG devices. Raises DriverLostError."""
        try:
            profiles = self.profiles(gpu.uuid, handle)
            if gpu.uuid not in self._placed:
                self._placed[gpu.uuid] = _placed(gpu, handle, profiles)
            placed = self._placed[gpu.uuid]
            found = [(one.id, gi) for one in placed for gi in _gpu_instances(handle, one.id)]
            listed = [self._instance(gpu.uuid, profile, gi, devices) for profile, gi in found]
        except CallError as error:
            # A list that cannot be read does not say that instances are gone.
            why = _NO_RIGHT.format(error=error) if error.name == "NO_PERMISSION" else f"NVML: {error}"
            self._last[gpu.uuid] = replace(self._before(gpu.uuid), problem=why)
            return
        self._last[gpu.uuid] = MigLayout(
            parent=gpu.uuid,
            slices=max(start + one.size for one in placed for start in one.starts),
            profiles=placed,
            instances=tuple(sorted((one for one in listed if one is not None), key=lambda one: one.gi)),
        )

    def keep(self, gpus: Mapping[GpuUuid, str]) -> tuple[MigLayout, ...]:
        """The layouts of these GPUs, as they were last read; the others are forgotten. The text is why a GPU was not read
        now, empty where it was."""
        last = {uuid: self._before(uuid) for uuid in gpus}
        self._last = {uuid: replace(last[uuid], problem=why) if why else last[uuid] for uuid, why in gpus.items()}
        return tuple(self._last.values())

    def _before(self, uuid: GpuUuid) -> MigLayout:
        return self._last.get(uuid) or MigLayout(parent=uuid)

    def _instance(self, uuid: GpuUuid, profile: int, gi: Any, devices: Devices) -> MigGpuInstance | None:
        """None where it was removed meanwhile. Raises CallError, DriverLostError."""
        try:
            if (key := (uuid, profile)) not in self._compute_profiles:
                self._compute_profiles[key] = _compute_profiles(gi)
            return _read_instance(gi, self._compute_profiles[key], uuid, lambda: devices)
        except CallError as error:
            if error.name in _GONE:
                return None
            raise


def create_instance(session: NvmlSession, place: MigPlacement, *, is_new: bool = False) -> MigGpuInstance:
    """As NodeDriver has it."""
    what = f"making a MIG instance at memory slice {place.start} of GPU {place.parent}"
    with _gpu(session, place.parent, what, _TAKEN) as handle:
        size = dict(_places(handle, place.profile)).get(place.start)
        if size is None:
            raise NotFound(f"{what}: the MIG profile with ID {place.profile} has no such place")
        # A process that was killed between the two calls has left the GPU instance.
        there = ((one, call("nvmlGpuInstanceGetInfo", one)) for one in _gpu_instances(handle, place.profile))
        gi = next((one for one, info in there if info.placement.start == place.start), None)
        if gi is not None and is_new:
            raise Conflict(f"{what}: {_TAKEN}")
        if gi is None:
            wanted = pynvml.c_nvmlGpuInstancePlacement_t(place.start, size)
            gi = call("nvmlDeviceCreateGpuInstanceWithPlacement", handle, place.profile, byref(wanted))
        profiles = _compute_profiles(gi)
        # The first of the largest: the other has the same slices, arranged for several GPUs.
        whole = max(profiles, key=lambda one: profiles[one])
        if not _compute_instances(gi, profiles):
            call("nvmlGpuInstanceCreateComputeInstance", gi, whole)
        made = _read_instance(gi, profiles, place.parent, partial(_devices, handle))
        if [one.slices for one in made.compute] != [profiles[whole]]:
            raise Conflict(f"{what}: others have divided the GPU instance {made.gi} there")
        return made


def destroy_instance(session: NvmlSession, parent: GpuUuid, instance: MigGpuInstance) -> None:
    """As NodeDriver has it."""
    what = f"removing the GPU instance {instance.gi} of GPU {parent}"
    with _gpu(session, parent, what, _USED) as handle:
        try:
            gi = call("nvmlDeviceGetGpuInstanceById", handle, instance.gi)
            profiles = _compute_profiles(gi)
            now = _read_instance(gi, profiles, parent, partial(_devices, handle))
        except CallError as error:
            # NOT_SUPPORTED: MIG mode was switched off, and no instance outlives that.
            if error.name in (*_GONE, "NOT_SUPPORTED"):
                return
            raise
        if (now.profile, now.start) != (instance.profile, instance.start):
            return  # the ID is another instance's now
        if others := {one.uuid for one in now.compute} - {one.uuid for one in instance.compute}:
            raise Conflict(f"{what}: others have made {', '.join(sorted(others))} in it")
        parts = [("nvmlComputeInstanceDestroy", one) for one in _compute_instances(gi, profiles)]
        for name, part in (*parts, ("nvmlGpuInstanceDestroy", gi)):
            try:
                call(name, part)
            except CallError as error:
                if error.name not in _GONE:
                    raise


@contextmanager
def _gpu(session: NvmlSession, uuid: GpuUuid, what: str, conflict: str) -> Iterator[Any]:
    """The handle of a GPU; errors of its calls inside are those of NodeDriver."""
    with session.used(what):
        if (handle := session.handles().get(uuid)) is None:
            raise NotFound(f"{what}: the driver does not list the GPU")
        try:
            yield handle
        except CallError as error:
            kinds: dict[str, tuple[type[AgentError], str]] = {
                "NO_PERMISSION": (Rejected, _NO_RIGHT.format(error=error)),
                **dict.fromkeys(("INSUFFICIENT_RESOURCES", "IN_USE"), (Conflict, f"{error}: {conflict}")),
                "NOT_SUPPORTED": (NotFound, f"{error}: MIG mode is off"),
                **dict.fromkeys(_GONE, (Conflict, f"{error}: it was removed meanwhile")),
            }
            kind, text = kinds.get(error.name, (Unavailable, str(error)))
            raise kind(f"{what}: {text}") from error


def _listed(name: str, handle: Any, number: int, kind: Any) -> list[Any]:
    """A list that C fills. Raises CallError, DriverLostError."""
    room, count = (kind * _ROOM)(), c_uint(_ROOM)
    call(name, handle, number, room, byref(count))
    return list(room[: min(count.value, _ROOM)])


def _places(handle: Any, profile: int) -> list[tuple[int, int]]:
    """Start and size of each, none of a profile that the GPU does not have. Raises CallError, DriverLostError."""
    name = "nvmlDeviceGetGpuInstancePossiblePlacements"
    try:
        places = _listed(name, handle, profile, pynvml.c_nvmlGpuInstancePlacement_t)
    except CallError as error:
        if error.name in _NO_SUCH:
            return []
        raise
    if any(place.size == 0 or place.start + place.size > _ROOM for place in places):
        raise unusable(name, f"no GPU has more than {_ROOM} memory slices")
    return sorted((place.start, place.size) for place in places)


def _placed(gpu: Gpu, handle: Any, profiles: Mapping[int, DriverProfile]) -> tuple[MigProfile, ...]:
    """Raises CallError, DriverLostError."""
    placed = []
    for one in profiles.values():
        if places := _places(handle, one.id):
            name = profile_name(one, one.attributes, gpu.memory_mib)
            starts, sizes = zip(*places, strict=True)
            placed.append(
                MigProfile(
                    id=one.id, name=name, size=max(sizes), starts=starts, most=one.most, attributes=one.attributes
                )
            )
    if not placed:
        raise unusable("nvmlDeviceGetGpuInstanceProfileInfo", "the GPU has no profiles")
    return tuple(placed)


def _gpu_instances(handle: Any, profile: int) -> list[Any]:
    """Raises CallError, DriverLostError."""
    return _listed("nvmlDeviceGetGpuInstances", handle, profile, pynvml.c_nvmlGpuInstance_t)


def _compute_profiles(gi: Any) -> dict[int, int]:
    """The slices of each compute instance profile, by ID. Raises CallError, DriverLostError."""
    name, found = "nvmlGpuInstanceGetComputeInstanceProfileInfo", {}
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = call_versions(name, gi, number, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
        except CallError as error:
            # A driver that is older than nvidia-ml-py does not know the last ones.
            if error.name not in _NO_SUCH:
                raise
        else:
            found[info.id] = info.sliceCount
    if not found:
        raise CallError("NOT_FOUND", f"the GPU instance is gone ({name})")
    return found


def _compute_instances(gi: Any, profiles: Mapping[int, int]) -> list[Any]:
    """Raises CallError, DriverLostError."""
    listed = "nvmlGpuInstanceGetComputeInstances"
    return [one for number in profiles for one in _listed(listed, gi, number, pynvml.c_nvmlComputeInstance_t)]


def _read_instance(
    gi: Any, profiles: Mapping[int, int], parent: GpuUuid, devices: Callable[[], Devices]
) -> MigGpuInstance:
    """`devices` is asked where the driver does not tell a UUID. Raises CallError, DriverLostError."""
    info, compute = call("nvmlGpuInstanceGetInfo", gi), []
    for handle in _compute_instances(gi, profiles):
        one = call("nvmlComputeInstanceGetInfo", handle)
        uuid = ask("nvmlDeviceGetUUID", one.device) or ""
        # Some drivers give the GPU's handle here. The walk over all MIG devices takes seconds on a busy node.
        if uuid == parent or UUID_TEXT.fullmatch(uuid) is None:
            uuid = devices().get((info.id, one.id), "")
        compute.append(MigComputeInstance(ci=one.id, uuid=uuid, slices=profiles.get(one.profileId, 0)))
    return MigGpuInstance(
        gi=info.id,
        profile=info.profileId,
        start=info.placement.start,
        size=info.placement.size,
        compute=tuple(sorted(compute, key=lambda one: one.ci)),
    )


def _devices(handle: Any) -> Devices:
    """Raises DriverLostError."""
    return {
        (gi, ci): one.uuid
        for one in find_instances(handle)
        # It may go away between the calls.
        if (gi := ask("nvmlDeviceGetGpuInstanceId", one.handle)) is not None
        and (ci := ask("nvmlDeviceGetComputeInstanceId", one.handle)) is not None
    }
