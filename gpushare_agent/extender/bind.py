"""Binds pods for the scheduler: reserve, annotate, bind; undone where it fails, resolved later where the outcome is unknown.

A bind names the version of the pod that it is for. Where the watch has delivered a version without annotations that choose
GPUs, one request binds that version and writes the plan's. Every other try patches the annotations first, which does three
things: it carries the plan to the agent, returns the pod as it is now, and makes a new version of the pod, which invalidates
every earlier bind still under way. One accepted patch therefore resolves an unknown outcome: a pod that it shows without a
node can no longer be bound by an earlier request of ours.

Formats: docs/reference/formats.md, sections 1 and 5; Kubernetes core/v1 Binding. State owned by `Binder`: the pods whose
bind is under way, and the reservations about which something is left to do (`Left`), all bounded by the scheduler's requests
and by the reservations; by `PodWrites` the last time written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NoReturn

import structlog
from msgspec import Raw, Struct, field

from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import ReportOnce, bounded, wait_while
from gpushare_agent.core.kube.client import ClusterApi
from gpushare_agent.core.kube.objects import object_meta, pod_uid
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.kube.session import MAX_RETRY_AFTER_S, NO_ANSWER, Throttled
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Refused, Rejected, Unavailable
from gpushare_agent.core.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
    RETRY_ANNOTATION,
    PodUid,
)
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.pod_plan import plan_annotations
from gpushare_agent.extender.messages import BindArgs
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.objects import chooses_gpus, lean_pod
from gpushare_agent.extender.values import Reservation, Stage

log = structlog.get_logger(__name__)

TRIES = 5
RECONCILE_PERIOD_S = 1.0
MAX_RECONCILED = 64
"""The binds in one pass: an API server that comes back should not get all of them at once."""
MAX_STALE = 1024
REPORT_POLL_S = 0.02
NOT_LEADING = "this replica of the extender does not lead any more"
FOREIGN_REMOVED = 64
"""Annotations in one patch. A pod can have thousands, and each patch names them all."""


BIND_TIMEOUT_S = 4.0
"""The time for one bind, less than the scheduler's httpTimeout in manifests/extender."""


class BindTiming(Struct, frozen=True, kw_only=True):
    """`bind_s` limits one bind, all its requests together; `assume_s` the time that a pod reserved by filter may stay
    unbound."""

    bind_s: float = BIND_TIMEOUT_S
    assume_s: float = 60.0
    reconcile_s: float = RECONCILE_PERIOD_S
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=1.0))
    clock: Callable[[], float] = time.monotonic


class _Failed(Exception):  # noqa: N818 - the bind's, not the program's; never leaves this module
    """The reason why there is no bind. The text is for the scheduler's Event on the pod, the outcome for the metric."""

    def __init__(self, text: str, outcome: str = "refused") -> None:
        super().__init__(text)
        self.outcome = outcome


class Bind(Struct):
    """One bind. `version` of the pod is known to have no annotations that choose GPUs; empty: none is. `is_open`: a bind was
    sent, and it is not known that it failed. `is_annotated`: a patch was sent."""

    reservation: Reservation
    version: str = ""
    is_open: bool = False
    is_annotated: bool = False


Write = Callable[[Bind], Awaitable[Raw | None]]
"""One try of what `PodWrites` does. The pod as it is then; None where it is bound to our node."""


class ElsewhereError(Exception):
    """The pod was bound to another node meanwhile."""


class Left(IntEnum):
    """The rest of the work on a reservation, in the order in which it is done: open binds keep GPUs from other pods, stale
    annotations only mislead."""

    OPEN = 1
    """A bind was sent and its outcome is unknown: the GPUs stay reserved."""
    STALE = 2
    """It was undone, and the pod has the annotations of a bind that did not happen."""
    PROMISED = 3
    """Made by filter, for a scheduler that binds by itself: it may choose another node, or never bind."""


