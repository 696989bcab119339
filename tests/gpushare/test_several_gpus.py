"""The limits that the agent makes of allocations, on the real library: replicas of several GPUs, gpu-mem, MIG instances."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.edits import live_limits
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid, unit_id
from gpushare_agent.core.model.resources import ResourceKind
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, POD, Container, Machine
from tests.support_core import NAMES, allocation, container, inventory, pod

pytestmark = pytest.mark.isolation

KEY = ContainerKey(PodUid(POD), "main")
GPU_MIB = 10240
TAKE = f"alloc:alloc:{BLOCK_MIB}:50"
"""A GPU of 10,240 MiB with a context of 300 has 38 blocks of 256 MiB."""


def gpus(count: int, prefix: str = "GPU-00000000-0000-4000-8000-") -> dict[GpuUuid, Gpu]:
    """Those of the fake driver."""
    found = inventory(count, memory_mib=GPU_MIB).gpus
    return {uuid: replace(gpu, uuid=uuid) for n, gpu in enumerate(found) if (uuid := GpuUuid(f"{prefix}{n:012x}"))}


def having(kind: ResourceKind, devices: Sequence[DeviceId]) -> Allocation:
    owner = pod("owner", container(KEY.container), uid=KEY.pod_uid)
    own = allocation(owner, KEY.container, [], [])
    found = tuple(sorted({GpuUuid(device.split("::")[0]) for device in devices}))
    return replace(own, ids={kind: frozenset(devices)}, gpus=found)


def prepared(machine: Machine, limits: Sequence[GpuLimits]) -> tuple[GpushareFiles, Container]:
    files = GpushareFiles(
        Library(machine.built.library, machine.directory / "own"), machine.directory / "vm", lambda _: limits
    )
    files.library._write(b"installed")  # not the library, which is preloaded from where it was built
    files.prepare(KEY)
    return files, Container(machine, files.container_directory(KEY))


def taken(share: Container, count: int, *actions: str, **env: str) -> list[int]:
    ended = share.run(*actions, env={"FAKE_GPU_GPUS": str(count), **env})
    assert ended.code == 0, ended.error
    return [step["blocks"] for step in ended.steps if step["action"] == "alloc"]


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["0,1,2", "2,0,1"])
def test_each_gpu_has_its_own_limit_in_whatever_order_a_program_sees_them(
    machine_with: MachineWith, order: str
) -> None:
    """A quarter of one, half of another, all of the third; then a live resize of one."""
    known = gpus(3)
    first, second, third = known
    units = [unit_id(first, 0, "4s"), unit_id(second, 0, "4s"), unit_id(second, 1, "4s"), unit_id(third, 0, "1")]
    limits = live_limits([having(ResourceKind.GPU, units)], None, known, NAMES)
    assert limits is not None
    assert limits[0] == GpuLimits(uuid=first, memory_bytes=GPU_MIB // 4 << 20, cores=2500) and limits[2] == GpuLimits(
        uuid=third
    )
    files, share = prepared(machine_with(memory_mib=GPU_MIB), limits)
    places = [order.split(",").index(str(n)) for n in range(3)]
    actions = [action for place in places for action in (f"gpu:{place}", TAKE)]
    blocks = taken(share, 3, *actions, CUDA_VISIBLE_DEVICES=order)
    assert blocks[:2] == [8, 18] and blocks[2] >= 37
    files.write_limits(KEY, [replace(limits[1], memory_bytes=GPU_MIB // 4 << 20)])
    assert taken(share, 3, *actions[:4], CUDA_VISIBLE_DEVICES=order) == [8, 8]


@pytest.mark.parametrize("place", ["at:1:1", "at:3:2"])
def test_a_pool_counts_on_the_gpu_whose_memory_it_has(machine_with: MachineWith, place: str) -> None:
    """It is used in a context of the first GPU, and is of the second one, by its number and by its node of the host."""
    limits = [GpuLimits(uuid=uuid, memory_bytes=2560 << 20) for uuid in gpus(2)]
    _, share = prepared(machine_with(memory_mib=GPU_MIB), limits)
    pool = f"alloc:pool:{BLOCK_MIB}:50"
    assert taken(share, 2, place, pool, TAKE, "free", pool, TAKE) == [10, 8, 10, 8]


def test_gpu_mem_is_limited_in_memory_and_in_compute_in_proportion(machine_with: MachineWith) -> None:
    """Three of ten units of a GiB; of 1,000 launches a second about 300."""
    known, names = gpus(1), replace(NAMES, gpu_mem="aliyun.com/gpu-mem", gpu_mem_unit_mib=1024)
    units = [DeviceId(f"{next(iter(known))}::{n}") for n in range(3)]
    limits = live_limits([having(ResourceKind.GPU_MEM, units)], None, known, names)
    assert limits == (GpuLimits(uuid=next(iter(known)), memory_bytes=3072 << 20, cores=3000),)
    machine = machine_with(memory_mib=GPU_MIB, sm_count=132, block_us=1000, lag_ms=200)
    _, share = prepared(machine, limits)
    assert taken(share, 1, TAKE) == [10]
    [ended] = machine.run_virtual((share, ["launch:kernel:6:1056"]))
    assert (ended.code, ended.error) == (0, "")
    assert ended.rates()[0] / 10 == pytest.approx(30, abs=5)


def test_the_memory_of_a_mig_instance_is_limited_by_its_uuid(machine_with: MachineWith) -> None:
    known = gpus(2, "MIG-00000000-0000-4000-8000-")
    limits = [GpuLimits(uuid=uuid, memory_bytes=2560 << 20) for uuid in known]
    machine = machine_with(memory_mib=GPU_MIB, uuid_prefix="MIG-00000000-0000-4000-8000-")
    _, share = prepared(machine, limits[:1])
    assert taken(share, 1, TAKE) == [8]
