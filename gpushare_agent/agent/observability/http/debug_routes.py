"""/debug on the web port: pages about the inside of a running agent, for operators. Has their paths, the guard before
all of them, and the answer to each error.

Pages that change something need POST or PUT. The contents of the pages are debug_pages.py. No state.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog
from aiohttp import web
from msgspec import to_builtins

from gpushare_agent import __version__
from gpushare_agent.agent.observability.http import debug_pages
from gpushare_agent.agent.observability.http.debug_pages import DebugSources, Page
from gpushare_agent.core.kit.http_answers import BadQueryError, Word, accepts_html, read_query, shown
from gpushare_agent.core.kit.http_server import Handler
from gpushare_agent.core.kit.logs import LOG_LEVELS, log_level, set_log_level
from gpushare_agent.core.kit.tcp_listeners import is_loopback
from gpushare_agent.core.web.debug_guard import Guard

log = structlog.get_logger(__name__)

_PROFILES = "/debug/pprof"
_PPROF = """this is no Go program and has no pprof; in its place:
  goroutine          /debug/tasks: every task and what it awaits
  profile, trace     py-spy record --pid PID, on the node (docs/how-to/debug.md)
  heap, allocs       the metric process_resident_memory_bytes; py-spy dump --pid PID
"""
_Entry = tuple[str, str, str, Handler]
"""Method, path, text in the index, handler. PUT, an alias of POST, is not in the index."""


def debug_routes(sources: DebugSources) -> list[web.AbstractRouteDef]:
    show = partial(_page, sources)
    entries: list[_Entry] = [
        (
            "GET",
            "/debug/allocations",
            "what is allocated to each container, by device",
            show(debug_pages.allocations_page),
        ),
        ("GET", "/debug/log", "the log level", show(_log_page)),
        ("POST", "/debug/log", "change it: ?level=debug", _change_log),
        ("GET", "/debug/pods", "the pod store, without values that may be secrets", show(debug_pages.pods_page)),
        ("GET", "/debug/settings", "every setting in force", show(debug_pages.settings_page)),
        ("GET", "/debug/tasks", "every task and what it awaits", show(_tasks_page)),
        ("GET", "/debug/topology", "GPUs, links, tree", show(debug_pages.topology_page)),
    ]
    pages: dict[str, dict[str, Handler]] = {path: {"GET": _index(entries)} for path in ("/debug", "/debug/")}
    # gpu-manager is a Go program and has Go's profiles here.
    pages[_PROFILES] = {"GET": _show_pprof}
    for method, path, _, handler in (*entries, ("PUT", "/debug/log", "", _change_log)):
        pages.setdefault(path, {})[method] = handler
    guard = Guard(sources.settings.web.debug_token_file)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await _answer(request, pages, guard)
        response.headers["Cache-Control"] = "no-store"
        return response

    # One handler for every path and method: aiohttp's own refusals would show which pages there are without a token.
    return [web.route("*", path, answer) for path in ("/debug", "/debug/{page:.*}")]


async def _answer(request: web.Request, pages: Mapping[str, Mapping[str, Handler]], guard: Guard) -> web.StreamResponse:
    denied = await guard.denies(request.raw_path, request.headers, is_local=_is_local(request))
    if denied is not None:
        challenge = {"WWW-Authenticate": 'Bearer realm="gpushare-agent debug"'} if denied.status == 401 else None
        return web.Response(status=denied.status, text=denied.text + "\n", headers=challenge)
    handlers = pages.get(_PROFILES if request.path.startswith(f"{_PROFILES}/") else request.path)
    if handlers is None:
        return web.Response(status=404, text=f"there is no page {shown(request.path)}; /debug/ lists them\n")
    if request.method not in handlers:
        allowed = ", ".join(sorted(handlers))
        return web.Response(status=405, text=f"this page takes {allowed}\n", headers={"Allow": allowed})
    try:
        return await handlers[request.method](request)
    except BadQueryError as e:
        return web.Response(status=400, text=f"{e}\n")
    except Exception:  # the servicer's edge: the peer gets an answer, the log the traceback
        log.exception("debug_request_failed", path=request.path[:100])
        return web.Response(status=500, text="the page failed; the agent's log has the traceback\n")


def _is_local(request: web.Request) -> bool:
    # Both ends: kube-proxy may set route_localnet, and the kernel then takes packets of other hosts at 127.0.0.1.
    ends = [request.get_extra_info(name) for name in ("sockname", "peername")]
    return all(end is not None and is_loopback(str(end[0])) for end in ends)


def _index(entries: Sequence[_Entry]) -> Handler:
    async def show(request: web.Request) -> web.Response:
        read_query(request.query, {})
        title = f"gpushare-agent {__version__}: debug pages"
        if not accepts_html(request):
            lines = "".join(f"  {method:<5} {path:<20} {summary}\n" for method, path, summary, _ in entries)
            return web.Response(text=f"{title}\n\n{lines}")
        rows = "".join(
            f"<tr><td>{method}<td>{_link(path) if method == 'GET' else path}<td>{html.escape(summary)}\n"
            for method, path, summary, _ in entries
        )
        head = "<!doctype html><html lang=en><meta charset=utf-8><title>gpushare-agent: debug</title>"
        text = f"{head}<h1>{title}</h1>\n<table>\n{rows}</table>\n"
        return web.Response(text=text, content_type="text/html")

    return show


def _link(path: str) -> str:
    return f"<a href='{path}'>{path}</a>"


def _page(sources: DebugSources, make: Callable[[DebugSources], Page | str]) -> Handler:
    async def show(request: web.Request) -> web.Response:
        read_query(request.query, {})
        content = make(sources)
        return web.Response(text=content) if isinstance(content, str) else _json(content)

    return show


def _json(content: Page) -> web.Response:
    text = json.dumps(to_builtins(content), indent=1, ensure_ascii=False) + "\n"
    return web.Response(text=text, content_type="application/json")


async def _show_pprof(request: web.Request) -> web.Response:
    """What there is instead of Go's profiles; its goroutines are this program's tasks."""
    is_tasks = request.path == f"{_PROFILES}/goroutine"
    return web.Response(text=debug_pages.tasks_page(asyncio.all_tasks()) if is_tasks else _PPROF)


def _tasks_page(_sources: DebugSources) -> str:
    return debug_pages.tasks_page(asyncio.all_tasks())


def _log_page(_sources: DebugSources) -> Page:
    return {"level": log_level(), "levels": list(LOG_LEVELS)}


async def _change_log(request: web.Request) -> web.Response:
    """Changes the level until the next change, reload or restart."""
    level = read_query(request.query, {"level": Word(most_characters=10, choices=LOG_LEVELS)})["level"]
    if not level:
        raise BadQueryError(f"the parameter level is required: one of {', '.join(LOG_LEVELS)}")
    old = set_log_level(level)
    # A warning, so that the change is logged at the usual level too.
    log.warning("log_level_changed", level=level, old=old)
    return _json({"level": level, "old": old})
