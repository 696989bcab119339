"""The account of one GPU: what it has, what is allocated, what is free, and what it lacks for a request. Only this module
decides that and has the texts about it.

`GpuAccount` is made of charges (model/allocations.py) by `account_of`, for the agent's admission and all that shows a node,
the scheduler extender and the simulation, so that they cannot disagree. A GPU's memory is one account in MiB: vcuda's memory
blocks, GPUShare's gpu-mem units, whole GPUs and units under NVIDIA's names take from it, each rounded up to the unit of the
one that asks. `Capacity` sums up several GPUs.

`GpuAccount.lack` is about one GPU, `Capacity.lack` about all of a node. Every text about missing capacity comes from a
`Lack`: the refusal in a pod's status, the extender's reasons, the verdicts of `explain` and of the page of all nodes, a
resize's refusal. A cluster has thousands of nodes and the scheduler waits for every answer, so what only a text needs is
worked out for the text. No state: a value is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import NO_CHARGE, Charge
from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.core.model.gpus import Gpu, GpuReport
from gpushare_agent.core.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, GpuUuid
from gpushare_agent.core.model.resources import WHOLE_GPU, Request, ResourceNames


class Cause(IntEnum):
    """The causes in the order in which they are looked for: those that the end of other pods does not remedy come first."""

    NO_GPU = auto()
    UNHEALTHY = auto()
    UNSHARED = auto()
    """A share of MIG instances in which the node's isolation cannot keep one."""
    INSTANCE = auto()
    """Whole GPUs where there are MIG instances alone."""
    LEFT_OUT = auto()
    """GPUs that the pod's annotations do not accept."""
    TOO_FEW = auto()
    """More whole GPUs than there are."""
    TOO_LARGE = auto()
    """More memory than the GPUs have when they are empty."""
    FULL = auto()
    """As many sharing containers as a GPU serves."""
    IN_USE = auto()
    """Too few GPUs that are entirely free, or too little memory on those."""
    SHORT = auto()
    """Cores or memory."""


class Capacity(NamedTuple):
    """Free and used of some GPUs of one node, whose units are alike. `gpus` counts all, `healthy` those that are; the rest
    is of healthy ones that take shares. `free` has (cores, blocks, units) of each GPU, `whole_blocks` the blocks of each GPU
    that is entirely free, and `physical_blocks` those of each GPU that is no MIG instance. `all_blocks` and `all_units` have
    what each GPU has when it is empty, the largest first. `full` counts the GPUs that already serve their `max_shares`
    sharing containers; `left_out` counts healthy ones that the pod does not accept, which count for nothing else."""

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
    left_out: int

    def lack(self, request: Request) -> Lack | None:
        """Why too few of the GPUs suffice for the request of a pod's only container; None where they suffice. For one of
        several containers this is necessary, not sufficient."""
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
            if self.left_out:
                return Cause.LEFT_OUT
            return Cause.INSTANCE if count else Cause.UNSHARED
        # In the order of `Cause`: what no end of another pod changes is said first, because waiting would be in vain.
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
            case Cause.UNSHARED | Cause.INSTANCE | Cause.LEFT_OUT | Cause.TOO_FEW:
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
        """How many could serve it if they were empty."""
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
        """The memory of the largest GPU, or of as many as are asked for, if they were empty."""
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
            case Cause.LEFT_OUT:
                return "left out by the pod's annotations"
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
        """The text of `_of_node` with how many GPUs the pod leaves out."""
        count = self.capacity.left_out if self.cause is not Cause.LEFT_OUT else 0
        return self._of_node() + (f", of those that the pod's annotations accept ({count} left out)" if count else "")

    def _of_node(self) -> str:
        """Why no GPU of a node will do; the same for nodes in the same state, because kube-scheduler counts equal texts. It
        puts the number before them, so they begin with a word."""
        requested = self.request.whole_gpus
        match self.cause:
            case Cause.SHORT:
                if (cores := self.cores) < self.request.cores:
                    return f"no GPU has more than {cores} cores free"
                if (memory := self.memory) < self._asked_memory:
                    return f"no GPU has more than {self._size(memory)} free"
                return f"no GPU has both free: at most {cores} cores, and {self._size(memory)} on another"
            case Cause.IN_USE if (free := len(self.capacity.whole_blocks)) < requested:
                return _too_few_free(requested, free, len(self.capacity.physical_blocks))
            case Cause.IN_USE:
                free, most = len(self.capacity.whole_blocks), self._size(sum(self.capacity.whole_blocks[:requested]))
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
            case Cause.UNSHARED | Cause.INSTANCE:
                what = "and no whole GPUs" if self.cause is Cause.INSTANCE else "in which its isolation keeps no share"
                return f"the node's GPUs are MIG instances, {what}"
            case Cause.LEFT_OUT:
                return "the pod's annotations leave out all healthy GPUs of the node"
            case Cause.TOO_FEW:
                return f"the node has {_gpus(self.gpus, 'healthy')}, {requested} whole wanted"
            case Cause.TOO_LARGE:
                have = f"{requested} largest GPUs have" if requested > 1 else "largest GPU has"
                return f"the {have} {self._size(self.largest)} in all"

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
            state += f"; {full} GPUs count as full because they have {most}"
        return state

    @property
    def remedy(self) -> str:
        """What the pod's owner can do, a sentence."""
        match self.cause:
            case Cause.NO_GPU | Cause.UNHEALTHY:
                return "`gpushare-agent check` there says why; the pod can run on another node."
            case Cause.UNSHARED | Cause.INSTANCE:
                return "The pod can run on another node."
            case Cause.LEFT_OUT:
                return "Name GPUs of this node in them, or use another node."
            case Cause.TOO_FEW:
                return f"Ask for at most {self.gpus * CORES_PER_GPU} cores, or use a larger node."
            case Cause.TOO_LARGE if not self.largest:
                return "None has memory of its own to share: ask for 100 cores without memory, or use another node."
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
    """Cached, because thousands of nodes give the same few texts."""
    return f"only {free} of {gpus} GPUs {'is' if free == 1 else 'are'} entirely free, {requested} wanted"


