"""Common parts of HTTP answers: headers that protect a browser, JSON, gzip, strict reading of queries, a queue for costly
ones.

The paths themselves are elsewhere. aiohttp is imported inside the functions, see agent/observability/http/server.py. State
owned: the requests that wait in a RequestQueue.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, to_builtins

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Route = tuple[str, Handler]
    """A path for GET."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
GZIP_FROM_BYTES = 1400
"""Below this an answer fits one packet and packing it gains nothing."""
GZIP_LEVEL = 1
"""A third of the size for a tenth of the time: this runs on the event loop."""

_NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
"""Places of the system's certificates that OpenSSL looks at instead of its own."""
T = TypeVar("T")
SLICE_S = 0.004
"""How long an answer is encoded before other tasks of the loop run."""
THREAD_FROM_BYTES = 256 * 1024
"""From here on packing takes longer than handing it to a thread; meanwhile the loop runs."""

MOST_WAITING = 32
MOST_OF_PEER = 8
RETRY_AFTER_S = "2"

_SHOWN_CHARACTERS = 60
_GZIP = re.compile(r"(?:^|,)\s*(?:gzip|x-gzip|\*)\s*(?:;\s*q=([0-9.]+))?\s*(?=,|$)", re.IGNORECASE)
_HTML = re.compile(r"(?:^|,)\s*text/html\s*(?:;|,|$)", re.IGNORECASE)


def load_aiohttp() -> None:
    """Imports aiohttp, at the first call. The import makes two TLS contexts for clients that bring none, and reads the
    system's certificates into both: 2.4 MiB and 20 ms. The agent's clients bring theirs."""
    former = {name: os.environ.get(name) for name in _NO_CERTIFICATES}
    os.environ.update(_NO_CERTIFICATES)
    try:
        import aiohttp  # noqa: F401 - for the import
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def at_once() -> None:
    """For a server that waits for nothing before it reads what it shows."""


class BadQueryError(Exception):
    """The query cannot be used. The text is for the client."""


class Number(Struct, frozen=True, kw_only=True):
    """A whole number in a query, between two bounds."""

    default: int
    least: int
    most: int


class Word(Struct, frozen=True, kw_only=True):
    """A text in a query; `choices` where only some are known. Empty where it is not given."""

    most_characters: int
    choices: tuple[str, ...] = ()


def read_query(query: Mapping[str, str], known: Mapping[str, Number | Word]) -> dict[str, Any]:
    """The values of all `known` parameters.

    Raises BadQueryError: a parameter that is not known, given twice, out of its bounds, or no number.
    """
    names = [name for name, _ in query.items()]  # keys() of a multidict has a repeated one once
    for name in names:
        if name not in known:
            raise BadQueryError(
                f"the parameter {shown(name)} is not known here; known: {', '.join(sorted(known)) or 'none'}"
            )
        if names.count(name) > 1:
            raise BadQueryError(f"the parameter {name} is given twice")
    return {name: _value(name, query.get(name), kind) for name, kind in known.items()}


def _value(name: str, text: str | None, kind: Number | Word) -> int | str:
    if isinstance(kind, Number):
        if text is None:
            return kind.default
        # int() would take signs, blanks, underscores and digits of other scripts; 18 digits fit any reader's integers.
        if not re.fullmatch(r"[0-9]{1,18}", text) or not kind.least <= int(text) <= kind.most:
            raise BadQueryError(f"{name}={shown(text)}: must be a whole number from {kind.least} to {kind.most}")
        return int(text)
    if text is None:
        return ""
    if kind.choices and text not in kind.choices:
        raise BadQueryError(f"{name}={shown(text)}: must be one of {', '.join(kind.choices)}")
    if not 0 < len(text) <= kind.most_characters:
        raise BadQueryError(f"{name}: must be a text of 1 to {kind.most_characters} characters")
    return text


def shown(text: str) -> str:
    """A client's text for a message: bounded, quoted, without control characters."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return json.dumps(cut, ensure_ascii=False)


def accepts_gzip(request: web.BaseRequest) -> bool:
    found = _GZIP.search(request.headers.get("Accept-Encoding", ""))
    # q=0, also written 0.000, refuses the coding (RFC 9110, 12.4.2).
    return found is not None and (found[1] is None or found[1].strip("0.") != "")


def accepts_html(request: web.BaseRequest) -> bool:
    """True for a browser, which names text/html; curl and programs accept anything and get text."""
    return _HTML.search(request.headers.get("Accept", "")) is not None


def encode(document: object) -> bytes:
    """Compact JSON of Structs and what JSON has. Half a surrogate pair, which UTF-8 cannot have, stays the escape that it
    was: any text of a node's annotation may hold one."""
    return json.dumps(to_builtins(document), separators=(",", ":"), ensure_ascii=False).encode(
        errors="backslashreplace"
    )


