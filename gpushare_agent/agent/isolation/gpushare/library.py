"""libgpushare.so on the host: the file of the setting, and its copy in the directory that containers get it from.

    <directory>/libgpushare.so    a copy of it
    <directory>/ld.so.preload     its path in the container; mounted read-only

Both are written whole under another name and renamed. A container mounts the file that has the name when it starts:
running containers keep their library until they end, because the kernel keeps the file. One that starts again gets the
present library, because the kubelet keeps the path. Everything blocks; call it in a thread. State owned: the two files.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

from gpushare_agent.agent.isolation.directories import opened_root, step
from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_NAME, LIBRARY_PATH
from gpushare_agent.agent.runtime.node_probes import require_writable
from gpushare_agent.core.kit.directories import DIRECTORY_MODE, remove_left_behind, replace_file, status_of
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, StartupError, Unavailable, os_errors_as
from gpushare_agent.core.settings.settings import Settings

SETTING = "libgpushare.directory"
MARK = b"/etc/vcuda/gpushare.config\0"
"""In every file of the library, and in no other."""
PRELOAD_NAME = "ld.so.preload"
MAX_LIBRARY_BYTES = 64 * 1024 * 1024
"""The library has one MiB; with debugging information several."""
_CURE = (
    "Build it with `python -m native.build_gpushare`, put it at the path that --libgpushare.library names, or choose another"
    " isolation"
)

Stamp = tuple[int, int, int]
"""Inode, size, and time of change in nanoseconds; differs for another file in the library's place."""
_NO_LIBRARY: Stamp = (0, 0, 0)
_OWN_PROGRAM = Path("/proc/self/exe")


class Library:
    """`is_optional`: if there is no library, an empty file is mounted instead and nothing is preloaded."""

    def __init__(self, source: Path, directory: Path, *, is_optional: bool = False) -> None:
        self.source = source
        self.directory = directory
        self._is_optional = is_optional
        self._checked: Stamp | None = None

    @property
    def missing_note(self) -> str:
        """For people: what containers get if there is no library and none is needed; else empty."""
        if not self._is_optional or self.source.exists():
            return ""
        # The first line that a sandbox prints: it must not read like a fault.
        what = "isolation gpushare: containers get limits and mounts, and no library"
        return f"{what}: simulated GPUs need none, and {self.source} is not there"

    def check(self) -> Stamp:
        """Reads only. Raises StartupError as `check_source`, or if programs cannot load the library from its place."""
        stamp = self.check_source()
        if stamp == _NO_LIBRARY:
            return stamp
        with os_errors_as(StartupError, f"isolation gpushare: {self.directory} cannot be read"):
            # The directory may not be there yet: its file system is that of the nearest one above.
            place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            is_noexec = bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
        if is_noexec:
            raise StartupError(
                f"isolation gpushare: {place} is on a file system mounted noexec, from which no program can load the"
                f" library. Mount it without noexec, or set {SETTING} to another place"
            )
        return stamp

    def check_source(self) -> Stamp:
        """Reads only. Raises StartupError if there is no library, or it is for another machine."""
        if self.missing_note:
            return _NO_LIBRARY
        try:
            status = self._status()
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            if stamp != self._checked:
                self._check_machine()
                self._checked = stamp
        except (NotFound, Corrupt, Unavailable) as e:
            raise StartupError(f"isolation gpushare has no library: {e}. {_CURE}") from e
        return stamp

    def look(self) -> None:
        """Checks that `install` finds all that it needs. Writes nothing that stays. Raises AgentError with the remedy."""
        self.check()
        self.content()
        try:
            require_writable(self.directory)
        except Unavailable as e:
            raise Unavailable(f"{e} (setting {SETTING})") from e

    def install(self) -> None:
        """Makes the directory, and library and preload file as they are now. Raises StartupError."""
        try:
            with step("preparing", self.directory, SETTING):
                self._write(self.content())
        except AgentError as e:
            raise StartupError(f"isolation gpushare cannot keep its files: {e}") from e

    def put_back(self) -> None:
        """Puts library and preload file back if they were removed: the runtime would make a directory instead of a missing
        mount source. Raises NotFound, Unavailable."""
        with step("preparing", self.directory, SETTING):
            self._write(None if self._is_installed() else self.content())

    def content(self) -> bytes:
        """The library, at most MAX_LIBRARY_BYTES. Raises Unavailable, also if it is another one."""
        if self.missing_note:
            return b""
        self._status()
        with os_errors_as(Unavailable, f"{self.source} cannot be used"), self.source.open("rb") as file:
            content = file.read(MAX_LIBRARY_BYTES + 1)
        # An empty file is a copy that was cut off; the loader would print a line in every program.
        if not 0 < len(content) <= MAX_LIBRARY_BYTES:
            raise Unavailable(f"{self.source} cannot be used: it has not between 1 and {MAX_LIBRARY_BYTES} bytes")
        # Any library loads: one that is not ours would limit nobody, and nobody would see it.
        if MARK not in content:
            raise Unavailable(f"{self.source} is not libgpushare's: it would limit nobody. {_CURE}")
        return content

    def _write(self, content: bytes | None) -> None:
        self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with opened_root(self.directory) as directory:
            if content is not None:
                remove_left_behind(self.directory)
                replace_file(directory, LIBRARY_NAME, content, is_synced=True)
            # The loader prints a line in every program for a file that it cannot preload, as an empty one.
            installed = status_of(directory, LIBRARY_NAME)
            is_empty = installed is not None and installed.st_size == 0
            replace_file(directory, PRELOAD_NAME, b"" if is_empty else f"{LIBRARY_PATH}\n".encode())

    def _is_installed(self) -> bool:
        try:
            status = (self.directory / LIBRARY_NAME).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and (status.st_size > 0 or bool(self.missing_note))

    def _check_machine(self) -> None:
        if (kind := _elf_kind(self.source)) and kind == _elf_kind(_OWN_PROGRAM):
            return
        # What is wrong with it. The ELF reader is a twentieth of the start, and 48 modules that nothing else here needs.
        from gpushare_agent.agent.delivery.elf import read_elf

        found, own = read_elf(self.source), read_elf(_OWN_PROGRAM)
        if (found.elf_class, found.machine) != (own.elf_class, own.machine):
            raise StartupError(
                f"isolation gpushare: {self.source} is a {found.elf_class}-bit library for {found.machine}, and this node's"
                f" programs are {own.elf_class}-bit for {own.machine}. {_CURE}"
            )

    def _status(self) -> os.stat_result:
        with os_errors_as(Unavailable, f"{self.source} cannot be used"):
            status = self.source.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unavailable(f"{self.source} cannot be used: it is no regular file")
        return status


def _elf_kind(path: Path) -> bytes:
    """Magic bytes, class, byte order and machine of an ELF file of 64 bits, by Elf64_Ehdr of elf(5); empty if it cannot be
    read, or ends before its last section header, which linkers write at its end: one that is still being copied."""
    with suppress(OSError, struct.error), path.open("rb") as file:
        header = file.read(64)
        (headers_at,), (size, count) = struct.unpack_from("Q", header, 40), struct.unpack_from("2H", header, 58)
        if os.fstat(file.fileno()).st_size >= headers_at + size * count:
            return header[:6] + header[18:20]
    return b""


def library_of(settings: Settings) -> Library:
    """No program computes on simulated GPUs, so no library is needed: containers still get limits and mounts."""
    own = settings.libgpushare
    return Library(own.library, own.directory, is_optional=settings.driver == "simulated")
