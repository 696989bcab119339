"""Answers requests for debug pages from this host's programs, or with a token; never from a web page in a browser.

| danger | answer |
|---|---|
| the port is reachable from other hosts | without a token file only connections between loopback addresses are answered |
| a web page calls localhost (kubectl port-forward) | requests that a browser marks as another page's are refused |
| a name of the attacker's that resolves to 127.0.0.1 | on a loopback address only this host's names are served |
| a request line with the URL of another host, which counts instead of the Host header (RFC 9112, 3.2.2) | refused |
| guessing the token byte by byte | digests are compared, in constant time |

No proxy's headers are believed. State owned: the token's digest and when it was read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kit.tcp_listeners import is_loopback
from gpushare_agent.core.model.errors import Unavailable

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

log = structlog.get_logger(__name__)

READ_AGAIN_S = 1.0
MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 4096
_READ_TIMEOUT_S = 2.0
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f.]*:[0-9a-f:.]*)\]|(?P<name>[^\[\]:\s]+))(?::[0-9]{1,5})?")
"""Brackets are for IPv6 (RFC 3986, 3.2.2): no client writes [127.0.0.1]."""


class Denied(Struct, frozen=True, kw_only=True):
    """The HTTP status of a refusal and its text."""

    status: int
    text: str


class Guard:
    """`token_file` None: no token is needed, and only this host is answered, by its own names in the Host header.

    `has_page`: a page of the listener itself may ask; a browser names it as the origin of its scripts' requests.
    """

    def __init__(
        self, token_file: Path | None, *, has_page: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._has_page = has_page
        self._token = _TokenFile(token_file, clock) if token_file is not None else None

    async def denies(self, target: str, headers: CIMultiDictProxy[str], *, is_local: bool) -> Denied | None:
        """Why this request is not answered, None where it is. `target` is the request line's; `is_local`: it came
        from a loopback address to a loopback address."""
        if not target.startswith("/"):
            return Denied(status=400, text="the request line must hold a path, not a URL")
        if self._token is None and not is_local:
            return Denied(
                status=403, text="only this host is served: kubectl port-forward, or set web.debug_token_file"
            )
        if self._token is None and not _names_this_host(headers.getall("Host", [])):
            return Denied(status=403, text="the Host header must be localhost or a loopback address, given once")
        # A browser names the page's origin with each request of its scripts, also where it is this listener.
        own = {f"http://{host}" for host in headers.getall("Host", [])} if self._has_page else set[str]()
        if set(headers.getall("Origin", [])) - own or set(headers.getall("Sec-Fetch-Site", [])) - {
            # A person typed the address or used a bookmark.
            "none",
            "same-origin",
        }:
            return Denied(status=403, text="requests from web pages are not served; use curl, or type the address")
        if self._token is None:
            return None
        return await self._token.denies(headers.getall("Authorization", []))


class _TokenFile:
    """The token, read again at most once in READ_AGAIN_S, so that a new one is used without a restart."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._thread = DaemonThread("debug-token", advice="Check the disk or volume that the file is on.")
        self._digest: bytes | None = None
        self._read_at: float | None = None
        self._reported = ReportOnce()

    async def denies(self, presented: list[str]) -> Denied | None:
        await self._read()
        if self._digest is None:
            return Denied(
                status=503, text="the agent cannot use its token file: see event debug_token_unusable in its log"
            )
        # Two headers are no token: a proxy in between may have checked the other one.
        scheme, _, token = presented[0].partition(" ") if len(presented) == 1 else ("", "", "")
        # Compared whatever the scheme, so that each refusal takes as long.
        is_right = hmac.compare_digest(_digest(token.strip().encode("utf-8", "surrogateescape")), self._digest)
        if scheme.lower() == "bearer" and is_right:
            return None
        return Denied(status=401, text="a token is needed: send the header `Authorization: Bearer TOKEN`")

    async def _read(self) -> None:
        now = self._clock()
        if self._read_at is not None and now - self._read_at < READ_AGAIN_S:
            return
        # Before the read: while the disk hangs, every request would wait for one of its own.
        self._read_at = now
        try:
            token = await self._thread.call(self._read_file, f"reading {self._path}", _READ_TIMEOUT_S)
        except Unavailable as e:
            self._refuse_all(str(e))
            return
        if not MIN_TOKEN_BYTES <= len(token) <= _MAX_TOKEN_BYTES:
            self._refuse_all(f"it holds no token of {MIN_TOKEN_BYTES} to {_MAX_TOKEN_BYTES} bytes")
            return
        self._digest = _digest(token)
        self._reported.is_over()

    def _read_file(self) -> bytes:
        with self._path.open("rb") as file:
            # One byte more tells a longer file, one is for the line's end.
            return file.read(_MAX_TOKEN_BYTES + 2).strip()

    def _refuse_all(self, why: str) -> None:
        # The former token ends too: the file may have been emptied to withdraw it.
        self._digest = None
        if self._reported.is_new(why):
            log.warning("debug_token_unusable", file=str(self._path), error=why, then="every request is refused")


def _digest(token: bytes) -> bytes:
    """The digest has the same length for every token, so that the comparison's time reveals nothing about it."""
    return hashlib.sha256(token).digest()


def may_read(headers: CIMultiDictProxy[str], node_name: str) -> bool:
    """False where a web page may ask whose name resolves to this node: a browser would show it the answers as its own.

    The Host header must have an address, the node's name, or one that no page of the internet can have: without a dot, or
    of a cluster's services. Two kinds of requests come by other names. Neither can be a script's of such a page, for which
    the headers that tell are the browser's alone."""
    if _names_node(headers.getall("Host", []), node_name):
        return True
    # Sent for pages that come by TLS or from the browser's own machine.
    if (sites := set(headers.getall("Sec-Fetch-Site", []))) and sites <= {"none", "same-origin"}:
        return True
    # The API server's proxy leaves the name by which it was asked; every browser takes `deflate`.
    return "X-Forwarded-Uri" in headers and "deflate" not in ",".join(headers.getall("Accept-Encoding", [])).lower()


def _names_node(hosts: list[str], node_name: str) -> bool:
    host = _host(hosts).removesuffix(".")
    if not host:
        return not hosts  # an old client, and no browser
    if "." not in host or host == node_name.lower() or host.endswith((".svc", ".cluster.local", ".localhost")):
        return True
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _names_this_host(hosts: list[str]) -> bool:
    return (host := _host(hosts)) == "localhost" or is_loopback(host)


def _host(hosts: list[str]) -> str:
    """The host of the header in lower case, without brackets and port. Read strictly, to the last character: empty for what
    is no host and port."""
    found = _HOST.fullmatch(hosts[0].strip().lower()) if len(hosts) == 1 else None
    return found["ipv6"] or found["name"] if found is not None else ""
