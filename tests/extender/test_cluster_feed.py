"""What the feeds make of lists: no share is lost for ever."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from gpushare_agent.core.model.names import PodUid
from gpushare_agent.extender.cluster_feed import PodsFeed
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterPolicy, Reservation, Stage
from tests.extender.support_extender import (
    NAMES,
    eventually,
    fake_cluster,
    node_of,
    pod_of,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.api_server import Raw, answers, raw_status
from tests.support_json import HOSTILE, undecoded

NEITHER = (
    "150 cores with 8 memory blocks (2 GiB) is neither a share of one GPU nor whole GPUs; the next valid numbers of cores "
    "are 100 and 200. Ask for 1 to 99 cores with memory (a share of one GPU), or a multiple of 100 (whole GPUs, memory "
    "optional)"
)


@dataclass
class Feeding:
    """A feed on a state with one node of two GPUs, and a clock for the test to turn."""

    now: float = 1000.0

    def __post_init__(self) -> None:
        self.state = ClusterState(policy=ClusterPolicy(names=NAMES))
        self.state.put_node(node_of(raw_node("n1")), self.now)
        self.pods = PodsFeed(state=self.state, clock=lambda: self.now)

    def reserve(self, raw: Raw) -> None:
        """As a bind does that read the pod itself."""
        assert isinstance(self.state.reserve(pod_of(raw), "n1", self.now), Reservation)

    def bind(self, raw: Raw) -> None:
        self.reserve(raw)
        self.state.bound(pod_of(raw).uid)

    def reserved(self) -> list[str]:
        return sorted(one.pod_uid for one in self.state.reservations())


@pytest.fixture
def feeding() -> Feeding:
    return Feeding()


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        ({"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "4G"}, "tencent.com/vcuda-memory: 15 for 3.75 GiB."),
        ({"tencent.com/vcuda-cores": "30", "tencent.com/vcuda-memory": "8"}, "Write tencent.com/vcuda-core: 30, in 1/100"),
        ({"tencent.com/vcuda-core": "1600"}, "1600 cores are 16 GPUs, and no node has more than 2."),
        ({"nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}, "and tencent.com/vcuda-memory: 12."),
    ],
)  # fmt: skip
async def test_a_wrong_request_that_no_scheduler_asks_about_gets_an_event(limits: dict[str, str], remedy: str) -> None:
    """By the leader, once, after the scheduler has refused the pod; not where the scheduler's own Event says it."""
    async with fake_cluster(raw_node("n1")) as cluster, running_extender(cluster):
        said = "0/1 nodes are available: 1 Insufficient."
        mistaken, told = raw_pod("mistaken", (30, 8)), raw_pod("told", (150, 8))
        mistaken["spec"]["containers"][0]["resources"] = {"limits": limits}
        cluster.put("pods", raw_pod("untried", (150, 8)))
        for raw, text in ((told, f"{said} container c0: {NEITHER}."), (mistaken, said), (mistaken, f"{said} Again.")):
            raw["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": text}]
            cluster.put("pods", raw)
        await eventually(lambda: bool(cluster.objects["events"]))
        (event,) = cluster.objects["events"].values()
        assert (event["involvedObject"]["name"], event["reason"]) == ("mistaken", "InvalidRequest")
        assert event["message"].startswith("container c0: ") and remedy in event["message"]


async def test_no_event_before_the_nodes_are_known() -> None:
    """What they offer of another program is no mistake. Once they are, every pod is looked at again."""
    waiting = [raw_pod("another", (0, 0)), raw_pod("mistaken", (0, 0))]
    for raw, name in zip(waiting, ("volcano.sh/vgpu-number", "nvidia.com/gpumem"), strict=True):
        raw["spec"]["containers"][0]["resources"] = {"limits": {name: "1"}}
        raw["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available."}
        ]
    node = raw_node("n1")
    node["status"]["capacity"]["volcano.sh/vgpu-number"] = "10"
    async with fake_cluster(node, pods=waiting) as cluster:
        cluster.script.answers["/api/v1/nodes"] = answers(503, raw_status(503))
        async with running_extender(cluster, is_ready=False) as asker:
            await eventually(lambda: asker.parts.informers[2].has_listed)
            del cluster.script.answers["/api/v1/nodes"]
            await eventually(lambda: bool(cluster.objects["events"]))
            assert [one["involvedObject"]["name"] for one in cluster.objects["events"].values()] == ["mistaken"]


def test_a_pod_without_gpus_takes_cpu_of_its_node_until_it_is_gone(feeding: Feeding) -> None:
    """By a deletion, or by a list that has it no more; while it waits it takes nothing."""
    waiting, bound = raw_pod("w", (0, 0)), raw_pod("b", (0, 0), node="n1")
    for raw in (waiting, bound):
        raw["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1500m", "memory": "1Gi"}}
    ledger = feeding.state.node_ledger("n1")
    assert ledger is not None
    assert [feeding.pods.put(undecoded(raw)) for raw in (waiting, bound)] == [False, True]
    assert (ledger.free.cpu_milli, ledger.free.memory_mib) == (-1500, -1024)
    feeding.pods.remove("uid-b")
    assert (ledger.free.cpu_milli, ledger.free.memory_mib) == (0, 0)
    feeding.pods.put(undecoded(bound))
    feeding.pods.list_begins()
    feeding.pods.list_ended([], ["uid-b"], "7")
    assert ledger.free.cpu_milli == 0


