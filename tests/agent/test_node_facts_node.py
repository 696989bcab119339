"""The whole agent tells the cluster of its GPUs on the embedded node's object."""

from __future__ import annotations

import json
from typing import Any

from tests.agent.support_agent import open_agent, wait_synced, write_faults
from tests.sandbox.support_sandbox import NodeUnderTest, open_test_node

FLAGS = ("--simulated.gpus=4", "--node-labels=rack=a7", "--health.recovery-probes=1", "--health.recovery-period-s=0.05")


def metadata(node: NodeUnderTest, part: str) -> dict[str, str]:
    return dict(node.api.node(node.name)["metadata"].get(part, {}))


def gpus(node: NodeUnderTest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(metadata(node, "annotations").get("gpushare-agent/gpus", "{}")).get(
        "gpus", []
    )
    return found


async def test_the_node_says_what_gpus_it_has_and_which_of_them_is_lost() -> None:
    """The labels stay when a GPU is lost, and the annotation follows its health there and back."""
    async with open_test_node() as node, open_agent(node, *FLAGS) as agent:
        await node.wait_until(lambda: len(gpus(node)) == 4, "the annotation")
        labels = metadata(node, "labels")
        assert labels["gpushare-agent/gpu.count"] == "4" and labels["rack"] == "a7"
        assert labels["gpushare-agent/gpu.memory"] == str(agent.parts.node.inventory.current.gpus[0].memory_mib)
        assert labels["gaia.tencent.com/gpu-model"]
        assert [gpu["uuid"] for gpu in gpus(node)] == [gpu.uuid for gpu in agent.parts.node.inventory.current.gpus]
        node.paths.faults.write_text('{"lost": {"2": "rehearsed"}}')
        await node.wait_until(lambda: [c["index"] for c in gpus(node) if not c["is_healthy"]] == [2], "the loss")
        assert metadata(node, "labels") == labels
        node.paths.faults.unlink()
        await node.wait_until(lambda: all(gpu["is_healthy"] for gpu in gpus(node)), "the return")


async def test_the_node_says_which_gpus_serve_other_names_too() -> None:
    """The extender leaves them to pods that ask by those names, as the agent does."""
    flags = ("--nvidia.enabled=true", "--nvidia.gpus=0,2")
    async with open_test_node() as node, open_agent(node, *FLAGS, *flags):
        await node.wait_until(lambda: len(gpus(node)) == 4, "the annotation")
        assert [gpu["index"] for gpu in gpus(node) if gpu.get("parts")] == [0, 2]


async def test_an_agent_that_is_reported_to_write_nothing_writes_nothing() -> None:
    """Its account may lack the right."""
    async with open_test_node() as node, open_agent(node, *FLAGS, "--facts.is-written=false") as agent:
        assert not agent.parts.cluster.node_fields
        await node.wait_until(lambda: agent.parts.node.pods.is_synced, "the pods")
        assert "gpushare-agent/gpus" not in metadata(node, "annotations")


async def test_an_agent_with_fewer_gpus_corrects_what_the_one_before_it_wrote() -> None:
    """The node's own record tells which labels the earlier agent wrote; others stay."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.wait_until(lambda: len(gpus(node)) == 4, "the annotation")
        async with open_agent(node, "--simulated.gpus=2"):
            await node.wait_until(lambda: len(gpus(node)) == 2, "the new annotation")
            labels = metadata(node, "labels")
            assert labels["gpushare-agent/gpu.count"] == "2" and "rack" not in labels
            assert "kubernetes.io/hostname" in labels


async def test_a_driver_that_cannot_be_read_at_the_start_leaves_what_the_node_says() -> None:
    """Labels and annotation of the agent before stay until the GPUs are read; then they are compared."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.wait_until(lambda: len(gpus(node)) == 4, "the annotation")
            await node.wait_until(
                lambda: "gpushare-agent/allocations" in metadata(node, "annotations"), "the allocations"
            )
        before = metadata(node, "labels"), metadata(node, "annotations")["gpushare-agent/gpus"]
        write_faults(node.paths.faults, all_lost="the driver is not loaded")
        node.api.requests.clear()
        flags = (*FLAGS, "--node-labels=rack=b8", "--fail-on-init-error=false")
        async with open_agent(node, *flags, wait=False) as agent:
            await wait_synced(agent.parts)
            assert (metadata(node, "labels"), metadata(node, "annotations")["gpushare-agent/gpus"]) == before
            write_faults(node.paths.faults)
            agent.parts.gpus.watch.poll_soon()
            await node.wait_until(lambda: metadata(node, "labels")["rack"] == "b8", "the labels compared")
            assert metadata(node, "labels") == {**before[0], "rack": "b8"}
        patches = node.api.requests.count(("PATCH", f"/api/v1/nodes/{node.name}"))
        assert patches == 1
