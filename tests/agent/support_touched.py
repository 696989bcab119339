"""`python -m tests.agent.support_touched FILE ARGUMENT…`: gpushare-agent ARGUMENT…, which notes in FILE, a line each, what
it does to the machine: every path that it opens for writing, makes, renames, links, changes or removes, each unix socket
that it binds or connects to, and the programs that it runs. `touched` reads it.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")
_DIRECTORY = threading.local()
"""The event `open` does not have the descriptor of the directory from which a relative path starts."""
_PATHS = {
    # event: the places of its paths and of their directories' descriptors among its arguments
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),),
    "os.truncate": ((0, None),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),), "os.removexattr": ((0, None),),
}  # fmt: skip


def touched(file: Path) -> dict[Path, set[str]]:
    """The events of each path."""
    found: dict[Path, set[str]] = {}
    for line in file.read_text().splitlines():
        event, _, path = line.partition(" ")
        found.setdefault(Path(path), set()).add(event)
    return found


def _place(path: Any, directory: int | None = None) -> str:
    text = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
    if not text.startswith("/"):
        base = os.readlink(f"/proc/self/fd/{directory}") if directory not in (None, -1) else os.getcwd()
        text = os.path.join(base, text)
    parent, name = os.path.split(text.rstrip("/"))
    place = os.path.join(os.path.realpath(parent), name)
    return os.readlink(place) if _DESCRIPTOR.fullmatch(place) else place


def _places(event: str, args: tuple[Any, ...]) -> list[str]:
    if event == "open":
        path, _, flags = args
        is_write = not isinstance(path, int) and isinstance(flags, int) and flags & _WRITES
        return [_place(path, getattr(_DIRECTORY, "descriptor", None))] if is_write else []
    if event in ("socket.bind", "socket.connect"):
        return [_place(args[1])] if args[0].family == socket.AF_UNIX else []
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        return [str(args[0])]
    return [_place(args[path], args[at] if at is not None else None) for path, at in _PATHS.get(event, ())]


def _note(log: int) -> None:
    open_file = os.open

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        _DIRECTORY.descriptor = dir_fd
        try:
            return open_file(path, flags, mode, dir_fd=dir_fd)
        finally:
            _DIRECTORY.descriptor = None

    def hook(event: str, args: tuple[Any, ...]) -> None:
        for place in _places(event, args):
            if place.startswith("/"):  # else a socket or pipe that the program has open
                os.write(log, f"{event} {place}\n".encode())

    os.supports_dir_fd.add(opened)
    os.open = opened
    sys.addaudithook(hook)


if __name__ == "__main__":
    assert shutil.rmtree.avoids_symlink_attacks  # it looked whether os.open takes a dir_fd when it was imported
    _note(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    sys.argv = ["gpushare-agent", *sys.argv[2:]]
    runpy.run_module("gpushare_agent", run_name="__main__")
