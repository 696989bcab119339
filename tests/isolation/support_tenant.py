"""The files of tenants that this process has open, and one that the kernel takes long to shorten, as far as the system calls
of this process show it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import USAGE_NAME


def open_in(directory: Path) -> list[str]:
    """The files below it that this process has open, as they are named now."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def open_usages(containers: Path) -> list[str]:
    """Each once: its map has a descriptor of its own."""
    return list(dict.fromkeys(path for path in open_in(containers) if USAGE_NAME in path))


_BY_NAME = {"rename": 0, "replace": 0, "link": 0, "unlink": 0, "remove": 0, "truncate": 0, "open": 0}
"""The calls that wait for a file's lock, with the place of its name among the arguments."""


class SlowFiles:
    """From a first ftruncate of a file on, of `most` files, which ends with `release` or with the block, whoever renames,
    links, opens to write, shortens or removes it waits. So does a rename from one directory to another while there is such a
    file: another one may hold the lock that all of them take. The kernel does so on ext4.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 100) -> None:
        self._most = most
        self.released = threading.Event()
        self.slow: set[tuple[int, int]] = set()
        self.waited: list[str] = []
        self._ftruncate = os.ftruncate
        monkeypatch.setattr(os, "ftruncate", self._shorten)
        for name, place in _BY_NAME.items():
            monkeypatch.setattr(os, name, self._waiting(name, getattr(os, name), place))

    def __enter__(self) -> SlowFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.released.set()

    def _shorten(self, file: int, length: int) -> None:
        status = os.fstat(file)
        if len(self.slow) < self._most:
            self.slow.add((status.st_dev, status.st_ino))
        if (status.st_dev, status.st_ino) in self.slow:
            assert self.released.wait(60)
        self._ftruncate(file, length)

    def _waiting(self, name: str, call: Callable[..., Any], place: int) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            directory = kwargs.get("src_dir_fd", kwargs.get("dir_fd"))
            is_read = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
            is_moved = name in ("rename", "replace") and _parent(args[0], directory) != _parent(
                args[1], kwargs.get("dst_dir_fd")
            )
            if not is_read and self.slow and not self.released.is_set():
                names = [(args[place], directory)]
                names += [(args[1], kwargs.get("dst_dir_fd"))] if name in ("rename", "replace", "link") else []
                if is_moved or any(_identity(*one) in self.slow for one in names):
                    self.waited.append(f"{name} {args[place]}")
                    assert self.released.wait(60)
            return call(*args, **kwargs)

        return waiting


def _identity(path: str | Path, directory: int | None) -> tuple[int, int] | None:
    try:
        status = os.lstat(path, dir_fd=directory)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _parent(path: str | Path, directory: int | None) -> str:
    base = Path(f"/proc/self/fd/{directory}").readlink() if directory is not None else Path.cwd()
    return str((base / path).parent)
