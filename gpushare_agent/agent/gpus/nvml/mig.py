"""MIG through NVML: the profiles, which instances there are, what each is, and its nodes below /dev/nvidia-caps. Blocking.

Source: NVML API reference, "Multi Instance GPU Management"; NVIDIA's MIG user guide ("Device Nodes and Capabilities") for
the file of minor numbers; go-nvlib for how a profile's name is made of its slices and its memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpushare_agent.agent.gpus.nvml.session import UUID_TEXT, CallError, ask, call, unusable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.mig import MigAttributes, MigPlace
from gpushare_agent.core.model.names import GIB, MIB, GpuUuid

MINORS_FILE = Path("/proc/driver/nvidia-caps/mig-minors")

_EIGHTHS = 8
"""A GPU's memory has eight slices for instances."""
_MOST_INSTANCES = 64
_MAX_MINORS_BYTES = 1024 * 1024
_MINOR = re.compile(r"gpu(\d+)/gi(\d+)/(?:ci(\d+)/)?access (\d+)")
_SUFFIXES = {
    **dict.fromkeys((7, 8), "+me"),
    **dict.fromkeys((10, 11, 12, 17), "+gfx"),
    **dict.fromkeys((13, 14), "-me"),
    **dict.fromkeys((15, 16), "+me.all"),
}
"""Of GPU instance profiles that differ from another of the same size, by NVML_GPU_INSTANCE_PROFILE_…."""
_MOST_PROFILES = 64
_NAME = re.compile(r"(?:MIG )?([1-9]\d?g\.[1-9]\d{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})?)?)", re.ASCII)

CapMinors = Mapping[tuple[int, int, int | None], int]
"""By the parent's minor, the GPU instance and the compute instance (None: the GPU instance's own)."""


class DriverProfile(Struct, frozen=True, kw_only=True):
    """A GPU instance profile. `id` is the driver's, which its instances have; `name` is the driver's, empty where it has
    none, and `suffix` ends the name then. `most` is how many there can be on an empty GPU. `attributes` are those of an
    instance with one compute instance that has all of it."""

    id: int
    name: str
    suffix: str
    most: int
    attributes: MigAttributes


class FoundInstance(Struct, frozen=True, kw_only=True):
    """`number` is its place in the driver's list of its GPU's instances."""

    number: int
    uuid: GpuUuid
    handle: Any


def mig_mode(handle: Any) -> bool | None:
    """Whether MIG mode is on, None where the GPU or the driver knows none. Raises DriverLostError."""
    mode = ask("nvmlDeviceGetMigMode", handle)
    return bool(mode[0]) if mode is not None else None


def find_instances(handle: Any) -> list[FoundInstance]:
    """The instances of a GPU in MIG mode, as they are now: a place without an instance, and one that goes away meanwhile,
    is left out.

    Raises DriverLostError.
    """
    found = []
    # Up to the most that there can be: places in the list may be empty between others.
    for number in range(min(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0, _MOST_INSTANCES)):
        instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        # It may go away between the two calls.
        uuid = ask("nvmlDeviceGetUUID", instance) if instance is not None else None
        if uuid is not None and UUID_TEXT.fullmatch(uuid):
            found.append(FoundInstance(number=number, uuid=GpuUuid(uuid), handle=instance))
    return found


def read_profiles(handle: Any) -> dict[int, DriverProfile]:
    """The profiles by ID, in the driver's order: the same as long as NVML is open. Raises CallError, DriverLostError."""
    found = {}
    for number in range(_MOST_PROFILES):
        try:
            info = call_versions("nvmlDeviceGetGpuInstanceProfileInfo", handle, number)
        except CallError as error:
            if error.name == "INVALID_ARGUMENT":
                break  # so NVML ends the list
            if error.name != "NOT_SUPPORTED":
                raise
            continue
        attributes = MigAttributes(
            memory_mib=info.memorySizeMB,
            gi_slices=info.sliceCount,
            ci_slices=info.sliceCount,
            multiprocessors=info.multiprocessorCount,
            copy_engines=info.copyEngineCount,
            decoders=info.decoderCount,
            encoders=info.encoderCount,
            jpeg_engines=info.jpegCount,
            ofa_engines=info.ofaCount,
        )
        name = None
        # The first version has none, and a text of the driver may be of any bytes.
        with suppress(AttributeError, UnicodeDecodeError):
            name = _NAME.fullmatch(info.name)
        found[info.id] = DriverProfile(
            id=info.id,
            name=name[1] if name is not None else "",
            suffix=_SUFFIXES.get(number, ""),
            most=info.instanceCount,
            attributes=attributes,
        )
    return found


