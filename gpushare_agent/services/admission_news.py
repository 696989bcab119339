"""Passes the outcome of each admission call on: to the metrics, the pod's annotations and its Events. Never blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from gpushare_agent.decisions.identity import Served
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames


class CountsAdmissions(Protocol):
    def admission(self, resource: str, outcome: str, reason: str) -> None: ...
    def taken_ids_offered(self, resource: str, count: int) -> None: ...


class Annotates(Protocol):
    def assigned(self, pod: Pod, gpu_indexes: Mapping[int, tuple[int, ...]]) -> None: ...
    def memory_assigned(self, pod: Pod, gpu_index: int, now_ns: int) -> None: ...


class TellsRefusals(Protocol):
    def refused(self, pod: Pod, refused: Refused) -> None: ...


class AdmissionNews:
    """The observer of services/admission.py."""

    def __init__(
        self,
        *,
        metrics: CountsAdmissions,
        annotations: Annotates,
        events: TellsRefusals,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        inventory: Callable[[], GpuInventory],
        names: ResourceNames,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._wall_clock_ns = wall_clock_ns
        self._metrics = metrics
        self._annotations = annotations
        self._events = events
        self._allocations = allocations
        self._inventory = inventory
        self._names = names

    def allocated(self, served: Served, allocation: Allocation, kind: ResourceKind) -> None:
        self._metrics.admission(self._names.name(kind), "allocated", "")
        if kind is ResourceKind.VCORE and (indexes := self._card_indexes(served.pod)) is not None:
            self._annotations.assigned(served.pod, indexes)
        if kind is ResourceKind.GPU_MEM and served.container.kind is ContainerKind.MAIN:
            index = {card.uuid: card.index for card in self._inventory().cards}
            for card in allocation.cards:
                if card in index:
                    self._annotations.memory_assigned(served.pod, index[card], self._wall_clock_ns())

    def refused(self, served: Served | None, kind: ResourceKind, refused: Refused) -> None:
        self._metrics.admission(self._names.name(kind), "refused", refused.reason.value)
        if served is not None:
            self._events.refused(served.pod, refused)

    def taken_ids_offered(self, kind: ResourceKind, count: int) -> None:
        self._metrics.taken_ids_offered(self._names.name(kind), count)

    def _card_indexes(self, pod: Pod) -> dict[int, tuple[int, ...]] | None:
        """Card indexes by position in spec.containers once every main container has its cores, else None."""
        index = {card.uuid: card.index for card in self._inventory().cards}
        found: dict[int, tuple[int, ...]] = {}
        for container in pod.containers:
            if container.kind is not ContainerKind.MAIN or not self._names.wanted(container, ResourceKind.VCORE):
                continue
            held = self._allocations().get(ContainerKey(pod.uid, container.name))
            if held is None or not held.vcore_ids:
                return None
            found[container.position] = tuple(index[card] for card in held.cards if card in index)
        return found
