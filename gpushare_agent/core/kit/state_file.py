"""One small JSON file that outlives the agent: read whole and bounded, replaced whole and synced, set aside (as
`<name>.corrupt`) where it is not what it should be or somebody else may have written it: the copy that was last read or
written, `<name>.last`, takes its place, and the log says so. The document's field `digest` shows damage. Every step is in a
daemon thread and bounded in time. Owns the files, no state in memory.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from msgspec import Struct, to_builtins

from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.directories import sync_directory
from gpushare_agent.core.kit.json_schema import converted, loaded
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.model.errors import Corrupt

log = structlog.get_logger(__name__)

T = TypeVar("T")
D = TypeVar("D", bound=Struct)

MAX_BYTES = 1 << 20
READ_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 5.0
_DIGEST = "digest"
IS_COPY = "the last good copy is used"
_REMEDY = "if its content is right: chown root, chmod go-w, give it its name again, restart the agent"


class StateFile(Generic[D]):
    """`what` names its content in errors, `schema` is its document's. Where it is set aside the log has the `event`, with
    `why`, the name that it has now, `kept_as`, and what follows, `then`: IS_COPY, or `lost` if there is no good copy. What
    is written often and missed by nobody `has_copy` false."""

    def __init__(
        self,
        path: Path,
        what: str,
        schema: type[D],
        *,
        event: str,
        lost: str,
        most_bytes: int = MAX_BYTES,
        has_copy: bool = True,
    ) -> None:
        self._path, self._schema = path, schema
        self._most_bytes = most_bytes
        self._has_copy = has_copy
        self._copy = path.with_name(path.name + ".last")
        self._lost = lost
        self._what = what
        self._event = event
        # Linux shows 15 characters of a thread's name.
        self._thread = DaemonThread(f"state of {what}"[:15], advice=f"Check that the agent may write in {path.parent}.")

    async def load(self, read: Callable[[D], T], empty: Callable[[], T]) -> T:
        """What `read` makes of the document, or of its last good copy; `empty` where there is none. `read` runs in a thread
        and raises Corrupt. Raises Unavailable."""
        what = f"reading {self._what} from {self._path}"
        return await self._thread.call(partial(self._load, read, empty), what, READ_TIMEOUT_S)

    async def save(self, document: Callable[[], D]) -> None:
        """Replaces the file, whole and on the disk when this returns; `document` is called in a thread. Raises
        Unavailable."""
        what = f"saving {self._what} to {self._path}"
        await self._thread.call(lambda: self._save(document()), what, WRITE_TIMEOUT_S)

    def _load(self, read: Callable[[D], T], empty: Callable[[], T]) -> T:
        try:
            # In the thread, with the reading: a file of a mebibyte must not hold the loop.
            if (found := self._read(self._path, read)) is None:
                return empty()
            self._keep_copy(found[0])
            return found[1]
        # Set aside, not deleted and not overwritten: a person may find out what it was.
        except Corrupt as e:
            return self._from_copy(read, empty, str(e))

    def _keep_copy(self, content: bytes) -> None:
        known = None
        with suppress(OSError, Corrupt):
            known = _content(self._copy, self._most_bytes)
        if self._has_copy and known != content:
            with suppress(OSError):  # a full disk: what was read counts all the same
                self._replace(self._copy, content)

    def _from_copy(self, read: Callable[[D], T], empty: Callable[[], T], why: str) -> T:
        aside = self._path.with_name(self._path.name + ".corrupt")
        copy = None
        with suppress(OSError, Corrupt):
            copy = self._read(self._copy, read)
        try:
            if copy is None:
                self._path.replace(aside)
            else:
                self._replace(self._path, copy[0], aside)
        except OSError:
            if copy is None:
                raise
            aside = self._path  # a full disk: the copy counts all the same, and is read again at the next start
        report = log.error if self._has_copy else log.warning
        report(self._event, why=why, kept_as=str(aside), then=IS_COPY if copy is not None else self._lost)
        return copy[1] if copy is not None else empty()

    def _read(self, path: Path, read: Callable[[D], T]) -> tuple[bytes, T] | None:
        """The content, and what it says. Raises OSError, Corrupt."""
        if (content := _content(path, self._most_bytes)) is None:
            return None
        raw = loaded(content)
        # A person who has put the content right takes it out.
        if isinstance(raw, dict) and (known := raw.pop(_DIGEST, None)) is not None and known != _digest(raw):
            raise Corrupt(f"its content is not what the agent wrote; if it is right, remove the field {_DIGEST}")
        return content, read(converted(raw, self._schema))

    def _save(self, document: D) -> None:
        raw: dict[str, Any] = to_builtins(document)
        content = json.dumps({**raw, _DIGEST: _digest(raw)}, indent=2).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._replace(self._path, content)
        self._keep_copy(content)
        # Without it a loss of power may leave the old name with no content on some file systems.
        sync_directory(self._path.parent)

    def _replace(self, path: Path, content: bytes, aside: Path | None = None) -> None:
        """Synced, but for the copy: to read must not wait for a busy disk. `aside` is the name that what is there gets."""
        # Next to the file, because a rename works only within one file system.
        new = self._path.with_name(self._path.name + ".new")
        try:
            _write_whole(new, content, is_synced=path is self._path)
            if aside is not None:
                try:  # under both names, so that an agent that is killed now leaves one
                    aside.unlink(missing_ok=True)
                    os.link(path, aside, follow_symlinks=False)
                except OSError:  # a directory, or a file system without such links
                    path.replace(aside)
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def _digest(document: dict[str, Any]) -> str:
    """One wrong bit makes another GPU of a UUID, and no damage is seen. Raises Corrupt."""
    try:
        return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    except RecursionError as e:
        raise Corrupt("it is nested too deeply") from e


def _content(path: Path, most_bytes: int) -> bytes | None:
    """The content; None where there is no file. Raises Corrupt where it is too large, no file at all, or not the agent's
    own."""
    try:
        return read_regular(path, most_bytes, is_own=True)
    except FileNotFoundError:
        return None
    except OSError as e:
        # Not the agent's own, no regular file, a link, or too large: somebody else put it there; or the disk has lost it,
        # but not its copy. Other errors may pass, and are tried again.
        if e.errno in (errno.EPERM, errno.EINVAL, errno.ELOOP, errno.EFBIG, errno.EIO):
            raise Corrupt(f"{e.strerror}; {_REMEDY}" if e.errno == errno.EPERM else e.strerror) from e
        raise


def _write_whole(path: Path, content: bytes, *, is_synced: bool) -> None:
    # O_NONBLOCK: opening a pipe without a reader would wait for one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
