"""Plans which libraries and programs of the host go where in a driver volume.

In the volume for shares the names that programs load (libcuda.so.1, libnvidia-ml.so.1 and their bare forms) lead to the
control library; the driver's own files keep their full names, because the control library loads them by these. A share must
never get an uncontrolled libcuda under such a name: where the control library has not the right ELF class, the library is
left out. The files are found by delivery/host_libraries.py and copied by volume_directory.py there.

The values come first: the content of volume.conf (format: docs/how-to/driver-volume.md), what the host has, and the plan.
Paths are values here; nothing in this module touches a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from gpushare_agent.core.model.errors import StartupError

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


class VolumePlan(Struct, frozen=True, kw_only=True):
    """All of a volume's content by its place there, such as lib64/libcuda.so.535.104.05, sorted: files with their sources,
    links with a name in the same directory. `driver_version` is None where libcuda's name has none."""

    name: VolumeName
    files: Mapping[str, Path]
    links: Mapping[str, str]
    driver_version: tuple[int, ...] | None
    warnings: tuple[str, ...]


LIBCUDA = "libcuda.so"
CONTROLLED = (LIBCUDA, "libnvidia-ml.so")
"""Sonames that begin so are the control library's in the volume for shares."""

MACHINES_OF_HOST = {
    "x86_64": ("EM_X86_64", "EM_386"),
    "aarch64": ("EM_AARCH64", "EM_ARM"),
    "ppc64le": ("EM_PPC64",),
}
"""What a kernel of this name (uname -m) runs: a host may also have libraries for cross-compiling."""

_DRIVER_VERSION = re.compile(r"libcuda\.so\.([0-9]{3,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?")
_OF_A_DRIVER = re.compile(r"lib.+\.so\.([0-9]{3,6}\.[0-9]{1,6}(?:\.[0-9]{1,6})?)")
"""File names with a driver's version in them; libraries of a version of their own (libGL.so.1.7.0) begin lower."""
_NAMED = 3
_NUMBER = re.compile(r"[0-9]{1,9}")


def driver_version(name: str) -> tuple[int, ...] | None:
    """`libcuda.so.535.104.05` -> (535, 104, 5). None for every other name, also for the soname libcuda.so.1 and for
    libcuda.so.1.1, as every Jetson's file is called."""
    found = _DRIVER_VERSION.fullmatch(name)
    return tuple(int(part) for part in found.groups() if part is not None) if found else None


def driver_version_text(names: Iterable[str]) -> str:
    """The version as the libcuda among these file names writes it, with its zeros: 535.104.05. Empty where there is none."""
    libcudas = [(version, name) for name in names if (version := driver_version(name)) is not None]
    return max(libcudas)[1].removeprefix(f"{LIBCUDA}.") if libcudas else ""


def choose_libraries(
    found: Iterable[FoundLibrary], listed: Sequence[str], host_machine: str
) -> tuple[FoundLibrary, ...]:
    """One library for each ELF class and soname: the one that the dynamic loader takes, sorted by class and soname.

    That is the library that was found under its soname; among equals the baseline build, then the highest version in
    the file name, then the first found.
    """
    machines = MACHINES_OF_HOST.get(host_machine)
    best: dict[tuple[int, str], FoundLibrary] = {}
    for library in found:
        # A host may have libraries for cross-compiling; of a machine that is not in the table all are taken.
        if (machines and library.machine not in machines) or not library.link_name.startswith(tuple(listed)):
            continue
        slot = (library.elf_class, library.link_name)
        if slot not in best or _rank(library) > _rank(best[slot]):
            best[slot] = library
    return tuple(best[slot] for slot in sorted(best))


def _rank(library: FoundLibrary) -> tuple[bool, bool, tuple[int, ...]]:
    return library.found_as == library.link_name, library.is_baseline, _numbers(library.name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(name.partition(".so")[2]))


