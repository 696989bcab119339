"""Paths of the host, as seen by a process that has the host's file system below some directory.

A symbolic link there is followed as the host would: `/etc/alternatives/…` means the host's, and `..` never leaves it.
Where only the host's /usr is mounted, /lib, /bin and the like are looked for in it, where they lead on any current system.
"""

from __future__ import annotations

import stat
from pathlib import Path

_MAX_LINKS = 40
"""As many as the kernel follows."""

_IN_USR = frozenset({"bin", "sbin", "lib", "lib32", "lib64", "libx32"})


class HostFiles:
    """The host's file system below `root`; `/` where the process runs on the host itself."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def shown(self, path: str) -> str:
        """How a path of the host is named in messages: as this process sees it."""
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
