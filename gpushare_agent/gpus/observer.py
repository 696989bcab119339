"""Reports every change of a GPU's health and every cordon: in the log, as a metric, and as an Event on the Node.

State owned: the GPUs and the cordons of the last change, to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.model.errors import NodeEventReason
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.node import Metrics

log = structlog.get_logger(__name__)


class NodeEventRecorder(Protocol):
    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None: ...


class GpuHealthObserver:
    """Subscribe `inventory_changed` to the inventory. A GPU that is healthy when it is first seen is not reported."""

    def __init__(self, inventory: GpuInventoryState, events: NodeEventRecorder, metrics: Metrics) -> None:
        self._inventory = inventory
        self._events = events
        self._metrics = metrics
        self._gpus: Mapping[GpuUuid, Gpu] = {}
        self._cordoned: Mapping[GpuUuid, str] = inventory.cordoned

    def inventory_changed(self, inventory: GpuInventory) -> None:
        gpus, was_cordoned = self._gpus, self._cordoned
        self._gpus, self._cordoned = inventory.by_uuid(), self._inventory.cordoned
        for gpu in sorted(inventory.gpus, key=lambda gpu: gpu.index):
            was_healthy = gpu.uuid not in gpus or gpus[gpu.uuid].is_healthy
            self._report_cordon(gpu, was_cordoned.get(gpu.uuid), self._cordoned.get(gpu.uuid))
            if was_healthy and not gpu.is_healthy:
                self._report_unhealthy(gpu)
            elif gpu.is_healthy and not was_healthy:
                self._report_healthy(gpu, was_cordoned=gpu.uuid in was_cordoned)

    def _report_cordon(self, gpu: Gpu, before: str | None, now: str | None) -> None:
        if before == now:
            return
        if now is not None:
            log.warning("gpu_cordoned", index=gpu.index, uuid=gpu.uuid, reason=now)
            because = f": {now}" if now else ""
            self._note(NodeEventReason.GPU_CORDONED, gpu, f"taken out of service by an operator{because}")
        else:
            log.warning("gpu_uncordoned", index=gpu.index, uuid=gpu.uuid, reason=before)
            still = "" if gpu.is_healthy else f", and still Unhealthy: {gpu.unhealthy_reason}"
            self._note(NodeEventReason.GPU_UNCORDONED, gpu, f"put back in service by an operator{still}")

    def _report_unhealthy(self, gpu: Gpu) -> None:
        self._metrics.gpu_health_changed(gpu.uuid, healthy=False)
        if gpu.uuid in self._cordoned:
            return  # the cordon's own Event has the reason
        log.error("gpu_unhealthy", index=gpu.index, uuid=gpu.uuid, reason=gpu.unhealthy_reason)
        self._note(NodeEventReason.GPU_UNHEALTHY, gpu, gpu.unhealthy_reason)

    def _report_healthy(self, gpu: Gpu, *, was_cordoned: bool) -> None:
        self._metrics.gpu_health_changed(gpu.uuid, healthy=True)
        if was_cordoned:
            return
        log.info("gpu_recovered", index=gpu.index, uuid=gpu.uuid)
        self._note(NodeEventReason.GPU_RECOVERED, gpu, "healthy again, and offered to pods")

    def _note(self, reason: NodeEventReason, gpu: Gpu, text: str) -> None:
        self._events.note(reason, gpu.uuid, f"GPU {gpu.label} ({gpu.uuid}): {text}")
