"""Reads whole files that somebody else may have put in place, never a pipe, never without a bound; and replaces whole files.
No state."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# O_NONBLOCK: opening a pipe without a writer would wait for one.
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def replace_whole(path: Path, content: bytes) -> None:
    """By rename: a reader finds the old content or the new one. Raises OSError."""
    new = path.with_name(f".{path.name}")
    new.write_bytes(content)
    new.replace(path)


def read_regular(path: Path, most_bytes: int, *, follow: bool = False, is_own: bool = False) -> bytes:
    """The content of the file at `path`. A link is an error unless `follow` is set.

    `is_own`: the file must be root's or this process's, and nobody else's to write.

    Raises:
        OSError: it cannot be read; it is a link, or no regular file (a pipe would block its reader for ever); EFBIG: it has
            more bytes.
        PermissionError: it is not own.
    """
    file = os.open(path, _OPEN | (0 if follow else os.O_NOFOLLOW))
    try:
        # Asked of the descriptor, after the open: the name may lead elsewhere a moment later.
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if is_own and (why := _not_own(status)):
            raise PermissionError(errno.EPERM, why)
        # One byte more, so that a longer file shows without being read whole.
        content = _read(file, most_bytes + 1)
        if len(content) > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes")
        return content
    finally:
        os.close(file)


def _read(file: int, limit: int) -> bytes:
    parts, left = [], limit
    # os.read may return less than asked, as of /proc and of network file systems.
    while left > 0 and (part := os.read(file, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _not_own(status: os.stat_result) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to UID {status.st_uid}, not to root or the agent's user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
