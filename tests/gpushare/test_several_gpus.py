"""The limits that the agent makes of allocations, on the real library: replicas of several GPUs, gpu-mem, MIG instances."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.edits import live_limits
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import DeviceId, GpuUuid, unit_id
from gpushare_agent.core.model.resources import ResourceKind
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, CONTEXT_MIB, KEY, Container, Machine, prepared
from tests.native.gpu_program import Ended
from tests.support_core import NAMES, allocation, container, inventory, pod

pytestmark = pytest.mark.isolation

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


def taken(share: Container, count: int, *actions: str, **env: str) -> list[int]:
    ended = share.run(*actions, env={"FAKE_GPU_GPUS": str(count), **env})
    assert ended.code == 0, ended.error
    return ended.blocks()


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


def test_nvml_shows_a_share_of_its_own_gpu_alone(machine_with: MachineWith) -> None:
    """The container has one of the second GPU, and asks of the first."""
    limits = [GpuLimits(uuid=list(gpus(2))[1], memory_bytes=2560 << 20)]
    _, share = prepared(machine_with(memory_mib=GPU_MIB, gpus=2), limits)
    assert share.run("nvml", env={"FAKE_GPU_GPUS": "2"}).step("nvml")["total_mib"] == GPU_MIB


def told(ended: Ended) -> list[tuple[str, int, int, list[int]]]:
    """What was done, with how many blocks and which result, and what the driver has on each GPU then."""
    return [(step["action"], step["blocks"], step["result"], step["mib"]) for step in ended.steps]


SHARES_MIB = (1024, 2560, None)
"""Of three GPUs; the third has no limit, and of the fourth the agent knows nothing."""
OTHER_GPU_MIB, OTHER_BLOCK_MIB = 5120, 128


def share_of_several(machine: Machine, cores: Sequence[int] = (10000, 10000, 10000)) -> Container:
    limits = [
        GpuLimits(uuid=uuid, memory_bytes=mib and mib << 20, cores=cores[n])
        for n, (uuid, mib) in enumerate(zip(gpus(3), SHARES_MIB, strict=True))
    ]
    return prepared(machine, limits)[1]


OWN_KINDS = ("alloc", "managed", "pitch", "array", "mipmapped", "stack", "heap", "fifo")
"""Of the current context's GPU, whichever the thread has had current before."""
KINDS = ("async", "chosen", "pool", "own", "managedpool", "anywhere", "vmm", "mapped", "domain")
BOUND = ("sparse", "sparse2", "bound", "bound2", "bound3", "address", "address2", "endpoint", "place")
GRAPHS = ("node", "captured", "uploaded")


@pytest.mark.parametrize("cuda_version", [13000, 12020])
@pytest.mark.parametrize("kind", [*OWN_KINDS, *KINDS, *BOUND, *GRAPHS])
def test_memory_counts_on_its_own_gpu_whichever_is_current(
    machine_with: MachineWith, kind: str, cuda_version: int
) -> None:
    """By NVML, as a process sees it that nothing limits. Drivers before CUDA 12.8 and 13 say less of streams and
    pools."""
    machine = machine_with(memory_mib=OTHER_GPU_MIB, gpus=4, cuda_version=cuda_version)
    share = share_of_several(machine)
    for target, current in [(0, 0), (0, 1), (0, -1), (1, 0), (1, -1), (2, 0), (3, 0), (3, -1)]:
        ended = share.run(kind, str(target), str(current), way="other_gpu")
        most = (*SHARES_MIB[:2], OTHER_GPU_MIB, CONTEXT_MIB)[target]
        block = OTHER_BLOCK_MIB + 4 if kind == "stack" else OTHER_BLOCK_MIB
        blocks = (most - CONTEXT_MIB) // block
        idle = [CONTEXT_MIB] * 4
        full = [mib + blocks * block * (gpu == target) for gpu, mib in enumerate(idle)]
        free = ((SHARES_MIB[target] if target < 2 else None) or OTHER_GPU_MIB) - CONTEXT_MIB
        assert told(ended) == 2 * [("take", blocks, 2, full), ("give", free, 0, idle)], (target, current, ended.error)


