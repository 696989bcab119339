"""Binds against an API server that refuses, fails, falls silent and comes back: no share is given twice, none is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.decisions.decide import hinted_gpus
from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
)
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION
from gpushare_agent.extender.bind import Bind, PodWrites
from gpushare_agent.extender.cluster_state import REPORT_WAIT_S, ClusterState
from gpushare_agent.extender.values import ClusterPolicy, Reservation, Stage
from tests.extender.support_extender import (
    NAMES,
    FakeCluster,
    Replica,
    eventually,
    fake_cluster,
    node_of,
    pod_of,
    predicted,
    raw_node,
    raw_pod,
    running_replica,
)
from tests.fakes.api_server import FAULTS, GOOD, Raw, Seen
from tests.fakes.clock import FakeClock
from tests.support_core import GPU_MEM_NAMES
from tests.support_deadline import DEADLINE_S
from tests.support_json import undecoded

FORGED_INDEX = {GPUSHARE_INDEX_ANNOTATION: "1"}
"""With it a bind patches first: the pod is written, and the annotation removed, before it is bound."""
PLACES: dict[str, tuple[dict[str, str], list[str]]] = {
    "one request": ({}, []),
    "patch": (FORGED_INDEX, []),
    "bind": (FORGED_INDEX, [GOOD, GOOD]),
}
"""What of a bind fails: the pod's annotations, and what succeeds before."""


@asynccontextmanager
async def leading(
    *pods: Raw, gpus: int = 2, clock: Callable[[], float] = time.monotonic, bind_s: float = DEADLINE_S
) -> AsyncIterator[tuple[FakeCluster, Replica]]:
    """A cluster with these pods and the node n1, and a replica that leads."""
    async with (
        fake_cluster(raw_node("n1", gpus=gpus), pods=pods) as cluster,
        running_replica(cluster, clock, bind_s=bind_s) as replica,
    ):
        await replica.lead()
        yield cluster, replica


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_one_fault_is_overcome(fault: str, place: str) -> None:
    """Whatever the API server does once, to the patch or to the bind, the pod is bound where it should be."""
    annotations, before = PLACES[place]
    pod = raw_pod("a", (60, 8), annotations=annotations)
    async with leading(pod) as (cluster, replica):
        cluster.faults = [*before, fault]
        assert await replica.bind(pod, "n1") == ""
        assert cluster.node_of("a") == "n1"
        assert predicted(cluster.pod("default", "a"))["tencent.com/predicate-gpu-idx-0"] == "0"
        assert replica.ledger()["n1"] == {"0": [60, 8, 0, 0]}
        await cluster.carry_out_late()
        assert cluster.rejected == []


@pytest.mark.parametrize("fault", ["409", "429", "500", "silent"])
async def test_a_bind_that_never_works_is_undone(fault: str) -> None:
    """After a bounded number of tries the bind fails; as only patches were sent, the GPUs are free for others at once."""
    pods = [raw_pod("a", (60, 8), annotations=FORGED_INDEX), raw_pod("b", (60, 8))]
    async with leading(*pods, gpus=1) as (cluster, replica):
        cluster.faults = [fault] * 10
        error = await replica.bind(pods[0], "n1")
        assert error.startswith("cannot bind pod default/a to node n1: ")
        assert error.endswith("Its GPUs are free again; the scheduler tries again.")
        assert 3 <= sum(method == "PATCH" for method, _ in cluster.requests) <= 6
        cluster.faults = []
        assert await replica.bind(pods[1], "n1") == ""