def plan_volume(volume: DriverVolume, host: HostDriver, host_machine: str, control: Control | None) -> VolumePlan:
    """The volume's whole content; `control` is used for the volume of shares only. Raises StartupError, for the operator,
    where it cannot be made."""
    libraries = choose_libraries(host.libraries, volume.libraries, host_machine)
    libcuda = _libcuda_of(volume, libraries, host)
    layout = _Layout(warnings=list(host.warnings))
    if volume.name is VolumeName.SHARED:
        # Refused, not made without it: a share that mounts this volume would have no limits.
        usable = _usable_control(volume, libcuda, control, host_machine)
        libraries = layout.put_controlled(libraries, usable.library)
        layout.put_client(usable.client)
        if f"{DIRECTORY_OF_CLASS[libcuda.elf_class]}/{libcuda.name}" not in layout.files:
            raise StartupError(
                f"volume {volume.name}: {libcuda.path} has the name that programs load, where the control library"
                f" must be, and not one with the driver's version such as libcuda.so.535.104.05; reinstall the driver"
            )
    layout.put_libraries(libraries)
    for name in volume.binaries:
        if (source := host.programs.get(name)) is not None:
            layout.files.setdefault(f"bin/{name}", source)
    version = driver_version(libcuda.name)
    if version is None:
        layout.warnings.append(f"the name of {libcuda.path} has no driver version; it must come from NVML")
    layout.warnings += [*_mixed_versions(layout.files), *_missing(volume, libraries, host, layout)]
    return VolumePlan(
        name=volume.name,
        files=dict(sorted(layout.files.items())),
        links=dict(sorted(layout.links.items())),
        driver_version=version,
        warnings=tuple(f"volume {volume.name}: {warning}" for warning in layout.warnings),
    )


def _libcuda_of(volume: DriverVolume, libraries: Sequence[FoundLibrary], host: HostDriver) -> FoundLibrary:
    cuda = [library for library in libraries if library.link_name.startswith(LIBCUDA)]
    if found := [library for library in cuda if library.elf_class == 64]:
        return max(found, key=lambda library: _numbers(library.name))
    # volume.conf has beginnings of names: "libcuda" and "libcuda.so.1" both bring it.
    if not any(LIBCUDA.startswith(name) or name.startswith(LIBCUDA) for name in volume.libraries):
        raise StartupError(
            f"volume {volume.name}: its list of libraries has no {LIBCUDA}, without which no CUDA program starts;"
            " add it to volume.conf"
        )
    only = f" (only the 32-bit {cuda[0].path})" if cuda else ""
    raise StartupError(
        f"volume {volume.name}: no 64-bit library with the soname {LIBCUDA}.1 for this machine was found{only};"
        f" searched {', '.join(host.library_places) or 'no place that exists'}. Is the driver installed, and is"
        " driver_volume.root the host's file system? What is in force stays"
    )


def _usable_control(volume: DriverVolume, libcuda: FoundLibrary, control: Control | None, host_machine: str) -> Control:
    if control is None:
        raise StartupError(f"volume {volume.name}: there is no control library; set driver_volume.control_library")
    library, client = control.library, control.client
    if library.elf_class != libcuda.elf_class:
        raise StartupError(
            f"volume {volume.name}: the control library {library.path} is a {library.elf_class}-bit {library.machine}"
            f" file, but {libcuda.path} is {libcuda.elf_class}-bit {libcuda.machine}; set driver_volume.control_library"
            " to the build for this machine"
        )
    if client.machine not in MACHINES_OF_HOST.get(host_machine, (client.machine,)):
        raise StartupError(
            f"volume {volume.name}: {client.path} is a program for {client.machine}, and this machine is {host_machine};"
            " set driver_volume.gpu_client to the build for this machine"
        )
    return control


