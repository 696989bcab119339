"""Places a container that asks for GPUShare's resource: memory of one GPU in units, and nothing else.

A gpu-mem ID names the GPU, as a vcore ID does.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement.gpu_account import GpuAccount
from gpushare_agent.placement.place import explain_share
from gpushare_agent.placement.request import SharePolicy, memory_text


def validate(
    container: ContainerSpec, names: ResourceNames, gpus: Sequence[GpuAccount], *, share_mode: bool
) -> Refused | None:
    """What is wrong with the request whatever is free now, None where nothing is."""
    wanted = names.wanted(container, ResourceKind.GPU_MEM)
    asked = describe(wanted, names)
    others = [name for name in (names.vcore, names.vmemory) if container.requests.get(name)]
    if others:
        return _no(
            RefusalReason.INVALID_REQUEST,
            f"{asked} and {' and '.join(others)} cannot be asked for by one container: the first is memory alone, the "
            "others a share of compute and memory. Ask for one or the other.",
        )
    if not share_mode:
        return _no(
            RefusalReason.SHARING_DISABLED,
            f"{asked} is a share of a GPU, and sharing is switched off on this node. Use a node that shares its GPUs.",
        )
    largest = max((gpu.total_units for gpu in gpus), default=0)
    if wanted > largest:
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{asked} is more than any GPU of this node has: the largest has {describe(largest, names)}. A share never "
            "spans GPUs. Ask for less, or use a node with larger GPUs.",
        )
    return None


def effective_request(pod: Pod, container: ContainerSpec, names: ResourceNames) -> int:
    """Units that must be free where the container is placed: an init container's IDs go on to the containers after it, which
    may need more on the same GPU."""
    wanted = names.wanted(container, ResourceKind.GPU_MEM)
    if container.kind is not ContainerKind.INIT:
        return wanted
    pool = need = wanted
    for successor in pod.containers[pod.containers.index(container) + 1 :]:
        units = names.wanted(successor, ResourceKind.GPU_MEM)
        if not units or not pool:
            continue
        need += max(0, units - pool)
        pool = max(pool, units) if successor.kind is ContainerKind.INIT else max(0, pool - units)
    return need


def place_memory(
    units: int,
    gpus: Sequence[GpuAccount],
    names: ResourceNames,
    *,
    share_policy: SharePolicy,
    hint: tuple[int, ...],
    must_gpus: tuple[GpuUuid, ...],
) -> tuple[GpuUuid, str] | Refused:
    """The GPU, and why. Any tenant can write the hint: it counts where the container fits that GPU."""
    healthy = [gpu for gpu in gpus if gpu.is_healthy]
    if not healthy:
        return _no(
            RefusalReason.NO_HEALTHY_GPU,
            f"none of the {len(gpus)} GPUs of this node is healthy. See `gpushare-agent check` there.",
        )
    fitting = [gpu for gpu in healthy if gpu.free_units >= units]
    if must_gpus:
        named = [gpu for gpu in fitting if (gpu.uuid,) == must_gpus]
        if named:
            return named[0].uuid, "the kubelet's IDs name it"
        return _no(
            RefusalReason.WRONG_GPUS,
            f"{describe(units, names)} must come from {', '.join(must_gpus)}, where an init container of the pod is, and "
            "that GPU has not enough memory free. Give init containers as much as the main container, or nothing.",
        )
    if not fitting:
        best = max(healthy, key=lambda gpu: (gpu.free_units, -gpu.index))
        return _no(
            RefusalReason.NOT_ENOUGH_MEMORY,
            f"{describe(units, names)} fit no GPU: GPU {best.label} has most left, {describe(best.free_units, names)} of "
            f"{best.total_units}. Ask for less, or wait until a pod on this node ends.",
        )
    hinted = [gpu for gpu in fitting if hint == (gpu.index,)]
    if hinted:
        return hinted[0].uuid, "the scheduler chose it"
    sign = 1 if share_policy == "binpack" else -1
    chosen = min(fitting, key=lambda gpu: (sign * gpu.free_units, gpu.index))
    return chosen.uuid, explain_share(len(fitting), [(gpu.free_units,) for gpu in fitting], share_policy)


def describe(units: int, names: ResourceNames) -> str:
    """`6 aliyun.com/gpu-mem (6 GiB)`."""
    return f"{units} {names.gpu_mem} ({memory_text(units * names.gpu_mem_unit_mib)})"


def _no(reason: RefusalReason, detail: str) -> Refused:
    return Refused(reason=reason, detail=detail)
