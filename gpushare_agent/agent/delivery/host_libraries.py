"""Finds the driver's libraries and programs on the host, whose file system may be mounted below some directory.

Libraries are found as the host's programs find them, by the dynamic loader's cache; what it does not name is searched in
the usual directories. Which of them a volume gets is decided in delivery/volume_plan.py. No state.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from gpushare_agent.agent.delivery.elf import CacheEntry, read_elf, read_loader_cache
from gpushare_agent.agent.delivery.volume_plan import (
    CONTROL_LIBRARY_NAME,
    Control,
    DriverVolume,
    FoundLibrary,
    FoundProgram,
    HostDriver,
    VolumeName,
    VolumePlan,
    plan_volume,
)
from gpushare_agent.core.model.errors import Corrupt, NotFound, StartupError
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

LOADER_CACHE = "/etc/ld.so.cache"

LIBRARY_DIRECTORIES = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/powerpc64le-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia",  # Jetson: JetPack 6 and 7
    "/usr/lib/aarch64-linux-gnu/tegra",  # JetPack 5 and older
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

_MAX_LINKS = 40
"""As many as the kernel follows."""

_IN_USR = frozenset({"bin", "sbin", "lib", "lib32", "lib64", "libx32"})


class HostFiles:
    """The host's file system below `root`; `/` where the process runs on the host itself.

    A symbolic link is followed as the host would: `/etc/alternatives/…` is the host's, and `..` never leaves the root.
    Where only the host's /usr is mounted, /lib, /bin and the like are taken from it, as they are on any current system.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def shown(self, path: str) -> str:
        """A path of the host as this process sees it, for messages."""
        return str(self.root / path.lstrip("/"))

    def resolve(self, path: str) -> Path | None:
        """The file or directory itself, free of links below the root; None if it is not there or links run in circles."""
        pending = [part for part in path.split("/") if part][::-1]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part in (".", ".."):
                done = done[:-1] if part == ".." else done
                continue
            here = self.root.joinpath(*done, part)
            try:
                mode = here.lstat().st_mode
            except (OSError, ValueError):
                # Only the host's /usr may be mounted; there /lib and /bin are links into it on every current system.
                if done or part not in _IN_USR:
                    return None
                done = ["usr"]
                pending.append(part)
                continue
            if not stat.S_ISLNK(mode):
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            target = str(here.readlink())
            # An absolute link is the host's: it begins at the host's root, not at this process's.
            done = [] if target.startswith("/") else done
            pending += [part for part in target.split("/") if part][::-1]
        return self.root.joinpath(*done)

    def file(self, path: str) -> Path | None:
        """The regular file behind a path, or None."""
        found = self.resolve(path)
        return found if found is not None and found.is_file() else None

    def names_in(self, directory: str) -> list[str]:
        """The sorted names in a directory; none if it is not there."""
        found = self.resolve(directory)
        try:
            return sorted(path.name for path in found.iterdir()) if found is not None else []
        except OSError:
            return []