class Binder(Struct, kw_only=True, eq=False):
    """`bind` for each request of the scheduler; `run` once, resolves binds of unknown outcome. `unscheduled` finds a pod
    without a node."""

    state: ClusterState
    writes: PodWrites
    unscheduled: Callable[[PodUid], Pod | None]
    metrics: ExtenderMetrics
    timing: BindTiming
    _under_way: set[PodUid] = field(default_factory=set)
    _left: dict[PodUid, tuple[Left, Reservation]] = field(default_factory=dict)
    _unresolved: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_RECONCILED))

    @property
    def open_binds(self) -> int:
        """Binds of unknown outcome: their GPUs stay reserved."""
        return sum(self._is_left(uid, Left.OPEN) for uid in self._left)

    def _is_left(self, uid: PodUid, left: Left) -> bool:
        return uid in self._left and self._left[uid][0] is left

    @contextmanager
    def _alone(self, uid: PodUid) -> Iterator[None]:
        """kube-scheduler tries a bind again after its own time limit, which may be shorter than ours: two at once would
        reserve, undo and annotate in each other's midst. Raises _Failed."""
        if uid in self._under_way:
            raise _Failed("another request about it is under way. The scheduler tries again.")
        self._under_way.add(uid)
        try:
            yield
        finally:
            self._under_way.discard(uid)

    async def bind(self, args: BindArgs) -> str:
        """Empty when the pod is bound, else why not."""
        outcome, error = "bound", ""
        try:
            with self._alone(args.uid):
                await self._reserve_and_bind(args)
        except _Failed as e:
            outcome, error = e.outcome, str(e)
        # _carry_out renames its own errors to _Failed: those that come here are from the reads before it.
        except AgentError as e:  # nothing was reserved
            outcome, error = "failed", f"{e}. The scheduler tries again."
        self.metrics.count("binds", outcome)
        return f"cannot bind pod {args.namespace}/{args.pod} to node {args.node}: {error}" if error else ""

    async def _reserve_and_bind(self, args: BindArgs) -> None:
        # One end for all requests of the bind together: the scheduler waits for the sum.
        ends_at = asyncio.get_running_loop().time() + self.timing.bind_s
        async with bounded(self.timing.bind_s, NO_ANSWER):
            pod = await self._find(args)
            if pod.node_name:  # bound already, to this node
                # An answer that the scheduler did not get, most likely: it asks again, and saying yes again is right.
                self.state.bound(args.uid)
                return
            if not pod.containers:  # asks for nothing of ours: a scheduler without managedResources sends every pod
                await self.writes.bind_plain(pod, args.node)
                return
        reserved = await self._carry_out(self.writes.bind, pod, args.node, ends_at)
        gpus = {container.name: list(container.gpus) for container in reserved.plan.containers if container.gpus}
        log.info("pod_bound", pod=f"{args.namespace}/{args.pod}", node=args.node, gpus=gpus)

    async def reserve(self, pod: Pod, node: str) -> str:
        """Reserve and annotate for a scheduler that binds by itself. Empty, or why not."""
        ends_at = asyncio.get_running_loop().time() + self.timing.bind_s
        try:
            with self._alone(pod.uid):
                reserved = await self._carry_out(self.writes.announce, pod, node, ends_at)
        except _Failed as e:
            self.metrics.count("binds", e.outcome)
            return str(e)
        # `_expire` gives the GPUs back.
        self._left[pod.uid] = Left.PROMISED, reserved
        return ""

    def release(self, uid: PodUid) -> None:
        """Drops a reservation made by `reserve`: the scheduler filters the pod again, so it has not bound it."""
        # Only filter's own reservations: one of a bind may be of a pod that is bound by now.
        if uid not in self._under_way and self._is_left(uid, Left.PROMISED):
            del self._left[uid]
            self.state.undo(uid)

    async def run(self) -> NoReturn:
        """Reconcile until cancelled."""
        while True:
            await asyncio.sleep(self.timing.reconcile_s)
            await self.reconcile()

    # reconcile, in the order of the code:
    #
    # subject              found                                           action
    # filter reservation   bound, confirmed or gone meanwhile              forget it
    #                      unbound for `assume_s`, no request under way    treat it as a bind of unknown outcome
    # unknown outcome      a request of it under way, or not leading       next time
    #                      reservation not ASSUMED any more                resolved as it is
    #                      patch accepted, pod has no node                 undo, annotations are stale
    #                      patch accepted, pod on our node                 bound
    #                      pod gone, or on another node                    undo
    #                      patch in conflict                               undo where the pod is gone, else next time
    #                      patch rejected                                  by reading the pod (`_resolve_by_read`)
    #                      no answer                                       next time
    # stale annotations    reserved again                                  forget it
    #                      patch accepted, or pod gone, or rejected        forget it
    #                      no answer                                       next time

    async def reconcile(self) -> None:
        """Goes once over everything that is not done. Only a leader writes."""
        self._expire()
        work = sorted((left, uid) for uid, (left, _) in self._left.items() if left is not Left.PROMISED)
        for left, uid in work[:MAX_RECONCILED]:
            # Asked again for each one: leadership may be lost between two, and a bind may begin.
            if uid in self._under_way or not self.writes.leads() or not self._is_left(uid, left):
                continue
            reservation = self._left[uid][1]
            try:
                # One pod that does not get an answer must not keep the others waiting for long.
                with self._alone(uid):
                    async with bounded(self.timing.bind_s, NO_ANSWER):
                        await (self._resolve if left is Left.OPEN else self._clean)(uid, reservation)
                self._unresolved.is_over(uid)
            except AgentError as e:
                # By pod, because no other one gets its GPUs meanwhile.
                if self._unresolved.is_new(str(e), uid):
                    then = "retried, its GPUs stay reserved" if left is Left.OPEN else "retried"
                    log.warning("bind_unresolved", pod=_name(reservation), error=str(e), then=then)

    def _expire(self) -> None:
        for uid, reservation in [(uid, one) for uid, (left, one) in self._left.items() if left is Left.PROMISED]:
            known = self.state.reservation(uid)
            if known is None or known.stage is not Stage.ASSUMED:
                del self._left[uid]
            # The scheduler may have bound it without our hearing of it, so its outcome is unknown, not negative.
            elif self.timing.clock() - reservation.at >= self.timing.assume_s and uid not in self._under_way:
                self._left[uid] = Left.OPEN, reservation
                self.metrics.count("reservations_expired")

    # --- one bind ---

    async def _find(self, args: BindArgs) -> Pod:
        pod = self.unscheduled(args.uid)
        if pod is None:  # the watch has not delivered it yet, or it has a node
            pod = await self.writes.read(args.namespace, args.pod)
        # A StatefulSet's pod is made again under its name within a second.
        if (pod.namespace, pod.name, pod.uid) != (args.namespace, args.pod, args.uid):
            raise _Failed("another pod has this name by now. Nothing is left to do.")
        # Bound by another scheduler, or by an earlier bind of ours that was taken for failed.
        if pod.node_name and pod.node_name != args.node:
            raise _Failed(f"it is on node {pod.node_name} already. Nothing is left to do.")
        return pod

    async def _wait_report(self, node: str) -> None:
        """The node's agent follows the plan, and one without the links between its GPUs may be worse than its own. At most
        half of the bind's time: the other half is for the API server."""
        at_most_s = self.timing.bind_s / 2
        await wait_while(lambda: self.state.awaits_report(node, self.timing.clock()), at_most_s, poll_s=REPORT_POLL_S)

    async def _carry_out(self, write: Write, pod: Pod, node: str, ends_at: float) -> Reservation:
        """Reserves, and writes in time, in several tries if need be. The ledger is correct afterwards, whatever the outcome.
        Raises _Failed."""
        # Before the reservation, not after it: the report may change what is planned.
        await self._wait_report(node)
        if not self.writes.leads():
            raise _Failed(NOT_LEADING)
        reserved = self.state.reserve(pod, node, self.timing.clock())
        if isinstance(reserved, Refused):
            raise _Failed(reserved.detail.removeprefix(f"node {node}: "))
        # BOUND or CONFIRMED already where the watch, or the node's agent, was quicker than this request: nothing is left to
        # write.
        if reserved.stage is not Stage.ASSUMED:
            return reserved
        # A bind of unknown outcome stays unknown until this one's patch is accepted.
        is_open = self._is_left(pod.uid, Left.OPEN)
        is_patched = is_open or any(map(chooses_gpus, pod.annotations))
        bind = Bind(reserved, version="" if is_patched else pod.resource_version, is_open=is_open)
        try:
            # The whole bind's end, so that the waits before count too.
            async with bounded(ends_at - asyncio.get_running_loop().time(), NO_ANSWER):
                await self._try(write, bind, ends_at)
        except (AgentError, ElsewhereError) as e:
            self._abort(bind)
            gpus = "stay reserved until it is known whether the pod was bound" if bind.is_open else "are free again"
            text = f"{e}. Its GPUs {gpus}; the scheduler tries again."
            raise _Failed(text, "unknown" if bind.is_open else "failed") from e
        # The process stops: what was sent may still arrive at the API server.
        except BaseException:  # cancelled
            self._abort(bind)
            raise
        # Stale annotations too were replaced by the new ones.
        self._left.pop(pod.uid, None)
        return reserved

    async def _try(self, write: Write, bind: Bind, ends_at: float) -> None:
        """Until it is done, or an error comes that another try cannot help."""
        for tried in range(1, TRIES + 1):
            try:
                if await write(bind) is None:
                    self.state.bound(bind.reservation.pod_uid)
                return
            # A Conflict is tried again as well: the next patch shows the pod as it is now.
            except (Unavailable, Conflict) as e:
                if tried == TRIES:
                    raise Unavailable(f"{e}, tried {TRIES} times") from e
                await self._pause(e, tried, ends_at)

    def _abort(self, bind: Bind) -> None:
        """Undoes the reservation where the bind cannot happen any more; else `reconcile` decides later."""
        reservation, uid = bind.reservation, bind.reservation.pod_uid
        if bind.is_open:
            self._left[uid] = Left.OPEN, reservation
            return
        self.state.undo(uid)
        # Only what was sent can be left behind; a patch that failed may have been written all the same.
        if bind.is_annotated:
            self._mark_stale(reservation)
        elif not self._is_left(uid, Left.STALE):
            self._left.pop(uid, None)

    async def _pause(self, error: AgentError, failures: int, ends_at: float) -> None:
        """Before another try. Raises Unavailable where the API server asks for more time than there is."""
        wait_s = error.retry_after_s if isinstance(error, Throttled) else self.timing.backoff.delay_s(failures)
        # Waiting for it would only end in our own timeout, without the API server's reason.
        if isinstance(error, Throttled) and asyncio.get_running_loop().time() + wait_s >= ends_at:
            # Longer times are read as this one.
            more = " or more" if wait_s >= MAX_RETRY_AFTER_S else ""
            raise Unavailable(
                f"{error}; it asks to wait {wait_s:g} s{more}, and a bind may take {self.timing.bind_s:g} s"
            ) from error
        self.metrics.count("bind_retries")
        await asyncio.sleep(wait_s)

    # --- later ---

    async def _resolve(self, uid: PodUid, reservation: Reservation) -> None:
        """A bind of unknown outcome: one accepted patch shows it, and makes it final (PodWrites)."""
        known = self.state.reservation(uid)
        # Otherwise the watch, or the node's agent, has answered the question.
        if known is not None and known.stage is Stage.ASSUMED:
            try:
                # The patch is accepted and the pod has no node: every earlier bind is for an older version, and cannot
                # succeed any more.
                if await self.writes.annotate(Bind(reservation)) is not None:
                    self.state.undo(uid)
                    self._mark_stale(reservation)
                else:
                    self.state.bound(uid)
            except (NotFound, ElsewhereError):
                self.state.undo(uid)
            except Conflict:
                # 409 is the answer to another UID under the name, and also to a write at the same moment.
                if not await self.writes.is_gone(reservation):
                    raise
                self.state.undo(uid)
            # An admission policy, or a missing right, refuses our patch: what only reading can tell takes longer.
            except Rejected:
                if not await self._resolve_by_read(reservation):
                    raise
        if self._is_left(uid, Left.OPEN):  # else its annotations are left
            del self._left[uid]
        is_bound = self.state.reservation(uid) is not None
        self.metrics.count("binds_settled", "bound" if is_bound else "not-bound")
        log.info("bind_resolved", pod=_name(reservation), node=reservation.node, is_bound=is_bound)

    async def _resolve_by_read(self, reservation: Reservation) -> bool:
        """Decides where the patch is rejected. A pod that is not bound after `assume_s` will not be bound. False: not known
        yet."""
        pod = await self.writes.read(reservation.namespace, reservation.pod)
        if (pod.uid, pod.node_name) == (reservation.pod_uid, reservation.node):
            self.state.bound(pod.uid)
            return True
        if not pod.node_name and self.timing.clock() - reservation.at < self.timing.assume_s:
            return False
        self.state.undo(reservation.pod_uid)
        return True

    def _mark_stale(self, reservation: Reservation) -> None:
        """The pod has annotations of a bind that did not happen."""
        self._left[reservation.pod_uid] = Left.STALE, reservation
        # The oldest are dropped: stale annotations have no effect, and others decide how many there are.
        for uid in [uid for uid in self._left if self._is_left(uid, Left.STALE)][:-MAX_STALE]:
            del self._left[uid]

    async def _clean(self, uid: PodUid, reservation: Reservation) -> None:
        """Removes stale annotations. They mislead readers; no program reads them."""
        del self._left[uid]
        # It was reserved again: the annotations are the new plan's, or will be replaced by it.
        if self.state.reservation(uid) is not None:
            return
        try:
            await self.writes.clean(reservation)
        except (NotFound, Conflict, Rejected):
            return
        except Unavailable:
            self._mark_stale(reservation)
            raise


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.pod}"


