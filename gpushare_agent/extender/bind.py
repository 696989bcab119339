"""Binds pods for the scheduler: reserve, annotate, bind; undone where it fails, resolved later where the outcome is unknown.

State owned: the pods whose bind is under way, the binds of unknown outcome, the reservations made by filter, and the pods
with stale annotations. All are bounded by the scheduler's requests and by the reservations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.cluster.kube.session import MAX_RETRY_AFTER_S, Throttled
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.messages import BindArgs
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.pod_writes import NOT_LEADING, Bind, ElsewhereError, PodWrites
from gpushare_agent.extender.values import Reservation, Stage
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Refused, Rejected, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

TRIES = 5
RECONCILE_PERIOD_S = 1.0
MAX_RECONCILED = 64
"""Binds that one pass looks at: an API server that comes back should not get all of it in one moment."""
MAX_STALE = 1024
REPORT_POLL_S = 0.02


class BindTiming(Struct, frozen=True, kw_only=True):
    """`bind_s` limits one bind, all its requests together; `assume_s` the time that a pod reserved by filter may stay
    unbound."""

    bind_s: float = 4.0
    assume_s: float = 60.0
    reconcile_s: float = RECONCILE_PERIOD_S
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=1.0))
    clock: Callable[[], float] = time.monotonic


class _Failed(Exception):  # noqa: N818 - the bind's, not the program's; never leaves this module
    """Why there is no bind; the text is for the scheduler's Event on the pod."""


