"""A standard workload on each kubelet that the embedded node knows, and kubelets that are too old."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.sandbox.behaviour import KUBERNETES_VERSIONS
from tests.agent.support_agent import open_agent, open_child
from tests.sandbox.support_sandbox import (
    CORE,
    MEMORY,
    SHORT_TIMES,
    NodeUnderTest,
    container,
    limits_of,
    open_test_node,
    pod,
)


def _sidecar(name: str, cores: int, blocks: int) -> dict[str, Any]:
    return limits_of(name, {CORE: cores, MEMORY: blocks}, restartPolicy="Always")


WORKLOAD = [
    pod("share", container(cores=30, blocks=10)),
    pod("plain", limits_of("main", {})),
    pod("two", container("a", cores=20, blocks=10), limits_of("between", {}), container("b", cores=20, blocks=10)),
    pod("reject-1", container(cores=150, blocks=10)),
    pod(
        "steps",
        container("main", cores=30, blocks=12),
        init=(container("first", cores=20, blocks=8), _sidecar("beside", 10, 4)),
    ),
    pod("reject-2", container("good", cores=10, blocks=5), container("bad", cores=30, blocks=97)),
    pod("whole", container(cores=200)),
    pod("same-1", container(cores=25, blocks=20)),
    pod("same-2", container(cores=25, blocks=20)),
]
RUNNING = ["share", "plain", "two", "steps", "whole", "same-1", "same-2"]


@pytest.mark.parametrize(("seed", "version"), [*enumerate((*KUBERNETES_VERSIONS, KUBERNETES_VERSIONS[-1]))])
async def test_a_standard_workload_runs_on_every_kubelet(seed: int, version: str) -> None:
    """Shares, several containers, init and sidecar, whole GPUs, plain pods, rejected ones that old kubelets go on listing:
    all created at once, each container gets its own, and everything is free in the end."""
    async with (
        open_test_node(kubelet_version=version, seed=seed) as node,
        open_agent(node, "--allocation.cleanup-rejected-pods=false") as agent,
    ):
        for raw in WORKLOAD:
            node.api.create_pod(raw)
        await node.wait_running(*RUNNING)
        for name, text in (("reject-1", "150"), ("reject-2", "97")):
            assert text in await node.wait_settled(name), name
        _assert_given_what_was_asked(node)
        assert len(node.gpus_of("whole")) == 2
        await node.wait_ledger_equal(agent)
        for name, cores, blocks in (("late-1", 10, 5), ("late-2", 30, 20)):  # as the rejected pods of before asked
            await node.start_pods(pod(name, container(cores=cores, blocks=blocks)))
        _assert_given_what_was_asked(node)
        for raw in node.api.pods():
            node.api.delete_pod("default", raw["metadata"]["name"])
        for raw in WORKLOAD:
            await node.wait_gone(raw["metadata"]["name"])
        await node.wait_until(lambda: agent.holders_of() == 0, "everything freed")


def _assert_given_what_was_asked(node: NodeUnderTest) -> None:
    node.assert_nothing_shared()
    allocated = node.given()
    for raw in node.api.pods():
        if raw["status"]["phase"] != "Running":
            continue
        for spec in (*raw["spec"].get("initContainers", ()), *raw["spec"]["containers"]):
            limits = spec["resources"].get("limits", {})
            vcores, blocks = allocated.get((raw["metadata"]["uid"], spec["name"]), (frozenset(), frozenset()))
            if spec["name"] != "first":  # an init container, which has ended
                assert (len(vcores), len(blocks)) == (int(limits.get(CORE, 0)), int(limits.get(MEMORY, 0)))


# --- too old ---

SILENT = replace(SHORT_TIMES, first_status_s=0.0, status_interval_s=3600.0)
"""A kubelet that writes the Node object once; the test writes it from then on."""


async def _make_old(node: NodeUnderTest) -> None:
    await node.wait_until(lambda: node.api.store.find("nodes", ("", node.name)), "the Node object")
    raw = node.api.node(node.name)
    status = {**raw["status"], "nodeInfo": {**raw["status"]["nodeInfo"], "kubeletVersion": "v1.29.14"}}
    node.api.apply_node({**raw, "status": status})


async def test_a_kubelet_that_is_too_old_ends_the_agent_with_the_reason() -> None:
    """Exit code 1, both versions, what to do, no traceback."""
    async with open_test_node(times=SILENT) as node:
        await _make_old(node)
        async with open_child(node, wait=False) as child:
            assert await child.wait() == 1
        text = node.paths.agent_log.read_text()
        assert "v1.29.14" in text and "1.30" in text and "Upgrade the kubelet" in text
        assert "Traceback" not in text
        assert not node.calls.pod_resources_calls or not any(c.inside for c in node.calls.pod_resources_calls)
