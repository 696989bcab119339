"""Leader election: the replica named in a Lease decides, by the rules of client-go's election.

Lease: coordination.k8s.io/v1. Only this process's clock counts: a lease is taken over when its record has not changed for
its duration as observed here, so clocks of hosts need not agree. A leader counts its time from before its request, and
stops at the renew deadline, which is shorter than the lease: until then no other replica can lead, and its last requests
end before one does. A leader whose lease is another's, or deleted, stops at once. A deleted lease is created again only
after its whole duration, because a leader that has not noticed continues until its deadline. Rejected: kubernetes-asyncio's
election has no limit on its requests, uses the wall clock, and ends the process.

State owned: the lease as last read, or that it is absent, and since when; and until when this replica leads.

`LeaderLabel` keeps the label by which a Service selects the leader on the leader's own pod, and on no other of its
Deployment. Readiness cannot carry it: an update or a drain waits until every replica is ready, and only one leads. The label
is checked while the process runs, because other clients and late requests may change it. No decision depends on it: a
replica that does not lead refuses every request. State owned: whether this process may have left the label on its pod.

`Leadership` leads from the lease to decisions: a new leader lists the whole cluster before it answers the scheduler. The
former leader's last binds may not have reached this replica's watches yet. A follower keeps its state warm meanwhile.
State owned: the term in which the cluster was last listed from its beginning.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NoReturn

import structlog
from msgspec import Raw, Struct, field, json

from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.json_schema import NULL, Lenient, decoded
from gpushare_agent.core.kit.supervision import ChangeSignal, ReportOnce, at_most, bounded
from gpushare_agent.core.kube.client import ClusterApi, pods
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.kube.objects import ObjectMeta, OwnerReference, object_meta, pod_uid
from gpushare_agent.core.kube.session import NO_ANSWER
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Rejected
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.steps import in_steps

MAX_WARMED_PODS = 8


ROLE_LABEL = "gpushare-agent/role"
LEADER = "leader"
APP_LABEL = "app.kubernetes.io/name"
"""The label that the pods of one Deployment share, and no other pods of the namespace."""
CHECK_PERIOD_S = 30.0
UPDATE_TIMEOUT_S = 15.0
WITHDRAW_TIMEOUT_S = 2.0
_REMEDY = "POD_NAME and POD_NAMESPACE must name this pod, and the service account needs get, list and patch on pods"


log = structlog.get_logger(__name__)

MAX_DURATION_S = 3600.0
"""The longest that another's lease is waited for: a client that can write it could otherwise stop the election for ever."""
RELEASE_TIMEOUT_S = 2.0
SHORTEST_PAUSE_S = 0.01
RELEASED_S = 1
"""The duration of a released lease."""
LONG_AGO = float("-inf")


def boot_time_s() -> float:
    """Seconds including those of a suspended host, in which other replicas' clocks go on. The monotonic clock stands
    still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseSpec(Struct, rename="camel"):
    """Times are RFC 3339 with microseconds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Struct, rename="camel"):
    """`metadata` is written as it was read: labels and annotations in it are others'."""

    metadata: Raw
    raw_spec: Raw = field(name="spec", default=NULL)
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"
    meta = Lenient(ObjectMeta, of="metadata")
    spec = Lenient(LeaseSpec, of="raw_spec")
    """Empty where another client filled it with nonsense: it ends, as every lease does."""


_LEASE = json.Decoder(Lease)


