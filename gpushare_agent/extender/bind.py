"""Binds pods for the scheduler: reserve, annotate, bind; undone where it fails, settled where nobody knows.

The mutable state is: the pods whose bind is under way, those whose outcome is not known, those that filter has promised, and
those that bear annotations for nothing. All are bounded by the scheduler's requests and by the reservations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.session import MAX_RETRY_AFTER_S, Throttled
from gpushare_agent.extender.messages import BindArgs
from gpushare_agent.extender.pod_writes import NOT_LEADING, Bind, ElsewhereError, PodWrites
from gpushare_agent.extender.values import Reservation, Stage
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Refused, Rejected, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

TRIES = 5
SETTLE_PERIOD_S = 1.0
SETTLED_AT_ONCE = 64
"""In one round: an API server that comes back should not get all of it in one moment."""
SOILED_KEPT = 1024


class Reserves(Protocol):
    """extender/cluster_state.py."""

    def reserve(self, pod: Pod, node: str, now: float) -> Reservation | Refused: ...

    def undo(self, uid: PodUid) -> None: ...

    def bound(self, uid: PodUid) -> None: ...

    def reservation(self, uid: PodUid) -> Reservation | None: ...


class CountsBinds(Protocol):
    def bind_ended(self, outcome: str) -> None: ...

    def bind_retried(self) -> None: ...

    def bind_settled(self, outcome: str) -> None: ...

    def expired(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BindTiming:
    """`bind_s` bounds one bind, all its requests together; `assume_s` how long a pod reserved by filter may stay unbound."""

    bind_s: float = 4.0
    assume_s: float = 60.0
    settle_s: float = SETTLE_PERIOD_S
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=1.0))
    clock: Callable[[], float] = time.monotonic


class _Failed(Exception):  # noqa: N818 - the bind's, not the program's; never leaves this module
    """Why there is no bind; the text is for the scheduler's Event on the pod."""