# --- what is written ---


class PodWrites(Struct, kw_only=True, eq=False):
    """`leads` is asked before each request: only a leader writes."""

    api: ClusterApi
    names: ResourceNames
    leads: Callable[[], bool]
    time_ns: Callable[[], int] = time.time_ns
    _last_ns: int = 0

    async def read(self, namespace: str, name: str) -> Pod:
        # A consistent read: the watch may lag behind the scheduler that asks.
        return lean_pod(read_pod_json(await self.api.get_pod(namespace, name)), self.names)

    async def bind_plain(self, pod: Pod, node: str) -> None:
        """A pod that asks for nothing of ours: one try, because no reservation depends on it."""
        self._check_leads()
        await self.api.bind_pod(pod.namespace, pod.name, pod.uid, node, pod.resource_version)

    async def ask_for_retry(self, pod: Pod, node: str = "") -> None:
        """An annotation that only makes a new version of the pod: the scheduler tries a pod again that was updated, first on
        `node`, if it is given."""
        written = {RETRY_ANNOTATION: str(self.time_ns())}
        if node:
            await self.nominate(pod, node, written)
            return
        self._check_leads()
        await self.api.patch_pod_annotations(pod.namespace, pod.name, pod.uid, written)

    async def nominate(self, pod: Pod, node: str, annotations: Mapping[str, str] | None = None) -> None:
        self._check_leads()
        await self.api.nominate_pod(pod.namespace, pod.name, pod.uid, node, annotations)

    async def evict(self, pod: Pod, *, is_tried: bool = False) -> None:
        """With `is_tried` nothing ends. Raises Throttled where a PodDisruptionBudget forbids it."""
        self._check_leads()
        await self.api.evict_pod(pod.namespace, pod.name, pod.uid, is_tried=is_tried)

    async def bind(self, bind: Bind) -> None:
        """One try. Raises Unavailable or Conflict where another try may succeed."""
        reservation = bind.reservation
        # Once: where it fails, the next try's patch shows the pod as it is.
        version, bind.version = bind.version, ""
        if version:
            # Another version by now, as after the scheduler's own note that the pod waits: it takes a patch.
            with suppress(Conflict):
                await self._bind(bind, version, self._annotations(reservation))
                return
        # The annotations first: the agent may read the pod the moment that it is bound.
        raw_pod = await self.announce(bind)
        # None: an earlier try has bound it, and its answer was lost.
        if raw_pod is not None:
            await self._bind(bind, object_meta(raw_pod, "pod").version)

    async def _bind(self, bind: Bind, version: str, annotations: Mapping[str, str] | None = None) -> None:
        to = bind.reservation
        self._check_leads()
        # Before the request: from here on only an answer tells whether the pod is bound.
        bind.is_open = True
        try:
            await self.api.bind_pod(to.namespace, to.pod, to.pod_uid, to.node, version, annotations)
        except (Throttled, Conflict, NotFound, Rejected):
            # With 429 the API server has done nothing, with 409 it is not this version any more: the next patch shows what
            # is. A timeout or a 500 may come after the write.
            bind.is_open = False
            raise
        bind.is_open = False

    async def announce(self, bind: Bind) -> Raw | None:
        """Like `annotate`; in the version that it returns, the plan's are the pod's only annotations that choose GPUs,
        because an agent follows such annotations whoever wrote them.

        Raises Conflict where a client writes such annotations meanwhile, Rejected where there are too many of them.
        """
        reservation = bind.reservation
        raw_pod = await self.annotate(bind)
        # The pod in the version that the bind will name: what a client writes after this makes the bind fail with 409.
        foreign = foreign_annotations(raw_pod, reservation)
        if not foreign:
            return raw_pod
        raw_pod = await self.annotate(bind, removed=foreign[:FOREIGN_REMOVED])
        if raw_pod is None:
            return None
        # Only now, so that each bind removes some: the next ones go on where this one ended.
        if len(foreign) > FOREIGN_REMOVED:
            raise Rejected(
                f"it has {len(foreign)} annotations that choose GPUs and are not the plan's, the first of them "
                f"{foreign[0]}. {FOREIGN_REMOVED} of them were removed, which is all that one bind does; the pod's owner "
                "should remove the others, and find the client that writes them"
            )
        # A client that writes as fast as we remove would make us patch for ever.
        if left := foreign_annotations(raw_pod, reservation):
            raise Conflict(
                f"another client writes its annotation {left[0]}, which only an extender may, while it is being bound"
            )
        return raw_pod

    async def annotate(self, bind: Bind, removed: Iterable[str] = ()) -> Raw | None:
        """Writes the plan into the annotations. The pod as it is then, None where it is bound to our node.

        Once it returns, no earlier bind of ours can succeed. Raises NotFound where the pod is gone, ElsewhereError where it
        is on another node.
        """
        reservation = bind.reservation
        # The plan's come last and win: None removes a name in a merge patch.
        annotations = {**dict.fromkeys(removed), **self._annotations(reservation)}
        self._check_leads()
        bind.is_annotated = True
        try:
            raw_pod = await self.api.patch_pod_annotations(
                reservation.namespace, reservation.pod, reservation.pod_uid, annotations
            )
        except NotFound:
            # The pod is gone under this UID: nothing can be bound, and nothing is left to clean.
            bind.is_open = bind.is_annotated = False
            raise
        # The patch was accepted, so this version is newer than any that an earlier bind has named.
        pod = lean_pod(read_pod_json(raw_pod), self.names)
        bind.is_open = False
        if pod.node_name == reservation.node:
            return None
        if pod.node_name:
            bind.is_annotated = False  # that node's agent has written its own by now, or will
            raise ElsewhereError(f"it was bound to node {pod.node_name} meanwhile")
        return raw_pod

    async def is_gone(self, reservation: Reservation) -> bool:
        try:
            raw_pod = await self.api.get_pod(reservation.namespace, reservation.pod)
        except NotFound:
            return True
        # Another pod has taken the name: ours is gone.
        return pod_uid(raw_pod) != reservation.pod_uid

    async def clean(self, reservation: Reservation) -> None:
        """Removes the annotations from a pod that was not bound."""
        # All names that a bind writes, each None; the time does not matter for the names.
        nothing = dict.fromkeys(extender_annotations(reservation, 0))
        self._check_leads()
        await self.api.patch_pod_annotations(reservation.namespace, reservation.pod, reservation.pod_uid, nothing)

    def _check_leads(self) -> None:
        if not self.leads():
            raise Rejected(NOT_LEADING)

    def _annotations(self, reservation: Reservation) -> dict[str, str]:
        """The time is never the same twice, so that each patch makes a new version of the pod."""
        # An unchanged patch makes no new version; clocks may stand still or go back.
        self._last_ns = max(self.time_ns(), self._last_ns + 1)
        return extender_annotations(reservation, self._last_ns)


