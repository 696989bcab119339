"""The fake driver of tests/native: what the real isolation libraries and the agent see of a GPU, between processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from tests.gpus.support_nvml import running_probe
from tests.native.build import CannotBuildError, build_fake_driver
from tests.native.fake_driver.host_view import HostView

pytestmark = [pytest.mark.isolation, pytest.mark.smoke]  # it needs the headers of that session

PROBE = Path(__file__).parent / "fake_driver_probe.py"
CONTEXT = 300 << 20
GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_fake_driver(tmp_path_factory.mktemp("fake-driver"))
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def state(short_dir: Path) -> Path:
    return short_dir / "state"


class Probe:
    """A process that makes driver calls on command: one line of JSON each way."""

    def __init__(self, driver: Path, state: Path, *prefix: str, **settings: object) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("FAKE_GPU_", "CUDA_"))}
        settings = {"devices": "all"} | settings  # whatever GPUs this machine has
        env |= {f"FAKE_GPU_{key.upper()}": str(value) for key, value in settings.items()}
        env |= {"LD_LIBRARY_PATH": str(driver), "FAKE_GPU_STATE": str(state)}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(PROBE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def ask(self, name: str, *arguments: object) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Probe]


@pytest.fixture
def start(driver: Path, state: Path) -> Iterator[Start]:
    """Starts a probe, with a primary context of GPU 0."""
    with ExitStack() as stack:

        def start(*prefix: str, **settings: object) -> Probe:
            probe = Probe(driver, state, *prefix, **settings)
            stack.callback(probe.end)
            assert probe.ask("context", 0) == 0
            return probe

        yield start


def test_memory_is_the_machine_s_and_ends_with_its_process(start: Start) -> None:
    """Two processes share one GPU's memory; that of a killed one is free again, without its help."""
    first, second = start(memory_mib=4096), start(memory_mib=4096)
    assert [first.ask("alloc", GIB) for _ in range(3)] == [0, 0, 0]
    assert second.ask("alloc", GIB) == 2  # CUDA_ERROR_OUT_OF_MEMORY
    assert second.ask("used", 0) == 3 * GIB + 2 * CONTEXT
    first.end()
    assert second.ask("used", 0) == CONTEXT
    assert second.ask("alloc", GIB) == 0


def test_every_kind_of_memory_is_counted(start: Start) -> None:
    """And given back when it is freed; of a pool when the program next waits for the GPU."""
    probe = start()
    for kind in ("alloc", "managed", "pitch", "async", "pool", "vmm", "array", "array3d", "mipmapped"):
        assert probe.ask(kind, GIB) == 0, kind
        assert probe.ask("used", 0) == GIB + CONTEXT, kind
        assert probe.ask("free") == 0, kind
        kept = GIB if kind in ("async", "pool") else 0
        assert probe.ask("used", 0) == kept + CONTEXT, kind
        assert probe.ask("wait") == 0, kind
        assert probe.ask("used", 0) == CONTEXT, kind


def test_mapped_memory_outlives_its_handle(start: Start) -> None:
    probe = start()
    assert probe.ask("mapped", GIB) == 0
    assert probe.ask("used", 0) == GIB + CONTEXT
    assert probe.ask("unmap", GIB) == 0
    assert probe.ask("used", 0) == CONTEXT


def test_a_pool_keeps_what_it_has_reserved_until_it_is_trimmed(start: Start) -> None:
    """Above its threshold until the program waits for the GPU (cuda.h, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)."""
    probe = start()
    assert probe.ask("keep", GIB) == probe.ask("async", 2 * GIB) == probe.ask("free") == 0
    assert probe.ask("used", 0) == 2 * GIB + CONTEXT
    assert probe.ask("wait") == 0
    assert probe.ask("used", 0) == GIB + CONTEXT
    assert probe.ask("async", GIB) == probe.ask("free") == probe.ask("wait") == 0
    assert probe.ask("used", 0) == GIB + CONTEXT
    assert probe.ask("trim") == 0
    assert probe.ask("used", 0) == CONTEXT


