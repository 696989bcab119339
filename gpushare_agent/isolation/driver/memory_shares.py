"""What containers may have of each GPU's memory under isolation driver, for the limits of their and their pods' cgroups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gpushare_agent.isolation.vcuda.edits import vdevice_share
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB, GpuUuid
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceNames


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What a container has of one GPU under this isolation. An init container's ends before the pod's others begin. `key` is
    its allocation's: the container's own, or of a claim, which several containers have."""

    key: ContainerKey
    gpu: GpuUuid
    limit_bytes: int
    kind: ContainerKind


def memory_shares(
    allocation: Allocation,
    annotations: Mapping[str, str],
    gpus: Mapping[GpuUuid, Gpu],
    names: ResourceNames,
    users: Collection[ContainerKey],
) -> list[MemoryShare]:
    """What each of the `users` of an allocation has. A claim that was made for one pod, and that other pods name all the
    same, is not given to each of them. A GPU that is not in `gpus` has no limit to set."""
    if allocation.gpu_ids:
        limits = {
            uuid: int(part * gpus[uuid].memory_mib) * MIB for uuid, part in allocation.parts.items() if uuid in gpus
        }
    else:
        pods = max(1, len({user.pod_uid for user in users}))
        limits = {allocation.gpus[0]: vdevice_share(allocation, annotations, gpus, names).memory_bytes // pods}
    return [
        MemoryShare(key=allocation.key, gpu=uuid, limit_bytes=limit_bytes, kind=allocation.kind)
        for uuid, limit_bytes in limits.items()
    ]


def pod_memory(shares: Iterable[MemoryShare]) -> dict[GpuUuid, int]:
    """What a pod's containers may have together of each GPU, bytes. Init containers run one by one, the others at the same
    time; a claim's share of a GPU counts once."""
    together: dict[GpuUuid, int] = {}
    alone: dict[GpuUuid, int] = {}
    for share in {(share.key, share.gpu): share for share in shares}.values():
        if share.kind is ContainerKind.INIT:
            alone[share.gpu] = max(alone.get(share.gpu, 0), share.limit_bytes)
        else:
            together[share.gpu] = together.get(share.gpu, 0) + share.limit_bytes
    return {gpu: max(together.get(gpu, 0), alone.get(gpu, 0)) for gpu in together.keys() | alone.keys()}
