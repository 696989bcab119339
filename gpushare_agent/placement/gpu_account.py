"""What one GPU has, what is allocated of it, and what is free: the only place that computes a GPU's free capacity.

Used by the agent's admission, the scheduler extender and the simulation, so that they cannot disagree. A GPU's memory is one
account in MiB: vcuda's memory blocks, GPUShare's gpu-mem units, whole GPUs and units under NVIDIA's names take from it, each
rounded up to the unit of the one that asks. No state: a value is replaced, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MEMORY_BLOCK_MIB, GpuUuid
from gpushare_agent.model.resources import ResourceNames


# Not frozen, though never changed: the extender makes one for each GPU of a cluster, and a frozen one takes twice the time.
@dataclass(slots=True, kw_only=True)
class GpuAccount:
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

    @property
    def label(self) -> str:
        """For people, as Gpu has it."""
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
    def free_part(self) -> Fraction:
        """What is left for units under NVIDIA's names, as part of the whole GPU. What init containers have of other
        resources is not handed on to them."""
        if self.is_whole or not self.memory_mib:
            return Fraction(0)
        memory_mib = self.memory_mib - self.used_blocks * self.block_mib - self.used_units * self.unit_mib
        free = min(Fraction(CORES_PER_GPU - self.used_cores, CORES_PER_GPU), Fraction(memory_mib, self.memory_mib))
        return max(Fraction(0), free - (self.used_part or 0))

    def free_units_of(self, count: int) -> int:
        """How many units of a GPU that has `count` of them have room."""
        return 0 if count > 1 and self.is_full else int(self.free_part * count)

    @property
    def is_full(self) -> bool:
        """The GPU serves as many sharing containers as it can."""
        return self.max_shares is not None and self.shares >= self.max_shares

    @property
    def free_cores(self) -> int:
        # Comparisons, not min and max: the extender sums up thousands of nodes at once.
        if not self.takes_shares or (self.max_shares is not None and self.is_full):
            return 0
        free = CORES_PER_GPU - self.used_cores + self.reusable_cores
        if self.used_part is not None:
            free -= ceil(self.used_part * CORES_PER_GPU)
        if free > self.offered_cores:
            return self.offered_cores
        return free if free > 0 else 0

    @property
    def free_blocks(self) -> int:
        if not self.takes_shares or (self.is_whole and not self.is_whole_reusable):
            return 0
        total = self.memory_mib // self.block_mib
        free = total - self.used_blocks + self.reusable_blocks
        if self.used_units:
            free -= self.blocks_of_units
        if self.used_part is not None:
            free -= self.blocks_of_part
        if free > total:
            return total
        return free if free > 0 else 0

    @property
    def free_units(self) -> int:
        if not self.takes_shares or (self.max_shares is not None and self.is_full):
            return 0
        free = 0
        if not self.is_whole:
            free = (
                self.memory_mib - self.mib_of_part - self.used_blocks * self.block_mib
            ) // self.unit_mib - self.used_units
        free = (free if free > 0 else 0) + self.reusable_units
        total = self.memory_mib // self.unit_mib
        return free if free < total else total

    @property
    def is_free(self) -> bool:
        """No part of it is used: it can be allocated as a whole, which no MIG instance can."""
        is_unused = self.free_cores == CORES_PER_GPU and self.free_blocks == self.total_blocks
        return self.is_healthy and not self.is_instance and is_unused

    def allocate(self, *, cores: int = 0, blocks: int = 0, units: int = 0, is_reusable: bool = False) -> GpuAccount:
        """The account once a container of the pod has got this much, of what its init containers hand on first.

        `is_reusable`: the container is an init container, and hands its part on. 100 cores or more are a whole GPU, whose
        memory blocks are not counted.
        """
        is_whole = cores >= CORES_PER_GPU
        used_cores, reusable_cores = _take(
            self.used_cores, self.reusable_cores, min(cores, CORES_PER_GPU), is_reusable=is_reusable
        )
        used_blocks, reusable_blocks = self.used_blocks, self.reusable_blocks
        if not is_whole:
            used_blocks, reusable_blocks = _take(used_blocks, reusable_blocks, blocks, is_reusable=is_reusable)
        used_units, reusable_units = _take(self.used_units, self.reusable_units, units, is_reusable=is_reusable)
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


def account_of(gpu: Gpu, names: ResourceNames, **used: Any) -> GpuAccount:
    """A GPU of the inventory with nothing allocated but `used`, fields of the account by name."""
    return GpuAccount(
        index=gpu.index,
        uuid=gpu.uuid,
        memory_mib=gpu.memory_mib,
        block_mib=names.memory_block_mib,
        unit_mib=names.gpu_mem_unit_mib,
        is_healthy=gpu.is_healthy,
        instance=gpu.label if gpu.mig is not None else "",
        takes_shares=gpu.mig is None or names.shares_in_mig,
        **used,
    )


def blocks_of_units(units: int, block_mib: int, unit_mib: int) -> int:
    """Memory blocks that gpu-mem units take; a block taken in part is taken."""
    return -(-units * unit_mib // block_mib)


def _take(used: int, reusable: int, wanted: int, *, is_reusable: bool) -> tuple[int, int]:
    """`used` and `reusable` once a container has got `wanted`, from `reusable` first."""
    more = max(0, wanted - reusable)
    return used + more, max(reusable, wanted) if is_reusable else max(0, reusable - wanted)
