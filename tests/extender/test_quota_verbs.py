"""The quota's ConfigMap and what counts against it: a malformed one keeps the last good, and says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.core.model.names import RETRY_ANNOTATION
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.cluster_feed import MALFORMED, NodesFeed, PodsFeed, QuotaFeed
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.quota import QuotaState, QuotaUse
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, Reservation
from tests.extender.support_extender import (
    NAMES,
    READ_NODE,
    Asker,
    FakeCluster,
    eventually,
    fake_cluster,
    node_of,
    pod_of,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.api_server import Raw
from tests.support_json import undecoded


class Notes:
    def __init__(self) -> None:
        self.events: list[Raw] = []

    def record(self, involved: Mapping[str, str], reason: str, message: str, *, key: tuple[str, ...]) -> bool:
        self.events.append({"involvedObject": involved, "reason": reason, "message": message})
        return True


@pytest.fixture
def keeper() -> QuotaState:
    return QuotaState(NAMES)


def config_map(text: str) -> Raw:
    return {
        "metadata": {"name": "gpuquota", "namespace": "kube-system", "uid": "u", "resourceVersion": "7"},
        "data": {"gpu_quota": text},
    }


GOOD = json.dumps({"team": {"pool": ["public"], "quota": {"M40": 1}}})
BAD = '{"team": {"quota": {"M40": "many"}}}'


def feed(keeper: QuotaState) -> tuple[QuotaFeed, Notes, ExtenderMetrics]:
    notes, metrics = Notes(), ExtenderMetrics()
    return QuotaFeed(state=keeper, events=notes, metrics=metrics), notes, metrics


def asking(name: str, cores: int = 60, namespace: str = "team") -> Pod:
    return pod_of(raw_pod(name, (cores, 4), namespace=namespace))


def node(model: str = "M40") -> ClusterNode:
    return node_of(raw_node("n1", model=model, pool="public"))


def state_of(keeper: QuotaState, *nodes: ClusterNode) -> ClusterState:
    state = ClusterState(policy=ClusterPolicy(names=NAMES), quota=keeper)
    for one in nodes:
        state.put_node(one, 0.0)
    return state


def test_no_config_map_is_no_quota(keeper: QuotaState) -> None:
    """Nobody is limited, and again so once it is deleted."""
    assert keeper(asking("a"), model="M40", pool="public") is None
    quotas, _, _ = feed(keeper)
    quotas.put(undecoded(config_map(json.dumps({"team": {"quota": {}}}))))
    assert keeper(asking("a"), model="M40", pool="public") is not None
    quotas.remove("gpuquota")
    assert keeper(asking("a"), model="M40", pool="public") is None


def test_a_malformed_one_keeps_the_last_good_and_says_so(keeper: QuotaState) -> None:
    """In an Event on the ConfigMap and in a metric; the next good one counts. Where there never was a good one nobody knows
    what a namespace may use: the refusal says whose mistake it is."""
    quotas, notes, metrics = feed(keeper)
    quotas.put(undecoded(config_map(BAD)))
    assert b"quota_malformed 1.0" in metrics.exposition("")[1], "a counter would show no increase"
    refused = keeper(asking("a"), model="M40", pool="public")
    assert refused is not None and refused.reason is RefusalReason.NOT_READY
    quotas.put(undecoded(config_map(GOOD)))
    assert b"quota_malformed 0.0" in metrics.exposition("")[1]
    assert keeper(asking("a"), model="M40", pool="public") is None
    good = keeper.quota
    quotas.put(undecoded(config_map(BAD)))
    assert keeper.quota is good
    assert b'quota_loads_total{outcome="malformed"} 2.0' in metrics.exposition("")[1]
    assert b"quota_malformed 1.0" in metrics.exposition("")[1]
    event = notes.events[-1]
    assert (event["reason"], event["involvedObject"].kind) == (MALFORMED, "ConfigMap")
    assert event["involvedObject"].namespace == "kube-system"
    assert "M40" in event["message"] and "last good one stays in force" in event["message"]


@pytest.mark.parametrize("data", [None, 7, [], {"other": "x"}, {"gpu_quota": 7}])
def test_data_of_any_kind_is_survived(keeper: QuotaState, data: Any) -> None:
    """The ConfigMap may say anything."""
    quotas, notes, _ = feed(keeper)
    assert quotas.put(undecoded(config_map("") | {"data": data}))
    assert notes.events


def test_reservations_count_and_stop_to_count(keeper: QuotaState) -> None:
    """From reserve to undo; a pod is not counted against itself."""
    quotas, _, _ = feed(keeper)
    quotas.put(undecoded(config_map(GOOD)))
    state = state_of(keeper, node())
    first, second = asking("a"), asking("b")
    reserved = state.reserve(first, "n1", 0.0)
    assert isinstance(reserved, Reservation)
    assert keeper.used("team", "M40").gpus == 60
    assert keeper(first, model="M40", pool="public") is None
    refused = keeper(second, model="M40", pool="public")
    assert refused is not None and refused.reason is RefusalReason.QUOTA_EXCEEDED
    state.undo(first.uid)
    assert keeper.used("team", "M40") == QuotaUse()
    assert keeper(second, model="M40", pool="public") is None


def test_a_node_that_gets_its_model_later_counts_under_it(keeper: QuotaState) -> None:
    """The agent's label comes after the node."""
    state = state_of(keeper, node(model=""))
    pod = asking("a")
    state.reserve(pod, "n1", 0.0)
    assert keeper.used("team", "").gpus == 60
    state.put_node(node(), 1.0)
    assert keeper.used("team", "M40").gpus == 60
    state.remove_pod(pod.uid)
    assert keeper.used("team", "M40") == QuotaUse()


