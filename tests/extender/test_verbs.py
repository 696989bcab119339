"""The extender over HTTP, against an API server that answers: verbs, formats, bounds, trust, gpu-admission's behaviour."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpushare_agent import __version__
from gpushare_agent.core.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
)
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.bind import BindTiming
from gpushare_agent.extender.cluster_state import Filtered
from gpushare_agent.extender.steps import Steps
from tests.extender.support_extender import (
    Asker,
    eventually,
    fake_cluster,
    predicted,
    raw_container,
    raw_node,
    raw_pod,
    running_extender,
)
from tests.fakes.api_server import Raw
from tests.fakes.clock import FakeClock

DATA = Path(__file__).parent.parent / "data" / "extender"
TRAIN_UID = "0d8b1c5a-5a11-4a0e-9a57-7ad1b0c7d001"


def golden(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def without_reasons(answer: Any) -> Any:
    """The words of a refusal are no part of the protocol."""
    if isinstance(answer, dict) and answer.get("FailedNodes"):
        assert all(answer["FailedNodes"].values())
        answer["FailedNodes"] = dict.fromkeys(answer["FailedNodes"], "<why>")
    return answer


def on_node(name: str, uid: str, node: str, cores: int) -> Raw:
    pod = raw_pod(name, (cores, 8), node=node, namespace="team-a", phase="Running")
    pod["metadata"]["uid"] = uid
    return pod


@pytest.fixture
async def golden_extender() -> AsyncIterator[Asker]:
    """node-a is empty, node-b and node-c have 40 cores left on each of two GPUs, node-d has 70 on one."""
    pods = [
        on_node("old-1", "victim-1", "node-b", 60),
        on_node("old-2", "victim-2", "node-c", 60),
        on_node("kept-1", "kept-1", "node-b", 60),
        on_node("kept-2", "kept-2", "node-c", 60),
        on_node("kept-3", "kept-3", "node-d", 30),
    ]
    train = raw_pod("train", (60, 8), namespace="team-a")
    train["metadata"]["uid"] = TRAIN_UID
    nodes = [raw_node(f"node-{letter}") for letter in "abcd"]
    async with fake_cluster(*nodes, pods=[*pods, train]) as cluster:
        cluster.holds("node-b", ("victim-1", 0, 60, 8), ("kept-1", 1, 60, 8))
        cluster.holds("node-c", ("victim-2", 0, 60, 8), ("kept-2", 1, 60, 8))
        cluster.holds("node-d", ("kept-3", 0, 30, 8))
        async with running_extender(cluster, most_fitting=0) as asker:
            yield asker


@pytest.mark.parametrize(
    ("path", "args", "result"),
    [
        ("/scheduler/filter", "filter_args_names.json", "filter_result_names.json"),
        ("/scheduler/predicates", "filter_args_names.json", "filter_result_names.json"),
        ("/scheduler/filter", "filter_args_nodes.json", "filter_result_nodes.json"),
        ("/scheduler/priorities", "prioritize_args.json", "prioritize_result.json"),
        ("/scheduler/prioritize", "prioritize_args.json", "prioritize_result.json"),
        ("/scheduler/bind", "bind_args.json", "bind_result.json"),
        ("/gpushare-scheduler/filter", "filter_args_names.json", "filter_result_names.json"),
        ("/gpushare-scheduler/bind", "bind_args.json", "bind_result.json"),
        ("/scheduler/preemption", "preemption_args_victims.json", "preemption_result.json"),
        ("/scheduler/preemption", "preemption_args_meta.json", "preemption_result.json"),
    ],
)
async def test_each_verb_answers_as_the_scheduler_reads_it(
    golden_extender: Asker, path: str, args: str, result: str
) -> None:
    """The recorded requests get the recorded answers, with exactly the fields of the public types."""
    status, answer = await golden_extender.post(path, golden(args))
    assert status == 200
    assert without_reasons(answer) == golden(result)


async def test_the_version_is_answered() -> None:
    """At gpu-admission's path, by every replica."""
    async with fake_cluster() as cluster, running_extender(cluster) as asker:
        status, text = await asker.get("/version")
    assert status == 200 and __version__ in text


async def test_what_only_asks_changes_nothing() -> None:
    """Asked any number of times, as autoscalers do: nothing is written and nothing set aside."""
    async with (
        fake_cluster(raw_node("n1", gpus=1), pods=[raw_pod("a", (100, 0))]) as cluster,
        running_extender(cluster) as asker,
    ):
        before, writes = await asker.get("/debug/state"), cluster.writes()
        pod = cluster.pod("default", "a")
        for _ in range(3):
            assert (await asker.filter(pod, ["n1"]))["NodeNames"] == ["n1"]
            for path, more in (
                ("prioritize", {"NodeNames": ["n1"]}),
                ("preemption", {"NodeNameToMetaVictims": {"n1": {}}}),
            ):
                assert (await asker.post(f"/scheduler/{path}", {"Pod": pod, **more}))[0] == 200
        assert (await asker.get("/debug/state"), cluster.writes()) == (before, writes)


