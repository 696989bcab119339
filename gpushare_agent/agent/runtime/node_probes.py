"""Probes what the operating system of a node offers: sockets, device nodes, /proc, directories.

Used by `gpushare-agent check` before the agent is deployed, and by an agent next to the one that serves, so nothing here
changes the node: a written probe file is removed at once. What is missing is an Unavailable whose text names what was
found; the remedy is the caller's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from gpushare_agent.core.kit.peer_credentials import is_host_pid_namespace, peer_credentials
from gpushare_agent.core.kit.sockets import MAX_ADDRESS_BYTES
from gpushare_agent.core.model.errors import Unavailable, os_errors_as

RUNTIME_SOCKETS = tuple(
    Path(path)
    for path in (
        "/run/containerd/containerd.sock",
        "/run/crio/crio.sock",
        "/run/cri-dockerd.sock",
        "/run/k3s/containerd/containerd.sock",
        "/run/k0s/containerd.sock",
        "/var/snap/microk8s/common/run/containerd.sock",
    )
)
"""Where the known container runtimes listen by default, in the order in which they are tried."""

_MIN_FREE_BYTES = 1 << 20


class WritableDirectory(Struct, frozen=True, kw_only=True):
    """`directory` is where a file could be written: the asked one, or the parent in which it will be made."""

    directory: Path
    free_bytes: int


async def connect_to_socket(path: Path) -> None:
    """Opens and closes a connection; sends nothing. Raises Unavailable: no socket there, or nobody listens on it."""
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise Unavailable(f"{path}: {_socket_reason(path, error)}") from error
    await _hang_up(writer)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # a server that closes a silent connection first has accepted, and that was the question
        await writer.wait_closed()


def _socket_reason(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "not there"
    if error.errno in (errno.ECONNREFUSED, errno.ENOTSOCK):
        return "there, but nobody listens on it" if path.is_socket() else "there, but not a socket"
    # Python raises it without an errno, before the kernel is asked.
    if "too long" in str(error):
        return f"a socket's path may have at most {MAX_ADDRESS_BYTES} bytes"
    return error.strerror or str(error)


def require_device_node(path: Path) -> None:
    """Checks that `path` is a character device that this process may open.

    Raises Unavailable: it is missing, something else, or not accessible.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise Unavailable(f"{path}: {_missing_or(error)}") from error
    if not stat.S_ISCHR(mode):
        raise Unavailable(f"{path}: there, but not a character device")
    # Asked and not opened: a check leaves no trace at the driver.
    if not os.access(path, os.R_OK | os.W_OK):
        raise Unavailable(f"{path}: there, but not readable and writable for this user")


async def sees_processes_of_node(node_socket: Path) -> bool:
    """Whether PIDs of this process's namespace are the node's. `node_socket` is one on which the kubelet listens.

    On a node that is itself a container the namespace is not the machine's: there it counts that the kernel has a PID here
    for the process behind the kubelet's socket. Opens and closes a connection at most.
    """
    # Cheap and sure; the connection below is for nodes that are containers themselves.
    if is_host_pid_namespace():
        return True
    try:
        _, writer = await asyncio.open_unix_connection(str(node_socket))
    except OSError:
        return False
    credentials = peer_credentials(writer.transport)
    await _hang_up(writer)
    return credentials is not None and credentials.pid > 0


def require_proc(proc_root: Path) -> None:
    """Checks that `proc_root` is the /proc of this process's PID namespace and readable.

    Raises Unavailable: it is not there, no /proc, or shows the PIDs of another namespace.
    """
    try:
        shown = (proc_root / "self").readlink()
    except OSError as error:
        # `self` of another namespace's /proc is a link that leads nowhere for this process.
        if (proc_root / "self").is_symlink() or (proc_root / "1").exists():
            raise Unavailable(f"{proc_root}: it shows another PID namespace, in which this process is not") from error
        reason = "there, but no /proc" if proc_root.is_dir() else _missing_or(error)
        raise Unavailable(f"{proc_root}: {reason}") from error
    # A /proc of an outer namespace has another number for this process.
    if str(shown) != str(os.getpid()):
        raise Unavailable(
            f"{proc_root}: it shows another PID namespace (this process is {os.getpid()} here, {shown} there)"
        )
    try:
        (proc_root / "self" / "cgroup").read_bytes()
    except OSError as error:
        raise Unavailable(f"{proc_root}/self/cgroup: {_missing_or(error)}") from error


def require_writable(directory: Path) -> WritableDirectory:
    """Writes a file that nobody sees in `directory`, or in the nearest parent there is, where it would be made.

    Raises Unavailable: it is a file, read-only, closed to us, or the disk is full.
    """
    existing = directory
    # lexists: a dangling link is in the way of mkdir.
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise Unavailable(f"{directory}: {existing} is no directory")
    with (
        os_errors_as(Unavailable, f"{directory}: cannot write in {existing}"),
        tempfile.TemporaryFile(dir=existing) as probe,
    ):
        # Without a name: others list these directories.
        probe.write(b"\0" * 4096)
        probe.flush()
        # After a write that worked: a full disk may still take a small file from the blocks kept for root.
        free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # for the remedy
        raise Unavailable(f"{directory}: the disk of {existing} is full ({free} bytes free)") from full
    return WritableDirectory(directory=existing, free_bytes=free)


def require_readable_file(path: Path) -> None:
    """Opens `path` for reading. Raises Unavailable: it is missing, a directory, or not accessible."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise Unavailable(f"{path}: {_missing_or(error)}") from error


def _missing_or(error: OSError) -> str:
    return "not there" if error.errno == errno.ENOENT else (error.strerror or str(error))
