"""Several embedded nodes on one API server, and the command that runs them."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from gpushare_agent.core.model.errors import AgentError, Rejected
from gpushare_agent.sandbox import command as app
from gpushare_agent.sandbox.command import node_flags
from gpushare_agent.sandbox.control import Request
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.manifests import ManifestError
from gpushare_agent.sandbox.render import pod_line, print_document
from tests.extender.support_extender_nodes import ClusterUnderTest, open_cluster
from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox import CORE, container, controller_of, pod
from tests.sandbox.support_sandbox_cli import document_of, live, read_until, registered, sandbox


async def test_pods_go_to_the_first_node_that_fits_and_run_there() -> None:
    """Each node has its kubelet; what does not fit on any waits, with how many nodes lack what."""
    async with open_cluster("a", "b") as cluster, cluster.with_plugins(a=10, b=20):
        for name, cores in (("one", 8), ("two", 8), ("three", 12), ("four", 2)):
            cluster.api.create_pod(pod(name, container(cores=cores)))
        for name in ("one", "two", "three", "four"):
            await cluster.nodes[0].wait_phase(name, "Running")
        assert {name: cluster.node_of(name) for name in ("one", "two", "three", "four")} == {
            "one": "a", "two": "b", "three": "b", "four": "a",
        }  # fmt: skip
        held = {node.name: sum(len(r.ids) for r in node.active_records()) for node in cluster.nodes}
        assert held == {"a": 10, "b": 20}
        cluster.api.create_pod(pod("late", container(cores=1)))
        await cluster.wait_until(lambda: cluster.condition_of("late"), "the scheduler's word")
        assert cluster.condition_of("late")["message"] == f"0/2 nodes are available: 2 Insufficient {CORE}."
        cluster.api.delete_pod("default", "two", grace_period_s=0)
        assert await cluster.wait_bound("late") == "b"


async def test_a_node_hears_only_of_its_own_pods() -> None:
    """With many nodes not every change may wake every kubelet."""
    async with open_cluster("a", "b") as cluster, cluster.with_plugins(a=4, b=4):
        changes = {name: cluster.api.pods_by_node.signal_of(name).count for name in ("a", "b")}
        cluster.api.create_pod(pod("mine", container(cores=4)))
        await cluster.nodes[0].wait_phase("mine", "Running")
        assert cluster.api.pods_by_node.signal_of("a").count > changes["a"]
        assert cluster.api.pods_by_node.signal_of("b").count == changes["b"]
        cluster.api.delete_pod("default", "mine", grace_period_s=0)
        assert cluster.api.pods_by_node.of("a") == []


# --- the command ---


def parsed(*words: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    return parser.parse_known_args(words)


def test_the_gpus_of_each_node_are_given_in_turn() -> None:
    """Kinds of one node are joined by a plus; all but the first get a web port of their own."""
    first, second, third = node_flags(*parsed("--nodes", "3", "--node-gpus", "2x24576+1x81920,4x16384"))
    assert first == ("--simulated.gpus=3", "--simulated.gpu-memory-mib=24576,24576,81920")
    assert second[:2] == ("--simulated.gpus=4", "--simulated.gpu-memory-mib=16384,16384,16384,16384")
    assert third[:2] == first and third[2].startswith("--web.port=") and third[2] != second[2]
    assert node_flags(*parsed()) == ((),)
    assert len(node_flags(*parsed("--node-gpus", "1x1024,1x2048"))) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--nodes", "0"), "there can be 1 to 32"),
        (("--nodes", "33"), "there can be 1 to 32"),
        (("--nodes", "1", "--node-gpus", "1x1024,1x1024"), "2 entries for 1 nodes"),
        (("--node-gpus", "8"), "'8' must be COUNTxMIB"),
        (("--node-gpus", "0x1024"), "must be COUNTxMIB"),
        (("--node-gpus", "64x1024+1x1024"), "has 65 GPUs"),
        (("--node-gpus", "1x1024", "--gpus=2"), "leave out --gpus"),
    ],
)
def test_nodes_and_gpus_that_cannot_be_are_refused(words: tuple[str, ...], why: str) -> None:
    """Before anything is started."""
    with pytest.raises(ManifestError, match=why):
        node_flags(*parsed(*words))


@asynccontextmanager
async def open_controller(*names: str) -> AsyncIterator[tuple[SandboxController, ClusterUnderTest]]:
    """Nodes without agents."""
    async with open_cluster(*names) as cluster:
        yield SandboxController(nodes=tuple(map(controller_of, cluster.nodes))), cluster


async def test_a_command_for_one_of_several_nodes_must_say_which() -> None:
    """The names are in the complaint."""
    async with open_controller("a", "b") as (controller, cluster):
        for request, why in (
            ({}, "name one with --node \\(a, b\\)"),
            ({"node": "c"}, "there is no node 'c': there are a, b"),
        ):
            with pytest.raises(Rejected, match=why):
                await controller.handle(Request(command="fail-gpu", gpu=0, **request), 1)
        with pytest.raises(AgentError, match="started without --extender"):
            await controller.handle(Request(command="kill-extender"), 1)
        answer = await controller.handle(Request(command="fail-gpu", gpu=1, node="b"), 1)
        assert answer["lines"] == ["GPU 1 is lost"]
        assert [node.paths.faults.exists() for node in cluster.nodes] == [False, True]
        first = cluster.nodes[0].kubelet.runtime
        await controller.handle(Request(command="restart-kubelet", node="b"), 1)
        assert cluster.nodes[0].kubelet.runtime is first


async def test_the_document_of_several_nodes_says_where_each_pod_is(capsys: pytest.CaptureFixture[str]) -> None:
    """And so do the table and the line for a pipe; a single node stands under its old name, too."""
    async with open_controller("a", "b") as (controller, cluster), cluster.with_plugins(a=1, b=9):
        cluster.api.create_pod(pod("p", container(cores=5)))
        await cluster.nodes[0].wait_phase("p", "Running")
        document = await controller.document()
        assert [node["name"] for node in document["nodes"]] == ["a", "b"] and "node" not in document
        (shown,) = document["pods"]
        assert shown["node"] == "b"
        assert shown["containers"][0]["pid"] is not None
        assert pod_line(shown, has_node=True).startswith("pod default/p Running on b [")
        print_document(document, "table")
        text = capsys.readouterr().out
        assert "a: its agent has not answered yet\n" in text and "\nb: its agent" in text and "  NODE\n" in text
    async with open_controller("a") as (controller, _):
        document = await controller.document()
        assert document["node"] == document["nodes"][0]


@pytest.mark.slow
async def test_the_whole_command_with_two_nodes_and_the_extender(short_dir: Path) -> None:
    """What fits by count and on no GPU waits with the extender's reason; the rest runs, and it is said where."""
    shares = [pod(f"share-{n}", container("main", cores=60, blocks=8)) for n in range(4)]
    (short_dir / "pods.yaml").write_text(yaml.safe_dump_all(shares))
    done = await sandbox(
        *("--once", "-o", "json", "--nodes", "2", "--node-gpus", "2x16384,1x24576", "--extender"),
        *("--apply", short_dir / "pods.yaml", "--state-dir", short_dir / "s", "--port", "0"),
    )
    assert done.code == 1, done.err
    document = json.loads(done.out)
    assert [len(node["gpus"]) for node in document["nodes"]] == [2, 1]
    asked_at = [where for node in document["nodes"] for where in node["addresses"].values()]
    assert len(set(asked_at)) == 4  # web and control socket of each
    assert sorted(shown["node"] for shown in document["pods"]) == ["", "sandbox-0", "sandbox-0", "sandbox-1"]
    (waits,) = (shown for shown in document["pods"] if not shown["node"])
    assert (waits["phase"], waits["reason"]) == ("Pending", "Unschedulable")
    assert f"1 Insufficient {CORE}" in waits["message"] and "no GPU has more than 40 cores free" in waits["message"]
    assert f"default/{waits['name']} is Pending: Unschedulable" in done.err
    assert not (short_dir / "s").exists()