class DriverLibraries:
    """The driver of the host whose file system is below `root`."""

    def __init__(self, root: Path) -> None:
        self._host = HostFiles(root)

    def find(self, volume: DriverVolume) -> HostDriver:
        """Everything that may belong into a volume, and where it was searched."""
        places, warnings, found = [], [], list[FoundLibrary]()
        try:
            if (cache := self._host.file(LOADER_CACHE)) is not None and (
                cached := read_loader_cache(cache)
            ) is not None:
                places.append(self._host.shown(LOADER_CACHE))
                found += self._read_all(entry for entry in cached if entry.name.startswith(volume.libraries))
        except Corrupt as error:
            warnings.append(f"{error}; the usual library directories were searched instead")
        # What the loader's cache names is what the host's programs load; the directories are for what it lacks.
        missing = tuple(name for name in volume.libraries if not any(one.link_name.startswith(name) for one in found))
        if missing:
            places += [self._host.shown(place) for place in LIBRARY_DIRECTORIES if self._host.resolve(place)]
            found += self._read_all(self._in_directories(missing))
        return HostDriver(
            libraries=tuple(found),
            programs={name: path for name in volume.binaries if (path := self._program(name)) is not None},
            library_places=tuple(places),
            program_places=tuple(self._host.shown(place) for place in PROGRAM_DIRECTORIES if self._host.resolve(place)),
            warnings=tuple(warnings),
        )

    def _in_directories(self, beginnings: tuple[str, ...]) -> Iterator[CacheEntry]:
        for directory in LIBRARY_DIRECTORIES:
            for name in self._host.names_in(directory):
                if name.startswith(beginnings):
                    yield CacheEntry(name=name, path=f"{directory}/{name}", hwcap=0)

    def _read_all(self, entries: Iterable[CacheEntry]) -> list[FoundLibrary]:
        found = []
        for entry in entries:
            path = self._host.file(entry.path)
            if path is None:  # the cache is older than a removal
                continue
            try:
                found.append(_read_library(path, entry.name, is_baseline=not entry.hwcap))
            except (Corrupt, NotFound) as error:  # a linker script is called .so too
                log.debug("library_skipped", reason=str(error))
        return found

    def _program(self, name: str) -> Path | None:
        for directory in PROGRAM_DIRECTORIES:
            path = self._host.file(f"{directory}/{name}")
            if path is not None and path.stat().st_mode & 0o111:
                return path
        return None


def read_control(library: Path, client: Path) -> Control:
    """The control library and gpu-client, which come with the agent and are not the host's.

    Raises:
        StartupError: one of them is not there, or of the wrong kind.
    """
    return Control(library=read_control_library(library), client=_read_client(client))


def read_control_library(path: Path) -> FoundLibrary:
    """Raises StartupError: it is not there, or no shared object."""
    try:
        return _read_library(path.resolve(strict=True), CONTROL_LIBRARY_NAME)
    except (OSError, RuntimeError, NotFound, Corrupt) as error:
        raise StartupError(
            f"the control library {path} cannot be used: {_reason(error)}. Volume nvidia is not made without it, for shares"
            f" would have no limits; set driver_volume.control_library to the place of {CONTROL_LIBRARY_NAME}"
        ) from error


def _read_client(path: Path) -> FoundProgram:
    try:
        resolved = path.resolve(strict=True)
        elf = read_elf(resolved)
        if not resolved.stat().st_mode & 0o111:
            raise Corrupt(f"{resolved} may not be executed")
    except (OSError, RuntimeError, NotFound, Corrupt) as error:
        raise StartupError(
            f"gpu-client {path} cannot be used: {_reason(error)}. Volume nvidia is not made without it, for the control"
            " library runs it at each start of a CUDA program, and ends the program where it is missing; set"
            " driver_volume.gpu_client to its place (this project's image has it; native/gpu-client.c is its source)"
        ) from error
    return FoundProgram(path=resolved, machine=elf.machine, interpreter=elf.interpreter)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_library(path: Path, found_as: str, *, is_baseline: bool = True) -> FoundLibrary:
    """Raises NotFound, Corrupt."""
    elf = read_elf(path)
    return FoundLibrary(
        path=path,
        found_as=found_as,
        elf_class=elf.elf_class,
        machine=elf.machine,
        soname=elf.soname,
        is_baseline=is_baseline,
    )


def plan_of(settings: Settings, volume: DriverVolume) -> VolumePlan:
    """What belongs into a volume on this host.

    Raises:
        StartupError: there is no libcuda, no control library or no gpu-client; the text names the searched places.
    """
    ours = settings.driver_volume
    # Whole GPUs get the driver as it is.
    control = read_control(ours.control_library, ours.gpu_client) if volume.name is VolumeName.SHARED else None
    return plan_volume(volume, DriverLibraries(ours.root).find(volume), os.uname().machine, control)