class LeaseTerms(Struct, frozen=True, kw_only=True):
    """The lease and its times in seconds: retry < renew deadline < duration. Kubernetes removes it with its `owner`."""

    namespace: str
    name: str
    owner: OwnerReference | None = None
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
    """Empty until the lease was read, or was absent, for the first time."""
    _seen_at: float = LONG_AGO
    _was_read: bool = False
    _lease: Lease | None = None
    _leads_until: float = LONG_AGO
    _was_leading: bool = False
    _changes: ChangeSignal = field(default_factory=ChangeSignal)
    _failure: ReportOnce = field(default_factory=ReportOnce)
    term: int = 0
    """Counts the times that this replica became the leader."""
    holder: str = ""
    """The holder of the lease when it was last read."""

    def leads(self) -> bool:
        """Whether this replica may decide at this moment."""
        return self.clock() < self._leads_until

    async def wait_change(self, term: int, is_leading: bool) -> None:
        """Waits until leadership differs from what the caller knows."""
        # The term as well: leadership may have been lost and won again between two looks.
        await self._changes.wait_until(lambda: (self.term, self.leads()) != (term, is_leading))

    async def run(self) -> NoReturn:
        """Takes part until cancelled."""
        while True:
            try:
                await self.try_acquire_or_renew()
                self._failure.is_over()
            except AgentError as e:
                # A missing right stays missing; an API server that is away comes back.
                level = log.error if isinstance(e, Rejected) else log.warning
                event = "lease_not_renewed" if self.leads() else "lease_not_read"
                if self._failure.is_new(f"{event}: {e}"):
                    level(event, error=str(e), leads=self.leads())
            # Twice: the request may have won or lost the lease, and during the pause the time to lead may have run out.
            self.report_transition()
            await self._pause()
            self.report_transition()

    async def release(self) -> None:
        """Releases the lease, so that another replica need not wait for its end. The caller has stopped deciding."""
        # Not ours: to empty it would end another's lease.
        if not self.leads() or self._lease is None:
            return
        # Before the request: from its arrival on another replica may lead.
        self._leads_until = LONG_AGO
        self.report_transition()
        try:
            async with bounded(RELEASE_TIMEOUT_S, NO_ANSWER):
                try:
                    await self._put(self._record("", RELEASED_S))
                except Conflict:
                    # The renewal that ended with the process was written after all: the lease is ours in a version unread.
                    await self._read()
                    if self.holder == self.identity:
                        await self._put(self._record("", RELEASED_S))
        except AgentError as e:
            log.info("lease_not_released", error=str(e), then="it ends by itself")

    async def _pause(self) -> None:
        """Until the next read, or until the time to lead, or to wait for an absent lease, is over."""
        # Jittered as client-go does, or replicas that started together would ask together.
        pause_s = self.terms.retry_s * random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, no secret
        if self.leads():
            # Wakes when the time to lead is over: waiters have to hear of it, though no request failed.
            pause_s = min(pause_s, max(self._leads_until - self.clock(), 0.0))
        elif self._seen and self._lease is None:
            pause_s = min(pause_s, max(self._free_at() - self.clock(), SHORTEST_PAUSE_S))
        await asyncio.sleep(pause_s)

    async def try_acquire_or_renew(self) -> None:
        """One read, and one write where the lease is ours, or may be taken."""
        # A leader does without the read: its write names the version that it wrote last, and fails where another client has
        # written the lease.
        if not self.leads():
            await self._read()
        if self.holder == self.identity or self.clock() >= self._free_at():
            try:
                await self._write()
            except Conflict:
                # Another has taken it: to write again would take it back before its time is over.
                if self.holder != self.identity:
                    raise
                await self._write()  # ours after all: another client has labelled it, say

    async def _read(self) -> None:
        try:
            self._note(await self.api.get_lease(self.terms.namespace, self.terms.name))
        except NotFound:
            self._note(None)

    async def _write(self) -> None:
        """Makes the lease ours. Where it is no longer what we read, we stop leading until it was read as ours."""
        # From before the request: the API server may have stored it at once and answered late.
        began_at = self.clock()
        try:
            self._note(await self._put(self._record(self.identity)))
        except (Conflict, NotFound):
            self._leads_until = LONG_AGO  # another client wrote it, perhaps to take it, or deleted it
            await self._read()
            raise
        # Only after an answer: a write without one may have failed, and then another replica's clock runs.
        self._leads_until = began_at + self.terms.renew_deadline_s

    async def _put(self, lease: Lease) -> Raw:
        namespace, name = self.terms.namespace, self.terms.name
        if self._lease is None:
            return await self.api.create_lease(namespace, lease)
        # A PUT without a version overwrites whatever is there: two leaders would not notice each other.
        if not lease.meta.version:
            raise Corrupt(f"cannot replace lease {namespace}/{name}: the one read has no resourceVersion")
        return await self.api.replace_lease(namespace, name, lease)

    def _note(self, raw: Raw | None) -> None:
        """The lease as read, None where it is absent, and since when that is unchanged."""
        what = f"lease {self.terms.namespace}/{self.terms.name}"
        self._lease = decoded(_LEASE, raw, what) if raw is not None else None
        self._was_read = self._was_read or raw is not None
        spec = self._spec
        self.holder = spec.holder_identity or ""
        # Any change of the record means that its holder is there; the resource version does not count, because labels change
        # it too.
        uid = self._lease.meta.uid if self._lease is not None else ""
        seen = uid, self.holder, spec.renew_time, spec.acquire_time, spec.lease_transitions
        if seen != self._seen:
            self._seen, self._seen_at = seen, self.clock()

    @property
    def _spec(self) -> LeaseSpec:
        return self._lease.spec if self._lease is not None else LeaseSpec()

    def _free_at(self) -> float:
        """When another's lease may be taken, or an absent one created: as long as its holder may lead by it."""
        # No lease was ever read: most likely this is the first installation, and no replica leads.
        if not self._was_read:
            return self._seen_at + self.terms.retry_s
        theirs_s = self._spec.lease_duration_seconds or 0
        # Released in order, as `release` and client-go do it. A holder emptied by hand leaves a leader that does not know
        # it yet.
        if not self.holder and theirs_s == RELEASED_S:
            return LONG_AGO
        # The longer of both durations: a holder with other settings may count on its own.
        return self._seen_at + max(self.terms.duration_s, min(theirs_s, MAX_DURATION_S))

    def _record(self, holder: str, duration_s: float | None = None) -> Lease:
        """The lease as it should be; its metadata stays as read."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        read = self._spec
        is_new, count = holder != read.holder_identity, read.lease_transitions or 0
        owners = [self.terms.owner] if self.terms.owner is not None else []
        new = Raw(json.encode({"name": self.terms.name, "namespace": self.terms.namespace, "ownerReferences": owners}))
        spec = LeaseSpec(
            holder_identity=holder,
            # The API server accepts no 0.
            lease_duration_seconds=max(1, round(duration_s or self.terms.duration_s)),
            acquire_time=now if is_new else read.acquire_time or now,
            renew_time=now,
            # As client-go counts them: not for a release, and not for the first holder.
            lease_transitions=count + 1 if is_new and self._lease is not None and holder else count,
        )
        # As read, with the resource version: the API server refuses the write where another came first.
        return Lease(metadata=self._lease.metadata if self._lease is not None else new, raw_spec=Raw(json.encode(spec)))

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
            self._changes.notify()


class AlwaysLeads:
    """The election where there is one replica alone."""

    term = 1
    holder = ""

    def leads(self) -> bool:
        return True

    async def run(self) -> NoReturn:
        await self.wait_change(self.term, True)
        raise AssertionError("unreachable: nothing changes")

    async def release(self) -> None:
        """There is nothing to release."""

    async def wait_change(self, term: int, is_leading: bool) -> None:
        if (term, is_leading) == (self.term, True):
            # Nothing ever changes: until the caller is cancelled.
            await asyncio.Event().wait()


class Leadership(Struct, kw_only=True, eq=False):
    """`run` once. `unscheduled` are the pods without a node: verdicts for some of them are worked out before the first
    answer, which would have to wait for them. `on_listed` is called each time that the cluster was listed; it may take a
    while."""

    election: LeaderElection | AlwaysLeads
    informers: Sequence[Informer]
    state: ClusterState
    unscheduled: Callable[[], Sequence[Pod]]
    metrics: ExtenderMetrics
    listed_in: int = 0

    def not_ready(self) -> list[str]:
        """Why the scheduler's verbs are not answered now; empty when they are."""
        if not self.election.leads():
            return [f"this replica does not lead; the lease is held by {self.election.holder or 'nobody'}"]
        if self.listed_in != self.election.term:
            return ["this replica leads, and is listing the cluster before it decides"]
        return []

    def not_warm(self) -> list[str]:
        """Why this replica cannot take over, or go on, within a moment. A single replica has nothing to take over: it is
        ready when it decides."""
        if isinstance(self.election, AlwaysLeads):
            return self.not_ready()
        reasons = {one.kind: f": {one.lost.why}" if one.lost else "" for one in self.informers if not one.has_listed}
        return [f"{kind} are not listed yet{reason}" for kind, reason in reasons.items()]

    async def run(self, on_listed: Callable[[], None]) -> NoReturn:
        """List in each term, until cancelled. Informers are refreshed in their order: nodes before pods, so that a pod finds
        its node."""
        election = self.election
        while True:
            term, is_leading = election.term, election.leads()
            if is_leading and self.listed_in != term:
                self.metrics.count("leaderships")
                for informer in self.informers:
                    await informer.refresh()
                # Now, and not later: what was listed stays for long, and no request waits for an answer yet.
                on_listed()
                for pod in self.unscheduled()[:MAX_WARMED_PODS]:
                    await in_steps(self.state.filter_steps(pod, None))
                # The term from before the lists: leadership lost and won meanwhile has to list again.
                self.listed_in = term
                log.info("deciding", term=term)
            await election.wait_change(term, is_leading)


