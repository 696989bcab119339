"""What one GPU has, what is allocated of it, what is free, and what it lacks for a request: the only place that says so.

Made of charges (model/allocations.py) by `account_of`, for the agent's admission and all that shows a node, the scheduler
extender and the simulation, so that they cannot disagree. A GPU's memory is one account in MiB: vcuda's memory blocks,
GPUShare's gpu-mem units, whole GPUs and units under NVIDIA's names take from it, each rounded up to the unit of the one that
asks. `Capacity` sums up several GPUs: a cluster has thousands of nodes, and the scheduler waits for every answer about them.
No state: a value is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.model.allocations import NO_CHARGE, Charge
from gpushare_agent.model.gpus import Gpu, GpuReport, MigReport
from gpushare_agent.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, GpuUuid
from gpushare_agent.model.resources import WHOLE_GPU, Request, ResourceNames
from gpushare_agent.placement.lack import Capacity, Cause, Lack


class GpuAccount(Struct, kw_only=True):
    """One GPU as one container may use it.

    `index` is the GPU's row in the node's topology. Cores are 1/100 of a GPU. `reusable_…` is the part of `used_…` that the
    pod's own init containers hold and the kubelet hands on: it is free for the containers after them.
    """

    index: int
    uuid: GpuUuid
    memory_mib: int
    block_mib: int = MEMORY_BLOCK_MIB
    unit_mib: int = 1024
    is_healthy: bool = True
    instance: str = ""
    """NVIDIA's name of a MIG instance, such as `0:1`; empty for a GPU."""
    takes_shares: bool = True
    """False: an instance in which the node's isolation cannot keep a share."""
    used_cores: int = 0
    used_blocks: int = 0
    used_units: int = 0
    is_whole: bool = False
    """Allocated as a whole: with all its memory, whether that was asked for or not."""
    reusable_cores: int = 0
    reusable_blocks: int = 0
    reusable_units: int = 0
    is_whole_reusable: bool = False
    """Only the pod's own init containers have it as a whole. Containers that ask for cores get it; gpu-mem units do not."""
    shares: int = 0
    max_shares: int | None = None
    """Sharing containers that the GPU can serve at once."""
    offered_cores: int = CORES_PER_GPU
    """Cores that the kubelet can still hand out."""
    used_part: Fraction | None = None
    """Of units under NVIDIA's names, as part of the whole GPU; None for none."""
    free: tuple[int, int, int] = (0, 0, 0)
    """Cores, blocks and units that a share can have, worked out from the rest whatever is given."""

    def __post_init__(self) -> None:
        # Once, and not when asked: placement asks again and again, and `replace` ends here too.
        self.free = self._left_for_shares() if self.takes_shares else (0, 0, 0)

    @property
    def label(self) -> str:
        """The name for people, as Gpu has it."""
        return self.instance or str(self.index)

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
        return blocks_of_units(self.used_units, self.block_mib, self.unit_mib)

    @property
    def mib_of_part(self) -> int:
        """Memory of `used_part`: of the sum, for of three thirds each is not rounded up."""
        return 0 if self.used_part is None else ceil(self.used_part * self.memory_mib)

    @property
    def blocks_of_part(self) -> int:
        return -(-self.mib_of_part // self.block_mib)

    @property
    def cores_of_part(self) -> int:
        return 0 if self.used_part is None else ceil(self.used_part * CORES_PER_GPU)

    @property
    def allocated_cores(self) -> int:
        """The cores that are allocated by whichever resource; as everybody is shown them."""
        return min(self.used_cores + self.cores_of_part, CORES_PER_GPU)

    @property
    def allocated_mib(self) -> int:
        """The memory that is allocated by whichever resource; all of a GPU that is allocated as a whole."""
        # A whole GPU comes with all its memory, though the kubelet has no ID for it.
        if self.is_whole:
            return self.memory_mib
        used_mib = self.used_blocks * self.block_mib + self.used_units * self.unit_mib + self.mib_of_part
        return min(used_mib, self.memory_mib)

    @property
    def free_part(self) -> Fraction:
        """What is left for units under NVIDIA's names, as part of the whole GPU. What init containers have of other
        resources is not handed on to them."""
        # A GPU of which the driver reported the UUID alone has 0 MiB: the quotient below would be of nothing.
        if (self.is_whole and not self.is_whole_reusable) or not self.memory_mib:
            return Fraction(0)
        memory_mib = self.memory_mib - self.used_blocks * self.block_mib - self.used_units * self.unit_mib
        free = min(Fraction(CORES_PER_GPU - self.used_cores, CORES_PER_GPU), Fraction(memory_mib, self.memory_mib))
        return max(Fraction(0), free - (self.used_part or 0))

    def free_units_of(self, count: int) -> int:
        """How many units of a GPU that has `count` of them have room."""
        # A GPU's only unit is the whole of it, which is no sharing container and so not bounded by their number.
        return 0 if count > 1 and self.is_full else int(self.free_part * count)

    @property
    def is_full(self) -> bool:
        """The GPU serves as many sharing containers as it can."""
        return self.max_shares is not None and self.shares >= self.max_shares

    def _left_for_shares(self) -> tuple[int, int, int]:
        cores, all_blocks = CORES_PER_GPU - self.used_cores + self.reusable_cores, self.memory_mib // self.block_mib
        all_units = self.memory_mib // self.unit_mib
        blocks, units = all_blocks - self.used_blocks + self.reusable_blocks, all_units
        if self.used_units or self.used_part is not None:
            # Each rounded up for itself: a block taken in part cannot be given to anybody else.
            blocks -= self.blocks_of_units + self.blocks_of_part
            cores -= self.cores_of_part
        if self.used_blocks or self.used_units or self.used_part is not None:
            # In MiB: units and blocks need not divide each other, and rounding both would lose memory twice.
            left_mib = self.memory_mib - self.mib_of_part - self.used_blocks * self.block_mib
            units = left_mib // self.unit_mib - self.used_units
        if self.is_whole:
            units, blocks = 0, blocks if self.is_whole_reusable else 0
        units = (units if units > 0 else 0) + self.reusable_units
        # What the kubelet does not offer it cannot hand out, though nobody has it in the ledger.
        cores = min(cores, self.offered_cores)
        if self.max_shares is not None and self.is_full:
            # Blocks stay: they follow cores, of which there are none, and whole GPUs count them.
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
        """Whether it can be the request's GPU; of several whole GPUs one of them, whatever memory they have together."""
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
            free = int(self.free_part * CORES_PER_GPU)
            return Lack(request, capacity_of([self]), cause if self.is_healthy else Cause.UNHEALTHY, free)
        # Of several whole GPUs this one is asked for itself alone: their memory counts together.
        return capacity_of([self]).lack(request if request.whole_gpus < 2 else WHOLE_GPU)

    def memory_mib_of(self, request: Request) -> tuple[int, int]:
        """Free and in all, in whole units of the resource by which the request asks for memory."""
        if request.units:
            return self.free_units * self.unit_mib, self.total_units * self.unit_mib
        return self.free_blocks * self.block_mib, self.total_blocks * self.block_mib

    def allocate(self, request: Request, *, is_reusable: bool = False) -> GpuAccount:
        """The account once a container of the pod has got its part of this GPU, of what its init containers hand on first.

        `is_reusable`: the container is an init container, and hands its part on. Memory blocks of a whole GPU do not count.
        """
        is_whole = request.whole_gpus > 0
        used_cores, reusable_cores = _take(
            self.used_cores, self.reusable_cores, min(request.cores, CORES_PER_GPU), is_reusable=is_reusable
        )
        used_blocks, reusable_blocks = self.used_blocks, self.reusable_blocks
        if not is_whole:
            used_blocks, reusable_blocks = _take(used_blocks, reusable_blocks, request.blocks, is_reusable=is_reusable)
        used_units, reusable_units = _take(self.used_units, self.reusable_units, request.units, is_reusable=is_reusable)
        return replace(
            self,
            used_cores=used_cores,
            used_blocks=used_blocks,
            used_units=used_units,
            is_whole=self.is_whole or is_whole,
            reusable_cores=reusable_cores,
            reusable_blocks=reusable_blocks,
            reusable_units=reusable_units,
            is_whole_reusable=self.is_whole_reusable
            if not is_whole
            else is_reusable and (not self.is_whole or self.is_whole_reusable),
        )


def account_of(
    gpu: Gpu | GpuReport, names: ResourceNames, used: Charge = NO_CHARGE, reusable: Charge = NO_CHARGE, **more: Any
) -> GpuAccount:
    """The account of a GPU on which `used` is charged in all, and of that `reusable`; `more` are the account's other fields.
    Whether an instance takes shares is this node's setting, or what its own node reports."""
    mig = gpu.mig
    return GpuAccount(
        index=gpu.index,
        uuid=gpu.uuid,
        memory_mib=gpu.memory_mib,
        block_mib=names.memory_block_mib,
        unit_mib=names.gpu_mem_unit_mib,
        is_healthy=gpu.is_healthy,
        instance=gpu.label if mig is not None else "",
        takes_shares=mig is None or (mig.takes_shares if isinstance(mig, MigReport) else names.shares_in_mig),
        used_cores=used.cores,
        used_blocks=used.blocks,
        used_units=used.units,
        is_whole=used.is_whole,
        reusable_cores=reusable.cores,
        reusable_blocks=reusable.blocks,
        reusable_units=reusable.units,
        is_whole_reusable=used.is_whole and used.wholes == reusable.wholes,
        shares=used.shares,
        used_part=used.part or None,
        **more,
    )


def blocks_of_units(units: int, block_mib: int, unit_mib: int) -> int:
    """Memory blocks that gpu-mem units take; a block taken in part is taken."""
    return -(-units * unit_mib // block_mib)


def _take(used: int, reusable: int, requested: int, *, is_reusable: bool) -> tuple[int, int]:
    """`used` and `reusable` once a container has got `requested`, from `reusable` first."""
    more = max(0, requested - reusable)
    return used + more, max(reusable, requested) if is_reusable else max(0, reusable - requested)


def capacity_of(gpus: Sequence[GpuAccount]) -> Capacity:
    """The capacity of GPUs of one node."""
    free, whole, physical, all_blocks, all_units = [], [], [], [], []
    healthy = full = used_cores = used_mib = memory_mib = 0
    block_mib, unit_mib, max_shares = MEMORY_BLOCK_MIB, 1, None
    for gpu in gpus:
        if not gpu.is_healthy:
            continue
        healthy += 1
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
    )
