"""The paths of the debug listener: which page is where, the guard before all of them, the answer to each error.

Listening is observability/http/debug_server.py, the contents of the pages debug_pages.py. No state.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from aiohttp import web
from msgspec import to_builtins

from gpushare_agent import __version__
from gpushare_agent.kit.http_answers import BadQueryError, Word, accepts_html, read_query, shown
from gpushare_agent.kit.http_server import Handler
from gpushare_agent.kit.logs import LOG_LEVELS, log_level, set_log_level
from gpushare_agent.observability.http import debug_pages
from gpushare_agent.observability.http.debug_guard import Guard
from gpushare_agent.observability.http.debug_pages import DebugSources, Page

log = structlog.get_logger(__name__)


_PPROF = """this is no Go program and has no pprof; in its place:
  goroutine          /debug/tasks: every task and what it awaits
  profile, trace     py-spy record --pid PID, on the node (docs/how-to/debug.md)
  heap, allocs       the metric process_resident_memory_bytes; py-spy dump --pid PID
"""
_Entry = tuple[str, str, str, Handler]
"""Method, path, what the index says of it, handler. PUT, an alias of POST, is not in the index."""


def debug_routes(sources: DebugSources) -> list[web.AbstractRouteDef]:
    entries: list[_Entry] = [
        (
            "GET",
            "/debug/allocations",
            "what is allocated to each container, by device",
            _page(debug_pages.allocations_page, sources),
        ),
        ("GET", "/debug/log", "the log level", _page(_log_page, sources)),
        ("POST", "/debug/log", "change it: ?level=debug", _change_log),
        (
            "GET",
            "/debug/pods",
            "the pod store, without values that may be secrets",
            _page(debug_pages.pods_page, sources),
        ),
        ("GET", "/debug/settings", "every setting in force", _page(debug_pages.settings_page, sources)),
        ("GET", "/debug/tasks", "every task and what it awaits", _page(_tasks_page, sources)),
        ("GET", "/debug/topology", "GPUs, links, tree", _page(debug_pages.topology_page, sources)),
    ]
    shown = {path: handler for method, path, _, handler in entries if method == "GET"}
    shown |= dict.fromkeys(("/debug", "/debug/"), _index(entries))
    # gpu-manager is a Go program and has Go's profiles here.
    shown |= dict.fromkeys(("/debug/pprof", "/debug/pprof/{profile:.*}"), _show_pprof)
    # aiohttp would answer HEAD by making the whole page and dropping it.
    routes = [web.get(path, handler, allow_head=False) for path, handler in shown.items()]
    return [*routes, web.post("/debug/log", _change_log), web.put("/debug/log", _change_log)]


def guarding(guard: Guard) -> Any:
    """A middleware that guards every request, also those for no page, and answers every error with a text."""

    @web.middleware
    async def answer_guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _answer(request, handler, guard)

    return answer_guarded


async def _answer(request: web.Request, handler: Handler, guard: Guard) -> web.StreamResponse:
    # Before the path is looked at: an answer 404 would tell strangers which pages there are.
    denied = await guard.denies(request.raw_path, request.headers)
    if denied is not None:
        challenge = {"WWW-Authenticate": 'Bearer realm="gpushare-agent debug"'} if denied.status == 401 else None
        return web.Response(status=denied.status, text=denied.text + "\n", headers=challenge)
    try:
        return await handler(request)
    except BadQueryError as e:
        return web.Response(status=400, text=f"{e}\n")
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


def _page(make: Callable[[DebugSources], Page | str], sources: DebugSources) -> Handler:
    async def show(request: web.Request) -> web.Response:
        read_query(request.query, {})
        content = make(sources)
        return web.Response(text=content) if isinstance(content, str) else _json(content)

    return show


def _json(content: Page) -> web.Response:
    text = json.dumps(to_builtins(content), indent=1, ensure_ascii=False) + "\n"
    return web.Response(text=text, content_type="application/json")


async def _show_pprof(request: web.Request) -> web.Response:
    """What there is in the place of Go's profiles; its goroutines are this program's tasks."""
    is_tasks = request.match_info.get("profile") == "goroutine"
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
