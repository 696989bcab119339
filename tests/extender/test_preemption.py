"""Which pods end for one of a higher priority, for whom the room is kept, and evictions where the scheduler does not ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import HostRequest, Pod, Rank
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.bind import PodWrites
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.preemption import MOST_TRIED
from gpushare_agent.extender.preemption import EVICTED_S, GRACE_S, MOST_NODES
from gpushare_agent.extender.steps import at_once
from gpushare_agent.extender.values import ClusterPolicy, Reservation
from tests.extender.support_extender import (
    Asker,
    FakeCluster,
    cluster_node,
    eventually,
    fake_cluster,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.api_server import Raw, answers, raw_status
from tests.fakes.clock import FakeClock
from tests.support_core import GPU_MEM_NAMES, NAMES, container, pod

URGENT = 1000
SIX_TENTHS = ((60, 10),)
WHOLE = ((100, 0),)


class Held(NamedTuple):
    """A bound pod: its GPUs, cores of each, priority, and when it started."""

    name: str
    gpus: tuple[int, ...]
    cores: int
    priority: int = 0
    started: int = 0


def asking(name: str, *requests: tuple[int, int], priority: int = URGENT, **rank: object) -> Pod:
    made = (container(f"c{n}", cores=cores, blocks=blocks) for n, (cores, blocks) in enumerate(requests))
    return pod(name, *made, node_name="", rank=Rank(priority, **rank))  # type: ignore[arg-type]


def bound(held: Held, **changes: Any) -> Pod:
    cores = held.cores * len(held.gpus)
    one = container(cores=cores, blocks=0 if held.cores == 100 else 1)
    rank = Rank(held.priority, started_at=f"2026-01-01T00:00:{held.started:02}Z")
    return pod(held.name, one, node_name="a", rank=rank, **changes)


def charges(held: Held) -> dict[int, Charge]:
    is_whole = held.cores == 100
    return {gpu: Charge(cores=held.cores, blocks=int(not is_whole), wholes=int(is_whole)) for gpu in held.gpus}


def cluster_of(
    gpus: int,
    held: Sequence[Held],
    *,
    names: ResourceNames = NAMES,
    others: Mapping[str, Held] | None = None,
    **node: object,
) -> ClusterState:
    """One node, whose agent reports the pods, and `others`, which the API server does not know."""
    allocated = {f"uid-{one.name}": charges(one) for one in held}
    allocated |= {uid: charges(one) for uid, one in (others or {}).items()}
    state = ClusterState(policy=ClusterPolicy(names=names))
    state.put_node(cluster_node("a", gpus, allocated=allocated, **node), 0.0)
    for one in held:
        state.put_pod(bound(one), 0.0)
    return state


def victims_of(
    state: ClusterState, wanted: Pod, given: Sequence[str] = (), protected: Sequence[str] = ()
) -> list[str] | None:
    """Their names, in order; None where the node is left out."""
    uids, unwilling = [PodUid(f"uid-{name}") for name in given], {PodUid(f"uid-{name}") for name in protected}
    found = at_once(state.victims_steps(wanted, {"a": uids}, unwilling))
    return [uid.removeprefix("uid-") for uid in found["a"]] if found else None


HALVES = [Held(f"h{gpu}{half}", (gpu,), 50, started=10 + 2 * gpu + half) for gpu in range(8) for half in range(2)]
SIXTIES = [Held(f"s{gpu}", (gpu,), 60, started=10 + gpu) for gpu in range(8)]
SMALL = [Held(f"t{n}", (0,), 10, started=30 + n) for n in range(10)]


@pytest.mark.parametrize(
    ("gpus", "held", "requests", "chosen"),
    [
        pytest.param(8, HALVES, WHOLE, ["h70", "h71"], id="full halves, one whole"),
        pytest.param(8, HALVES, SIX_TENTHS, ["h70", "h71"], id="full halves, one share"),
        pytest.param(8, HALVES, ((200, 0),), ["h60", "h61", "h70", "h71"], id="full halves, two whole"),
        pytest.param(8, SIXTIES, SIX_TENTHS, ["s7"], id="the sum fits"),
        pytest.param(8, SIXTIES, WHOLE, ["s7"], id="the sum fits three wholes"),
        pytest.param(8, SIXTIES, SIX_TENTHS * 2, ["s6", "s7"], id="two containers, each on a GPU"),
        pytest.param(8, SIXTIES, ((60, 10), (30, 5)), ["s7"], id="the second container fits as it is"),
        pytest.param(2, [Held("low", (0,), 60), Held("lower", (1,), 60, -5)], WHOLE, ["lower"], id="lowest priority"),
        pytest.param(
            2,
            [Held("one", (0,), 60, 9), Held("x", (1,), 40, 5, 1), Held("y", (1,), 40, 5, 2)],
            WHOLE,
            ["x", "y"],
            id="priority before number",
        ),
        pytest.param(2, [Held("old", (1,), 100, started=1), *SMALL], WHOLE, ["old"], id="one pod, not ten"),
        pytest.param(
            1,
            [Held("a", (0,), 50, started=1), Held("b", (0,), 30, started=2), Held("c", (0,), 20, started=3)],
            ((50, 5),),
            ["a"],
            id="one large pod, not two",
        ),
        pytest.param(
            3, [Held("pair", (0, 1), 100), Held("c", (2,), 50)], ((200, 0),), ["pair"], id="one pod of two GPUs"
        ),
        pytest.param(3, [Held("a", (0,), 50), Held("b", (1,), 50, 5)], ((200, 0),), ["a"], id="a free GPU and another"),
        pytest.param(1, [Held("high", (0,), 50, URGENT)], WHOLE, None, id="not of the same priority"),
        pytest.param(1, [Held("high", (0,), 50, URGENT + 1), Held("low", (0,), 20)], SIX_TENTHS, None, id="not enough"),
        pytest.param(1, [Held("high", (0,), 50, URGENT), Held("low", (0,), 20)], ((50, 5),), ["low"], id="next to it"),
        pytest.param(1, [Held("a", (0,), 50)], ((200, 0),), None, id="too few GPUs"),
        pytest.param(2, [Held("a", (0,), 50)], WHOLE, None, id="it fits as it is"),
    ],
)
def test_the_cheapest_set_that_makes_room_on_the_gpus(
    gpus: int, held: Sequence[Held], requests: Sequence[tuple[int, int]], chosen: list[str] | None
) -> None:
    """Whether the scheduler proposes others, or none. Of equals the pods end that have started last."""
    state = cluster_of(gpus, held)
    assert victims_of(state, asking("p", *requests)) == chosen
    on_two = [held[0].name, held[-1].name]
    if chosen is not None and len(held) > 4 and on_two != chosen:
        assert victims_of(state, asking("p", *requests), [*on_two]) in (chosen, on_two)


def test_the_schedulers_victims_stay_where_they_make_room() -> None:
    """Unless fewer, or less important ones do, as where it counts what a nominated pod will have once more. It may evict
    pods for other resources."""
    state = cluster_of(8, HALVES)
    assert victims_of(state, asking("p", *SIX_TENTHS), ["h00", "h01", "h10", "h20"]) == ["h70", "h71"]
    assert victims_of(state, asking("p", *WHOLE), ["h00", "h01"]) == ["h00", "h01"]
    assert victims_of(state, asking("p", *WHOLE), ["h01", "h10"]) == ["h70", "h71"]
    assert victims_of(state, asking("p", *WHOLE), ["h01", "of-cpus"]) == ["h70", "h71", "of-cpus"]


def test_all_of_the_schedulers_victims_stay_where_cpu_or_memory_would_be_lacking() -> None:
    held = [Held("h0", (0,), 60, started=3), Held("h1", (1,), 60, started=2), Held("k1", (1,), 30, started=1)]
    state = cluster_of(2, held, cpu_milli=8000, memory_mib=1000)
    for one, cpu_milli in zip(held, (1000, 1000, 6000), strict=True):
        state.put_pod(bound(one, host_request=HostRequest(cpu_milli, 10)), 0.0)
    wanted = asking("p", *SIX_TENTHS)
    for cpu_milli, chosen in ((1000, ["h0"]), (3000, ["h0", "k1"])):
        assert victims_of(state, replace(wanted, host_request=HostRequest(cpu_milli, 10)), ["k1"]) == chosen


def test_what_cannot_be_evicted_is_no_victim() -> None:
    """A mirror pod's end ends nothing; what a claim has, or a pod that only the agent names, is in use; a bind under way may
    still fail."""
    held = [Held("static", (0,), 60), Held("other", (1,), 60, 5)]
    state = cluster_of(3, held, others={"claim": Held("claim", (2,), 60)})
    state.put_pod(bound(held[0], is_static=True), 1.0)
    assert victims_of(state, asking("p", *WHOLE)) == ["other"]
    state = cluster_of(1, ())
    assert isinstance(state.reserve(asking("binding", *SIX_TENTHS, priority=0), "a", 2.0), Reservation)
    assert victims_of(state, asking("p", *SIX_TENTHS)) is None


def test_pods_that_end_already_cost_nothing() -> None:
    """Nobody else ends; those of lower priority are named, so that the pod is nominated."""
    held = [Held("a", (0,), 60, 5, 1), Held("b", (1,), 60, 0, 2)]
    state = cluster_of(2, held)
    state.put_pod(bound(held[0], is_deleting=True), 1.0)
    assert victims_of(state, asking("p", *WHOLE)) == ["a"]
    assert victims_of(state, asking("p", *WHOLE * 2)) == ["a", "b"]


def test_memory_alone_is_made_room_for() -> None:
    """GPUShare's units."""
    state = cluster_of(2, (), names=GPU_MEM_NAMES)
    for number, units in enumerate((13, 13, 8)):
        owner = pod(f"m{number}", container(units=units), node_name="", rank=Rank(0, f"{number}"))
        made = state.reserve(owner, "a", 1.0)
        assert isinstance(made, Reservation) and set(made.plan.charges) <= {0, 1}
        state.put_pod(replace(owner, node_name="a"), 1.0)
    found = victims_of(state, pod("p", container(units=20), node_name="", rank=Rank(URGENT)))
    assert found is not None and len(found) == 1


