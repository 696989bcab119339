"""The node's labels and annotation are written through a real socket: on change, with back-off, and no more than needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.cluster.node_facts import NodeFacts
from gpushare_agent.agent.cluster.node_fields import FACTS, ROLE, NodeFieldsWriter
from gpushare_agent.core.kit.backoff import Backoff
from tests.cluster.support_kube import FAST, NODE, NotedBackoff, opened, running
from tests.fakes.api_server import Behaviour, FakeApiServer, Seen, answers, fake_api, raw_status, stalls_before_headers

LABELS = {"gpushare-agent/gpu.count": "2"}
FORBIDDEN = answers(403, raw_status(403, "nodes is forbidden"))


class NodeObject:
    """A node of the API server: answers GET, applies merge patches."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {"zone": "z"}
        self.annotations: dict[str, str] = {}

    async def __call__(self, server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        if seen.method == "PATCH":
            for part, kept in (("labels", self.labels), ("annotations", self.annotations)):
                for name, value in seen.body["metadata"].get(part, {}).items():
                    if value is None:
                        kept.pop(name, None)
                    else:
                        kept[name] = value
        body = {"kind": "Node", "metadata": {"name": NODE, "labels": self.labels, "annotations": self.annotations}}
        return await answers(200, body)(server, seen, request)


class Wanted:
    """What the node should have."""

    def __init__(self, labels: Mapping[str, str] = LABELS, owned: frozenset[str] = frozenset(LABELS)) -> None:
        self.labels, self.owned = dict(labels), owned

    def __call__(self) -> NodeFacts:
        return NodeFacts(labels=self.labels, annotations={"gpushare-agent/gpus": "{}"}, owned=self.owned)


@asynccontextmanager
async def written(
    server: FakeApiServer,
    wanted: Callable[[], NodeFacts | None],
    *,
    period_s: float = 60.0,
    backoff: Backoff = FAST,
    **more: Any,
) -> AsyncIterator[NodeFieldsWriter[NodeFacts]]:
    """The writer on the server, ended afterwards."""
    fields = replace(FACTS, gap_s=0.0, period_s=period_s)
    writer = NodeFieldsWriter(fields=fields, node_name=NODE, desired=wanted, backoff=backoff, **more)
    async with opened(server.url) as api, running(lambda: writer.run(api)):
        yield writer


def patches(server: FakeApiServer) -> list[Any]:
    return [request.body["metadata"] for request in server.seen if request.method == "PATCH"]


def methods(server: FakeApiServer) -> str:
    return " ".join(request.method for request in server.seen)


async def test_the_node_gets_labels_and_annotation_by_a_merge_patch_and_is_then_left_alone() -> None:
    """One patch that names only what differs; the comparisons that follow only read."""
    node = NodeObject()
    async with fake_api(others=[node]) as server, written(server, Wanted(), period_s=0.005):
        await server.wait_for(lambda requests: len(requests) >= 5)
    assert patches(server) == [
        {"labels": LABELS, "annotations": {"gpushare-agent/gpus": "{}", "gpushare-agent/labels": next(iter(LABELS))}}
    ]
    assert node.labels == {"zone": "z", **LABELS}
    (sent,) = [request for request in server.seen if request.method == "PATCH"]
    assert sent.path == f"/api/v1/nodes/{NODE}"
    assert sent.headers["content-type"] == "application/merge-patch+json"
    assert methods(server).startswith("GET PATCH GET GET")


async def test_nothing_is_written_before_the_gpus_were_read() -> None:
    """Labels of an earlier agent stay on the node, which is not even read; the first read of the GPUs is written."""
    node, facts = NodeObject(), Wanted()()
    node.labels["gpushare-agent/gpu.product"] = "P40"
    is_read: list[bool] = []
    asked = asyncio.Event()

    def wanted() -> NodeFacts | None:
        asked.set()
        return facts if is_read else None

    async with fake_api(others=[node]) as server, written(server, wanted) as writer:
        await asked.wait()
        assert server.seen == []
        is_read.append(True)
        writer.changed()
        await server.wait_for(lambda requests: patches(server))
    assert node.labels["gpushare-agent/gpu.product"] == "P40"


async def test_a_change_is_written_at_once_and_what_no_longer_applies_is_removed() -> None:
    """The period is a minute here; `changed` does not wait for it."""
    node, wanted = NodeObject(), Wanted()
    async with fake_api(others=[node]) as server, written(server, wanted) as writer:
        await server.wait_for(lambda requests: any(r.method == "PATCH" for r in requests))
        wanted.labels = {}
        writer.changed()
        await server.wait_for(lambda requests: sum(r.method == "PATCH" for r in requests) == 2)
    assert patches(server)[1] == {"labels": dict.fromkeys(LABELS), "annotations": {"gpushare-agent/labels": ""}}
    assert node.labels == {"zone": "z"}


async def test_a_change_by_hand_is_put_right_within_a_period() -> None:
    """No event reports it."""
    node = NodeObject()
    async with fake_api(others=[node]) as server, written(server, Wanted(), period_s=0.005):
        await server.wait_for(lambda requests: any(r.method == "PATCH" for r in requests))
        node.labels.clear()
        await server.wait_for(lambda requests: sum(r.method == "PATCH" for r in requests) == 2)
    assert node.labels == LABELS


async def test_a_missing_right_is_one_warning_that_names_the_role() -> None:
    """Refused again and again, and reported once, until an hour is over."""
    now = [0.0]
    script: list[Behaviour] = [FORBIDDEN]
    with capture_logs() as logs:
        async with (
            fake_api(others=script) as server,
            written(server, Wanted(), period_s=0.002, clock=lambda: now[0]),
        ):
            await server.wait_for(lambda requests: len(requests) >= 5)
            now[0] = 3601.0
            seen = len(server.seen)
            await server.wait_for(lambda requests: len(requests) >= seen + 4)
    reported = [entry for entry in logs if entry["event"] == "node_fields_not_written"]
    assert len(reported) == 2
    assert all(ROLE in entry["cure"] and "facts.is_written" in entry["cure"] for entry in reported)
    assert "403" in reported[0]["error"] and NODE in reported[0]["error"]


async def test_a_server_that_is_away_is_tried_again_with_growing_timeouts() -> None:
    """Also one that answers rubbish, and the facts arrive in the end."""
    asked: list[int] = []
    node = NodeObject()
    script = [answers(503, raw_status(503)), answers(200, b"\x00 no json"), answers(429, raw_status(429)), node]
    with capture_logs() as logs:
        async with (
            fake_api(others=script) as server,
            written(server, Wanted(), backoff=NotedBackoff(asked=asked), period_s=0.005),
        ):
            await server.wait_for(lambda requests: len(requests) >= 6)
    assert asked == [1, 2, 3]
    assert [entry["event"] for entry in logs] == ["node_fields_not_written"] * 3 + ["node_fields_written"]


async def test_a_change_ends_the_wait_after_a_failure() -> None:
    """After an outage the list of pods brings it, and what the node says is not left for the rest of the back-off."""
    node = NodeObject()
    script = [answers(503, raw_status(503)), node]
    async with (
        fake_api(others=script) as server,
        written(server, Wanted(), backoff=Backoff(base_s=3600.0, cap_s=3600.0)) as writer,
    ):
        await server.wait_for(lambda requests: len(requests) == 1)
        writer.changed()
        await server.wait_for(lambda _: bool(patches(server)))


async def test_a_right_that_is_missing_for_a_moment_costs_no_whole_period() -> None:
    """An API server that has just started may refuse what it allows as soon as it has its roles."""
    node = NodeObject()
    async with fake_api(others=[FORBIDDEN, node]) as server, written(server, Wanted(), period_s=3600.0):
        await server.wait_for(lambda _: bool(patches(server)))


async def test_a_server_that_does_not_answer_holds_nothing_up_when_the_agent_ends() -> None:
    """The writer is cancelled in the middle of its call."""
    async with fake_api(others=[stalls_before_headers]) as server, written(server, Wanted()):
        await server.wait_for(lambda requests: len(requests) == 1)


async def test_a_label_that_another_program_holds_is_named_once_and_left() -> None:
    """Two writers of one label would take turns for ever."""
    node = NodeObject()
    node.labels["nvidia.com/gpu.count"] = "1"
    wanted = Wanted({"nvidia.com/gpu.count": "2"}, frozenset())
    with capture_logs() as logs:
        async with fake_api(others=[node]) as server, written(server, wanted, period_s=0.002):
            await server.wait_for(lambda requests: len(requests) >= 5)
    assert node.labels["nvidia.com/gpu.count"] == "1"
    (reported,) = [entry for entry in logs if entry["event"] == "node_labels_of_others"]
    assert reported["labels"] == ["nvidia.com/gpu.count"]


async def test_labels_that_kubernetes_would_refuse_are_named_once_and_the_others_written() -> None:
    """One bad entry of node_labels does not keep the GPUs' facts away."""
    node = NodeObject()

    def wanted() -> NodeFacts:
        return NodeFacts(labels=LABELS, annotations={}, owned=frozenset(LABELS), unusable=("bad name",))

    with capture_logs() as logs:
        async with fake_api(others=[node]) as server, written(server, wanted, period_s=0.002):
            await server.wait_for(lambda requests: len(requests) >= 6)
    assert LABELS.items() <= node.labels.items()
    (reported,) = [entry for entry in logs if entry["event"] == "node_labels_unusable"]
    assert (reported["labels"], reported["log_level"]) == (["bad name"], "error")


@pytest.mark.parametrize("name", ["", "..", "a" * 300])
async def test_a_name_that_is_no_nodes_is_never_sent(name: str) -> None:
    """It would name another path of the API server."""
    from gpushare_agent.core.model.errors import Rejected

    async with fake_api() as server, opened(server.url) as api:
        with pytest.raises(Rejected):
            await api.patch_node(name, "labels", {"metadata": {"labels": {"a": "b"}}})
        assert server.seen == []
