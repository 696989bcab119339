"""NVIDIA's driver itself limits the memory of the container's cgroup, whatever its programs do. Compute is not limited.

From driver 615 on (CUDA 13.4), with cgroup v2, not with MIG. Once the cgroup is there, NVIDIA's container toolkit
sets the limit from the two variables below, or the agent does (isolation/driver/limits.py).

Source: the hook `apply-cuda-memory-limits` of nvidia-container-toolkit 1.20.1 (read there, not tried): both variables, each
a whole number of MiB, the request not above the limit; without one of them nothing is set. NVIDIA's guide to MPS, "Memory
Partitioning", says what the two mean: up to the request memory is guaranteed, above the limit allocations fail. They are
equal here, because MPS may take back what a container has above its request by ending its program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from gpushare_agent.agent.isolation.kept import NOBODY, Kept, NotKept
from gpushare_agent.agent.isolation.request import (
    ClaimUse,
    Follows,
    Isolation,
    IsolationRequest,
    invalid,
    refused_share,
)
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.model.shares import replica_limits, share_limits


def edit_driver(request: IsolationRequest) -> ContainerEdits | Refused:
    """The two variables; refused if the spec sets one of them itself, which would replace the share's."""
    if request.is_whole:
        return ContainerEdits()
    own = sorted({ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST} & request.container.env.keys())
    if own:
        return refused_share(
            request, "driver", f"its spec sets {' and '.join(own)}, by which its limit is set. Leave them out"
        )
    if request.memory_mib < 1:
        return refused_share(
            request, "driver", "it asks for no memory, and all that this isolation limits is memory. Ask for some"
        )
    if len({share.memory_mib for share in request.shares}) > 1:
        return refused_share(
            request, "driver", "its shares differ in memory, and the driver has one limit for all of a container's GPUs"
        )
    limit = str(request.shares[0].memory_mib)
    return ContainerEdits(env=((ENV_GPU_MEMORY_LIMIT, limit), (ENV_GPU_MEMORY_REQUEST, limit)))


def _not_shared(use: ClaimUse) -> Refused | None:
    """The driver limits cgroups: all users of a share must be in one, a pod's or, if NVIDIA's toolkit sets the limits, a
    container's."""
    if use.owner is None:
        return invalid(
            f"isolation {use.isolation} limits the memory of cgroups, and pods that share a claim have none in"
            f" common: make the claim for one pod, by a ResourceClaimTemplate, or {use.remedy}"
        )
    if not use.is_owner_known:
        return Refused(reason=RefusalReason.NOT_READY, detail=f"pod {use.owner} is not known yet: it is tried again.")
    if not use.together or use.config.settings.driver_limits.set_by_agent:
        return None
    return invalid(
        f"{use.who} share it, and NVIDIA's toolkit, which sets the limits of isolation {use.isolation} on this node,"
        f" would give each all of its memory: let one container use it, {use.remedy}, or have the agent set the limits"
        " (driver_limits.set_by_agent)"
    )


ISOLATION = Isolation(
    name="driver",
    edit=edit_driver,
    keeps=Kept(memory_by="driver", compute_by=NOBODY, not_kept=(NotKept.MANAGED_MEMORY,)),
    not_shared=_not_shared,
    follows_processes=True,
    memory_follows=Follows.RUNNING_PROCESSES,
    why_not_in_mig="the driver limits no memory where MIG is on",
)


class MemoryShare(Struct, frozen=True, kw_only=True):
    """What a container has of one GPU under this isolation. An init container's ends before the pod's others begin. `key` is
    its allocation's: the container's own, or that of a claim, which several containers may have."""

    key: ContainerKey
    gpu: GpuUuid
    limit_bytes: int
    kind: ContainerKind


def memory_shares(
    allocation: Allocation,
    gpus: Mapping[GpuUuid, Gpu],
    names: ResourceNames,
    users: Collection[ContainerKey],
) -> list[MemoryShare]:
    """What each of the `users` of an allocation has. A claim that was made for one pod is not given to other pods that name
    it too. A GPU that is not in `gpus` has no limit to set."""
    if allocation.unit_ids:
        limits = {uuid: one.memory_bytes for uuid, one in replica_limits(allocation, gpus).items()}
    else:
        # Each pod's cgroup has a limit of its own, and the sum must not be above the share.
        pods = max(1, len({user.pod_uid for user in users}))
        limits = {allocation.gpus[0]: share_limits(allocation, None, gpus, names).memory_bytes // pods}
    return [
        MemoryShare(key=allocation.key, gpu=uuid, limit_bytes=limit_bytes, kind=allocation.kind)
        for uuid, limit_bytes in limits.items()
    ]


def pod_memory(shares: Iterable[MemoryShare]) -> dict[GpuUuid, int]:
    """What a pod's containers may have together of each GPU, bytes. Init containers run one by one, the others at the same
    time; a claim's share of a GPU counts once."""
    together: dict[GpuUuid, int] = {}
    alone: dict[GpuUuid, int] = {}
    # By allocation: the containers that use one claim have its memory together, once.
    for share in {(share.key, share.gpu): share for share in shares}.values():
        if share.kind is ContainerKind.INIT:
            alone[share.gpu] = max(alone.get(share.gpu, 0), share.limit_bytes)
        else:
            together[share.gpu] = together.get(share.gpu, 0) + share.limit_bytes
    return {gpu: max(together.get(gpu, 0), alone.get(gpu, 0)) for gpu in together.keys() | alone.keys()}