@pytest.mark.parametrize("links", [("X", "PHB", "SYS", "SYS"), ()])
async def test_a_bind_to_a_node_that_has_just_begun_waits_for_its_links(links: tuple[str, ...]) -> None:
    """Its agent registers with the kubelet before it connects to the API server, and then follows the plan. A node that
    reports nothing, as gpu-manager's, gets a plan for its capacity divided evenly."""
    pod, node = raw_pod("a", (200, 16)), raw_node("n1", gpus=4)
    annotations = node["metadata"].pop("annotations")
    clock = FakeClock()
    async with (
        fake_cluster(node, pods=[pod]) as cluster,
        running_replica(cluster, clock) as replica,
        asyncio.TaskGroup() as group,
    ):
        await replica.lead()
        bind = group.create_task(replica.bind(pod, "n1"))
        await asyncio.sleep(0)
        if links:
            report = json.loads(annotations[GPUS_ANNOTATION])
            matrix = [links, ("PHB", "X", "SYS", "SYS"), ("SYS", "SYS", "X", "PIX"), ("SYS", "SYS", "PIX", "X")]
            for gpu, row in zip(report["gpus"], matrix, strict=True):
                gpu["links"] = row
            annotations[GPUS_ANNOTATION] = json.dumps(report)
            cluster.change("nodes", "n1", lambda raw: raw["metadata"].update(annotations=annotations))
        else:
            clock.now += REPORT_WAIT_S
        assert await bind == ""
        assert predicted(cluster.pod("default", "a"))["tencent.com/predicate-gpu-idx-0"] == ("2,3" if links else "0,1")


async def test_an_unknown_outcome_keeps_the_gpus_until_it_is_known() -> None:
    """The bind was sent and nothing answers any more: nobody else gets the GPUs, and once it is known that the pod is not
    bound, and cannot be bound any more, they are free."""
    pods = [raw_pod("a", (60, 8)), raw_pod("b", (60, 8))]
    async with leading(*pods, gpus=1) as (cluster, replica):
        cluster.faults = ["late", *["500"] * 20]
        error = await replica.bind(pods[0], "n1")
        assert "stay reserved until it is known" in error
        assert replica.binder.open_binds == 1
        assert "60 cores" in await replica.bind(pods[1], "n1")
        with capture_logs() as logs:
            for _ in range(3):
                await replica.binder.reconcile()
        assert replica.binder.open_binds == 1, "the API server does not answer yet"
        assert [one["event"] for one in logs] == ["bind_unresolved"], "it may not answer for hours"
        cluster.faults = []
        await replica.binder.reconcile()
        assert replica.binder.open_binds == 0
        await cluster.carry_out_late()
        assert cluster.node_of("a") == "", "the patch has made a new version: the late bind comes to nothing"
        assert await replica.bind(pods[1], "n1") == ""
        [(_, stale)] = replica.binder._left.values()
        for _ in range(2):  # each time that they are left
            replica.binder._mark_stale(stale)
            cluster.faults = ["500"] * 20
            with capture_logs() as logs:
                await replica.binder.reconcile()
            assert [one["event"] for one in logs] == ["bind_unresolved"]
            cluster.faults = []
            await replica.binder.reconcile()
        assert PREDICATE_TIME_ANNOTATION not in cluster.pod("default", "a")["metadata"]["annotations"]
        assert cluster.rejected == []


async def test_an_unknown_outcome_that_was_a_bind_is_found_by_the_next_request() -> None:
    """The scheduler asks again before the extender has looked."""
    pod = raw_pod("a", (60, 8))
    async with leading(pod, gpus=1) as (cluster, replica):
        cluster.mute(True)  # the watch does not say what has become of it
        cluster.faults = ["silent-done", *["500"] * 20]
        assert "stay reserved" in await replica.bind(pod, "n1")
        cluster.faults = []
        replica.binder.unscheduled = lambda _: None  # so the pod is read
        assert await replica.bind(pod, "n1") == ""
        assert [r.stage for r in replica.state.reservations()] == [Stage.BOUND]
        await replica.binder.reconcile()
        assert replica.binder.open_binds == 0


