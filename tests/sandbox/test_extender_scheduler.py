"""The embedded scheduler that asks an extender."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.sandbox.scheduler.scheduler import ExtenderCalls, SchedulerTimes
from tests.extender.support_extender_nodes import (
    ClusterUnderTest,
    ReportedExtender,
    open_cluster,
    open_reported,
    serving,
)
from tests.sandbox.support_sandbox import CORE, container, pod


async def scheduled(cluster: ClusterUnderTest) -> dict[str, Any]:
    """The scheduler's first word about pod p: its condition."""
    found: dict[str, Any] = await cluster.wait_until(lambda: cluster.condition_of("p"), "the scheduler's word")
    return found


def change_node(cluster: ClusterUnderTest, part: str, **changes: Any) -> None:
    """Of node a, as a client's patch of its metadata or spec."""
    raw = cluster.api.node("a")
    cluster.api.store.replace("nodes", {**raw, part: {**(raw.get(part) or {}), **changes}})


async def test_only_nodes_that_fit_by_count_are_filtered_and_the_best_score_wins() -> None:
    """The resource fit is the scheduler's own, before the extender's."""
    extender = ReportedExtender(score=lambda pod, node: {"b": 3, "c": 7}.get(node, 0))
    async with open_reported(extender, ["a", "b", "c"]) as cluster, cluster.with_plugins(a=2, b=10, c=10):
        cluster.api.create_pod(pod("p", container(cores=5)))
        assert await cluster.wait_bound("p") == "c"
        assert extender.seen == [("filter", "p", ["b", "c"]), ("prioritize", "p", ["b", "c"]), ("bind", "p", "c")]
        await cluster.nodes[0].wait_phase("p", "Running")


async def test_a_pod_that_the_extender_refuses_waits_with_its_reasons_and_is_tried_again() -> None:
    """It is Pending and Unschedulable, not Failed; what the nodes say stands in its status and in an Event."""
    reasons = {"a": "cores are free on two GPUs, and it needs one whole GPU", "b": "no GPU is healthy"}
    extender = ReportedExtender(fits=lambda pod, node: reasons[node])
    async with open_reported(extender, ["a", "b", "c"]) as cluster, cluster.with_plugins(a=10, b=10, c=1):
        cluster.api.create_pod(pod("p", container(cores=5)))
        reported = await scheduled(cluster)
        assert (reported["status"], reported["reason"]) == ("False", "Unschedulable")
        assert reported["message"] == (
            f"0/3 nodes are available: 1 Insufficient {CORE}, 1 cores are free on two GPUs, and it needs one whole GPU, "
            "1 no GPU is healthy."
        )
        assert cluster.api.pod("default", "p")["status"]["phase"] == "Pending"
        assert cluster.nodes[0].messages("FailedScheduling") == [reported["message"]]
        await cluster.wait_until(lambda: len(extender.asked("filter", "p")) >= 3, "further tries")
        reasons["b"] = ""
        assert await cluster.wait_bound("p") == "b"


async def test_an_extender_that_has_not_heard_of_a_change_is_asked_again() -> None:
    """The scheduler tries a pod as soon as a node reports its GPUs; the extender hears of them by its own watch, perhaps
    later, and nothing changes any more."""
    answers = ["node a has not reported its GPUs"]
    extender = ReportedExtender(fits=lambda pod, node: answers.pop() if answers else "")
    times = SchedulerTimes(first_backoff_s=0.05, last_backoff_s=3600)
    async with open_reported(extender, ["a"], scheduler_times=times) as cluster, cluster.with_plugins(a=10):
        cluster.api.create_pod(pod("p", container(cores=5)))
        assert await cluster.wait_bound("p") == "a"
        assert len(extender.asked("filter", "p")) == 2


async def test_a_pod_with_claims_is_not_bound_without_them() -> None:
    """It would wait on the node for ever; the reason says how to start the sandbox."""
    async with open_reported(ReportedExtender(), ["a"]) as cluster, cluster.with_plugins(a=10):
        cluster.api.create_pod(pod("p", resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}]))
        assert "start it without --extender, with --dra" in (await scheduled(cluster))["message"]


async def test_a_cordoned_node_is_not_filtered_and_its_uncordoning_lets_pods_go_on() -> None:
    """`kubectl cordon`: the extender is not asked about the node."""
    extender = ReportedExtender()
    async with open_reported(extender, ["a"]) as cluster, cluster.with_plugins(a=10):
        change_node(cluster, "spec", unschedulable=True)
        cluster.api.create_pod(pod("p", container(cores=5)))
        assert (await scheduled(cluster))["message"] == "0/1 nodes are available: 1 node(s) were unschedulable."
        assert extender.seen == []
        change_node(cluster, "spec", unschedulable=False)
        assert await cluster.wait_bound("p") == "a"


SELECTED = [{"key": "zone", "operator": "In", "values": ["b"]}]
AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": SELECTED}]}}


