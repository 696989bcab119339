"""The free capacity of some GPUs in short, and why a request does not fit them: the value, and the only texts about it.

`GpuAccount.lack` is about one GPU, `Capacity.lack` about all of a node. Every text about want of capacity is made here: the
refusal in a pod's status, the extender's reasons, the verdicts of `explain` and of the page of all nodes, a resize's
refusal. A cluster has thousands of nodes and the scheduler waits for every answer, so what only a text needs is worked out
for the text.
"""

from __future__ import annotations

from enum import IntEnum, auto
from functools import lru_cache
from typing import NamedTuple

from gpushare_agent.model.errors import RefusalReason
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.model.resources import Request, ResourceNames


class Cause(IntEnum):
    """The causes in the order in which they are looked for: those that the end of other pods does not remedy come first."""

    NO_GPU = auto()
    UNHEALTHY = auto()
    UNSHARED = auto()
    """A share of MIG instances in which the node's isolation cannot keep one."""
    INSTANCE = auto()
    """Whole GPUs where there are MIG instances alone."""
    TOO_FEW = auto()
    """More whole GPUs than there are."""
    TOO_LARGE = auto()
    """More memory than the GPUs have when they are empty."""
    FULL = auto()
    """As many sharing containers as a GPU serves."""
    IN_USE = auto()
    """Too few wholly free GPUs, or those have too little memory."""
    SHORT = auto()
    """Cores or memory."""


class Capacity(NamedTuple):
    """Free and used of some GPUs of one node, whose units are alike. `gpus` counts all, `healthy` those that are; the rest
    is of healthy ones that take shares. `free` has (cores, blocks, units) of each; `whole_blocks` the blocks of the wholly
    free GPUs, `physical_blocks` of those that are no MIG instances, `all_blocks` and `all_units` of every one were it empty,
    most first. `full` of them serve no more than their `max_shares` sharing containers."""

    gpus: int
    healthy: int
    free: tuple[tuple[int, int, int], ...]
    whole_blocks: tuple[int, ...]
    physical_blocks: tuple[int, ...]
    all_blocks: tuple[int, ...]
    all_units: tuple[int, ...]
    block_mib: int
    unit_mib: int
    full: int
    max_shares: int | None
    used_cores: int
    used_memory_mib: int
    memory_mib: int

    def lack(self, request: Request) -> Lack | None:
        """Why none of the GPUs, or not enough of them, will do for the request of a pod's only container; None where they
        do. Of a container that is one of several this much is necessary."""
        cores, blocks, units, count = request.cores, request.blocks, request.units, request.whole_gpus
        if count:
            # Most first: where the largest do not suffice, no others do.
            if len(self.whole_blocks) >= count and sum(self.whole_blocks[:count]) >= blocks:
                return None
        else:
            for free_cores, free_blocks, free_units in self.free:  # no generator: thousands of nodes are asked at once
                if free_cores >= cores and free_blocks >= blocks and free_units >= units:
                    return None
        return Lack(request, self, self._cause(request, count))

    def _cause(self, request: Request, count: int) -> Cause:
        asked, sizes = (request.units, self.all_units) if request.units else (request.blocks, self.all_blocks)
        if count:
            sizes = self.physical_blocks
        if not sizes:
            if not self.healthy:
                return Cause.UNHEALTHY if self.gpus else Cause.NO_GPU
            return Cause.INSTANCE if count else Cause.UNSHARED
        # In the order of `Cause`: what no end of another pod changes is said first, for waiting would be in vain.
        if len(sizes) < count:
            return Cause.TOO_FEW
        if asked > sizes[0] and asked > sum(sizes[: count or 1]):
            return Cause.TOO_LARGE
        if count:
            return Cause.IN_USE
        return Cause.FULL if self.full == len(sizes) else Cause.SHORT


_WAIT = "Wait for pods on this node to end"