async def test_pods_wait_while_a_killed_extender_is_started_again(short_dir: Path) -> None:
    """None is lost, and none goes past it."""
    state = short_dir / "s"
    (short_dir / "pod.yaml").write_text(yaml.safe_dump(pod("p", container("main", cores=60, blocks=8))))
    async with live(state, "--extender", "--samples", "none", "--gpus", "1") as process:
        await read_until(process, "Ctrl-C ends the sandbox")
        await registered(state)
        killed = await sandbox("kill-extender", "--state-dir", state)
        assert killed.out == "the extender was killed; the sandbox starts it again\n", killed.err
        assert (await sandbox("apply", "-f", short_dir / "pod.yaml", "--state-dir", state)).code == 0
        await read_until(process, "pod default/p Running")
        (shown,) = (await document_of(state))["pods"]
        assert shown["annotations"]["tencent.com/predicate-node"] == shown["node"] == "sandbox"


@needs_processes
async def test_exec_and_deletion_find_the_node_of_the_pod() -> None:
    """A person names the pod only."""
    async with open_controller("a", "b") as (controller, cluster), cluster.with_plugins(a=1, b=9):
        cluster.api.create_pod(pod("p", container(cores=5)))
        await cluster.nodes[0].wait_phase("p", "Running")
        process = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
        try:
            answer = await controller.handle(Request(command="exec", pod="p"), process.pid)
            uid = cluster.api.pod("default", "p")["metadata"]["uid"]
            run = cluster.nodes[1].kubelet.runtime.find(uid, "main")
            assert answer["ok"] and run is not None
            assert process.pid in cluster.nodes[1].kubelet.runtime.pids(run)
        finally:
            process.kill()
            await process.wait()
        await controller.handle(Request(command="delete", names=["p"]), 1)
        await cluster.wait_until(lambda: cluster.api.find_pod("default", "p") is None, "its end")
