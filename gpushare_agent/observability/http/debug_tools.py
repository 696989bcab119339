"""The debug pages that do something: processor profile, memory tracing, garbage collection, log level.

Whatever takes long runs in a thread: the loop that admits pods does not wait for it. Python's own work on memory
(collections, snapshots of traces) cannot be kept off it wholly; each page tells its cost. State owned: the one profile
under way, and whether the memory tracing that runs was begun here.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.logs import LOG_LEVELS, log_level, set_log_level
from gpushare_agent.observability.http.answers import BadQueryError, Number, Word, read_query
from gpushare_agent.observability.http.cpu_profile import take_profile

log = structlog.get_logger(__name__)

PROFILE_MAX_S = 60
PROFILE_MAX_HZ = 1000
SLOW_S = 30.0
_PAGE_BYTES = 4096
_STATM = Path("/proc/self/statm")
_FLAG = Number(default=0, least=0, most=1)


class DebugTools:
    """Handlers for the debug listener. BadQueryError and Unavailable are for its middleware."""

    def __init__(self) -> None:
        self._is_profiling = False
        self._is_tracing_ours = False
        self._thread = DaemonThread("debug-memory", advice="Ask for less, or try again later.")

    def close(self) -> None:
        """Ends the memory tracing that was begun here: it costs time and memory as long as it runs."""
        if self._is_tracing_ours:
            tracemalloc.stop()
            self._is_tracing_ours = False

    async def profile(self, request: web.Request) -> web.Response:
        """Collapsed stacks of N seconds."""
        wanted = read_query(
            request.query,
            {
                "seconds": Number(default=10, least=1, most=PROFILE_MAX_S),
                "hz": Number(default=100, least=1, most=PROFILE_MAX_HZ),
                "idle": _FLAG,
            },
        )
        if self._is_profiling:
            return web.Response(status=409, text="a profile is under way: there is one at a time; try again later\n")
        self._is_profiling = True
        try:
            found = await take_profile(wanted["seconds"], wanted["hz"], with_idle=bool(wanted["idle"]))
        finally:
            self._is_profiling = False
        headers = {"X-Profile-Samples": str(found.samples), "X-Profile-Idle-Stacks": str(found.idle)}
        return web.Response(text=found.text(), headers=headers)

    async def show_memory(self, request: web.Request) -> web.Response:
        """The process's memory and, while it is traced, the lines of code that hold most of it."""
        wanted = read_query(request.query, {"top": Number(default=25, least=1, most=200)})
        text = f"resident: {_resident_bytes() / 2**20:.1f} MiB\n"
        if not tracemalloc.is_tracing():
            text += (
                "allocations are not traced. POST /debug/memory?start=1 begins it: every allocation from then on takes "
                "about twice as long and needs some hundred bytes more, and reading them stops the agent for about 1 ms per "
                "1,000 of them. End it with POST /debug/memory?stop=1\n"
            )
            return web.Response(text=text)
        traced, peak = tracemalloc.get_traced_memory()
        text += f"traced: {traced / 2**20:.1f} MiB now, {peak / 2**20:.1f} MiB at most, of what came after the start\n"
        text += f"cost of tracing: {tracemalloc.get_tracemalloc_memory() / 2**20:.1f} MiB\n\n"
        text += await self._thread.call(lambda: _top_lines(wanted["top"]), "reading the traces", SLOW_S)
        return web.Response(text=text)

    async def change_memory(self, request: web.Request) -> web.Response:
        """Begins or ends tracing."""
        wanted = read_query(
            request.query, {"start": _FLAG, "stop": _FLAG, "frames": Number(default=1, least=1, most=25)}
        )
        if wanted["start"] == wanted["stop"]:
            raise BadQueryError("one of start=1 and stop=1 is asked for")
        was_tracing = tracemalloc.is_tracing()
        if wanted["start"] and not was_tracing:
            tracemalloc.start(wanted["frames"])
            self._is_tracing_ours = True
        elif wanted["stop"] and was_tracing:
            tracemalloc.stop()
            self._is_tracing_ours = False
        log.warning("debug_memory_tracing", is_on=bool(wanted["start"]), was_on=was_tracing)
        return web.Response(text=f"tracing is {_on(bool(wanted['start']))}; it was {_on(was_tracing)}\n")

    async def show_gc(self, request: web.Request) -> web.Response:
        """What the collector has done; with types=1 the most frequent types of live objects."""
        wanted = read_query(request.query, {"types": _FLAG, "top": Number(default=25, least=1, most=200)})
        shown: dict[str, Any] = {
            "is_enabled": gc.isenabled(),
            "thresholds": list(gc.get_threshold()),
            "counts": list(gc.get_count()),
            "frozen": gc.get_freeze_count(),
            "generations": gc.get_stats(),
        }
        if wanted["types"]:
            found = await self._thread.call(_live_types, "counting live objects", SLOW_S)
            shown["types"] = [{"type": name, "objects": count} for name, count in _most(found, wanted["top"])]
        return _json(shown)

    async def collect(self, request: web.Request) -> web.Response:
        """A full collection now. It holds the interpreter: the loop stands still while it lasts, which is told."""
        read_query(request.query, {})
        began = time.perf_counter()
        found = gc.collect()
        took_ms = (time.perf_counter() - began) * 1000
        log.info("debug_gc_collected", unreachable=found, took_ms=round(took_ms, 1))
        return _json({"unreachable": found, "took_ms": round(took_ms, 1)})

    async def show_log(self, request: web.Request) -> web.Response:
        read_query(request.query, {})
        return _json({"level": log_level(), "levels": list(LOG_LEVELS)})

    async def change_log(self, request: web.Request) -> web.Response:
        """Changes the level until the next change, reload or restart."""
        level = read_query(request.query, {"level": Word(most_characters=10, choices=LOG_LEVELS)})["level"]
        if not level:
            raise BadQueryError(f"level is asked for: one of {', '.join(LOG_LEVELS)}")
        old = set_log_level(level)
        log.warning("log_level_changed", level=level, old=old)
        return _json({"level": level, "old": old})


def _json(content: Any) -> web.Response:
    return web.Response(text=json.dumps(content, indent=1) + "\n", content_type="application/json")


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


def _top_lines(top: int) -> str:
    """The lines of code by what they hold. Filtering out tracemalloc's own would take twice the time of all the rest."""
    if not tracemalloc.is_tracing():
        return "tracing has just been ended\n"
    statistics = tracemalloc.take_snapshot().statistics("lineno")
    rest = statistics[top:]
    lines = [_held_line(s.size, s.count, str(s.traceback)) for s in statistics[:top]]
    lines.append(_held_line(sum(s.size for s in rest), sum(s.count for s in rest), f"{len(rest)} other lines"))
    return "".join(line + "\n" for line in lines)


def _held_line(size_bytes: int, blocks: int, where: str) -> str:
    return f"{size_bytes / 1024:>10.1f} KiB  {blocks:>8}  {where}"


def _live_types() -> Counter[str]:
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def _most(found: Counter[str], top: int) -> list[tuple[str, int]]:
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:top]
