"""What an Allocate answer puts into a container: names, devices by the node's strategies, its isolation's edits. Pure.

Source of the names: docs/reference/formats.md, section 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

from msgspec import Struct, field

from gpushare_agent.agent.delivery.device_lists import DeviceListRequest, NodeDevices, device_edits
from gpushare_agent.agent.isolation import ISOLATIONS, GpuShare, IsolationConfig, IsolationRequest
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, merged
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu, KernelModule
from gpushare_agent.core.model.isolation import DeviceListStrategy, Sharing, choose_isolation
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    DEVICE_CONTAINER_ANNOTATION,
    ENV_GPUSHARE_CONTAINER,
    ENV_GPUSHARE_GPU,
    ENV_GPUSHARE_INDEX,
    ENV_GPUSHARE_POD,
    MIB,
    DeviceId,
    GpuUuid,
)
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import GpuUnits, Request, ResourceNames, cores_of_part, request_of, units_of
from gpushare_agent.core.model.shares import core_limit


class EditPolicy(Struct, frozen=True, kw_only=True):
    """The node's settings that decide what a container gets."""

    names: ResourceNames
    config: IsolationConfig
    isolation: str
    allowed: tuple[str, ...] = ()
    strategies: tuple[DeviceListStrategy, ...] = (DeviceListStrategy.ENVVAR, DeviceListStrategy.DEVICE_NODES)
    devices: NodeDevices = field(default_factory=NodeDevices)
    cdi_kind: str = "nvidia.com/gpu"
    is_named_by_index: bool = False
    """Containers that ask for NVIDIA's resources get their GPUs by index, the setting nvidia.device_ids."""
    kernel_module: KernelModule | None = None
    """NVIDIA's; None for simulated GPUs, and if it cannot be read."""
    handlers: Mapping[str, str] = field(default_factory=dict)
    """Those of RuntimeClasses, by the class's name."""

    def handlers_of(self, pods: Iterable[Pod]) -> tuple[str, ...]:
        """The handlers of their RuntimeClasses. One that is not known is most likely named as its class."""
        names = sorted({pod.runtime_class for pod in pods if pod.runtime_class})
        return tuple(self.handlers.get(name, name) for name in names)


def edits_for(
    pod: Pod, container: ContainerSpec, gpus: Sequence[Gpu], policy: EditPolicy, units: GpuUnits | None = None
) -> ContainerEdits | Refused:
    """The edits for a container that gets a share of, or all of, `gpus` (in order of index); or why it cannot have them:
    the pod chose an isolation that the node does not allow, or the isolation cannot keep such a share. `units` is what it
    has of them under NVIDIA's names, None if it asks for others."""
    name = isolation_of(pod.annotations, units, policy)
    if isinstance(name, Refused):
        return name
    names, asked = policy.names, request_of(container, policy.names)
    # The driver no longer shows the GPU of allocated IDs: an answer without a device would start the container on no
    # GPU.
    if not gpus:
        return Refused(
            RefusalReason.NOT_READY,
            f"the GPU of pod {pod.namespace}/{pod.name}, container {container.name}, is no longer in the inventory. "
            "Create the pod again.",
        )
    isolated = ISOLATIONS[name].edits(_isolation_request(pod, container, asked, gpus, policy, units))
    if isinstance(isolated, Refused):
        return isolated
    request = DeviceListRequest(
        gpus=tuple(gpus),
        node=policy.devices,
        cdi_kind=policy.cdi_kind,
        unique=_unique(pod, container),
        by_index=units is not None and policy.is_named_by_index,
    )
    # The isolation's edits come last, and win: a limit must not be overwritten by a name or a device list.
    parts = [_base(asked, gpus, names, units), device_edits(request, policy.strategies)]
    if asked.units:
        parts.append(_gpushare(pod, container, gpus[0], names))
    return merged(*parts, ISOLATIONS[name].driver_files(container, policy.config), isolated)