async def test_a_pod_that_asks_for_nothing_of_ours_fits_everywhere() -> None:
    """Its nodes come back as they were sent, known or not, in both forms, and its victims too. A scheduler without
    managedResources delegates every bind: to nodes without GPUs too, and with no annotation."""
    pod = raw_pod("plain", (0, 0))
    items = [{"metadata": {"name": "zz"}, "extra": {"kept": True}}]
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster) as asker:
        assert (await asker.filter(pod, ["zz", "n1"]))["NodeNames"] == ["zz", "n1"]
        _, answer = await asker.post("/scheduler/filter", {"Pod": pod, "Nodes": {"items": items}})
        assert answer["Nodes"]["items"] == items
        _, scores = await asker.post("/scheduler/priorities", {"Pod": pod, "NodeNames": ["zz"]})
        assert scores == [{"Host": "zz", "Score": 0}]
        victims = {"zz": {"Pods": [{"UID": "v"}], "NumPDBViolations": 2}}
        _, kept = await asker.post("/scheduler/preemption", {"Pod": pod, "NodeNameToMetaVictims": victims})
        assert kept == {"NodeNameToMetaVictims": victims}
        assert await asker.bind(pod, "node-without-cards") == ""
        assert cluster.node_of("plain") == "node-without-cards"
        assert cluster.pod("default", "plain")["metadata"]["annotations"] == {}
        assert "is on node node-without-cards already" in await asker.bind(pod, "n1")


PREFERENCE = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}}


async def test_filter_answers_the_best_of_many_nodes() -> None:
    """Those of the least cost: kube-scheduler scores what it is answered, and one node not at all. So a pod that prefers
    nodes by itself gets all, as does one that is asked about again without a bind, and where such a node is tainted
    PreferNoSchedule the best are answered. It reads the reasons only where no node is left."""
    nodes = [raw_node(f"n{number}") for number in range(5)]
    nodes[2]["spec"] = {"taints": [{"key": "t", "effect": "PreferNoSchedule"}]}
    async with fake_cluster(*nodes, pods=[]) as cluster:
        for number, cores in ((1, 30), (3, 20), (4, 90)):
            cluster.holds(f"n{number}", (f"uid-{number}", 0, cores, 4), (f"uid-other-{number}", 1, cores, 4))
        async with running_extender(cluster, most_fitting=2) as asker:
            names = ["n4", "n3", "n2", "n1", "n0"]
            answer = await asker.filter(raw_pod("a", (30, 4)), names)
            assert (answer["NodeNames"], answer["FailedNodes"]) == (["n1"], {}), "the fullest where it fits"
            answer = await asker.filter(raw_pod("a", (30, 4)), names)
            assert answer["NodeNames"] == ["n3", "n2", "n1", "n0"], "what was answered before has not led to a bind"
            answer = await asker.filter(raw_pod("e", (30, 4)), ["n2", "n0"])
            assert answer["NodeNames"] == ["n2", "n0"], "equals"
            answer = await asker.filter(raw_pod("f", (30, 4)), ["n2", "n0", "n3"])
            assert answer["NodeNames"] == ["n3"]
            cluster.holds("n2", ("uid-2", 0, 31, 4), ("uid-other-2", 1, 31, 4))
            answer = await asker.filter(raw_pod("g", (30, 4)), names)
            assert answer["NodeNames"] == ["n2", "n1"], "the fullest is avoided"
            preferring = raw_pod("b", (30, 4))
            preferring["spec"]["affinity"] = PREFERENCE
            answer = await asker.filter(preferring, names)
            assert (answer["NodeNames"], answer["FailedNodes"]) == (["n3", "n2", "n1", "n0"], {})
            answer = await asker.filter(raw_pod("c", (300, 0)), names)
            assert (answer["NodeNames"], sorted(answer["FailedAndUnresolvableNodes"])) == ([], sorted(names))
        async with running_extender(cluster, most_fitting=0) as asker:
            answer = await asker.filter(raw_pod("a", (30, 4)), names)
            assert (answer["NodeNames"], list(answer["FailedNodes"])) == (["n3", "n2", "n1", "n0"], ["n4"])