class Binder(Struct, kw_only=True, eq=False):
    """`bind` for each request of the scheduler; `run` once, resolves binds of unknown outcome. `unscheduled` finds a pod
    without a node; `before_reserve` is called with each pod before it is reserved."""

    state: ClusterState
    writes: PodWrites
    unscheduled: Callable[[PodUid], Pod | None]
    before_reserve: Callable[[Pod], None]
    metrics: ExtenderMetrics
    timing: BindTiming
    _under_way: set[PodUid] = field(default_factory=set)
    _open: dict[PodUid, Reservation] = field(default_factory=dict)
    _filter_reservations: dict[PodUid, Reservation] = field(default_factory=dict)
    _stale: dict[PodUid, Reservation] = field(default_factory=dict)

    @property
    def open_binds(self) -> int:
        """Binds of unknown outcome: their GPUs stay reserved."""
        return len(self._open)

    async def bind(self, args: BindArgs) -> str:
        """Empty when the pod is bound, else why not."""
        what = f"cannot bind pod {args.namespace}/{args.pod} to node {args.node}"
        # kube-scheduler tries a bind again after its own time limit, which may be shorter than ours: two at once would
        # reserve, undo and annotate in each other's midst.
        if args.uid in self._under_way:
            self.metrics.bind_ended("refused")
            return f"{what}: another bind of it is under way. The scheduler tries again."
        # One end for all requests of the bind together: the scheduler waits for the sum.
        ends_at = asyncio.get_running_loop().time() + self.timing.bind_s
        self._under_way.add(args.uid)
        try:
            async with asyncio.timeout_at(ends_at):
                pod = await self._find(args)
            if pod.node_name:  # bound already, to this node
                # An answer that the scheduler did not get, most likely: it asks again, and saying yes again is right.
                self.state.bound(args.uid)
                self.metrics.bind_ended("bound")
                return ""
            if not pod.containers:  # asks for nothing of ours: a scheduler without managedResources sends every pod
                async with asyncio.timeout_at(ends_at):
                    await self.writes.bind_plain(pod, args.node)
                self.metrics.bind_ended("bound")
                return ""
            # Before the reservation, not after it: the report may change what is planned.
            await self._wait_report(args.node)
            bind = self._reserve(pod, args.node)
            # BOUND or CONFIRMED already where the watch, or the node's agent, was quicker than this request: nothing is
            # left to write.
            if bind.reservation.stage is Stage.ASSUMED:
                await self._finish(bind, self._carry_out(bind, ends_at), ends_at)
        except _Failed as e:
            return f"{what}: {e}"
        # _finish renames its own to _Failed: what comes here is from the reads before the reservation.
        except (AgentError, TimeoutError) as e:  # where nothing was reserved
            self.metrics.bind_ended("failed")
            return f"{what}: {str(e) or 'the API server did not answer in time'}. The scheduler tries again."
        finally:
            self._under_way.discard(args.uid)
        self.metrics.bind_ended("bound")
        log.info("pod_bound", pod=f"{args.namespace}/{args.pod}", node=args.node, gpus=_gpus(bind.reservation))
        return ""

    async def reserve(self, pod: Pod, node: str) -> str:
        """Reserve and annotate for a scheduler that binds by itself. Empty, or why not."""
        if pod.uid in self._under_way:
            return f"another request about pod {pod.namespace}/{pod.name} is under way. The scheduler tries again."
        ends_at = asyncio.get_running_loop().time() + self.timing.bind_s
        self._under_way.add(pod.uid)
        try:
            await self._wait_report(node)
            bind = self._reserve(pod, node)
            await self._finish(bind, self._annotate_only(bind, ends_at), ends_at)
        except _Failed as e:
            return str(e)
        finally:
            self._under_way.discard(pod.uid)
        # The scheduler may choose another node, or never bind: `_expire` gives the GPUs back.
        self._filter_reservations[pod.uid] = bind.reservation
        return ""

    def release(self, uid: PodUid) -> None:
        """Drop a reservation made by `reserve`: the scheduler filters the pod again, so it has not bound it."""
        # Only filter's own reservations: one of a bind may be of a pod that is bound by now.
        if uid not in self._under_way and self._filter_reservations.pop(uid, None) is not None:
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
        """Goes over everything once that is not done. Only a leader writes."""
        self._expire()
        # What is open before what is stale: open binds keep GPUs from other pods, stale annotations only mislead.
        work = [(uid, one, self._resolve) for uid, one in sorted(self._open.items())]
        work += [(uid, one, self._clean) for uid, one in sorted(self._stale.items())]
        for uid, reservation, step in work[:MAX_RECONCILED]:
            # Asked again for each: leadership may be lost between two of them.
            if uid in self._under_way or not self.writes.leads():
                continue
            self._under_way.add(uid)
            try:
                # One pod that does not get an answer must not keep the others waiting for long.
                async with asyncio.timeout(self.timing.bind_s):
                    await step(uid, reservation)
            except (AgentError, TimeoutError) as e:
                # Each time, not once: as long as a bind is open, no other pod gets its GPUs.
                log.warning(
                    "bind_unresolved", pod=_name(reservation), error=str(e), then="retried, its GPUs stay reserved"
                )
            finally:
                self._under_way.discard(uid)

    def _expire(self) -> None:
        for uid, reservation in sorted(self._filter_reservations.items()):
            known = self.state.reservation(uid)
            if known is None or known.stage is not Stage.ASSUMED:
                self._filter_reservations.pop(uid, None)
            # The scheduler may have bound it without our hearing of it, so its outcome is unknown, not negative.
            elif self.timing.clock() - reservation.at >= self.timing.assume_s and uid not in self._under_way:
                del self._filter_reservations[uid]
                self._open[uid] = reservation
                self.metrics.reservation_expired()

    # --- one bind ---

    async def _find(self, args: BindArgs) -> Pod:
        pod = self.unscheduled(args.uid)
        if pod is None:  # the watch has not delivered it yet, or it has a node
            pod = await self.writes.read(args.namespace, args.pod)
        # A StatefulSet's pod is made anew under its name within a second.
        if (pod.namespace, pod.name, pod.uid) != (args.namespace, args.pod, args.uid):
            raise self._refused("another pod has this name by now. Nothing is left to do.")
        # Bound by another scheduler, or by an earlier bind of ours that was taken for failed.
        if pod.node_name and pod.node_name != args.node:
            raise self._refused(f"it is on node {pod.node_name} already. Nothing is left to do.")
        return pod

    async def _wait_report(self, node: str) -> None:
        """The node's agent follows the plan, and one without the links between its GPUs may be worse than its own. At most
        half of the bind's time: the other half is for the API server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timing.bind_s / 2):
                while self.state.awaits_report(node, self.timing.clock()):  # noqa: ASYNC110 - once for each new node
                    await asyncio.sleep(REPORT_POLL_S)

    def _reserve(self, pod: Pod, node: str) -> Bind:
        """Decides and commits, without an await."""
        if not self.writes.leads():
            raise self._refused(NOT_LEADING)
        # Also for pods that the informer does not know yet: the quota counts by what it was told of a pod.
        self.before_reserve(pod)
        reserved = self.state.reserve(pod, node, self.timing.clock())
        if isinstance(reserved, Refused):
            raise self._refused(reserved.detail.removeprefix(f"node {node}: "))
        # A bind of unknown outcome stays unknown until this one's patch is accepted.
        is_open = pod.uid in self._open
        return Bind(reserved, version="" if is_open or pod.annotations else pod.resource_version, is_open=is_open)

    def _refused(self, text: str) -> _Failed:
        self.metrics.bind_ended("refused")
        return _Failed(text)

    async def _finish(self, bind: Bind, work: Coroutine[object, object, None], ends_at: float) -> None:
        """Do the work in time. The ledger is correct afterwards, whatever the outcome. Raises _Failed."""
        try:
            # The whole bind's end, so that the waits before count too.
            async with asyncio.timeout_at(ends_at):
                await work
        except (AgentError, ElsewhereError, TimeoutError) as e:
            self._abort(bind)
            self.metrics.bind_ended("unknown" if bind.is_open else "failed")
            reason = str(e) or "the API server did not answer in time"
            gpus = "stay reserved until it is known whether the pod was bound" if bind.is_open else "are free again"
            raise _Failed(f"{reason}. Its GPUs {gpus}; the scheduler tries again.") from e
        # The process stops: what was sent may still arrive at the API server.
        except BaseException:  # cancelled
            self._abort(bind)
            raise
        self._open.pop(bind.reservation.pod_uid, None)
        # The new annotations have replaced the old ones.
        self._stale.pop(bind.reservation.pod_uid, None)

    def _abort(self, bind: Bind) -> None:
        """The reservation is undone where the bind cannot happen any more, else left to `reconcile`."""
        reservation = bind.reservation
        if bind.is_open:
            self._open[reservation.pod_uid] = reservation
            return
        self._open.pop(reservation.pod_uid, None)
        self.state.undo(reservation.pod_uid)
        # Only what was sent can be left behind; a patch that failed may have been written all the same.
        if bind.is_annotated:
            self._mark_stale(reservation)

    async def _carry_out(self, bind: Bind, ends_at: float) -> None:
        """Patch and bind until the pod is bound, or an error comes that no other try can mend."""
        error: AgentError | None = None
        for tried in range(1, TRIES + 1):
            # A Conflict is tried again as well: the next patch shows the pod as it is now.
            if tried > 1:
                await self._pause(error, tried - 1, ends_at)
            error = await self.writes.bind_once(bind)
            if error is None:
                self.state.bound(bind.reservation.pod_uid)
                return
        raise Unavailable(f"{error}, tried {TRIES} times")

    async def _annotate_only(self, bind: Bind, ends_at: float) -> None:
        for tried in range(1, TRIES + 1):
            try:
                # None: the scheduler has bound the pod to this node meanwhile.
                if await self.writes.announce(bind) is None:
                    self.state.bound(bind.reservation.pod_uid)
                return
            except (Unavailable, Conflict) as e:
                if tried == TRIES:
                    raise
                await self._pause(e, tried, ends_at)

    async def _pause(self, error: AgentError | None, failures: int, ends_at: float) -> None:
        """Before another try. Raises Unavailable where the API server asks for more time than there is."""
        wait_s = error.retry_after_s if isinstance(error, Throttled) else self.timing.backoff.delay_s(failures)
        # To wait for it would only end in our own timeout, without the API server's reason.
        if isinstance(error, Throttled) and asyncio.get_running_loop().time() + wait_s >= ends_at:
            # Longer times are read as this one.
            more = " or more" if wait_s >= MAX_RETRY_AFTER_S else ""
            raise Unavailable(
                f"{error}; it asks to wait {wait_s:g} s{more}, and a bind may take {self.timing.bind_s:g} s"
            ) from error
        self.metrics.bind_retried()
        await asyncio.sleep(wait_s)

    # --- later ---

    async def _resolve(self, uid: PodUid, reservation: Reservation) -> None:
        """A bind of unknown outcome: one accepted patch shows it, and makes it final (pod_writes.py)."""
        known = self.state.reservation(uid)
        # Else the watch, or the node's agent, has answered the question.
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
                # 409 is the answer for another UID under the name, but for a write at the same moment too.
                if not await self.writes.is_gone(reservation):
                    raise
                self.state.undo(uid)
            # An admission policy, or a missing right, refuses our patch: what only reading can tell takes longer.
            except Rejected:
                if not await self._resolve_by_read(reservation):
                    raise
        del self._open[uid]
        is_bound = self.state.reservation(uid) is not None
        self.metrics.bind_resolved("bound" if is_bound else "not-bound")
        log.info("bind_resolved", pod=_name(reservation), node=reservation.node, is_bound=is_bound)

    async def _resolve_by_read(self, reservation: Reservation) -> bool:
        """Where the patch is rejected. A pod that is not bound after `assume_s` is not going to be. False: not known yet."""
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
        self._stale[reservation.pod_uid] = reservation
        # The oldest go: stale annotations are of no consequence, and their number is up to others.
        while len(self._stale) > MAX_STALE:
            del self._stale[next(iter(self._stale))]

    async def _clean(self, uid: PodUid, reservation: Reservation) -> None:
        """Removes stale annotations. They mislead readers; no program reads them."""
        del self._stale[uid]
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


def _gpus(reservation: Reservation) -> dict[str, list[int]]:
    return {container.name: list(container.gpus) for container in reservation.plan.containers if container.gpus}


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.pod}"