@pytest.mark.parametrize(("is_bound", "patch"), [(True, GOOD), (True, "403"), (False, "403")])
async def test_an_unknown_outcome_is_found_also_where_its_patch_is_refused(is_bound: bool, patch: str) -> None:
    """As an admission policy refuses it. A bind whose answer was lost, with all that followed, counts once it is seen; a pod
    without a node is not bound any more once nobody can wait for it."""
    pod, clock = raw_pod("a", (60, 8)), FakeClock()
    async with leading(pod, gpus=1, clock=clock) as (cluster, replica):
        cluster.mute(True)  # the watch does not say what has become of it
        cluster.faults = ["silent-done" if is_bound else "silent", *["500"] * 20]
        assert "stay reserved" in await replica.bind(pod, "n1")
        for open_binds in (int(not is_bound), 0):
            cluster.faults = [patch]
            await replica.binder.reconcile()
            assert replica.binder.open_binds == open_binds
            clock.now += 60.0
        assert [one.stage for one in replica.state.reservations()] == [Stage.BOUND] * is_bound


async def test_a_pod_that_is_gone_frees_its_gpus() -> None:
    """Deleted, or replaced by one of the same name, while its bind was unknown."""
    pods = [raw_pod("a", (60, 8)), raw_pod("b", (30, 4))]
    async with leading(*pods, gpus=1) as (cluster, replica):
        for name in ("a", "b"):
            cluster.faults = ["silent", *["500"] * 20]
            assert "stay reserved" in await replica.bind(cluster.pod("default", name), "n1")
        cluster.faults = []
        cluster.is_down = True  # so that the informer does not report it first
        cluster.remove("pods", "default/a")
        fresh = raw_pod("b", (30, 4))
        fresh["metadata"]["uid"] = "uid-b-the-second"
        cluster.put("pods", fresh)
        cluster.is_down = False
        await replica.binder.reconcile()
        assert replica.binder.open_binds == 0
        assert replica.state.reservations() == []


async def test_a_pod_that_another_binds_meanwhile_is_left_to_it() -> None:
    """Another scheduler was quicker: our reservation goes, and the pod counts where it is."""
    pod = raw_pod("a", (60, 8))
    async with leading(pod) as (cluster, replica):
        cluster.put("nodes", raw_node("n2"))
        cluster.is_down = True
        cluster.change("pods", "default/a", lambda raw: raw["spec"].update(nodeName="n2"))
        cluster.is_down = False
        assert "n2" in await replica.bind(pod, "n1")
        await eventually(lambda: [r.node for r in replica.state.reservations()] == ["n2"])


async def test_a_pod_that_the_informer_has_not_reported_of_is_read() -> None:
    """The scheduler may be quicker than our watch."""
    async with leading() as (cluster, replica):
        pod = cluster.put("pods", raw_pod("a", (60, 8)))
        assert await replica.bind(pod, "n1") == ""
        assert await replica.bind(raw_pod("nobody", (60, 8)), "n1") != ""


async def test_a_replica_that_does_not_lead_any_more_writes_nothing() -> None:
    """It lost the lease between the patch and the bind: the bind is not sent, and nothing is written afterwards either."""
    pod = raw_pod("a", (60, 8), annotations=FORGED_INDEX)
    async with leading(pod) as (cluster, replica):
        cluster.faults = ["500", "500"]
        async with asyncio.TaskGroup() as group:
            bind = group.create_task(replica.bind(pod, "n1"))
            await cluster.wait(lambda: any(method == "PATCH" for method, _ in cluster.requests))
            replica.is_leading = False
        assert "does not lead" in bind.result()
        writes = cluster.writes()
        await replica.binder.reconcile()
        assert cluster.writes() == writes
        assert not any(path.endswith("/binding") for _, path in cluster.requests)


FORGED = {
    GPUSHARE_INDEX_ANNOTATION: "1",
    GPUSHARE_ASSIGNED_ANNOTATION: "false",
    GPUSHARE_ASSUME_TIME_ANNOTATION: "1",
    f"{PREDICATE_GPU_INDEX_PREFIX}0": "1",
    f"{PREDICATE_GPU_INDEX_PREFIX}7": "1",
    f"{PREDICATE_GPU_INDEX_PREFIX}init-0": "1",
}
OWN = {"mine": "x", "tencent.com/vcuda-core-limit": "50"}


