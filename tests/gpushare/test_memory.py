"""libgpushare's limit of memory: every way to ask for a function, every kind of memory, every end of a process.

A share of 2,560 MiB; a context takes 300 MiB, so 8 blocks of 256 MiB fit.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

import pytest

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_NAME
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import (
    BLOCK_MIB,
    CONTEXT_MIB,
    MIB,
    SETTLED_NS,
    SHARE_MIB,
    TAKE,
    Container,
    needs_own_programs,
)
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

OUT_OF_MEMORY, INVALID_DEVICE = 2, 101
KINDS = ("alloc", "managed", "pitch", "async", "pool", "vmm", "mapped", "array", "array3d", "mipmapped", "graphmem")
V1, V2 = "cuGetProcAddress", "cuGetProcAddress_v2"
WAYS = (("link", 0), ("dlsym", 0), ("next", 0), ("deepbind", 0), (V1, 11080), (V2, 11080), (V2, 12080), (V2, 13000))


@pytest.mark.smoke
@pytest.mark.parametrize(("way", "version"), WAYS)
def test_every_way_to_a_function_ends_at_the_limit(share: Container, way: str, version: int) -> None:
    ended = share.run(TAKE, "info", way=way, version=version)
    assert (ended.step("alloc")["blocks"], ended.step("alloc")["result"]) == (8, OUT_OF_MEMORY), ended.error
    info = ended.step("info")
    assert (info["total_mib"], info["free_mib"]) == (SHARE_MIB, SHARE_MIB - CONTEXT_MIB - 8 * BLOCK_MIB)
    assert (info["device_total_mib"], ended.error) == (SHARE_MIB, "")


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_memory_is_counted_and_given_back(share: Container, kind: str) -> None:
    """A pool gives it back when the program waits for the GPU; memory of a graph's nodes stays until there is too little."""
    ended = share.run(f"alloc:{kind}:{BLOCK_MIB}:20", "info", "free", "sync", "info", TAKE)
    first, last = ended.blocks()
    before, after = (step["free_mib"] for step in ended.steps if step["action"] == "info")
    assert (first, before) == (8, SHARE_MIB - CONTEXT_MIB - 8 * BLOCK_MIB), ended.error
    assert (after, last) == (before if kind == "graphmem" else SHARE_MIB - CONTEXT_MIB, 8)