def test_pods_count_while_their_node_is_known(keeper: QuotaState) -> None:
    """Whichever of pod and node is heard of first; a node that goes and comes back changes nothing for good."""
    state, metrics = state_of(keeper), ExtenderMetrics()
    pods = PodsFeed(state=state)
    nodes = NodesFeed(state=state, read=READ_NODE, metrics=metrics, on_report=pods.drop_missing)
    raw = raw_node("n1", model="M40")
    pods.put(undecoded(raw_pod("a", (60, 4), namespace="team", node="n1")))
    assert keeper.used("team", "M40") == QuotaUse()
    for _ in range(2):
        nodes.put(undecoded(raw))
        assert keeper.used("team", "M40").gpus == 60
        pods.put(undecoded(raw_pod("a", (60, 4), namespace="team", node="n1")))
        assert keeper.used("team", "M40").gpus == 60
        nodes.remove("n1")
        assert keeper.used("team", "M40") == QuotaUse()
    nodes.put(undecoded(raw))
    pods.put(undecoded(raw_pod("b", (30, 4), namespace="team", node="n1")))
    assert keeper.used("team", "M40").gpus == 90
    pods.remove("uid-a")
    assert keeper.used("team", "M40").gpus == 30


def test_a_nodes_memory_counts_while_it_is_there(keeper: QuotaState) -> None:
    """A whole GPU counts with the largest GPU's memory of its model: of the nodes there are, not of those there were."""
    quotas, _, _ = feed(keeper)
    quotas.put(undecoded(config_map(json.dumps({"team": {"pool": ["public"], "quota": {"M40": 8}, "vmemory": 16}}))))
    whole = asking("w", 100)
    keeper.put_node(node())
    assert keeper(whole, model="M40", pool="public") is None
    huge = node_of(raw_node("n2", model="M40", pool="public", memory_mib=1 << 20))
    for mend in (
        lambda: keeper.remove_node("n2"),
        lambda: keeper.put_node(replace(huge, model="V100")),
        lambda: keeper.put_node(replace(huge, gpus=node().gpus)),
    ):
        keeper.put_node(huge)
        assert keeper(whole, model="M40", pool="public") is not None
        mend()
        assert keeper(whole, model="M40", pool="public") is None
    keeper.remove_node("n1")
    keeper.remove_node("n2")
    keeper.remove_node("never-known")
    assert keeper(whole, model="M40", pool="public") is None


def retried_at(cluster: FakeCluster, name: str) -> str:
    return str(cluster.pod("team", name)["metadata"].get("annotations", {}).get(RETRY_ANNOTATION, ""))


async def refused(asker: Asker, pod: Raw) -> None:
    """Waits until filter refuses the pod for its quota."""
    while "quota" not in (await asker.filter(pod, ["n1"]))["FailedAndUnresolvableNodes"].get("n1", ""):
        await asyncio.sleep(0.005)


async def test_a_pod_that_waits_for_quota_is_updated_once_the_quota_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the scheduler tries it at once, also where the API server does not answer at first. One that a raise does not
    help is left alone, and so is one that was never refused."""
    monkeypatch.setattr("gpushare_agent.extender.waiters.RETRY_S", 0.01)
    small, large, other = (
        raw_pod(name, (cores, 4), namespace="team") for name, cores in (("a", 60), ("b", 90), ("c", 10))
    )
    async with fake_cluster(raw_node("n1"), pods=[large, small, other]) as cluster:
        cluster.put_quota({"team": {"vcore": 0}})
        async with running_extender(cluster) as asker:
            for pod in (large, small):
                await refused(asker, pod)
            cluster.faults = ["500"] * 6
            cluster.put_quota({"team": {"vcore": 60}})
            await eventually(lambda: bool(retried_at(cluster, "a")))
            assert (await asker.filter(small, ["n1"]))["NodeNames"] == ["n1"]
            assert not retried_at(cluster, "b")
            assert not retried_at(cluster, "c")


async def test_a_pod_that_waits_for_quota_is_updated_when_another_one_ends() -> None:
    """And again after it was refused once more: each refusal is answered by one update."""
    held, waiting = (raw_pod(name, (60, 4), namespace="team") for name in ("a", "b"))
    async with fake_cluster(raw_node("n1"), pods=[held, waiting]) as cluster:
        cluster.put_quota({"team": {"vcore": 60}})
        async with running_extender(cluster) as asker:
            assert await asker.bind(held, "n1") == ""
            await refused(asker, waiting)
            cluster.end_pod("team/a")
            await eventually(lambda: bool(retried_at(cluster, "b")))
            first = retried_at(cluster, "b")
            cluster.put_quota({"team": {"vcore": 0}})
            await refused(asker, waiting)
            cluster.put_quota({"team": {"vcore": 60}})
            await eventually(lambda: retried_at(cluster, "b") != first)
