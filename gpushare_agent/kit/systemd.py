"""Tells systemd, or whoever set NOTIFY_SOCKET, that the service is ready or stopping (the whole sd_notify protocol)."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)


def sd_notify(state: str, environ: Mapping[str, str]) -> bool:
    """Sends `state` ("READY=1", "STOPPING=1") as one datagram. Returns whether somebody was told.

    A service manager that cannot be reached must not stop the service: that is logged and False.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
            sender.connect(path)
            sender.send(state.encode())
    except OSError as error:
        log.warning("service_manager_not_notified", socket=address, state=state, error=str(error))
        return False
    return True
