"""Feeds the cluster's pods and nodes, as the informers hear of them, into the extender's state.

A pod's annotations are never believed: those that name an extender's choice are only compared with what this extender has
reserved and with what the node's agent says it gave, and the pods where both differ are counted (docs/extender.md). The
mutable state is: the pods that wait for a node, whose requests a bind needs, those whose agent is yet to tell, those that a
list did not have, and what was complained of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import structlog

from gpushare_agent.cluster.informer import Handler
from gpushare_agent.cluster.kube.pods import pod_uid
from gpushare_agent.extender.nodes import NodeReading
from gpushare_agent.extender.pod_plan import plan_annotations
from gpushare_agent.extender.pods import asks_for_ours, lean_pod, predicate_annotations
from gpushare_agent.extender.values import ClusterNode, Reservation, Stage
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PREDICATE_GPU_INDEX_PREFIX, PREDICATE_NODE_ANNOTATION, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

log = structlog.get_logger(__name__)

COMPLAINTS_KEPT = 4096
COMPLAINT_PERIOD_S = 600.0
"""Of one pod in the log, and of as many pods as are kept."""
ANNOTATIONS_KEPT = 64
"""Of one pod: who writes more has nothing of ours to show."""
ANNOTATIONS_SHOWN = 8
CHARS_SHOWN = 80


class HoldsCluster(Protocol):
    """extender/cluster_state.py."""

    def put_node(self, node: ClusterNode, now: float) -> None: ...

    def remove_node(self, name: str) -> None: ...

    def put_pod(self, pod: Pod, now: float) -> None: ...

    def remove_pod(self, uid: PodUid) -> None: ...

    def reservation(self, uid: PodUid) -> Reservation | None: ...

    def reservations(self) -> list[Reservation]: ...


class LearnsPods(Protocol):
    """Told what pods ask for before the state hears of them (quota_watch.py)."""

    def learn(self, pod: Pod) -> None: ...

    def forget(self, uid: PodUid) -> None: ...


class LearnsNodes(Protocol):
    def know_node(self, node: ClusterNode) -> None: ...

    def forget_node(self, name: str) -> None: ...


class CountsOddities(Protocol):
    def forged(self) -> None: ...

    def node_complaint(self) -> None: ...

    def disagreed(self) -> None: ...


class PodsFeed(Handler):
    """The handler of the informer of pods. It compares lists with the reservations as well: a bind reads pods that the
    informer may never have listed. `waiting` are the pods without a node that ask for something of ours. A replica that
    does not lead compares no annotations, for it does not know what the leader has reserved; it lists every pod anew when
    it leads."""

    def __init__(
        self,
        *,
        state: HoldsCluster,
        names: ResourceNames,
        metrics: CountsOddities,
        quota: LearnsPods,
        leads: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._names = names
        self._metrics = metrics
        self._quota = quota
        self._leads = leads
        self._clock = clock
        self.waiting: dict[PodUid, Pod] = {}
        self._suspects: dict[PodUid, None] = {}
        self._complained_at: dict[PodUid, float] = {}
        self._before_list: set[PodUid] = set()
        self._missing: set[PodUid] = set()
        """Gone by the word of a list; some of them wait for the end of their bind."""
        self._untold: dict[PodUid, tuple[Pod, Mapping[str, str]]] = {}
        """Bound pods with annotations that are not our plan, and may be what the agent gave: it has not told that yet."""

    @property
    def suspects(self) -> list[PodUid]:
        """Pods whose predicate annotations are neither our plan nor what their agent gave."""
        return sorted(self._suspects)

    def key(self, raw: dict[str, Any]) -> str:
        return pod_uid(raw)

    def put(self, raw: dict[str, Any]) -> bool:
        self._drop_missing()
        if not asks_for_ours(raw, self._names):
            return False
        pod = lean_pod(raw, self._names)
        if not pod.containers or pod.is_terminal:
            return False
        if pod.node_name:
            self.waiting.pop(pod.uid, None)
        else:
            self.waiting[pod.uid] = pod
        self._quota.learn(pod)
        self._state.put_pod(pod, self._clock())
        self._compare(pod, _first(predicate_annotations(raw)))
        return True

    def list_begins(self) -> None:
        self._before_list = {reservation.pod_uid for reservation in self._state.reservations()}

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        """A pod that had a reservation before the API server was asked, and is not listed, is gone, whether the informer
        ever knew of it or not."""
        super().list_ended(keys, missing, version)
        self._missing |= self._before_list.difference(keys)
        self._before_list = set()
        self._drop_missing()

    def _drop_missing(self) -> None:
        """But for binds under way: the binder still asks about those, and undoes them or has them bound first."""
        for uid in sorted(self._missing):
            known = self._state.reservation(uid)
            if known is None or known.stage is not Stage.ASSUMED:
                self._missing.discard(uid)
                self.remove(uid)

    def remove(self, key: str) -> None:
        uid = PodUid(key)
        self.waiting.pop(uid, None)
        self._suspects.pop(uid, None)
        self._untold.pop(uid, None)
        self._state.remove_pod(uid)
        self._quota.forget(uid)

    def reported(self, uids: Collection[PodUid]) -> None:
        """The agent of a node has told what these pods hold."""
        self._drop_missing()
        for uid in sorted(self._untold.keys() & uids):
            self._compare(*self._untold[uid])

    def _compare(self, pod: Pod, said: Mapping[str, str]) -> None:
        self._untold.pop(pod.uid, None)
        if not self._leads():
            self._suspects.pop(pod.uid, None)
            return
        reservation = self._state.reservation(pod.uid)
        if _is_reported(said, reservation):
            self._suspects.pop(pod.uid, None)
        elif _may_be_reported(pod, said, reservation):
            self._untold[pod.uid] = pod, said
        elif pod.uid not in self._suspects:
            self._suspects[pod.uid] = None
            self._metrics.forged()
            self._complain(pod, said)

    def _complain(self, pod: Pod, said: Mapping[str, str]) -> None:
        """Who writes annotations could otherwise fill the log: also by new pods, so an ended one is still counted here."""
        now = self._clock()
        oldest = next(iter(self._complained_at), None)
        while oldest is not None and now - self._complained_at[oldest] >= COMPLAINT_PERIOD_S:
            del self._complained_at[oldest]
            oldest = next(iter(self._complained_at), None)
        if pod.uid in self._complained_at or len(self._complained_at) >= COMPLAINTS_KEPT:
            return
        self._complained_at[pod.uid] = now
        shown = sorted(said.items())[:ANNOTATIONS_SHOWN]
        log.warning(
            "predicate_annotations_not_ours",
            pod=f"{pod.namespace}/{pod.name}",
            annotations={name[:CHARS_SHOWN]: text[:CHARS_SHOWN] for name, text in shown},
            not_shown=len(said) - len(shown),
            then="they count for nothing",
        )


def _first(said: Mapping[str, str]) -> Mapping[str, str]:
    """So many as are kept, the node's before the containers'."""
    if len(said) <= ANNOTATIONS_KEPT:
        return said
    names = sorted(said, key=lambda name: (name != PREDICATE_NODE_ANNOTATION, name))
    return {name: said[name] for name in names[:ANNOTATIONS_KEPT]}


def _is_reported(said: Mapping[str, str], reservation: Reservation | None) -> bool:
    """Whether the annotations are our plan, or what the agent says that it gave."""
    if not said:
        return True
    if reservation is None or said.get(PREDICATE_NODE_ANNOTATION, reservation.node) != reservation.node:
        return False
    indexes = {name: text for name, text in said.items() if name.startswith(PREDICATE_GPU_INDEX_PREFIX)}
    planned = plan_annotations(reservation.plan, PREDICATE_GPU_INDEX_PREFIX)
    if all(planned.get(name) == text for name, text in indexes.items()):
        return True
    held = {str(charge.index) for charge in reservation.plan.charges}
    return reservation.stage is Stage.CONFIRMED and all(
        part in held for text in indexes.values() for part in text.split(",")
    )


def _may_be_reported(pod: Pod, said: Mapping[str, str], reservation: Reservation | None) -> bool:
    """Whether the agent may have written the GPUs: it writes what it gave into the pod as well, often before it tells it of
    its node."""
    is_confirmed = reservation is not None and reservation.stage is Stage.CONFIRMED
    is_here = said.get(PREDICATE_NODE_ANNOTATION, pod.node_name) == pod.node_name
    return bool(pod.node_name) and is_here and not is_confirmed


class NodesFeed(Handler):
    """The handler of the informer of nodes. `reported` is called with the pods that a node's agent names."""

    def __init__(
        self,
        *,
        state: HoldsCluster,
        read: Callable[[Mapping[str, Any]], NodeReading],
        metrics: CountsOddities,
        quota: LearnsNodes,
        reported: Callable[[Collection[PodUid]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._read = read
        self._quota = quota
        self._metrics = metrics
        self._reported = reported
        self._clock = clock
        self._complaints: dict[str, str] = {}
        self._elsewhere: dict[str, set[PodUid]] = {}
        """By node, the pods to which its agent gave other GPUs than planned."""

    def key(self, raw: dict[str, Any]) -> str:
        metadata = raw.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name:
            raise Corrupt("node: the name is missing")
        return name

    def put(self, raw: dict[str, Any]) -> bool:
        reading = self._read(raw)
        self._complain(self.key(raw), reading.complaint)
        if reading.node is None:
            return False
        self._quota.know_node(reading.node)
        self._state.put_node(reading.node, self._clock())
        self._compare(reading.node)
        self._reported((reading.node.held or {}).keys())
        return True

    def remove(self, key: str) -> None:
        self._complaints.pop(key, None)
        self._elsewhere.pop(key, None)
        self._state.remove_node(key)
        self._quota.forget_node(key)

    def _compare(self, node: ClusterNode) -> None:
        """Both decide by the same code on the same facts, so a difference is worth a person's look."""
        former = self._elsewhere.pop(node.name, set())
        for uid, charges in sorted((node.held or {}).items()):
            reservation = self._state.reservation(uid)
            planned = {gpu for one in reservation.plan.containers for gpu in one.gpus} if reservation else set()
            held = {charge.index for charge in charges}
            if reservation is None or not planned or planned == held:
                continue
            self._elsewhere.setdefault(node.name, set()).add(uid)
            if uid not in former:
                self._metrics.disagreed()
                log.warning(
                    "placement_disagreement",
                    pod=f"{reservation.namespace}/{reservation.pod}",
                    node=node.name,
                    planned=sorted(planned),
                    given=sorted(held),
                    then="the agent's GPUs count",
                )

    def _complain(self, name: str, complaint: str) -> None:
        if not complaint:
            self._complaints.pop(name, None)
        elif self._complaints.get(name) != complaint and len(self._complaints) < COMPLAINTS_KEPT:
            self._complaints[name] = complaint
            self._metrics.node_complaint()
            log.warning("node_annotation_unreadable", node=name, error=complaint, then="as if the node had none")
