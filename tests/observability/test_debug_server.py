"""observability/http/debug_server.py and debug_tools.py over a real socket: each page, each change, and the port that is
taken.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import structlog

from gpushare_agent.observability.http.debug_server import DebugServer
from gpushare_agent.settings.observation import DebugSettings
from tests.support_agent import poll_until
from tests.support_debug import ask, serving, sources
from tests.support_display import SECRET
from tests.support_kube import running

JSON_PAGES = ["/debug/allocations", "/debug/gc", "/debug/log", "/debug/pods", "/debug/settings", "/debug/topology"]
TEXT_PAGES = ["/debug/", "/debug/memory", "/debug/tasks"]


@pytest.fixture
def level_is_kept() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def tracing_is_off() -> Iterator[None]:
    assert not tracemalloc.is_tracing()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("path", JSON_PAGES + TEXT_PAGES)
async def test_every_page_answers_and_protects_the_browser(path: str) -> None:
    """JSON or text, nothing to be kept by a cache, nothing secret."""
    async with serving() as port:
        answer = await ask(port, path)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json" if path in JSON_PAGES else "text/plain")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert SECRET not in answer.text
    assert path not in JSON_PAGES or json.loads(answer.text)


async def test_the_index_lists_each_page_once_for_programs_and_for_browsers() -> None:
    """Text by default, a page with links for whoever accepts HTML."""
    async with serving() as port:
        plain = await ask(port, "/debug/")
        page = await ask(port, "/debug/", Accept="text/html,*/*;q=0.8")
    for path in [*JSON_PAGES, "/debug/memory", "/debug/tasks", "/debug/profile"]:
        assert f"GET   {path} " in plain.text
        assert f"<a href='{path}'>{path}</a>" in page.text
    assert "<script" not in page.text


async def test_tasks_name_the_listener_itself() -> None:
    """The task that answers is among them."""
    async with serving() as port:
        answer = await ask(port, "/debug/tasks")
    assert "RequestHandler.start" in answer.text


async def test_a_profile_is_collapsed_stacks_of_the_time_asked_for() -> None:
    """Each line is a stack and a count; headers tell how many samples there were."""
    async with serving() as port:
        answer = await ask(port, "/debug/profile?seconds=1&hz=50&idle=1")
    assert answer.status == 200
    assert int(answer.headers["X-Profile-Samples"]) > 0
    for line in answer.text.splitlines():
        stack, _, count = line.rpartition(" ")
        assert int(count) > 0
        assert ";" in stack


@asynccontextmanager
async def profiling(port: int) -> AsyncIterator[None]:
    """A profile of a minute is under way; at the end its caller leaves."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /debug/profile?seconds=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        while (await ask(port, "/debug/profile?seconds=1")).status != 409:
            await asyncio.sleep(0)
        yield
    finally:
        writer.close()
        await writer.wait_closed()


async def test_many_profiles_at_once_are_one_profile() -> None:
    """The others are told so at once, and pages are served meanwhile."""
    async with serving() as port, profiling(port), asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(port, "/debug/profile?seconds=60")) for _ in range(24)]
        meanwhile = await ask(port, "/debug/log")
    assert {task.result().status for task in asked} == {409}
    assert meanwhile.status == 200


async def test_a_caller_that_leaves_frees_the_profile() -> None:
    """The next one need not wait for a minute."""
    async with serving() as port:
        async with profiling(port):
            pass
        while (await ask(port, "/debug/profile?seconds=1")).status != 200:
            await asyncio.sleep(0.005)


async def test_the_listener_ends_at_once_while_a_profile_is_taken() -> None:
    """SIGTERM does not wait for a minute."""
    async with asyncio.timeout(10), AsyncExitStack() as stack, serving() as port:
        await stack.enter_async_context(profiling(port))


@pytest.mark.usefixtures("level_is_kept")
@pytest.mark.parametrize("method", ["PUT", "POST"])
async def test_the_log_level_changes_now_and_the_old_one_is_reported(method: str) -> None:
    """A line of the new level is written from then on."""
    logging.getLogger().setLevel("INFO")
    async with serving() as port:
        answer = await ask(port, "/debug/log?level=debug", method=method)
        assert json.loads(answer.text) == {"level": "debug", "old": "info"}
        assert logging.getLogger().isEnabledFor(logging.DEBUG)
        assert json.loads((await ask(port, "/debug/log")).text)["level"] == "debug"


@pytest.mark.usefixtures("tracing_is_off")
async def test_memory_is_traced_only_between_start_and_stop() -> None:
    """Off by default; while on, lines of code with what they hold; off again at the end."""
    async with serving() as port:
        before = await ask(port, "/debug/memory")
        started = await ask(port, "/debug/memory?start=1&frames=2", method="POST")
        assert tracemalloc.is_tracing()
        during = await ask(port, "/debug/memory?top=5")
        stopped = await ask(port, "/debug/memory?stop=1", method="POST")
        assert not tracemalloc.is_tracing()
        after = await ask(port, "/debug/memory")
    assert "not traced" in before.text
    assert started.text == "tracing is on; it was off\n"
    assert "KiB" in during.text
    assert "other lines" in during.text
    assert stopped.text == "tracing is off; it was on\n"
    assert "not traced" in after.text