def _isolation_request(
    pod: Pod, container: ContainerSpec, asked: Request, gpus: Sequence[Gpu], policy: EditPolicy, units: GpuUnits | None
) -> IsolationRequest:
    names, memory_mib = policy.names, policy.names.requested_mib(asked)
    cores = cores_of_part(Fraction(memory_mib, gpus[0].memory_mib)) if asked.units else asked.cores
    parts: Mapping[GpuUuid, Fraction] = dict(units.parts) if units is not None else {}
    # Replicas by time slicing are not limited: an isolation sees them as whole GPUs.
    is_whole = asked.whole_gpus > 0 if units is None else units.sharing in (None, Sharing.TIME_SLICING)
    shares = []
    for gpu in gpus:
        part = parts.get(gpu.uuid)
        if is_whole or (part is not None and part >= 1):
            share = GpuShare(gpu=gpu, cores=CORES_PER_GPU, memory_mib=0, is_whole=True)
        elif part is not None:
            share = GpuShare(gpu=gpu, cores=cores_of_part(part), memory_mib=int(part * gpu.memory_mib))
        else:
            share = GpuShare(gpu=gpu, cores=cores, memory_mib=memory_mib)
        shares.append(share)
    return IsolationRequest(
        pod_uid=pod.uid,
        container=container,
        shares=tuple(shares),
        config=policy.config,
        core_limit=0 if is_whole or units is not None else core_limit(pod.annotations, cores).percent,
        pod_memory_mib=_pod_memory_mib(pod, names),
        memory_unit_mib=names.gpu_mem_unit_mib,
        handlers=policy.handlers_of([pod]),
    )


def units_asked(container: ContainerSpec, ids: Sequence[DeviceId], names: ResourceNames) -> GpuUnits | None:
    """The GPUs' units that these IDs name; None if the container asks for no unit under NVIDIA's names."""
    return units_of(ids) if names.part_kind(container) is not None else None


def isolation_of(annotations: Mapping[str, str], units: GpuUnits | None, policy: EditPolicy) -> str | Refused:
    """The isolation of the container: MPS for replicas by MPS, even if the node's is another."""
    name = choose_isolation(annotations, policy.isolation, policy.allowed)
    return Sharing.MPS.isolation if units is not None and units.sharing is Sharing.MPS else name


def renumbered(allocation: Allocation, gpus: Mapping[GpuUuid, Gpu], extra: Collection[str]) -> Refused | None:
    """Why the container must not start with the answer that the kubelet has of it: after a boot, or when the driver was
    loaded again, its GPU may be gone, or another one may have its numbers. `extra` are nodes that every container gets."""
    shown = [gpu for uuid in allocation.gpus if (gpu := gpus.get(uuid)) is not None]
    # The nodes of a MIG instance that is gone may be those of a new one.
    found = [gpu for gpu in shown if not gpu.is_gone]
    own = {name for gpu in found for name in (gpu.uuid, gpu.number_label, *gpu.nodes)}
    others = (allocation.gpu_names or frozenset()) - own - set(extra)
    if len(found) == len(allocation.gpus) and not others:
        return None
    now = f"has other numbers than {', '.join(sorted(others))}" if others and found else "is not shown by the driver"
    return Refused(
        RefusalReason.WRONG_GPUS,
        f"GPU {', '.join(allocation.gpus)} of container {allocation.key.container} {now} now, as after a reboot. Delete"
        " the pod: one that is created again gets the right GPU.",
    )


def _gpushare(pod: Pod, container: ContainerSpec, gpu: Gpu, names: ResourceNames) -> ContainerEdits:
    """GPUShare's variables: the GPU's index; units requested by the pod and by the container; units of the GPU."""
    unit_mib, own_mib = names.gpu_mem_unit_mib, names.memory_mib(container)
    return ContainerEdits(
        # As GPUShare's plugin sets them. The maximum, because an init container's memory is no part of the pod's sum.
        env=(
            (ENV_GPUSHARE_INDEX, str(gpu.number)),
            (ENV_GPUSHARE_POD, str(max(_pod_memory_mib(pod, names), own_mib) // unit_mib)),
            (ENV_GPUSHARE_CONTAINER, str(own_mib // unit_mib)),
            (ENV_GPUSHARE_GPU, str(gpu.memory_mib // unit_mib)),
        )
    )


def _base(asked: Request, gpus: Sequence[Gpu], names: ResourceNames, units: GpuUnits | None) -> ContainerEdits:
    """gpu-manager's annotations, which its tools read."""
    # gpu-manager has no replicas: its tools would read a number of cores that nobody asked for.
    if units is not None:
        return ContainerEdits()
    return ContainerEdits(
        annotations=(
            (names.vcore, str(asked.cores)),
            (names.vmemory, str(asked.blocks * names.memory_block_mib * MIB)),
            (DEVICE_CONTAINER_ANNOTATION, ",".join(f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor >= 0)),
        ),
    )


def _pod_memory_mib(pod: Pod, names: ResourceNames) -> int:
    """Requested by the containers that run at the same time."""
    return sum(names.memory_mib(c) for c in pod.containers if c.kind is not ContainerKind.INIT)


def _unique(pod: Pod, container: ContainerSpec) -> str:
    """A name of the container for CDI, at most 45 characters: a label's name has at most 63."""
    return f"{pod.uid}_{hashlib.sha256(container.name.encode()).hexdigest()[:8]}"
