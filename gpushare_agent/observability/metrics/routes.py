"""/metrics over HTTP: the format by the Accept header, gzip where it is asked for.

Not for what is in it: metrics.py. No state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gpushare_agent.observability.http.answers import accepts_gzip
from gpushare_agent.observability.metrics.agent import AgentMetrics

if TYPE_CHECKING:
    from aiohttp import web


def metrics_handler(metrics: AgentMetrics) -> Callable[[web.Request], Awaitable[web.Response]]:
    """For a GET of /metrics."""

    async def show_metrics(request: web.Request) -> web.Response:
        from aiohttp import web

        headers = {"Vary": "Accept, Accept-Encoding"}
        accept = ",".join(request.headers.getall("Accept", []))
        if accepts_gzip(request):
            headers["Content-Encoding"] = "gzip"
            content_type, body = metrics.packed_exposition(accept)
        else:
            content_type, body = metrics.exposition(accept)
        return web.Response(body=body, headers={**headers, "Content-Type": content_type})

    return show_metrics
