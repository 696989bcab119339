"""The fields of the node's object are written through a real socket: on change, with back-off, and no more than needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.cluster.free_gpus_taint import EFFECT, KEY
from gpushare_agent.agent.cluster.node_facts import NodeFacts
from gpushare_agent.agent.cluster.node_fields import ALLOCATIONS, FACTS, ROLE, TAINT, NodeFields, NodeFieldsWriter
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION
from gpushare_agent.core.placement.free_gpus import FreeGpus
from tests.cluster.support_kube import FAST, NODE, NotedBackoff, opened, running
from tests.fakes.api_server import Behaviour, FakeApiServer, Seen, answers, fake_api, raw_status, stalls_before_headers
from tests.support_deadline import Changes

T = TypeVar("T")
LABELS = {"gpushare-agent/gpu.count": "2"}
FORBIDDEN = answers(403, raw_status(403, "nodes is forbidden"))
OWN = None
"""The server's own answer, in place of a scripted one."""


def facts(labels: dict[str, str] = LABELS, owned: frozenset[str] = frozenset(LABELS), **more: Any) -> NodeFacts:
    return NodeFacts(labels=labels, annotations={"gpushare-agent/gpus": "{}"}, owned=owned, **more)


class Wanted(Generic[T]):
    """What the node should have; None while it is not known."""

    def __init__(self, value: T | None) -> None:
        self.value = value
        self.reads = 0
        self._is_read = Changes()

    def __call__(self) -> T | None:
        self.reads += 1
        self._is_read.set()
        return self.value

    async def wait_reads(self, more: int) -> None:
        count = self.reads + more
        await self._is_read.until(lambda: self.reads >= count)


@asynccontextmanager
async def written(
    fields: NodeFields[T],
    wanted: Wanted[T],
    script: Sequence[Behaviour | None] = (OWN,),
    *,
    node: dict[str, Any] | None = None,
    gap_s: float = 0.0,
    period_s: float = 60.0,
    backoff: Backoff = FAST,
    **more: Any,
) -> AsyncIterator[tuple[FakeApiServer, NodeFieldsWriter[T]]]:
    """The writer on a server that has this node, ended afterwards."""
    fields = replace(fields, gap_s=gap_s, period_s=period_s)
    writer = NodeFieldsWriter(fields=fields, node_name=NODE, desired=wanted, backoff=backoff, **more)
    async with fake_api(others=list(script)) as server:
        server.put("nodes", {"metadata": {"name": NODE, "labels": {"zone": "z"}}} | (node or {}))
        async with opened(server.url) as api, running(lambda: writer.run(api)):
            yield server, writer


def patches(server: FakeApiServer) -> list[Any]:
    return [request.body["metadata"] for request in server.seen if request.method == "PATCH"]


async def wait_patches(server: FakeApiServer, count: int) -> None:
    await server.wait_for(lambda _: len(patches(server)) >= count)
    await server.wait_hung_up()  # the last one is answered


async def wait_requests(server: FakeApiServer, count: int) -> None:
    await server.wait_for(lambda requests: len(requests) >= count)


def labels(server: FakeApiServer) -> dict[str, str]:
    found: dict[str, str] = server.objects["nodes"][NODE]["metadata"]["labels"]
    return found


def allocations(server: FakeApiServer) -> str:
    return str(server.objects["nodes"][NODE]["metadata"].get("annotations", {}).get(ALLOCATIONS_ANNOTATION))


def methods(server: FakeApiServer) -> str:
    return " ".join(request.method for request in server.seen)


async def test_the_node_gets_labels_and_annotation_by_a_merge_patch_and_is_then_left_alone() -> None:
    """One patch that names only what differs; the comparisons that follow only read."""
    async with written(FACTS, Wanted(facts()), period_s=0.005) as (server, _):
        await wait_requests(server, 5)
    assert patches(server) == [
        {"labels": LABELS, "annotations": {"gpushare-agent/gpus": "{}", "gpushare-agent/labels": next(iter(LABELS))}}
    ]
    assert labels(server) == {"zone": "z", **LABELS}
    (sent,) = [request for request in server.seen if request.method == "PATCH"]
    assert sent.path == f"/api/v1/nodes/{NODE}"
    assert sent.headers["content-type"] == "application/merge-patch+json"
    assert methods(server).startswith("GET PATCH GET GET")


