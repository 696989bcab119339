"""The node for which the agent's capabilities are built: its settings, its resources' names, and the states that several
of them read; and which of its GPUs the device plugins offer and which ResourceClaims do.

Each state has one owner, the only one to change it (docs/explanation/architecture.md), and is a class in its folder. A
part takes the node, and so does a service that reads several of its states.

The setting dra.gpus says which GPUs are for claims. One that the other side still uses is offered by neither until it is
free: the scheduler's extender and the DRA plugin of kube-scheduler each know their own allocations alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.names import ANY_GPU, GpuUuid, possible_gpus
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.agent.admission.allocation_cache import AllocationCache
    from gpushare_agent.agent.admission.claim_pods import ClaimPods
    from gpushare_agent.agent.admission.outcomes import DecisionLog
    from gpushare_agent.agent.cluster.pod_store import PodStore
    from gpushare_agent.agent.gpus.inventory import GpuInventoryState
    from gpushare_agent.agent.observability.metrics.agent import AgentMetrics


class GpuSplit(Struct, frozen=True, kw_only=True):
    """Which side has a GPU, by UUID: those that claims can have now, and those that no device plugin offers, with the
    reason."""

    claimable: frozenset[GpuUuid] = frozenset()
    not_plugins: tuple[tuple[GpuUuid, str], ...] = ()


def gpu_split(
    chosen: Collection[str],
    gpus: Iterable[Gpu],
    allocations: Iterable[Allocation],
    excluded: Collection[str] = (),
    on_demand: Collection[str] = (),
) -> GpuSplit:
    """`chosen` is the setting dra.gpus, `excluded` the setting excluded_gpus, `on_demand` the setting mig.on_demand: all
    instances of these GPUs are claims'."""
    by_claims: set[GpuUuid] = set()
    by_plugins: set[GpuUuid] = set()
    for allocation in allocations:
        (by_plugins if allocation.claim is None else by_claims).update(*map(possible_gpus, allocation.gpus))
    claimable, not_plugins = set(), []
    for gpu in gpus:
        if gpu.is_selected(excluded):
            not_plugins.append((gpu.uuid, "it is excluded (setting excluded_gpus)"))
        elif (by_setting := _setting_of(gpu, chosen, on_demand)) is not None:
            not_plugins.append((gpu.uuid, f"it is offered by ResourceClaims alone (setting {by_setting})"))
            if by_plugins.isdisjoint((gpu.uuid, ANY_GPU)):
                claimable.add(gpu.uuid)
        elif gpu.uuid in by_claims:
            not_plugins.append((gpu.uuid, "ResourceClaims still use it; the device plugins get it when they end"))
    return GpuSplit(claimable=frozenset(claimable), not_plugins=tuple(not_plugins))


def _setting_of(gpu: Gpu, chosen: Collection[str], on_demand: Collection[str]) -> str | None:
    """The setting by which it is claims'."""
    if gpu.mig is not None and gpu.is_selected(on_demand):
        return "mig.on_demand"
    return "dra.gpus" if gpu.is_selected(chosen) else None


def plugins_inventory(inventory: GpuInventory, found: GpuSplit) -> GpuInventory:
    """The inventory as admission sees it: the rows of the topology are indexes, so every GPU stays in its place."""
    reasons = dict(found.not_plugins)
    gpus = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reasons[gpu.uuid]) if gpu.uuid in reasons else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus)


def plugins_devices(inventory: GpuInventory, found: GpuSplit) -> GpuInventory:
    """The inventory as the kubelet sees it: the node's capacity has none of the others."""
    others = {uuid for uuid, _ in found.not_plugins}
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if gpu.uuid not in others))


class Node(Struct, frozen=True, kw_only=True):
    settings: Settings
    isolation_reason: str
    """Why the isolation was chosen, empty where the setting names it."""
    names: ResourceNames
    metrics: AgentMetrics
    inventory: GpuInventoryState
    pods: PodStore
    cache: AllocationCache
    claim_pods: ClaimPods
    decisions: DecisionLog
    has_claims: bool
    """GPUs are for claims, or an earlier agent has recorded some: these have their GPUs until they end."""

    def gpus(self) -> GpuInventory:
        """The GPUs as the inventory has them now."""
        return self.inventory.current

    @property
    def gpu_split(self) -> GpuSplit:
        """Which GPUs are the device plugins', and which are claims'."""
        if not self._are_some_others:
            return GpuSplit()
        settings = self.settings
        return gpu_split(
            settings.dra.gpus, self.gpus().gpus, self.cache, settings.excluded_gpus, settings.mig.on_demand
        )

    def plugins_gpus(self) -> GpuInventory:
        """The GPUs as admission sees them."""
        return plugins_inventory(self.gpus(), self.gpu_split) if self._are_some_others else self.gpus()

    def plugins_devices(self) -> GpuInventory:
        """The GPUs as the device plugins offer them."""
        return plugins_devices(self.gpus(), self.gpu_split) if self._are_some_others else self.gpus()

    @property
    def _are_some_others(self) -> bool:
        """GPUs may be other than the device plugins'."""
        return self.has_claims or bool(self.settings.excluded_gpus)
