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
    NO_START = "does not start"
    """A function is missing, cuInit or the context fails, or the program ends before."""
    FAILED = "fails"
    """It starts, and gets nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Either `memory`, a kind of allocation, or `launch`, a kind of launch, as gpu_program.c names them.

    `version` is 0 where the way of asking has none. `after_restart`: the agent is killed and starts again while the
    program runs, before it takes anything. `neighbour_cores` are those of a second share on the same GPU, whose program
    does the same at the same time. `smoke`: of which isolations also with `--smoke`.
    """

    expected: Mapping[str, Verdict]
    memory: str = ""
    launch: str = ""
    blocks_of_launch: int = 16384
    way: str = "dlsym"
    version: int = 0
    uid: int = 0
    pids: str = "host"
    after_restart: bool = False
    neighbour_cores: int = 0
    smoke: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [f"memory: {self.memory}" if self.memory else f"compute: {self.launch}"]
        words += [f"{self.blocks_of_launch} blocks each"] if self.blocks_of_launch != 16384 else []
        words += [f"by {self.way}"] if self.way != "dlsym" else []
        words += [f"CUDA {self.version // 1000}.{self.version % 1000 // 10}"] if self.version else []
        words += [f"user {self.uid}"] if self.uid else []
        words += [f"PIDs {self.pids}"] if self.pids != "host" else []
        words += ["after an agent restart"] if self.after_restart else []
        words += [f"beside a share of {self.neighbour_cores}"] if self.neighbour_cores else []
        return ", ".join(words)


HELD, THROTTLED, BYPASSED = Verdict.HELD, Verdict.THROTTLED, Verdict.BYPASSED
NO_START, FAILED = Verdict.NO_START, Verdict.FAILED
_V1, _V2 = "cuGetProcAddress", "cuGetProcAddress_v2"

_CHECKS = (
    # The verdicts of `none` are what the others compare with.
    Check(memory="alloc", smoke=("gpushare", "vcuda"), expected={"none": BYPASSED, "vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", smoke=("gpushare",), expected={"none": BYPASSED, "vcuda": THROTTLED, "driver": BYPASSED}),
    # Every kind of memory and of launch. vcuda-control's own functions are those up to CUDA 11.5: of a newer one it has
    # no symbol, or, asked through cuGetProcAddress, the driver's. It lets a mipmapped array take one block too many.
    # It counts what NVML has of its processes, which is nothing of managed memory (H200).
    Check(memory="managed", expected={"vcuda": BYPASSED, "driver": BYPASSED}),
    Check(memory="pitch", expected={"vcuda": HELD, "driver": HELD}),
    Check(memory="async", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(memory="pool", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(memory="vmm", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(memory="array", expected={"vcuda": HELD, "driver": HELD}),
    Check(memory="array3d", expected={"vcuda": HELD, "driver": HELD}),
    Check(memory="mipmapped", expected={"vcuda": BYPASSED, "driver": HELD}),
    Check(launch="ex", expected={"vcuda": FAILED}),
    Check(launch="ex", way=_V1, version=11080, expected={"vcuda": BYPASSED}),
    Check(launch="cooperative", expected={"vcuda": THROTTLED}),
    Check(launch="graph", way=_V1, version=11080, expected={"vcuda": BYPASSED}),
    Check(launch="kernel", blocks_of_launch=1024, expected={"vcuda": BYPASSED}),
    # Every way to ask for a function, for those of three versions. vcuda-control has no cuGetProcAddress_v2, and through
    # cuGetProcAddress it gives the cuMemAlloc of 32 bits.
    Check(memory="alloc", way="link", expected={"vcuda": HELD}),
    Check(memory="alloc", way=_V1, version=11080, expected={"vcuda": FAILED}),
    Check(memory="alloc", way=_V2, version=11080, expected={"vcuda": NO_START}),
    Check(memory="alloc", way=_V2, version=12080, expected={"vcuda": NO_START}),
    Check(memory="alloc", way=_V2, version=13000, expected={"vcuda": NO_START}),
    Check(launch="kernel", way="link", expected={"vcuda": THROTTLED}),
    Check(launch="kernel", way=_V1, version=11080, expected={"vcuda": THROTTLED}),
    Check(launch="kernel", way=_V2, version=11080, expected={"vcuda": NO_START}),
    Check(launch="kernel", way=_V2, version=12080, expected={"vcuda": NO_START}),
    Check(launch="kernel", way=_V2, version=13000, expected={"vcuda": NO_START}),
    # Not as root.
    Check(memory="alloc", uid=1000, expected={"vcuda": HELD, "driver": HELD}),
    Check(launch="kernel", uid=1000, expected={"vcuda": THROTTLED}),
    Check(memory="alloc", uid=1000, way=_V2, version=13000, expected={}),
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