def _rounded_up(part: Fraction, of: int) -> int:
    # Multiplying fractions takes ten times as long.
    return -(-part.numerator * of // part.denominator)


def _gpus(count: int, kind: str) -> str:
    return f"{count} {kind} GPU{'' if count == 1 else 's'}"


class GpuAccount(Struct, kw_only=True):
    """One GPU as one container may use it.

    `index` is the GPU's row in the node's topology. `reusable` is the part of `used` that the pod's own init containers hold
    and the kubelet hands on: it is free for the containers after them. A GPU that only they have as a whole can be given for
    cores, and not for gpu-mem units.
    """

    index: int
    uuid: GpuUuid
    memory_mib: int
    block_mib: int = MEMORY_BLOCK_MIB
    unit_mib: int = 1024
    is_healthy: bool = True
    instance: str = ""
    """NVIDIA's name of a MIG instance, such as `0:1`; empty for a GPU."""
    name: str = ""
    """The model."""
    is_accepted: bool = True
    """False: the pod does not want it (placement/gpu_choice.py), so nothing of it is free to the pod."""
    takes_shares: bool = True
    """False: an instance in which the node's isolation cannot keep a share."""
    serves_parts: bool = False
    """A name such as NVIDIA's offers it too: others are preferred, because whoever asks by that name has no choice."""
    used: Charge = NO_CHARGE
    reusable: Charge = NO_CHARGE
    max_shares: int | None = None
    """Sharing containers that the GPU can serve at once."""
    offered_cores: int = CORES_PER_GPU
    """Cores that the kubelet can still hand out."""
    free: tuple[int, int, int] = (0, 0, 0)
    """Cores, blocks and units that a share can have, worked out from the rest whatever is given."""

    def __post_init__(self) -> None:
        # Computed once, not when asked: placement asks again and again, and `replace` ends here too.
        self.free = self._left_for_shares() if self.takes_shares and self.is_accepted else (0, 0, 0)

    @property
    def label(self) -> str:
        """The name for people, as Gpu has it."""
        return self.instance or str(self.index)

    @property
    def is_whole(self) -> bool:
        """Allocated as a whole: with all its memory, whether that was asked for or not."""
        return self.used.wholes > 0

    @property
    def _is_whole_for_others(self) -> bool:
        """Others than the pod's own init containers have it as a whole."""
        return self.used.wholes > self.reusable.wholes

    @property
    def is_instance(self) -> bool:
        """Never a whole GPU to vcuda's names."""
        return bool(self.instance)

    @property
    def total_blocks(self) -> int:
        return self.memory_mib // self.block_mib

    @property
    def total_units(self) -> int:
        return self.memory_mib // self.unit_mib

    @property
    def blocks_of_units(self) -> int:
        """Memory blocks that the gpu-mem units take; a block taken in part is taken."""
        return blocks_of_units(self.used.units, self.block_mib, self.unit_mib)

    @property
    def mib_of_part(self) -> int:
        """Memory of units under NVIDIA's names. The sum is rounded up, not each of three thirds."""
        return _rounded_up(self.used.part, self.memory_mib)

    @property
    def blocks_of_part(self) -> int:
        return -(-self.mib_of_part // self.block_mib)

    @property
    def cores_of_part(self) -> int:
        return _rounded_up(self.used.part, CORES_PER_GPU)

    @property
    def allocated_cores(self) -> int:
        """The cores that are allocated by any resource, as everybody sees them."""
        return min(self.used.cores + self.cores_of_part, CORES_PER_GPU)

    @property
    def allocated_mib(self) -> int:
        """The memory that is allocated by any resource; all of a GPU that is allocated as a whole."""
        # A whole GPU comes with all its memory, though the kubelet has no ID for it.
        if self.is_whole:
            return self.memory_mib
        return min(self._mib_of_others + self.mib_of_part, self.memory_mib)

    @property
    def _mib_of_others(self) -> int:
        """Memory that is allocated by blocks and gpu-mem units."""
        return self.used.blocks * self.block_mib + self.used.units * self.unit_mib

    @property
    def free_part(self) -> Fraction:
        """The rest for units under NVIDIA's names, as part of the whole GPU. Init containers do not hand on to them what
        they have of other resources."""
        if self._is_whole_for_others or not self.is_accepted:
            return Fraction(0)
        free = 1 - self.used.part
        # One without memory of its own has 0 MiB: its units are parts of its compute alone.
        if (others_mib := self._mib_of_others) and self.memory_mib:
            free = min(free, Fraction(self.memory_mib - others_mib, self.memory_mib) - self.used.part)
        if self.used.cores:
            free = min(free, Fraction(CORES_PER_GPU - self.used.cores, CORES_PER_GPU) - self.used.part)
        return max(Fraction(0), free)

    def free_units_of(self, count: int) -> int:
        """How many units of a GPU that has `count` of them have room."""
        # The only unit of a GPU is all of it. It is no sharing container, so their number does not bound it.
        return 0 if count > 1 and self.is_full else int(self.free_part * count)

    @property
    def is_full(self) -> bool:
        """The GPU serves as many sharing containers as it can."""
        return self.max_shares is not None and self.used.shares >= self.max_shares

    def _left_for_shares(self) -> tuple[int, int, int]:
        used, reusable = self.used, self.reusable
        cores, all_blocks = CORES_PER_GPU - used.cores + reusable.cores, self.memory_mib // self.block_mib
        all_units = self.memory_mib // self.unit_mib
        blocks, units = all_blocks - used.blocks + reusable.blocks, all_units
        if used.units or used.part:
            # Each is rounded up by itself: a block taken in part cannot be given to anybody else.
            blocks -= self.blocks_of_units + self.blocks_of_part
            cores -= self.cores_of_part
        if used.blocks or used.units or used.part:
            # In MiB: units and blocks need not divide each other, and rounding both would lose memory twice.
            left_mib = self.memory_mib - self.mib_of_part - used.blocks * self.block_mib
            units = left_mib // self.unit_mib - used.units
        if used.wholes:
            units, blocks = 0, 0 if self._is_whole_for_others else blocks
        units = (units if units > 0 else 0) + reusable.units
        # What the kubelet does not offer it cannot hand out, though nobody has it in the ledger.
        cores = min(cores, self.offered_cores)
        if self.max_shares is not None and self.is_full:
            # Blocks stay: they follow cores, which are 0 here, and whole GPUs count them.
            cores = units = 0
        return (
            cores if cores > 0 else 0,
            all_blocks if blocks > all_blocks else blocks if blocks > 0 else 0,
            units if units < all_units else all_units,
        )

    @property
    def free_cores(self) -> int:
        return self.free[0]

    @property
    def free_blocks(self) -> int:
        return self.free[1]

    @property
    def free_units(self) -> int:
        return self.free[2]

    @property
    def is_free(self) -> bool:
        """No part of it is used: it can be allocated as a whole, which no MIG instance can."""
        cores, blocks, _ = self.free
        return self.is_healthy and not self.is_instance and cores == CORES_PER_GPU and blocks == self.total_blocks

    def fits(self, request: Request) -> bool:
        """Whether it can be the request's GPU, or one of its whole GPUs, whatever memory they have together."""
        if request.part is not None:
            return self.is_healthy and self.free_part >= request.part and (request.part == 1 or not self.is_full)
        if count := request.whole_gpus:
            return self.is_free and (count > 1 or self.total_blocks >= request.blocks)
        cores, blocks, units = self.free
        return self.is_healthy and cores >= request.cores and blocks >= request.blocks and units >= request.units

    def lack(self, request: Request) -> Lack | None:
        """Why not; None where it fits."""
        if self.fits(request):
            return None
        if request.part is not None:
            cause = Cause.FULL if self.is_full and request.part < 1 else Cause.IN_USE
            cause = cause if self.is_accepted else Cause.LEFT_OUT
            free = int(self.free_part * CORES_PER_GPU)
            return Lack(request, capacity_of([self]), cause if self.is_healthy else Cause.UNHEALTHY, free)
        # Where several whole GPUs are requested, the check is about this one alone: their memory counts together.
        return capacity_of([self]).lack(request if request.whole_gpus < 2 else WHOLE_GPU)

    def memory_mib_of(self, request: Request) -> tuple[int, int]:
        """Free memory and all memory, in whole units of the resource by which the request asks for memory."""
        if request.units:
            return self.free_units * self.unit_mib, self.total_units * self.unit_mib
        return self.free_blocks * self.block_mib, self.total_blocks * self.block_mib

    def allocate(self, request: Request, *, is_reusable: bool = False) -> GpuAccount:
        """The account after a container of the pod got its part of this GPU. It first takes what its init containers hand
        on.

        `is_reusable`: the container is an init container, and hands its part on. Memory blocks of a whole GPU do not count.
        """
        is_whole = request.whole_gpus > 0
        blocks = 0 if is_whole else request.blocks
        asked = Charge(cores=min(request.cores, CORES_PER_GPU), blocks=blocks, units=request.units)
        more = asked.plus(self.reusable, -1).grown()
        used = self.used.plus(more)
        reusable = self.reusable.plus(more) if is_reusable else self.reusable.plus(asked, -1).grown()
        wholes = self.reusable.wholes
        if is_whole:
            wholes = int(is_reusable and not self._is_whole_for_others)
            used = used._replace(wholes=max(1, used.wholes))
        return replace(self, used=used, reusable=reusable._replace(wholes=wholes))


def account_of(
    gpu: Gpu | GpuReport, names: ResourceNames, used: Charge = NO_CHARGE, reusable: Charge = NO_CHARGE, **more: Any
) -> GpuAccount:
    """The account of a GPU with `used` charged in all, `reusable` included; `more` are the account's other fields.
    Whether an instance takes shares is this node's setting, or what its own node reports."""
    return GpuAccount(
        index=gpu.index,
        uuid=gpu.uuid,
        memory_mib=gpu.memory_mib,
        block_mib=names.memory_block_mib,
        unit_mib=names.gpu_mem_unit_mib,
        is_healthy=gpu.is_healthy,
        instance=gpu.label if gpu.mig is not None else "",
        name=gpu.name,
        takes_shares=(gpu.mig is None or gpu.mig.takes_shares)
        if isinstance(gpu, GpuReport)
        else names.takes_shares(gpu),
        serves_parts=gpu.serves_parts if isinstance(gpu, GpuReport) else names.serves_parts(gpu),
        used=used,
        reusable=reusable,
        **more,
    )


def blocks_of_units(units: int, block_mib: int, unit_mib: int) -> int:
    """Memory blocks that gpu-mem units take; a block taken in part is taken."""
    return -(-units * unit_mib // block_mib)


def capacity_of(gpus: Sequence[GpuAccount]) -> Capacity:
    """The capacity of GPUs of one node."""
    free, whole, physical, all_blocks, all_units = [], [], [], [], []
    healthy = full = used_cores = used_mib = memory_mib = left_out = 0
    block_mib, unit_mib, max_shares = MEMORY_BLOCK_MIB, 1, None
    for gpu in gpus:
        if not gpu.is_healthy:
            continue
        healthy += 1
        if not gpu.is_accepted:
            left_out += 1
            continue
        # MIG instances that take no shares count as healthy GPUs of the node: the reason is then another one.
        if not gpu.takes_shares:
            continue
        block_mib, unit_mib = gpu.block_mib, gpu.unit_mib
        total = gpu.memory_mib // block_mib
        left = gpu.free
        free.append(left)
        if not gpu.is_instance:
            physical.append(total)
            # As `GpuAccount.is_free`, without a property for each of thousands of nodes.
            if left[0] == CORES_PER_GPU and left[1] == total:
                whole.append(total)
        all_blocks.append(total)
        all_units.append(gpu.memory_mib // unit_mib)
        if gpu.max_shares is not None:
            max_shares = gpu.max_shares
            full += gpu.is_full
        used_cores += CORES_PER_GPU - left[0]
        used_mib += (total - left[1]) * block_mib
        memory_mib += gpu.memory_mib
    return Capacity(
        gpus=len(gpus),
        healthy=healthy,
        free=tuple(free),
        whole_blocks=tuple(sorted(whole, reverse=True)),
        physical_blocks=tuple(sorted(physical, reverse=True)),
        all_blocks=tuple(sorted(all_blocks, reverse=True)),
        all_units=tuple(sorted(all_units, reverse=True)),
        block_mib=block_mib,
        unit_mib=unit_mib,
        full=full,
        max_shares=max_shares,
        used_cores=used_cores,
        used_memory_mib=used_mib,
        memory_mib=memory_mib,
        left_out=left_out,
    )
