"""Live resize of the shares on a node, under vcuda, with no file: what is enforced, and what the pods are told."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.resize import ResizePolicy
from gpushare_agent.agent.admission.resizing import ResizeReports, ShareResizing
from gpushare_agent.agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.core.model.allocations import Allocation, ContainerKey, ShareSize
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import RESIZE_STATUS_ANNOTATION
from gpushare_agent.core.model.pods import Pod
from tests.support_core import NAMES
from tests.support_node import node_of


class ResizedNode:
    """A test puts pods into `store` and allocations into `cache`. It is Enforcement, PodAnnotations and PodEvents, too."""

    def __init__(self, gpus: GpuInventory, mode: ResizeMode = ResizeMode.FREE_CAPACITY) -> None:
        node = node_of(gpus)
        self.store, self.cache = node.pods, node.cache
        self.store.replace_all([])
        self.statuses: dict[str, str | None] = {}
        self.events: list[tuple[str, str]] = []
        self.enforced: list[tuple[ContainerKey, ShareSize]] = []
        self.resizing = ShareResizing(
            node=node,
            policy=ResizePolicy(names=NAMES, mode=mode),
            file=None,
            enforcement=self,
            reports=ResizeReports(node=node, annotations=self, events=self, clock=lambda: 0.0),
        )

    @property
    def sizes(self) -> Mapping[str, ShareSize]:
        return {one.key.container: one.size for one in self.cache}

    def isolation_of(self, allocation: Allocation) -> Isolation | None:
        return ISOLATIONS["vcuda"]

    async def enforce(self, allocation: Allocation) -> str:
        self.enforced.append((allocation.key, allocation.size))
        return ""

    def resize_status(self, pod: Pod, status: str | None) -> None:
        self.statuses[pod.name] = status
        others = {name: text for name, text in pod.annotations.items() if name != RESIZE_STATUS_ANNOTATION}
        own = {} if status is None else {RESIZE_STATUS_ANNOTATION: status}
        self.store.upsert(replace(pod, annotations=others | own))

    def noted(self, pod: Pod, reason: str, text: str) -> None:
        self.events.append((pod.name, text))

    warned = noted
