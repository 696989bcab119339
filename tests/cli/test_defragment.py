"""Advice to make GPUs whole: carried out on the cluster, the GPUs are whole, no GPU has more than it is, and no budget was
exceeded."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.core.kube.budgets import Budget, read_budget
from gpushare_agent.kubectl.cluster_reading import ReadCluster
from gpushare_agent.kubectl.decisions.defragment import Advice, Stays, defragment
from tests.cli.support_cli import raw_list
from tests.cli.support_cluster_view import Cluster, Object, held_of, node, pod, ran, set_held
from tests.support_json import undecoded


def budget(app: str, allowed: int) -> Object:
    """Of the pods with that label, in their namespace."""
    return {
        "metadata": {"name": app, "namespace": "ns", "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"disruptionsAllowed": allowed, "observedGeneration": 1},
    }


def budgets_of(raws: Sequence[Object]) -> list[Budget]:
    found = [read_budget(undecoded(raw)) for raw in raws]
    return [one for one in found if one is not None]


async def advised(cluster: Cluster, *budgets: Object, most: int | None = None) -> Advice:
    read = await cluster.read()
    return defragment(read.view, budgets_of(budgets), most=most)


# --- random clusters ---


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, list[Object]]:
    """Nodes with shares all over their GPUs, as `spread` or ended pods leave them; pods of a few owners, under budgets."""
    nodes, pods, number = [], [], 0
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        gpus = draw(st.lists(st.sampled_from([8, 16]), min_size=2, max_size=5))
        held: dict[str, dict[int, list[int]]] = {}
        for index, blocks in enumerate(gpus):
            cores_left, blocks_left = 100, blocks
            for cores, share in draw(st.lists(st.sampled_from([(10, 2), (20, 2), (40, 4), (60, 8)]), max_size=3)):
                if cores > cores_left or share > blocks_left:
                    continue
                cores_left, blocks_left, number = cores_left - cores, blocks_left - share, number + 1
                owner = draw(st.sampled_from([*["ReplicaSet"] * 7, "StatefulSet", "DaemonSet", "Node", ""]))
                raw = pod(f"p{number}", (cores, share), on=name, owner=owner, cpu=draw(st.sampled_from(["0", "1"])))
                raw["metadata"]["labels"] = {"app": draw(st.sampled_from(["x", "y", "z", "z", "z"]))}
                pods.append(raw)
                held[f"p{number}"] = {index: [cores, share]}
        cpu = draw(st.sampled_from(["3", "64"]))
        nodes.append(node(name, gpus, held=held, cpu=cpu, unschedulable=draw(st.integers(0, 5)) == 0))
    budgets = [budget("x", draw(st.integers(0, 2))), *([budget("y", 1)] * draw(st.integers(0, 2)))]
    return Cluster(nodes, pods), budgets


@settings(max_examples=250, deadline=None, derandomize=True)
@given(clusters(), st.randoms(use_true_random=False))
def test_after_the_moves_the_gpus_are_whole(found: tuple[Cluster, list[Object]], rng: Random) -> None:
    """In any order: each pod has room where it is sent before any other has left, nothing is allocated twice, and each named
    GPU is whole at the end, in addition to those that were. Budgets, owners, cordons and CPU are respected."""
    cluster, raw_budgets = found
    read = asyncio.run(cluster.read())
    budgets = budgets_of(raw_budgets)
    advice = defragment(read.view, budgets)
    moves = [(one.node, move) for one in advice.freed for move in one.moves]
    by_name = {raw["metadata"]["name"]: raw for raw in cluster.nodes}
    evicted: Counter[str] = Counter()
    for _, move in moves:
        known = read.view.pods[move.uid]
        assert known.owner in ("ReplicaSet", "StatefulSet")
        covering = [one for one in budgets if one.covers("ns", known.labels)]
        assert len(covering) <= 1
        evicted.update(one.name for one in covering)
        assert not by_name[move.to_node]["spec"]["unschedulable"]
    assert all(evicted[one.name] <= one.allowed for one in budgets)
    # Before anybody leaves: each gets its GPU by the extender's own state, under another name.
    both = copy.deepcopy(cluster)
    for _, move in rng.sample(moves, len(moves)):
        raw = next(one for one in both.pods if one["metadata"]["uid"] == move.uid)
        arriving = copy.deepcopy(raw)
        arriving["metadata"] |= {"uid": f"{move.uid}-new", "name": f"{move.uid}-new"}
        arriving["spec"]["nodeName"] = move.to_node
        charges = held_of(by_name[read.view.pods[move.uid].pod.node_name])[move.uid]
        both.pods.append(arriving)
        held = held_of(next(one for one in both.nodes if one["metadata"]["name"] == move.to_node))
        where = next(one for one in both.nodes if one["metadata"]["name"] == move.to_node)
        set_held(where, {**held, f"{move.uid}-new": {move.to_gpus[0]: next(iter(charges.values()))}})
    overfull = asyncio.run(both.read())
    for one in overfull.view.nodes:
        for gpu in one.ledger.gpus:
            assert gpu.used.cores <= 100
            assert gpu.used.blocks <= gpu.total_blocks
        assert one.used["cpu"] <= max(one.offer.allocatable["cpu"], cpu_of(read, one.name))
    # And once they have left.
    for raw in both.nodes:
        set_held(raw, {uid: gpus for uid, gpus in held_of(raw).items() if uid not in {move.uid for _, move in moves}})
    gone = {move.uid for _, move in moves}
    both.pods = [one for one in both.pods if one["metadata"]["uid"] not in gone]
    after = asyncio.run(both.read())
    whole = {(one.name, gpu.index) for one in after.view.nodes for gpu in one.ledger.gpus if gpu.is_free}
    assert {(one.node, one.gpu) for one in advice.freed} <= whole
    assert len(whole) == advice.whole + len(advice.freed)


def cpu_of(read: ReadCluster, name: str) -> int:
    return next(one.used["cpu"] for one in read.view.nodes if one.name == name)


# --- one rule after the other ---


def halves(*owners: str, apps: Sequence[str] = ()) -> Cluster:
    """Two GPUs of node a and one of node b, each with a pod of 40 cores."""
    pods = [pod(f"p{n}", (40, 4), on="ab"[n > 1], owner=owner) for n, owner in enumerate(owners)]
    for raw, app in zip(pods, apps, strict=False):
        raw["metadata"]["labels"]["app"] = app
    held_a = {f"p{n}": {n: [40, 4]} for n in range(2)}
    return Cluster([node("a", [16, 16], held=held_a), node("b", [16], held={"p2": {0: [40, 4]}})], pods)


async def test_one_pod_of_three_makes_one_gpu_whole() -> None:
    """Two share a GPU then; the third has no place without a whole one."""
    advice = await advised(halves("ReplicaSet", "ReplicaSet", "ReplicaSet"))
    assert [(one.node, one.gpu, [move.uid for move in one.moves]) for one in advice.freed] == [("a", 0, ["p0"])]
    assert advice.whole == 0


async def test_the_number_of_gpus_bounds_the_moves() -> None:
    """Six pods in pairs of GPUs."""
    held = {f"p{n}": {n: [30, 4]} for n in range(6)}
    cluster = Cluster([node("n", [16] * 6, held=held)], [pod(f"p{n}", (30, 4), on="n") for n in range(6)])
    assert len((await advised(cluster)).freed) == 4
    assert len((await advised(cluster, most=1)).freed) == 1


async def test_pods_that_nobody_makes_again_stay() -> None:
    """Each with its reason."""
    advice = await advised(halves("", "DaemonSet", "Node"))
    assert advice.freed == ()
    assert advice.staying == {"p0": Stays.NO_CONTROLLER, "p1": Stays.DAEMON_SET, "p2": Stays.STATIC}


async def test_budgets_are_kept() -> None:
    """None allowed; one of two; two budgets of one pod, which no eviction takes; one that its controller has not seen."""
    both = halves("ReplicaSet", "ReplicaSet", "", apps=("x", "x"))
    assert (await advised(both, budget("x", 0))).staying["p0"] is Stays.BUDGET
    assert len((await advised(both, budget("x", 1))).freed) == 1
    advice = await advised(both, budget("x", 5), budget("x", 5))
    assert (advice.freed, advice.staying["p0"]) == ((), Stays.TWO_BUDGETS)
    unseen = budget("x", 5)
    unseen["metadata"]["generation"] = 2
    assert (await advised(both, unseen)).freed == ()


async def test_what_is_not_checked_is_not_advised() -> None:
    """Affinity to pods: kube-scheduler may refuse the place."""
    cluster = halves("ReplicaSet", "", "")
    terms = [{"topologyKey": "kubernetes.io/hostname"}]
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    cluster.pods[0]["spec"]["affinity"] = affinity
    advice = await advised(cluster)
    assert (advice.freed, advice.staying["p0"]) == ((), Stays.UNCHECKED)


async def test_a_large_cluster_is_answered_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so."""
    monkeypatch.setattr("gpushare_agent.kubectl.decisions.defragment.MAX_COMPARED", 30)
    assert not (await advised(halves("ReplicaSet", "ReplicaSet", "ReplicaSet"))).is_complete


