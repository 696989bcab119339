"""`inspect`: of one node by its agent, of the cluster by an API server, both on real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.commands import main
from gpushare_agent.core.model.errors import NotFound, Rejected, Unavailable
from gpushare_agent.kubectl.plugin import PLUGIN_LINE
from tests.agent.support_agent import open_agent
from tests.cli.support_cli import (
    agent_answers,
    api_server,
    at_terminal,
    busy_node,
    call,
    raw_agent_pod,
    raw_gpu,
    raw_list,
    raw_node,
)
from tests.cluster.support_kube import raw_pod, write_kubeconfig
from tests.fakes.api_server import json_server
from tests.kit.support_http import free_port
from tests.sandbox.support_sandbox import container, open_test_node, pod
from tests.support_deadline import DEADLINE_S

MIB = 1024 * 1024
AGENTS = "/api/v1/namespaces/gpushare-system/pods"
NODE_THROUGH_POD = f"{AGENTS}/http:agent-n1:5678/proxy/api/v1/node"


async def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it prints."""
    assert await call("inspect", *words) == 0
    return capsys.readouterr().out


def two_nodes() -> dict[str, Any]:
    """Node a with two GPUs and three pods, one of which lies about what it has; node b without an annotation, node c
    without GPUs."""
    lies = {"metadata": {"annotations": {"tencent.com/predicate-gpu-idx-0": "0", "tencent.com/gpu-assigned": "true"}}}
    gpus = [raw_gpu(0, links=["X", "PIX"]), raw_gpu(1, is_healthy=False, links=["PIX", "X"])]
    return {
        "/api/v1/nodes": raw_list(
            [
                raw_node("b", None, core="200", memory="192"),
                raw_node("a", gpus, held={"uid-train": {"1": [30, 4]}}),
                raw_node("c", None),
            ]
        ),
        "/api/v1/pods": raw_list(
            [
                raw_pod("train", **lies, spec={"nodeName": "a"}),
                raw_pod("forged", **lies, spec={"nodeName": "a"}),
                raw_pod("waits", spec={"nodeName": ""}),
                raw_pod("elsewhere", spec={"nodeName": "unknown"}),
                raw_pod("no-share", cores=None, spec={"nodeName": "a"}),
                {"metadata": {"name": "broken"}, "spec": {"containers": 7}},
            ]
        ),
    }


# --- one node ---