def test_its_own_functions_are_not_bound_to_a_preloaded_library(driver: Path) -> None:
    """As in NVIDIA's: neither its own calls nor its table for cuGetProcAddress."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with (driver / name).open("rb") as file:
            elf = ELFFile(file)
            symbols = elf.get_section_by_name(".dynsym")
            exported = {one.name for one in symbols.iter_symbols() if one["st_shndx"] != "SHN_UNDEF"}
            found = [elf.get_section_by_name(section) for section in (".rela.dyn", ".rela.plt")]
            bound = {
                symbols.get_symbol(one["r_info_sym"]).name for part in found if part for one in part.iter_relocations()
            }
        assert len(exported) > 300 and not exported & bound


@pytest.mark.parametrize(
    ("bytes_", "count", "pages"),
    [(1, 1, 1), (MIB - 1, 2, 1), (MIB // 2, 4, 1), (MIB // 2, 5, 2), (700 << 10, 3, 2), (MIB, 2, 2), (MIB + 1, 3, 3),
     (2 * MIB, 1, 1), (2 * MIB + 1, 2, 4)],
)  # fmt: skip
def test_memory_is_taken_in_pages(start: Start, bytes_: int, count: int, pages: int) -> None:
    """Of 2 MiB; less than a MiB shares one with others of its context."""
    probe = start()
    assert [probe.ask("call", "cuMemAlloc_v2", f"&{n}", bytes_) for n in range(count)] == [0] * count
    assert probe.ask("used", 0) == CONTEXT + pages * 2 * MIB
    assert [probe.ask("call", "cuMemFree_v2", f"{n}") for n in range(count)] == [0] * count
    assert probe.ask("used", 0) == CONTEXT


def test_an_asynchronous_allocation_is_of_its_stream_s_gpu(start: Start) -> None:
    """Whichever is current; and its pool grows by 32 MiB."""
    probe = start(gpus=2)
    probe.ask("context", 1)
    assert probe.ask("call", "cuStreamCreate", "&stream", 0) == 0
    probe.ask("context", 0)
    assert probe.ask("call", "cuMemAllocAsync", "&a", 33 * MIB, "stream") == 0
    assert [probe.ask("used", gpu) for gpu in (0, 1)] == [CONTEXT, CONTEXT + 64 * MIB]
    assert probe.ask("call", "cuMemAllocAsync", "&b", MIB, 0) == 0
    assert [probe.ask("used", gpu) for gpu in (0, 1)] == [CONTEXT + 32 * MIB, CONTEXT + 64 * MIB]
    assert [probe.ask("call", "cuMemFreeAsync", name, 0) for name in "ab"] == [0, 0]
    assert probe.ask("wait") == 0
    assert [probe.ask("used", gpu) for gpu in (0, 1)] == [CONTEXT, CONTEXT + 64 * MIB]
    assert probe.ask("call", "cuStreamSynchronize", "stream") == 0
    assert probe.ask("used", 1) == CONTEXT


@pytest.mark.parametrize(
    "end", ["cuCtxDestroy_v2", "cuCtxDetach", "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRelease_v2"]
)
def test_a_context_s_end_frees_what_is_its_own(start: Start, end: str) -> None:
    """Memory of pools and of handles is nobody's (cuda.h, cuCtxDestroy). The other context of the GPU stays as it is."""
    probe = start()
    is_primary = "Primary" in end
    assert probe.ask("alloc", 8 * MIB) == probe.ask("call", "cuCtxCreate_v2", "&made", 0, 0) == 0
    if is_primary:
        assert probe.ask("alloc", 8 * MIB) == probe.ask("context", 0) == 0
        assert probe.ask("call", "cuDevicePrimaryCtxRelease_v2", 0) == 0, "retained twice"
    taken = {"alloc": 16, "managed": 16, "array": 16, "async": 32, "vmm": 16}
    assert [probe.ask(kind, mib * MIB) for kind, mib in taken.items()] == [0] * 5
    assert probe.ask("used", 0) == 2 * CONTEXT + (8 + 8 * is_primary + sum(taken.values())) * MIB
    assert probe.ask("call", end, 0 if is_primary else "made") == 0
    assert probe.ask("used", 0) == CONTEXT + (8 + 32 + 16) * MIB
    assert probe.ask("alloc", MIB) == (201 if is_primary else 0), "there is none, or the one that was current before"