def extender_annotations(reservation: Reservation, time_ns: int) -> dict[str, str]:
    """The annotations of gpu-admission, and of GPUShare's extender where one GPU serves all that the pod asks by its
    resource."""
    written = {
        PREDICATE_TIME_ANNOTATION: str(time_ns),
        PREDICATE_NODE_ANNOTATION: reservation.node,
        # The agent writes true once the devices are allocated, as gpu-manager does.
        GPU_ASSIGNED_ANNOTATION: "false",
        **plan_annotations(reservation.plan, PREDICATE_GPU_INDEX_PREFIX),
    }
    # GPUShare knows one GPU for a pod: with several its index would be wrong for one of the containers.
    shared = {container.gpus for container in reservation.plan.containers if container.request.units}
    if len(shared) == 1:
        written |= {
            GPUSHARE_INDEX_ANNOTATION: str(shared.pop()[0]),
            GPUSHARE_ASSIGNED_ANNOTATION: "false",
            GPUSHARE_ASSUME_TIME_ANNOTATION: str(time_ns),
        }
    return written


def foreign_annotations(raw_pod: Raw | None, reservation: Reservation) -> list[str]:
    """Names of the pod's annotations that choose GPUs, or state that an extender did, and are not the plan's. Sorted."""
    # None: the pod is bound, and what its agent follows is decided.
    present = object_meta(raw_pod, "pod").annotations if raw_pod is not None else {}
    ours = extender_annotations(reservation, 0)
    return sorted(name for name in present if name not in ours and chooses_gpus(name))
