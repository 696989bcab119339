"""`explain`: the decisions of a whole agent on the embedded node, and the answer where there is none."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import to_builtins
from msgspec.structs import replace

from gpushare_agent.core.cli import render_text
from gpushare_agent.core.model.decision_records import CLAIMS_RESOURCE, Asked, DecisionRecord, Outcome
from gpushare_agent.core.model.errors import NotFound, RefusalReason, Unavailable
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.kubectl.explain import ADVICE, TOO_LARGE
from gpushare_agent.kubectl.plugin import PLUGIN_LINE
from tests.agent.support_agent import open_agent
from tests.cli.support_cli import (
    agent_answers,
    api_server,
    busy_node,
    call,
    candidate,
    decision,
    raw_agent_pod,
    raw_list,
)
from tests.cluster.support_kube import raw_pod
from tests.fakes.api_server import json_server, raw_status
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod
from tests.settings.support_settings import run_program


async def explained(capsys: pytest.CaptureFixture[str], decisions: Sequence[DecisionRecord], *words: str) -> str:
    """What it prints with an agent that has taken these decisions, the newest first."""
    async with json_server(agent_answers(busy_node(), *decisions)) as agent:
        assert await call("explain", f"--server={agent.url}", *words) == 0
    return capsys.readouterr().out


# --- by a whole agent ---


async def text_of(
    node: NodeUnderTest, url: str, raw: dict[str, Any], phase: str, capsys: pytest.CaptureFixture[str]
) -> str:
    """Creates the pod, waits until it is admitted or refused, and asks."""
    name = raw["metadata"]["name"]
    node.api.create_pod(raw)
    await node.wait_phase(name, phase)
    capsys.readouterr()  # the agent's log is in this process
    assert await call("explain", f"--server={url}", name) == 0
    return capsys.readouterr().out


def verdicts(text: str) -> dict[str, tuple[bool, str]]:
    """By GPU: whether it is marked as chosen, and its verdict."""
    rows = [line for line in text.partition("VERDICT\n")[2].splitlines() if " GiB free " in line]
    split = [(row.startswith("  *"), re.split(r" {2,}", row.removeprefix("  *").strip(), maxsplit=4)) for row in rows]
    return {cells[0]: (is_chosen, cells[4]) for is_chosen, cells in split}


async def test_every_placement_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """A share, a whole GPU, two GPUs by link."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=4") as agent:
        url = f"http://127.0.0.1:{await agent.parts.observability.web.wait_listening()}"

        share = await text_of(node, url, pod("share", container(cores=40, blocks=60)), "Running", capsys)
        assert "default/share, container main got GPU 0" in share
        assert "  request 40 GPU cores, 15 GiB\n  policy  share: " in share
        assert verdicts(share)["0"] == (True, "chosen")
        assert verdicts(share)["1"][0] is False

        whole = await text_of(node, url, pod("whole", container(cores=100, blocks=0)), "Running", capsys)
        assert "default/whole, container main got GPU 1" in whole
        assert "  policy  fragment: " in whole
        assert [index for index, (is_chosen, _) in verdicts(whole).items() if is_chosen] == ["1"]

        pair = await text_of(node, url, pod("pair", container(cores=200, blocks=0)), "Running", capsys)
        assert "default/pair, container main got GPUs 2, 3" in pair
        assert "  policy  link: " in pair and "link cost" in pair
        assert [index for index, (is_chosen, _) in verdicts(pair).items() if is_chosen] == ["2", "3"]
        assert verdicts(pair)["0"][1].startswith("in use: 60 cores")