@pytest.mark.parametrize("demand", [{"nodeSelector": {"zone": "b"}}, {"affinity": {"nodeAffinity": AFFINITY}}])
async def test_a_pod_waits_for_a_node_with_the_labels_that_it_selects(demand: dict[str, Any]) -> None:
    """In kube-scheduler's words; a label that comes later lets it go on."""
    extender = ReportedExtender()
    async with open_reported(extender, ["a"]) as cluster, cluster.with_plugins(a=10):
        cluster.api.create_pod(pod("p", container(cores=5), **demand))
        why = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        assert (await scheduled(cluster))["message"] == why and extender.seen == []
        change_node(cluster, "metadata", labels={"kubernetes.io/hostname": "a", "zone": "b"})
        assert await cluster.wait_bound("p") == "a"


async def test_a_taint_keeps_pods_off_that_do_not_tolerate_it() -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    async with open_reported(ReportedExtender(), ["a"]) as cluster, cluster.with_plugins(a=10):
        change_node(cluster, "spec", taints=[taint])
        cluster.api.create_pod(pod("p", container(cores=5)))
        assert "1 node(s) had untolerated taint(s)" in (await scheduled(cluster))["message"]
        cluster.api.create_pod(pod("q", container(cores=5), tolerations=[{"key": "gpu", "operator": "Exists"}]))
        assert await cluster.wait_bound("q") == "a"


async def test_what_is_being_bound_counts_as_taken() -> None:
    """The next pod is decided while the bind of the one before is under way."""
    may_bind = asyncio.Event()

    async def before_bind(name: str) -> str:
        if name == "first":
            await may_bind.wait()
        return ""

    extender = ReportedExtender(before_bind=before_bind)
    async with open_reported(extender, ["a", "b"]) as cluster, cluster.with_plugins(a=10, b=6):
        cluster.api.create_pod(pod("first", container(cores=8)))
        await cluster.wait_until(lambda: extender.asked("bind", "first"), "the first bind")
        cluster.api.create_pod(pod("second", container(cores=6)))
        assert await cluster.wait_bound("second") == "b"
        assert extender.asked("filter", "second") == [["b"]]
        assert cluster.node_of("first") == ""
        may_bind.set()
        assert await cluster.wait_bound("first") == "a"


async def test_a_bind_that_fails_is_reported_and_tried_again() -> None:
    """What was taken for it is free meanwhile."""
    errors = ["the node has no such GPU any more", ""]

    async def before_bind(name: str) -> str:
        return errors.pop(0) if name == "p" else ""

    extender = ReportedExtender(before_bind=before_bind)
    async with open_reported(extender, ["a"]) as cluster, cluster.with_plugins(a=10):
        cluster.api.create_pod(pod("p", container(cores=10)))
        assert await cluster.wait_bound("p") == "a"
        assert len(extender.asked("bind", "p")) == 2
        (reported,) = cluster.nodes[0].messages("FailedScheduling")
        assert "binding to node a: the extender refused to bind: the node has no such GPU any more" in reported


async def test_while_the_extender_is_away_pods_wait_and_are_not_given_up() -> None:
    """It may come later than the nodes, and answer an error at first."""
    extender = ReportedExtender(filter_error="this replica does not lead")
    async with open_cluster("a", extender_url=extender.url) as cluster, cluster.with_plugins(a=10):
        extender.cluster = cluster
        cluster.api.create_pod(pod("p", container(cores=10)))
        await cluster.wait_until(lambda: cluster.condition_of("p").get("reason") == "SchedulerError", "a word")
        assert "cannot be asked to filter" in cluster.condition_of("p")["message"]
        async with serving(extender):
            await cluster.wait_until(lambda: "does not lead" in cluster.condition_of("p")["message"], "its error")
            extender.filter_error = ""
            assert await cluster.wait_bound("p") == "a"


async def test_a_pod_that_asks_for_no_gpu_needs_no_extender() -> None:
    """kube-scheduler sends it only pods with the resources that it manages."""
    async with open_reported(ReportedExtender(), ["a"]) as cluster, cluster.with_plugins(a=1):
        cluster.api.create_pod(pod("plain"))
        await cluster.nodes[0].wait_phase("plain", "Running")


async def test_an_answer_without_an_end_is_no_answer() -> None:
    """Of any status. It is read to its bound, not to its end."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=200 if request.path.endswith("filter") else 500)
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b" " * (1 << 20))
        return response

    app = web.Application()
    app.router.add_post("/{verb}", endless)
    async with TestServer(app) as server, ClientSession() as session:
        calls = ExtenderCalls(str(server.make_url("/")).rstrip("/"), session)
        with pytest.raises(Unavailable, match="filter with more than 16 MiB"):
            await calls.filter({}, [])
        with pytest.raises(Unavailable, match="priorities with more than 16 MiB"):
            await calls.prioritize({}, [])
