"""Several embedded nodes on one API server, and the scheduler that asks an extender."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from gpushare_agent.apps import sandbox as app
from gpushare_agent.apps.sandbox import _node_flags
from gpushare_agent.model.errors import AgentError, Rejected
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.card_faults import CardFaults
from gpushare_agent.sandbox.cluster import EmbeddedCluster
from gpushare_agent.sandbox.manifests import ManifestError
from gpushare_agent.sandbox.node_report import ReportedNode
from gpushare_agent.sandbox.node_view import pod_line, print_document
from gpushare_agent.sandbox.workbench import NodeBench, Workbench
from tests.support_extender_nodes import (
    DEADLINE_S,
    ToldExtender,
    condition_of,
    node_of,
    open_cluster,
    open_told,
    serving,
    wait_bound,
    wait_cluster,
)
from tests.support_sandbox import CORE, MEMORY, SmallPlugin, container, device_ids, open_plugin, pod, wait_phase
from tests.support_sandbox_api import open_client
from tests.support_sandbox_cli import document_of, live, read_until, registered, sandbox

PODS = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


@asynccontextmanager
async def with_plugins(cluster: EmbeddedCluster, **cores: int) -> AsyncIterator[None]:
    """By node: how many cores its plugin offers."""
    async with AsyncExitStack() as stack:
        for node in cluster.nodes:
            devices = device_ids(f"GPU-{node.name}", count=cores[node.name])
            await stack.enter_async_context(open_plugin(node, SmallPlugin(CORE, devices)))
        yield


# --- nodes ---


async def test_pods_go_to_the_first_node_that_fits_and_run_there() -> None:
    """Each node has its kubelet; what does not fit on any waits, with how many nodes lack what."""
    async with open_cluster("a", "b") as cluster, with_plugins(cluster, a=10, b=20):
        for name, cores in (("one", 8), ("two", 8), ("three", 12), ("four", 2)):
            cluster.api.create_pod(pod(name, container(cores=cores)))
        for name in ("one", "two", "three", "four"):
            await wait_phase(cluster.nodes[0], name, "Running")
        assert {name: node_of(cluster, name) for name in ("one", "two", "three", "four")} == {
            "one": "a", "two": "b", "three": "b", "four": "a",
        }  # fmt: skip
        held = {node.name: sum(len(r.ids) for r in node.kubelet.active_records()) for node in cluster.nodes}
        assert held == {"a": 10, "b": 20}
        cluster.api.create_pod(pod("late", container(cores=1)))
        await wait_cluster(cluster, lambda: condition_of(cluster, "late"), "the scheduler's word")
        assert condition_of(cluster, "late")["message"] == f"0/2 nodes are available: 2 Insufficient {CORE}."
        cluster.api.delete_pod("default", "two", grace_period_s=0)
        assert await wait_bound(cluster, "late") == "b"


async def test_a_node_hears_only_of_its_own_pods() -> None:
    """With many nodes not every change may wake every kubelet."""
    async with open_cluster("a", "b") as cluster, with_plugins(cluster, a=4, b=4):
        changes = {name: cluster.api.pods_by_node.signal_of(name).count for name in ("a", "b")}
        cluster.api.create_pod(pod("mine", container(cores=4)))
        await wait_phase(cluster.nodes[0], "mine", "Running")
        assert cluster.api.pods_by_node.signal_of("a").count > changes["a"]
        assert cluster.api.pods_by_node.signal_of("b").count == changes["b"]
        cluster.api.delete_pod("default", "mine", grace_period_s=0)
        assert cluster.api.pods_by_node.of("a") == []


# --- what an extender needs of the API server ---


async def test_a_binding_names_pod_and_node_and_is_taken_once() -> None:
    """A second one, another UID, a missing node and a missing pod are told apart."""
    async with open_client() as client:
        uid = client.api.create_pod(pod("p"))["metadata"]["uid"]

        async def bind(name: str = "p", node: str = "n", uid: str = uid) -> tuple[int, str]:
            body = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "uid": uid},
                "target": {"name": node},
            }
            status, answer = await client.call("POST", f"{PODS}/{name}/binding", body)
            return status, answer.get("message", "")

        assert (await bind(uid="other"))[0] == 409
        assert (await bind(node=""))[0] == 422
        assert (await bind(name="absent"))[0] == 404
        assert await bind() == (201, "")
        status, message = await bind(node="m")
        assert (status, "already assigned to node 'n'" in message) == (409, True)
        assert client.api.pod("default", "p")["spec"]["nodeName"] == "n"


async def test_a_pod_that_is_being_deleted_cannot_be_bound() -> None:
    """As a real API server refuses it: two schedulers, or a scheduler and a person, are often at it."""
    async with open_client() as client:
        raw = client.api.create_pod(pod("p"))
        client.api.store.replace("pods", {**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "now"}})
        status, answer = await client.call("POST", f"{PODS}/p/binding", {"target": {"name": "n"}})
        assert (status, answer["reason"]) == (409, "Conflict")


async def test_a_lease_is_replaced_only_at_the_version_that_was_read() -> None:
    """That is what an election stands on."""
    async with open_client() as client:
        lease = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "one"}}
        status, made = await client.call("POST", LEASES, lease)
        assert (status, made["apiVersion"], made["kind"]) == (201, "coordination.k8s.io/v1", "Lease")
        assert (await client.call("POST", LEASES, lease))[0] == 409
        taken = {**made, "spec": {"holderIdentity": "two"}}
        assert (await client.call("PUT", f"{LEASES}/l", taken))[0] == 200
        assert (await client.call("PUT", f"{LEASES}/l", {**made, "spec": {"holderIdentity": "three"}}))[0] == 409
        assert (await client.call("GET", f"{LEASES}/l"))[1]["spec"] == {"holderIdentity": "two"}


async def test_a_config_map_is_watched_by_its_name() -> None:
    """As the quota is."""
    maps = "/api/v1/namespaces/kube-system/configmaps"
    async with open_client() as client:
        await client.call("POST", maps, {"metadata": {"name": "other"}, "data": {}})
        _, listed = await client.call("GET", maps, fieldSelector="metadata.name=gpuquota")
        assert (listed["kind"], listed["items"]) == ("ConfigMapList", [])
        version = listed["metadata"]["resourceVersion"]
        async with client.watch(maps, resourceVersion=version, fieldSelector="metadata.name=gpuquota") as watch:
            await client.call("POST", maps, {"metadata": {"name": "third"}, "data": {}})
            await client.call("POST", maps, {"metadata": {"name": "gpuquota"}, "data": {"a": "{}"}})
            kind, raw = await watch.next()
        assert (kind, raw["metadata"]["name"], raw["data"]) == ("ADDED", "gpuquota", {"a": "{}"})


# --- the scheduler that asks an extender ---


async def test_only_nodes_that_fit_by_count_are_filtered_and_the_best_score_wins() -> None:
    """The resource fit is the scheduler's own, before the extender's."""
    extender = ToldExtender(score=lambda pod, node: {"b": 3, "c": 7}.get(node, 0))
    async with open_told(extender, ["a", "b", "c"]) as cluster, with_plugins(cluster, a=2, b=10, c=10):
        cluster.api.create_pod(pod("p", container(cores=5)))
        assert await wait_bound(cluster, "p") == "c"
        assert extender.seen == [("filter", "p", ["b", "c"]), ("prioritize", "p", ["b", "c"]), ("bind", "p", "c")]
        await wait_phase(cluster.nodes[0], "p", "Running")


async def test_a_pod_that_the_extender_refuses_waits_with_its_reasons_and_is_tried_again() -> None:
    """It is Pending and Unschedulable, not Failed; what the nodes say stands in its status and in an Event."""
    reasons = {"a": "cores are free on two cards, and it needs one whole card", "b": "no card is healthy"}
    extender = ToldExtender(fits=lambda pod, node: reasons[node])
    async with open_told(extender, ["a", "b", "c"]) as cluster, with_plugins(cluster, a=10, b=10, c=1):
        cluster.api.create_pod(pod("p", container(cores=5)))
        await wait_cluster(cluster, lambda: condition_of(cluster, "p"), "the scheduler's word")
        told = condition_of(cluster, "p")
        assert (told["status"], told["reason"]) == ("False", "Unschedulable")
        assert told["message"] == (
            f"0/3 nodes are available: 1 Insufficient {CORE}, 1 cores are free on two cards, and it needs one whole card, "
            "1 no card is healthy."
        )
        assert cluster.api.pod("default", "p")["status"]["phase"] == "Pending"
        assert [e["message"] for e in cluster.api.events() if e["reason"] == "FailedScheduling"] == [told["message"]]
        await wait_cluster(cluster, lambda: len(extender.asked("filter", "p")) >= 3, "further tries")
        reasons["b"] = ""
        assert await wait_bound(cluster, "p") == "b"


async def test_what_is_being_bound_counts_as_taken() -> None:
    """The next pod is decided while the bind of the one before is under way."""
    may_bind = asyncio.Event()

    async def before_bind(name: str) -> str:
        if name == "first":
            await may_bind.wait()
        return ""

    extender = ToldExtender(before_bind=before_bind)
    async with open_told(extender, ["a", "b"]) as cluster, with_plugins(cluster, a=10, b=6):
        cluster.api.create_pod(pod("first", container(cores=8)))
        await wait_cluster(cluster, lambda: extender.asked("bind", "first"), "the first bind")
        cluster.api.create_pod(pod("second", container(cores=6)))
        assert await wait_bound(cluster, "second") == "b"
        assert extender.asked("filter", "second") == [["b"]]
        assert node_of(cluster, "first") == ""
        may_bind.set()
        assert await wait_bound(cluster, "first") == "a"


async def test_a_bind_that_fails_is_told_and_tried_again() -> None:
    """What was taken for it is free meanwhile."""
    errors = ["the node has no such card any more", ""]

    async def before_bind(name: str) -> str:
        return errors.pop(0) if name == "p" else ""

    extender = ToldExtender(before_bind=before_bind)
    async with open_told(extender, ["a"]) as cluster, with_plugins(cluster, a=10):
        cluster.api.create_pod(pod("p", container(cores=10)))
        assert await wait_bound(cluster, "p") == "a"
        assert len(extender.asked("bind", "p")) == 2
        (told,) = [e["message"] for e in cluster.api.events() if e["reason"] == "FailedScheduling"]
        assert "binding to node a: the extender refused to bind: the node has no such card any more" in told


async def test_while_the_extender_is_away_pods_wait_and_are_not_given_up() -> None:
    """It may come later than the nodes, and answer an error at first."""
    extender = ToldExtender(filter_error="this replica does not lead")
    async with open_cluster("a", extender_url=extender.url) as cluster, with_plugins(cluster, a=10):
        extender.cluster = cluster
        cluster.api.create_pod(pod("p", container(cores=10)))
        await wait_cluster(cluster, lambda: condition_of(cluster, "p").get("reason") == "SchedulerError", "a word")
        assert "cannot be asked to filter" in condition_of(cluster, "p")["message"]
        async with serving(extender):
            await wait_cluster(cluster, lambda: "does not lead" in condition_of(cluster, "p")["message"], "its error")
            extender.filter_error = ""
            assert await wait_bound(cluster, "p") == "a"


async def test_a_pod_that_asks_for_no_card_needs_no_extender() -> None:
    """kube-scheduler sends it only pods with the resources that it manages."""
    async with open_told(ToldExtender(), ["a"]) as cluster, with_plugins(cluster, a=1):
        cluster.api.create_pod(pod("plain"))
        await wait_phase(cluster.nodes[0], "plain", "Running")


# --- the command ---


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    return parser.parse_args(words)


def test_the_cards_of_each_node_are_given_in_turn() -> None:
    """Kinds of one node are joined by a plus; all but the first get a web port of their own."""
    first, second, third = _node_flags(parsed("--nodes", "3", "--node-cards", "2x24576+1x81920,4x16384"))
    assert first == ("--simulated.cards=3", "--simulated.card-memory-mib=24576,24576,81920")
    assert second[:2] == ("--simulated.cards=4", "--simulated.card-memory-mib=16384,16384,16384,16384")
    assert third[:2] == first and third[2].startswith("--web.port=") and third[2] != second[2]
    assert _node_flags(parsed()) == ((),)
    assert len(_node_flags(parsed("--node-cards", "1x1024,1x2048"))) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--nodes", "0"), "there can be 1 to 32"),
        (("--nodes", "33"), "there can be 1 to 32"),
        (("--nodes", "1", "--node-cards", "1x1024,1x1024"), "2 entries for 1 nodes"),
        (("--node-cards", "8"), "'8' must be COUNTxMIB"),
        (("--node-cards", "0x1024"), "must be COUNTxMIB"),
        (("--node-cards", "64x1024+1x1024"), "has 65 cards"),
        (("--node-cards", "1x1024", "--cards", "2"), "leave out --cards"),
    ],
)
def test_nodes_and_cards_that_cannot_be_are_refused(words: tuple[str, ...], why: str) -> None:
    """Before anything is started."""
    with pytest.raises(ManifestError, match=why):
        _node_flags(parsed(*words))


@asynccontextmanager
async def open_bench(*names: str) -> AsyncIterator[tuple[Workbench, EmbeddedCluster]]:
    """Nodes without agents."""
    async with open_cluster(*names) as cluster:
        benches = [
            NodeBench(
                shown=ReportedNode(node=node, cards=(), vcore=CORE, vmemory=MEMORY, memory_block_mib=256),
                agent=AgentProcess([], node.paths.agent_log, lambda _: None),
                faults=CardFaults(node.paths.faults, 2),
            )
            for node in cluster.nodes
        ]
        yield Workbench(nodes=tuple(benches)), cluster


async def test_a_command_for_one_of_several_nodes_must_say_which() -> None:
    """The names are in the complaint."""
    async with open_bench("a", "b") as (bench, cluster):
        for request, why in (
            ({}, "say which with --node \\(a, b\\)"),
            ({"node": "c"}, "there is no node 'c': there are a, b"),
        ):
            with pytest.raises(Rejected, match=why):
                await bench.handle({"command": "fail-card", "card": 0, **request}, 1)
        answer = await bench.handle({"command": "fail-card", "card": 1, "node": "b"}, 1)
        assert answer["lines"] == ["card 1 is lost: GPU is lost"]
        assert [node.paths.faults.exists() for node in cluster.nodes] == [False, True]
        first = cluster.nodes[0].kubelet.runtime
        await bench.handle({"command": "restart-kubelet", "node": "b"}, 1)
        assert cluster.nodes[0].kubelet.runtime is first


async def test_the_document_of_several_nodes_says_where_each_pod_is(capsys: pytest.CaptureFixture[str]) -> None:
    """And so do the table and the line for a pipe; a single node stands under its old name, too."""
    async with open_bench("a", "b") as (bench, cluster), with_plugins(cluster, a=1, b=9):
        cluster.api.create_pod(pod("p", container(cores=5)))
        await wait_phase(cluster.nodes[0], "p", "Running")
        document = bench.document()
        assert [node["name"] for node in document["nodes"]] == ["a", "b"] and "node" not in document
        (shown,) = document["pods"]
        assert shown["node"] == "b"
        assert shown["containers"][0]["pid"] is not None
        assert pod_line(shown, has_node=True).startswith("pod default/p Running on b [")
        print_document(document, "table")
        text = capsys.readouterr().out
        assert "Cards of a" in text and "Cards of b" in text and " node " in text
    async with open_bench("a") as (bench, _):
        document = bench.document()
        assert document["node"] == document["nodes"][0]


async def test_the_whole_command_with_two_nodes_and_the_extender() -> None:
    """What fits by count and on no card waits with the extender's reason; the rest runs, and it is said where."""
    folder = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        shares = [pod(f"share-{n}", container("main", cores=60, blocks=8)) for n in range(4)]
        (folder / "pods.yaml").write_text(yaml.safe_dump_all(shares))
        done = await sandbox(
            *("--once", "--format", "json", "--nodes", "2", "--node-cards", "2x16384,1x24576", "--extender"),
            *("--apply", folder / "pods.yaml", "--state-dir", folder / "s", "--port", "0"),
        )
        assert done.code == 1, done.err
        document = json.loads(done.out)
        assert [len(node["cards"]) for node in document["nodes"]] == [2, 1]
        assert sorted(shown["node"] for shown in document["pods"]) == ["", "sandbox-0", "sandbox-0", "sandbox-1"]
        (waits,) = (shown for shown in document["pods"] if not shown["node"])
        assert (waits["phase"], waits["reason"]) == ("Pending", "Unschedulable")
        assert (
            f"1 Insufficient {CORE}." in waits["message"] and "no card has more than 40 cores free" in waits["message"]
        )
        assert f"default/{waits['name']} is Pending: Unschedulable" in done.err
        assert not (folder / "s").exists()
    finally:
        shutil.rmtree(folder)


