"""A round of live resizes on a node of many shares: how many steps it takes, and what it decides."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import gpushare_agent
from gpushare_agent.agent.admission.decisions.resize import ResizePolicy
from gpushare_agent.agent.admission.resizing import ResizeReports, ShareResizing
from gpushare_agent.agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.core.model.allocations import Allocation, ShareSize
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import RESIZE_ANNOTATION
from gpushare_agent.core.model.pods import Pod
from tests.support_core import NAMES, allocation, container, ids, inventory, pod, used_cores
from tests.support_node import node_of

GPUS = inventory(8)
OURS = next(iter(gpushare_agent.__path__))


class World:
    """`count` shares of a core and a memory block, spread over 8 GPUs, whose pods ask for `asked` cores each."""

    def __init__(self, count: int, asked: int) -> None:
        node = node_of(GPUS)
        self.cache, store = node.cache, node.pods
        store.replace_all([])
        for number in range(count):
            gpu, unit = number % 8, number // 8
            owner = pod(
                f"p{number:03}",
                container(cores=1, blocks=1),
                annotations={RESIZE_ANNOTATION: f"main:cores={asked}"},
            )
            store.upsert(owner)
            self.cache.put(
                allocation(owner, "main", ids(gpu, range(unit, unit + 1)), ids(0, range(number, number + 1)))
            )
        self.refused: list[str] = []
        policy = ResizePolicy(names=NAMES, mode=ResizeMode.FREE_CAPACITY)
        self.resizing = ShareResizing(
            node=node,
            policy=policy,
            file=None,
            enforcement=self,
            reports=ResizeReports(node=node, annotations=self, events=self, clock=lambda: 0.0),
        )

    def isolation_of(self, allocation: Allocation) -> Isolation | None:
        return ISOLATIONS["vcuda"]

    async def enforce(self, allocation: Allocation) -> str:
        return ""

    # As PodEvents and PodAnnotations:

    def warned(self, pod: Pod, reason: str, text: str) -> None:
        self.refused.append(pod.name)

    def noted(self, pod: Pod, reason: str, text: str) -> None:
        pass

    def resize_status(self, pod: Pod, status: str | None) -> None:
        pass


async def steps_of_a_round(world: World) -> int:
    """Lines of the agent's code."""
    lines = 0

    def count(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        await world.resizing.reconcile()
    finally:
        sys.settrace(before)
    return lines


async def test_a_round_takes_steps_in_proportion_to_the_shares() -> None:
    """Whether all of them grow or none can: a round decides without a pause, and the kubelet's calls wait for its end."""
    for asked in (2, 99):
        few, many = [await steps_of_a_round(World(count, asked)) for count in (100, 400)]
        assert many < 5 * few, f"{few} lines for 100 shares that ask for {asked} cores, {many} for 400"


async def test_shares_of_one_gpu_that_grow_in_one_round_get_what_is_left() -> None:
    """The later ones see what the earlier ones were charged: 50 shares of a core leave 50 cores of each GPU."""
    world = World(400, 11)
    await world.resizing.reconcile()
    sizes = [one.size for one in world.cache if one.gpus == ("GPU-3",)]
    assert sizes.count(ShareSize(cores=11, memory=1)) == 5 and sizes.count(ShareSize(cores=1, memory=1)) == 45
    assert used_cores(world.cache) == dict.fromkeys((gpu.uuid for gpu in GPUS.gpus), 100)
    assert len(world.refused) == 360
