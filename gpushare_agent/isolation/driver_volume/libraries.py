"""Finds the driver's libraries and programs on the host.

Libraries are found as the host's programs find them, by the dynamic loader's cache; what it does not name is looked for
in the usual directories. Which of them a volume gets is decided in isolation/driver_volume/plan.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from gpushare_agent.isolation.driver_volume.elf_files import read_elf
from gpushare_agent.isolation.driver_volume.host_files import HostFiles
from gpushare_agent.isolation.driver_volume.loader_cache import read_loader_cache
from gpushare_agent.isolation.driver_volume.values import CONTROL_LIBRARY_NAME, DriverVolume, FoundLibrary, HostDriver
from gpushare_agent.model.errors import Corrupt, NotFound, StartupError

log = structlog.get_logger(__name__)

LOADER_CACHE = "/etc/ld.so.cache"

LIBRARY_DIRECTORIES = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/powerpc64le-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib/i386-linux-gnu",
    "/lib64",
    "/lib",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/opt/nvidia/lib64",
)
"""Where distributions and NVIDIA's installers put the driver's libraries."""

PROGRAM_DIRECTORIES = (
    "/usr/bin",
    "/bin",
    "/usr/sbin",
    "/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/local/nvidia/bin",
    "/opt/nvidia/bin",
    "/opt/bin",
)


class DriverLibraries:
    """The driver of the host whose file system is below `root`. Owns no state."""

    def __init__(self, root: Path) -> None:
        self._host = HostFiles(root)

    def find(self, volume: DriverVolume) -> HostDriver:
        """Everything that may belong into a volume, and where it was looked for."""
        places: list[str] = []
        warnings: list[str] = []
        libraries = self._libraries(volume.libraries, places, warnings)
        programs = {name: path for name in volume.binaries if (path := self._program(name)) is not None}
        return HostDriver(
            libraries=tuple(libraries),
            programs=programs,
            library_places=tuple(places),
            program_places=tuple(self._host.shown(place) for place in PROGRAM_DIRECTORIES if self._host.resolve(place)),
            warnings=tuple(warnings),
        )

    def _libraries(self, listed: tuple[str, ...], places: list[str], warnings: list[str]) -> list[FoundLibrary]:
        """Notes in `places` where it looked, and in `warnings` what was in the way."""
        found: list[FoundLibrary] = []
        cached = self._cached(warnings)
        if cached is not None:
            places.append(self._host.shown(LOADER_CACHE))
            wanted = [(name, path, hwcap) for name, path, hwcap in cached if name.startswith(listed)]
            found += self._read_all(wanted)
        missing = tuple(name for name in listed if not any(item.link_name.startswith(name) for item in found))
        if missing:
            places += [self._host.shown(place) for place in LIBRARY_DIRECTORIES if self._host.resolve(place)]
            found += self._read_all(self._in_directories(missing))
        return found

    def _cached(self, warnings: list[str]) -> list[tuple[str, str, int]] | None:
        path = self._host.file(LOADER_CACHE)
        if path is None:
            return None
        try:
            entries = read_loader_cache(path)
        except Corrupt as error:
            warnings.append(f"{error}; the usual library directories were searched instead")
            return None
        return None if entries is None else [(entry.name, entry.path, entry.hwcap) for entry in entries]

    def _in_directories(self, beginnings: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
        for directory in LIBRARY_DIRECTORIES:
            for name in self._host.names_in(directory):
                if name.startswith(beginnings):
                    yield name, f"{directory}/{name}", 0

    def _read_all(self, wanted: Iterable[tuple[str, str, int]]) -> list[FoundLibrary]:
        found = []
        for name, place, hwcap in wanted:
            path = self._host.file(place)
            if path is None:  # a cache that is older than a removal
                continue
            try:
                elf = read_elf(path)
            except (Corrupt, NotFound) as error:  # a linker script is called .so too
                log.debug("library_passed_over", reason=str(error))
                continue
            found.append(
                FoundLibrary(
                    path=path,
                    found_as=name,
                    elf_class=elf.elf_class,
                    machine=elf.machine,
                    soname=elf.soname,
                    is_baseline=not hwcap,
                )
            )
        return found

    def _program(self, name: str) -> Path | None:
        for directory in PROGRAM_DIRECTORIES:
            path = self._host.file(f"{directory}/{name}")
            if path is not None and path.stat().st_mode & 0o111:
                return path
        return None


def read_control_library(path: Path) -> FoundLibrary:
    """The control library, which comes with the agent and is not the host's.

    Raises:
        StartupError: it is not there, or no shared object.
    """
    try:
        real = path.resolve(strict=True)
        elf = read_elf(real)
    except (OSError, RuntimeError, NotFound, Corrupt) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise StartupError(
            f"the control library {path} cannot be used: {reason}. Volume nvidia is not made without it, for shares would"
            f" have no limits; set driver_volume.control_library to the place of {CONTROL_LIBRARY_NAME}"
        ) from error
    return FoundLibrary(
        path=real,
        found_as=CONTROL_LIBRARY_NAME,
        elf_class=elf.elf_class,
        machine=elf.machine,
        soname=elf.soname,
    )


def host_machine() -> str:
    """The kernel's name for this machine, such as x86_64."""
    return os.uname().machine
