"""Whom the extender believes: annotations of pods never, those of nodes always, and what it counts where they differ."""

from __future__ import annotations

import pytest

from gpushare_agent.core.model.names import PREDICATE_NODE_ANNOTATION, PodUid
from tests.extender.support_extender import (
    Asker,
    FakeCluster,
    eventually,
    fake_cluster,
    predicted,
    raw_node,
    raw_pod,
    running_extender,
    state_document,
)

FORGED = [
    {PREDICATE_NODE_ANNOTATION: "n1", "tencent.com/predicate-gpu-idx-0": "1"},
    {PREDICATE_NODE_ANNOTATION: "n2", "tencent.com/predicate-gpu-idx-0": "0"},
    {"tencent.com/predicate-gpu-idx-0": "99999999999999999999"},
    {"tencent.com/predicate-gpu-idx-0": "0,1,2,3,4,5,6,7", "tencent.com/predicate-gpu-idx-77": "x" * 5000},
]


async def delivered(cluster: FakeCluster, asker: Asker) -> None:
    """The extender has read every change of pods up to now: a watch keeps their order."""
    cluster.put("pods", raw_pod("marker", (10, 1)))
    await eventually(lambda: asker.parts.pods.unscheduled(PodUid("uid-marker")) is not None)


@pytest.mark.parametrize("forged", FORGED)
async def test_forged_annotations_change_nothing(forged: dict[str, str]) -> None:
    """Another GPU, another node, an index past belief, more GPUs than asked: placement and quota are as without."""
    pods = [raw_pod("evil", (60, 8), annotations=forged), raw_pod("good", (60, 8))]
    quota = {"default": {"vcore": 120}}
    async with fake_cluster(raw_node("n1"), raw_node("n2"), pods=pods) as cluster:
        cluster.put_quota(quota)
        async with running_extender(cluster) as asker:
            for pod in pods:
                assert (await asker.filter(pod, ["n1", "n2"]))["NodeNames"] == ["n1", "n2"]
            assert asker.parts.state.reservations() == []
            assert await asker.bind(pods[0], "n1") == ""
            assert predicted(cluster.pod("default", "evil"))["tencent.com/predicate-gpu-idx-0"] == "0"
            assert await asker.bind(pods[1], "n1") == ""
            assert predicted(cluster.pod("default", "good"))["tencent.com/predicate-gpu-idx-0"] == "1"


async def test_a_bound_pod_cannot_take_another_ones_gpus_by_annotation() -> None:
    """Someone else's reservation, written on one's own pod after it was bound, frees nothing and takes nothing."""
    pods = [raw_pod("a", (100, 0)), raw_pod("b", (30, 4)), raw_pod("c", (100, 0))]
    async with fake_cluster(raw_node("n1"), pods=pods) as cluster, running_extender(cluster) as asker:
        assert await asker.bind(pods[0], "n1") == ""
        assert await asker.bind(pods[1], "n1") == ""
        cluster.report_held("n1")
        await eventually(lambda: {r.stage for r in asker.parts.state.reservations()} == {"confirmed"})
        before = state_document(asker.parts.state)
        cluster.change(
            "pods",
            "default/b",
            lambda raw: raw["metadata"]["annotations"].update(predicted(cluster.pod("default", "a"))),
        )
        await delivered(cluster, asker)
        assert state_document(asker.parts.state) == before
        assert (await asker.filter(pods[2], ["n1"]))["NodeNames"] == []


async def test_gpus_that_the_agent_gave_otherwise_are_counted() -> None:
    """The agent's word replaces the plan, and the difference shows in a metric."""
    pod = raw_pod("a", (60, 8))
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster) as asker:
        assert await asker.bind(pod, "n1") == ""
        cluster.holds("n1", ("uid-a", 1, 60, 8))
        await eventually(lambda: [r.stage for r in asker.parts.state.reservations()] == ["confirmed"])
        assert asker.parts.state.reservations()[0].plan.charges.keys() == {1}
        assert "gpushare_extender_placement_disagreements_total 1.0" in (await asker.get("/metrics"))[1]
