"""Directories and whole files, relative to directory descriptors: no step follows a symbolic link.

A file of the wrong kind is replaced (`clear_path`, which logs it); a link itself is removed, never its target. Errors are
OSErrors; the adapter renames them. No state.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

DIRECTORY_MODE = 0o755
FILE_MODE = 0o644
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_PREFIX = ".new-"
"""Begins the name under which a file is written before it is renamed; a killed writer leaves one behind."""

_NEW_NAME = re.compile(rf"{re.escape(NEW_PREFIX)}[0-9a-f]{{16}}", re.ASCII)
_LEFT_AFTER_S = 600
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 8


@contextmanager
def opened(name: str | Path, directory: int | None, flags: int) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def made_directory(parent: int, name: str, mode: int = DIRECTORY_MODE) -> Iterator[int]:
    """The directory `name`, with `mode`. It is made if need be and replaces anything else."""
    # Looked at before it is opened: a pipe in its place would block an open, a link would lead elsewhere.
    status = status_of(parent, name)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        clear_path(parent, name)
        status = None
    if status is None:
        # Not makedirs: every step is one descriptor, and nobody can put a link in between.
        os.mkdir(name, mode, dir_fd=parent)
    with opened(name, parent, DIRECTORY) as directory:
        if stat.S_IMODE(os.fstat(directory).st_mode) != mode:
            os.fchmod(directory, mode)  # the umask, or somebody changed it
        yield directory


def clear_path(directory: int, name: str) -> None:
    """Removes a file of the wrong kind."""
    log.warning("path_replaced", name=name, directory=str(Path(f"/proc/self/fd/{directory}").readlink()))
    remove_tree(directory, name)


def replace_file(directory: int, name: str, content: bytes, *, is_synced: bool = False) -> bool:
    """Puts `content` at `name` by rename; False where it already is there. `is_synced`: after a loss of power the name has
    the old content or the new one, never none."""
    status = status_of(directory, name)
    # Unchanged files are left alone: a rename would wake everybody who watches the directory.
    if status is not None and stat.S_ISREG(status.st_mode) and holds(directory, name, content):
        return False
    if status is not None and not stat.S_ISREG(status.st_mode):
        clear_path(directory, name)
    # A random name: a tenant who can write to the directory cannot have a link wait there. O_EXCL guards it too.
    new = f"{NEW_PREFIX}{secrets.token_hex(8)}"
    file = os.open(new, _NEW_FILE, FILE_MODE, dir_fd=directory)
    try:
        try:
            # The umask may have taken bits away, and other users read the file.
            os.fchmod(file, FILE_MODE)
            if os.write(file, content) != len(content):
                # a file takes part of a write only when it is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_synced:
                os.fsync(file)
        finally:
            os.close(file)
        # The name has the old content or the new one, at every moment: readers never see a part.
        os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(new, dir_fd=directory)
        raise
    return True


def remove_left_behind(directory: Path) -> None:
    """Removes the new files of writers that were killed, by name and age: others may write there now. Where that fails they
    stay."""
    with suppress(OSError), opened(directory, None, DIRECTORY & ~os.O_NOFOLLOW) as descriptor:
        for name in filter(_NEW_NAME.fullmatch, names_in(descriptor)):
            status = status_of(descriptor, name)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_mtime < time.time() - _LEFT_AFTER_S:
                os.unlink(name, dir_fd=descriptor)


def holds(directory: int | None, name: str | Path, content: bytes) -> bool:
    """Whether it is a regular file with exactly this content, readable for everybody. Raises OSError."""
    with opened(name, directory, _FILE) as file:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != FILE_MODE:
            return False
        return status.st_size == len(content) and os.read(file, len(content) + 1) == content


def read_content(directory: int, name: str, limit: int) -> bytes:
    """A file's first `limit` bytes."""
    with opened(name, directory, _FILE) as file:
        return os.read(file, limit)


def sync_directory(path: Path) -> None:
    """After it a loss of power undoes no rename in the directory."""
    with opened(path, None, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as directory:
        os.fsync(directory)


def has_files(directory: Path) -> bool:
    """Whether there is anything in a directory that can be read."""
    try:
        return next(directory.iterdir(), None) is not None
    except OSError:
        return False


def names_in(directory: int) -> list[str]:
    return sorted(os.listdir(directory))


def status_of(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_tree(parent: int, name: str, depth: int = 0) -> None:
    """Removes what is at `name`, a link itself; neither into another file system nor deeper than the agent builds."""
    status = os.lstat(name, dir_fd=parent)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    # A mount below may be a host's directory: its content is not the agent's to remove.
    if status.st_dev != os.fstat(parent).st_dev or depth >= _MAX_DEPTH:
        raise OSError(errno.EBUSY, f"{name} is a mount, or nested deeper than {_MAX_DEPTH} directories")
    with opened(name, parent, DIRECTORY) as directory:
        for entry in names_in(directory):
            remove_tree(directory, entry, depth + 1)
    os.rmdir(name, dir_fd=parent)
