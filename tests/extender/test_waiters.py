"""Pods that fit none of the nodes that kube-scheduler named: they are nominated for one that fits, and updated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.model.names import RETRY_ANNOTATION, PodUid
from gpushare_agent.extender.bind import PodWrites
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.extender.waiters import LONGEST_S, MAX_WAITING, Waiters
from tests.extender.support_extender import (
    NAMES,
    FakeCluster,
    eventually,
    fake_cluster,
    node_of,
    pod_of,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.clock import FakeClock

RAW = raw_pod("a", (100, 0))
POD, NODE = pod_of(RAW), node_of(raw_node("n"))


class Waiting(Struct, kw_only=True):
    """A pod that waits, and what is true of it."""

    cluster: FakeCluster
    clock: FakeClock
    state: ClusterState = field(default_factory=lambda: ClusterState(policy=ClusterPolicy(names=NAMES)))
    waiters: Waiters | None = None
    is_unscheduled: bool = True
    leads: bool = True

    @property
    def fits(self) -> bool:
        """A node would take the pod."""
        return bool(self.state.known_names())

    @fits.setter
    def fits(self, is_so: bool) -> None:
        if is_so:
            self.state.put_node(NODE, 0.0)
        else:
            self.state.remove_node(NODE.name)

    @property
    def nominated(self) -> str:
        return str(self.cluster.pod(POD.namespace, "a")["status"].get("nominatedNodeName", ""))

    def version(self) -> str:
        return str(self.cluster.pod(POD.namespace, "a")["metadata"]["resourceVersion"])

    async def is_tried(self) -> bool:
        assert self.waiters is not None
        before = self.version()
        await self.waiters.try_due()
        return self.version() != before


@asynccontextmanager
async def waiting(parts: int) -> AsyncIterator[tuple[Waiting, Waiters]]:
    """A pod just refused on one of so many parts of the nodes."""
    async with fake_cluster(pods=[RAW]) as cluster, cluster.opened_api() as api:
        one = Waiting(cluster=cluster, clock=FakeClock())

        one.fits = True
        waiters = one.waiters = Waiters(
            state=one.state,
            writes=PodWrites(api=api, names=NAMES, leads=lambda: one.leads),
            unscheduled=lambda uid: POD if one.is_unscheduled else None,
            metrics=ExtenderMetrics(),
            pace_s=0.0,
            clock=one.clock,
        )
        waiters.answered(POD.uid, parts=parts)
        yield one, waiters


@pytest.mark.parametrize(
    ("is_asked_again", "expected"), [(True, [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 64]), (False, [0, 64, 64])]
)
async def test_it_is_tried_at_once_and_then_ever_more_seldom(is_asked_again: bool, expected: list[float]) -> None:
    """Seldom also where a try does not reach the extender."""
    async with waiting(parts=3) as (one, waiters):
        waits: list[float] = []
        last = one.clock()
        while len(waits) < len(expected):
            if await one.is_tried():
                waits.append(one.clock() - last)
                last = one.clock()
                if is_asked_again:
                    waiters.answered(POD.uid, parts=3)
                    assert waiters.is_looking(POD.uid) == (len(waits) < 2)
            one.clock.now += 0.25
        assert waits == expected


async def test_it_is_nominated_once_for_the_best_node_that_fits() -> None:
    """In the write that has it tried again. The scheduler's own tries until then do not put it off."""
    async with waiting(parts=9) as (one, waiters):
        for name in ("m", "o"):
            one.state.put_node(replace(NODE, name=name), 0.0)
        waiters.answered(POD.uid, parts=9)
        before = int(one.version())
        assert await one.is_tried() and one.nominated == "m"
        assert int(one.version()) == before + 1
        one.cluster.change("pods", f"{POD.namespace}/a", lambda raw: raw["status"].pop("nominatedNodeName"))
        for _ in range(2):
            waiters.answered(POD.uid, parts=9)
            one.clock.now += LONGEST_S
            assert await one.is_tried() and not one.nominated


@pytest.mark.parametrize("fits", [False, True])
async def test_a_nomination_that_led_to_nothing_is_the_last_for_a_while(fits: bool) -> None:
    """Of any pod: the scheduler keeps the room from the others until the next try. They are tried again all the same."""
    other = raw_pod("b", (100, 0))
    async with waiting(parts=2) as (one, waiters):
        one.cluster.put("pods", other)
        pods = {pod.uid: pod for pod in (POD, pod_of(other))}
        waiters.unscheduled = pods.get
        assert await one.is_tried() and one.nominated == "n"
        waiters.answered(POD.uid, parts=0 if fits else 2)
        [uid] = pods.keys() - {POD.uid}

        async def is_nominated() -> bool:
            waiters.answered(uid, parts=2)
            one.clock.now += 1.0
            before = one.cluster.pod(POD.namespace, "b")
            await waiters.try_due()
            after = one.cluster.pod(POD.namespace, "b")
            assert after["metadata"]["annotations"] != before["metadata"].get("annotations")
            return bool(after["status"].get("nominatedNodeName"))

        assert await is_nominated() == fits
        one.clock.now += LONGEST_S
        assert await is_nominated()


