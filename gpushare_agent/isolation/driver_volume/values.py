"""Values of a driver volume: the content of volume.conf, what the host has, and the plan.

Paths are values here; nothing in this module touches a file. Format of volume.conf: docs/how-to/driver-volume.md.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from msgspec import Struct

DIRECTORY_OF_CLASS = {32: "lib", 64: "lib64"}
"""ELF class -> the directory of a volume that holds such libraries."""

ElfClass = Literal[32, 64]

CONTROL_LIBRARY_NAME = "libcuda-control.so"
GPU_CLIENT_NAME = "gpu-client"


class VolumeName(StrEnum):
    """The two volumes there are. Containers with a share get the first, containers with whole GPUs the second."""

    SHARED = "nvidia"
    ORIGIN = "origin"


class DriverVolume(Struct, frozen=True, kw_only=True):
    """One entry of volume.conf: `binaries` are file names, `libraries` beginnings of sonames."""

    name: VolumeName
    base: Path
    binaries: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """What containers mount at /usr/local/nvidia: a symbolic link, resolved when the mount is made."""
        return self.base / self.name.value


class FoundLibrary(Struct, frozen=True, kw_only=True):
    """A shared object of the host. `path` is the file itself, `found_as` the name that led to it, `soname` may be empty.

    `is_baseline` is False for a build that only some processors can run.
    """

    path: Path
    found_as: str
    elf_class: ElfClass
    machine: str
    soname: str
    is_baseline: bool = True

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def link_name(self) -> str:
        """The name that the dynamic loader asks for."""
        return self.soname or self.path.name


class FoundProgram(Struct, frozen=True, kw_only=True):
    """`interpreter` is the dynamic loader that it needs, empty where it is static."""

    path: Path
    elf_class: ElfClass
    machine: str
    interpreter: str = ""


class Control(Struct, frozen=True, kw_only=True):
    """What comes with the agent and limits shares: the library that stands before the driver's, and the program that it runs
    at each start of a CUDA program. Without either no such program runs within limits."""

    library: FoundLibrary
    client: FoundProgram


class HostDriver(Struct, frozen=True, kw_only=True):
    """What was found for one volume, and where it was searched."""

    libraries: tuple[FoundLibrary, ...]
    programs: dict[str, Path]
    library_places: tuple[str, ...]
    program_places: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class PlannedFile(Struct, frozen=True, kw_only=True):
    """`target` is relative to the volume, such as lib64/libcuda.so.535.104.05."""

    target: str
    source: Path


class PlannedLink(Struct, frozen=True, kw_only=True):
    """`points_to` is a name in the same directory."""

    target: str
    points_to: str


class VolumePlan(Struct, frozen=True, kw_only=True):
    """All of a volume's content, sorted by target. `driver_version` is None where libcuda's name has none."""

    name: VolumeName
    files: tuple[PlannedFile, ...]
    links: tuple[PlannedLink, ...]
    driver_version: tuple[int, ...] | None
    warnings: tuple[str, ...]


class VolumeRefused(Struct, frozen=True, kw_only=True):
    """Why a volume cannot be made, as text for the operator."""

    detail: str
