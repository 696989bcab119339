"""The paths of the debug listener: which page is where, who is asked before one is shown, what a fault is answered with.

Listening is observability/http/debug_server.py, what the pages hold debug_pages.py and debug_tools.py. No state.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from gpushare_agent import __version__
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.observability.http.answers import SECURITY_HEADERS, BadQueryError, accepts_html, read_query, shown
from gpushare_agent.observability.http.debug_guard import Guard
from gpushare_agent.observability.http.debug_pages import (
    DebugSources,
    allocations_page,
    pods_page,
    settings_page,
    tasks_page,
    topology_page,
)
from gpushare_agent.observability.http.debug_tools import DebugTools

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 1024
"""No page reads a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """`summary` stands in the index; a page without one is left out there."""

    method: str
    path: str
    summary: str
    handler: Handler


def application(sources: DebugSources, guard: Guard, tools: DebugTools) -> web.Application:
    app = web.Application(middlewares=[_guarding(guard)], client_max_size=_MAX_BODY_BYTES)
    pages = _pages(sources, tools)
    show_index = _index(pages)
    for page in pages:
        app.router.add_route(page.method, page.path, page.handler)
    for path in ("/debug", "/debug/"):
        app.router.add_route("GET", path, show_index)
    return app


def _guarding(guard: Guard) -> Any:
    """Guards every request, also those for no page, and answers every fault with a text."""

    @web.middleware
    async def answer_guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await _answer(request, handler, guard)
        answer.headers.update(SECURITY_HEADERS)
        answer.headers["Cache-Control"] = "no-store"
        return answer

    return answer_guarded


async def _answer(request: web.Request, handler: Handler, guard: Guard) -> web.StreamResponse:
    denied = await guard.denies(request.headers)
    if denied is not None:
        challenge = {"WWW-Authenticate": 'Bearer realm="gpushare-agent debug"'} if denied.status == 401 else None
        return web.Response(status=denied.status, text=denied.text + "\n", headers=challenge)
    try:
        if len(request.query) > len(set(request.query)):
            raise BadQueryError("a parameter is given twice")
        return await handler(request)
    except BadQueryError as e:
        return web.Response(status=400, text=f"{e}\n")
    except Unavailable as e:
        return web.Response(status=503, text=f"{e}\n")
    except web.HTTPNotFound:
        return web.Response(status=404, text=f"there is no page {shown(request.path)}; /debug/ lists them\n")
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        return web.Response(status=405, text=f"this page takes {allowed}\n", headers={"Allow": allowed})
    except web.HTTPException as e:
        return web.Response(status=e.status, text=f"{e.reason}\n")
    except Exception:  # the servicer's edge: the peer gets an answer, the log the traceback
        log.exception("debug_request_failed", path=request.path[:100])
        return web.Response(status=500, text="the page failed; the agent's log has the traceback\n")


def _pages(sources: DebugSources, tools: DebugTools) -> list[_Page]:
    own = [
        (
            "GET",
            "/debug/allocations",
            "what each container holds, device by device",
            _json(allocations_page, sources),
        ),
        ("GET", "/debug/gc", "the garbage collector; ?types=1 counts live objects", tools.show_gc),
        ("POST", "/debug/gc", "collect now (stops the agent for some ten milliseconds)", tools.collect),
        ("GET", "/debug/log", "the log level", tools.show_log),
        ("POST", "/debug/log", "change it: ?level=debug", tools.change_log),
        ("PUT", "/debug/log", "", tools.change_log),
        ("GET", "/debug/memory", "what holds memory, once it is traced; ?top=25", tools.show_memory),
        ("POST", "/debug/memory", "?start=1 begins tracing, ?stop=1 ends it (slow)", tools.change_memory),
        ("GET", "/debug/pods", "the pod store, without values that may be secrets", _json(pods_page, sources)),
        ("GET", "/debug/profile", "where time goes, as flame graph text; ?seconds=10&hz=100&idle=0", tools.profile),
        ("GET", "/debug/settings", "every setting in force", _json(settings_page, sources)),
        ("GET", "/debug/tasks", "every task and where it waits", _show_tasks),
        ("GET", "/debug/topology", "GPUs, links, tree", _json(topology_page, sources)),
    ]
    return [_Page(method=m, path=p, summary=s, handler=h) for m, p, s, h in own]


def _index(pages: Sequence[_Page]) -> Handler:
    listed = [page for page in pages if page.summary]

    async def show(request: web.Request) -> web.Response:
        read_query(request.query, {})
        if accepts_html(request):
            return web.Response(text=_index_html(listed), content_type="text/html")
        lines = "".join(f"  {page.method:<5} {page.path:<20} {page.summary}\n" for page in listed)
        return web.Response(text=f"gpushare-agent {__version__}: debug pages\n\n{lines}")

    return show


def _index_html(pages: Sequence[_Page]) -> str:
    rows = "".join(f"<tr><td>{page.method}<td>{_link(page)}<td>{html.escape(page.summary)}\n" for page in pages)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>gpushare-agent: debug</title>"
        f"<h1>gpushare-agent {__version__}: debug pages</h1>\n<table>\n{rows}</table>\n"
    )


def _link(page: _Page) -> str:
    return f"<a href='{page.path}'>{page.path}</a>" if page.method == "GET" else page.path


def _json(make: Callable[[DebugSources], dict[str, Any]], sources: DebugSources) -> Handler:
    async def show(request: web.Request) -> web.Response:
        read_query(request.query, {})
        text = json.dumps(make(sources), indent=1, ensure_ascii=False)
        return web.Response(text=text + "\n", content_type="application/json")

    return show


async def _show_tasks(request: web.Request) -> web.Response:
    read_query(request.query, {})
    return web.Response(text=tasks_page(asyncio.all_tasks()))
