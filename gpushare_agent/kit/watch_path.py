"""Notices when something may have changed in one directory, also when the directory itself is replaced.

An event only means "compare again": the caller compares what is there with what should be. inotify makes it fast; a slow
poll covers what inotify does not report (a file system mounted over the directory, an exhausted inotify limit, a lost
event). Not for following file contents. State owned: one inotify descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from asyncinotify import Inotify, Mask, Watch

log = structlog.get_logger(__name__)

_EVENTS = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF
_LOST = Mask.IGNORED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT


class DirectoryWatch:
    """Watches the names in one directory. One waiter at a time; open it with `open_directory_watch`."""

    def __init__(self, directory: Path, inotify: Inotify | None, *, poll_s: float, fast_poll_s: float) -> None:
        self._directory = directory
        self._inotify = inotify
        self._poll_s = poll_s
        self._fast_poll_s = fast_poll_s
        self._watch: Watch | None = None
        self._watched: tuple[int, int] | None = None

    async def wait_change(self) -> None:
        """Waits for an event or the next poll, whichever is first.

        Returns at once when the directory was found anew: what happened in it before the watch began is not known.
        """
        if self._rewatch():
            return
        if self._inotify is None or self._watch is None:
            await asyncio.sleep(self._fast_poll_s)
            return
        try:
            async with asyncio.timeout(self._poll_s):
                event = await self._inotify.get()
        except TimeoutError:
            return
        if event.mask & _LOST and event.watch is self._watch:
            self._watch = None  # an inode number can be the same again: the event counts, not the number

    def _rewatch(self) -> bool:
        """Puts the watch onto what the path names now; true if that is another directory than before."""
        current = _directory_identity(self._directory)
        if self._watch is not None and current is not None and current == self._watched:
            return False
        self._unwatch()
        if current is None or self._inotify is None:
            return False
        try:
            self._watch = self._inotify.add_watch(self._directory, _EVENTS | Mask.ONLYDIR)
        except OSError as e:
            log.warning("directory_not_watched", directory=str(self._directory), error=str(e), poll_s=self._fast_poll_s)
            return False
        self._watched = current
        return True

    def _unwatch(self) -> None:
        if self._watch is not None and self._inotify is not None:
            try:
                self._inotify.rm_watch(self._watch)
            except OSError:
                pass  # the kernel dropped it with the directory
        self._watch = None
        self._watched = None


def _directory_identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@asynccontextmanager
async def open_directory_watch(
    directory: Path, *, poll_s: float = 5.0, fast_poll_s: float = 0.1
) -> AsyncIterator[DirectoryWatch]:
    """Opens a watch of `directory`, which need not exist yet: while it is missing, it is polled every `fast_poll_s`."""
    try:
        inotify = Inotify()
    except OSError as e:
        log.warning("inotify_unavailable", directory=str(directory), error=str(e), poll_s=fast_poll_s)
        yield DirectoryWatch(directory, None, poll_s=poll_s, fast_poll_s=fast_poll_s)
        return
    with inotify:
        yield DirectoryWatch(directory, inotify, poll_s=poll_s, fast_poll_s=fast_poll_s)
