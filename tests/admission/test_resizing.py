"""A round of live resizes on a node of many shares: how many steps it takes, and what it decides."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.resizing import ResizeFile
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.model.allocations import ShareSize
from gpushare_agent.core.model.names import RESIZE_ANNOTATION
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, UsageRound
from tests.fakes.resizing import ResizedNode
from tests.support_core import allocation, container, ids, inventory, pod, used_cores
from tests.support_steps import counted

GPUS = inventory(8)


def crowded(count: int, asked: int) -> ResizedNode:
    """`count` shares of a core and a memory block, spread over 8 GPUs, whose pods ask for `asked` cores each."""
    world = ResizedNode(GPUS)
    for number in range(count):
        gpu, unit = number % 8, number // 8
        annotations = {RESIZE_ANNOTATION: f"main:cores={asked}"}
        owner = pod(f"p{number:03}", container(cores=1, blocks=1), annotations=annotations)
        world.store.upsert(owner)
        world.cache.put(allocation(owner, "main", ids(gpu, range(unit, unit + 1)), ids(0, range(number, number + 1))))
    return world


async def steps_of_a_round(world: ResizedNode) -> int:
    with counted() as steps:
        await world.resizing.reconcile()
    return steps.count


async def test_a_round_takes_steps_in_proportion_to_the_shares() -> None:
    """Whether all of them grow or none can: a round decides without a pause, and the kubelet's calls wait for its end."""
    for asked in (2, 99):
        few, many = [await steps_of_a_round(crowded(count, asked)) for count in (100, 400)]
        assert many < 5 * few, f"{few} steps for 100 shares that ask for {asked} cores, {many} for 400"


async def test_shares_of_one_gpu_that_grow_in_one_round_get_what_is_left() -> None:
    """The later ones see what the earlier ones were charged: 50 shares of a core leave 50 cores of each GPU."""
    world = crowded(400, 11)
    await world.resizing.reconcile()
    sizes = [one.size for one in world.cache if one.gpus == ("GPU-3",)]
    assert sizes.count(ShareSize(cores=11, memory=1)) == 5 and sizes.count(ShareSize(cores=1, memory=1)) == 45
    assert used_cores(world.cache) == dict.fromkeys((gpu.uuid for gpu in GPUS.gpus), 100)
    assert sum("keeps its share" in text for _, text in world.events) == 360


async def test_sizes_that_cannot_be_read_at_the_start_are_read_later(tmp_path: Path) -> None:
    """Until then no share is resized and nothing is written: a restart would give what was borrowed to another."""
    state, aside = tmp_path / "state", tmp_path / "aside"
    earlier, world = crowded(1, 5), crowded(1, 5)
    earlier.resizing.file = world.resizing.file = ResizeFile(state / "resize.json")
    await earlier.resizing.reconcile()
    state.rename(aside)
    state.write_text("a file")
    with capture_logs() as logs:
        world.resizing.restore(await world.resizing.load())
        await world.resizing.reconcile()
        assert world.sizes == {"main": ShareSize(cores=1, memory=1)} and not world.cache.resized
        state.unlink()
        aside.rename(state)
        await world.resizing.reconcile()
    assert world.sizes == {"main": ShareSize(cores=5, memory=1)}
    assert [one["event"] for one in logs] == ["resize_state_not_read", "resized_shares_restored"]


async def test_only_what_was_sampled_later_shows_that_a_share_has_shrunk() -> None:
    """Whatever the wall clock says: it was set back since the first sample, and before the second one."""
    world = ResizedNode(GPUS)
    world.isolation_of = lambda _: ISOLATIONS["gpushare"]  # type: ignore[method-assign]  # whose programs follow
    owner = pod("p", container(cores=1, blocks=20), annotations={RESIZE_ANNOTATION: "main:memory=10"})
    world.store.upsert(replace(owner, container_ids={"main": "ab" * 32}))
    world.cache.put(given := allocation(owner, "main", ids(0, range(1)), ids(0, range(20))))
    gpu, uses = given.gpus[0], ContainerUse(key=given.key, uuid=given.gpus[0], pids=(7,), memory_bytes=1)
    for later_s, sampled_at, charged in ((-1.0, time.time() + 3600, 20), (60.0, 0.0, 10)):
        world.resizing.usage_sampled(
            UsageRound(
                sampled_at=sampled_at,
                sampled_boot_s=time.clock_gettime(time.CLOCK_BOOTTIME) + later_s,
                gpus={gpu: GpuSample(uuid=gpu, processes=())},
                containers={(given.key, gpu): uses},
            )
        )
        await world.resizing.reconcile()
        assert world.cache.resized[given.key].charged.memory == charged
