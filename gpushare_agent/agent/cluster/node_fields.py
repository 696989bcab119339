"""Keeps fields of this node's object true: its labels and GPUs, its allocations, its capacity, its taint. One writer for
each.

Level, not edge: what is desired is worked out again after each change and each `period_s`, and only what differs is patched;
what somebody undid comes back. No admission waits for it. What is desired and the patches are node_facts.py,
core/node_report/annotations.py and free_gpus_taint.py. The mutable state of a writer is: the node as it was last read,
whether something changed, whether what is desired was known, and what was reported last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.cluster.free_gpus_taint import plan_taint_patch
from gpushare_agent.agent.cluster.node_facts import (
    NodeFacts,
    NodePatch,
    plan_allocations_patch,
    plan_capacity_patch,
    plan_facts_patch,
)
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import ReportOnce, bounded, wait_for
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.objects import NodeJson, read_node_json
from gpushare_agent.core.model.errors import AgentError, Rejected
from gpushare_agent.core.placement.free_gpus import FreeGpus

log = structlog.get_logger(__name__)

T = TypeVar("T")

PERIOD_S = 300.0
CALL_TIMEOUT_S = 15.0
BURST_S = 0.05
"""Between a change and the comparison: one pod's Allocates come in a burst, and half a pod is not reported."""
NOT_KNOWN_S = 0.5
"""The time between two questions for what is desired while it is not known."""
REPORT_AGAIN_S = 3600.0
ROLE = "gpushare-agent-node-facts"
REMEDY = f"give the agent's account the ClusterRole {ROLE} (manifests/base/rbac.yaml), or set facts.is_written: false"


class NodeFields(Struct, Generic[T], frozen=True, kw_only=True):
    """Fields that are written together. `name`, `lost` (what is missing while they cannot be written) and `remedy` are
    for the log; after a patch none follows for `gap_s`.

    Those that change often, with every pod, are compared with what the last patch returned; the node is read once in
    `period_s`. For the others it is read before each comparison.
    """

    name: str
    plan: Callable[[NodeJson, T], NodePatch]
    lost: str
    remedy: str = REMEDY
    gap_s: float
    period_s: float = PERIOD_S
    retry_cap_s: float
    change_often: bool = False
    needs_version: bool = False
    """A list is replaced, so the node is read again before: the kubelet changes its status, and with it its version."""


FACTS: NodeFields[NodeFacts] = NodeFields(
    name="labels and GPUs",
    plan=plan_facts_patch,
    lost="labels and GPUs on the node's object are those of before",
    gap_s=2.0,  # a GPU that flaps must not write to the API server with every poll
    retry_cap_s=PERIOD_S,
)
ALLOCATIONS: NodeFields[str] = NodeFields(
    name="allocations",
    plan=plan_allocations_patch,
    lost="the scheduler extender counts this node's new pods wherever they could be",
    gap_s=1.0,
    retry_cap_s=5.0,  # the extender places by it; a kubelet that cannot renew its lease tries every 7 s
    change_often=True,
)
CAPACITY: NodeFields[tuple[str, int | None]] = NodeFields(
    name="capacity",
    plan=plan_capacity_patch,
    lost="GPUShare's tools do not see how many GPUs of this node they may count",
    remedy="give the agent the right to patch nodes/status (docs/how-to/serve-gpu-mem.md); or set gpushare.enabled: false,"
    " and remove aliyun.com/gpu-count from the node's capacity (docs/how-to/uninstall.md)",
    gap_s=1.0,
    retry_cap_s=60.0,
)

TAINT: NodeFields[FreeGpus] = NodeFields(
    name="taint",
    plan=plan_taint_patch,
    lost="pods without GPUs are scheduled to this node without regard to its free GPUs",
    remedy=f"give the agent's account the ClusterRole {ROLE} (manifests/base/rbac.yaml), or set facts.taint_above: 1",
    gap_s=60.0,  # schedulers and autoscalers watch nodes: pods that come and go must not change it every second
    retry_cap_s=60.0,
    change_often=True,
    needs_version=True,
)