def test_what_was_freed_is_given_back_when_the_program_has_waited(share: Container) -> None:
    """To another process of the container, which cannot ask the first one's driver."""
    with share.running(f"alloc:async:{BLOCK_MIB}:20", "free", "sync", "wait"):
        second = share.run(TAKE)
    assert second.blocks() == [(SHARE_MIB - 2 * CONTEXT_MIB) // BLOCK_MIB], second.error


ASKING = r"""
import ctypes, json, pynvml
cuda, made, free, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_uint64()
class Pairs(ctypes.Structure):
    _fields_ = (("pairs", ctypes.c_char_p), ("count", ctypes.c_uint), ("rest", ctypes.c_char * 52))
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0), cuda.cuCtxSetCurrent(made)
pool = ctypes.c_void_p()
imported = cuda.cuMemPoolImportFromShareableHandle(ctypes.byref(pool), None, 1, ctypes.c_uint64(0))
refused = cuda.cuMemAllocFromPoolAsync(ctypes.byref(at), ctypes.c_size_t(1 << 20), pool, None)
cuda.cuMemGetInfo_v2(ctypes.byref(free), None)
restored = [cuda.cuCheckpointProcessRestore(1, ctypes.byref(Pairs(b"a" * 16 + to * 16, 1))) for to in (b"a", b"b")]
pynvml.nvmlInit()
gpu, version = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.nvmlProcessDetailList_v1
listed = [pynvml.nvmlDeviceGetRunningProcessDetailList(gpu, version, mode) for mode in (0, 3)]
mib = [[one.usedGpuMemory >> 20 for one in each] for each in listed]
print(json.dumps({"action": "asked", "pool": [imported, refused, free.value >> 20], "restored": restored, "mib": mib}))
"""


@needs_own_programs
def test_what_is_another_process_s_is_neither_counted_nor_shown(share: Container) -> None:
    """A pool that was imported, its neighbour's row in NVML's list; and no process is restored onto another GPU."""
    neighbour = share.machine.container("neighbour", memory_mib=SHARE_MIB)
    with neighbour.running(f"alloc:alloc:{BLOCK_MIB}:1", "wait"):
        asked = finish(share.start_command([sys.executable, "-c", ASKING]))
    step = asked.step("asked")
    assert step, asked.error
    assert step["pool"] == [0, 1, SHARE_MIB - CONTEXT_MIB], asked.error
    assert step["restored"] == [0, 801] and "onto the GPU of its share alone" in asked.error
    assert step["mib"] == [[CONTEXT_MIB], [CONTEXT_MIB]]


OF_GPU, OF_HOST = 8, 20
ANY_HOST, NODE_OF_THREAD, NODE_0, NODE_1, NODE_OF_GPU_1 = "at:2:0", "at:4:0", "at:3:0", "at:3:1", "at:3:2"


@pytest.mark.parametrize("kind", ["vmm", "mapped", "pool"])
@pytest.mark.parametrize(
    ("place", "blocks"),
    [(NODE_1, OF_GPU), (NODE_0, OF_HOST), (NODE_OF_GPU_1, OF_HOST), (ANY_HOST, OF_HOST), (NODE_OF_THREAD, OF_HOST)],
)
def test_memory_of_a_node_of_the_host_counts_where_it_is_the_gpus(
    share: Container, kind: str, place: str, blocks: int
) -> None:
    """As GH200 in NUMA mode has it: the GPU's memory is node 1. Memory of the host is free, and given back all the same."""
    ended = share.run(place, f"alloc:{kind}:{BLOCK_MIB}:20", "info", "free", TAKE)
    assert ended.blocks() == [blocks, 8], ended.error
    taken_mib = blocks * BLOCK_MIB if blocks == OF_GPU else 0
    assert ended.step("info")["free_mib"] == SHARE_MIB - CONTEXT_MIB - taken_mib


@pytest.mark.parametrize("kind", ["vmm", "pool"])
@pytest.mark.parametrize(("numa_node", "processors", "blocks"), [(1, "", 0), (1, "0-71", OF_HOST), (0, "", OF_HOST)])
def test_the_node_of_another_gpu_is_refused(
    machine_with: MachineWith, kind: str, numa_node: int, processors: str, blocks: int
) -> None:
    """The program does not see that GPU; but in NUMA mode only GPUs' nodes have no processors."""
    share = machine_with(numa_node=numa_node).container(memory_mib=SHARE_MIB)
    (share.directory / "node2").mkdir()
    (share.directory / "node2" / "cpulist").write_text(f"{processors}\n")
    ended = share.run(NODE_OF_GPU_1, f"alloc:{kind}:{BLOCK_MIB}:20")
    assert ended.step("alloc")["blocks"] == blocks
    assert ("names another GPU than the program uses" in ended.error) == (blocks == 0)


def test_of_a_gpu_that_is_not_there_the_driver_s_error_is_shown(share: Container) -> None:
    ended = share.run("at:1:7", f"alloc:vmm:{BLOCK_MIB}:1")
    assert (ended.step("alloc")["result"], ended.error) == (INVALID_DEVICE, "")


@pytest.mark.parametrize("place", [ANY_HOST, NODE_0, NODE_1])
def test_a_pool_of_managed_memory_counts_wherever_it_begins(share: Container, place: str) -> None:
    ended = share.run(f"{place}:2", f"alloc:pool:{BLOCK_MIB}:20", "free", TAKE)
    assert ended.blocks() == [8, 8], ended.error


@pytest.mark.parametrize(
    ("driver", "kind", "blocks"),
    [
        pytest.param({"numa_node": 0}, "vmm", OF_HOST, id="no NUMA mode"),
        pytest.param(
            {"cuda_version": 12080}, "pool", OF_GPU, id="before CUDA 13: it does not say whose a pool's memory is"
        ),
    ],
)
def test_a_node_of_the_host_counts_where_it_may_be_the_gpus(
    machine_with: MachineWith, driver: dict[str, int], kind: str, blocks: int
) -> None:
    share = machine_with(**driver).container(memory_mib=SHARE_MIB)
    assert share.run(NODE_1, f"alloc:{kind}:{BLOCK_MIB}:20").blocks() == [blocks]


@pytest.mark.parametrize("unified", [0, 1])
def test_a_program_is_shown_its_share_by_cuda_and_by_nvml(machine_with: MachineWith, unified: int) -> None:
    """Also where the GPU has the host's memory, as GB10, of which NVML says nothing."""
    share = machine_with(unified=unified).container(memory_mib=SHARE_MIB)
    ended = share.run("alloc:alloc:256:4", "info", "nvml", TAKE)
    info, nvml = ended.step("info"), ended.step("nvml")
    used_mib = CONTEXT_MIB + 4 * BLOCK_MIB
    shown = info["total_mib"], info["device_total_mib"], info["free_mib"]
    assert shown == (SHARE_MIB, SHARE_MIB, SHARE_MIB - used_mib)
    assert (nvml["result"], nvml["total_mib"], nvml["newer_total_mib"]) == (0, SHARE_MIB, SHARE_MIB)
    assert (nvml["used_mib"], nvml["newer_used_mib"], nvml["processes"]) == (used_mib, used_mib, 1)
    assert ended.step("alloc")["blocks"] == 4


GRAPH_OF_4, GRAPH_OF_6 = f"graph:{4 * BLOCK_MIB}:1", f"graph:{6 * BLOCK_MIB}:1"
FOUR_PARTS_AFTER_EACH_OTHER = f"graph:{4 * BLOCK_MIB}:4"
THREE_BLOCKS = f"alloc:alloc:{BLOCK_MIB}:3"


@pytest.mark.parametrize(
    ("actions", "results", "free_blocks"),
    [
        ([GRAPH_OF_4, GRAPH_OF_6, "replay:0", "destroy:0", THREE_BLOCKS, "replay:1"], [0, 2], 5),
        ([GRAPH_OF_4, "replay:0", "trim", "replay:0"], [0, 0], 4),
        ([GRAPH_OF_4, "replay:0", "trim", TAKE, "replay:0", "free", "replay:0"], [0, 2, 0], 4),
        ([GRAPH_OF_4, "replay:0", TAKE, "replay:0", "free", "replay:0"], [0, 2, 0], 4),
        ([GRAPH_OF_6, "replay:0", "replay:0", THREE_BLOCKS, "replay:0"], [0, 0, 2], 5),
        ([GRAPH_OF_4, GRAPH_OF_6, "replay:1", "replay:0", "replay:1", "replay:0"], [0, 0, 0, 0], 2),
        ([GRAPH_OF_4, GRAPH_OF_6, "replay:0", "trim", THREE_BLOCKS, "replay:0", "replay:0"], [0, 0, 0], 1),
        ([FOUR_PARTS_AFTER_EACH_OTHER, THREE_BLOCKS, "replay:0", "trim", "replay:0"], [0, 0], 1),
        ([f"alloc:graphmem:{4 * BLOCK_MIB}:1", GRAPH_OF_4, "replay:0", "trim", "replay:0"], [0, 0], 0),
        ([f"{GRAPH_OF_6}:child", "replay:0", "trim", THREE_BLOCKS, "replay:0"], [0, 2], 5),
        ([f"{GRAPH_OF_6}{':child' * 10}", THREE_BLOCKS, "replay:0"], [2], 5),
    ],
)
def test_a_graph_that_is_launched_has_its_memory_of_the_share(
    share: Container, actions: list[str], results: list[int], free_blocks: int
) -> None:
    """A trim, the program's or the library's own where there is too little, takes it; the next launch maps it again (CUDA
    Programming Guide, "Graph Memory Nodes", on what they have of physical memory). So that one is counted or refused,
    as the first."""
    ended = share.run(*actions, "info")
    assert [step["result"] for step in ended.steps if step["action"] == "replay"] == results, ended
    assert ended.step("info")["free_mib"] == free_blocks * BLOCK_MIB + (SHARE_MIB - CONTEXT_MIB) % BLOCK_MIB


def test_a_graph_is_counted_however_deep_it_is_and_however_small_the_stack(share: Container) -> None:
    deep, stack = f"{GRAPH_OF_6}{':child' * 4000}", ["prlimit", f"--stack={768 << 10}"]
    ended = share.run(deep, THREE_BLOCKS, "replay:0", prefix=stack)
    assert [step["result"] for step in ended.steps if step["action"] == "replay"] == [OUT_OF_MEMORY], ended


@pytest.mark.parametrize(
    ("actions", "blocks"),
    [
        (
            [GRAPH_OF_4, "info", "replay:0", "info", "replay:0", "info", "trim", "info", "replay:0", "info"],
            [0, 4, 4, 0, 4],
        ),
        ([GRAPH_OF_4, GRAPH_OF_6, "replay:0", "info", "replay:1", "info", "replay:0", "info"], [4, 6, 6]),
        ([GRAPH_OF_4, "replay:0", "destroy:0", "info", "trim", "info"], [4, 0]),
        ([FOUR_PARTS_AFTER_EACH_OTHER, "replay:0", "info"], [4]),
        ([f"alloc:graphmem:{BLOCK_MIB}:2", "trim", "info", "free", "info", "trim", "info"], [2, 2, 0]),
    ],
)
def test_the_fake_driver_has_memory_of_graphs_as_nvidia_s(
    share: Container, actions: list[str], blocks: list[int]
) -> None:
    """Without the library. By NVIDIA's sample graphMemoryFootprint, for graphs that run one after the other."""
    steps = share.run(*actions, preload=[]).steps
    free_mib = [step["free_mib"] for step in steps if step["action"] == "info"]
    assert [24576 - CONTEXT_MIB - free for free in free_mib] == [BLOCK_MIB * count for count in blocks], steps


def test_a_graph_that_is_uploaded_has_its_memory_of_the_share(share: Container) -> None:
    """By a call, or as it is instantiated. One that is refused is not made."""
    ended = share.run(
        GRAPH_OF_4, "upload:0", "info", "replay:0", "trim", THREE_BLOCKS, f"uploaded:{6 * BLOCK_MIB}", "info"
    )
    assert [step["free_mib"] // BLOCK_MIB for step in ended.steps if step["action"] == "info"] == [4, 5]
    assert [step["result"] for step in ended.steps if step["action"] == "graph"] == [0, OUT_OF_MEMORY]


@pytest.mark.parametrize("kind", ["host", "ipc"])
def test_memory_of_the_host_and_of_others_is_not_counted(share: Container, kind: str) -> None:
    """What is opened was counted where it was taken: here in the same program."""
    ended = share.run(f"alloc:{kind}:{BLOCK_MIB}:20", "info")
    assert (ended.step("alloc")["blocks"], ended.code) == (20, 0)
    assert ended.step("info")["free_mib"] == SHARE_MIB - CONTEXT_MIB - (BLOCK_MIB if kind == "ipc" else 0)


def test_mixed_kinds_have_the_share_together(share: Container) -> None:
    assert share.run(*(f"alloc:{kind}:{BLOCK_MIB}:1" for kind in KINDS)).blocks() == [1] * 8 + [0] * 3


def test_the_driver_s_places_for_answers_may_be_missing(share: Container) -> None:
    step = share.run("infonull").step("infonull")
    assert step["results"] == [0, 0, 0]
    assert (step["free_mib"], step["total_mib"]) == (SHARE_MIB - CONTEXT_MIB, SHARE_MIB)


@pytest.mark.smoke
def test_a_killed_process_s_memory_is_free_at_once(share: Container) -> None:
    assert share.run(f"alloc:alloc:{BLOCK_MIB}:6", "kill").code == -9
    assert share.run(TAKE).blocks() == [8]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs unshare and root for PID namespaces"
)
@pytest.mark.parametrize("is_limited", [True, False])
def test_processes_in_pid_namespaces_see_each_other_s_memory(machine_with: MachineWith, is_limited: bool) -> None:
    """As containers that share a claim: a PID says nothing there. One that is killed leaves nothing; without the library the
    driver itself must see that, from another namespace."""
    machine = machine_with() if is_limited else machine_with(memory_mib=SHARE_MIB)
    share = machine.container(memory_mib=SHARE_MIB)
    how = {"prefix": ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]}
    how |= {} if is_limited else {"preload": []}
    with share.running(f"alloc:alloc:{BLOCK_MIB}:4", "wait", **how):
        assert share.run(TAKE, **how).blocks() == [3]
    assert share.run(TAKE, **how).blocks() == [8]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs setpriv and root for another user")
