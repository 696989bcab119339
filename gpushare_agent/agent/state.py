"""The states that several sides of the agent read: built first, handed to every builder.

Each has one owner, the only one to change it: docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    settings: Settings
    isolation_reason: str
    """Why the isolation was chosen, empty where the setting names it."""
    names: ResourceNames
    metrics: AgentMetrics
    inventory: GpuInventoryState
    store: PodStore
    cache: AllocationCache
    decisions: DecisionLog

    def gpus(self) -> GpuInventory:
        """As the inventory has them now."""
        return self.inventory.current
