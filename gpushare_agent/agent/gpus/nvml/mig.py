"""MIG instances through NVML: which there are, what each is, and its nodes below /dev/nvidia-caps. Blocking.

Source: NVML API reference, "Multi Instance GPU Management"; NVIDIA's MIG user guide ("Device Nodes and Capabilities") for
the file of minor numbers; go-nvlib for how a profile's name is made of its slices and its memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import pynvml
from msgspec import Struct

from gpushare_agent.agent.gpus.nvml.session import UUID_TEXT, ask, call, unusable
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
    "1_SLICE_REV1": "+me",
    "2_SLICE_REV1": "+me",
    "1_SLICE_ALL_ME": "+me.all",
    "2_SLICE_ALL_ME": "+me.all",
    "1_SLICE_GFX": "+gfx",
    "2_SLICE_GFX": "+gfx",
    "3_SLICE_GFX": "+gfx",
    "4_SLICE_GFX": "+gfx",
    "1_SLICE_NO_ME": "-me",
    "2_SLICE_NO_ME": "-me",
}
"""Of GPU instance profiles (NVML_GPU_INSTANCE_PROFILE_…) that differ from another of the same size."""

CapMinors = Mapping[tuple[int, int, int | None], int]
"""By the parent's minor, the GPU instance and the compute instance (None: the GPU instance's own)."""


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


def read_place(found: FoundInstance, *, parent: Gpu, parent_handle: Any, caps: CapMinors) -> MigPlace:
    """Raises CallError, DriverLostError."""
    if not parent.memory_mib:
        raise unusable("nvmlDeviceGetMemoryInfo", "the memory of its GPU is unknown, after which profiles are named")
    gi = call("nvmlDeviceGetGpuInstanceId", found.handle)
    ci = call("nvmlDeviceGetComputeInstanceId", found.handle)
    attributes = _attributes(found.handle)
    return MigPlace(
        profile=_profile(attributes, parent.memory_mib) + _suffix(parent_handle, gi),
        number=found.number,
        parent=parent.uuid,
        parent_index=parent.index,
        gi=gi,
        ci=ci,
        gi_cap=caps.get((parent.minor, gi, None)),
        ci_cap=caps.get((parent.minor, gi, ci)),
        attributes=attributes,
    )


def read_cap_minors(path: Path) -> dict[tuple[int, int, int | None], int]:
    """The minor numbers, of lines such as `gpu0/gi1/access 12` and `gpu0/gi1/ci0/access 13`; empty without the file."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            lines = file.read(_MAX_MINORS_BYTES).splitlines()
    except OSError:
        return {}
    found = [match.groups() for line in lines if (match := _MINOR.fullmatch(line.strip()))]
    return {(int(gpu), int(gi), int(ci) if ci else None): int(minor) for gpu, gi, ci, minor in found}


def read_caps_major(path: Path) -> int:
    """The major number of all nodes in /dev/nvidia-caps, of a line such as `511 nvidia-caps` of /proc/devices; 0 without."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            found = re.search(r"^ *([1-9][0-9]{0,3}) nvidia-caps$", file.read(_MAX_MINORS_BYTES), flags=re.M)
    except OSError:
        return 0
    return int(found[1]) if found is not None else 0


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


def _profile(attributes: MigAttributes, parent_mib: int) -> str:
    slices, computes = attributes.gi_slices, attributes.ci_slices
    name = f"{slices}g.{_gigabytes(attributes.memory_mib, parent_mib)}gb"
    # `1c.3g.40gb`: NVIDIA's name of an instance with fewer compute slices than its GPU instance.
    return name if slices == computes else f"{computes}c.{name}"


def _gigabytes(mib: int, parent_mib: int) -> int:
    """The size in a profile's name: whole eighths of the GPU's memory, of which a part is the driver's."""
    # The driver keeps a part of each slice: 4.75 GiB of a 5gb instance are its memory.
    eighths = -(-mib * _EIGHTHS // parent_mib)
    # NVIDIA rounds the half up: four eighths of 141 are 71.
    return (eighths * ceil(parent_mib * MIB / GIB) + _EIGHTHS // 2) // _EIGHTHS


def _suffix(parent_handle: Any, gi: int) -> str:
    profile = call("nvmlGpuInstanceGetInfo", call("nvmlDeviceGetGpuInstanceById", parent_handle, gi)).profileId
    # As go-nvlib does: media engines and graphics show in the profile's number alone.
    for name, suffix in _SUFFIXES.items():
        # nvidia-ml-py of an earlier version lacks the newest.
        number = getattr(pynvml, f"NVML_GPU_INSTANCE_PROFILE_{name}", None)
        info = ask("nvmlDeviceGetGpuInstanceProfileInfo", parent_handle, number) if number is not None else None
        if info is not None and info.id == profile:
            return suffix
    return ""
