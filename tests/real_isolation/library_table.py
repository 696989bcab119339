"""What the four libraries keep, side by side, as `nox -s isolation` measures it: ours must meet the last column.

A share is of 30 cores and 10 blocks of 256 MiB; a program takes up to 20 next to its context of 300 MiB, so 8 fit; or it
launches 1,000 kernels of a millisecond a second, where nothing limits it.

A cell is what a program showed, as text: blocks, or a way to fail; or launches a second, of which `about` a number is
expected: of ours within 30, of the others within a quarter, for they swing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tests.native.gpu_program import Ended, end_of
from tests.real_isolation.libraries import LibraryContainer

BLOCK_MIB, SHARE_BLOCKS, ASKED, CORES = 256, 10, 20, 30
CONTEXT_MIB = 300
TAKE = f"alloc:alloc:{BLOCK_MIB}:{ASKED}"
V1, V2 = "cuGetProcAddress", "cuGetProcAddress_v2"
STARTS = 36
OURS = "gpushare"
MOST_OFF, OTHERS_OFF = 30.0, 0.25
"""Launches a second; and a part of what is expected."""


@dataclass(frozen=True, slots=True)
class About:
    """Launches a second, of one program or of several at once."""

    rates: tuple[float, ...]

    def is_met(self, library: str, found: str) -> bool:
        numbers = [float(number) for number in re.findall(r"[0-9]+", found)]
        if len(numbers) != len(self.rates):
            return False
        return all(
            abs(number - rate) <= (MOST_OFF if library == OURS else max(MOST_OFF, OTHERS_OFF * rate))
            for number, rate in zip(numbers, self.rates, strict=True)
        )


Cell = str | About | None
"""None: what is measured has no right value, and is only shown."""
ContainerOf = Callable[..., LibraryContainer]
"""A container of the library on the row's GPU; `cores` where it is not the share's."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    measure: Callable[[ContainerOf], str]
    expected: Mapping[str, Cell]
    driver: Mapping[str, object] = field(default_factory=dict, kw_only=True)
    gpus: int = field(default=1, kw_only=True)

    def is_met(self, library: str, found: str) -> bool:
        cell = self.expected[library]
        return cell.is_met(library, found) if isinstance(cell, About) else cell in (None, found)


def failure_of(ended: Ended) -> str:
    if ended.code is None:
        return "hangs"
    return "crashes" if ended.code < 0 else "does not start"


def blocks_of(ended: Ended) -> str:
    step = ended.step("alloc")
    if not step:
        return failure_of(ended)
    return "32-bit pointers" if step["short_pointers"] else str(step["blocks"])


def taken(*actions: str, way: str = "dlsym", version: int = 12080) -> Callable[[ContainerOf], str]:
    return lambda container_of: blocks_of(container_of().run(*actions, way=way, version=version))


def _kind(kind: str) -> Callable[[ContainerOf], str]:
    return taken(f"alloc:{kind}:{BLOCK_MIB}:{ASKED}")


_CTYPES = f"""
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
context, address, blocks = ctypes.c_void_p(), ctypes.c_uint64(), 0
driver.cuInit(0)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
while blocks < {ASKED} and driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t({BLOCK_MIB} << 20)) == 0:
    blocks += 1
print('{{"action": "alloc", "blocks": %d, "short_pointers": 0}}' % blocks)
"""


def _by_ctypes(container_of: ContainerOf) -> str:
    return blocks_of(end_of(container_of().start_command(["/usr/bin/python3", "-c", _CTYPES])))


def _after_kill(container_of: ContainerOf) -> str:
    container = container_of()
    assert container.run(f"alloc:alloc:{BLOCK_MIB}:6", "kill").code == -9
    return blocks_of(container.run(TAKE))


def _after_fork(container_of: ContainerOf) -> str:
    """What the child gets, whose parent has three blocks."""
    ended = container_of().run(f"alloc:alloc:{BLOCK_MIB}:3", "fork", TAKE, deadline_s=20)
    if len(counts := ended.blocks()) < 2:
        return failure_of(ended)
    return f"{counts[1]}{', then hangs' if ended.code is None else ''}"


def _rounded(container_of: ContainerOf) -> str:
    """What the program has of the GPU, whose pages are of 2 MiB, in MiB."""
    ended = container_of().run("alloc:alloc:1048577b:5000")
    step = ended.step("alloc")
    return f"{CONTEXT_MIB + 2 * step['blocks']}" if step else failure_of(ended)


def _freed(container_of: ContainerOf) -> str:
    """What the program is told to be free, in MiB."""
    ended = container_of().run(f"alloc:async:{BLOCK_MIB}:8", "free", "sync", "info")
    step = ended.step("info")
    return str(step["free_mib"]) if step else failure_of(ended)


def _info_without_places(container_of: ContainerOf) -> str:
    ended = container_of().run("infonull")
    step = ended.step("infonull")
    is_right = step and (step["results"], step["total_mib"]) == ([0, 0, 0], SHARE_BLOCKS * BLOCK_MIB)
    return "right" if is_right else failure_of(ended) if not step else "wrong"


def _rates(programs: Sequence[Ended]) -> str:
    steps = [ended.step("launch") for ended in programs]
    if not all(step and step["result"] == 0 for step in steps):
        return "fails" if all(steps) else failure_of(programs[0])
    return " and ".join(f"{step['rate']:.0f}" for step in steps)


def _launches(kind: str, **how: Any) -> Callable[[ContainerOf], str]:
    return lambda container_of: _rates([container_of().run(f"launch:{kind}:1", f"launch:{kind}:4", **how)])


