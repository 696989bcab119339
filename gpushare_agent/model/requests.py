"""What a container asks for of GPUs, in the units of the resources. Pure."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.model.pods import ContainerSpec
from gpushare_agent.model.resources import ResourceKind, ResourceNames


class Request(NamedTuple):
    """What one container, or one result of a ResourceClaim, asks for. A tuple: the extender compares and hashes many.

    | it is | given by |
    |---|---|
    | a share of one GPU | `cores` 1 to 99, and memory `blocks` |
    | whole GPUs | `cores` in hundreds; `blocks` are what they must have together, 0 for any |
    | memory of one GPU by GPUShare's resource | `units` |
    | units of one GPU under NVIDIA's names | `part` of that GPU's compute and memory |

    `hint` holds GPU indexes from the scheduler extender's annotation, which any tenant can write. `must_gpus` are the GPUs
    that the kubelet's must-include IDs are on. `is_share`: 100 cores are no whole GPU, as a ResourceClaim may ask for them.
    """

    cores: int = 0
    blocks: int = 0
    units: int = 0
    part: Fraction | None = None
    hint: tuple[int, ...] = ()
    must_gpus: tuple[GpuUuid, ...] = ()
    is_share: bool = False

    @property
    def whole_gpus(self) -> int:
        """How many whole GPUs are asked for, 0 for a share."""
        return 0 if self.is_share else self.cores // CORES_PER_GPU


NOTHING = Request()
WHOLE_GPU = Request(cores=CORES_PER_GPU)


def request_of(container: ContainerSpec, names: ResourceNames) -> Request:
    """What the container's limits ask for; of NVIDIA's names nothing, for their part depends on the GPU."""
    return Request(
        cores=names.wanted(container, ResourceKind.VCORE),
        blocks=names.wanted(container, ResourceKind.VMEMORY),
        units=names.wanted(container, ResourceKind.GPU_MEM),
    )
