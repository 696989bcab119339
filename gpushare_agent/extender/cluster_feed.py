"""Handlers of the informers: put the cluster's pods, its nodes and the quota's ConfigMap into the extender's state.

A pod's annotations decide nothing here: any tenant can write them (docs/reference/extender.md).

A ConfigMap that cannot be read leaves the last good quota in force; where there never was one, pods that ask for GPUs are
refused until it is corrected, as in gpu-admission. An absent ConfigMap is no quota (docs/reference/quota.md).

State owned: the unscheduled pods, whose requests a bind needs, those missing from a list, and whether a good quota was ever
read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection

import structlog
from msgspec import Raw, Struct, field

from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kube.events import EventRecorder
from gpushare_agent.core.kube.informer import Handler
from gpushare_agent.core.kube.objects import ObjectMeta, ObjectReference, object_meta, object_name, pod_uid
from gpushare_agent.core.kube.pods import PodJson, read_pod_json, scheduler_message
from gpushare_agent.core.model.errors import Corrupt, RefusalReason
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.placement.mistakes import mistakes
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.quota import QUOTA_KEY, Quota, QuotaState
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.objects import (
    NodeReading,
    asks_for_ours,
    host_request,
    lean_pod,
    read_quota,
    resources_of_node,
)
from gpushare_agent.extender.values import ClusterNode, Stage

log = structlog.get_logger(__name__)

MAX_REPORTED = 4096
MAX_NODE_CHARS = 253
MALFORMED = "QuotaMalformed"
"""The reason of the Event on a ConfigMap that cannot be read."""


def report_mistakes(read: PodJson, *, state: ClusterState, events: EventRecorder, may_tell: Callable[[], bool]) -> None:
    """An Event, once in ten minutes, on a pod that kube-scheduler has refused and whose request is wrong: an extender is not
    asked about a pod for which no node counts enough. For PodsFeed.on_waiting."""
    # Another program may know the names of a pod that no scheduler has refused.
    if not (said := scheduler_message(read)) or not may_tell():
        return
    text, reason = mistakes(read, state.policy.names, state.offer), RefusalReason.INVALID_REQUEST.value
    # The extender's own refusal is in the scheduler's Event.
    if text and text.rstrip(".") not in said:
        involved = _reference("Pod", read.meta)
        events.record(involved, reason, text, key=(involved.uid, reason))


def _reference(kind: str, meta: ObjectMeta) -> ObjectReference:
    return ObjectReference(
        api_version="v1",
        kind=kind,
        namespace=meta.namespace or "default",
        name=meta.name or "",
        uid=meta.uid or "",
        resource_version=meta.version,
    )


class PodsFeed(Handler, Struct, kw_only=True, eq=False):
    """The handler of pods. It compares lists with the reservations as well: a bind may have read a pod that the informer
    never listed."""

    state: ClusterState
    model_label: str = ""
    clock: Callable[[], float] = time.monotonic
    on_scheduled: Callable[[Pod], None] = lambda pod: None
    """Called with a pod that had no node, once it has one."""
    on_waiting: Callable[[PodJson], None] = lambda read: None
    """Called with every pod that has no node, whatever it asks for."""
    _unscheduled: dict[PodUid, Pod] = field(default_factory=dict)
    _before_list: set[PodUid] = field(default_factory=set)
    _missing: set[PodUid] = field(default_factory=set)
    """The pods that are not listed any more; some stay until their bind ends."""

    def unscheduled(self, uid: PodUid) -> Pod | None:
        """The pod, if it has no node and asks for something of ours."""
        return self._unscheduled.get(uid)

    def unscheduled_pods(self) -> list[Pod]:
        """All such pods, in the order of arrival."""
        return list(self._unscheduled.values())

    def key(self, raw: Raw) -> str:
        return pod_uid(raw)

    def put(self, raw: Raw) -> bool:
        return self.put_pod(read_pod_json(raw))

    def put_pod(self, read: PodJson) -> bool:
        # Whoever was missing and had a bind under way may be resolved by now: no event comes for a pod that is gone.
        self.drop_missing()
        if not read.spec.node_name:
            self.on_waiting(read)
        # Before anything more is parsed: nearly all pods of a cluster end here.
        names = self.state.policy.names
        if not asks_for_ours(read, names):
            return self._put_other(read)
        pod = lean_pod(read, names, self.model_label)
        # The pod has ended, and the selector of the watch has not dropped it yet.
        if pod.is_terminal:
            return False
        # The containers ask for zero of our resources.
        if not pod.containers:
            return self._put_other(read)
        if pod.node_name:
            if self._unscheduled.pop(pod.uid, None) is not None:
                self.on_scheduled(pod)
        else:
            self._unscheduled[pod.uid] = pod
        self.state.put_pod(pod, self.clock())
        return True

    def _put_other(self, read: PodJson) -> bool:
        """A pod that asks for nothing of ours takes CPU and main memory of its node."""
        node, uid = read.spec.node_name, read.meta.uid
        if not node or not uid or len(node) > MAX_NODE_CHARS:
            return False
        self.state.put_other_pod(PodUid(uid), sys.intern(node), host_request(read.spec))
        return True

    def list_begins(self) -> None:
        # A list shows the pods that ended while the watch was away; the informer knows only those that it had.
        self._before_list = {reservation.pod_uid for reservation in self.state.reservations()}

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        """A pod that had a reservation before the list began, and is not listed, is gone, whether the informer ever knew it
        or not."""
        super().list_ended(keys, missing, version)
        # A reservation made while the pages came is not among them: its pod may be younger than the list.
        self._missing |= self._before_list.difference(keys)
        self._before_list = set()
        self.drop_missing()

    def drop_missing(self) -> None:
        """Forgets them, except those with a bind under way: the binder resolves them first."""
        for uid in sorted(self._missing):
            known = self.state.reservation(uid)
            # An ASSUMED reservation is the binder's: to drop it would give GPUs away that a late bind may still take.
            if known is None or known.stage is not Stage.ASSUMED:
                self._missing.discard(uid)
                self.remove(uid)

    def remove(self, key: str) -> None:
        uid = PodUid(key)
        self._unscheduled.pop(uid, None)
        self.state.remove_pod(uid)


class NodesFeed(Handler, Struct, kw_only=True, eq=False):
    """The handler of nodes. `on_report` is called after each report of a node's agent."""

    state: ClusterState
    read: Callable[[Raw], NodeReading]
    metrics: ExtenderMetrics
    on_report: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _problems: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_REPORTED))
    _elsewhere: dict[str, set[PodUid]] = field(default_factory=dict)
    """The pods, by node, to which its agent allocated other GPUs than planned."""

    def key(self, raw: Raw) -> str:
        return object_name(raw, "node")

    def put(self, raw: Raw) -> bool:
        reading, name = self.read(raw), self.key(raw)
        self.state.put_resources(resources_of_node(raw))
        # Also where the node counts all the same: without its annotation its capacity is only divided evenly.
        if not reading.problem:
            self._problems.is_over(name)
        elif self._problems.is_new(reading.problem, name):
            self.metrics.count("node_annotations_unreadable")
            log.warning("node_annotation_unreadable", node=name, error=reading.problem, then="as if the node had none")
        if reading.node is None:
            return False
        self.state.put_node(reading.node, self.clock())
        # After the state has the report, or a pod's reservation would not be found.
        self._compare(reading.node)
        self.on_report()
        return True

    def remove(self, key: str) -> None:
        self._problems.is_over(key)
        self._elsewhere.pop(key, None)
        self.state.remove_node(key)

    def _compare(self, node: ClusterNode) -> None:
        """Both decide by the same code on the same facts, so a difference is a fault."""
        former = self._elsewhere.pop(node.name, set())
        for uid, charges in sorted((node.allocated or {}).items()):
            reservation = self.state.reservation(uid)
            planned = {gpu for one in reservation.plan.containers for gpu in one.gpus} if reservation else set()
            allocated = set(charges)
            # No plan: the pod was bound before this process started, or by another scheduler.
            if reservation is None or not planned or planned == allocated:
                continue
            self._elsewhere.setdefault(node.name, set()).add(uid)
            # Once for each: a node is delivered again with every report.
            if uid not in former:
                self.metrics.count("placement_disagreements")
                pod = f"{reservation.namespace}/{reservation.pod}"
                gpus = {"planned": sorted(planned), "allocated": sorted(allocated), "then": "the agent's GPUs count"}
                log.warning("placement_disagreement", pod=pod, node=node.name, **gpus)