def call_versions(name: str, *arguments: Any) -> Any:
    """The newest version of an answer that both nvidia-ml-py and the driver have. Raises CallError, DriverLostError."""
    try:
        return call(name, *arguments)
    except CallError as error:
        if error.name not in ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"):
            raise
    return call(name, *arguments, 1)


def profile_name(profile: DriverProfile | None, attributes: MigAttributes, parent_mib: int) -> str:
    """As nvidia-smi has it; computed where the driver does not say, or the profile is unknown. Raises CallError: the memory
    of the GPU is unknown, after which profiles are named."""
    slices, computes = attributes.gi_slices, attributes.ci_slices
    if not (name := profile.name if profile is not None else ""):
        if not parent_mib:
            raise unusable(
                "nvmlDeviceGetMemoryInfo", "the memory of its GPU is unknown, after which profiles are named"
            )
        suffix = profile.suffix if profile is not None else ""
        name = f"{slices}g.{_gigabytes(attributes.memory_mib, parent_mib)}gb{suffix}"
    # `1c.3g.40gb`: NVIDIA's name of an instance with fewer compute slices than its GPU instance.
    return name if slices == computes else f"{computes}c.{name}"


def read_place(
    found: FoundInstance, *, parent: Gpu, parent_handle: Any, profiles: Mapping[int, DriverProfile], caps: CapMinors
) -> MigPlace:
    """Raises CallError, DriverLostError."""
    gi = call("nvmlDeviceGetGpuInstanceId", found.handle)
    ci = call("nvmlDeviceGetComputeInstanceId", found.handle)
    attributes = _attributes(found.handle)
    info = call("nvmlGpuInstanceGetInfo", call("nvmlDeviceGetGpuInstanceById", parent_handle, gi))
    return MigPlace(
        profile=profile_name(profiles.get(info.profileId), attributes, parent.memory_mib),
        number=found.number,
        parent=parent.uuid,
        parent_index=parent.index,
        gi=gi,
        ci=ci,
        gi_cap=caps.get((parent.minor, gi, None)),
        ci_cap=caps.get((parent.minor, gi, ci)),
        attributes=attributes,
        profile_id=info.profileId,
        start=info.placement.start,
    )


def read_cap_minors(path: Path) -> dict[tuple[int, int, int | None], int]:
    """The minor numbers, of lines such as `gpu0/gi1/access 12` and `gpu0/gi1/ci0/access 13`; empty without the file."""
    found = [match.groups() for line in _text(path).splitlines() if (match := _MINOR.fullmatch(line.strip()))]
    return {(int(gpu), int(gi), int(ci) if ci else None): int(minor) for gpu, gi, ci, minor in found}


def read_caps_major(path: Path) -> int:
    """The major number of all nodes in /dev/nvidia-caps, of a line such as `511 nvidia-caps` of /proc/devices; 0 without."""
    found = re.search(r"^ *([1-9][0-9]{0,3}) nvidia-caps$", _text(path), flags=re.M)
    return int(found[1]) if found is not None else 0


def _text(path: Path) -> str:
    """Empty without the file."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_MINORS_BYTES)
    except OSError:
        return ""


def _attributes(handle: Any) -> MigAttributes:
    found = call("nvmlDeviceGetAttributes", handle)
    return MigAttributes(
        memory_mib=found.memorySizeMB,
        gi_slices=found.gpuInstanceSliceCount,
        ci_slices=found.computeInstanceSliceCount,
        multiprocessors=found.multiprocessorCount,
        copy_engines=found.sharedCopyEngineCount,
        decoders=found.sharedDecoderCount,
        encoders=found.sharedEncoderCount,
        jpeg_engines=found.sharedJpegCount,
        ofa_engines=found.sharedOfaCount,
    )


def _gigabytes(mib: int, parent_mib: int) -> int:
    """The size in a profile's name: whole eighths of the GPU's memory, of which a part is the driver's."""
    # The driver keeps a part of each slice: 4.75 GiB of a 5gb instance are its memory.
    eighths = -(-mib * _EIGHTHS // parent_mib)
    # NVIDIA rounds the half up: four eighths of 141 are 71.
    return (eighths * ceil(parent_mib * MIB / GIB) + _EIGHTHS // 2) // _EIGHTHS
