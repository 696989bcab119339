"""observability/http/debug_routes.py over a real socket: each page and each change."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from msgspec.structs import replace

from tests.observability.support_debug import ask, serving, sources
from tests.observability.support_display import SECRET

JSON_PAGES = ["/debug/allocations", "/debug/log", "/debug/pods", "/debug/settings", "/debug/topology"]
TEXT_PAGES = ["/debug/", "/debug/tasks"]


@pytest.fixture
def level_is_kept() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.parametrize("path", JSON_PAGES + TEXT_PAGES)
async def test_every_page_answers_and_protects_the_browser(path: str) -> None:
    """JSON or text, nothing to be kept by a cache, nothing secret. The task that answers is among the tasks."""
    async with serving() as port:
        answer = await ask(port, path)
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json" if path in JSON_PAGES else "text/plain")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert SECRET not in answer.text
    assert path not in JSON_PAGES or json.loads(answer.text)
    assert path != "/debug/tasks" or "RequestHandler.start" in answer.text


async def test_the_index_lists_each_page_once_for_programs_and_for_browsers() -> None:
    """Text by default, a page with links for a client that accepts HTML."""
    async with serving() as port:
        plain = await ask(port, "/debug/")
        assert (await ask(port, "/debug")).text == plain.text
        page = await ask(port, "/debug/", Accept="text/html,*/*;q=0.8")
    for path in [*JSON_PAGES, "/debug/tasks"]:
        assert f"GET   {path} " in plain.text
        assert f"<a href='{path}'>{path}</a>" in page.text
    assert "<script" not in page.text


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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/debug/?x=1", 400),
        ("GET", "/debug/tasks?x=1", 400),
        ("GET", "/debug/tasks?x=1&x=1", 400),
        *(("GET", f"/debug/{gone}", 404) for gone in ("profile", "memory", "gc")),
        ("POST", "/debug/log", 400),
        ("POST", "/debug/log?level=trace", 400),
        ("GET", "/debug/log?level=debug", 400),
        ("HEAD", "/debug/", 405),
        ("HEAD", "/debug/tasks", 405),
        ("POST", "/debug/tasks", 405),
        ("DELETE", "/debug/log", 405),
        ("OPTIONS", "/debug/", 405),
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
    assert ("GET" in answer.headers.get("Allow", "")) is (status == 405)
    assert logging.getLogger().level == level


async def test_a_failing_page_is_an_answer_and_a_traceback_in_the_log() -> None:
    """The server goes on."""

    def fail() -> list[object]:
        raise ValueError(SECRET)

    broken = replace(sources(), pods=fail)  # type: ignore[arg-type]  # it fails
    with structlog.testing.capture_logs() as logged:
        async with serving(debug=broken) as port:
            answer = await ask(port, "/debug/pods")
            assert (await ask(port, "/debug/log")).status == 200
    assert answer.status == 500
    assert SECRET not in answer.text
    assert "debug_request_failed" in [line["event"] for line in logged]


@pytest.mark.parametrize("path", ["/debug/pprof", "/debug/pprof/", "/debug/pprof/heap?debug=1", "/debug/pprof/profile"])
async def test_gos_profiles_are_answered_with_what_there_is(path: str) -> None:
    """gpu-manager's users type them."""
    async with serving() as port:
        answer = await ask(port, path)
        tasks = await ask(port, "/debug/pprof/goroutine?debug=2")
    assert answer.status == 200 and "py-spy" in answer.text and "/debug/tasks" in answer.text
    assert tasks.status == 200 and len(tasks.text) > 50
