"""A refused pod's owner reads why in an Event: bounded, once per reason, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpushare_agent.core.kube.events import BURST, QUEUE_LIMIT, REPEAT_AFTER_S, TRIES, PodEvents
from gpushare_agent.core.kube.objects import ObjectReference
from gpushare_agent.core.model.errors import RefusalReason, Refused
from tests.cluster.support_kube import FAST, NODE, Counted, opened, pod, running
from tests.fakes.api_server import Behaviour, FakeApiServer, answers, answers_html_502, fake_api, raw_status

NO_CORES = Refused(reason=RefusalReason.NOT_ENOUGH_CORES, detail="30 asked, 10 free; delete a pod")


TAKEN = answers(201, {})


@asynccontextmanager
async def sending(*others: Behaviour, **settings: Any) -> AsyncIterator[tuple[FakeApiServer, PodEvents, Counted]]:
    """Events that are sent to a server with these answers. Nothing is sent before the first wait."""
    counted = Counted()
    events = PodEvents(NODE, count=counted.note, **({"backoff": FAST, "interval_s": 0.001} | settings))
    async with (
        fake_api(others=list(others or [TAKEN])) as server,
        opened(server.url) as api,
        running(lambda: events.run(api)),
    ):
        yield server, events, counted


STILL: dict[str, Any] = {"interval_s": 3600.0, "clock": lambda: 0.0}
"""The clock stands: nothing but the burst goes out."""


async def test_an_event_has_no_letter_that_a_terminal_obeys_and_a_long_one_is_cut() -> None:
    """A reason may quote what a tenant has written; the API server refuses messages beyond 1024 characters."""
    async with sending() as (server, events, counted):
        events.warned(pod("a"), "AnnotationIgnored", "it is a\x1b[2J\x9b\u202eb\nand 日本")
        events.refused(pod("a" * 253), Refused(reason=RefusalReason.FRAGMENTED, detail="x" * 5000))
        await counted.wait(2)
    quoted, long = (request.body for request in server.seen)
    assert quoted["message"] == "it is a\\u001b[2J\\u009b\\u202eb\nand 日本"
    assert len(long["message"]) == 1024 and len(long["metadata"]["name"]) <= 253


async def test_a_refusal_becomes_a_warning_on_the_pod() -> None:
    """Reason, advice and the pod's identity are in the Event."""
    async with sending() as (server, events, counted):
        events.refused(pod("a"), NO_CORES)
        await counted.wait(1)
    (request,) = server.seen
    assert (request.method, request.path) == ("POST", "/api/v1/namespaces/default/events")
    body = request.body
    assert (body["reason"], body["message"], body["type"]) == ("NotEnoughCores", NO_CORES.detail, "Warning")
    assert body["involvedObject"]["uid"] == "uid-a"
    assert body["source"] == {"component": "gpushare-agent", "host": NODE}
    assert body["metadata"]["name"].startswith("a.")


async def test_a_reason_is_reported_once_per_pod_for_a_while() -> None:
    """Repeats are dropped for ten minutes; another reason and another pod are not."""
    now = [0.0]
    async with sending(clock=lambda: now[0]) as (server, events, counted):
        for _ in range(3):
            events.refused(pod("a"), NO_CORES)
        events.refused(pod("b"), NO_CORES)
        events.refused(pod("a"), Refused(reason=RefusalReason.FRAGMENTED, detail="x"))
        now[0] = REPEAT_AFTER_S
        events.refused(pod("a"), NO_CORES)
        await counted.wait(4)
    reported = [(request.body["involvedObject"]["name"], request.body["reason"]) for request in server.seen]
    assert reported == [("a", "NotEnoughCores"), ("b", "NotEnoughCores"), ("a", "Fragmented"), ("a", "NotEnoughCores")]


async def test_a_warning_with_another_text_is_reported_although_the_reason_is_the_same() -> None:
    """A second, different bad annotation is an Event and a line in the log; the same one again is neither."""
    async with sending() as (server, events, counted):
        with capture_logs() as logs:
            for text in ("it is 'abc'", "it is 'abc'", "it is '101'", "it is 'abc'"):
                events.warned(pod("a"), "CoreLimitIgnored", text)
        await counted.wait(2)
    assert [request.body["message"] for request in server.seen] == ["it is 'abc'", "it is '101'"]
    logged = [(line["pod"], line["detail"]) for line in logs if line["event"] == "pod_warned"]
    assert logged == [("default/a", "it is 'abc'"), ("default/a", "it is '101'")]