async def test_choices_that_are_not_the_plans_are_removed_before_the_bind() -> None:
    """An agent follows them where it can. What else the pod's owner wrote stays, and the bind is of the version without."""
    pod = raw_pod("a", (60, 8), annotations={**FORGED, **OWN})
    async with leading(pod) as (cluster, replica):
        assert await replica.bind(pod, "n1") == ""
        annotations = cluster.pod("default", "a")["metadata"]["annotations"]
        assert OWN.items() <= annotations.items()
        assert annotations.keys() - OWN.keys() == {
            PREDICATE_TIME_ANNOTATION,
            PREDICATE_NODE_ANNOTATION,
            GPU_ASSIGNED_ANNOTATION,
            f"{PREDICATE_GPU_INDEX_PREFIX}0",
        }
        assert annotations[f"{PREDICATE_GPU_INDEX_PREFIX}0"] == "0"
        assert cluster.writes() == ["PATCH", "PATCH", "POST"]


async def test_choices_that_the_watch_has_not_delivered_are_removed_too() -> None:
    """The version that is known is not the pod's any more: the bind is refused, and the pod patched before the next."""
    pod = raw_pod("a", (60, 8))
    async with leading(pod) as (cluster, replica):
        cluster.mute(True)
        cluster.change("pods", "default/a", lambda raw: raw["metadata"].update(annotations={**FORGED, **OWN}))
        assert await replica.bind(pod, "n1") == ""
        assert cluster.writes() == ["POST", "PATCH", "PATCH", "POST"]
        annotations = cluster.pod("default", "a")["metadata"]["annotations"]
        assert annotations.items() > {**OWN, f"{PREDICATE_GPU_INDEX_PREFIX}0": "0"}.items()
        assert not annotations.keys() & (FORGED.keys() - {f"{PREDICATE_GPU_INDEX_PREFIX}0"})


async def test_more_choices_than_are_removed_at_once_refuse_the_bind() -> None:
    """The first 64 go, the refusal names the others, and nothing stays set aside; tried again it is bound in the end."""
    forged = {f"{PREDICATE_GPU_INDEX_PREFIX}{100 + number}": "1" for number in range(70)}
    pod = raw_pod("a", (60, 8), annotations=forged)
    async with leading(pod) as (cluster, replica):
        error = await replica.bind(pod, "n1")
        assert (
            f"it has 70 annotations that choose GPUs and are not the plan's, the first of them {min(forged)}" in error
        )
        assert "the pod's owner should remove the others" in error
        assert error.endswith("Its GPUs are free again; the scheduler tries again.")
        assert predicted(cluster.pod("default", "a")).keys() - forged.keys() == {
            PREDICATE_NODE_ANNOTATION,
            f"{PREDICATE_GPU_INDEX_PREFIX}0",
        }
        assert sorted(predicted(cluster.pod("default", "a")).keys() & forged.keys()) == sorted(forged)[64:]
        assert replica.state.reservations() == []
        assert cluster.node_of("a") == ""
        assert await replica.bind(cluster.pod("default", "a"), "n1") == ""
        assert not predicted(cluster.pod("default", "a")).keys() & forged.keys()


async def test_a_pod_whose_choices_somebody_writes_again_is_not_bound() -> None:
    """Each version has a forged one: the tries are bounded, and the text names the annotation."""
    pod = raw_pod("a", (60, 8), annotations=FORGED)
    async with leading(pod) as (cluster, replica):
        write = cluster._write

        async def write_and_forge(seen: Seen, request: web.Request, handler: Any) -> web.StreamResponse:
            await write(seen, request, handler)
            return web.json_response(
                cluster.change("pods", "default/a", lambda raw: raw["metadata"]["annotations"].update(FORGED_INDEX))
            )

        cluster._write = write_and_forge  # type: ignore[method-assign]
        error = await replica.bind(pod, "n1")
        assert f"another client writes its annotation {GPUSHARE_INDEX_ANNOTATION}, which only an extender may" in error
        assert cluster.node_of("a") == ""
        assert replica.state.reservations() == []