async def test_where_the_nodes_are_taken_while_the_best_is_sought_bind_refuses_and_not_an_empty_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kube-scheduler tries the pod again after a bind that failed; after an answer without nodes it waits for an event."""
    pod = raw_pod("a", (30, 4))
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster) as asker:
        state = asker.parts.state
        found_steps = state.filter_steps

        def changing(pod: Pod, names: Sequence[str] | None) -> Steps[Filtered]:
            found = yield from found_steps(pod, names)
            state.remove_node("n1")
            return found

        monkeypatch.setattr(state, "filter_steps", changing)
        answer = await asker.filter(pod, ["n1"])
        assert (answer["NodeNames"], answer["FailedNodes"]) == (["n1"], {})
        assert "the extender knows no GPUs" in await asker.bind(pod, "n1")


async def test_bind_annotates_and_binds() -> None:
    """The pod gets gpu-admission's annotations with its node; the answer has no error."""
    pod = raw_pod("a", (30, 4), (100, 0), (0, 0))
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster) as asker:
        assert await asker.bind(pod, "n1") == ""
        bound = cluster.pod("default", "a")
        assert bound["spec"]["nodeName"] == "n1"
        assert predicted(bound) == {
            "tencent.com/predicate-gpu-idx-0": "0",
            "tencent.com/predicate-gpu-idx-1": "1",
            PREDICATE_NODE_ANNOTATION: "n1",
        }
        annotations = bound["metadata"]["annotations"]
        assert annotations[GPU_ASSIGNED_ANNOTATION] == "false"
        assert len(annotations[PREDICATE_TIME_ANNOTATION]) == 19, "nanoseconds since the epoch"
        assert [method for method, path in cluster.requests if "/pods/a" in path] == ["POST"]


async def test_two_binds_of_one_pod_bind_it_once() -> None:
    """Of binds of the same pod at the same time, to one node or two, one wins."""
    pod = raw_pod("a", (30, 4))
    async with fake_cluster(raw_node("n1"), raw_node("n2"), pods=[pod]) as cluster:
        async with running_extender(cluster) as asker, asyncio.TaskGroup() as group:
            tasks = [group.create_task(asker.bind(pod, node)) for node in ("n1", "n2", "n1")]
        errors = [task.result() for task in tasks]
        assert errors.count("") >= 1
        assert all(not error or "under way" in error or "already" in error for error in errors)
        assert sum(request[1].endswith("/binding") for request in cluster.requests) == 1


async def test_a_bind_that_is_repeated_succeeds_and_one_of_a_pod_that_was_replaced_is_refused() -> None:
    """The scheduler may ask again after its own timeout: the pod is where it asked for. Where another pod bears the name by
    now, nothing is reserved; neither writes anything."""
    pod = raw_pod("a", (30, 4))
    async with fake_cluster(raw_node("n1"), pods=[pod]) as cluster, running_extender(cluster) as asker:
        older = {**pod, "metadata": {**pod["metadata"], "uid": "uid-of-before"}}
        assert "another pod has this name" in await asker.bind(older, "n1")
        assert (cluster.writes(), asker.parts.state.reservations()) == ([], [])
        assert [await asker.bind(pod, "n1") for _ in range(2)] == ["", ""]
        assert cluster.writes() == ["POST"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/scheduler/filter", b"{", 200, "no JSON"),
        ("/scheduler/filter", b"[1]", 200, "Expected `object`"),
        ("/scheduler/filter", {"Pod": None, "NodeNames": []}, 200, "Pod"),
        ("/scheduler/filter", {"Pod": raw_pod("a", (30, 4))}, 200, "neither Nodes nor NodeNames"),
        ("/scheduler/bind", {"PodName": "a"}, 200, "PodNamespace"),
        ("/scheduler/priorities", b"nothing", 400, "no JSON"),
        ("/scheduler/preemption", {"Pod": raw_pod("a", (30, 4)), "NodeNameToVictims": [1]}, 400, "NodeNameToVictims"),
    ],
)
async def test_a_malformed_request_is_reported_what_is_wrong(path: str, body: Any, status: int, words: str) -> None:
    """In the field Error where the answer has one, else with status 400; and the extender goes on."""
    async with fake_cluster(raw_node("n1")) as cluster, running_extender(cluster) as asker:
        got, answer = await asker.post(path, body)
        assert got == status
        assert words in (answer["Error"] if isinstance(answer, dict) else answer)
        assert (await asker.get("/healthz"))[0] == 200


