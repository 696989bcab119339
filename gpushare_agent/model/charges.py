"""What is charged to a GPU: the one count behind every account of one.

The agent charges a pod for its allocations (`charges_of`) and reports that on the node's object; the extender charges pods
for the reports, and for its own plans until they are reported. placement/gpu_account.py makes an account of the sum. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple, TypeVar

from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import DeviceId, GpuUuid, gpu_of
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import Measure, ResourceKind
from gpushare_agent.model.units import parts_of

K = TypeVar("K")


class Charge(NamedTuple):
    """What a container, a pod or all pods together have of one GPU; less than 0 of what is given back.

    `cores` are 1/100 of the GPU, `blocks` of memory, `units` those of GPUShare's resource. `wholes` counts who has the GPU
    as a whole, with all its memory: more than one only where it is not known which GPU a pod has. `shares` are the
    containers that share it under an isolation, `part` is what units under NVIDIA's names are of it. A tuple: a cluster has
    many.
    """

    cores: int = 0
    blocks: int = 0
    units: int = 0
    wholes: int = 0
    shares: int = 0
    part: Fraction = Fraction(0)

    @property
    def is_whole(self) -> bool:
        return self.wholes > 0

    def count(self, kind: ResourceKind) -> int:
        """Of the resource's units; of parts of GPUs there is no count."""
        counts = {Measure.CORES: self.cores, Measure.BLOCKS: self.blocks, Measure.UNITS: self.units}
        return counts.get(kind.measure, 0)

    def plus(self, more: Charge, times: int = 1) -> Charge:
        return Charge(
            self.cores + times * more.cores,
            self.blocks + times * more.blocks,
            self.units + times * more.units,
            self.wholes + times * more.wholes,
            self.shares + times * more.shares,
            self.part + times * more.part if more.part else self.part,
        )

    def grown(self) -> Charge:
        """Without the counts below 0."""
        return Charge(cores=max(0, self.cores), blocks=max(0, self.blocks), units=max(0, self.units))


NO_CHARGE = Charge()


def add_charges(sums: dict[K, Charge], charges: Mapping[K, Charge], times: int = 1) -> None:
    """Into `sums`, which keeps no entry of nothing."""
    for key, charge in charges.items():
        charged = sums.get(key, NO_CHARGE).plus(charge, times)
        if charged == NO_CHARGE:
            sums.pop(key, None)
        else:
            sums[key] = charged


def charges_of(allocations: Iterable[Allocation]) -> dict[GpuUuid, Charge]:
    """What containers of one pod have of each GPU together.

    A device ID counts once: the kubelet hands an init container's IDs on to the containers after it. Memory blocks are
    charged to the GPU of the container's cores, whatever GPU their IDs name; whole GPUs come with all of theirs. An init
    container is no share, for it ends before the others start.
    """
    found: dict[Measure, set[DeviceId]] = {measure: set() for measure in Measure}
    blocks: set[tuple[GpuUuid, DeviceId]] = set()
    wholes: set[GpuUuid] = set()
    shares: list[GpuUuid] = []
    for one in allocations:
        for kind, ids in one.ids.items():
            if kind.binds_gpu:
                found[kind.measure] |= ids
            elif not one.is_whole:
                blocks.update((gpu, device) for gpu in one.gpus[:1] for device in ids)
        if one.is_whole:
            wholes.update(one.gpus)
            continue
        if one.kind is ContainerKind.INIT:
            continue
        if not one.unit_ids:
            shares += one.gpus[:1]
        elif one.sharing in (Sharing.MPS, Sharing.SHARES):
            shares += one.gpus
    of_cores, of_units = (Counter(map(gpu_of, found[measure])) for measure in (Measure.CORES, Measure.UNITS))
    of_blocks, of_shares, parts = Counter(gpu for gpu, _ in blocks), Counter(shares), parts_of(found[Measure.PART])
    return {
        gpu: Charge(
            cores=of_cores[gpu],
            blocks=of_blocks[gpu],
            units=of_units[gpu],
            wholes=int(gpu in wholes),
            shares=of_shares[gpu],
            part=parts.get(gpu, Fraction(0)),
        )
        for gpu in sorted({*of_cores, *of_units, *of_blocks, *wholes, *of_shares, *parts})
    }