class Binder:
    """`bind` for each request of the scheduler; `run` once, settles what stayed open. `leads` says whether this replica may
    write; `waiting` knows pods without a node by UID; `learn` is told of each pod before it is reserved."""

    def __init__(
        self,
        *,
        state: Reserves,
        writes: PodWrites,
        waiting: Mapping[PodUid, Pod],
        learn: Callable[[Pod], None],
        metrics: CountsBinds,
        timing: BindTiming | None = None,
    ) -> None:
        self._state = state
        self._writes = writes
        self._waiting = waiting
        self._learn = learn
        self._metrics = metrics
        self._timing = timing or BindTiming()
        self._under_way: set[PodUid] = set()
        self._open: dict[PodUid, Reservation] = {}
        self._promised: dict[PodUid, Reservation] = {}
        self._soiled: dict[PodUid, Reservation] = {}

    @property
    def open_binds(self) -> int:
        """Binds whose outcome is not known: their GPUs stay set aside."""
        return len(self._open)

    async def bind(self, args: BindArgs) -> str:
        """Empty when the pod is bound, else why not."""
        what = f"cannot bind pod {args.namespace}/{args.pod} to node {args.node}"
        if args.uid in self._under_way:
            self._metrics.bind_ended("refused")
            return f"{what}: another bind of it is under way. The scheduler tries again."
        ends_at = asyncio.get_running_loop().time() + self._timing.bind_s
        self._under_way.add(args.uid)
        try:
            async with asyncio.timeout_at(ends_at):
                pod = await self._find(args)
            if pod.node_name:  # bound already, to this node
                self._state.bound(args.uid)
                self._metrics.bind_ended("bound")
                return ""
            if not pod.containers:  # asks for nothing of ours: a scheduler without managedResources sends every pod
                async with asyncio.timeout_at(ends_at):
                    await self._writes.bind_plain(pod, args.node)
                self._metrics.bind_ended("bound")
                return ""
            bind = self._reserve(pod, args.node)
            if bind.reservation.stage is Stage.ASSUMED:
                await self._finish(bind, self._carry_out(bind, ends_at), ends_at)
        except _Failed as e:
            return f"{what}: {e}"
        except (AgentError, TimeoutError) as e:  # where nothing was reserved
            self._metrics.bind_ended("failed")
            return f"{what}: {str(e) or 'the API server did not answer in time'}. The scheduler tries again."
        finally:
            self._under_way.discard(args.uid)
        self._metrics.bind_ended("bound")
        log.info("pod_bound", pod=f"{args.namespace}/{args.pod}", node=args.node, gpus=_gpus(bind.reservation))
        return ""

    async def promise(self, pod: Pod, node: str) -> str:
        """Reserve and annotate for a scheduler that binds by itself. Empty, or why not."""
        if pod.uid in self._under_way:
            return f"another request about pod {pod.namespace}/{pod.name} is under way. The scheduler tries again."
        ends_at = asyncio.get_running_loop().time() + self._timing.bind_s
        self._under_way.add(pod.uid)
        try:
            bind = self._reserve(pod, node)
            await self._finish(bind, self._annotate_only(bind, ends_at), ends_at)
        except _Failed as e:
            return str(e)
        finally:
            self._under_way.discard(pod.uid)
        self._promised[pod.uid] = bind.reservation
        return ""

    def release_promise(self, uid: PodUid) -> None:
        """The scheduler asks about the pod anew, so it has not bound it."""
        if uid not in self._under_way and self._promised.pop(uid, None) is not None:
            self._state.undo(uid)

    async def run(self) -> NoReturn:
        """Settle binds of unknown outcome, and promises that nobody kept, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.settle_s)
            await self.settle()

    async def settle(self) -> None:
        """One round. Only a leader writes: another waits, and its reservations count for nothing meanwhile."""
        for uid, reservation in sorted(self._promised.items()):
            known = self._state.reservation(uid)
            if known is None or known.stage is not Stage.ASSUMED:
                self._promised.pop(uid, None)
            elif self._timing.clock() - reservation.at >= self._timing.assume_s and uid not in self._under_way:
                del self._promised[uid]
                self._open[uid] = reservation
                self._metrics.expired()
        work = [(uid, one, self._settle_one) for uid, one in sorted(self._open.items())]
        work += [(uid, one, self._clean_one) for uid, one in sorted(self._soiled.items())]
        for uid, reservation, step in work[:SETTLED_AT_ONCE]:
            if uid in self._under_way or not self._writes.leads():
                continue
            self._under_way.add(uid)
            try:
                async with asyncio.timeout(self._timing.bind_s):
                    await step(uid, reservation)
            except (AgentError, TimeoutError) as e:
                log.warning("bind_not_settled", pod=_name(reservation), error=str(e), then="asked again, its GPUs stay")
            finally:
                self._under_way.discard(uid)

    # --- one bind ---

    async def _find(self, args: BindArgs) -> Pod:
        pod = self._waiting.get(args.uid)
        if pod is None:  # the informer has not heard of it yet, or it has a node
            pod = await self._writes.read(args.namespace, args.pod)
        if (pod.namespace, pod.name, pod.uid) != (args.namespace, args.pod, args.uid):
            raise self._refused("there is another pod of this name by now. Nothing is left to do.")
        if pod.node_name and pod.node_name != args.node:
            raise self._refused(f"it is on node {pod.node_name} already. Nothing is left to do.")
        return pod

    def _reserve(self, pod: Pod, node: str) -> Bind:
        """Decides and commits, without an await."""
        if not self._writes.leads():
            raise self._refused(NOT_LEADING)
        self._learn(pod)
        reserved = self._state.reserve(pod, node, self._timing.clock())
        if isinstance(reserved, Refused):
            raise self._refused(reserved.detail.removeprefix(f"node {node}: "))
        return Bind(reserved, is_open=pod.uid in self._open)

    def _refused(self, text: str) -> _Failed:
        self._metrics.bind_ended("refused")
        return _Failed(text)

    async def _finish(self, bind: Bind, work: Coroutine[Any, Any, None], ends_at: float) -> None:
        """Do the work in time; whatever becomes of it, the ledger is true afterwards. Raises _Failed."""
        try:
            async with asyncio.timeout_at(ends_at):
                await work
        except (AgentError, ElsewhereError, TimeoutError) as e:
            self._give_up(bind)
            self._metrics.bind_ended("unknown" if bind.is_open else "failed")
            said = str(e) or "the API server did not answer in time"
            gpus = "stay set aside until it is known whether the pod was bound" if bind.is_open else "are free again"
            raise _Failed(f"{said}. Its GPUs {gpus}; the scheduler tries again.") from e
        except BaseException:  # cancelled: the ledger must be true even so
            self._give_up(bind)
            raise
        self._open.pop(bind.reservation.pod_uid, None)
        self._soiled.pop(bind.reservation.pod_uid, None)

    def _give_up(self, bind: Bind) -> None:
        """The reservation is dropped where nothing can come of it any more, else it is left to `settle`."""
        reservation = bind.reservation
        if bind.is_open:
            self._open[reservation.pod_uid] = reservation
            return
        self._open.pop(reservation.pod_uid, None)
        self._state.undo(reservation.pod_uid)
        if bind.is_annotated:
            self._soil(reservation)

    async def _carry_out(self, bind: Bind, ends_at: float) -> None:
        """Patch and bind until the pod is bound, or until there is no sense in it."""
        error: AgentError | None = None
        for tried in range(1, TRIES + 1):
            if tried > 1:
                await self._pause(error, tried - 1, ends_at)
            error = await self._writes.bind_once(bind)
            if error is None:
                self._state.bound(bind.reservation.pod_uid)
                return
        raise Unavailable(f"{error}, tried {TRIES} times")

    async def _annotate_only(self, bind: Bind, ends_at: float) -> None:
        for tried in range(1, TRIES + 1):
            try:
                if await self._writes.announce(bind) is None:
                    self._state.bound(bind.reservation.pod_uid)
                return
            except (Unavailable, Conflict) as e:
                if tried == TRIES:
                    raise
                await self._pause(e, tried, ends_at)

    async def _pause(self, error: AgentError | None, failures: int, ends_at: float) -> None:
        """Before another try. Raises Unavailable where the API server asks for more time than there is."""
        wait_s = error.retry_after_s if isinstance(error, Throttled) else self._timing.backoff.delay_s(failures)
        if isinstance(error, Throttled) and asyncio.get_running_loop().time() + wait_s >= ends_at:
            more = " or more" if wait_s >= MAX_RETRY_AFTER_S else ""
            raise Unavailable(
                f"{error}; it asks to wait {wait_s:g} s{more}, and a bind may take {self._timing.bind_s:g} s"
            ) from error
        self._metrics.bind_retried()
        await asyncio.sleep(wait_s)

    # --- afterwards ---

    async def _settle_one(self, uid: PodUid, reservation: Reservation) -> None:
        """A bind of unknown outcome: one answered patch tells, and makes sure that it stays so."""
        known = self._state.reservation(uid)
        if known is not None and known.stage is Stage.ASSUMED:
            try:
                if await self._writes.annotate(Bind(reservation)) is not None:
                    self._state.undo(uid)
                    self._soil(reservation)
                else:
                    self._state.bound(uid)
            except (NotFound, ElsewhereError):
                self._state.undo(uid)
            except Conflict:
                if not await self._writes.is_gone(reservation):
                    raise
                self._state.undo(uid)
            except Rejected:
                if not await self._is_over(reservation):
                    raise
        del self._open[uid]
        is_bound = self._state.reservation(uid) is not None
        self._metrics.bind_settled("bound" if is_bound else "not-bound")
        log.info("bind_settled", pod=_name(reservation), node=reservation.node, is_bound=is_bound)

    async def _is_over(self, reservation: Reservation) -> bool:
        """Where we may not patch, the pod tells; and one that is not bound after so long is not going to be."""
        pod = await self._writes.read(reservation.namespace, reservation.pod)
        if (pod.uid, pod.node_name) == (reservation.pod_uid, reservation.node):
            self._state.bound(pod.uid)
            return True
        if not pod.node_name and self._timing.clock() - reservation.at < self._timing.assume_s:
            return False
        self._state.undo(reservation.pod_uid)
        return True

    def _soil(self, reservation: Reservation) -> None:
        """The pod bears annotations of a bind that did not happen."""
        self._soiled[reservation.pod_uid] = reservation
        while len(self._soiled) > SOILED_KEPT:
            del self._soiled[next(iter(self._soiled))]

    async def _clean_one(self, uid: PodUid, reservation: Reservation) -> None:
        """A courtesy: the annotations mislead people, and nobody else."""
        del self._soiled[uid]
        if self._state.reservation(uid) is not None:
            return
        try:
            await self._writes.clean(reservation)
        except (NotFound, Conflict, Rejected):
            return
        except Unavailable:
            self._soil(reservation)
            raise


def _gpus(reservation: Reservation) -> dict[str, list[int]]:
    return {container.name: list(container.gpus) for container in reservation.plan.containers if container.gpus}


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.pod}"
