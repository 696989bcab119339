"""What a pod should have by the ledger is written on it, in the background, and only where it differs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gpushare_agent.agent.cluster.pod_annotations import MOST_REFUSALS, PodAnnotations
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from tests.cluster.support_kube import FAST, Counted, opened, pod, running
from tests.fakes.api_server import (
    Behaviour,
    FakeApiServer,
    Seen,
    answers,
    answers_html_502,
    fake_api,
    raw_status,
    resets,
)

ASSIGNED = "tencent.com/gpu-assigned"
INDEX = "tencent.com/predicate-gpu-idx-0"


class Written(Counted):
    """The writer with its pod store, subscribed as in the agent; `gpu` has the GPU of each pod by the ledger."""

    def __init__(self, *pods: Pod, gpu: Mapping[str, int] | None = None, compare_s: float = 60.0) -> None:
        super().__init__()
        self.gpu = dict(gpu or {})
        self.assigned = ASSIGNED
        self.store = PodStore()
        self.writer = PodAnnotations(
            pods=self.store,
            desired=self._wanted,
            metrics=self,
            backoff=FAST,
            compare_s=compare_s,
            wall_clock_ns=lambda: 17,
        )
        self.store.subscribe(self.writer.pod_changed)
        self.store.replace_all(pods, resource_version="1")

    def _wanted(self, one: Pod) -> dict[str, str]:
        return {self.assigned: "true", INDEX: str(self.gpu[one.name])} if one.name in self.gpu else {}

    def assign(self, name: str, gpu: int) -> None:
        self.gpu[name] = gpu
        self.writer.compare(PodUid(f"uid-{name}"))

    def pod_annotated(self, outcome: str) -> None:
        self.note(outcome)

    @asynccontextmanager
    async def sending(self, *others: Behaviour) -> AsyncIterator[FakeApiServer]:
        """To a server with these answers."""
        async with (
            fake_api(others=list(others or [answers(200, {})])) as server,
            opened(server.url) as api,
            running(lambda: self.writer.run(api)),
        ):
            yield server


def _sent(server: Any) -> list[tuple[str, dict[str, str]]]:
    return [(request.path.rpartition("/")[2], request.body["metadata"]["annotations"]) for request in server.seen]


async def test_only_what_differs_from_the_ledger_is_sent() -> None:
    """With the pod's UID. Nothing is called for an assignment: the first list of pods shows what an agent that died had not
    written. What is right, as the extender's own annotation, is not written again; a deleted pod is forgotten."""
    done = pod("done", annotations={ASSIGNED: "true", INDEX: "1"})
    half = pod("half", annotations={ASSIGNED: "false", INDEX: "2"})
    ledger = {"a": 2, "done": 1, "gone": 1, "half": 2}
    written = Written(pod("a"), done, pod("gone"), half, pod("without-gpu"), gpu=ledger)
    written.store.remove(PodUid("uid-gone"))
    async with written.sending() as server:
        await written.wait(2)
    assert _sent(server) == [("a", {ASSIGNED: "true", INDEX: "2"}), ("half", {ASSIGNED: "true"})]
    assert server.seen[0].body["metadata"]["uid"] == "uid-a"
    assert server.seen[0].path == "/api/v1/namespaces/default/pods/a"


async def test_gpushares_time_is_written_where_no_extender_has() -> None:
    """Next to its own annotations alone."""
    assumed, assigned = "ALIYUN_COM_GPU_MEM_ASSUME_TIME", "ALIYUN_COM_GPU_MEM_ASSIGNED"
    written = Written(pod("a", annotations={INDEX: "1"}), pod("b", annotations={INDEX: "1", assumed: "5"}))
    written.assigned = assigned
    for name in "ab":
        written.assign(name, 1)
    async with written.sending() as server:
        await written.wait(2)
    assert _sent(server) == [("a", {assigned: "true", assumed: "17"}), ("b", {assigned: "true"})]


async def test_who_overwrites_an_annotation_does_not_make_the_agent_write_each_time() -> None:
    """The pod is given the same again at the next comparison of all pods only, and another value at once."""
    written = Written(pod("a"), gpu={"a": 2})
    async with written.sending() as server:
        await written.wait(1)
        written.store.upsert(pod("a", annotations={INDEX: "7"}, version="2"))
        written.assign("b", 0)
        written.store.upsert(pod("b"))
        await written.wait(2)
        written.writer.compare_all()
        await written.wait(4)
        written.assign("a", 3)
        await written.wait(5)
    assert [name for name, _ in _sent(server)] == ["a", "b", "a", "b", "a"]
    assert _sent(server)[2][1] == {ASSIGNED: "true", INDEX: "2"}
    assert _sent(server)[4][1] == {ASSIGNED: "true", INDEX: "3"}


