"""This process and the operating system: how many files it may open, and notifications of the service manager. How child
processes end.

Changes the process's own limits when asked; no other state.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

import structlog

from gpushare_agent.core.kit.supervision import at_most

log = structlog.get_logger(__name__)

ENOUGH_OPEN_FILES = 65_536
"""1,000 containers with all their connections. More would only make a leak show later."""


def read_open_files_limit() -> tuple[int, int]:
    """The soft limit, which counts, and the hard limit, up to which a process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _as_number(soft), _as_number(hard)


def raise_open_files_limit() -> tuple[int, int]:
    """Raises the soft limit to the hard one, at most to 65,536; it is never lowered. Returns both as they are then.

    The usual soft limit of 1,024 is that low for programs that call select(), which the agent does not. Connections of
    containers get a quarter of it (kit/bounded_grpc.py).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    desired = min(_as_number(hard), ENOUGH_OPEN_FILES)
    # Never lowered: an operator's higher limit stays.
    if _as_number(soft) < desired:
        # a hard limit above fs.nr_open cannot be set to itself: the old soft one stays
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (desired, hard))
    return read_open_files_limit()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 * 1024


def give_back_memory() -> None:
    """Gives glibc fixed rules for this process (mallopt(3)): what is free at the end of the heap above 512 KiB goes back to
    the system, and so does each block as large that is freed. Else the first large answer raises both limits, up to 64 MiB,
    for good. With those that glibc begins with, 128 KiB, each read of a socket took fresh pages: asyncio makes room for 256
    KiB."""
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def sd_notify(state: str, environ: Mapping[str, str]) -> bool:
    """Sends `state` ("READY=1", "STOPPING=1") as one datagram to NOTIFY_SOCKET, which is the whole sd_notify protocol.

    Returns whether it was sent. A service manager that cannot be reached must not stop the service: that is only logged.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        # Non-blocking: a service manager that does not read must not hold the agent.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
            sender.connect(path)
            sender.send(state.encode())
    except OSError as error:
        log.warning("service_manager_not_notified", socket=address, state=state, error=str(error))
        return False
    return True


def _as_number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


async def end_process(process: asyncio.subprocess.Process, timeout_s: float, *, has_group: bool = False) -> None:
    """Kills it, where `has_group` with its process group, unless it has ended, and waits for its end; one that the kernel
    cannot end is left after that time. Its pipes are closed in any case: a descendant in a session of its own may keep the
    other ends open."""
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                if has_group:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            await at_most(timeout_s, process.wait())
    finally:
        process._transport.close()  # type: ignore[attr-defined]  # asyncio closes them only at their other ends' end
        # If it did not read its input, some versions of asyncio log later that nobody asked how that ended.
        closed = process._protocol._stdin_closed  # type: ignore[attr-defined]
        closed.add_done_callback(lambda closed: closed.cancelled() or closed.exception())
