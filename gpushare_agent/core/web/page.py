"""The dashboard's files, read once from the package and answered with an entity tag.

A browser revalidates each time (`no-cache`) and gets 304 as long as the file is the same: after an update of the agent no
browser shows half of an old page. The state is the files' content, read by `load`.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from msgspec import Struct

from gpushare_agent.core.kit.http_answers import GZIP_FROM_BYTES, accepts_gzip

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.core.kit.http_answers import Handler, Route

PACKAGE = "gpushare_agent.core.web"
DIRECTORY = "dashboard"
INDEX = "index.html"
PREFIX = f"/{DIRECTORY}/"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class PageFile(Struct, frozen=True, kw_only=True):
    """One file as it is sent. `packed` is empty where packing gains nothing."""

    content: bytes
    packed: bytes
    content_type: str
    tag: str


class WebPage:
    """A page and the files that it may load. Use it after `load`."""

    def __init__(self, index: str = INDEX) -> None:
        self._index = index
        self._files: dict[str, PageFile] = {}

    def load(self) -> None:
        """Reads the files; blocks for some milliseconds, so call it in a thread."""
        directory = resources.files(PACKAGE).joinpath(DIRECTORY)
        found = {entry.name: entry.read_bytes() for entry in directory.iterdir() if entry.is_file()}
        # Agent and cluster have a page each in one directory; a server shows its own.
        served = (name for name in sorted(found) if name == self._index or not name.endswith(".html"))
        self._files = {name: _file(name, found[name]) for name in served if _content_type(name)}

    async def index(self, request: web.Request) -> web.StreamResponse:
        return _answer(request, self._files[self._index])

    def routes(self) -> list[Route]:
        """A path for each file but the page itself: the server has the page's path."""
        return [(PREFIX + name, self._handler(file)) for name, file in self._files.items() if name != self._index]

    def _handler(self, file: PageFile) -> Handler:
        async def show(request: web.Request) -> web.StreamResponse:
            return _answer(request, file)

        return show


def _content_type(name: str) -> str:
    return next((kind for ending, kind in CONTENT_TYPES.items() if name.endswith(ending)), "")


def _file(name: str, content: bytes) -> PageFile:
    # Once at the start, so at the best level; without a time the bytes are the same in each process, as their tag
    # says.
    packed = gzip.compress(content, 9, mtime=0) if len(content) >= GZIP_FROM_BYTES else b""
    tag = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content=content, packed=packed, content_type=_content_type(name), tag=tag)


def _answer(request: web.Request, file: PageFile) -> web.Response:
    from aiohttp import web

    is_packed = bool(file.packed) and accepts_gzip(request)
    # A strong tag is of the bytes (RFC 9110, 8.8.3), which differ when packed.
    tag = f'"{file.tag}-gzip"' if is_packed else f'"{file.tag}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept, Accept-Encoding"}
    # If-None-Match compares weakly (RFC 9110, 13.1.2): a proxy that recompresses makes the tag weak.
    asked = [one.strip().removeprefix("W/") for one in request.headers.get("If-None-Match", "").split(",")]
    if tag in asked:
        return web.Response(status=304, headers=headers)
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    content = file.packed if is_packed else file.content
    return web.Response(body=content, content_type=file.content_type, charset="utf-8", headers=headers)