async def test_no_text_of_an_object_ends_the_extender() -> None:
    """Annotations of nodes and pods and the quota, each with what makes parsers fail, in the first lists and in changes."""
    texts = [content.decode("utf-8", "replace") for content in HOSTILE.values()]
    names = ("gpus", "allocations")
    nodes = [raw_node(f"n{i}") for i in range(2 * len(texts))]
    for number, node in enumerate(nodes):
        node["metadata"]["annotations"][f"gpushare-agent/{names[number % 2]}"] = texts[number // 2]
    odd = raw_node("odd")
    gpus = json.loads(odd["metadata"]["annotations"]["gpushare-agent/gpus"])
    gpus["gpus"][0] |= dict.fromkeys(("uuid", "name", "cordoned", "reason"), "\ud800\x1b\u202e") | {"links": ["\udfff"]}
    odd["metadata"]["annotations"]["gpushare-agent/gpus"] = json.dumps(gpus)
    pods = [raw_pod(f"p{i}", (10, 1)) for i in range(len(texts))]
    for pod, text in zip(pods, texts, strict=True):
        keys = ("tencent.com/predicate-gpu-idx-0", "gpushare-agent/resize", "tencent.com/vcuda-core-limit")
        pod["metadata"]["annotations"] = dict.fromkeys((*keys, "ALIYUN_COM_GPU_MEM_IDX"), text)
    async with fake_cluster(raw_node("good"), odd, *nodes, pods=pods) as cluster, running_extender(cluster) as asker:
        cluster.put_quota("{}")
        for text in texts:
            cluster.put_quota(text)
            changed = raw_node("n0")
            changed["metadata"]["annotations"]["gpushare-agent/gpus"] = text
            cluster.put("nodes", changed)
        cluster.put("nodes", raw_node("late"))
        await eventually(lambda: asker.parts.state.node_ledger("late") is not None)
        every = [*(node["metadata"]["name"] for node in nodes), "odd", "good", "late"]
        waiting = raw_pod("waiting", (30, 4))
        cluster.put("pods", waiting)
        assert {"good", "late"} <= set((await asker.filter(waiting, every))["NodeNames"])
        for path in ("/debug/state", "/gpushare-scheduler/inspect", "/gpushare-scheduler/inspect/odd", "/metrics"):
            assert (await asker.get(path))[0] == 200
        assert await asker.bind(waiting, "good") == ""
        assert not any(informer.lost for informer in asker.parts.informers)


async def test_a_pod_that_only_the_binder_knew_is_forgotten_after_a_list() -> None:
    """The watch was silent while it was bound and deleted, and ends with 410: its whole GPU is free again."""
    pod, other = raw_pod("a", (100, 0)), raw_pod("b", (100, 0))
    async with fake_cluster(raw_node("n1", gpus=1), pods=[other]) as cluster, running_extender(cluster) as asker:
        cluster.mute(True)
        cluster.put("pods", pod)
        assert await asker.bind(pod, "n1") == ""
        cluster.remove("pods", "default/a")
        assert (await asker.filter(other, ["n1"]))["NodeNames"] == []
        cluster.store.compact()
        await asker.parts.informers[-1].refresh()
        cluster.mute(False)
        await eventually(lambda: asker.parts.state.reservations() == [])
        assert (await asker.filter(other, ["n1"]))["NodeNames"] == ["n1"]
        assert await asker.bind(other, "n1") == ""


def test_a_bind_under_way_outlives_a_list_and_is_dropped_once_it_ended(feeding: Feeding) -> None:
    """The binder asks about it itself; what it has bound meanwhile is gone all the same: the list did not have it."""
    feeding.reserve(raw_pod("a", (30, 4)))
    feeding.pods.list_begins()
    feeding.pods.list_ended([], (), "7")
    assert feeding.reserved() == ["uid-a"]
    feeding.pods.drop_missing()
    assert feeding.reserved() == ["uid-a"]
    feeding.state.bound(PodUid("uid-a"))
    feeding.pods.drop_missing()
    assert feeding.reserved() == []


def test_pods_that_came_while_the_list_was_read_stay(feeding: Feeding) -> None:
    """Reserved and bound after the API server was asked: not in its answer, and there."""
    early, late = raw_pod("early", (30, 4)), raw_pod("late", (30, 4))
    feeding.bind(early)
    feeding.pods.list_begins()
    feeding.bind(late)
    feeding.pods.list_ended(["uid-early"], (), "7")
    assert feeding.reserved() == ["uid-early", "uid-late"]
    feeding.pods.list_begins()
    feeding.pods.list_ended(["uid-early"], (), "7")
    assert feeding.reserved() == ["uid-early"]


def test_pods_that_the_agent_confirmed_while_the_list_was_read_go_too(feeding: Feeding) -> None:
    """What counts is since when it is known, not since when its present stage."""
    feeding.reserve(raw_pod("a", (30, 4)))
    feeding.pods.list_begins()
    feeding.now += 5.0
    feeding.state.bound(PodUid("uid-a"))
    assert [one.stage for one in feeding.state.reservations()] == [Stage.BOUND]
    feeding.pods.list_ended([], (), "7")
    assert feeding.reserved() == []
