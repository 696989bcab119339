"""Which GPUs a pod got is written on the pod, in the background, once, and only where it differs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpushare_agent.cluster.pod_annotations import QUEUE_LIMIT, PodAnnotations, wanted_annotations
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from tests.support_kube import (
    DEADLINE_S,
    FAST,
    Behaviour,
    answers,
    answers_html_502,
    fake_api,
    opened,
    pod,
    raw_status,
    resets,
    running,
)

ASSIGNED = "tencent.com/gpu-assigned"
INDEX = "tencent.com/predicate-gpu-idx-"


class Counted:
    """Records outcomes; `wait` waits for one."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self._changed = asyncio.Event()

    def pod_annotated(self, outcome: str) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.outcomes) < count:
                self._changed.clear()
                await self._changed.wait()


def _sent(server: Any) -> list[dict[str, str]]:
    return [request.body["metadata"]["annotations"] for request in server.requests]


def test_only_main_containers_are_named() -> None:
    """Init containers and sidecars have no position in spec.containers; unknown positions are left out."""
    kinds = [(ContainerKind.INIT, 0), (ContainerKind.MAIN, 0), (ContainerKind.MAIN, 1), (ContainerKind.MAIN, 2)]
    containers = tuple(ContainerSpec(name=f"c{i}", kind=kind, position=at) for i, (kind, at) in enumerate(kinds))
    wanted = wanted_annotations(pod(containers=containers), {0: (0,), 2: (3, 1), 7: (5,)})
    assert wanted == {ASSIGNED: "true", f"{INDEX}0": "0", f"{INDEX}2": "1,3"}


async def test_an_assignment_is_patched() -> None:
    """What was assigned before the API server could be reached is sent once it can, with the pod's UID."""
    counted = Counted()
    annotations = PodAnnotations(pods=PodStore(), metrics=counted, backoff=FAST)
    annotations.assigned(pod("a"), {0: (2,)})
    async with fake_api() as server, opened(server.url) as api, running(lambda: annotations.run(api)):
        await counted.wait(1)
    assert _sent(server) == [{ASSIGNED: "true", f"{INDEX}0": "2"}]
    assert server.requests[0].body["metadata"]["uid"] == "uid-a"
    assert server.requests[0].path == "/api/v1/namespaces/default/pods/a"


async def test_only_the_difference_is_sent() -> None:
    """The extender's own correct annotation is not written again; a pod that has all of them is not patched."""
    counted, store = Counted(), PodStore()
    store.upsert(pod("a", annotations={ASSIGNED: "false", f"{INDEX}0": "2"}))
    store.upsert(pod("b", annotations={ASSIGNED: "true", f"{INDEX}0": "1"}))
    async with fake_api() as server, opened(server.url) as api:
        annotations = PodAnnotations(pods=store, metrics=counted, backoff=FAST)
        async with running(lambda: annotations.run(api)):
            annotations.assigned(pod("b"), {0: (1,)})
            annotations.assigned(pod("a"), {0: (2,)})
            await counted.wait(1)
    assert _sent(server) == [{ASSIGNED: "true"}]


async def test_the_newest_request_of_a_pod_wins() -> None:
    """A later assignment replaces an unsent earlier one of the same container and keeps those of others."""
    counted = Counted()
    two = pod(containers=tuple(ContainerSpec(name=f"c{at}", kind=ContainerKind.MAIN, position=at) for at in range(2)))
    annotations = PodAnnotations(pods=PodStore(), metrics=counted, backoff=FAST)
    annotations.assigned(two, {0: (1,)})
    annotations.assigned(two, {1: (4,)})
    annotations.assigned(two, {0: (2,)})
    async with fake_api() as server, opened(server.url) as api, running(lambda: annotations.run(api)):
        await counted.wait(1)
    assert _sent(server) == [{ASSIGNED: "true", f"{INDEX}0": "2", f"{INDEX}1": "4"}]


@pytest.mark.parametrize("bad", [answers_html_502, resets, answers(429, raw_status(429))])
async def test_an_unavailable_server_is_tried_again(bad: Behaviour) -> None:
    """Nothing is lost while the server cannot answer."""
    counted = Counted()
    async with fake_api(others=[bad, bad, answers(200, {})]) as server, opened(server.url) as api:
        annotations = PodAnnotations(pods=PodStore(), metrics=counted, backoff=FAST)
        async with running(lambda: annotations.run(api)):
            annotations.assigned(pod("a"), {0: (2,)})
            await counted.wait(3)
    assert counted.outcomes == ["unavailable", "unavailable", "patched"]


@pytest.mark.parametrize(("status", "outcome"), [(404, "gone"), (409, "gone"), (403, "refused"), (422, "refused")])
async def test_a_final_no_drops_the_request(status: int, outcome: str) -> None:
    """A pod that is gone, another of its name, or a missing permission: the next pod's turn comes."""
    counted = Counted()
    others = [answers(status, raw_status(status)), answers(200, {})]
    async with fake_api(others=others) as server, opened(server.url) as api:
        annotations = PodAnnotations(pods=PodStore(), metrics=counted, backoff=FAST)
        async with running(lambda: annotations.run(api)):
            annotations.assigned(pod("a"), {0: (2,)})
            annotations.assigned(pod("b"), {0: (3,)})
            await counted.wait(2)
    assert counted.outcomes == [outcome, "patched"]
    assert [request.path.rpartition("/")[2] for request in server.requests] == ["a", "b"]


async def test_the_queue_is_bounded() -> None:
    """Beyond the limit the oldest request goes, and is counted."""
    counted = Counted()
    annotations = PodAnnotations(pods=PodStore(), metrics=counted)
    for number in range(QUEUE_LIMIT + 2):
        annotations.assigned(pod(f"p{number}"), {0: (0,)})
    assert counted.outcomes == ["dropped", "dropped"]


async def test_a_request_that_changes_while_it_is_sent_is_sent_again() -> None:
    """An assignment during the patch of the same pod is not lost with it."""
    counted = Counted()
    annotations = PodAnnotations(pods=PodStore(), metrics=counted, backoff=FAST)
    target: Pod = pod("a")

    async def changes_its_mind(server: Any, request: Any, connection: Any) -> None:
        annotations.assigned(target, {0: (5,)})
        await answers(200, {})(server, request, connection)

    others = [changes_its_mind, answers(200, {})]
    async with fake_api(others=others) as server, opened(server.url) as api, running(lambda: annotations.run(api)):
        annotations.assigned(target, {0: (2,)})
        await counted.wait(2)
    assert [sent[f"{INDEX}0"] for sent in _sent(server)] == ["2", "5"]
    assert target.uid == PodUid("uid-a")
