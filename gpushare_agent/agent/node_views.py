"""What is shown of containers and GPUs, read from the parts that know it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpushare_agent import __version__
from gpushare_agent.admission.decisions.isolation_choice import choose_isolation
from gpushare_agent.cluster.node_allocations_wanted import allocations_annotation, allocations_by_pod
from gpushare_agent.cluster.node_facts_wanted import NodeFacts, node_facts
from gpushare_agent.isolation.decisions.vcuda import vdevice_share
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.observability.node_snapshot import MIB, AgentFacts, ContainerFacts, NodeSnapshot

if TYPE_CHECKING:
    from gpushare_agent.agent.node_parts import NodeParts


def _is_over(parts: NodeParts, held: Allocation) -> bool:
    """An init container that has run: what it held is counted with the containers that took it over."""
    pod = parts.store.get(held.key.pod_uid)
    return held.kind is ContainerKind.INIT and pod is not None and pod.has_started


def _memory_allocated(parts: NodeParts) -> dict[GpuUuid, int]:
    """Bytes by GPU; a whole GPU's memory is all its holder's."""
    blocks, units = parts.cache.used_blocks(), parts.cache.used_gpu_mem()
    whole = {gpu for a in parts.cache if a.is_whole for gpu in a.gpus}
    return {
        gpu.uuid: MIB * gpu.memory_mib
        if gpu.uuid in whole
        else MIB * blocks.get(gpu.uuid, 0) * parts.names.memory_block_mib
        + MIB * units.get(gpu.uuid, 0) * parts.names.gpu_mem_unit_mib
        for gpu in parts.inventory.current.gpus
    }


def node_snapshot(parts: NodeParts) -> NodeSnapshot:
    """Everything that is shown of the node, now."""
    by_uuid = parts.inventory.current.by_uuid()
    return NodeSnapshot(
        node=parts.settings.node_name,
        at=time.time(),
        agent=AgentFacts(
            version=__version__,
            started_at=parts.started_at,
            not_ready=tuple(parts.not_ready()),
            isolation=parts.settings.isolation.value,
            driver=parts.settings.driver,
            sample_period_s=parts.settings.sample_period_s,
        ),
        names=parts.names,
        inventory=parts.inventory.current,
        cordoned=parts.inventory.cordoned,
        illnesses=parts.inventory.unhealthy_reasons,
        cores_allocated=parts.cache.used_cores(),
        memory_allocated_bytes=_memory_allocated(parts),
        containers=[
            _facts(parts, held, by_uuid) for held in parts.cache if held.pod_name and not _is_over(parts, held)
        ],
        usage=parts.usage.current,
    )


def _facts(parts: NodeParts, held: Allocation, gpus: Mapping[GpuUuid, Gpu]) -> ContainerFacts:
    pod = parts.store.get(held.key.pod_uid)
    annotations: Mapping[str, str] = pod.annotations if pod is not None else {}
    share = vdevice_share(held, annotations, gpus, parts.names)
    chosen = choose_isolation(annotations, parts.settings.isolation, parts.settings.isolations_allowed)
    return ContainerFacts(
        held=held,
        pod=pod,
        cores=share.cores,
        memory_bytes=share.memory_bytes,
        core_limit=share.core_limit,
        isolation="" if pod is None or isinstance(chosen, Refused) else chosen.value,
    )


def wanted_facts(parts: NodeParts) -> NodeFacts | None:
    """What the node's object should say of its GPUs, now; None until the driver was read once."""
    if not parts.inventory.is_read:
        return None
    return node_facts(
        parts.inventory.current,
        cordoned=parts.inventory.cordoned.keys(),
        memory_block_mib=parts.names.memory_block_mib,
        label_prefix=parts.settings.facts.label_prefix,
        node_labels=parts.settings.node_labels,
    )


def wanted_allocations(parts: NodeParts) -> str | None:
    """Who holds what, for the node's object; None until the pods are listed and the GPUs read: a text that leaves out what
    is held would give it away."""
    gpus = parts.inventory.current.gpus
    if not parts.store.is_synced or not gpus:
        return None
    return allocations_annotation(allocations_by_pod(parts.cache, gpus, parts.store.get, parts.names))
