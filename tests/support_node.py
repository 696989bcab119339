"""A node whose states a test holds, for the services that take one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.claim_pods import ClaimPods
from gpushare_agent.agent.admission.outcomes import DecisionLog
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.node import Node
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.settings.settings import Settings
from tests.support_core import NAMES, inventory


class Uncounted:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def node_of(
    gpus: GpuInventory | None = None,
    *,
    names: ResourceNames = NAMES,
    settings: Any = None,
    kind: type[Node] = Node,
    has_claims: bool = False,
    **states: Any,
) -> Any:
    """Of GPUs that are `inventory.current`, with states of its own where none are given."""
    found: dict[str, Any] = {
        "metrics": Uncounted(),
        "inventory": SimpleNamespace(
            current=gpus or inventory(), is_read=True, cordoned={}, unhealthy_reasons={}, in_order=set()
        ),
        "pods": PodStore(),
        "cache": AllocationCache(),
        "decisions": DecisionLog(100),
        **states,
    }
    found.setdefault("claim_pods", ClaimPods(found["pods"], found["cache"]))
    return kind(
        settings=settings or Settings(node_name="node"),
        isolation_reason="",
        names=names,
        has_claims=has_claims,
        **found,
    )


class FreeIsolations:
    """Isolations that need nothing on the host, and can always be had."""

    async def prepare(self, keys: object) -> None: ...

    def prepare_ahead(self, key: object) -> None: ...

    def unavailable_reason(self, isolation: str) -> str:
        return ""

    def has_no_shares(self) -> bool:
        return False

    def has_no_replicas(self) -> bool:
        return False
