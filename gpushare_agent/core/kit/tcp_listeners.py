"""Listening TCP sockets for every address of a name. No state: the sockets are the caller's to close.

An empty address is every address of this machine, of IPv4 and of IPv6, in every setting. 0.0.0.0 and :: are those of one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Iterable

from gpushare_agent.core.model.errors import Unavailable

RESOLVE_TIMEOUT_S = 5.0
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The machine lacks this address (often ::1)."""


async def listen_tcp(addr: str, port: int, *, backlog: int, only_loopback: bool = False) -> list[socket.socket]:
    """One socket for each address of the name that this machine has, an IPv6 address with or without brackets. An empty
    one has two sockets, or one where the kernel lacks the other protocol. Port 0 takes a free one, the same for all.

    Raises:
        Unavailable: the name is unknown, the port is taken, or, with `only_loopback`, an address is for other hosts too.
    """
    addr = addr.strip("[]")
    what = f"listening on {host_port(addr, port)} failed"
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            resolved = await loop.getaddrinfo(addr or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, TimeoutError) as e:  # UnicodeError: a name such as a..b
        raise Unavailable(f"{what}: the address is unknown ({e or 'no answer'})") from e
    # A set, because /etc/hosts may name an address twice; sorted, because the order depends on the host.
    found = sorted({(int(family), address) for family, _, _, _, address in resolved}, key=str)
    outside = [str(address[0]) for _, address in found if not is_loopback(str(address[0]))]
    if only_loopback and outside:
        raise Unavailable(f"{what}: {addr} means {', '.join(outside)}, which other hosts reach")
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in found:
        # Port 0: what the first socket got, the others take too.
        taken = listeners[0].getsockname()[1] if listeners else port
        try:
            listeners.append(_listen(family, (address[0], taken, *address[2:]), backlog))
        except OSError as e:
            # `localhost` often names ::1 on hosts without IPv6.
            if e.errno not in _ABSENT:
                close_all(listeners)
                raise Unavailable(f"{what}: {e.strerror or e}") from e
            absent = e
    if not listeners:
        raise Unavailable(f"{what}: this machine has no such address") from absent
    return listeners


def is_loopback(address: str) -> bool:
    """Whether only this host can connect to the IP address; false for a name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_port(address: str, port: int | None) -> str:
    """Both as a URL has them, an IPv6 address in brackets, which it may have already. An empty address is shown as `*`."""
    address = address.strip("[]") or "*"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def close_all(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _listen(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Otherwise `::` would take the port of `0.0.0.0` too, and that socket would fail. An IPv4 address in IPv6's form
            # cannot be bound with it.
            is_ipv6_only = not str(address[0]).startswith("::ffff:")
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_ipv6_only)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
