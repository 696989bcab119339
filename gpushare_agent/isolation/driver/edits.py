"""NVIDIA's driver itself limits the memory of the container's cgroup, whatever its programs do. Compute is not limited.

From driver 615 on (CUDA 13.4), with cgroup v2, not with MIG. Who sets the limit once the cgroup is there is NVIDIA's
container toolkit, from the two variables below, or the agent (isolation/driver/limits.py).

Source: the hook `apply-cuda-memory-limits` of nvidia-container-toolkit 1.20.1 (read there, not tried): both variables, each
a whole number of MiB, the request not above the limit; without one of them nothing is set. NVIDIA's guide to MPS, "Memory
Partitioning", says what the two mean: up to the request memory is guaranteed, above the limit allocations fail. They are
equal here, for what a container has above its request MPS may take back by ending its program.
"""

from __future__ import annotations

from gpushare_agent.isolation.request import Follows, Isolation, IsolationRequest, Preparation
from gpushare_agent.model.allocations import ContainerEdits
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.names import ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST


def edit_driver(request: IsolationRequest) -> ContainerEdits | Refused:
    """The two variables; refused where the spec sets one of them itself, which would replace the share's."""
    if request.is_whole:
        return ContainerEdits()
    own = sorted({ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST} & request.container.env.keys())
    if own:
        return _refused(request, f"its spec sets {' and '.join(own)}, by which its limit is set. Leave them out")
    if request.memory_mib < 1:
        return _refused(request, "it asks for no memory, and all that this isolation limits is memory. Ask for some")
    if len({share.memory_mib for share in request.shares}) > 1:
        return _refused(
            request, "its shares differ in memory, and the driver has one limit for all of a container's GPUs"
        )
    limit = str(request.shares[0].memory_mib)
    return ContainerEdits(env=((ENV_GPU_MEMORY_LIMIT, limit), (ENV_GPU_MEMORY_REQUEST, limit)))


def _refused(request: IsolationRequest, why: str) -> Refused:
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"container {request.container.name} cannot have its share under isolation {IsolationName.DRIVER}: {why}. "
        "Nothing was allocated.",
    )


ISOLATION = Isolation(
    name=IsolationName.DRIVER,
    edit=edit_driver,
    preparations=(Preparation.MEMORY_LIMIT,),
    memory_follows=Follows.RUNNING_PROCESSES,
    why_not_in_mig="the driver limits no memory where MIG is on",
)