class QuotaFeed(Handler, Struct, kw_only=True, eq=False):
    """The informer's handler of the one ConfigMap."""

    state: QuotaState
    events: EventRecorder
    metrics: ExtenderMetrics
    _was_good: bool = False

    def key(self, raw: Raw) -> str:
        return object_name(raw, "ConfigMap")

    def put(self, raw: Raw) -> bool:
        try:
            # Setting it wakes the pods that wait for a quota.
            self.state.quota = read_quota(raw)
        except Corrupt as e:
            self._report_malformed(raw, str(e))
        else:
            self._was_good = True
            self.metrics.quota_loaded("good")
            version = object_meta(raw, "ConfigMap").version
            log.info("quota_loaded", namespaces=len(self.state.quota.namespaces), version=version)
        return True

    def remove(self, key: str) -> None:
        # As in gpu-admission: without a ConfigMap nobody is limited.
        self.state.quota = Quota()
        # A malformed ConfigMap that comes next has no good one before it: what was deleted is not in force.
        self._was_good = False
        self.metrics.quota_loaded("absent")
        log.warning("quota_gone", config_map=key, then="no namespace is limited")

    def _report_malformed(self, raw: Raw, error: str) -> None:
        self.metrics.quota_loaded("malformed")
        then = "the last good one stays in force"
        if not self._was_good:
            # Allowing everything would let a mistake in the text lift all limits.
            self.state.quota = None
            then = "pods that ask for GPUs are refused because there was no good one before"
        log.error("quota_malformed", error=error, then=then, cure=f"correct the key {QUOTA_KEY} of the ConfigMap")
        meta = object_meta(raw, "ConfigMap")
        involved = _reference("ConfigMap", meta)
        message = f"{error}. Meanwhile {then}."
        # An Event too: the author of the ConfigMap does not read the extender's log.
        self.events.record(involved, MALFORMED, message, key=(MALFORMED, involved.namespace, involved.name, error))