def test_users_of_a_container_have_the_share_together(share: Container) -> None:
    """Where the agent made the region writable to all."""
    (share.directory / USAGE_NAME).chmod(0o666)
    for path in (*share.directory.parents, share.directory, *share.machine.built.library.parents):
        if any(part.startswith("pytest-") for part in path.parts):
            path.chmod(0o755)  # pytest's are for one user alone
    assert share.run(f"alloc:alloc:{BLOCK_MIB}:6", "kill").code == -9
    ended = share.run(TAKE, prefix=["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"])
    assert ended.step("alloc").get("blocks") == 8, ended.error


def test_a_process_that_is_killed_anywhere_leaves_nothing(share: Container) -> None:
    """Between any two instructions of a program that takes and gives all kinds, two at a time."""
    actions = [f"alloc:{kind}:64:3" for kind in KINDS if kind != "graphmem"]
    for number in range(15):
        programs = [share.start(*[*actions, "free"] * 300) for _ in range(2)]
        time.sleep(0.04 + 0.003 * number)
        for program in programs:
            program.kill()
        for program in programs:
            assert finish(program).error == ""
    assert share.run(TAKE).blocks() == [8]


def test_a_child_of_fork_is_counted_beside_its_parent(share: Container) -> None:
    """It has a context of its own; the parent's three blocks stay the parent's."""
    ended = share.run(f"alloc:alloc:{BLOCK_MIB}:3", "fork", TAKE)
    assert ended.blocks() == [3, 4], ended.error


