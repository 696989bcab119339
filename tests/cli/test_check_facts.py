"""`gpushare-agent check` reports rights that are missing and not needed for shares, and what strands GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.core.model.finding import Level
from tests.cli.support_check import complete_node, node_api, not_ok, only
from tests.fakes.api_server import answers, raw_status


@pytest.mark.usefixtures("many_open_files")  # else `check` warns of the limit too
@pytest.mark.parametrize(
    ("right", "without"),
    [("patch nodes", "--facts.is-written=false"), ("get runtimeclasses", "--runtime.sandboxed-handlers=")],
)
async def test_a_missing_right_is_a_warning_only_where_it_is_used(short_dir: Path, right: str, without: str) -> None:
    """The agent works without it; the cure names the role and the setting."""
    async with complete_node(short_dir, node_api(forbidden=(right,))) as node:
        (found,) = not_ok(await check_node(node.settings()))
        assert (found.level, found.what) == (Level.WARNING, "permissions")
        assert right in found.detail and without in found.cure
        assert not not_ok(await check_node(node.settings(without)))


def _pod(cpu: str, *, owner: str = "ReplicaSet", claims: tuple[str, ...] = (), **devices: str) -> dict[str, Any]:
    limits = {"cpu": cpu, **{f"{domain}.com/gpu": count for domain, count in devices.items()}}
    owners = [{"kind": owner, "name": "o", "uid": "u", "apiVersion": "v1", "controller": True}]
    spec = {
        "containers": [{"name": "main", "resources": {"limits": limits}}],
        "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
    }
    meta = {"name": "p", "namespace": "n", "uid": "u", "ownerReferences": owners}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Running"}}


RESERVED = {"key": "tencent.com/vcuda-core", "effect": "NoSchedule"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
FREE_GPUS = {"key": "gpushare-agent/free-gpus", "effect": "PreferNoSchedule"}


@pytest.mark.parametrize(
    ("taints", "pods", "flags", "level", "words"),
    [
        ([], [_pod("8"), _pod("4500m")], [], Level.WARNING, "12.5 of 96 CPUs"),
        ([NOT_READY, FREE_GPUS], [_pod("12")], [], Level.WARNING, "nothing keeps them away"),
        ([], [_pod("12")], ["--facts.taint-above=0.5", "--facts.is-written=false"], Level.WARNING, "12 of 96 CPUs"),
        ([NOT_READY, RESERVED], [_pod("12")], [], Level.OK, "the taint tencent.com/vcuda-core:NoSchedule"),
        ([], [_pod("12")], ["--facts.taint-above=0.5"], Level.OK, "facts.taint_above is 0.5"),
        ([], [_pod("9")], [], Level.OK, "9 of 96 CPUs now; whether more come is not known"),
        (
            [],
            [
                _pod("90", nvidia="1"),
                _pod("90", claims=("gpu",)),
                _pod("90", owner="DaemonSet"),
                _pod("90", owner="Node"),
            ],
            [],
            Level.OK,
            "0 of 96 CPUs",
        ),
        ([], None, [], Level.OK, "not known"),
    ],
)
async def test_pods_without_gpus_that_take_much_of_the_cpu_are_a_warning_where_nothing_keeps_them_away(
    short_dir: Path, taints: list[dict[str, str]], pods: list[Any] | None, flags: list[str], level: Level, words: str
) -> None:
    """No warning where it cannot be known. Taints that pass, and the agent's own that an earlier setting left, keep nobody
    away for long."""
    async with complete_node(short_dir, node_api(taints=taints)) as node:
        node.api.listed = pods or []
        if pods is None:
            node.api.script.lists = [answers(403, raw_status(403, "forbidden"))]
        found = await only("pods without GPUs", node, *flags)
    assert (found.level, words in found.detail) == (level, True), found
    assert ("taint_above" in found.cure) == (level is Level.WARNING)


async def test_on_a_node_of_karpenters_the_agents_taint_is_a_warning(short_dir: Path) -> None:
    """It takes every taint for one that forbids the node."""
    labels = {"karpenter.sh/nodepool": "gpus"}
    async with complete_node(short_dir, node_api(labels=labels)) as node:
        node.api.listed = []
        assert (await only("pods without GPUs", node)).level is Level.OK
        found = await only("pods without GPUs", node, "--facts.taint-above=0.5")
    assert (found.level, "Karpenter" in found.detail, "scale-nodes.md" in found.cure) == (Level.WARNING, True, True)
