"""The terms in which an isolation says what of a share is kept, by whom, and what is known not to be. Pure.

Every term is measured with the real libraries, or read where the term says so (docs/explanation/isolation.md). A share is
no security boundary under any isolation but the driver's: `BYPASS` says so where the program itself decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

NOBODY = "nobody"
ITS_OWN_GPU = "whole-gpu"
"""Nobody has to keep the limit: no other container is on the GPU."""


class NotKept(StrEnum):
    """Uses that pass the limits. The values are labels and JSON: stable."""

    ASYNC_ALLOCATIONS = "async-allocations"
    BYPASS = "bypass"
    COPIES = "copies"
    EXTENDED_LAUNCHES = "extended-launches"
    GRAPHS = "graphs"
    MANAGED_MEMORY = "managed-memory"
    MUSL = "musl"
    OTHER_APIS = "other-apis"
    PER_PROCESS = "per-process"
    POOLS = "pools"
    SMALL_LAUNCHES = "small-launches"
    VIRTUAL_MEMORY = "virtual-memory"


NOT_KEPT_TEXTS: Mapping[NotKept, str] = {
    NotKept.ASYNC_ALLOCATIONS: "memory from cuMemAllocAsync",
    NotKept.BYPASS: "a program that sets out to pass what is kept inside its own process",
    NotKept.COPIES: "compute of copies and fills: cuMemcpy, cuMemset (read, not measured)",
    NotKept.EXTENDED_LAUNCHES: "compute of launches by cuLaunchKernelEx",
    NotKept.GRAPHS: "compute of CUDA graphs",
    NotKept.MANAGED_MEMORY: "memory from cuMemAllocManaged (of `driver`: NVIDIA's own words, not measured)",
    NotKept.MUSL: "what the library keeps, in programs for musl (Alpine) or statically linked: `driver` limits their memory",
    NotKept.OTHER_APIS: "what the library keeps, of OpenCL, Vulkan, OpenGL, NVENC, NVDEC (read): `driver` limits their"
    " memory",
    NotKept.PER_PROCESS: "the sum over several processes of a container: MPS gives each the whole limit",
    NotKept.POOLS: "memory from memory pools",
    NotKept.SMALL_LAUNCHES: "compute of kernels with few thread blocks",
    NotKept.VIRTUAL_MEMORY: "memory from cuMemCreate",
}


class Kept(Struct, frozen=True, kw_only=True):
    """Who refuses memory above the share, and who holds compute to it: the name of an isolation, `NOBODY` or
    `ITS_OWN_GPU`; these are labels and JSON. `not_kept` is sorted."""

    memory_by: str
    compute_by: str
    not_kept: tuple[NotKept, ...] = ()
    keeps_managed_memory: bool = False
    """Measured to keep it: it is then no term when the driver's limit, which does not count it, is set too."""

    @property
    def text(self) -> str:
        """The same in a sentence for people, without a full stop."""
        kept = f"memory is kept by {_who(self.memory_by)}, compute by {_who(self.compute_by)}"
        return f"{kept}; not kept: {'; '.join(NOT_KEPT_TEXTS[one] for one in self.not_kept)}" if self.not_kept else kept


_OF_MEMORY = frozenset({NotKept.ASYNC_ALLOCATIONS, NotKept.MANAGED_MEMORY, NotKept.POOLS, NotKept.VIRTUAL_MEMORY})
"""The others concern compute, or both."""


WHOLE_GPU = Kept(memory_by=ITS_OWN_GPU, compute_by=ITS_OWN_GPU)
NOTHING_KEPT = Kept(memory_by=NOBODY, compute_by=NOBODY)


def kept_together(parts: Sequence[Kept]) -> Kept:
    """By a combination: compute by the first, memory by the last that limits it."""
    found = parts[0] if parts else NOTHING_KEPT
    for limit in parts[1:]:
        if limit.memory_by == NOBODY:
            continue
        # The driver does not count managed memory (NVIDIA's own words); a library that was measured to count it still does.
        own = () if found.keeps_managed_memory else limit.not_kept
        # What the library misses of memory, the driver refuses.
        terms = {*(set(found.not_kept) - _OF_MEMORY), *own}
        found = Kept(memory_by=limit.memory_by, compute_by=found.compute_by, not_kept=tuple(sorted(terms)))
    return found


def _who(keeper: str) -> str:
    return "no one else, for the GPU is its own" if keeper == ITS_OWN_GPU else keeper


class ProbeState(StrEnum):
    """The values are JSON: stable."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class ProbeResult(Struct, frozen=True, kw_only=True):
    """Whether a program of the agent's own was limited on this node. `text` is what was seen, or why it was skipped;
    `at` is seconds since the epoch."""

    state: ProbeState
    text: str
    driver_version: str
    at: float


class IsolationFacts(Struct, frozen=True, kw_only=True):
    """An isolation in use: why its shares cannot be had now (empty where they can), and what of a share is kept.
    `probe` is None of one that is not probed, and before the first result."""

    name: str
    unavailable_reason: str
    kept: Kept
    probe: ProbeResult | None = None