@pytest.mark.parametrize(("used_mib", "blocks"), [(CONTEXT_MIB + 512, 6), (CONTEXT_MIB - 256, 9), (CONTEXT_MIB, 8)])
def test_what_the_agent_observes_is_believed_once_nothing_changes(share: Container, used_mib: int, blocks: int) -> None:
    """More than was counted: modules, rounding. Less: a context that was estimated too high."""
    with share.running("wait", "info", TAKE) as program:
        share.observe(used_mib, SETTLED_NS)
        ended = program.finish()
    assert (ended.step("info")["free_mib"], ended.step("alloc")["blocks"]) == (SHARE_MIB - used_mib, blocks)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_was_observed_of_a_program_that_has_ended_is_not_taken_for_the_next_one_s(
    share: Container, is_killed: bool
) -> None:
    """The agent writes nothing more of a container without a process, so the last that it saw stays in the file."""
    with share.running(f"alloc:alloc:{BLOCK_MIB}:6", "wait") as first:
        time.sleep(0.4)  # so that it is settled before the next program begins
        share.observe(CONTEXT_MIB + 6 * BLOCK_MIB)
        if not is_killed:
            first.finish()
    ended = share.run("info", TAKE)
    assert (ended.step("info")["free_mib"], ended.step("alloc")["blocks"]) == (SHARE_MIB - CONTEXT_MIB, 8)


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["no config", "no usage", "layout of config", "layout of usage", "short config"])
def test_without_limits_no_memory_is_given_and_one_line_says_why(share: Container, fault: str) -> None:
    """Never "no limit" in silence; launches go through, and the program is not ended."""
    config, usage = share.directory / CONFIG_NAME, share.directory / USAGE_NAME
    path = config if "config" in fault else usage
    if fault.startswith("no"):
        path.unlink()
    elif fault.startswith("layout"):
        path.write_bytes(path.read_bytes()[:4] + b"\x02" + path.read_bytes()[5:])
    else:
        path.write_bytes(path.read_bytes()[:100])
    ended = share.run(TAKE, TAKE, "launch:kernel:0.1", "info")
    assert ended.blocks() == [0, 0]
    assert (ended.step("launch")["result"], ended.code) == (0, 0)
    assert ended.step("launch")["kernels"] > 0
    assert ended.error.startswith("gpushare: ./") and ended.error.count("\n") == 1


