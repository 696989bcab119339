"""The process at the other end of a unix socket, as the kernel recorded it when the peer connected (SO_PEERCRED, unix(7)).
And whether this process sees the PIDs of the whole machine: a PID names the peer.

It does not tell what that process is: its container is found from the PID, elsewhere. No state.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:  # the in-container client, which only reads, starts without it
    import asyncio

_UCRED = struct.Struct("=iII")
"""struct ucred: pid_t, uid_t, gid_t."""


class PeerCredentials(Struct, frozen=True, kw_only=True):
    """`pid` is 0 where the peer lives in a PID namespace that this process cannot see into."""

    pid: int
    uid: int


def peer_credentials(transport: asyncio.BaseTransport) -> PeerCredentials | None:
    """The credentials of the peer; None where the transport has no unix socket (any more)."""
    sock = transport.get_extra_info("socket")
    # A transport that is closed has no socket any more, and TCP has no credentials.
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    try:
        return socket_peer(sock)
    except OSError:  # the connection is closed
        return None


def socket_peer(sock: socket.socket) -> PeerCredentials:
    """The credentials of the peer of a connected unix socket; of a client's, the one who listens. Raises OSError where it
    is closed."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerCredentials(pid=pid, uid=uid)


_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode number of the PID namespace that the kernel starts with (PROC_PID_INIT_INO)."""


def is_host_pid_namespace() -> bool:
    """Whether this is the PID namespace of the host. False also where it is not known, and on a node that is itself a
    container."""
    # The kernel's first namespace has a fixed inode number; all others are made later and have another.
    return pid_namespace_of("self") == _FIRST_PID_NAMESPACE


def pid_namespace_of(process: int | str) -> int | None:
    """A number that names the PID namespace of a process, None where it is gone or may not be read."""
    try:
        return os.stat(f"/proc/{process}/ns/pid").st_ino  # noqa: PTH116 - kit stays light: the in-container client uses it
    except OSError:
        return None