async def test_units_on_two_gpus_leave_no_index_of_gpushares() -> None:
    """One index cannot say two GPUs: none is written, the forged one goes, and the plan stands by container."""
    pod = raw_pod("a", (0, 0), (0, 0), annotations=FORGED_INDEX)
    for container in pod["spec"]["containers"]:
        container["resources"] = {"limits": {"aliyun.com/gpu-mem": "3"}}
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, cluster.opened_api() as api:
        writes = PodWrites(api=api, names=GPU_MEM_NAMES, leads=lambda: True)
        state = ClusterState(policy=ClusterPolicy(names=GPU_MEM_NAMES))
        state.put_node(node_of(cluster.objects["nodes"]["n1"], GPU_MEM_NAMES), 0.0)
        reservation = state.reserve(pod_of(pod, GPU_MEM_NAMES), "n1", 0.0)
        assert isinstance(reservation, Reservation)
        assert len({c.gpus for c in reservation.plan.containers}) == 2
        await writes.bind(Bind(reservation))
        reported = parse_pod(read_pod_json(undecoded(cluster.pod("default", "a"))), GPU_MEM_NAMES.names)
        assert GPUSHARE_INDEX_ANNOTATION not in reported.annotations
        policy = Policy(names=GPU_MEM_NAMES, node_name="n1")
        assert [hinted_gpus(reported.annotations, one, policy) for one in reported.containers] == [
            one.gpus for one in reservation.plan.containers
        ]


async def test_a_server_that_asks_for_more_time_than_there_is_is_named() -> None:
    """The bind ends at once and says so, instead of waiting until its time is over and blaming silence."""
    pod = raw_pod("a", (60, 8))
    async with leading(pod, bind_s=5.0) as (cluster, replica):
        for asked, said in (("3600", "60 s or more"), ("7", "7 s")):
            cluster.retry_after, cluster.faults = asked, ["429"]
            error = await replica.bind(pod, "n1")
            assert f"it asks to wait {said}, and a bind may take 5 s. Its GPUs are free again" in error
            assert "did not answer in time" not in error


@pytest.mark.parametrize("at", [1, 2])
async def test_leadership_is_looked_at_last_before_each_patch(at: int) -> None:
    """A process that is stopped while it prepares the first or the second patch, beyond its deadline, sends none then."""
    pod = raw_pod("a", (60, 8), annotations=FORGED)
    async with leading(pod) as (cluster, replica):
        prepared = 0

        def time_ns() -> int:
            nonlocal prepared
            prepared += 1
            replica.is_leading = prepared < at
            return prepared

        async with cluster.opened_api() as api:
            writes = PodWrites(api=api, names=NAMES, leads=lambda: replica.is_leading, time_ns=time_ns)
            reservation = replica.state.reserve(pod_of(pod), "n1", 0.0)
            assert isinstance(reservation, Reservation)
            with pytest.raises(Rejected, match="does not lead any more"):
                await writes.bind(Bind(reservation))
        assert cluster.writes() == ["PATCH"] * (at - 1)


@dataclass(frozen=True)
class Step:
    """One of bind and blackout (pod, node), wait, switch, crash, report (node), end (pod), late, reconcile, mute, unmute."""

    what: str
    pod: int = 0
    node: int = 0


NODES = {"n1": 1, "n2": 2}
"""With so many GPUs."""
REQUESTS = ((50, 8), (60, 8), (100, 0), (30, 12))
PODS = st.integers(0, 4)
AT = st.sampled_from([0, 0, 1])
BINDS = st.builds(Step, st.just("bind"), PODS, AT)
OTHERS = st.builds(
    Step,
    st.sampled_from(
        ["blackout", "wait", "wait", "switch", "crash", "report", "end", "late", "late", "reconcile", "mute", "unmute"]
    ),
    PODS,
    AT,
)
BLACKOUTS = [[GOOD, fault, *["500"] * 4] for fault in ("late", "silent-done")]
"""A bind whose outcome stays unknown: it is sent, and then nothing works for as long as it is tried."""
FAULT_LISTS = st.lists(st.sampled_from([GOOD, GOOD, *FAULTS]), max_size=12)


