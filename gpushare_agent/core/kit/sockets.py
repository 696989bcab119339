"""Unix sockets in the file system: binding, stale files, long paths, identities.

A socket address has 107 bytes of path, and the kubelet's directory may be deeper than that (a test, a sandbox, a
container's volume). Longer paths go through a descriptor of the directory, which also keeps every step in the same
directory if another one gets its name meanwhile. Not for listening or accepting: the servers do that. No state.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpushare_agent.core.kit.directories import opened

MAX_ADDRESS_BYTES = 107
"""sizeof(sockaddr_un.sun_path) less the terminating zero (unix(7))."""

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

FileIdentity = tuple[int, int, int]
"""Device, inode and time of the last inode change in ns. Inode numbers are reused at once; the time differs."""


def file_identity(path: Path | str) -> FileIdentity | None:
    """The identity of the file at `path` now (of a symbolic link itself, not of its target), None where nothing can be
    seen."""
    try:
        return _identity(os.lstat(path))
    except OSError:
        return None


def _identity(status: os.stat_result) -> FileIdentity:
    # The kubelet's socket was made again under the same inode number, and a restart was missed (measured).
    return status.st_dev, status.st_ino, status.st_ctime_ns


def bind_unix_socket(path: Path, *, mode: int) -> socket.socket:
    """Binds a non-blocking stream socket at `path` and replaces a stale one; it does not listen yet.

    The file never has more permissions than `mode`, not even for a moment. Only a socket is replaced: any other file,
    and a symbolic link to whatever, is left alone.

    Raises:
        FileExistsError: something that is no socket lies at `path`.
        OSError: the directory is missing or not writable, or the name is too long.
    """
    with opened(path.parent, None, _DIRECTORY) as directory:
        # The kernel refuses to bind where a file is, and a killed process leaves its socket behind.
        _remove_stale(path, directory)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(sock.fileno(), mode)  # the kernel creates the file with these bits, less the umask
            sock.bind(_address(path, directory))
            # After bind: the umask of a process cannot be changed for one socket without all threads having it.
            _grant(path.name, directory, mode)
        except BaseException:
            sock.close()
            raise
    return sock


def remove_socket(path: Path, identity: FileIdentity | None) -> bool:
    """Removes the socket at `path` if it still is this one; whether it was removed. None is no socket. Raises OSError."""
    try:
        with opened(path.parent, None, _DIRECTORY) as directory:
            status = os.lstat(path.name, dir_fd=directory)
            # Another agent may have bound the name meanwhile: its socket must stay.
            if not stat.S_ISSOCK(status.st_mode) or _identity(status) != identity:
                return False
            os.unlink(path.name, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def connectable_path(path: Path) -> Iterator[str]:
    """A name of the socket at `path` that fits a socket address; valid inside the `with` block only.

    Raises OSError: the path is long and its directory cannot be opened.
    """
    # By its name where that fits: tools such as ss show it.
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    with opened(path.parent, None, _DIRECTORY) as directory:
        yield _address(path, directory)


def is_served(path: Path, *, in_doubt: bool = False) -> bool:
    """Whether a process listens at the socket `path`. A full backlog shows one, too. `in_doubt` is the answer where that
    cannot be known, as without a free descriptor."""
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe,
            connectable_path(path) as address,
        ):
            probe.connect(address)
    # EAGAIN of connect(2): the backlog is full, so somebody listens.
    except BlockingIOError:
        return True
    # A crashed server leaves its file; only the refused connection tells that nobody serves it.
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return in_doubt
    return True


def _address(path: Path, directory: int) -> str:
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        return str(path)
    return f"/proc/self/fd/{directory}/{path.name}"


def _remove_stale(path: Path, directory: int) -> None:
    try:
        status = os.lstat(path.name, dir_fd=directory)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(f"{path} exists and is not a socket: it is left alone; remove it or choose another path")
    os.unlink(path.name, dir_fd=directory)


def _grant(name: str, directory: int, mode: int) -> None:
    """Adds the bits that the umask took away, on the file itself and not on what a link may point to."""
    file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        status = os.fstat(file)
        if stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
            Path(f"/proc/self/fd/{file}").chmod(mode)
    finally:
        os.close(file)
