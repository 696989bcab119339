"""TCP ports that this process keeps while nobody listens on them: bound, and never listening.

A server on a held port sets SO_REUSEADDR, in this process or in a child. State owned: the ports for children.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
_FOR_CHILDREN: list[socket.socket] = []


def hold_port(port: int = 0) -> socket.socket:
    """Until it is closed. Raises OSError where the port is in use."""
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, port))
    except OSError:
        held.close()
        raise
    return held


def free_port() -> int:
    """A port for a child process. It is held until this process ends: else another server could get the number before the
    child's first start, or between two."""
    _FOR_CHILDREN.append(hold_port())
    port: int = _FOR_CHILDREN[-1].getsockname()[1]
    return port