@pytest.mark.parametrize("way", ["destroy", "detach", "attached", "reset", "release", "green", "within", "parts"])
def test_every_end_of_a_context_gives_back_what_it_had(machine_with: MachineWith, way: str) -> None:
    """Its memory, itself, and what its limits reserved: a heap of a block."""
    share = share_of_several(machine_with(memory_mib=OTHER_GPU_MIB, gpus=2))
    ended = share.run(way, "0", "0", way="other_gpu")
    blocks = (SHARES_MIB[0] - CONTEXT_MIB) // OTHER_BLOCK_MIB
    full, taken = [CONTEXT_MIB + blocks * OTHER_BLOCK_MIB, 0], blocks - (way != "parts")
    assert told(ended) == 3 * [("take", taken, 2, full), ("give", taken, 0, [0, 0])], (ended.code, ended.error)


def test_each_of_many_contexts_counts_and_is_given_back(machine_with: MachineWith) -> None:
    share = machine_with(memory_mib=OTHER_GPU_MIB, context_mib=8).container(memory_mib=1024)
    ended = share.run("contexts", "0", "0", way="other_gpu")
    assert told(ended) == 2 * [("take", 128, 2, [1024]), ("give", 128, 0, [0])], ended.error


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("ordered", [(6, 2, 6 * OTHER_BLOCK_MIB)]),
        ("ended", [(22, 2, 22 * 32), (22, 2, 22 * 32), (0, 2, 22 * 32)]),
        ("kept", [(22, 2, 22 * 32), (22, 0, 0)]),
    ],
)
def test_a_pool_that_has_more_than_is_in_use_ends_at_the_share(
    machine_with: MachineWith, kind: str, steps: list[tuple[int, int, int]]
) -> None:
    """Chunks of pools that were destroyed, until what lies in them is freed, which the end of no context does, and the
    program has waited, also where a pool was to keep them. And freed memory that the driver may not give again yet, for
    which it takes more than anybody could count before, once."""
    ended = share_of_several(machine_with(memory_mib=OTHER_GPU_MIB)).run(kind, "0", "0", way="other_gpu")
    assert [step[1:] for step in told(ended)] == [
        (count, result, [CONTEXT_MIB + mib]) for count, result, mib in steps
    ], ended.error


def test_more_pools_may_be_destroyed_with_memory_in_them_than_are_known(machine_with: MachineWith) -> None:
    ended = machine_with(memory_mib=49152).container(memory_mib=45056).run("ended", "0", "0", way="other_gpu")
    assert told(ended)[0] == ("take", 1200, 0, [CONTEXT_MIB + 1200 * 32]), ended.error


def test_a_graph_whose_memory_cannot_be_noted_is_not_made(machine_with: MachineWith) -> None:
    ended = share_of_several(machine_with(memory_mib=OTHER_GPU_MIB)).run("poor", "0", "0", way="other_gpu")
    assert told(ended)[0][:3] == ("take", 0, 2), ended.error


@pytest.mark.parametrize("current", ["0", "-1"])
@pytest.mark.parametrize(
    ("kind", "target", "rate"),
    [("kernel", "1", 300), ("graph", "1", 300), ("sync", "1", 300), ("multi", "1", 300), ("kernel", "2", 1000)],
)
@pytest.mark.parametrize("cuda_version", [13000, 12020])
def test_a_launch_is_paid_on_the_gpu_of_its_stream(
    machine_with: MachineWith, kind: str, target: str, rate: int, current: str, cuda_version: int
) -> None:
    """The others have no limit. Of 1,000 kernels a second on the second one 300 are the share; a cooperative launch on both
    waits for it."""
    machine = machine_with(sm_count=132, block_us=1000, gpus=3, cuda_version=cuda_version)
    share = share_of_several(machine, cores=(10000, 3000, 10000))
    [ended] = machine.run_virtual((share, (kind, target, current, "3")), way="other_gpu", observed=False)
    assert (ended.code, ended.error) == (0, "")
    assert ended.rates()[0] == pytest.approx(rate, rel=0.15)


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