async def test_mistyped_annotations_are_one_event_however_often_a_tenant_makes_up_others() -> None:
    """Nor do they fill the log."""
    now = [0.0]
    async with sending(clock=lambda: now[0]) as (server, events, counted):
        with capture_logs() as logs:
            for number in range(100):
                events.mistyped(pod("a"), f"annotation gpushare-agent/resise{number} is unknown")
            now[0] = REPEAT_AFTER_S
            events.mistyped(pod("a"), "annotation gpushare-agent/resiez is unknown")
        await counted.wait(2)
    assert [request.body["reason"] for request in server.seen] == ["AnnotationUnknown"] * 2
    assert [line["event"] for line in logs] == ["pod_warned"] * 2


@pytest.mark.parametrize(
    ("others", "outcomes"),
    [
        ([answers_html_502, TAKEN], ["sent", "sent"]),
        ([answers(404, raw_status(404)), TAKEN], ["refused", "sent"]),
        ([*[answers_html_502] * TRIES, TAKEN], ["dropped", "sent"]),
    ],
)
async def test_a_failing_event_gives_way_in_the_end(others: list[Behaviour], outcomes: list[str]) -> None:
    """Unavailable is tried again a few times, a refusal is not, and the next event follows."""
    async with sending(*others) as (_, events, counted):
        events.refused(pod("a"), NO_CORES)
        events.refused(pod("b"), NO_CORES)
        await counted.wait(2)
    assert counted.outcomes == outcomes


async def test_the_queue_is_bounded() -> None:
    """A flood of refusals without an API server costs a fixed amount of memory."""
    counted = Counted()
    events = PodEvents(NODE, count=counted.note)
    for number in range(QUEUE_LIMIT + 3):
        events.refused(pod(f"p{number}"), NO_CORES)
    assert counted.outcomes == ["dropped"] * 3


async def test_another_namespaces_refusal_is_sent_during_a_flood() -> None:
    """It takes the place of one of the flood's, and its turn comes next but one; what was dropped is in the log."""
    async with sending(**STILL) as (server, events, counted):
        with capture_logs() as logs:
            for number in range(QUEUE_LIMIT + 1):
                events.refused(pod(f"p{number}", namespace="flood"), NO_CORES)
            events.refused(pod("a", namespace="other"), NO_CORES)
        await counted.wait(2 + BURST)
    sent = [request.body["involvedObject"]["name"] for request in server.seen]
    assert sent[:3] == ["p0", "a", "p1"]
    assert counted.outcomes[:2] == ["dropped"] * 2
    assert [line["about"] for line in logs if line["event"] == "event_dropped"] == [
        f"Pod flood/p{QUEUE_LIMIT}",
        f"Pod flood/p{QUEUE_LIMIT - 1}",
    ]


async def test_one_pods_flood_delays_no_other_pod_of_its_namespace() -> None:
    """As annotations that change all the time; what was dropped may be recorded again at once."""
    async with sending(**STILL) as (server, events, counted):
        for number in range(2 * QUEUE_LIMIT):
            events.warned(pod("loud"), "ShareResizeRefused", f"it is '{number}'")
        events.refused(pod("a"), NO_CORES)
        await counted.wait(QUEUE_LIMIT + 1 + BURST)
        assert events.record(ObjectReference(kind="Pod", name="n", uid="u"), "r", "m", key=("new",))
        assert counted.outcomes.count("dropped") == QUEUE_LIMIT + 1
        events.warned(pod("loud"), "ShareResizeRefused", f"it is '{2 * QUEUE_LIMIT - 1}'")
        assert counted.outcomes.count("dropped") == QUEUE_LIMIT + 1
    assert [request.body["involvedObject"]["name"] for request in server.seen][:3] == ["loud", "a", "loud"]


async def test_after_a_burst_events_wait_for_their_turn() -> None:
    """With the clock standing still only the burst goes out at once; the rest is paced."""
    async with sending(**STILL) as (server, events, counted):
        for number in range(BURST + 5):
            events.refused(pod(f"p{number}"), NO_CORES)
        await counted.wait(BURST)
        await server.wait_for(lambda requests: len(requests) == BURST)
        for _ in range(20):
            await asyncio.sleep(0)  # turns of the loop in which a further event would be sent
        assert len(server.seen) == BURST