async def test_all_pods_are_compared_again_after_a_while() -> None:
    """No event announces it."""
    written = Written(pod("a"), gpu={"a": 2}, compare_s=0.01)
    async with written.sending() as server:
        await written.wait(1)
        written.store.upsert(pod("a", annotations={INDEX: "7"}, version="2"))
        await written.wait(2)
    assert _sent(server)[1][1] == {ASSIGNED: "true", INDEX: "2"}


async def test_a_resize_status_is_written_and_removed() -> None:
    """Next to the rest; None removes."""
    status = "gpushare-agent/resize-status"
    written = Written(pod("a", annotations={ASSIGNED: "true", INDEX: "2"}), gpu={"a": 2})
    written.writer.resize_status(pod("a"), "all in force")
    async with written.sending() as server:
        await written.wait(1)
        had = {ASSIGNED: "true", INDEX: "2", status: "all in force"}
        written.store.upsert(pod("a", annotations=had, version="2"))
        written.writer.resize_status(pod("a"), None)
        await written.wait(2)
    assert _sent(server) == [("a", {status: "all in force"}), ("a", {status: None})]


@pytest.mark.parametrize("bad", [answers_html_502, resets, answers(429, raw_status(429))])
async def test_an_unavailable_server_is_tried_again(bad: Behaviour) -> None:
    """Nothing is lost while the server cannot answer."""
    written = Written(pod("a"), gpu={"a": 2})
    async with written.sending(bad, bad, answers(200, {})):
        await written.wait(3)
    assert written.outcomes == ["unavailable", "unavailable", "patched"]


async def test_a_refusal_that_passes_loses_nothing() -> None:
    """As of an API server that has just started and has not read its roles: tried again with the next comparisons."""
    written = Written(pod("a"), gpu={"a": 2}, compare_s=0.001)
    refused = answers(403, raw_status(403))
    async with written.sending(refused, refused, answers(200, {})):
        await written.wait(3)
    assert written.outcomes == ["refused", "refused", "patched"]


@pytest.mark.parametrize(("status", "outcome"), [(404, "gone"), (409, "gone"), (403, "refused"), (422, "refused")])
async def test_a_no_lets_the_next_pod_have_its_turn(status: int, outcome: str) -> None:
    """A pod that is gone, another of its name, or a missing permission: the next comparison of all tries it again."""
    written = Written(pod("a"), pod("b"), gpu={"a": 2, "b": 3})
    async with written.sending(answers(status, raw_status(status)), answers(200, {})) as server:
        await written.wait(2)
        written.store.upsert(pod("b", annotations={ASSIGNED: "true", INDEX: "3"}, version="2"))
        written.writer.compare_all()
        await written.wait(3)
    assert written.outcomes == [outcome, "patched", "patched"]
    assert [name for name, _ in _sent(server)] == ["a", "b", "a"]


async def test_what_was_refused_three_times_is_not_tried_again() -> None:
    """Nor logged: a right that is missing, or a name that Kubernetes does not take."""
    written = Written(pod("a"), gpu={"a": 2, "b": 3}, compare_s=0.001)
    async with written.sending(answers(403, raw_status(403))) as server:
        await written.wait(MOST_REFUSALS)
        written.store.upsert(pod("b"))
        await written.wait(2 * MOST_REFUSALS)
    assert [name for name, _ in _sent(server)] == ["a"] * MOST_REFUSALS + ["b"] * MOST_REFUSALS


async def test_an_assignment_that_changes_while_it_is_sent_is_sent_again() -> None:
    """An assignment during the patch of the same pod is not lost with it."""
    written = Written(pod("a"), gpu={"a": 2})

    async def changes_its_mind(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        written.assign("a", 5)
        return await answers(200, {})(server, seen, request)

    async with written.sending(changes_its_mind, answers(200, {})) as server:
        await written.wait(2)
    assert [sent[INDEX] for _, sent in _sent(server)] == ["2", "5"]
