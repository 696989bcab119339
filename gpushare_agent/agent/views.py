"""What is shown of the node and written to its object, read from the states that know it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import ceil

from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.admission.decisions.annotations import pod_annotations
from gpushare_agent.agent.isolation_side import IsolationSide
from gpushare_agent.agent.state import NodeState
from gpushare_agent.cluster.decisions.feature_labels import feature_labels
from gpushare_agent.cluster.decisions.node_allocations import allocations_annotation, allocations_by_pod
from gpushare_agent.cluster.decisions.node_facts import NodeFacts, node_facts
from gpushare_agent.gpus.machine import machine_name, pci_class, pci_configuration
from gpushare_agent.isolation.shares import share_limits
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.usage import UsageRound
from gpushare_agent.observability.node_snapshot import AgentFacts, ContainerFacts, NodeSnapshot


class ContainerViews:
    """The facts of each container, made anew where its allocation, its pod, a GPU or its limit has changed: between two
    rounds of sampling hardly any has."""

    def __init__(self, state: NodeState, isolation: IsolationSide) -> None:
        self._state = state
        self._isolation = isolation
        self._known: dict[ContainerKey, tuple[tuple[object, ...], ContainerFacts]] = {}

    def current(self) -> list[ContainerFacts]:
        """Of the containers that have not ended."""
        state = self._state
        gpus = state.inventory.current.by_uuid()
        before, self._known = self._known, {}
        for allocation in state.cache:
            pod = state.claim_pods.get(allocation.key.pod_uid)
            if not allocation.pod_name or _is_over(allocation, pod):
                continue
            inputs = (allocation, pod, state.inventory.current, self._isolation.has_limits(allocation.key))
            known = before.get(allocation.key)
            if known is None or any(old is not new for old, new in zip(known[0], inputs, strict=True)):
                known = inputs, _container(state, self._isolation, allocation, pod, gpus)
            self._known[allocation.key] = known
        return [facts for _, facts in self._known.values()]


def node_snapshot(
    state: NodeState,
    isolation: IsolationSide,
    containers: ContainerViews,
    usage: UsageRound | None,
    *,
    started_at: float,
    not_ready: Sequence[str],
) -> NodeSnapshot:
    """Everything that is shown of the node, now. `started_at` is in seconds since the epoch."""
    settings, inventory = state.settings, state.inventory
    return NodeSnapshot(
        node=settings.node_name,
        at=time.time(),
        agent=AgentFacts(
            version=__version__,
            started_at=started_at,
            not_ready=tuple(not_ready),
            isolation=settings.isolation,
            driver=settings.driver,
            sample_period_s=settings.sample_period_s,
            isolations=isolation.facts(),
            isolation_reason=state.isolation_reason,
        ),
        names=state.names,
        inventory=inventory.current,
        cordoned=inventory.cordoned,
        unhealthy_reasons=inventory.unhealthy_reasons,
        cores_allocated=_cores_allocated(state),
        memory_allocated_bytes=_memory_allocated(state),
        containers=containers.current(),
        usage=usage,
    )


def wanted_facts(state: NodeState) -> NodeFacts | None:
    """What the node's object should say of its GPUs, now; None until the driver was read once."""
    inventory = state.inventory
    if not inventory.is_read:
        return None
    return node_facts(
        state.plugins_gpus(),
        cordoned=inventory.cordoned.keys(),
        memory_block_mib=state.names.memory_block_mib,
        label_prefix=state.settings.facts.label_prefix,
        node_labels=state.settings.node_labels,
        features=_features(state),
        shares_in_mig=state.names.shares_in_mig,
    )


def _features(state: NodeState) -> Mapping[str, str]:
    """The labels of GPU Feature Discovery, where the setting asks for them."""
    nvidia, inventory = state.settings.nvidia, state.inventory.current
    if not nvidia.labels:
        return {}
    physical = [gpu for gpu in (*inventory.gpus, *inventory.divided) if gpu.mig is None]
    return feature_labels(
        inventory,
        served=state.names.nvidia.served if nvidia.enabled else lambda _: None,
        mig_strategy=nvidia.mig_strategy,
        machine=machine_name(),
        pci_classes=[found for gpu in physical if (found := pci_class(gpu.bus_id)) is not None],
        pci_configurations=[space for gpu in physical if (space := pci_configuration(gpu.bus_id)) is not None],
        written_at=int(time.time()),
    )


def wanted_allocations(state: NodeState) -> str | None:
    """Which pod has what, for the node's object; None until the pods are listed and the GPUs read: a text that leaves out
    what is allocated would give it away."""
    gpus = state.gpus().gpus
    if not state.store.is_synced or not gpus:
        return None
    extras = {kind: state.cache.extras(kind) for kind in state.names.kinds}
    by_plugins = [allocation for allocation in state.cache if allocation.claim is None]
    return allocations_annotation(allocations_by_pod(by_plugins, gpus, state.store.get, state.names, extras))


def wanted_of_pod(state: NodeState, pod: Pod) -> Mapping[str, str]:
    """The annotations that the pod should have for its GPUs, now."""
    return pod_annotations(pod, state.cache.view(), state.gpus(), state.names)


def _is_over(allocation: Allocation, pod: Pod | None) -> bool:
    """An init container that has run: its devices are counted with the containers that took them over."""
    return allocation.kind is ContainerKind.INIT and pod is not None and pod.has_started


def _cores_allocated(state: NodeState) -> dict[GpuUuid, int]:
    cores = state.cache.used_cores()
    for gpu, part in state.cache.used_parts().items():
        cores[gpu] = cores.get(gpu, 0) + ceil(part * CORES_PER_GPU)
    return cores


def _memory_allocated(state: NodeState) -> dict[GpuUuid, int]:
    """Bytes by GPU; the memory of a GPU that is allocated whole counts as a whole."""
    names, blocks, units = state.names, state.cache.used_blocks(), state.cache.used_gpu_mem()
    parts = state.cache.used_parts()
    whole = {gpu for a in state.cache if a.is_whole for gpu in a.gpus}
    return {
        gpu.uuid: MIB * gpu.memory_mib
        if gpu.uuid in whole
        else MIB * blocks.get(gpu.uuid, 0) * names.memory_block_mib
        + MIB * units.get(gpu.uuid, 0) * names.gpu_mem_unit_mib
        + int(parts.get(gpu.uuid, 0) * gpu.memory_mib) * MIB
        for gpu in state.gpus().gpus
    }


def _container(
    state: NodeState, isolation: IsolationSide, allocation: Allocation, pod: Pod | None, gpus: Mapping[GpuUuid, Gpu]
) -> ContainerFacts:
    annotations: Mapping[str, str] = pod.annotations if pod is not None else {}
    share = share_limits(allocation, annotations, gpus, state.names)
    allocated = share
    if allocation.granted is not None:
        allocated = share_limits(replace(allocation, granted=None), annotations, gpus, state.names)
    chosen = isolation.isolation_of(allocation)
    return ContainerFacts(
        allocation=allocation,
        pod=pod,
        cores=share.cores,
        memory_bytes=share.memory_bytes,
        core_limit=share.core_limit,
        allocated_cores=allocated.cores,
        allocated_memory_bytes=allocated.memory_bytes,
        isolation=chosen or "",
        kept=isolation.kept(allocation),
    )
