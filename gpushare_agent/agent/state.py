"""The states that several sides of the agent read: built first, handed to every builder.

Each has one owner, the only one to change it: docs/explanation/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.agent.claim_pods import ClaimPods
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.dra.decisions.front_ends import FrontEnds, front_ends, plugins_devices, plugins_inventory
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.settings.settings import Settings


class NodeState(Struct, frozen=True, kw_only=True):
    settings: Settings
    isolation_reason: str
    """Why the isolation was chosen, empty where the setting names it."""
    names: ResourceNames
    metrics: AgentMetrics
    inventory: GpuInventoryState
    store: PodStore
    cache: AllocationCache
    has_claims: bool
    """GPUs are for claims, or an earlier agent has recorded some: these have their GPUs until they end."""
    claim_pods: ClaimPods
    """The pods, and the claims beside them as pods."""
    decisions: DecisionLog
    request_new_life: Callable[[str], None] = lambda reason: None
    """Asks for a life with the settings and the resources as they are then, for this reason; it must be one that does not
    come back with the new life. Two follow each other by some seconds at least (agent/agent.py)."""

    def gpus(self) -> GpuInventory:
        """As the inventory has them now."""
        return self.inventory.current

    @property
    def front_ends(self) -> FrontEnds:
        """Which GPUs are the device plugins', and which are claims'."""
        if not self._are_some_others:
            return FrontEnds()
        return front_ends(self.settings.dra.gpus, self.gpus().gpus, self.cache, self.settings.excluded_gpus)

    def plugins_gpus(self) -> GpuInventory:
        """As admission sees them."""
        return plugins_inventory(self.gpus(), self.front_ends) if self._are_some_others else self.gpus()

    def plugins_devices(self) -> GpuInventory:
        """As the device plugins offer them."""
        return plugins_devices(self.gpus(), self.front_ends) if self._are_some_others else self.gpus()

    @property
    def _are_some_others(self) -> bool:
        """GPUs may be other than the device plugins'."""
        return self.has_claims or bool(self.settings.excluded_gpus)