async def test_gpu_admission_scenario_with_its_filter() -> None:
    """gpu-admission's own test: three nodes of two GPUs and eight blocks, four pods that are filtered and bound by the
    scheduler one after another, go to the nodes that it documents. Each answer is exactly one node."""
    counts = {VCORE_RESOURCE: "200", VMEMORY_RESOURCE: "8"}
    nodes = [
        {"metadata": {"name": f"testnode{i}"}, "status": {"capacity": counts, "allocatable": counts}} for i in range(3)
    ]
    requests = [[(10, 1), (10, 1)], [(100, 3), (80, 3)], [(200, 8), (0, 0)], [(10, 2), (0, 0)]]
    expected = ["testnode0", "testnode1", "testnode2", "testnode0"]
    async with fake_cluster(*nodes) as cluster, running_extender(cluster, reserve="filter") as asker:
        for number, (containers, node) in enumerate(zip(requests, expected, strict=True)):
            pod = raw_pod(f"pod-{number}", namespace="test-ns")
            pod["spec"]["containers"] = [
                raw_container(f"container-{i}", *request) for i, request in enumerate(containers)
            ]
            cluster.put("pods", pod)
            args = {"Pod": pod, "Nodes": {"items": nodes}, "NodeNames": None}
            _, answer = await asker.post("/scheduler/predicates", args)
            assert answer["Error"] == ""
            assert [item["metadata"]["name"] for item in answer["Nodes"]["items"]] == [node]
            assert len(answer["FailedNodes"]) + len(answer["FailedAndUnresolvableNodes"]) == 2
            assert (
                cluster.pod("test-ns", pod["metadata"]["name"])["metadata"]["annotations"][PREDICATE_NODE_ANNOTATION]
                == node
            )
            cluster.change("pods", f"test-ns/pod-{number}", lambda raw, node=node: raw["spec"].update(nodeName=node))
            await eventually(
                lambda number=number: any(
                    r.pod == f"pod-{number}" and r.stage != "assumed" for r in asker.parts.state.reservations()
                )
            )


@pytest.mark.parametrize(("reserve", "fitting", "warnings"), [("bind", ["n1"], 1), ("filter", [], 0)])
async def test_a_scheduler_that_only_filters_is_warned_of_where_binds_reserve(
    reserve: str, fitting: list[str], warnings: int
) -> None:
    """gpu-admission's policy files name no bind verb: of two pods that fit once both pass. Once, with the right setting."""
    pods = [raw_pod("a", (60, 8)), raw_pod("b", (60, 8))]
    with capture_logs() as logs:
        async with (
            fake_cluster(raw_node("n1", gpus=1), pods=pods) as cluster,
            running_extender(cluster, reserve=reserve) as asker,
        ):
            assert (await asker.filter(pods[0], ["n1"]))["NodeNames"] == ["n1"]
            assert (await asker.filter(pods[1], ["n1"]))["NodeNames"] == fitting
            for name in ("a", "b"):
                cluster.change("pods", f"default/{name}", lambda raw: raw["spec"].update(nodeName="n1"))
            await eventually(lambda: not asker.parts.pods.unscheduled_pods())
    found = [one for one in logs if one["event"] == "scheduler_binds_by_itself"]
    assert len(found) == warnings and all("extender.reserve: filter" in one["cure"] for one in found)


async def test_a_scheduler_that_binds_by_the_extender_is_not_warned_of() -> None:
    """The pod has its node by this extender."""
    with capture_logs() as logs:
        async with fake_cluster(raw_node("n1", gpus=2)) as cluster, running_extender(cluster) as asker:
            pod = raw_pod("a", (60, 8))
            cluster.put("pods", pod)
            await eventually(lambda: len(asker.parts.pods.unscheduled_pods()) == 1)
            assert (await asker.filter(pod, ["n1"]))["NodeNames"] == ["n1"]
            assert await asker.bind(pod, "n1") == ""
            await eventually(lambda: not asker.parts.pods.unscheduled_pods())
    assert "scheduler_binds_by_itself" not in {one["event"] for one in logs}


async def test_what_filter_sets_aside_is_of_the_last_answer_and_expires_when_the_pod_is_never_bound() -> None:
    """With reserve=filter: a pod that is asked about twice was not bound the first time. After its time the GPUs are free,
    and the annotations gone."""
    pods = [raw_pod("a", (60, 8)), raw_pod("b", (60, 8))]
    clock = FakeClock()
    async with (
        fake_cluster(raw_node("n1", gpus=1), pods=pods) as cluster,
        running_extender(cluster, reserve="filter", clock=clock) as asker,
    ):
        for _ in range(2):
            assert (await asker.filter(cluster.pod("default", "a"), ["n1"]))["NodeNames"] == ["n1"]
        assert len(asker.parts.state.reservations()) == 1
        assert (await asker.filter(pods[1], ["n1"]))["NodeNames"] == []
        clock.now += BindTiming().assume_s
        await eventually(lambda: asker.parts.state.reservations() == [])
        assert (await asker.filter(pods[1], ["n1"]))["NodeNames"] == ["n1"]
        await eventually(lambda: predicted(cluster.pod("default", "a")) == {})
        assert "gpushare_extender_reservations_expired_total 1.0" in (await asker.get("/metrics"))[1]