class NodeFieldsWriter(Struct, Generic[T], kw_only=True, eq=False):
    """`changed` at any time, `run` once. `desired` is None while it is not known: then what the node has stays."""

    fields: NodeFields[T]
    node_name: str
    desired: Callable[[], T | None]
    backoff: Backoff | None = None
    clock: Callable[[], float] = time.monotonic
    _is_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_known: bool = False
    _node: NodeJson | None = None
    _read_at: float = float("-inf")
    _labels_reported: ReportOnce = field(default_factory=ReportOnce)
    _failure_reported: tuple[str, float] = ("", float("-inf"))

    def changed(self) -> None:
        """What is desired may be another than before: compare soon."""
        self._is_changed.set()

    async def run(self, api: KubeApi) -> NoReturn:
        """Keeps the fields true until cancelled. A failure is tried again with back-off, or with the next change: after
        an outage that is what the list of pods brings. A missing right is tried again with back-off up to once each
        period."""
        fields, failures = self.fields, 0
        backoff = self.backoff or Backoff(base_s=1.0, cap_s=fields.retry_cap_s)
        refused_backoff = Backoff(base_s=backoff.base_s, cap_s=fields.period_s)
        while True:
            # Before the comparison: a change during it is another one.
            self._is_changed.clear()
            try:
                # Read and patch together: the client bounds each of them.
                async with bounded(CALL_TIMEOUT_S, f"no answer within {CALL_TIMEOUT_S:g} s"):
                    is_patched = await self._reconcile(api)
            except AgentError as e:
                failures += 1
                self._node = None  # a patch that timed out may have been taken: read again
                self._report_failure(str(e), isinstance(e, Rejected))
                if isinstance(e, Rejected):
                    # Not a whole period at first: an API server that has just started may not know its roles yet.
                    await asyncio.sleep(refused_backoff.delay_s(failures))
                    continue
                delay_s = backoff.delay_s(failures)
                # Never sooner than after a success, however many changes come.
                await asyncio.sleep(min(delay_s, fields.gap_s))
                # A change ends the rest of the wait: after an outage the list of pods is one.
                await wait_for(self._is_changed, delay_s - min(delay_s, fields.gap_s))
                continue
            failures, self._failure_reported = 0, ("", float("-inf"))
            # Changes within this time become one patch.
            if is_patched:
                await asyncio.sleep(fields.gap_s)
            # At the latest then: what somebody else undid makes no change here.
            if await wait_for(self._is_changed, fields.period_s if self._is_known else NOT_KNOWN_S):
                await asyncio.sleep(min(BURST_S, fields.gap_s))

    async def _reconcile(self, api: KubeApi) -> bool:
        """One comparison; whether the node was patched."""
        desired = self.desired()
        node = self._node
        # Fields that change with every pod must not cost a read of the node for each: the last patch returned it.
        is_due = not self.fields.change_often or self.clock() - self._read_at >= self.fields.period_s
        if desired is not None and (node is None or is_due):
            node = self._node = read_node_json(await api.get_node(self.node_name))
            self._read_at = self.clock()
            desired = self.desired()  # the newest: the node may have taken a while to read
        self._is_known = desired is not None
        if desired is None or node is None:
            return False
        patch = self.fields.plan(node, desired)
        if self.fields.needs_version and patch.body:
            node = self._node = read_node_json(await api.get_node(self.node_name))
            patch = self.fields.plan(node, desired)
        self._report_labels(patch)
        if not patch.body:
            return False
        raw_node = await api.patch_node(self.node_name, patch.what, patch.body, subresource=patch.subresource)
        # As the API server has it now, with what others wrote meanwhile.
        self._node = read_node_json(raw_node)
        # Allocations change with every pod; labels, capacity and a taint are worth a line.
        write = log.info if patch.shown else log.debug
        write("node_fields_written", node=self.node_name, fields=self.fields.name, **patch.shown)
        return True

    def _report_labels(self, patch: NodePatch) -> None:
        """Once for the same ones."""
        foreign, unusable = list(patch.foreign), list(patch.unusable)
        if self._labels_reported.is_new(str(foreign), "foreign") and foreign:
            log.warning("node_labels_of_others", labels=foreign, then="left as they are")
        if self._labels_reported.is_new(str(unusable), "unusable") and unusable:
            log.error("node_labels_unusable", labels=unusable, then="left out", cure="correct node_labels")

    def _report_failure(self, error: str, is_refused: bool) -> None:
        """Logs the same failure once an hour."""
        reported, at = self._failure_reported
        # A right that is missing for good would otherwise fill the log with one text.
        if reported == error and self.clock() - at < REPORT_AGAIN_S:
            return
        self._failure_reported = (error, self.clock())
        log.warning(
            "node_fields_not_written",
            node=self.node_name,
            fields=self.fields.name,
            error=error,
            lost=self.fields.lost,
            cure=self.fields.remedy if is_refused else "none: it is tried again",
        )