async def test_one_node_is_reported_by_its_agent(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each GPU, one for all of them, one for the end."""
    async with json_server(agent_answers(busy_node())) as agent:
        lines = (await inspected(capsys, f"--server={agent.url}")).splitlines()
    rows = [line.split("  ") for line in lines]
    assert lines[0].split() == ["NODE", "GPU", "NAME", "HEALTH", "GPU", "CORES", "MEMORY", "GiB", "REASON"]
    assert [cell.strip() for cell in rows[1] if cell] == [
        *("n1", "0", "NVIDIA H100 80GB HBM3", "Healthy", "60/100 (60 %)", "6/24 (25 %)")
    ]
    assert [re.findall(r"\d+/100", line) for line in lines[1:5]] == [["60/100"], ["100/100"], ["0/100"], ["0/100"]]
    assert " Unhealthy " in lines[2] and lines[2].endswith("  Xid 79: the GPU fell off the bus")
    assert " Cordoned " in lines[3] and lines[3].endswith("  fan replaced on Monday")
    assert lines[5].split() == ["all", "160/400", "(40", "%)", "30/96", "(31", "%)"]
    assert (
        lines[-1] == "4 GPUs of the node, 1 unhealthy, 1 cordoned: "
        "allocated 160/400 GPU cores (40 %), memory 30/96 GiB (31 %)"
    )


async def test_a_gpu_that_is_cordoned_and_ill_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    """In table and document; without GPUs out of service there is no column for reasons."""
    document = busy_node()
    document["gpus"][1]["cordoned"] = "loud"
    async with json_server(agent_answers(document)) as agent:
        lines = (await inspected(capsys, f"--server={agent.url}")).splitlines()
        shown = json.loads(await inspected(capsys, f"--server={agent.url}", "--output=json"))["nodes"][0]["gpus"]
        agent.script.answers["/api/v1/node"] = document | {"gpus": [document["gpus"][0]]}
        assert "REASON" not in await inspected(capsys, f"--server={agent.url}")
    assert " Cordoned, Unhealthy " in lines[2]
    assert lines[2].endswith("  Cordoned: loud; Unhealthy: Xid 79: the GPU fell off the bus")
    assert [gpu["health_reason"] for gpu in shown] == ["", "Xid 79: the GPU fell off the bus", "", ""]


async def test_a_narrow_terminal_breaks_no_word() -> None:
    """Numbers stay in one line, and why a GPU is out of service stands below the table."""
    reason = "Xid 79 (GPU has fallen off the bus); waits for a reset of the GPU, or for `gpushare-agent uncordon 1`"
    document = busy_node()
    document["gpus"][1]["health_reason"] = reason
    async with (
        json_server(agent_answers(document)) as agent,
        at_terminal("inspect", "-d", f"--server={agent.url}", columns=80) as terminal,
    ):
        assert await terminal.wait_end() == 0
        await terminal.wait_shown(lambda text: "4 GPUs of the node" in text)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == [
        *["1", "NVIDIA", "H100", "80GB", "HBM3", "Unhealthy", "100/100", "(100", "%)", "24/24", "(100", "%)"]
    ]
    words = " ".join(lines).split()
    assert f"n1 GPU 1: {reason}" in " ".join(words)


async def test_a_very_narrow_terminal_keeps_every_column() -> None:
    """The lines run on; names and states are not broken letter by letter."""
    async with (
        json_server(agent_answers(busy_node())) as agent,
        at_terminal("inspect", "-d", f"--server={agent.url}", columns=40) as terminal,
    ):
        assert await terminal.wait_end() == 0
        await terminal.wait_shown(lambda text: "4 GPUs of the node" in text)
    words = set(re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).split())
    assert {"NODE", "n1", "Unhealthy", "NAMESPACE", "CONTAINER", "evaluator", "REMARK"} <= words


async def test_the_document_of_inspect_says_what_the_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON and as YAML, with the containers whether the details were asked for or not."""
    async with json_server(agent_answers(busy_node())) as agent:
        short = await inspected(capsys, f"--server={agent.url}")
        detailed = await inspected(capsys, f"--server={agent.url}", "-d")
        document = json.loads(await inspected(capsys, f"--server={agent.url}", "--output=json"))
        assert yaml.safe_load(await inspected(capsys, f"--server={agent.url}", "--output=yaml")) == document
    rows = [line.split() for line in detailed.splitlines()]
    assert ["n1", "0", "default", "train", "trainer", "40", "4"] in rows
    assert ["n1", "1", "default", "big", "main", "100", "24"] in rows
    assert "trainer" not in short

    assert document["schema"] == 2
    (node,) = document["nodes"]
    assert node["gpus"][0] == {
        "index": 0,
        "uuid": "GPU-0",
        "name": "NVIDIA H100 80GB HBM3",
        "is_healthy": True,
        "health_reason": "",
        "cordoned": None,
        "cores": {"allocated": 60, "capacity": 100},
        "memory": {"allocated_bytes": 6144 * MIB, "capacity_bytes": 24576 * MIB},
    }
    assert node["gpus"][2]["cordoned"] == "fan replaced on Monday"
    assert [one["container"] for one in node["containers"]] == ["main", "evaluator", "trainer"]
    assert node["unplaced"] == {"containers": 0, "cores": 0, "memory_bytes": 0}
    assert document["totals"] == node["totals"]
    assert document["totals"]["cores"] == {"allocated": 160, "capacity": 400}


# --- all nodes ---


async def test_all_nodes_are_reported_by_the_api_server(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sorted by name; what is unplaced is shown and in no GPU's sum; a node without an annotation by its capacity."""
    async with api_server(short_dir, two_nodes()) as (server, settings):
        out = await inspected(capsys, settings, "--all-nodes")
    rows = [line.split() for line in out.splitlines()]
    assert rows[1] == ["a", "0", "NVIDIA", "H100", "Healthy", "0/100", "(0", "%)", "0/24", "(0", "%)"]
    assert rows[2] == ["1", "NVIDIA", "H100", "Unhealthy", "30/100", "(30", "%)", "1/24", "(4", "%)"]
    assert rows[4][:3] == ["b", "0", "-"]
    assert "a: 1 container with 30 GPU cores and 1 GiB is charged to no GPU; -d lists them" in out
    assert "b: no gpushare-agent/gpus: GPUs of equal size are assumed from the node's capacity" in out
    assert out.splitlines()[-1].startswith("4 GPUs in 2 nodes, 1 unhealthy: allocated 30/400 GPU cores (8 %)")
    assert {request.path for request in server.seen} == {"/api/v1/nodes", "/api/v1/pods"}
    assert all(request.headers["Authorization"] == "Bearer secret" for request in server.seen)


async def test_a_node_of_all_says_what_its_annotation_has(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A MIG instance has NVIDIA's name; where memory is the host's is said once a node, because every GPU of a GB200 is the
    same. That a GPU is out and by whom is there, not why: that is not known, and not nothing."""
    mig = {"label": "0:1", "profile": "1g.10gb", "shares": False}
    gpus = [
        raw_gpu(0, is_healthy=False, cordoned=True, host_memory="numa-node"),
        raw_gpu(1, is_healthy=False, host_memory="numa-node"),
        raw_gpu(4, mig=mig, host_memory=[]),
    ]
    answers = {"/api/v1/nodes": raw_list([raw_node("a", gpus)]), "/api/v1/pods": raw_list([])}
    async with api_server(short_dir, answers) as (_, settings):
        lines = (await inspected(capsys, settings, "--all-nodes")).splitlines()
        shown = json.loads(await inspected(capsys, settings, "--all-nodes", "--output=json"))["nodes"][0]["gpus"]
    assert [line.split()[-7] for line in lines[1:3]] == ["Cordoned", "Unhealthy"]
    assert lines[3].split()[:2] == ["0:1", "NVIDIA"]
    assert [line.partition(" of the host")[0] for line in lines if "memory is" in line] == [
        "a GPU 0, 1: its memory is a NUMA node"
    ]
    assert lines[-1].startswith("2 GPUs of the node, 1 MIG instance, 1 unhealthy, 1 cordoned: ")
    assert [(gpu["is_healthy"], gpu["health_reason"]) for gpu in shown[:2]] == [(False, None), (False, None)]
    assert (shown[2]["index"], shown[2]["mig"]["label"]) == (4, "0:1")


async def test_a_pods_annotation_charges_it_to_no_gpu(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tenant writes it; what the node's agent reports counts, and the details say why a container is charged nowhere."""
    async with api_server(short_dir, two_nodes()) as (_, settings):
        out = await inspected(capsys, settings, "--all-nodes", "-d")
        document = json.loads(await inspected(capsys, settings, "--all-nodes", "--output=json"))
    (line,) = [line for line in out.splitlines() if " forged " in line]
    assert line.split(maxsplit=7)[1] == "-"
    assert line.endswith("the node's agent has not reported it")
    (line,) = [line for line in out.splitlines() if " train " in line]
    assert line.split()[:2] == ["a", "1"]
    assert document["nodes"][0]["unplaced"] == {"containers": 1, "cores": 30, "memory_bytes": 1024 * MIB}
    assert [one["pod"] for one in document["nodes"][0]["containers"]] == ["forged", "train"]


async def test_a_cluster_without_gpus_says_so(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the document is an empty list."""
    empty = {"/api/v1/nodes": raw_list([raw_node("c", None)]), "/api/v1/pods": raw_list([])}
    async with api_server(short_dir, empty) as (_, settings):
        assert "no node has GPUs" in await inspected(capsys, settings, "--all-nodes")
        assert json.loads(await inspected(capsys, settings, "--all-nodes", "--output=json"))["nodes"] == []


async def test_a_missing_right_names_the_users_credentials(short_dir: Path) -> None:
    """Not the agent's, which are not used here."""
    denied = {"message": 'nodes is forbidden: User "me" cannot list resource "nodes"'}
    async with api_server(short_dir, {"/api/v1/nodes": (403, denied)}) as (_, settings):
        with pytest.raises(
            Rejected, match=r'cannot list the nodes: .*User "me".*your own credentials and .*docs/reference/cli.md'
        ):
            await call("inspect", settings, "--all-nodes")


async def test_both_ways_tell_the_same_of_a_real_node(capsys: pytest.CaptureFixture[str]) -> None:
    """The agent by its ledger; the API server by what the agent wrote on the node."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2") as agent:
        for name, limits in (("share", {"cores": 40, "blocks": 16}), ("whole", {"cores": 100, "blocks": 0})):
            await node.start_pods(pod(name, container(**limits)))
        await node.kubelet.wait_for(
            lambda: _is_all_written(node.api.pods(), node.api.node(node.name)), DEADLINE_S, "facts"
        )
        settings = f"--kubeconfig={node.paths.kubeconfig}"
        target = f"--server=http://127.0.0.1:{await agent.parts.observability.web.wait_listening()}"
        capsys.readouterr()
        by_ledger = document_among_logs(await inspected(capsys, settings, target, "--output=json"))
        by_annotations = document_among_logs(await inspected(capsys, settings, "--all-nodes", "--output=json"))
    assert by_annotations == by_ledger
    assert by_ledger["totals"]["cores"] == {"allocated": 140, "capacity": 200}


def document_among_logs(text: str) -> dict[str, Any]:
    """The agent runs in this process and logs to the same place whenever it likes."""
    document: dict[str, Any]
    document, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
    return document


def _is_all_written(pods: list[dict[str, Any]], node: dict[str, Any]) -> bool:
    annotations = node["metadata"].get("annotations", {})
    return "gpushare-agent/gpus" in annotations and {pod["metadata"]["uid"] for pod in pods} == set(
        json.loads(annotations.get("gpushare-agent/allocations", '{"allocations": {}}'))["allocations"]
    )


# --- through the API server ---


async def test_another_nodes_agent_is_asked_through_its_pod(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by label and node, on the port that its container names. `kubectl gpushare inspect n1` is `--node n1`."""
    proxy = f"{AGENTS}/http:agent-n1:9999/proxy/api/v1/node"
    pods = raw_list([raw_agent_pod("n1", port=9999), raw_agent_pod("n1", name="old", phase="Failed")])
    async with api_server(short_dir, {AGENTS: pods, proxy: busy_node()}) as (server, settings):
        assert await call("top", settings, "--once", "n1") == 0
        assert "default/train/trainer" in capsys.readouterr().out
        for command in ("top", "inspect"):
            assert await call(command, "n1", settings, "-o", "json", line=PLUGIN_LINE) == 0
            assert "gpus" in capsys.readouterr().out
    assert [request.path for request in server.seen] == [AGENTS, proxy] * 3
    assert {request.query["labelSelector"] for request in server.seen[::2]} == {"app.kubernetes.io/name=gpushare-agent"}
    assert {request.query["fieldSelector"] for request in server.seen[::2]} == {"spec.nodeName=n1"}


async def test_the_containers_of_one_namespace_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """By `-n`; what is allocated of the GPUs stays."""
    document = busy_node()
    document["containers"][0]["namespace"] = "research"
    async with json_server(agent_answers(document)) as agent:
        for command in ("top", "inspect"):
            words = [command, "-n", "research", "--server", agent.url, "-o", "json"]
            assert await asyncio.to_thread(main, words, {"NODE_NAME": "n1"}) == 0
            shown = json.loads(capsys.readouterr().out)
            node = shown if command == "top" else shown["nodes"][0]
            assert [one["namespace"] for one in node["containers"]] == ["research"]
            assert node["gpus"][0]["cores"] == {"allocated": 60, "capacity": 100}
        words = ["inspect", "-d", "-n", "empty", "--server", agent.url]
        assert await asyncio.to_thread(main, words, {"NODE_NAME": "n1"}) == 0
        assert "no containers to show" in capsys.readouterr().out


async def test_without_a_node_the_only_agent_is_meant(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And with several, their nodes are named."""
    answers = {AGENTS: raw_list([raw_agent_pod("n1")]), NODE_THROUGH_POD: busy_node()}
    async with api_server(short_dir, answers) as (server, settings):
        assert await call("top", settings, "--once", line=PLUGIN_LINE) == 0
        assert "node n1 " in capsys.readouterr().out
        server.script.answers[AGENTS] = raw_list([raw_agent_pod("n2"), raw_agent_pod("n1")])
        with pytest.raises(NotFound, match=r"2 nodes have an agent \(n1, n2\): name one with --node NODE"):
            await call("top", settings, "--once", line=PLUGIN_LINE)


async def test_a_node_without_an_agent_is_reported(short_dir: Path) -> None:
    """With the command that finds it, in the namespace that was searched, or in all."""
    for namespace, path in (("gpushare-system", AGENTS), ("", "/api/v1/pods")):
        async with api_server(short_dir, {path: raw_list([])}) as (server, settings):
            with pytest.raises(NotFound, match=r"no agent runs on node n9: .*--agent-namespace"):
                await call("top", settings, "--once", "n9", f"--agent-namespace={namespace}")
        assert [request.path for request in server.seen] == [path]


async def test_an_agent_that_the_api_server_cannot_reach_is_reported(short_dir: Path) -> None:
    """The API server's own words are in the line, and what to look at."""
    refused = {"message": "error trying to reach service: connection refused"}
    answers = {AGENTS: raw_list([raw_agent_pod("n1")]), NODE_THROUGH_POD: (503, refused)}
    async with api_server(short_dir, answers) as (_, settings):
        said = r"pod gpushare-system/agent-n1 .* 503: error trying to reach service: .*web\.addr: \"\".*NetworkPolicy"
        with pytest.raises(Unavailable, match=said):
            await call("top", settings, "n1")


async def test_a_cluster_that_cannot_be_reached_ends_the_commands(short_dir: Path) -> None:
    """The page's too, which would retry for ever behind an address that shows nothing."""
    kubeconfig = write_kubeconfig(short_dir, f"http://127.0.0.1:{free_port()}", {"token": "t"})
    with pytest.raises(
        Unavailable, match=r"no connection to the API server at 127.0.0.1:\d+: refused; check that it runs"
    ):
        await call("dashboard", f"--kubeconfig={kubeconfig}", "--port=0")


def test_the_plugin_has_the_same_commands_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """kubectl passes on what stands behind `kubectl gpushare`."""
    assert PLUGIN_LINE.main(["--help"], {}) == 0
    out = capsys.readouterr().out
    for name in ("top", "inspect", "explain", "dashboard"):
        assert f"\n  {name} " in out
        assert PLUGIN_LINE.main([name, "--help"], {}) == 0
        text = capsys.readouterr().out
        assert f"\n  kubectl gpushare {name}" in text
        assert "--kubeconfig" in text
        assert "--server" not in text and "--config" not in text and "--resources." not in text
    assert PLUGIN_LINE.main(["inspct"], {}) == 2
    assert "kubectl gpushare: 'inspct' is no command (did you mean inspect?)" in capsys.readouterr().err
