"""The dashboard's files, read once from the package and answered with an entity tag.

A browser revalidates each time (`no-cache`) and gets 304 as long as the file is the same: after an update of the agent no
browser shows half of an old page. The state is the files' content, read by `load`.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING

from gpushare_agent.core.kit.http_answers import Body

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.core.kit.http_answers import Route

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
_HEADERS = {"Cache-Control": "no-cache", "Vary": "Accept, Accept-Encoding"}


class WebPage:
    """A page and the files that it may load. Use it after `load`."""

    def __init__(self, index: str = INDEX) -> None:
        self._index = index
        self._files: dict[str, Body] = {}

    def load(self) -> None:
        """Reads the files; blocks for some milliseconds, so call it in a thread."""
        directory = resources.files(PACKAGE).joinpath(DIRECTORY)
        for entry in directory.iterdir():
            kind = CONTENT_TYPES.get(PurePath(entry.name).suffix)
            # Agent and cluster have a page each in one directory; a server shows its own.
            if kind and (entry.name == self._index or kind != "text/html"):
                content = entry.read_bytes()
                tag = hashlib.sha256(content).hexdigest()[:32]
                self._files[entry.name] = Body(content, kind, _HEADERS, tag=tag)

    async def index(self, request: web.Request) -> web.StreamResponse:
        return await self._files[self._index].answer(request)

    def routes(self) -> list[Route]:
        """A path for each file but the page itself: the server has the page's path."""
        return [(PREFIX + name, file.answer) for name, file in self._files.items() if name != self._index]
