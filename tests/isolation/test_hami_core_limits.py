"""Changed limits in HAMi-core's shared region: what is written, when, and what a tenant can make of it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.isolation.hami_core import region_format as layout
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.part import NO_REGION, RegionLimits
from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.model.allocations import Allocation, ContainerKey, ResizedShare, ShareSize
from gpushare_agent.model.errors import Corrupt, NotFound
from gpushare_agent.model.names import CORE_LIMIT_ANNOTATION, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceKind
from gpushare_agent.settings.sections import HamiCoreSettings
from tests.agent.support_agent import poll_until
from tests.isolation.support_hami_core import fake_library, region_file
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

MIB = 1024 * 1024
UID = PodUid("11111111-2222-3333-4444-555555555555")
POD = pod("share", container(name="cuda", cores=30, blocks=8), uid=UID)
SHARE = allocation(POD, "cuda", ids(0, range(30)), ids(0, range(8)))
GROWN = replace(SHARE, resized_to=ShareSize(cores=50, memory=24))


class World:
    """One container with a prepared cache file, and its pod."""

    def __init__(self, directory: Path, **scaling: float) -> None:
        library = fake_library(directory / "libvgpu.so")
        self.files = HamiCoreFiles(library, directory / "hami")
        self.files.prepare(SHARE.key)
        self.cache = self.files.cache_file(SHARE.key)
        self.pod = POD
        self.inventory = inventory()
        self.polls = 0
        self.allocations: Mapping[ContainerKey, Allocation] = {SHARE.key: SHARE}
        self.resized: Mapping[ContainerKey, ResizedShare] = {}
        self.limits = RegionLimits(
            files=self.files,
            config=HamiCoreSettings(directory=directory / "hami", **scaling),  # type: ignore[arg-type]
            names=NAMES,
            inventory=lambda: self.inventory,
            allocations=lambda: self.allocations,
            resized=lambda: self.resized,
            pods=self,
            is_in_use=lambda pod: True,
            period_s=0.01,
        )

    def get(self, uid: PodUid) -> Pod | None:
        self.polls += 1
        return self.pod

    def start_program(self, used_mib: int = 0) -> None:
        """As its first cuInit does."""
        self.cache.write_bytes(region_file(slots=[(1, 4711, used_mib * MIB)]))

    def written(self) -> tuple[int, int]:
        """MiB and percent of the first GPU."""
        raw = self.cache.read_bytes()
        memory = struct.unpack_from("<Q", raw, layout.LIMITS_OFFSET)[0]
        return memory // MIB, struct.unpack_from("<Q", raw, layout.CORE_LIMITS_OFFSET)[0]


@pytest.fixture
def world(short_dir: Path) -> World:
    return World(short_dir)


async def test_the_limits_of_a_resized_share_are_written(world: World) -> None:
    """Those of the GPU that the container sees, and nothing else of the file."""
    world.start_program()
    before = world.cache.read_bytes()
    assert await world.limits.enforce(GROWN, POD) == ""
    assert world.written() == (24 * 256, 50)
    after = world.cache.read_bytes()
    changed = {n for n in range(len(after)) if after[n] != before[n]}
    places = (layout.LIMITS_OFFSET, layout.CORE_LIMITS_OFFSET)
    assert changed <= {place + n for place in places for n in range(8)}


async def test_scaling_counts_as_in_the_environment(short_dir: Path) -> None:
    """Oversubscribed memory is bounded by the GPU, compute by 100 percent."""
    world = World(short_dir, memory_scaling=8.0, core_scaling=4.0)
    world.start_program()
    assert await world.limits.enforce(GROWN, POD) == ""
    assert world.written() == (24 * 1024, 100)


async def test_a_limit_is_lowered_no_further_than_to_what_is_in_use(world: World) -> None:
    """Below it the library answers cuMemGetInfo with an error. What is charged is the most, whatever the region says."""
    shrunk = replace(SHARE, resized_to=ShareSize(cores=30, memory=4))
    allocated = SHARE.allocated_size
    world.resized = {
        SHARE.key: ResizedShare(
            key=SHARE.key,
            gpu=SHARE.gpus[0],
            kind=ResourceKind.VMEMORY,
            allocated=allocated,
            target=ShareSize(cores=30, memory=4),
            charged=allocated,
        )
    }
    for used_mib, limit_mib in ((1500, 1500), (1 << 20, 8 * 256), (1025, 1025)):
        world.start_program(used_mib)
        why_not = await world.limits.enforce(shrunk, POD)
        assert why_not == f"its processes still have {limit_mib - 1024} MiB more"
        assert world.written() == (limit_mib, 30)
    world.start_program(1024)
    assert await world.limits.enforce(shrunk, POD) == ""
    assert world.written() == (1024, 30)


async def test_without_a_process_there_is_nothing_to_write(world: World) -> None:
    """The first one makes the region from the environment: it is written then."""
    assert await world.limits.enforce(GROWN, POD) == NO_REGION
    world.start_program()
    assert await world.limits.enforce(GROWN, POD) == ""


async def test_what_a_tenant_makes_of_the_file_is_an_error_of_that_share(world: World) -> None:
    """A link is not followed, another size or magic is no region."""
    for content in (b"x", bytes(layout.FILE_BYTES)[:-1] + b"xx", struct.pack("<i", 7) + bytes(layout.FILE_BYTES - 4)):
        world.cache.write_bytes(content)
        with pytest.raises(Corrupt):
            await world.limits.enforce(GROWN, POD)
    other = world.cache.parent.parent / "other"
    other.write_bytes(region_file())
    world.cache.unlink()
    world.cache.symlink_to(other)
    with pytest.raises(Corrupt):
        await world.limits.enforce(GROWN, POD)
    assert other.read_bytes() == region_file()
    world.cache.unlink()
    with pytest.raises(NotFound):
        await world.limits.enforce(GROWN, POD)


async def test_an_elastic_ceiling_is_followed_while_the_container_runs(world: World) -> None:
    """Also when the region is made anew, and when the annotation goes. Shares without one are left alone."""
    world.start_program()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("limits", world.limits.run))
        world.pod = replace(POD, annotations={CORE_LIMIT_ANNOTATION: "80"})
        await poll_until(lambda: world.written() == (8 * 256, 80), "the ceiling")
        world.start_program()
        await poll_until(lambda: world.written() == (8 * 256, 80), "the ceiling, again")
        world.pod = POD
        await poll_until(lambda: world.written() == (8 * 256, 30), "the share")
        await stop_task(task)


async def test_nothing_is_written_while_the_driver_does_not_report_the_gpus_memory(world: World) -> None:
    """Of such a GPU it reports the UUID alone, with 0 MiB. A limit of 0 would be none."""
    world.start_program()
    await world.limits.enforce(SHARE, POD)
    before = world.cache.read_bytes()
    gpus = tuple(replace(gpu, memory_mib=0) for gpu in world.inventory.gpus)
    world.inventory = replace(world.inventory, gpus=gpus)
    assert "memory is not known" in await world.limits.enforce(SHARE, POD)
    assert world.cache.read_bytes() == before


@pytest.mark.parametrize("kind", [ResourceKind.VCORE, ResourceKind.VMEMORY])
async def test_nothing_is_written_between_the_allocates_of_two_resources(world: World, kind: ResourceKind) -> None:
    """A container that is admitted again has the region of before, and for a moment one resource alone."""
    world.start_program()
    await world.limits.enforce(SHARE, POD)
    before = world.cache.read_bytes()
    half = SHARE.with_ids(kind, frozenset())
    assert "not wholly allocated" in await world.limits.enforce(half, POD)
    assert world.cache.read_bytes() == before


async def test_a_tenant_cannot_fill_the_log_by_its_region(world: World) -> None:
    """Each poll finds another version there, and sometimes a good one: that is one line."""
    world.pod = replace(POD, annotations={CORE_LIMIT_ANNOTATION: "80"})
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("limits", world.limits.run))
            for version in range(3):
                world.cache.write_bytes(struct.pack("<ii", 7, version) + bytes(layout.FILE_BYTES - 8))
                end = world.polls + 3
                await poll_until(lambda end=end: world.polls >= end, "a whole poll")  # type: ignore[misc]
                world.start_program()
                await poll_until(lambda: world.written() == (8 * 256, 80), "the ceiling")
            await stop_task(task)
    assert [line["event"] for line in lines] == ["region_limits_not_written"]