async def test_nothing_is_written_before_the_gpus_were_read() -> None:
    """Labels of an earlier agent stay on the node, which is not even read; the first read of the GPUs is written."""
    wanted = Wanted[NodeFacts](None)
    async with written(FACTS, wanted, node={"metadata": {"name": NODE, "labels": {"a": "P40"}}}) as (server, writer):
        await wanted.wait_reads(1)
        assert server.seen == []
        wanted.value = facts()
        writer.changed()
        await wait_patches(server, 1)
    assert labels(server)["a"] == "P40"


async def test_a_change_is_written_at_once_and_what_no_longer_applies_is_removed() -> None:
    """The period is a minute here; `changed` does not wait for it."""
    wanted = Wanted(facts())
    async with written(FACTS, wanted) as (server, writer):
        await wait_patches(server, 1)
        wanted.value = facts({})
        writer.changed()
        await wait_patches(server, 2)
    assert patches(server)[1] == {"labels": dict.fromkeys(LABELS), "annotations": {"gpushare-agent/labels": ""}}
    assert labels(server) == {"zone": "z"}


async def test_a_change_by_hand_is_put_right_within_a_period() -> None:
    """No event reports it. Those of which the last patch is known are read again for it."""
    async with written(FACTS, Wanted(facts()), period_s=0.005) as (server, _):
        await wait_patches(server, 1)
        server.change("nodes", NODE, lambda raw: raw["metadata"].pop("labels"))
        await wait_patches(server, 2)
    assert labels(server) == LABELS
    async with written(ALLOCATIONS, Wanted("ours"), period_s=0.1) as (server, _):
        await wait_patches(server, 1)
        server.change("nodes", NODE, lambda raw: raw["metadata"].pop("annotations"))
        await server.wait(lambda: allocations(server) == "ours")


async def test_a_missing_right_is_one_warning_that_names_the_role() -> None:
    """Refused again and again, and reported once, until an hour is over."""
    now = [0.0]
    with capture_logs() as logs:
        async with written(FACTS, Wanted(facts()), [FORBIDDEN], period_s=0.002, clock=lambda: now[0]) as (server, _):
            await wait_requests(server, 5)
            now[0] = 3601.0
            await wait_requests(server, len(server.seen) + 4)
    reported = [entry for entry in logs if entry["event"] == "node_fields_not_written"]
    assert len(reported) == 2
    assert all(ROLE in entry["cure"] and "facts.is_written" in entry["cure"] for entry in reported)
    assert "403" in reported[0]["error"] and NODE in reported[0]["error"]


async def test_a_server_that_is_away_is_tried_again_with_growing_timeouts() -> None:
    """Also one that answers rubbish, and the facts arrive in the end."""
    noted = NotedBackoff(asked=[])
    script = [answers(503, raw_status(503)), answers(200, b"\x00 no json"), answers(429, raw_status(429)), OWN]
    with capture_logs() as logs:
        async with written(FACTS, Wanted(facts()), script, backoff=noted, period_s=0.005) as (server, _):
            await wait_requests(server, 6)
    assert noted.asked == [1, 2, 3]
    assert [entry["event"] for entry in logs] == ["node_fields_not_written"] * 3 + ["node_fields_written"]


async def test_a_change_ends_the_wait_after_a_failure() -> None:
    """After an outage the list of pods brings it, and what the node says is not left for the rest of the back-off."""
    script = [answers(503, raw_status(503)), OWN]
    async with written(FACTS, Wanted(facts()), script, backoff=Backoff(base_s=3600.0, cap_s=3600.0)) as (
        server,
        writer,
    ):
        await wait_requests(server, 1)
        writer.changed()
        await wait_patches(server, 1)


async def test_a_right_that_is_missing_for_a_moment_costs_no_whole_period() -> None:
    """An API server that has just started may refuse what it allows as soon as it has its roles."""
    async with written(FACTS, Wanted(facts()), [FORBIDDEN, OWN], period_s=3600.0) as (server, _):
        await wait_patches(server, 1)


