"""What is checked of each isolation, and what it is expected to keep: the table that `nox -s isolation` measures.

One `Check` is a row; `expected` has a column for each isolation that is measured in it. A share is of 30 cores and
2,560 MiB. A program takes up to 20 blocks of 256 MiB next to its context of 300 MiB, so 8 fit; or it launches kernels of
a millisecond each, 1,000 a second without a limit. To add a row, add a Check; to add an isolation, add its column here
and what it needs in support_isolation.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

SHARE_CORES, SHARE_BLOCKS, BLOCK_MIB = 30, 10, 256
ASKED_BLOCKS = 20
KERNELS_PER_S = 1000
"""Without a limit: kernel_us of the fake driver."""


class Verdict(StrEnum):
    HELD = "held"
    """Memory: the program gets something, and no more than its share."""
    THROTTLED = "throttled"
    """Compute: under half of what it reaches without a limit, at a promise of 30 %."""
    BYPASSED = "bypassed"
    """It gets more than the share."""
    FAILED = "fails"
    """It does not start, ends too soon, or gets nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Either `memory`, a kind of allocation, or `launch`, a kind of launch, as gpu_program.c names them.

    `is_cuda_11`: it asks for functions as CUDA 11.8 does, by cuGetProcAddress; else by dlsym. `after_restart`: the agent is
    killed and starts again while the program runs, before it takes anything. `neighbour_cores` are those of a second share
    on the same GPU, whose program does the same at the same time. `smoke`: of which isolations also with `--smoke`.
    """

    expected: Mapping[str, Verdict]
    memory: str = ""
    launch: str = ""
    blocks_of_launch: int = 16384
    is_cuda_11: bool = False
    uid: int = 0
    pids: str = "host"
    after_restart: bool = False
    neighbour_cores: int = 0
    smoke: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [f"memory: {self.memory}" if self.memory else f"compute: {self.launch}"]
        words += [f"{self.blocks_of_launch} blocks each"] if self.blocks_of_launch != 16384 else []
        words += ["CUDA 11.8"] if self.is_cuda_11 else []
        words += [f"user {self.uid}"] if self.uid else []
        words += [f"PIDs {self.pids}"] if self.pids != "host" else []
        words += ["after an agent restart"] if self.after_restart else []
        words += [f"beside a share of {self.neighbour_cores}"] if self.neighbour_cores else []
        return ", ".join(words)


HELD, THROTTLED, BYPASSED = Verdict.HELD, Verdict.THROTTLED, Verdict.BYPASSED

_CHECKS = (
    # The verdicts of `none` are what the others compare with.
    Check(memory="alloc", smoke=("gpushare", "vcuda"), expected={"none": BYPASSED, "vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", smoke=("gpushare",), expected={"none": BYPASSED, "vcuda": THROTTLED, "driver": BYPASSED}),
    # What agent/isolation/kept.py says of each kind. vcuda-control's own functions are those up to CUDA 11.5: of a newer one
    # it has no symbol, or, asked through cuGetProcAddress, the driver's. It counts what NVML has of its processes, which is
    # nothing of managed memory (H200). The other kinds and ways to ask for a function are rows of library_table.py.
    Check(memory="managed", expected={"vcuda": BYPASSED, "driver": BYPASSED}),
    Check(memory="async", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(memory="pool", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(memory="vmm", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(launch="ex", is_cuda_11=True, expected={"vcuda": BYPASSED}),
    Check(launch="graph", is_cuda_11=True, expected={"vcuda": BYPASSED}),
    Check(launch="kernel", blocks_of_launch=1024, expected={"vcuda": BYPASSED}),
    # Not as root.
    Check(memory="alloc", uid=1000, expected={"vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", uid=1000, expected={"vcuda": THROTTLED}),
    # The PIDs of NVIDIA's open kernel modules.
    Check(memory="alloc", pids="open", expected={"vcuda": HELD}),
    Check(launch="kernel", pids="open", expected={"vcuda": THROTTLED}),
    Check(memory="alloc", pids="open570", expected={"vcuda": HELD}),
    Check(launch="kernel", pids="open570", expected={"vcuda": THROTTLED}),
    # Two containers, and an agent that comes and goes.
    Check(memory="alloc", neighbour_cores=60, expected={"vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", neighbour_cores=60, expected={"vcuda": THROTTLED}),
    Check(memory="alloc", after_restart=True, expected={"vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", after_restart=True, expected={"vcuda": THROTTLED}),
)

CHECKS = tuple(
    replace(check, expected={**check.expected, "gpushare": HELD if check.memory else THROTTLED}) for check in _CHECKS
)
"""libgpushare keeps all of them."""
