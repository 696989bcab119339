"""Notices when something may have changed in one directory, also when the directory itself is replaced.

An event only means "compare again": the caller compares what is there with what should be. inotify makes it fast; a slow
poll covers what inotify does not report (a file system mounted over the directory, an exhausted inotify limit, a lost
event). Not for following file contents. asyncinotify is imported when the watch begins: it runs ldconfig to find libc. State
owned: one inotify descriptor.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.supervision import ReportOnce

if TYPE_CHECKING:
    from asyncinotify import Inotify, Watch

log = structlog.get_logger(__name__)


class DirectoryWatch(Struct, eq=False):
    """Watches the names in one directory, which need not exist yet. One waiter at a time; close it with `close`. While it is
    missing or cannot be watched it is polled every `fast_poll_s`: a kubelet that starts admits pods a second later. Watching
    is tried again every `retry_s`."""

    directory: Path
    poll_s: float = 5.0
    fast_poll_s: float = 0.25
    retry_s: float = 30.0
    _retry_at: float = float("-inf")
    _failures: ReportOnce = field(default_factory=ReportOnce)
    _inotify: Inotify | None = None
    _watch: Watch | None = None
    _watched: tuple[int, int] | None = None
    _is_sure: bool = False
    """False after a wait without an event: one read in its last moment is lost, perhaps that the directory is gone."""

    async def wait_change(self) -> None:
        """Waits for an event or the next poll, whichever is first.

        Returns at once when the directory was found again: nobody knows what happened in it before the watch began.
        """
        if self._rewatch():
            return
        # The directory is missing, or inotify has no instance left: a kubelet that starts admits pods a second later.
        if self._inotify is None or self._watch is None:
            await asyncio.sleep(self.fast_poll_s)
            return
        self._is_sure = False
        try:
            async with asyncio.timeout(self.poll_s):
                # One is enough: the caller compares all that is there, and further ones end the next wait.
                event = await self._inotify.get()
        except TimeoutError:
            return
        from asyncinotify import Mask

        self._is_sure = True
        lost = Mask.IGNORED | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT
        if event.mask & lost and event.watch is self._watch:
            self._watch = None  # an inode number can be the same again: the event counts, not the number

    def _rewatch(self) -> bool:
        """Puts the watch onto what the path names now; true if that is another directory than before."""
        current = _directory_identity(self.directory)
        # By device and inode: the same directory under its name, or one that was made since and has its number.
        is_same = self._watch is not None and current is not None and current == self._watched
        if is_same and self._is_sure:
            return False
        # A watch follows the inode: it would go on to report of the directory that was moved away.
        if not is_same:
            self._unwatch()
        now = time.monotonic()
        if current is None or now < self._retry_at:
            return False
        from asyncinotify import Inotify, Mask

        events = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF
        try:
            if self._inotify is None:
                self._inotify = Inotify()
            # ONLYDIR: a file that takes the directory's name is no directory to watch.
            # The kernel has one watch of a directory, however often it is added.
            self._watch = self._inotify.add_watch(self.directory, events | Mask.ONLYDIR)
        except (FileNotFoundError, NotADirectoryError):  # it went away just now
            return False
        except OSError as e:  # a limit of inotify or of open files: it may be over later
            self._retry_at = now + self.retry_s
            if self._failures.is_new(str(e)):
                fields = {"poll_s": self.fast_poll_s, "retried_in_s": self.retry_s}
                log.warning("directory_not_watched", directory=str(self.directory), error=str(e), **fields)
            return False
        if self._failures.is_over():
            log.info("directory_watched_again", directory=str(self.directory))
        self._watched, self._is_sure = current, True
        return not is_same

    def close(self) -> None:
        inotify, self._inotify, self._watch = self._inotify, None, None
        if inotify is not None:
            inotify.close()

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