@pytest.mark.parametrize(
    ("reason", "cores", "gib", "is_too_large"),
    [("NotEnoughMemory", 10, 24, False), ("NotEnoughMemory", 10, 25, True), ("NotEnoughMemory", 200, 49, True),
     ("NotEnoughCores", 200, 48, False), ("NotEnoughCores", 300, 0, True)],
)  # fmt: skip
async def test_the_end_of_pods_is_advised_only_where_it_helps(
    reason: str, cores: int, gib: int, is_too_large: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two GPUs with 24 GiB."""
    asked = Asked(cores=cores, memory_bytes=gib << 30)
    refused = decision(outcome=Outcome.REFUSED, reason=reason, gpus=(), asked=asked)
    text = await explained(capsys, [refused], "train")
    assert f"default/train, container main was refused: {reason}" in text
    assert f"  do      {(ADVICE | TOO_LARGE if is_too_large else ADVICE)[reason]}.\n" in text
    assert ("wait for pods to end" not in text) is is_too_large


# --- what is shown ---


async def test_only_the_newest_decision_of_each_container_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order in which the containers were decided; -c chooses one."""
    decisions = [
        decision(3, container="b", gpus=(1,), labels=("1",)),
        decision(2, container="a"),
        decision(1, container="b", outcome=Outcome.REFUSED, reason="NotReady", gpus=()),
    ]
    out = await explained(capsys, decisions, "train")
    titles = [line for line in out.splitlines() if line.startswith("default/")]
    assert [title.partition("  (")[0] for title in titles] == [
        "default/train, container a got GPU 0",
        "default/train, container b got GPU 1",
    ]
    only = await explained(capsys, decisions, "train", "-c", "b")
    assert "container a" not in only
    assert "container b" in only


@pytest.mark.parametrize("flags", [(), ("-c", "a")])
async def test_what_a_refused_pod_had_is_free_again(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Not of a claim nor at a start, which the kubelet tries again."""
    refused = decision(2, container="b", outcome=Outcome.REFUSED, reason="NotEnoughCores", gpus=())
    out = await explained(capsys, [refused, decision(1, container="a")], "train", *flags)
    assert "default/train, container a had GPU 0 until container b was refused  (" in out
    for again in (replace(refused, resource=CLAIMS_RESOURCE), replace(refused, asked=None)):
        out = await explained(capsys, [again, decision(1, container="a")], "train", *flags)
        assert "container a got GPU 0  (" in out


async def test_a_pod_made_again_is_another_pod(capsys: pytest.CaptureFixture[str]) -> None:
    """What its predecessor of the same name got is not shown as its own."""
    decisions = [decision(2, container="new"), decision(1, container="old", pod_uid="before")]
    assert "container old" not in await explained(capsys, decisions, "train")


async def test_without_a_namespace_every_pod_of_that_name_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """On a node one seldom knows it; -n chooses."""
    decisions = [decision(2), decision(1, namespace="research", pod_uid="other")]
    both = await explained(capsys, decisions, "train")
    assert "default/train" in both
    assert "research/train" in both
    assert "default/train" not in await explained(capsys, decisions, "train", "-n", "research")


async def test_hint_and_must_include_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """They bound the choice."""
    asked = Asked(cores=40, memory_bytes=0, hint=(1, 3), must_gpus=(GpuUuid("GPU-7"),))
    out = await explained(capsys, [decision(asked=asked)], "train")
    assert "  request 40 GPU cores, its annotation names GPU 1, 3, the kubelet requires GPU-7" in out


async def test_each_gpu_is_drawn_with_what_was_free(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar for what was in use of cores and memory, the free rest in numbers; a cordoned GPU is Cordoned."""
    cordoned = candidate(1, is_healthy=False, verdict="cordoned: fan replaced")
    out = await explained(capsys, [decision(candidates=(candidate(0), cordoned))], "train")
    assert "0  Healthy   ██······ 75 free  █▍······ 20 of 24 GiB free" in out
    assert "1  Cordoned  " in out


async def test_a_narrow_terminal_has_a_line_for_each_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns the bars go, so that the verdict of a short GPU stays whole."""
    short = [candidate(index, verdict="30 cores and 30 GiB short") for index in range(8)]
    monkeypatch.setattr(render_text, "PIPE_WIDTH", 80)
    out = await explained(capsys, [decision(candidates=tuple(short))], "train")
    assert out.count("75 free    20 of 24 GiB free  30 cores and 30 GiB short") == 8


async def test_a_refusal_before_anything_was_known_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """No candidates, and what is known: the resource."""
    refused = decision(
        outcome=Outcome.REFUSED,
        reason="NotReady",
        gpus=(),
        policy="",
        asked=None,
        candidates=(),
        explanation="starting",
    )
    out = await explained(capsys, [refused], "train")
    assert "  request tencent.com/vcuda-core; refused before its request was known" in out
    assert "  why     starting" in out
    assert "VERDICT" not in out


async def test_a_reason_that_is_not_known_has_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """A newer agent may have more of them."""
    refused = decision(outcome=Outcome.REFUSED, reason="BrandNew", policy="new", gpus=())
    out = await explained(capsys, [refused], "train")
    assert "was refused: BrandNew" in out
    assert "  policy  new\n" in out
    assert "  do " not in out


def test_every_refusal_has_advice() -> None:
    """A new reason needs its advice. What is wrong may be an annotation, where the limits are right."""
    assert set(ADVICE) == set(RefusalReason)
    assert "limits" not in ADVICE[RefusalReason.INVALID_REQUEST]


async def test_control_characters_of_a_decision_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver's words are somebody else's."""
    ill = decision(explanation="bad\x1b[2J", candidates=(candidate(0, is_healthy=False, verdict="lost\x07"),))
    out = await explained(capsys, [ill], "train")
    assert "\x1b" not in out
    assert "\x07" not in out


async def test_json_and_yaml_have_the_decisions_as_the_agent_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Every field of the record."""
    record = decision()
    document = json.loads(await explained(capsys, [record], "train", "--output=json"))
    assert document == {
        "schema": 2,
        "pod": "train",
        "decisions": [json.loads(json.dumps(to_builtins(record)))],
    }
    assert yaml.safe_load(await explained(capsys, [record], "train", "--output=yaml")) == document


async def test_a_mistyped_annotation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Next to what the container got without it."""
    text = "annotation tencent.com/vcuda-core-limits is unknown and has no effect: did you mean x?"
    shown = await explained(capsys, [decision(ignored=text)], "train")
    assert f"  ignored {text}" in shown
    assert "ignored" not in await explained(capsys, [decision()], "train")


async def test_a_container_that_runs_without_a_limit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is now, in every form; of that pod alone, and not where an agent before it does not say."""
    document, record = busy_node(), decision()
    [shown] = [one for one in document["containers"] if one["container"] == "trainer"]
    for uid, why in ((record.pod_uid, "no library"), ("another", "no library"), (record.pod_uid, "")):
        shown |= {"pod_uid": uid, "container": record.container, "not_limited": why}
        async with json_server(agent_answers(document, record)) as agent:
            assert await call("explain", f"--server={agent.url}", "train") == 0
            text = capsys.readouterr().out
            assert await call("explain", f"--server={agent.url}", "train", "--output=json") == 0
        is_said = uid == record.pod_uid and bool(why)
        assert ("  limits  no library" in text) is is_said
        [found] = json.loads(capsys.readouterr().out)["decisions"]
        assert found.get("not_limited", "") == (why if is_said else "")


async def test_an_agent_that_does_not_describe_its_node_still_explains(capsys: pytest.CaptureFixture[str]) -> None:
    answers = agent_answers(busy_node(), decision())
    del answers["/api/v1/node"]
    async with json_server(answers) as agent:
        assert await call("explain", f"--server={agent.url}", "train") == 0
    assert "container main got GPU 0" in capsys.readouterr().out


# --- nothing is known ---


async def test_a_pod_never_decided_about_is_reported_with_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    """The likely causes, and its Events."""
    with pytest.raises(NotFound, match=r"on another node, wait .* kubectl describe pod -n research ghost$") as raised:
        await explained(capsys, [decision()], "ghost", "-n", "research")
    assert "decided nothing about pod research/ghost" in str(raised.value)
    assert "could not identify" not in str(raised.value)


async def test_the_agent_leads_to_where_a_pod_is(short_dir: Path) -> None:
    """With a kubeconfig: of one that waits to `kubectl gpushare explain`, else to the node; an unknown one is unknown."""
    waits, away = raw_pod("waits", spec={"nodeName": ""}), raw_pod("away", spec={"nodeName": "n9"})
    unknown = raw_pod("unknown", spec={"nodeName": "n9"})
    unknown["status"] |= {"reason": "UnexpectedAdmissionError", "message": "Allocate failed: PodUnknown: no\x1b pod."}
    others = raw_pod("others", spec={"nodeName": "", "schedulerName": "volcano"})
    limits = {"limits": {"tencent.com/vcuda-memory": "16"}}
    mistaken = raw_pod("mistaken", spec={"nodeName": "", "containers": [{"name": "main", "resources": limits}]})
    pods = "/api/v1/namespaces/default/pods"
    known = {f"{pods}/{one['metadata']['name']}": one for one in (mistaken, waits, away, others, unknown)}
    async with api_server(short_dir, known) as (server, settings):
        server.script.answers["/api/v1/nodes"] = (403, raw_status(403, "not you"))
        async with json_server(agent_answers(busy_node())) as agent:
            for name, said in (
                ("waits", "is on no node yet. The scheduler: nothing so far"),
                ("waits", "With your own rights: `kubectl gpushare explain -n default waits`."),
                ("mistaken", "container main: 0 cores with 16 memory blocks (4 GiB) asks"),
                ("others", "the pod's schedulerName is volcano: that scheduler alone may place it"),
                ("away", "it is on node n9. If that is this one"),
                (
                    "unknown",
                    "it is on node n9, and its status says: UnexpectedAdmissionError: Allocate failed: PodUnknown: "
                    "no\ufffd pod.",
                ),
                ("ghost", "there is no pod default/ghost"),
            ):
                with pytest.raises(NotFound, match=re.escape(said)):
                    await call("explain", settings, f"--server={agent.url}", name, "-n", "default")
            server.script.answers["/api/v1/nodes"] = (500, raw_status(500, "no leader"))
            with pytest.raises(NotFound, match=r"answered 500: no leader\.$"):  # other rights would not help
                await call("explain", settings, f"--server={agent.url}", "waits", "-n", "default")


async def test_refusals_of_pods_that_nobody_knows_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    """The pod that is asked for may be one of them."""
    unattributed = decision(
        2, pod="", container="", pod_uid="", namespace="", outcome=Outcome.REFUSED, reason="PodAmbiguous",
        explanation="two pods would fit.",
    )  # fmt: skip
    with pytest.raises(NotFound, match=r"refused 1 call for a pod that it could not identify, .*two pods would fit\. "):
        await explained(capsys, [unattributed, decision()], "ghost")


async def test_a_container_without_a_decision_names_those_that_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name is easy to correct."""
    with pytest.raises(NotFound, match=r"nothing about container x of pod train, but about: main$"):
        await explained(capsys, [decision()], "train", "-c", "x")


async def test_a_pod_of_any_namespace_is_found_through_the_api_server(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `-A`, where only one has this name."""
    agents, pods = "/api/v1/namespaces/gpushare-system/pods", "/api/v1/pods"
    train = raw_pod("train", metadata={"namespace": "research"}, spec={"nodeName": "n1"})
    proxy = f"{agents}/http:agent-n1:5678/proxy/api/v1"
    answers = agent_answers(busy_node(), decision(namespace="research"))
    known = {agents: raw_list([raw_agent_pod("n1")]), pods: raw_list([train])}
    known |= {f"{proxy}/decisions": answers["/api/v1/decisions"], "/api/v1/namespaces/research/pods/train": train}
    async with api_server(short_dir, known) as (server, settings):
        words = ["explain", "train", "-A", settings]
        assert await asyncio.to_thread(PLUGIN_LINE.main, words, {}) == 0
        assert "research/train" in capsys.readouterr().out
        server.script.answers[pods] = raw_list([train, raw_pod("train", metadata={"namespace": "b"})])
        assert await asyncio.to_thread(PLUGIN_LINE.main, words, {}) == 1
        assert "in 2 namespaces (b, research): name one with -n" in capsys.readouterr().err


@pytest.mark.slow
async def test_the_command_line_ends_with_1_where_nothing_is_known() -> None:
    """One line; NAMESPACE/NAME and pod/NAME are read as kubectl's users write them."""
    async with json_server(agent_answers(busy_node(), decision())) as agent:
        ended = await run_program("explain", "research/train", "--server", agent.url)
        found = await run_program("explain", "pod/train", "--server", agent.url, "-o", "json")
        nothing = await run_program("explain", "--server", agent.url)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (1, "", 1)
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out)["decisions"][0]["pod"] == "train"
    assert nothing.code == 2
    assert "POD" in nothing.err


# --- through the API server ---

AGENTS = "/api/v1/namespaces/gpushare-system/pods"


async def test_the_plugin_finds_the_pods_node_by_itself(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pod, then its node's agent, then the decisions of that pod in that namespace."""
    proxy = f"{AGENTS}/http:agent-n1:5678/proxy"
    answers = {f"{proxy}{path}": body for path, body in agent_answers(busy_node(), decision()).items()}
    answers |= {
        "/api/v1/namespaces/default/pods/train": raw_pod("train", spec={"nodeName": "n1"}),
        AGENTS: raw_list([raw_agent_pod("n1")]),
    }
    async with api_server(short_dir, answers) as (server, settings):
        assert await call("explain", settings, "train", line=PLUGIN_LINE) == 0
    assert "default/train, container main got GPU 0" in capsys.readouterr().out
    assert [request.path for request in server.seen] == [
        "/api/v1/namespaces/default/pods/train",
        AGENTS,
        f"{proxy}/api/v1/decisions",
        f"{proxy}/api/v1/node",
    ]
    assert server.seen[1].query["fieldSelector"] == "spec.nodeName=n1"
    assert server.seen[2].query == {"pod": "train", "namespace": "default", "limit": "500"}


async def test_an_agent_that_has_started_again_leads_to_what_the_pod_has(short_dir: Path) -> None:
    """The pod's own node was asked: which one that is, is no question."""
    answers = {f"{AGENTS}/http:agent-n1:5678/proxy{path}": body for path, body in agent_answers(busy_node()).items()}
    answers |= {
        "/api/v1/namespaces/default/pods/train": raw_pod("train", spec={"nodeName": "n1"}),
        AGENTS: raw_list([raw_agent_pod("n1")]),
    }
    said = "about pod default/train: its claims are being prepared, .* What it has: kubectl gpushare inspect -d; Events"
    async with api_server(short_dir, answers) as (_, settings):
        with pytest.raises(NotFound, match=said):
            await call("explain", settings, "train", line=PLUGIN_LINE)


async def test_a_pod_on_no_node_has_no_agent_to_ask(short_dir: Path) -> None:
    """The scheduler names what is missing, and not why: bytes for blocks, and a misspelt resource, stand next to what is
    offered."""
    limits = {"tencent.com/vcuda-cores": "30", "tencent.com/vcuda-memory": "1Gi", "cpu": "1", "a.test/x": "2"}
    spec = {"nodeName": "", "containers": [{"name": "main", "resources": {"limits": limits}}]}
    refused = {
        "type": "PodScheduled",
        "message": "0/1 nodes are available: 1 Insufficient \x1b[31mtencent.com/vcuda-cores.",
    }
    pod = raw_pod("train", spec=spec)
    pod["status"]["conditions"] = [refused]
    async with api_server(short_dir, {"/api/v1/namespaces/ns/pods/train": pod}) as (_, settings):
        with pytest.raises(Unavailable, match="is on no node yet") as caught:
            await call("explain", settings, "train", "-n", "ns", line=PLUGIN_LINE)
        assert (
            "The scheduler: 0/1 nodes are available: 1 Insufficient \ufffd[31mtencent.com/vcuda-cores. container main: "
            "the agents offer no tencent.com/vcuda-cores. Write tencent.com/vcuda-core: 30, in 1/100 of a GPU's compute. "
            "container main: tencent.com/vcuda-memory: '1Gi' is in units of 256 MiB, not in bytes. Write "
            "tencent.com/vcuda-memory: 4 for 1 GiB. The pod asks for "
            "a.test/x: 2, tencent.com/vcuda-cores: 30, tencent.com/vcuda-memory: 1Gi; agents offer tencent.com/vcuda-core, "
            "in hundredths of a GPU, and tencent.com/vcuda-memory, in blocks of 256 MiB. "
        ) in str(caught.value)
        assert "is worked out from all nodes and pods, and: cannot list the nodes" in str(caught.value)
        with pytest.raises(NotFound, match=r"there is no pod ns/other: -n names another namespace"):
            await call("explain", settings, "other", "-n", "ns", line=PLUGIN_LINE)