@pytest.mark.parametrize("cores", [60, 100, 800, 1600])
def test_the_search_is_bounded_and_lets_others_run(cores: int) -> None:
    """16 GPUs of 12 pods each: a try takes half a millisecond, and one set of GPUs may need them all."""
    held = [Held(f"p{gpu}-{n}", (gpu,), 8, started=n) for gpu in range(16) for n in range(12)]
    wanted = asking("wanted", (cores, 0 if cores >= 100 else 1))
    steps = list(cluster_of(16, held).victims_steps(wanted, {"a": []}))
    own = 12 * max(1, cores // 100)
    assert own <= len(steps) <= 1 + MOST_TRIED + 2 * own


def test_room_is_kept_for_nominated_pods() -> None:
    """For those of lower or the same priority it is in use: by filter, bind and preemption. Not for a higher one, nor for
    another node's; it ends with the nomination."""
    state = cluster_of(2, [Held("a", (0,), 60, 1), Held("b", (1,), 60, 2)])
    first = asking("first", *SIX_TENTHS, nominated_node="a")
    state.put_pod(bound(Held("a", (0,), 60, 1), is_deleting=True), 1.0)
    state.put_pod(first, 1.0)
    # Its victim ends: another pod of its priority needs a victim of its own, and one of a lower priority gets none.
    assert victims_of(state, asking("second", *SIX_TENTHS)) == ["b", "a"]
    state.remove_pod(PodUid("uid-a"))
    state.put_node(replace(state.node_ledger("a").node, allocated={PodUid("uid-b"): {1: Charge(60, 1)}}), 2.0)  # type: ignore[union-attr]
    assert state.filter(first, None).fitting == ["a"]
    lower = asking("lower", *SIX_TENTHS, priority=1)
    for refused in (lower, asking("equal", *SIX_TENTHS), asking("whole", *WHOLE, priority=3)):
        answer = state.filter(refused, None)
        assert (answer.fitting, list(answer.failed)) == ([], ["a"]) and "are kept for pods" in answer.failed["a"]
        assert not isinstance(state.reserve(refused, "a", 3.0), Reservation)
        assert not at_once(state.somewhere_steps(refused))
    assert state.filter(asking("small", (30, 5), priority=0), None).fitting == ["a"], "next to b, or next to the first"
    assert state.filter(asking("higher", *SIX_TENTHS, priority=URGENT + 1), None).fitting == ["a"]
    # Two of one priority that are nominated both do not wait for each other.
    other = asking("other", *SIX_TENTHS, nominated_node="a")
    state.put_pod(other, 3.0)
    assert [state.filter(one, None).fitting for one in (first, other)] == [["a"], []]
    state.put_pod(replace(other, rank=Rank(URGENT)), 4.0)
    state.put_pod(replace(first, rank=Rank(URGENT)), 4.0)
    assert state.filter(lower, None).fitting == ["a"]


def test_a_bound_pod_is_nominated_no_more() -> None:
    state = cluster_of(2, ())
    first = asking("first", *WHOLE, nominated_node="a")
    state.put_pod(first, 1.0)
    assert isinstance(state.reserve(first, "a", 1.0), Reservation)
    assert state.filter(asking("second", *WHOLE, priority=0), None).fitting == ["a"], "not counted twice"
    state.put_pod(replace(first, node_name="a"), 2.0)
    assert state.filter(asking("second", *WHOLE, priority=0), None).fitting == ["a"]


# --- over HTTP ---


def raw_ranked(name: str, cores: int, priority: int, *, node: str = "", policy: str = "") -> Raw:
    made = raw_pod(name, (cores, 1), node=node, phase="Running" if node else "Pending")
    made["spec"] |= {"priority": priority} | ({"preemptionPolicy": policy} if policy else {})
    return made


def share(gpu: int) -> Raw:
    made = raw_ranked(f"s{gpu}", 60, 0, node="n1")
    made["status"]["startTime"] = f"2026-01-01T00:00:0{gpu}Z"
    return made


SHARES = [share(gpu) for gpu in range(2)]


@asynccontextmanager
async def with_shares(
    *pods: Raw, nodes: Sequence[str] = ("n1",), quota: Any = None, **settings: Any
) -> AsyncIterator[tuple[FakeCluster, Asker, FakeClock]]:
    """An extender whose node n1 has two GPUs, each with 40 cores next to a share that may be evicted."""
    clock = FakeClock()
    async with fake_cluster(*map(raw_node, nodes), pods=[*SHARES, *pods]) as cluster:
        cluster.holds("n1", *((f"uid-s{gpu}", gpu, 60, 1) for gpu in range(2)))
        if quota is not None:
            cluster.put_quota(quota)
        async with running_extender(cluster, clock=clock, **settings) as asker:
            yield cluster, asker, clock


async def after_grace(asker: Asker, clock: FakeClock) -> None:
    """The scheduler has had its time to ask."""
    clock.now += GRACE_S
    await asker.parts.preemption.preempt_due()


async def refused(asker: Asker, cluster: FakeCluster, name: str = "urgent") -> None:
    answer = await asker.filter(cluster.pod("default", name), ["n1"])
    assert not answer["NodeNames"] and "n1" in answer["FailedNodes"]


async def proposed(asker: Asker, cluster: FakeCluster, by: str = "urgent", **victims: Sequence[str]) -> Raw:
    meta = {
        node: {"Pods": [{"UID": f"uid-{one}"} for one in pods], "NumPDBViolations": 0} for node, pods in victims.items()
    }
    args = {"Pod": cluster.pod("default", by), "NodeNameToMetaVictims": meta}
    status, answer = await asker.post("/scheduler/preemption", args)
    assert status == 200
    return {
        node: ([one["UID"].removeprefix("uid-") for one in found["Pods"]], found["NumPDBViolations"])
        for node, found in answer["NodeNameToMetaVictims"].items()
    }


def written(cluster: FakeCluster, ending: str) -> list[str]:
    return [path for method, path, *_ in cluster.requests if method != "GET" and path.endswith(ending)]


@pytest.mark.parametrize(
    ("protected", "asked", "chosen"),
    [
        ((), {"n1": []}, (["s1"], 0)),
        ((), {"elsewhere": ["x"]}, (["s1"], 0)),
        (("s1",), {"n1": []}, (["s0"], 0)),
        (("s0", "s1"), {"n1": []}, (["s1"], 1)),
    ],
)
async def test_the_answer_names_other_victims_and_the_budgets_that_they_violate(
    protected: Sequence[str], asked: dict[str, list[str]], chosen: tuple[list[str], int]
) -> None:
    """A newer scheduler names a node without victims; one that it does not name, but filter was asked about, counts too.
    Nothing ends by the answer."""
    async with with_shares(raw_ranked("urgent", 60, 9)) as (cluster, asker, _):
        for name in protected:
            path = f"/api/v1/namespaces/default/pods/{name}/eviction"
            cluster.script.answers[path] = answers(429, raw_status(429, "it would violate the pod's disruption budget"))
        await refused(asker, cluster)
        assert await proposed(asker, cluster, **asked) == {"n1": chosen}
        assert set(cluster.objects["pods"]) == {"default/s0", "default/s1", "default/urgent"}


async def test_the_next_pod_gets_victims_of_its_own() -> None:
    """Before the watch shows that the first one's end: its room is spoken for. A repeated question has the same answer."""
    async with with_shares(raw_ranked("urgent", 60, 9), raw_ranked("second", 60, 9)) as (cluster, asker, _):
        for _ in range(2):
            assert await proposed(asker, cluster, n1=["s0", "s1"]) == {"n1": (["s1"], 0)}
        found = await proposed(asker, cluster, by="second", n1=["s0", "s1"])
        assert found == {"n1": (["s0", "s1"], 0)}, "one that ends already is named again"


@pytest.mark.parametrize("asks", [True, False])
async def test_no_room_is_kept_for_a_pod_that_was_deleted_meanwhile(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scheduler's question, and by an eviction of our own: no event of the pod comes any more."""
    urgent, evict = raw_ranked("urgent", 60, 9), PodWrites.evict
    async with with_shares(urgent, raw_ranked("second", 60, 9)) as (cluster, asker, clock):

        async def deleted() -> None:
            cluster.remove("pods", "default/urgent")
            await eventually(lambda: asker.parts.preemption.unscheduled(PodUid("uid-urgent")) is None)

        async def evicted(writes: PodWrites, one: Pod, *, is_tried: bool = False) -> None:
            await evict(writes, one, is_tried=is_tried)
            if not is_tried:
                await deleted()

        if asks:
            await deleted()
            meta = {"n1": {"Pods": [{"UID": "uid-s1"}], "NumPDBViolations": 0}}
            await asker.post("/scheduler/preemption", {"Pod": urgent, "NodeNameToMetaVictims": meta})
        else:
            monkeypatch.setattr(PodWrites, "evict", evicted)
            await refused(asker, cluster)
            await after_grace(asker, clock)
        cluster.holds("n1", ("uid-s0", 0, 60, 1))
        if "default/s1" in cluster.objects["pods"]:
            cluster.remove("pods", "default/s1")
        await eventually(lambda: len(asker.parts.state.reservations()) == 1)
        assert (await asker.filter(cluster.pod("default", "second"), ["n1"]))["NodeNames"] == ["n1"]


async def test_the_leader_evicts_where_the_scheduler_does_not_ask() -> None:
    """The sum of what is free suffices, so kube-scheduler up to 1.36 asks nobody. The pod is nominated, and gets the
    room; the next one's turn ends nobody else."""
    # The scheduler's own filters leave n2 out.
    async with with_shares(raw_ranked("urgent", 60, 9), nodes=["n1", "n2"]) as (cluster, asker, clock):
        await refused(asker, cluster)
        await asker.parts.preemption.preempt_due()
        assert not written(cluster, "/eviction")
        await after_grace(asker, clock)
        assert cluster.pod("default", "urgent")["status"]["nominatedNodeName"] == "n1"
        assert written(cluster, "/eviction") == ["/api/v1/namespaces/default/pods/s1/eviction"] * 2, "tried, and done"
        await eventually(lambda: any(one["reason"] == "Preempted" for one in cluster.objects["events"].values()))
        if "default/s1" in cluster.objects["pods"]:
            await refused(asker, cluster)
            await after_grace(asker, clock)
            assert len(written(cluster, "/eviction")) == 2
            cluster.remove("pods", "default/s1")
        cluster.holds("n1", ("uid-s0", 0, 60, 1))
        await eventually(lambda: len(asker.parts.state.reservations()) == 1)
        assert (await asker.filter(cluster.pod("default", "urgent"), ["n1"]))["NodeNames"] == ["n1"]


async def test_the_room_of_one_is_kept_while_a_budget_forbids_the_next_ones_end() -> None:
    """Each may end alone, so both tries succeed. A replacement would take the room, and be evicted again without end."""
    tried_and_done = iter((answers(201, raw_status(201)), answers(429, raw_status(429))))

    async def one_of_two(*request: Any) -> Any:
        return await next(tried_and_done)(*request)

    async with with_shares(raw_ranked("urgent", 200, 9)) as (cluster, asker, clock):
        cluster.script.answers["/api/v1/namespaces/default/pods/s1/eviction"] = one_of_two
        await refused(asker, cluster)
        await after_grace(asker, clock)
        assert len(written(cluster, "/s0/eviction")) == 2, "tried, and done"
        assert cluster.pod("default", "urgent")["status"]["nominatedNodeName"] == "n1"
        assert "default/s1" in cluster.objects["pods"]


async def test_one_that_the_scheduler_does_not_evict_ends_no_more() -> None:
    """It was killed after the answer, say: what counted as ending would never be evicted, and the pod would wait for it."""
    async with with_shares(raw_ranked("urgent", 60, 9)) as (cluster, asker, clock):
        assert await proposed(asker, cluster, n1=["s1"]) == {"n1": (["s1"], 0)}
        await refused(asker, cluster)
        await after_grace(asker, clock)
        assert not written(cluster, "/eviction"), "it ends already"
        clock.now += EVICTED_S
        await refused(asker, cluster)
        await after_grace(asker, clock)
        assert written(cluster, "/eviction") == ["/api/v1/namespaces/default/pods/s1/eviction"] * 2, "tried, and done"


async def test_nobody_else_ends_where_others_end_already_for_the_pod() -> None:
    """However many nodes come before its own."""
    urgent, other = raw_ranked("urgent", 60, 9), raw_ranked("e1", 60, 0, node="n2")
    urgent["status"]["nominatedNodeName"] = "n2"
    ending = raw_ranked("e0", 60, 0, node="n2")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:09Z"
    async with with_shares(ending, other, urgent, nodes=["n1", "n2"]) as (cluster, asker, clock):
        cluster.holds("n2", ("uid-e0", 0, 60, 1), ("uid-e1", 1, 60, 1))
        await eventually(lambda: {one.stage for one in asker.parts.state.reservations()} == {"confirmed"})
        names = ["n1", *(f"unknown{n}" for n in range(MOST_NODES)), "n2"]
        assert not (await asker.filter(urgent, names))["NodeNames"]
        await after_grace(asker, clock)
        assert not written(cluster, "/eviction")


@pytest.mark.parametrize(
    "why", ["it was asked", "a budget", "no right", "preemptionPolicy", "priority", "room", "gone", "quota", "reserve"]
)
async def test_the_leader_evicts_nobody(why: str) -> None:
    """Where the scheduler asks, it evicts by itself; a budget is kept; a pod waits that may not preempt, or has no higher
    priority."""
    never, priority = "Never" if why == "preemptionPolicy" else "", 0 if why == "priority" else 9
    urgent = raw_ranked("urgent", 60, priority, policy=never)
    quota, reserve = {"default": {"vcore": 10}} if why == "quota" else None, "filter" if why == "reserve" else "bind"
    async with with_shares(urgent, quota=quota, reserve=reserve) as (cluster, asker, clock):
        code = {"a budget": 429, "no right": 403}.get(why, 0)
        for one in SHARES if code else ():
            path = f"/api/v1/namespaces/default/pods/{one['metadata']['name']}/eviction"
            cluster.script.answers[path] = answers(code, raw_status(code))
        await asker.filter(cluster.pod("default", "urgent"), ["n1"])
        if why == "it was asked":
            await proposed(asker, cluster, n1=["s0"])
        if why == "room":
            cluster.put("nodes", raw_node("n1", gpus=3))
            await eventually(lambda: len(asker.parts.state.gpus("n1")) == 3)
        if why == "gone":
            cluster.remove("pods", "default/urgent")
            await eventually(lambda: not asker.parts.pods.unscheduled_pods())
        await after_grace(asker, clock)
        assert "nominatedNodeName" not in urgent["status"]
        assert not written(cluster, "/status")
        assert "default/s0" in cluster.objects["pods"] and "default/s1" in cluster.objects["pods"]