class Lack(NamedTuple):
    """Why the request does not fit the GPUs of `capacity`. Memory is counted in the units in which the request asks for it.
    `free_percent` is what is free of a GPU for units under NVIDIA's names."""

    request: Request
    capacity: Capacity
    cause: Cause
    free_percent: int = 0

    @property
    def reason(self) -> RefusalReason:
        """The reason as the pod's owner sees it. Fragmented: all GPUs together have enough."""
        match self.cause:
            case Cause.NO_GPU | Cause.UNHEALTHY:
                return RefusalReason.NO_HEALTHY_GPU
            case Cause.UNSHARED | Cause.INSTANCE | Cause.TOO_FEW:
                return RefusalReason.NOT_ENOUGH_CORES
            case Cause.TOO_LARGE:
                return RefusalReason.NOT_ENOUGH_MEMORY
            # Enough GPUs are free; together they are too small.
            case Cause.IN_USE if 0 < self.request.whole_gpus <= len(self.capacity.whole_blocks):
                return RefusalReason.NOT_ENOUGH_MEMORY
        if self.request.part is not None or (self.cause is Cause.IN_USE and self.gpus == 1):
            return RefusalReason.NOT_ENOUGH_CORES
        if sum(gpu[0] for gpu in self.capacity.free) < self.request.cores:
            return RefusalReason.NOT_ENOUGH_CORES
        if not self.request.whole_gpus and sum(self._memory_of_each) < self._asked_memory:
            return RefusalReason.NOT_ENOUGH_MEMORY
        return RefusalReason.FRAGMENTED

    @property
    def is_lasting(self) -> bool:
        """The end of other pods does not help."""
        return self.cause <= Cause.TOO_LARGE

    @property
    def gpus(self) -> int:
        """How many could serve it were they empty."""
        return len(self.capacity.physical_blocks if self.request.whole_gpus else self.capacity.free)

    @property
    def cores(self) -> int:
        """Free on one GPU at most."""
        return max(self.capacity.free, default=(0,))[0]

    @property
    def memory(self) -> int:
        """Free on one GPU at most."""
        return max(self._memory_of_each, default=0)

    @property
    def largest(self) -> int:
        """The memory of the largest GPU, of as many as are asked for, were they empty."""
        if count := self.request.whole_gpus:
            return sum(self.capacity.physical_blocks[:count])
        return sum((self.capacity.all_units if self.request.units else self.capacity.all_blocks)[:1])

    @property
    def _memory_of_each(self) -> list[int]:
        column = 2 if self.request.units else 1
        return [gpu[column] for gpu in self.capacity.free]

    def of_gpu(self, why_unhealthy: str = "") -> str:
        """What one GPU lacks, in short: `10 cores and 12.5 GiB short`."""
        match self.cause:
            case Cause.NO_GPU | Cause.UNHEALTHY:
                return why_unhealthy or "out of service"
            case Cause.UNSHARED:
                return "a MIG instance, in which the isolation keeps no share"
            case Cause.INSTANCE | Cause.TOO_FEW:
                return "a MIG instance, and no whole GPU"
            case Cause.TOO_LARGE:
                return f"too small, with {self._size(self.largest)} in all"
            case Cause.FULL:
                return f"{self.capacity.max_shares} sharing containers, the most that one GPU serves"
            case Cause.IN_USE if self.request.part is not None:
                needed = "all" if self.request.part == 1 else str(self.request.part)
                return f"in use: {self.free_percent} % of it are free, and {needed} of it is needed"
            case Cause.IN_USE:
                return f"in use: {self.cores} cores and {self._size(self.memory)} are free, and all of both are needed"
            case Cause.SHORT:
                cores, memory = self.request.cores - self.cores, self._asked_memory - self.memory
                lacks = [f"{cores} cores"] if cores > 0 else []
                lacks += [self._size(memory)] if memory > 0 else []
                return f"{' and '.join(lacks)} short"

    def of_node(self) -> str:
        """Why no GPU of a node will do; the same for nodes in the same state, for kube-scheduler counts equal texts."""
        requested = self.request.whole_gpus
        match self.cause:
            case Cause.SHORT:
                if (cores := self.cores) < self.request.cores:
                    return f"no GPU has more than {cores} cores free"
                if (memory := self.memory) < self._asked_memory:
                    return f"no GPU has more than {self._memory(memory)} free"
                return f"no GPU has both free: at most {cores} cores, and {self._memory(memory)} on another"
            case Cause.IN_USE if (free := len(self.capacity.whole_blocks)) < requested:
                return _too_few_free(requested, free, len(self.capacity.physical_blocks))
            case Cause.IN_USE:
                free, most = len(self.capacity.whole_blocks), self._memory(sum(self.capacity.whole_blocks[:requested]))
                have = (
                    f"{requested} largest of {free} free GPUs have together"
                    if requested > 1
                    else "largest free GPU has"
                )
                return f"the {have} {most}"
            case Cause.FULL:
                return f"no GPU serves more than {self.capacity.max_shares} sharing containers"
            case Cause.NO_GPU:
                return "the node has no GPU that the driver can name"
            case Cause.UNHEALTHY:
                return "the node has no healthy GPU"
            case Cause.UNSHARED:
                return "the node's GPUs are MIG instances, in which its isolation keeps no share"
            case Cause.INSTANCE:
                return "the node's GPUs are MIG instances, and no whole GPUs"
            case Cause.TOO_FEW:
                return f"{_gpus(requested, 'whole')} wanted, the node has {_gpus(self.gpus, 'healthy')}"
            case Cause.TOO_LARGE:
                have = f"{requested} largest GPUs have" if requested > 1 else "largest GPU has"
                return f"the {have} {self._memory(self.largest)} in all"

    def of_gpu_in_detail(self) -> str:
        """The text of `of_gpu` with what the GPU has free."""
        free = f", with {self._amounts(self.cores, self.memory)} free" if self.cause is Cause.SHORT else ""
        return self.of_gpu() + free

    def of_node_in_detail(self) -> str:
        """The text of `of_node` with what is free on all GPUs together, and which of them are full."""
        state = self.of_node()
        if self.gpus > 1 and self.cause in (Cause.IN_USE, Cause.SHORT):
            free = self._amounts(sum(gpu[0] for gpu in self.capacity.free), sum(self._memory_of_each))
            state += f", and {free} are free on all GPUs together"
        if full := self.capacity.full:
            most = f"{self.capacity.max_shares} sharing containers, the most that one serves (setting mps.max_clients)"
            state += f"; {full} GPUs count as full, for they have {most}"
        return state

    @property
    def remedy(self) -> str:
        """What the pod's owner can do, a sentence."""
        match self.cause:
            case Cause.NO_GPU | Cause.UNHEALTHY:
                return "`gpushare-agent check` there says why; the pod can run on another node."
            case Cause.UNSHARED | Cause.INSTANCE:
                return "The pod can run on another node."
            case Cause.TOO_FEW:
                return f"Ask for at most {self.gpus * CORES_PER_GPU} cores, or use a larger node."
            case Cause.TOO_LARGE:
                return "Ask for at most that much, or use a node with larger GPUs."
            case Cause.IN_USE:
                return f"{_WAIT}, ask for less, or use a node with free GPUs."
            case Cause.FULL | Cause.SHORT:
                return f"{_WAIT}, or ask for less."

    @property
    def _asked_memory(self) -> int:
        return self.request.units or self.request.blocks

    def _amounts(self, cores: int, memory: int) -> str:
        """The amounts of what is asked for."""
        return " and ".join(
            ([f"{cores} cores"] if self.request.cores else []) + ([self._memory(memory)] if self._asked_memory else [])
        )

    def _memory(self, count: int) -> str:
        return f"{count} {'units' if self.request.units else 'memory blocks'} ({self._size(count)})"

    def _size(self, count: int) -> str:
        return memory_text(count * (self.capacity.unit_mib if self.request.units else self.capacity.block_mib))


def describe_request(request: Request, names: ResourceNames) -> str:
    """The request as every refusal begins: `40 cores with 16 memory blocks (4 GiB)`; whole GPUs may go without memory."""
    if request.units:
        return f"{request.units} {names.gpu_mem} ({memory_text(request.units * names.gpu_mem_unit_mib)})"
    size = memory_text(request.blocks * names.memory_block_mib)
    return f"{request.cores} cores" + (f" with {request.blocks} memory blocks ({size})" if request.blocks else "")


def memory_text(size_mib: int) -> str:
    return f"{size_mib} MiB" if 0 < size_mib < 1024 else f"{size_mib / 1024:.4g} GiB"


@lru_cache(maxsize=1024)
def _too_few_free(requested: int, free: int, gpus: int) -> str:
    """Cached, for thousands of nodes give the same few texts."""
    return f"{_gpus(requested, 'wholly free')} wanted, {free} of {gpus} {'is' if free == 1 else 'are'}"


def _gpus(count: int, kind: str) -> str:
    return f"{count} {kind} GPU{'' if count == 1 else 's'}"