# --- the command ---


async def test_the_moves_are_printed(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPU by GPU, why others stay, and how it is done by hand."""
    assert await ran(halves("ReplicaSet", "", "ReplicaSet"), short_dir, "defragment", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "0 GPUs are whole now; the move of 1 pod would make 1 more whole:",
        "  GPU 0 of a",
        "    ns/p0 (ReplicaSet) to GPU 0 of b",
        "Other pods stay: no controller would make it again (1).",
    ]
    assert lines[4].startswith("Nothing was moved.")


async def test_the_moves_as_json(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the pods that stay; budgets are those of the API server."""
    answers = {"/apis/policy/v1/poddisruptionbudgets": raw_list([budget("p0", 0)])}
    assert (
        await ran(halves("ReplicaSet", "", "ReplicaSet"), short_dir, "defragment", "--dry-run", "-o", "json", **answers)
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    move = {"namespace": "ns", "pod": "p2", "owner": "ReplicaSet", "to_node": "a", "to_gpus": [0]}
    assert document["freed"] == [{"node": "b", "gpu": 0, "moves": [move]}]
    assert {one["pod"]: one["reason"] for one in document["staying"]} == {"p0": Stays.BUDGET, "p1": Stays.NO_CONTROLLER}


async def test_it_only_advises(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --dry-run or GPUs one line; without the right to read budgets, none of whose pods may be named, the right."""
    assert await ran(halves("", "", ""), short_dir, "defragment") == 2
    assert capsys.readouterr().err == (
        "kubectl gpushare: defragment only advises, it moves no pod: run it with --dry-run\n"
    )
    assert await ran(Cluster([], []), short_dir, "defragment", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("no node has GPUs: ")
    denied = {"/apis/policy/v1/poddisruptionbudgets": (403, {"kind": "Status", "message": "forbidden"})}
    assert await ran(halves("", "", ""), short_dir, "defragment", "--dry-run", **denied) == 1
    assert "cannot list the PodDisruptionBudgets" in capsys.readouterr().err