class Rehearsal:
    """Two schedulings at a time on a cluster with two replicas, of which one leads."""

    def __init__(self, cluster: FakeCluster, replicas: Sequence[Replica], group: asyncio.TaskGroup) -> None:
        self.cluster = cluster
        self.replicas = list(replicas)
        self._group = group
        self._binds: list[asyncio.Task[str]] = []

    @property
    def leader(self) -> Replica:
        return self.replicas[0]

    async def take(self, step: Step) -> None:
        cluster, key = self.cluster, f"default/p{step.pod}"
        if step.what == "bind" and key in cluster.objects["pods"]:
            pod = cluster.objects["pods"][key]
            self._binds.append(self._group.create_task(self.leader.bind(pod, sorted(NODES)[step.node])))
            await asyncio.sleep(0)
        elif step.what == "blackout" and key in cluster.objects["pods"]:
            await self.wait()
            cluster.faults = list(BLACKOUTS[step.pod % 2])
            await self.leader.bind(cluster.objects["pods"][key], sorted(NODES)[step.node])
            cluster.faults = []
        elif step.what == "wait":
            await self.wait()
        elif step.what in ("switch", "crash"):
            await self.change_leader(is_orderly=step.what == "switch")
        elif step.what == "report":
            cluster.report_held(sorted(NODES)[step.node])
        elif step.what == "end" and cluster.objects["pods"].get(key, {}).get("spec", {}).get("nodeName"):
            cluster.end_pod(key)
        elif step.what == "late":
            await cluster.carry_out_late()
        elif step.what == "reconcile":
            await self.leader.binder.reconcile()
        elif step.what in ("mute", "unmute"):
            cluster.mute(step.what == "mute")

    async def wait(self) -> None:
        if self._binds:
            await asyncio.wait(self._binds)
        self._binds.clear()

    async def change_leader(self, *, is_orderly: bool) -> None:
        """The lease's spare time is for the last requests of the old one; then the new one lists, and decides."""
        if is_orderly:
            await self.wait()
        self.leader.is_leading = False
        await self.wait()
        await self.cluster.carry_out_late()
        self.replicas.reverse()
        await self.leader.lead()

    async def finish(self) -> None:
        """The API server is well again, the agents report, and what was open is resolved."""
        await self.wait()
        self.cluster.faults.clear()
        self.cluster.mute(False)
        await self.cluster.carry_out_late()
        await self.leader.binder.reconcile()
        for node in NODES:
            self.cluster.report_held(node)
        await eventually(lambda: self.leader.ledger() == {node: self.cluster.used(node) for node in NODES})


async def rehearse(requests: Sequence[tuple[int, int]], troubles: Sequence[str], steps: Sequence[Step]) -> None:
    pods = [raw_pod(f"p{number}", request) for number, request in enumerate(requests)]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            fake_cluster(*(raw_node(node, gpus=gpus) for node, gpus in NODES.items()), pods=pods)
        )
        replicas = [await stack.enter_async_context(running_replica(cluster)) for _ in range(2)]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        rehearsal = Rehearsal(cluster, replicas, group)
        await rehearsal.leader.lead()
        cluster.faults = list(troubles)
        for step in steps:
            await rehearsal.take(step)
            assert cluster.rejected == []
        await rehearsal.finish()
        assert cluster.rejected == []
        assert rehearsal.leader.binder.open_binds == 0
        bound = {p["metadata"]["uid"] for p in cluster.objects["pods"].values() if p["spec"].get("nodeName")}
        assert {r.pod_uid for r in rehearsal.leader.state.reservations()} == bound


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(st.sampled_from(REQUESTS), min_size=3, max_size=5),
    troubles=FAULT_LISTS,
    steps=st.lists(st.one_of(BINDS, BINDS, OTHERS), min_size=6, max_size=20),
)
def test_no_interleaving_gives_a_share_twice_or_loses_one(
    requests: list[tuple[int, int]], troubles: list[str], steps: list[Step]
) -> None:
    """Concurrent schedulings, binds that fail in every way, late requests, leaders that change or die between patch and
    bind, watches that lag, pods that end: every bound pod fits at its agent, and at the end the ledger says what the
    agents hold."""
    asyncio.run(rehearse(requests, troubles, steps))
