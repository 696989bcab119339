"""Which directories the processes of this machine have mounted, from /proc/<pid>/mountinfo.

Covers the processes of this PID namespace: the host's containers only where it is the host's.
"""

from __future__ import annotations

import errno
from pathlib import Path

from msgspec import Struct

_ROOT_FIELD = 3
"""mountinfo's fourth field: the mounted directory as a path in its own file system (proc(5))."""


class MountedDirectories(Struct, frozen=True, kw_only=True):
    """`roots` are paths within their file systems, octal escapes as the kernel writes them."""

    roots: frozenset[str]
    unreadable_processes: int

    def has(self, directory: str) -> bool:
        """Is a directory with this path's end, or something in it, mounted? `.versions/x` finds /any/.versions/x/lib."""
        return any(f"/{directory}/" in f"{root.removesuffix('//deleted')}/" for root in self.roots)


def read_mounted_directories(proc: Path = Path("/proc")) -> MountedDirectories:
    """What all visible processes have mounted."""
    roots: set[str] = set()
    unreadable = 0
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            text = (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            unreadable += error.errno in (errno.EACCES, errno.EPERM)  # any other: it has ended
            continue
        for line in text.splitlines():
            fields = line.split(" ", _ROOT_FIELD + 1)
            if len(fields) > _ROOT_FIELD:
                roots.add(fields[_ROOT_FIELD])
    return MountedDirectories(roots=frozenset(roots), unreadable_processes=unreadable)