STACK, FIFO, HEAP = 0, 1, 2
THREADS = 132 * 2048


@pytest.mark.parametrize(
    ("limit", "value", "taken"),
    [(STACK, 2048, 1024 * THREADS), (STACK, 1024, 0), (HEAP, GIB, GIB - 8 * MIB), (FIFO, 65 * MIB, 64 * MIB)],
)
def test_limits_of_a_context_take_memory(start: Start, limit: int, value: int, taken: int) -> None:
    """At once, for each thread that the GPU can have; and are given back with a lower one."""
    probe = start()
    assert probe.ask("call", "cuCtxSetLimit", limit, value) == 0
    assert probe.ask("used", 0) == CONTEXT + taken
    assert probe.ask("call", "cuCtxSetLimit", STACK, 1 << 19) == 2, "CUDA_ERROR_OUT_OF_MEMORY"
    assert probe.ask("used", 0) == CONTEXT + taken
    assert probe.ask("call", "cuCtxSetLimit", limit, 1024) == 0
    assert probe.ask("used", 0) == CONTEXT


def test_modules_and_their_kernels_take_memory(start: Start) -> None:
    """A module 2 MiB; with heap_at also the heap; a kernel with a larger stack than before that stack, which stays."""
    probe = start(heap_at="module", kernel_us=1)
    assert probe.ask("call", "cuCtxSetLimit", HEAP, 40 * MIB) == 0
    assert probe.ask("used", 0) == CONTEXT
    assert probe.ask("call", "cuModuleLoadData", "&module", 0) == 0
    assert probe.ask("used", 0) == CONTEXT + (32 + 2) * MIB
    assert probe.ask("function", "stack_2048") == 0
    assert probe.ask("call", "cuLaunchKernel", "function", 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) == 0
    assert probe.ask("call", "cuModuleUnload", "module") == 0
    assert probe.ask("used", 0) == CONTEXT + 32 * MIB + 1024 * THREADS


def test_a_kernel_takes_as_many_waves_as_its_grid_needs(start: Start) -> None:
    """With block_us; less than a wave takes as long as one."""
    probe = start(sm_count=20, block_us=1000)
    assert [round(probe.ask("timed_ms", blocks), 1) for blocks in (1, 160, 1600)] == [1, 1, 10]  # type: ignore[call-overload]


def test_versions_choose_the_variant_of_a_function(start: Start) -> None:
    """cuGetProcAddress gives the newest variant that is not newer than asked for, and not newer than the driver."""
    probe = start(cuda_version=12080)
    asked = [
        probe.ask("variant", name, version)
        for name, version in (
            ("cuMemAlloc", 2000), ("cuMemAlloc", 11080), ("cuCtxCreate", 11080), ("cuCtxCreate", 13000),
            ("cuGetProcAddress", 11080), ("cuGetProcAddress", 12000), ("cuMemAllocAsync", 11000), ("cuNothing", 13000),
        )
    ]  # fmt: skip
    assert asked == [
        "cuMemAlloc", "cuMemAlloc_v2", "cuCtxCreate_v3", "cuCtxCreate_v4",
        "cuGetProcAddress", "cuGetProcAddress_v2", None, None,
    ]  # fmt: skip


