"""This node's object, as far as it says who may change the GPUs' instances: whether the node drains, and whether NVIDIA's
mig-manager divides its GPUs. It is polled, which needs no more than the right to get it.

Source: NVIDIA/mig-parted, deployments/gpu-operator (the label of the wanted division, by which its manager removes all
instances that are not in it); NVIDIA GPU Operator, "Operands" (the label by which it is left out).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.model.errors import AgentError, Unavailable

log = structlog.get_logger(__name__)

MANAGER_LABEL = "nvidia.com/mig.config"
WITHOUT_MANAGER_LABEL = "nvidia.com/gpu.deploy.mig-manager"
PERIOD_S = 30.0
RETRY_S = 3.0


class OwnNode(Struct, kw_only=True, eq=False):
    """`changed` is called after each change of the last three. `is_known`: it was read once, or cannot be."""

    name: str
    changed: Callable[[], None] = lambda: None
    period_s: float = PERIOD_S
    retry_s: float = RETRY_S
    is_known: bool = False
    is_draining: bool = False
    managed: str = ""
    """Why no instance may be made or destroyed, empty where it may."""

    async def run(self, api: KubeApi) -> NoReturn:
        """Reads it until cancelled. One that cannot be read now stays as it was."""
        failure = ReportOnce()
        while True:
            try:
                node = read_node_json(await api.get_node(self.name))
            except AgentError as e:
                if failure.is_new(type(e).__name__):
                    log.warning("mig_node_not_read", node=self.name, error=str(e), then="it is read again")
                # Without the right it will never be known: the node's administrator gave none to respect.
                if not isinstance(e, Unavailable):
                    self._know(is_draining=self.is_draining, managed=self.managed)
                await asyncio.sleep(self.period_s if self.is_known else self.retry_s)
                continue
            failure.is_over()
            self._know(is_draining=node.is_cordoned, managed=managed_by_another(node.meta.labels))
            await asyncio.sleep(self.period_s)

    def take_over(self, previous: OwnNode) -> None:
        """What was read before a reload."""
        self.is_known, self.is_draining, self.managed = previous.is_known, previous.is_draining, previous.managed

    def _know(self, *, is_draining: bool, managed: str) -> None:
        if (self.is_known, self.is_draining, self.managed) == (True, is_draining, managed):
            return
        if managed != self.managed:
            log.warning("mig_managed_by_another", node=self.name, why=managed or "no longer")
        self.is_known, self.is_draining, self.managed = True, is_draining, managed
        self.changed()


def managed_by_another(labels: dict[str, str]) -> str:
    """Why the agent divides no GPU of a node with these labels, with the remedy behind `: `; empty where it may."""
    wanted = labels.get(MANAGER_LABEL, "")[:64]
    if not wanted or labels.get(WITHOUT_MANAGER_LABEL) == "false":
        return ""
    state = labels.get(f"{MANAGER_LABEL}.state", "none")[:64]
    return (
        f"NVIDIA's mig-manager divides the node's GPUs (label {MANAGER_LABEL}={wanted}, state {state}): remove the label, or"
        f" set {WITHOUT_MANAGER_LABEL}=false, before instances are made on demand"
    )