async def test_pods_wait_while_a_killed_extender_is_started_again() -> None:
    """None is lost, and none goes past it."""
    folder = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    state = folder / "s"
    try:
        (folder / "pod.yaml").write_text(yaml.safe_dump(pod("p", container("main", cores=60, blocks=8))))
        async with live(state, "--extender", "--samples", "none", "--cards", "1") as process:
            await read_until(process, "Ctrl-C ends the sandbox")
            await registered(state)
            killed = await sandbox("kill-extender", "--state-dir", state)
            assert killed.out == "the extender was killed; the sandbox starts it again\n", killed.err
            assert (await sandbox("apply", "-f", folder / "pod.yaml", "--state-dir", state)).code == 0
            await read_until(process, "pod default/p Running")
            (shown,) = (await document_of(state))["pods"]
            assert shown["annotations"]["tencent.com/predicate-node"] == shown["node"] == "sandbox"
    finally:
        shutil.rmtree(folder)


async def test_there_is_nothing_to_kill_without_an_extender() -> None:
    """It says why."""
    async with open_bench("a") as (bench, _):
        with pytest.raises(AgentError, match="started without --extender"):
            await bench.handle({"command": "kill-extender"}, 1)


async def test_exec_and_deletion_find_the_node_of_the_pod() -> None:
    """A person names the pod only."""
    async with open_bench("a", "b") as (bench, cluster), with_plugins(cluster, a=1, b=9):
        cluster.api.create_pod(pod("p", container(cores=5)))
        await wait_phase(cluster.nodes[0], "p", "Running")
        process = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        try:
            answer = await bench.handle({"command": "exec", "pod": "p", "namespace": "default"}, process.pid)
            uid = cluster.api.pod("default", "p")["metadata"]["uid"]
            run = cluster.nodes[1].kubelet.runtime.find(uid, "main")
            assert answer["ok"] and run is not None
            assert process.pid in cluster.nodes[1].kubelet.runtime.pids(run)
        finally:
            process.kill()
            async with asyncio.timeout(DEADLINE_S):
                await process.wait()
        await bench.handle({"command": "delete", "names": ["p"], "namespace": "default"}, 1)
        await wait_cluster(cluster, lambda: cluster.api.find_pod("default", "p") is None, "its end")