@pytest.mark.parametrize("rank", [{"preempts": False}, {"nominated_node": "m"}])
async def test_no_pod_is_nominated_whose_nomination_would_stay_or_be_lost(rank: dict[str, object]) -> None:
    """The scheduler clears none of a pod that never preempts; a preemption's keeps the room that it made."""
    async with waiting(parts=2) as (one, waiters):
        waiters.unscheduled = lambda uid: replace(POD, rank=POD.rank._replace(**rank))
        assert await one.is_tried()
        assert not one.nominated


async def test_while_a_nomination_stays_there_is_no_other() -> None:
    """A profile without preemption clears none."""
    async with waiting(parts=2) as (one, waiters):
        assert await one.is_tried() and one.nominated == "n"
        known = {POD.uid: replace(POD, rank=POD.rank._replace(nominated_node="n")), PodUid("b"): POD}
        waiters.unscheduled = known.get
        one.state.put_node(replace(NODE, name="m"), 0.0)
        waiters.answered(PodUid("b"), parts=2)
        one.clock.now += LONGEST_S
        assert await one.is_tried()
        assert one.nominated == "n"


@pytest.mark.parametrize("what", ["fits", "is_unscheduled", "leads"])
async def test_it_ends_where_no_node_would_take_the_pod_where_it_is_bound_and_at_a_follower(what: str) -> None:
    """And does not begin again by itself."""
    async with waiting(parts=2) as (one, waiters):
        setattr(one, what, False)
        one.clock.now += 1.0
        assert not await one.is_tried()
        assert not waiters.is_looking(POD.uid)
        setattr(one, what, True)
        one.clock.now += 100.0
        assert not await one.is_tried()
        waiters.answered(POD.uid, parts=2)
        one.clock.now += 1.0
        assert await one.is_tried()


async def test_an_answer_that_it_fits_or_that_all_nodes_were_named_ends_it() -> None:
    async with waiting(parts=2) as (one, waiters):
        waiters.answered(POD.uid)
        one.clock.now += 1.0
        assert not await one.is_tried()


async def test_the_pods_are_bounded() -> None:
    """The oldest is left to the scheduler."""
    async with waiting(parts=2) as (_, waiters):
        for number in range(MAX_WAITING):
            waiters.answered(PodUid(f"other-{number}"), parts=2)
        assert not waiters.is_looking(POD.uid)
        assert waiters.is_looking(PodUid("other-0"))


async def test_a_node_that_was_not_named_has_the_pod_tried_again_and_nobody_evicted() -> None:
    """Over HTTP. One of fewer than a hundred names has been looked at in vain with all others: it is left alone."""
    clock = FakeClock()
    names, large = [f"n{number}" for number in range(100)], ["large", "larger"]
    far, near = (raw_pod(name, (200, 0)) for name in ("far", "near"))
    nodes = [*(raw_node(name, gpus=1) for name in names), *(raw_node(name, gpus=2) for name in large)]
    victims = {name: {"Pods": [{"UID": "victim"}], "NumPDBViolations": 0} for name in large}
    async with fake_cluster(*nodes, pods=[far, near]) as cluster, running_extender(cluster, clock=clock) as asker:

        def is_retried(name: str) -> bool:
            return RETRY_ANNOTATION in cluster.pod(far["metadata"]["namespace"], name)["metadata"].get(
                "annotations", {}
            )

        async def proposed(pod: object) -> list[str]:
            args = {"Pod": pod, "NodeNameToMetaVictims": victims, "NodeNameToVictims": None}
            _, answer = await asker.post("/scheduler/preemption", args)
            return list(answer["NodeNameToMetaVictims"])

        for pod, asked in ((far, names), (near, names[:99])):
            assert not (await asker.filter(pod, asked))["NodeNames"]
        assert await proposed(far) == []
        await eventually(lambda: is_retried("far"))
        assert cluster.pod(far["metadata"]["namespace"], "far")["status"]["nominatedNodeName"] == "large"
        assert not is_retried("near")
        assert (await asker.filter(far, ["large"]))["NodeNames"] == ["large"]
        assert await proposed(near) == ["larger"], "the other one is kept for the nominated pod"
