"""What is shown of the node read from the states that know it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.isolation.isolations import Isolations
from gpushare_agent.isolation.shares import share_limits
from gpushare_agent.model.allocations import NO_CHARGE, Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB, GpuUuid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.usage import UsageRound
from gpushare_agent.node import Node
from gpushare_agent.observability.node_snapshot import AgentFacts, ContainerFacts, NodeSnapshot
from gpushare_agent.placement.gpu_account import account_of


class ContainerViews:
    """The facts of each container, made anew where its allocation, its pod, a GPU or its limit has changed: between two
    rounds of sampling hardly any has."""

    def __init__(self, node: Node, isolation: Isolations) -> None:
        self._node = node
        self._isolation = isolation
        self._known: dict[ContainerKey, tuple[tuple[object, ...], ContainerFacts]] = {}

    def current(self) -> list[ContainerFacts]:
        """Of the containers that have not ended."""
        node = self._node
        gpus = node.inventory.current.by_uuid()
        before, self._known = self._known, {}
        for allocation in node.cache:
            pod = node.claim_pods.get(allocation.key.pod_uid)
            if not allocation.pod_name or _is_over(allocation, pod):
                continue
            inputs = (allocation, pod, node.inventory.current, self._isolation.has_limits(allocation.key))
            known = before.get(allocation.key)
            if known is None or any(old is not new for old, new in zip(known[0], inputs, strict=True)):
                known = inputs, _container(node, self._isolation, allocation, pod, gpus)
            self._known[allocation.key] = known
        return [facts for _, facts in self._known.values()]


def node_snapshot(
    node: Node,
    isolation: Isolations,
    containers: ContainerViews,
    usage: UsageRound | None,
    *,
    started_at: float,
    not_ready: Sequence[str],
) -> NodeSnapshot:
    """Everything that is shown of the node, now. `started_at` is in seconds since the epoch."""
    settings, inventory, charges = node.settings, node.inventory, node.cache.charges()
    accounts = [account_of(gpu, node.names, charges.get(gpu.uuid, NO_CHARGE)) for gpu in node.gpus().gpus]
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
            isolation_reason=node.isolation_reason,
        ),
        names=node.names,
        inventory=inventory.current,
        cordoned=inventory.cordoned,
        unhealthy_reasons=inventory.unhealthy_reasons,
        cores_allocated={one.uuid: one.allocated_cores for one in accounts},
        memory_allocated_bytes={one.uuid: one.allocated_mib * MIB for one in accounts},
        containers=containers.current(),
        usage=usage,
    )


def _is_over(allocation: Allocation, pod: Pod | None) -> bool:
    """An init container that has run: its devices are counted with the containers that took them over."""
    return allocation.kind is ContainerKind.INIT and pod is not None and pod.has_started


def _container(
    node: Node, isolation: Isolations, allocation: Allocation, pod: Pod | None, gpus: Mapping[GpuUuid, Gpu]
) -> ContainerFacts:
    annotations: Mapping[str, str] = pod.annotations if pod is not None else {}
    share = share_limits(allocation, annotations, gpus, node.names)
    allocated = share
    if allocation.resized_to is not None:
        allocated = share_limits(replace(allocation, resized_to=None), annotations, gpus, node.names)
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