def test_a_later_cuda_has_another_function_under_an_old_name(start: Start) -> None:
    """For a program that asks for it as of that version."""
    probe = start(cuda_version=14000)
    found = [probe.ask("variant", "cuMemAlloc", version) for version in (13000, 14000)]
    assert found == ["cuMemAlloc_v2", "cuMemAlloc_v3"]


def test_settings_come_from_the_file_beside_the_state(state: Path, start: Start) -> None:
    """A program in a container has no variable of ours; one that is there goes before the file."""
    state.with_name("config").write_text("gpus 3\nmemory_mib 1024\ndriver_version 570.1\n")
    by_file, by_variables = start(), start(gpus=2, devices="1")
    assert by_file.ask("gpus") == [f"GPU-00000000-0000-4000-8000-{minor:012x}" for minor in range(3)]
    assert by_file.ask("driver_version") == "570.1"
    assert by_variables.ask("gpus") == ["GPU-00000000-0000-4000-8000-000000000001"]


@pytest.fixture
def unshared() -> tuple[str, ...]:
    """Before a program's command: a PID namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs unshare and root for a PID namespace")
    return (unshare, "--pid", "--fork", "--mount-proc", "--kill-child")


PIDS = {"host": ("host", "host"), "open": ("own", "host"), "open570": ("own", "own")}


@pytest.mark.parametrize("kind", PIDS)
def test_pids_are_those_of_the_kernel_module(kind: str, state: Path, start: Start, unshared: Sequence[str]) -> None:
    """Of a process in a PID namespace: the host's PID or its own, in the lists of processes and in samples."""
    view = HostView(state.parent)
    try:
        outside, inside = start(pids=kind), start(*unshared, pids=kind)
        own = inside.ask("pid")
        assert own == 1
        [host] = Path(f"/proc/{inside.process.pid}/task/{inside.process.pid}/children").read_text().split()
        expected = [{"host": int(host), "own": own}[name] for name in PIDS[kind]]
        lists, samples = inside.ask("pids", 0)  # type: ignore[misc]
        assert (expected[0] in lists, expected[1] in samples) == (True, True)
        assert (outside.process.pid in lists) == (kind == "host")
        lists, samples = outside.ask("pids", 0)  # type: ignore[misc]
        assert lists == samples == sorted([outside.process.pid, int(host)])
    finally:
        view.close()


def test_a_dead_process_is_noticed_from_another_namespace(start: Start, unshared: Sequence[str]) -> None:
    """Without a view of the host's /proc: the kernel releases the dead one's lock."""
    first, second = start(*unshared), start(*unshared)
    assert first.ask("alloc", GIB) == second.ask("alloc", GIB) == 0
    assert second.ask("used", 0) == 2 * (GIB + CONTEXT)
    first.end()
    assert second.ask("used", 0) == GIB + CONTEXT


def test_kernels_keep_the_gpu_busy(start: Start) -> None:
    """NVML shows who used it: here one process, all the time."""
    probe = start(kernel_us=2000)
    assert probe.ask("kernels", 550) >= 1.1  # type: ignore[operator]
    assert probe.ask("busy", 0) >= 50  # type: ignore[operator]


async def test_the_agents_driver_reads_its_gpus(driver: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real nvidia-ml-py finds what the agent needs of a GPU, and its processes' use."""
    monkeypatch.setenv("FAKE_GPU_STATE", str(state))
    monkeypatch.setenv("FAKE_GPU_GPUS", "2")
    monkeypatch.setenv("FAKE_GPU_DEVICES", "all")
    async with running_probe(driver, "") as probe:
        inventory = await probe.read()
        assert inventory["driver_version"] == "580.95.05" and not inventory["unreadable"]
        assert [(gpu["minor"], gpu["memory_mib"], gpu["unhealthy_reason"]) for gpu in inventory["gpus"]] == [
            (0, 24576, ""),
            (1, 24576, ""),
        ]
        assert [gpu["processes"] for gpu in (await probe.sample())["gpus"]] == [[], []]
        assert await probe.events() == []