def json_answer(request: web.BaseRequest, document: object, *, status: int = 200) -> web.Response:
    """The document, gzipped where the client accepts it and it is large enough; not to be cached."""
    body = JsonBody(encode(document))
    return body.response(is_packed=body.is_worth_packing and accepts_gzip(request), status=status)


class Body:
    """An answer that is encoded once, and gzipped once, for all requests. A client that names its `tag`, if it has one, in
    If-None-Match gets 304 and no body (RFC 9110, 13.1.2)."""

    def __init__(self, text: bytes, content_type: str, headers: Mapping[str, str], *, tag: str = "") -> None:
        self.text = text
        self._content_type = content_type
        # weak: packed or not, the bytes differ
        self._headers = {**headers, "ETag": f'W/"{tag}"'} if tag else {**headers}
        self._tag = tag
        self._packed: bytes | None = None

    @property
    def is_worth_packing(self) -> bool:
        return len(self.text) >= GZIP_FROM_BYTES

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """A large one is packed in a thread."""
        from aiohttp import web

        # Not compared as weak or strong: this tag is the same for packed and plain bodies.
        if self._tag and any(one.value == self._tag for one in request.if_none_match or ()):
            return web.Response(status=304, headers=self._headers)
        is_packed = self.is_worth_packing and accepts_gzip(request)
        # Two requests at once may both pack it; the bytes are the same, and the second only takes the place of the
        # first.
        if is_packed and self._packed is None and len(self.text) >= THREAD_FROM_BYTES:
            self._packed = await asyncio.to_thread(packed, self.text)
        return self.response(is_packed=is_packed)

    def response(self, *, is_packed: bool, status: int = 200) -> web.Response:
        from aiohttp import web

        headers, body = self._headers, self.text
        if is_packed:
            if self._packed is None:
                self._packed = packed(self.text)
            headers, body = {**headers, "Content-Encoding": "gzip"}, self._packed
        return web.Response(status=status, body=body, content_type=self._content_type, charset="utf-8", headers=headers)


class JsonBody(Body):
    """JSON of this moment: no cache may keep it."""

    def __init__(self, text: bytes, *, tag: str = "") -> None:
        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        super().__init__(text + b"\n", "application/json", headers, tag=tag)


async def in_slices(pieces: Iterable[T]) -> list[T]:
    """All pieces; other tasks of the loop run whenever making them has taken SLICE_S."""
    found: list[T] = []
    began_at = time.monotonic()
    for piece in pieces:
        found.append(piece)
        if time.monotonic() - began_at >= SLICE_S:
            await asyncio.sleep(0)
            began_at = time.monotonic()
    return found


async def join_in_slices(pieces: Iterable[bytes], between: bytes = b"") -> bytes:
    """All pieces joined, made `in_slices`. They must not change meanwhile."""
    return between.join(await in_slices(pieces))


def packed(text: bytes) -> bytes:
    return gzip.compress(text, GZIP_LEVEL, mtime=0)


def text_answer(text: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    from aiohttp import web

    return web.Response(text=text, status=status, headers=headers)


def bad_query(request: web.BaseRequest, error: BadQueryError) -> web.Response:
    return json_answer(request, {"error": str(error)}, status=400)


class RequestQueue:
    """Costly answers are made one at a time, and other tasks of the loop run between two: a hundred requests for /metrics at
    once must not delay an admission by a hundred answers. One peer may have only a part of the queue, so that Prometheus is
    answered whatever another peer requests. A request beyond the limits is answered 503, and its connection ends.
    """

    def __init__(self, *, most_waiting: int = MOST_WAITING, most_of_peer: int = MOST_OF_PEER) -> None:
        self._most_waiting = most_waiting
        self._most_of_peer = most_of_peer
        self._lock = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    def one_at_a_time(self, handler: Handler) -> Handler:
        """`handler` behind this queue; all that are wrapped share it."""

        async def answer(request: web.Request) -> web.StreamResponse:
            peer = request.remote or ""
            if self._waiting.total() >= self._most_waiting or self._waiting[peer] >= self._most_of_peer:
                return _busy()
            self._waiting[peer] += 1
            try:
                # Counted before the lock and not in it: who waits is what the limits are for.
                async with self._lock:
                    response = await handler(request)
                    await asyncio.sleep(0)  # other tasks of the loop run
                    return response
            finally:
                self._waiting -= Counter({peer: 1})  # drops a count of zero

        return answer


def _busy() -> web.Response:
    from aiohttp import web

    headers = {"Retry-After": RETRY_AFTER_S, "Cache-Control": "no-store"}
    response = web.Response(status=503, headers=headers, text="too many requests at once; try again\n")
    # A client that ignores Retry-After has to connect again, which slows it down.
    response.force_close()
    return response