@pytest.mark.usefixtures("tracing_is_off")
async def test_tracing_does_not_outlive_the_listener() -> None:
    """A reload of the settings ends what it cost."""
    async with serving() as port:
        await ask(port, "/debug/memory?start=1", method="POST")
    assert not tracemalloc.is_tracing()


async def test_the_collector_shows_its_state_and_collects_on_request() -> None:
    """Types are counted only where asked for."""
    async with serving() as port:
        state = json.loads((await ask(port, "/debug/gc")).text)
        typed = json.loads((await ask(port, "/debug/gc?types=1&top=3")).text)
        collected = json.loads((await ask(port, "/debug/gc", method="POST")).text)
    assert "types" not in state
    assert len(typed["types"]) == 3
    assert typed["types"][0]["objects"] >= typed["types"][1]["objects"]
    assert collected["unreachable"] >= 0
    assert state["is_enabled"] == gc.isenabled()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/debug/profile?seconds=0", 400),
        ("GET", "/debug/profile?seconds=61", 400),
        ("GET", "/debug/profile?seconds=NaN", 400),
        ("GET", "/debug/profile?seconds=1&seconds=2", 400),
        ("GET", "/debug/profile?hz=100000", 400),
        ("GET", "/debug/profile?second=5", 400),
        ("GET", "/debug/tasks?x=1", 400),
        ("POST", "/debug/log", 400),
        ("POST", "/debug/log?level=trace", 400),
        ("POST", "/debug/memory", 400),
        ("POST", "/debug/memory?start=1&stop=1", 400),
        ("POST", "/debug/memory?start=1&frames=1000000", 400),
        ("GET", "/debug/memory?start=1", 400),
        ("GET", "/debug/log?level=debug", 400),
        ("HEAD", "/debug/profile?seconds=60", 405),
        ("HEAD", "/debug/", 405),
        ("DELETE", "/debug/log", 405),
        ("POST", "/debug/profile", 405),
        ("PUT", "/debug/memory?start=1", 405),
        ("OPTIONS", "/debug/", 405),
        ("GET", "/", 404),
        ("GET", "/debug/x", 404),
        ("GET", "/debug/../etc/passwd", 404),
        ("GET", "/debug/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "//debug/tasks", 404),
        ("GET", "/debug/tasks/", 404),
        ("GET", "/debug/tasks%00", 404),
    ],
)
async def test_what_is_asked_wrongly_is_refused_with_a_text_and_changes_nothing(
    method: str, path: str, status: int
) -> None:
    """A GET changes nothing, a path finds pages only, a number has its bounds."""
    level = logging.getLogger().level
    async with serving() as port:
        answer = await ask(port, path, method=method)
    assert answer.status == status
    assert method == "HEAD" or answer.text.strip()
    assert logging.getLogger().level == level
    assert not tracemalloc.is_tracing()


async def test_a_failing_page_is_an_answer_and_a_traceback_in_the_log() -> None:
    """The listener goes on."""

    def fail() -> list[object]:
        raise ValueError(SECRET)

    server = DebugServer(
        DebugSettings(addr="127.0.0.1", port=0),
        replace(sources(), pods=fail),  # type: ignore[arg-type]  # it fails
    )
    with structlog.testing.capture_logs() as logged:
        async with running(server.run):
            port = await server.wait_listening()
            answer = await ask(port, "/debug/pods")
            assert (await ask(port, "/debug/log")).status == 200
    assert answer.status == 500
    assert SECRET not in answer.text
    assert "debug_request_failed" in [line["event"] for line in logged]


async def test_a_taken_port_costs_the_pages_and_is_tried_again() -> None:
    """A warning once, then the pages once the other program has ended."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    server = DebugServer(DebugSettings(addr="127.0.0.1", port=port), sources(), look_again_s=0.01)
    with structlog.testing.capture_logs() as logged:
        async with running(server.run):
            await poll_until(lambda: logged, "the complaint")
            await asyncio.sleep(0.05)
            other.close()
            assert await server.wait_listening() == port
            assert (await ask(port, "/debug/log")).status == 200
    assert [line["event"] for line in logged] == ["debug_unavailable", "debug_listening"]
    assert "debug.port" in logged[0]["cure"]


async def test_localhost_means_every_loopback_address() -> None:
    """The default serves 127.0.0.1, and ::1 where there is one, on one port."""
    async with serving(addr="localhost") as port:
        assert (await ask(port, "/debug/log")).status == 200
