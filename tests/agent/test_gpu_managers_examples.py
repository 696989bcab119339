"""The pods of gpu-manager's README, and others of its users, on the embedded node."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.core.formats.vdevice import decode_config
from tests.agent.support_agent import open_agent
from tests.sandbox.support_sandbox import CORE, MEMORY, limits_of, open_test_node, pod

BLOCK_BYTES = 256 * 2**20


def asking(cores: int, blocks: int) -> dict[str, Any]:
    """With requests next to the limits, as there."""
    found = limits_of("nvidia", {CORE: cores, MEMORY: blocks})
    found["resources"]["requests"] = dict(found["resources"]["limits"])
    return found


@pytest.mark.parametrize(
    ("cores", "blocks", "annotations", "gpus"),
    [(50, 30, {"tencent.com/vcuda-core-limit": "50"}, 1), (200, 60, {}, 2), (100, 30, {}, 1)],
    ids=["share", "two-gpus", "one-gpu"],
)
async def test_an_example_runs(cores: int, blocks: int, annotations: dict[str, str], gpus: int) -> None:
    """It has its GPUs in gpu-manager's annotations, and a share its limits where the control library looks."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2", "--isolation=vcuda"):
        await node.wait_allocatable(CORE, 200)
        await node.start_pods(pod("vcuda", asking(cores, blocks), annotations=annotations, restartPolicy="Never"))
        written = await node.wait_annotation("vcuda", "tencent.com/gpu-assigned", "true")
        assert len(written["tencent.com/predicate-gpu-idx-0"].split(",")) == gpus
        if cores < 100:
            uid = node.uid_of("vcuda")
            config = decode_config((node.paths.virtual_manager / uid / "nvidia" / "vcuda.config").read_bytes())
            assert (config.utilization, config.memory_bytes, config.enable) == (cores, blocks * BLOCK_BYTES, True)
