"""One small JSON file that outlives the agent: read whole and bounded, replaced whole and synced, set aside (as
`<name>.corrupt`) where it is not what it should be or somebody else may have written it. Every step is in a daemon thread
and bounded in time. Owns the file, no state in memory.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.json_schema import loaded
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.model.errors import Corrupt, Unavailable

T = TypeVar("T")

MAX_BYTES = 1 << 20
READ_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 5.0
_REMEDY = "if its content is right: chown root, chmod go-w, give it its name again, restart the agent"


class StateFile:
    """`what` names its content in errors. `on_corrupt` is called, in a thread, with why and the name that it has now."""

    def __init__(self, path: Path, what: str, *, on_corrupt: Callable[[str, Path], None]) -> None:
        self._path = path
        self._what = what
        self._on_corrupt = on_corrupt
        # Linux shows 15 characters of a thread's name.
        self._thread = DaemonThread(f"state of {what}"[:15], advice=f"Check the file system of {path}.")

    async def load(self, parse: Callable[[Any], T], empty: Callable[[], T]) -> T:
        """The document, read by `parse`; `empty` where there is none or one that had to be set aside. `parse` runs
        in a thread and raises Corrupt. Raises Unavailable."""
        what = f"reading {self._what} from {self._path}"
        return await self._thread.call(partial(self._load, parse, empty), what, READ_TIMEOUT_S)

    async def save(self, document: Callable[[], dict[str, Any]]) -> None:
        """Replaces the file, whole and on the disk when this returns; `document` is called in a thread. Raises
        Unavailable."""
        what = f"saving {self._what} to {self._path}"
        await self._thread.call(lambda: self._save(document()), what, WRITE_TIMEOUT_S)

    def _load(self, parse: Callable[[Any], T], empty: Callable[[], T]) -> T:
        try:
            content = _content(self._path)
            # In the thread, with the reading: a file of a mebibyte must not hold the loop.
            return parse(loaded(content)) if content is not None else empty()
        except OSError as e:
            raise Unavailable(f"{self._path} cannot be read: {e.strerror or e}") from e
        # Set aside, not deleted and not overwritten: a person may find out what it was.
        except Corrupt as e:
            self._set_aside(str(e))
            return empty()

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_name(self._path.name + ".corrupt")
        try:
            self._path.replace(aside)
        except OSError as e:
            raise Unavailable(f"{self._path} is not usable ({why}) and cannot be set aside: {e.strerror}") from e
        self._on_corrupt(why, aside)

    def _save(self, document: dict[str, Any]) -> None:
        content = json.dumps(document, indent=2).encode() + b"\n"
        # Next to the file, because a rename works only within one file system.
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(new, content)
            new.replace(self._path)
            # Without it a loss of power may leave the old name with no content on some file systems.
            _sync_directory(self._path.parent)
        except OSError as e:
            with suppress(OSError):
                new.unlink()
            raise Unavailable(f"{self._path} cannot be written: {e.strerror or e}") from e


def _content(path: Path) -> bytes | None:
    """The content; None where there is no file. Raises Corrupt where it is too large, no file at all, or not the agent's
    own."""
    try:
        content = read_regular(path, MAX_BYTES + 1, is_own=True)
    except FileNotFoundError:
        return None
    except OSError as e:
        # Not the agent's own, no regular file, or a link: somebody else put it there. Other errors may pass, and are tried
        # again.
        if e.errno in (errno.EPERM, errno.EINVAL, errno.ELOOP):
            raise Corrupt(f"{e.strerror}; {_REMEDY}" if e.errno == errno.EPERM else e.strerror) from e
        raise
    if len(content) > MAX_BYTES:
        raise Corrupt(f"it has more than {MAX_BYTES} bytes")
    return content


def _write_whole(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