def test_a_full_gpu_refuses_though_the_share_has_room(machine_with: MachineWith) -> None:
    """The driver's answer passes, and one line says why; nothing stays counted."""
    share = machine_with(memory_mib=1024).container(memory_mib=SHARE_MIB)
    ended = share.run(TAKE, TAKE, "free", "info")
    assert ended.blocks() == [2, 0]
    assert (ended.step("info")["free_mib"], ended.error.count("\n")) == (1024 - CONTEXT_MIB, 1)
    assert "though the container's share has" in ended.error
    assert share.usage()[0].held_bytes == CONTEXT_MIB * MIB


def test_a_gpu_that_the_agent_does_not_name_gives_no_memory(machine_with: MachineWith) -> None:
    share = machine_with(uuid_prefix="GPU-11111111-0000-4000-8000-").container(memory_mib=SHARE_MIB)
    ended = share.run(TAKE)
    assert (ended.step("alloc")["blocks"], ended.code) == (0, 0)
    assert ended.error.count("\n") == 1 and "another GPU" in ended.error


def test_without_a_limit_of_memory_all_is_given(machine_with: MachineWith) -> None:
    ended = machine_with().container(cores=3000).run(TAKE, "info")
    assert (ended.step("alloc")["blocks"], ended.step("info")["total_mib"]) == (20, 24576)