def _missing(volume: DriverVolume, libraries: Sequence[FoundLibrary], host: HostDriver, layout: _Layout) -> list[str]:
    names = {library.link_name for library in libraries} | {target.partition("/")[2] for target in layout.files}
    libraries_missing = [listed for listed in volume.libraries if not any(name.startswith(listed) for name in names)]
    programs_missing = [name for name in volume.binaries if f"bin/{name}" not in layout.files]
    return [
        f"no {what} {_or(missing)} was found (searched {', '.join(places)}); containers go without"
        for what, missing, places in (
            ("library whose soname begins with", libraries_missing, host.library_places),
            ("program", programs_missing, host.program_places),
        )
        if missing
    ]


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _mixed_versions(targets: Iterable[str]) -> list[str]:
    """One warning where files of two drivers lie side by side: they fail in the program that loads them, or worse."""
    files = [target.partition("/")[2] for target in targets]
    driver = driver_version_text(files)
    others = sorted({name for name in files if (found := _OF_A_DRIVER.fullmatch(name)) and found[1] != driver})
    # Without a version in libcuda's name there is nothing to compare with.
    if not driver or not others:
        return []
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return [
        f"libcuda is of driver {driver}, but {', '.join(others[:_NAMED])}{more} of another: leftovers of an update, or"
        " one that is under way. Programs that load them may fail; reinstall the driver"
    ]


class _Layout(Struct):
    """A volume while it is being planned. A target that is taken is never given away again."""

    files: dict[str, Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put_controlled(self, libraries: Sequence[FoundLibrary], control: FoundLibrary) -> tuple[FoundLibrary, ...]:
        """Takes the control library in, and those that it stands before; returns the others."""
        directory = DIRECTORY_OF_CLASS[control.elf_class]
        self.files[f"{directory}/{CONTROL_LIBRARY_NAME}"] = control.path
        controlled = [library for library in libraries if library.link_name.startswith(CONTROLLED)]
        same_class = [library for library in controlled if library.elf_class == control.elf_class]
        for library in controlled:
            if library not in same_class:
                self.warnings.append(
                    f"{library.path} ({library.elf_class}-bit) is left out: the control library is"
                    f" {control.elf_class}-bit, and without it the share would have no limits"
                )
        for library in same_class:
            for name in (library.link_name, _bare(library.link_name)):
                self.links.setdefault(f"{directory}/{name}", CONTROL_LIBRARY_NAME)
        # After all links: a file whose own name is one of them must not take its place.
        for library in same_class:
            # libcuda.so.1 as a file: a program that loads it by that name would pass the control library.
            if len(_numbers(library.name)) < 2 or f"{directory}/{library.name}" in self.links:
                why = "a program might load it by that name, which lacks a version"
                self.warnings.append(f"{library.path} is left out: {why}")
            else:
                self.files[f"{directory}/{library.name}"] = library.path
        return tuple(
            library for library in libraries if library not in controlled and library.link_name != CONTROL_LIBRARY_NAME
        )

    def put_client(self, client: FoundProgram) -> None:
        """Ours, whatever the host has under its name."""
        self.files[f"bin/{GPU_CLIENT_NAME}"] = client.path
        if client.interpreter:
            self.warnings.append(
                f"{client.path} is not static: in a container whose image has no {client.interpreter} no CUDA program starts"
            )

    def put_libraries(self, libraries: Sequence[FoundLibrary]) -> None:
        for library in libraries:
            target = f"{DIRECTORY_OF_CLASS[library.elf_class]}/{library.name}"
            if self.files.setdefault(target, library.path) != library.path:
                self.warnings.append(f"{library.path} is left out: {self.files[target]} has the same file name")
        for library in libraries:
            self._link(library, library.link_name, library.name)
        newest_first = sorted(libraries, key=lambda library: _numbers(library.link_name), reverse=True)
        for library in newest_first:
            self._link(library, _bare(library.link_name), library.link_name)

    def _link(self, library: FoundLibrary, name: str, points_to: str) -> None:
        target = f"{DIRECTORY_OF_CLASS[library.elf_class]}/{name}"
        if target not in self.files and name != points_to:
            self.links.setdefault(target, points_to)


def _bare(soname: str) -> str:
    """`libcuda.so.1` -> `libcuda.so`, which programs that load a library themselves often ask for."""
    stem, dot_so, _ = soname.partition(".so")
    return stem + dot_so