def _two(container_of: ContainerOf) -> str:
    programs = [container_of(cores=cores).start("launch:kernel:2", "launch:kernel:6") for cores in (30, 60)]
    return _rates([end_of(program) for program in programs])


def _missed(container_of: ContainerOf) -> str:
    """Of so many programs, some at once, those that the library itself says it did not find in the driver's list."""
    container = container_of()
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda _: container.run("alloc:alloc:1:1"), range(STARTS)))
    missed = sum("host pid is error" in one.error or blocks_of(one) != "1" for one in ended)
    return f"{missed} of {STARTS}"


def _added(container_of: ContainerOf) -> str:
    """The best of nine runs with the library, less the best of nine without it, in turn."""
    container = container_of(cores=90)
    bare = replace(container, is_bare=True)
    words = ("launch:kernel:0:1", "speed:2000")  # launches of one block: what waits for tokens is not the call's cost
    runs = [(container.run(*words).step("speed"), bare.run(*words).step("speed")) for _ in range(9)]
    if not all(step and step["result"] == 0 for pair in runs for step in pair):
        return "fails"
    best = [
        [min(step[key] for step in steps) for steps in zip(*runs, strict=True)] for key in ("alloc_us", "launch_us")
    ]
    return " and ".join(f"{max(0.0, own - driver):.1f}" for own, driver in best)


def _cells(hami_core: Cell, vcuda: Cell, vgpu_manager: Cell, ours: Cell) -> dict[str, Cell]:
    return {"hami-core": hami_core, "vcuda": vcuda, "vgpu-manager": vgpu_manager, OURS: ours}


def _all(cell: Cell) -> dict[str, Cell]:
    return _cells(cell, cell, cell, cell)


def _about(*rates: float) -> dict[str, Cell]:
    return _cells(*(About((rate,)) for rate in rates))


# Where a cell is not what was once measured in containers with an agent: vcuda's child of fork hung there when it had ended.
# Two shares: vgpu-manager is told here that all processes on the GPU are its own, so the smaller share starves: 24 and 664.
# Where it knows them by their cgroups it had 297 and 586. Ours pays for each change of contexts what an H200 loses (130 us);
# this driver's GPU takes launches in their order, and loses nothing.
ROWS = (
    Row("linked", taken(TAKE, way="link"), _all("8")),
    Row("dlsym", taken(TAKE), _all("8")),
    Row("cuGetProcAddress, CUDA 11.8", taken(TAKE, way=V1, version=11080), _cells("8", "32-bit pointers", "8", "8")),
    *(
        Row(
            f"cuGetProcAddress_v2, CUDA {cuda}",
            taken(TAKE, way=V2, version=version),
            _cells("8", "does not start", "8", "8"),
        )
        for cuda, version in (("11.8", 11080), ("12.8", 12080), ("13.0", 13000))
    ),
    Row("dlsym of RTLD_NEXT", taken(TAKE, way="next"), _cells("20", "8", "8", "8")),
    Row("dlopen with RTLD_DEEPBIND", taken(TAKE, way="deepbind"), _all("8")),
    Row("Python's ctypes", _by_ctypes, _all("8")),
    Row("cuMemAllocPitch", _kind("pitch"), _all("8")),
    Row("cuMemAllocManaged", _kind("managed"), _cells("8", "20", "8", "8")),
    Row("cuMemAllocAsync", _kind("async"), _cells("8", "20", "8", "8")),
    Row("cuMemAllocAsync in a stream of another GPU", _kind("other"), _cells("20", "20", "20", "8"), gpus=2),
    Row("a pool of the program's", _kind("pool"), _cells("20", "20", "8", "8")),
    Row("array of 2 dimensions", _kind("array"), _cells("20", "1", "1", "8")),
    Row("array of 3 dimensions", _kind("array3d"), _cells("20", "1", "1", "8")),
    Row("mipmapped array", _kind("mipmapped"), _cells("20", "9", "9", "8")),
    Row("cuMemCreate", _kind("vmm"), _cells("8", "20", "8", "8")),
    Row("memory of a graph's node", _kind("graphmem"), _cells("20", "20", "20", "8")),
    Row("after cuCtxSetLimit took 1 GiB", taken("limit:2:1024", TAKE), _cells("8", "4", "4", "4")),
    Row("1 MiB + 1 byte each: MiB of the GPU", _rounded, _cells("4818", "2560", "2560", "2560")),
    Row("MiB free by cuMemGetInfo after cuMemFreeAsync and a synchronize", _freed, _all("2260")),
    Row("opened of another process", _kind("ipc"), _all("20")),
    Row("pinned memory of the host", _kind("host"), _all("20")),
    Row("after kill -9 of one with 6 blocks", _after_kill, _all("8")),
    Row("a child of one with 3 blocks", _after_fork, _cells("5", "20", "4", "4")),
    Row("cuMemGetInfo(NULL, …)", _info_without_places, _cells("crashes", "crashes", "right", "right")),
    Row("kernels a second", _launches("kernel"), _about(323, 359, 259, 300)),
    Row("by cuLaunchKernelEx", _launches("ex", way=V1, version=11080), _about(323, 993, 263, 300)),
    Row("cooperative", _launches("cooperative"), _about(1000, 360, 260, 300)),
    Row("of a graph", _launches("graph", way=V1, version=11080), _about(991, 1000, 253, 300)),
    Row("shares of 30 and 60 on a GPU", _two, _cells(About((373, 580)), About((386, 606)), None, About((215, 490)))),
    Row("does not find its own process", _missed, _cells(None, None, None, f"0 of {STARTS}")),
    Row("µs more for a cuMemAlloc with its cuMemFree, and for a launch", _added, _all(None), driver={"kernel_us": 0}),
)
