"""Leader election: the replica named in a Lease decides, by the rules of client-go's election.

Lease: coordination.k8s.io/v1. Only this process's clock counts: a lease is taken over when its record has not changed for
its duration as observed here, so clocks of hosts need not agree. A leader counts its time from before its request, and
stops at the renew deadline, which is shorter than the lease: until then no other replica can lead, and its last requests
end before one does. A leader whose lease is another's, or deleted, stops at once. A deleted lease is created again only
after its whole duration, for a leader that has not noticed continues until its deadline. Rejected: kubernetes-asyncio's
election has no limit on its requests, uses the wall clock, and ends the process.

State owned: the lease as last read and since when, since when it is absent, and until when this replica leads.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.cluster.kube.cluster import ClusterApi
from gpushare_agent.cluster.kube.pods import mapping_or_empty
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Rejected

log = structlog.get_logger(__name__)

MAX_DURATION_S = 3600.0
"""Of another's lease: a client that can write it could otherwise stop the election for ever."""
RELEASE_TIMEOUT_S = 2.0
SHORTEST_PAUSE_S = 0.01
RELEASED_S = 1
"""The duration of a released lease."""


def boot_time_s() -> float:
    """Seconds including those of a suspended host, in which other replicas' clocks go on. The monotonic clock stands
    still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseTerms(Struct, frozen=True, kw_only=True):
    """retry < renew deadline < duration, seconds."""

    namespace: str
    name: str
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0


class LeaderElection(Struct, kw_only=True, eq=False):
    """`run` once; `leads` at any time. `identity` is this process's alone: one that restarts has another."""

    api: ClusterApi
    identity: str
    terms: LeaseTerms
    clock: Callable[[], float] = boot_time_s
    _seen: tuple[object, ...] = ()
    _seen_at: float = float("-inf")
    _absent_since: float | None = None
    _raw: dict[str, Any] | None = None
    _leads_until: float = float("-inf")
    _was_leading: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    term: int = 0
    """Counts the times that this replica became the leader."""
    holder: str = ""
    """The holder of the lease when it was last read."""

    def leads(self) -> bool:
        """Whether this replica may decide at this moment."""
        return self.clock() < self._leads_until

    async def wait_change(self, term: int, is_leading: bool) -> None:
        """Until leadership differs from what the caller knows."""
        while (self.term, self.leads()) == (term, is_leading):
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> NoReturn:
        """Take part until cancelled."""
        while True:
            try:
                await self.try_acquire_or_renew()
            except AgentError as e:
                level = log.error if isinstance(e, Rejected) else log.warning
                level("lease_not_renewed" if self.leads() else "lease_not_read", error=str(e), leads=self.leads())
            self.report_transition()
            await self._pause()
            self.report_transition()

    async def release(self) -> None:
        """Release the lease, so that another replica need not wait for its end. The caller has stopped deciding."""
        if not self.leads() or self._raw is None:
            return
        self._stop_leading()
        self.report_transition()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.api.replace_lease(
                    self.terms.namespace, self.terms.name, self._record("", duration_s=RELEASED_S)
                )
        except (AgentError, TimeoutError) as e:
            log.info("lease_not_released", error=str(e), then="it ends by itself")

    async def _pause(self) -> None:
        """Until the next read, or until the time to lead, or to wait for an absent lease, is over."""
        pause_s = self.terms.retry_s * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, no secret
        if self.leads():
            pause_s = min(pause_s, max(self._leads_until - self.clock(), 0.0))
        elif self._absent_since is not None:
            pause_s = min(pause_s, max(self._absent_since + self._absence_s() - self.clock(), SHORTEST_PAUSE_S))
        await asyncio.sleep(pause_s)

    async def try_acquire_or_renew(self) -> None:
        """One read, and one write where the lease is ours, or may be taken."""
        if not self.leads():
            await self._read()
        if self._raw is None:
            if self._may_create():
                await self._write(self.api.create_lease, (self.terms.namespace,))
        elif self.holder == self.identity or self._was_released() or self._has_ended():
            await self._replace()

    async def _read(self) -> None:
        """Not while leading: a leader's renewal fails where another client has written the lease."""
        try:
            self._note(await self.api.get_lease(self.terms.namespace, self.terms.name))
        except NotFound:
            self._note_absent()

    async def _replace(self) -> None:
        """Renew the lease, or take it."""
        place = self.terms.namespace, self.terms.name
        try:
            await self._write(self.api.replace_lease, place)
        except Conflict:
            if self._raw is None or self.holder != self.identity:
                raise
            await self._write(self.api.replace_lease, place)  # ours after all: another client has labelled it, say

    async def _write(self, write: Callable[..., Awaitable[dict[str, Any]]], place: tuple[str, ...]) -> None:
        """Make the lease ours. Where it is no longer what we read, we lead no more until it was read as ours."""
        began_at = self.clock()
        try:
            self._note(await write(*place, self._record(self.identity)))
        except Conflict:
            self._stop_leading()  # another client wrote it, perhaps to take it
            await self._read()
            raise
        except NotFound:
            self._note_absent()
            self._stop_leading()
            raise
        self._leads_until = began_at + self.terms.renew_deadline_s

    def _stop_leading(self) -> None:
        self._leads_until = float("-inf")

    def _note_absent(self) -> None:
        """The lease was deleted, or never existed."""
        if self._absent_since is None:
            self._absent_since = self.clock()
        self._raw, self.holder = None, ""

    def _may_create(self) -> bool:
        return self._absent_since is not None and self.clock() - self._absent_since >= self._absence_s()

    def _absence_s(self) -> float:
        """How long a lease has to be absent before it is created: as long as another replica may lead by the deleted one.
        Where none was ever read this is the first installation, most likely, and no replica leads."""
        return self.terms.duration_s if self._seen else self.terms.retry_s

    def _note(self, raw: dict[str, Any]) -> None:
        """The lease as read, and since when it is unchanged."""
        self._raw, self._absent_since = raw, None
        spec = mapping_or_empty(raw.get("spec"))
        holder = spec.get("holderIdentity")
        self.holder = holder if isinstance(holder, str) else ""
        seen = (
            str(mapping_or_empty(raw.get("metadata")).get("uid")),
            self.holder,
            str(spec.get("renewTime")),
            str(spec.get("acquireTime")),
            str(spec.get("leaseTransitions")),
        )
        if seen != self._seen:
            self._seen, self._seen_at = seen, self.clock()

    def _was_released(self) -> bool:
        """Released in order, as `release` and client-go do it. A holder emptied by hand leaves a leader that does not know
        it yet."""
        return (
            not self.holder
            and mapping_or_empty((self._raw or {}).get("spec")).get("leaseDurationSeconds") == RELEASED_S
        )

    def _has_ended(self) -> bool:
        raw_duration = mapping_or_empty((self._raw or {}).get("spec")).get("leaseDurationSeconds")
        theirs_s = float(raw_duration) if isinstance(raw_duration, int) and raw_duration > 0 else 0.0
        return self.clock() - self._seen_at > max(self.terms.duration_s, min(theirs_s, MAX_DURATION_S))

    def _record(self, holder: str, duration_s: float | None = None) -> dict[str, Any]:
        """The lease as it should be; its metadata stays as read."""
        spec = mapping_or_empty((self._raw or {}).get("spec"))
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        transitions = spec.get("leaseTransitions")
        count = transitions if isinstance(transitions, int) else 0
        is_new = holder != spec.get("holderIdentity")
        metadata = {"name": self.terms.name, "namespace": self.terms.namespace}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": mapping_or_empty((self._raw or {}).get("metadata")) or metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(duration_s or self.terms.duration_s)),
                "acquireTime": now if is_new else spec.get("acquireTime") or now,
                "renewTime": now,
                "leaseTransitions": count + 1 if is_new and self._raw is not None and holder else count,
            },
        }

    def report_transition(self) -> None:
        """Wake those who wait for a change; a term begins with the first moment of leading."""
        is_leading = self.leads()
        if is_leading and not self._was_leading:
            self.term += 1
            log.info("leading", lease=f"{self.terms.namespace}/{self.terms.name}", identity=self.identity)
        elif self._was_leading and not is_leading:
            log.warning("leading_no_more", lease=f"{self.terms.namespace}/{self.terms.name}", holder=self.holder)
        if is_leading != self._was_leading:
            self._was_leading = is_leading
            self._changed.set()


class AlwaysLeads:
    """Where there is one replica alone."""

    term = 1
    holder = ""

    def leads(self) -> bool:
        return True

    async def wait_change(self, term: int, is_leading: bool) -> None:
        if (term, is_leading) == (self.term, True):
            await asyncio.Event().wait()
