"""libgpushare with the files that isolation gpushare makes and changes, as the agent does: memory, cores, a live resize."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.gpushare.check import check_gpushare
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.settings.sections import LibgpushareSettings
from gpushare_agent.core.settings.settings import Settings
from native.build_gpushare import build_gpushare
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, CONTEXT_MIB, KEY, MIB, SHARE_MIB, TAKE, prepared, uuid_of
from tests.native.build import cuda_include
from tests.native.gpu_program import blocks_in, finish

pytestmark = pytest.mark.isolation


def limits(memory_mib: int = SHARE_MIB, cores: int = 3000) -> GpuLimits:
    return GpuLimits(uuid=uuid_of("0"), memory_bytes=memory_mib * MIB, cores=cores)


@pytest.mark.smoke
def test_memory_ends_at_the_limit_and_follows_a_resize_while_the_program_runs(machine_with: MachineWith) -> None:
    """8 blocks of 256 MiB and a context of 300 MiB in 2,560 MiB; then 10 more; then nothing until as much has been freed."""
    files, share = prepared(machine_with(), [limits()])
    with share.running(TAKE, "wait", TAKE, "wait", TAKE, "info", "free", TAKE) as program:
        assert files.held_bytes(KEY) == {limits().uuid: (CONTEXT_MIB + 8 * BLOCK_MIB) * MIB}
        files.write_limits(KEY, [limits(20 * BLOCK_MIB)])
        more = program.go_on()
        files.write_limits(KEY, [limits(6 * BLOCK_MIB)])
        ended = program.finish()
    found = (*blocks_in(program.said), *blocks_in(more), *ended.blocks())
    assert found == (8, 10, 0, 4), ended.error
    assert (ended.step("info")["free_mib"], ended.step("info")["total_mib"]) == (0, 6 * BLOCK_MIB)


def test_more_cores_are_followed_by_a_launch_that_waits(machine_with: MachineWith) -> None:
    """In real time: it would wait for minutes at the old share."""
    files, share = prepared(machine_with(sm_count=132, block_us=100000), [limits()])
    files.write_limits(KEY, [limits(cores=10)])
    program = share.start("launch:sync:0.3:1056", "launch:kernel:0.1:1056")
    while share.usage()[0].launched_ns < 150_000_000:
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)
    files.write_limits(KEY, [limits(cores=10000)])
    began = time.monotonic()
    assert finish(program).code == 0 and time.monotonic() - began < 20


async def test_the_library_as_the_image_would_have_it_is_found_by_check(tmp_path: Path) -> None:
    built = tmp_path / "libgpushare.so"
    build_gpushare(cuda_include(), built)
    own = LibgpushareSettings(library=built, directory=tmp_path / "own")
    found = await check_gpushare(Settings(libgpushare=own))
    assert found[0].level is Level.OK and found[1].level is not Level.ERROR, found