async def test_a_server_that_does_not_answer_holds_nothing_up_when_the_agent_ends() -> None:
    """The writer is cancelled in the middle of its call."""
    async with written(FACTS, Wanted(facts()), [stalls_before_headers]) as (server, _):
        await wait_requests(server, 1)


async def test_a_label_that_another_program_holds_is_named_once_and_left() -> None:
    """Two writers of one label would take turns for ever."""
    wanted = Wanted(facts({"nvidia.com/gpu.count": "2"}, frozenset()))
    node = {"metadata": {"name": NODE, "labels": {"nvidia.com/gpu.count": "1"}}}
    with capture_logs() as logs:
        async with written(FACTS, wanted, node=node, period_s=0.002) as (server, _):
            await wait_requests(server, 5)
    assert labels(server)["nvidia.com/gpu.count"] == "1"
    (reported,) = [entry for entry in logs if entry["event"] == "node_labels_of_others"]
    assert reported["labels"] == ["nvidia.com/gpu.count"]


async def test_labels_that_kubernetes_would_refuse_are_named_once_and_the_others_written() -> None:
    """One bad entry of node_labels does not keep the GPUs' facts away."""
    with capture_logs() as logs:
        async with written(FACTS, Wanted(facts(unusable=("bad name",))), period_s=0.002) as (server, _):
            await wait_requests(server, 6)
    assert LABELS.items() <= labels(server).items()
    (reported,) = [entry for entry in logs if entry["event"] == "node_labels_unusable"]
    assert (reported["labels"], reported["log_level"]) == (["bad name"], "error")


async def test_each_change_of_the_allocations_is_one_patch_and_the_node_is_read_once() -> None:
    """A node with many pods changes often; what was written last is known. The same again is not written."""
    wanted = Wanted("first")
    async with written(ALLOCATIONS, wanted) as (server, writer):
        await wait_patches(server, 1)
        wanted.value = "second"
        writer.changed()
        await wait_patches(server, 2)
        assert allocations(server) == "second"
        for _ in range(2):  # the second comparison begins when the first is over
            writer.changed()
            await wanted.wait_reads(1)
        assert methods(server) == "GET PATCH PATCH"
        assert server.seen[-1].body == {"metadata": {"annotations": {ALLOCATIONS_ANNOTATION: "second"}}}


async def test_changes_during_the_gap_are_one_patch() -> None:
    """However many pods come in one second."""
    wanted = Wanted("first")
    async with written(ALLOCATIONS, wanted, gap_s=0.2) as (server, writer):
        await wait_patches(server, 1)
        for number in range(50):
            wanted.value = f"change {number}"
            writer.changed()
            await asyncio.sleep(0)
        await server.wait(lambda: allocations(server) == "change 49")
        assert methods(server) == "GET PATCH PATCH"


async def test_after_a_failed_patch_the_node_is_read_again() -> None:
    """The server may have taken it all the same."""
    async with written(ALLOCATIONS, Wanted("first"), [OWN, answers(500, raw_status(500)), OWN]) as (server, _):
        await wait_patches(server, 2)
        assert methods(server) == "GET PATCH GET PATCH"


async def test_a_taint_of_somebody_else_is_not_lost_though_the_node_changes_meanwhile() -> None:
    """The list is replaced under the version that was read; a Conflict reads it again."""
    others = {"key": "example.com/maintenance", "effect": "NoSchedule", "value": "x"}

    async def beats(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        """As the kubelet's heartbeat does between the answer and the patch."""
        answer = await answers(200, server.objects["nodes"][NODE])(server, seen, request)
        server.change("nodes", NODE, lambda raw: raw.update(status={"beat": 1}))
        return answer

    wanted = Wanted(FreeGpus(part=1.0, taint_above=0.5))
    async with written(TAINT, wanted, [OWN, beats, OWN], node={"spec": {"taints": [others]}}) as (server, _):
        await wait_patches(server, 2)
    assert server.objects["nodes"][NODE]["spec"]["taints"] == [others, {"key": KEY, "effect": EFFECT}]
    assert methods(server) == "GET GET PATCH GET GET PATCH"