class LeaderLabel(Struct, kw_only=True, eq=False):
    """`run` once; `withdraw` after it has ended. `namespace` and `name` are those of this process's own pod."""

    api: ClusterApi
    election: LeaderElection | AlwaysLeads
    namespace: str
    name: str
    backoff: Backoff = Backoff(base_s=0.5, cap_s=CHECK_PERIOD_S)
    check_period_s: float = CHECK_PERIOD_S
    _may_be_left: bool = True
    """An earlier container of this pod may have died with it."""

    async def run(self) -> NoReturn:
        """Keep the label on the leader alone, until cancelled."""
        failures = 0
        while True:
            term, is_leading = self.election.term, self.election.leads()
            try:
                async with bounded(UPDATE_TIMEOUT_S, NO_ANSWER):
                    await (self._claim() if is_leading else self._drop())
                # Checked again now and then, because any client may change labels.
                failures, pause_s = 0, self.check_period_s
            except AgentError as e:
                failures += 1
                pause_s = self.backoff.delay_s(failures)
                then = "the Service may not find this leader" if is_leading else "the next leader removes the label"
                fields = {"then": then, "cure": _REMEDY, "retried_in_s": round(pause_s, 1)}
                log.warning("leader_label_not_written", pod=f"{self.namespace}/{self.name}", error=str(e), **fields)
            await at_most(pause_s, self.election.wait_change(term, is_leading))

    async def withdraw(self) -> None:
        """Take the label off before the process ends: the pod may outlive it."""
        try:
            async with bounded(WITHDRAW_TIMEOUT_S, NO_ANSWER):
                await self._drop()
        except AgentError as e:
            log.info("leader_label_not_removed", error=str(e), then="the next leader removes it")

    async def _claim(self) -> None:
        """First from the others, then on our own: a moment without a leader's label costs less than two."""
        own = await self.api.get_pod(self.namespace, self.name)
        uid, labels = pod_uid(own), object_meta(own, "pod").labels
        # Without it the pods of other Deployments in the namespace would be stripped of their labels.
        if app := labels.get(APP_LABEL):
            await self._strip_others({APP_LABEL: app, ROLE_LABEL: LEADER})
        self._may_be_left = True
        # Asked again: to strip the others may have taken longer than the time to lead.
        if labels.get(ROLE_LABEL) != LEADER and self.election.leads():
            await self.api.patch_pod_labels(self.namespace, self.name, uid, {ROLE_LABEL: LEADER})
            log.info("leader_labelled", pod=f"{self.namespace}/{self.name}", label=f"{ROLE_LABEL}={LEADER}")

    async def _strip_others(self, labels: Mapping[str, str]) -> None:
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        found, _ = await self.api.list_all(
            pods(self.namespace, labels=selector), lambda raw: (object_meta(raw, "pod").name or "", pod_uid(raw))
        )
        for name, uid in sorted(set(found)):
            if name in ("", self.name):
                continue
            # The next leader may have labelled one of them meanwhile.
            if not self.election.leads():
                return
            try:
                await self.api.patch_pod_labels(self.namespace, name, uid, {ROLE_LABEL: None})
            except (NotFound, Conflict):
                continue  # gone, and its label with it
            log.info("former_leader_unlabelled", pod=f"{self.namespace}/{name}")

    async def _drop(self) -> None:
        # A follower asks once after its start, and not again until it has led.
        if not self._may_be_left:
            return
        own = await self.api.get_pod(self.namespace, self.name)
        uid = pod_uid(own)
        if ROLE_LABEL in object_meta(own, "pod").labels:
            await self.api.patch_pod_labels(self.namespace, self.name, uid, {ROLE_LABEL: None})
        self._may_be_left = False
