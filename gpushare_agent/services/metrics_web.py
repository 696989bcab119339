"""/metrics over HTTP: the format by the Accept header, gzip where it is asked for.

Not for what is in it: metrics.py. No state.
"""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client.exposition import gzip_accepted

from gpushare_agent.services.metrics import AgentMetrics

if TYPE_CHECKING:
    from aiohttp import web

_LEVEL = 1
"""The rows are much alike: the fastest level makes half a megabyte a twentieth within a millisecond (measured), less than
it costs to hand it to a thread while others wait."""


def metrics_handler(metrics: AgentMetrics) -> Callable[[web.Request], Awaitable[web.Response]]:
    """For a GET of /metrics."""

    async def show_metrics(request: web.Request) -> web.Response:
        from aiohttp import web

        content_type, text = metrics.exposition(",".join(request.headers.getall("Accept", [])))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if gzip_accepted(request.headers.get("Accept-Encoding", "")):
            headers["Content-Encoding"] = "gzip"
            text = gzip.compress(text, _LEVEL)
        return web.Response(body=text, headers=headers)

    return show_metrics
