"""Gives running shares the sizes that their pods' annotation `gpushare-agent/resize` asks for.

Level, not edge: a round compares with its annotation each share that is resized or was refused, and those of pods and
claims that changed; after a change of a GPU all. In a round, in this order:

1. Decide, and charge what grows (`AllocationCache.charge`), without an await between.
2. Save what is charged. What cannot be saved is not applied.
3. Apply: the isolation sees the new size (`Allocation.resized_to`).
4. Let the isolations enforce it, again in each new container, which begins with what Allocate answered.
5. Charge less if what was given back neither is nor can be in use. Then once more from 1: others may grow into it.

State owned: what the file has, what is enforced since when, and what the pods' Events and status annotations say of it
(`ResizeReports`). The sizes themselves belong to the allocation cache. The annotation's grammar and every
decision: decisions/resize.py. Who may write it: docs/explanation/resize.md.

The file, resize.json in state_directory, has the shares whose size was changed while they run, over a restart of the agent:

    {"version": 1, "shares": [{"pod_uid": "…", "container": "main", "gpu": "GPU-…", "resource": "vmemory",
                               "allocated": "30,8", "target": "50,24", "booked": "50,24", "instance": "…"}]}

Sizes are cores and memory units; the fields are those of `ResizedShare`, whose charge is `booked`: agents of all versions
read it. It is written before a share grows, so that no restart gives the same capacity away twice. A file that is not this
format is set aside as `<name>.corrupt`, and every share then has what the kubelet allocated, in the ledger and by its
isolation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import structlog
from msgspec import Meta, Struct, field

from gpushare_agent.agent.admission.decisions.resize import (
    DesiredSize,
    ResizePolicy,
    ResizeReason,
    ResizeRefused,
    asked_size,
    bounded_status,
    claim_refusal,
    decide_resize,
    describe,
    enforced,
    is_ending,
    is_resizable,
    mode_refusal,
    shown_name,
    status_text,
    target_of,
    unchanged_size,
)
from gpushare_agent.agent.cluster.pod_annotations import PodAnnotations
from gpushare_agent.agent.isolation import Isolation
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.state_file import StateFile
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce
from gpushare_agent.core.kube.events import PodEvents
from gpushare_agent.core.model.allocations import (
    NO_CHARGE,
    Allocation,
    Charge,
    ContainerKey,
    ResizedShare,
    ShareSize,
    add_charges,
)
from gpushare_agent.core.model.errors import AgentError, Corrupt
from gpushare_agent.core.model.names import (
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
    GpuUuid,
    PodUid,
    is_container_id,
)
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import KINDS, Measure
from gpushare_agent.core.model.usage import UsageRound
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import account_of

log = structlog.get_logger(__name__)

_ANNOTATIONS = frozenset({RESIZE_ANNOTATION, RESIZE_STATUS_ANNOTATION})
MAX_SHARES = 1024
"""Such a file is below the megabyte that is read. Further shares are not resized."""
_KINDS = {kind.value: kind for kind in KINDS if kind.measure in (Measure.BLOCKS, Measure.UNITS)}
_Name = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z:._-]{1,128}\Z")]
_Size = Annotated[str, Meta(pattern=r"\A[0-9]{1,2},[0-9]{1,7}\Z")]
"""Cores of a share, which are less than a GPU has, and units of memory."""


class _Row(Struct, frozen=True, kw_only=True):
    pod_uid: _Name
    container: _Name
    gpu: _Name
    resource: str
    allocated: _Size
    target: _Size
    booked: _Size
    instance: str


class _Document(Struct, frozen=True, kw_only=True):
    version: Literal[1] = 1
    shares: Annotated[Sequence[_Row], Meta(max_length=MAX_SHARES)]


_LOST = "every share gets what the kubelet allocated; those whose pods ask for another size are resized again"


class ResizeFile:
    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, "the resized shares", _Document, event="resize_state_corrupt", lost=_LOST)

    async def load(self) -> tuple[ResizedShare, ...]:
        """What was saved; nothing where there is no file, nor a good copy of one that was set aside. Raises Unavailable."""
        return await self._file.load(_shares, tuple)

    async def save(self, shares: Iterable[ResizedShare]) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        rows = [_row_of(share) for share in sorted(shares, key=lambda share: share.key)]
        await self._file.save(lambda: _Document(shares=rows))


def _row_of(share: ResizedShare) -> _Row:
    return _Row(
        pod_uid=share.key.pod_uid,
        container=share.key.container,
        gpu=share.gpu,
        resource=share.kind.value,
        allocated=_text(share.allocated),
        target=_text(share.target),
        booked=_text(share.charged),
        instance=share.instance,
    )


def _text(size: ShareSize) -> str:
    return f"{size.cores},{size.memory}"


def _size(text: str) -> ShareSize:
    cores, memory = map(int, text.split(","))
    return ShareSize(cores=cores, memory=memory)


def _shares(document: _Document) -> tuple[ResizedShare, ...]:
    """Raises Corrupt."""
    found = {share.key: share for share in map(_share, document.shares)}
    if len(found) < len(document.shares):
        raise Corrupt("a container is in it twice")
    return tuple(found.values())


def _share(row: _Row) -> ResizedShare:
    target, charged = _size(row.target), _size(row.booked)
    if row.resource not in _KINDS or (row.instance and not is_container_id(row.instance)):
        raise Corrupt("a share in it has no memory, or a container ID that is none")
    if charged.at_least(target) != charged or not target.memory:
        raise Corrupt("a share in it has more than is charged, or nothing")
    return ResizedShare(
        key=ContainerKey(PodUid(row.pod_uid), row.container),
        gpu=GpuUuid(row.gpu),
        kind=_KINDS[row.resource],
        allocated=_size(row.allocated),
        target=target,
        charged=charged,
        instance=row.instance,
    )


PERIOD_S = 1.0
"""The time between two rounds while a share is resized: a restarted container has its former limits for so long."""
PAUSE_S = 0.5
"""The least time between two rounds: each may write the file."""
SETTLED_S = 1.0
"""After this time the driver's numbers have an allocation that a library allowed just before its limit was lowered."""
EVENT_PAUSE_S = 5.0
"""The time between two Events of one pod: an annotation may be written often."""
MAX_REPORTED = 1024
RESIZED = "ShareResized"
RESIZE_REFUSED = "ShareResizeRefused"


class _Enforced(Struct, frozen=True, kw_only=True):
    """What the isolation enforces in which container, and since when, by CLOCK_BOOTTIME: the wall clock may be set."""

    target: ShareSize
    instance: str
    since: float


class ResizeRound(Struct):
    """What one round found: why shares keep their sizes, the shares not enforced yet, and containers that annotations name
    and their pods do not have."""

    refused: dict[ContainerKey, ResizeRefused] = field(default_factory=dict)
    unknown: dict[PodUid, str] = field(default_factory=dict)
    unenforced: dict[ContainerKey, str] = field(default_factory=dict)


class GrowthAccounts:
    """Each GPU as it is charged, during one round of decisions, in which nothing but `charge` changes the cache. Counted at
    the first need only: to count all again for each share of hundreds would hold up the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._charges: dict[GpuUuid, Charge] | None = None

    def without(self, allocation: Allocation) -> GpuAccount | None:
        """The account of the share's GPU as charged for all others; None if that GPU is not there."""
        if self._charges is None:
            self._charges = self._node.cache.charges_for_growth()
        gpu = self._node.gpus().by_uuid().get(allocation.gpus[0])
        if gpu is None:
            return None
        charged = self._charges.get(gpu.uuid, NO_CHARGE)
        return account_of(gpu, self._node.names, charged.plus(self._node.cache.charged_alone(allocation.key), -1))

    def charge(self, share: ResizedShare) -> None:
        """Calls `AllocationCache.charge` for a share whose account was asked for, and counts it in."""
        if self._charges is None:
            raise AssertionError(f"{share.key} is charged without a look at its GPU's account")
        before = self._node.cache.charged_alone(share.key)
        self._node.cache.charge(share)
        more = self._node.cache.charged_alone(share.key).plus(before, -1)
        add_charges(self._charges, {share.gpu: more})


class ShareResizing(Struct, kw_only=True, eq=False):
    """Call `restore` once the cache is rebuilt, before any call of the kubelet is answered; then `run` once, which restores
    where the file could not be read. Subscribe `changed` to pods, allocations and GPUs. Without a `file` the sizes end with
    the agent."""

    node: Node
    policy: ResizePolicy
    file: ResizeFile | None
    enforcement: Isolations
    reports: ResizeReports
    request_usage: Callable[[], None] = lambda: None
    """Called while a decision waits for a sample: samples may be rare."""
    _saved: Mapping[ContainerKey, ResizedShare] | None = None
    """None: not read yet."""
    _usage: UsageRound | None = None
    _enforced: dict[ContainerKey, _Enforced] = field(default_factory=dict)
    _reconciler: Reconciler = field(default_factory=Reconciler)
    _changed: frozenset[PodUid] | None = None
    """None: all."""
    _refused: Set[PodUid] = frozenset()
    _failure: ReportOnce = field(default_factory=ReportOnce)

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """Takes the newest sample. For UsageSampling.subscribe."""
        self._usage = usage

    def changed(self, uid: PodUid | None = None) -> None:
        """A pod or claim, an allocation of it, or (None) a GPU."""
        # Most nodes have no share that is or was to have another size: there nothing is compared at each change of a pod.
        is_known = (
            self.node.cache.resized or self._saved or self._enforced or self._refused or self.reports.has_reported
        )
        if is_known or uid is None or self._is_asked(uid):
            self._changed = None if uid is None or self._changed is None else self._changed | {uid}
            self._reconciler.request()

    def _is_asked(self, uid: PodUid) -> bool:
        """A pod that has or uses it has one of the annotations."""
        return any(_ANNOTATIONS & pod.annotations.keys() for pod in self.node.claim_pods.using(uid))

    async def load(self) -> tuple[ResizedShare, ...] | None:
        """What was resized before a restart, for `restore`; None where it cannot be read now."""
        # Without a file the sizes end with this agent, as the setting says.
        if self.file is None:
            return ()
        try:
            return await self.file.load()
        except AgentError as e:
            if self._failure.is_new("not read"):
                then = "until it is, shares have what the kubelet allocated; what was borrowed may be allocated again"
                log.error("resize_state_not_read", error=str(e), then=then)
            return None

    def restore(self, shares: tuple[ResizedShare, ...] | None) -> None:
        """Counts from now on, before anything is admitted."""
        if shares is None:
            return
        self.node.cache.restore_resized(shares)
        self._saved = {share.key: share for share in shares}
        if self._failure.is_over() or shares:
            log.info("resized_shares_restored", count=len(self.node.cache.resized))

    async def run(self) -> NoReturn:
        """Reconciles when something has changed, and every period while a share is resized, until cancelled."""

        def due_s() -> float | None:
            return PERIOD_S if self.node.cache.resized or self._saved != {} or self._refused else None

        await self._reconciler.run(self.reconcile, due_s, pause_s=PAUSE_S)

    async def reconcile(self) -> None:
        """One round. A share that cannot be enforced does not stop the others."""
        # Not over what nobody has read.
        if self._saved is None:
            self.restore(await self.load())
            if self._saved is None:
                return
        self._forget_gone()
        changed = {one.key.pod_uid for one in self.node.cache} if self._changed is None else self._changed
        uids, self._changed = changed | self._refused | {key.pod_uid for key in self.node.cache.resized}, frozenset()
        found = ResizeRound()
        # Twice at most: what shrank in the first pass makes room for growth in the second; more waits for the next
        # round.
        for _ in range(2):
            found = self._decide(uids)
            await self._save_and_apply()
            if not await self._enforce(found):
                break
        await self._save_and_apply()
        self._refused = found.unknown.keys() | {key.pod_uid for key in found.refused}
        if self.node.pods.is_synced:
            self.reports.report(found, uids)

    # --- 1: decide ---

    def _forget_gone(self) -> None:
        """Forgets sizes of pods that ended while the agent was away: no allocation of theirs will be released."""
        if not self.node.pods.is_synced:
            return
        for key in self._enforced.keys() - self.node.cache.resized.keys():
            del self._enforced[key]
        for key in [key for key in self.node.cache.resized if self.node.cache.get(key) is None]:
            pod = self.node.pods.get(key.pod_uid)
            if pod is None or pod.is_terminal:
                self.node.cache.forget_resized(key)

    def _decide(self, uids: Collection[PodUid]) -> ResizeRound:
        """Charges every change that may be; why the others may not. Shares that shrink come first, others may grow then."""
        found = ResizeRound()
        accounts = GrowthAccounts(self.node)
        candidates: list[tuple[Allocation, DesiredSize]] = []
        for allocation in [one for uid in sorted(uids) for one in self.node.cache.of_pod(uid)]:
            uid = allocation.key.pod_uid
            pods = self.node.claim_pods.using(uid)
            # It ends: what it has is freed as a whole, and a smaller size would be for nothing. Before the list the pods
            # that ask for a claim's size may be missing: it stays.
            if is_ending(allocation, pods) or (allocation.claim is not None and not self.node.pods.is_synced):
                continue
            asked = asked_size(allocation, pods)
            if asked is None and allocation.key not in self.node.cache.resized:
                continue
            if not is_resizable(allocation, pods, self.node.names):
                continue
            if isinstance(asked, ResizeRefused):
                found.refused[allocation.key] = asked
                asked = unchanged_size(allocation, self.node.cache.resized.get(allocation.key), self.policy)
            elif asked is not None and asked.unknown:
                found.unknown[uid] = asked.unknown
            candidates.append((allocation, asked or DesiredSize()))
        # False sorts before True: shares that shrink, whose capacity those that grow may use in the same round.
        for allocation, desired in sorted(candidates, key=_grows):
            if (reason := self._decide_one(allocation, desired, accounts)) is not None:
                found.refused[allocation.key] = reason
        return found

    def _decide_one(
        self, allocation: Allocation, desired: DesiredSize, accounts: GrowthAccounts
    ) -> ResizeRefused | None:
        isolation = self.enforcement.isolation_of(allocation)
        if isolation is None:
            return None
        key, known = allocation.key, self.node.cache.resized.get(allocation.key)
        siblings = self.node.cache.of_pod(key.pod_uid) if allocation.claim is not None else ()
        refused = mode_refusal(allocation, desired, self.policy)
        refused = refused or claim_refusal(allocation, desired, siblings, self.policy)
        if refused is not None:
            desired = unchanged_size(allocation, known, self.policy)
        if target_of(allocation, desired) == (known.target if known is not None else allocation.allocated_size):
            return refused  # most shares, in every round
        if (account := accounts.without(allocation)) is None:
            return refused
        outcome = decide_resize(allocation, desired, known, account, isolation, self.policy)
        # As many as the file holds: a size that is not saved would be given away again after a restart.
        if isinstance(outcome, ResizedShare) and known is None and len(self.node.cache.resized) >= MAX_SHARES:
            outcome = ResizeRefused(
                ResizeReason.TOO_MANY, f"{MAX_SHARES} shares of this node are resized: no more can be."
            )
        if isinstance(outcome, ResizedShare):
            accounts.charge(outcome)
            return refused
        return refused or outcome

    # --- 2 and 3: save and apply ---

    async def _save_and_apply(self) -> None:
        shares = dict(self.node.cache.resized)
        # Written before the isolation sees a larger size: a crash between the two must not lose what was given.
        if shares != self._saved:
            try:
                if self.file is not None:
                    await self.file.save(shares.values())
            except AgentError as e:
                if self._failure.is_new("not saved"):
                    log.error("resize_state_not_saved", error=str(e), then="no share is resized; it is tried again")
                return
            self._saved = shares
            if self._failure.is_over():
                log.info("resize_state_saved_again")
        for key, share in shares.items():
            allocation = self.node.cache.get(key)
            if (
                allocation is not None
                and self.node.cache.resized.get(key) == share
                and allocation.resized_to != share.target
            ):
                self.node.cache.resize(key)

    # --- 4 and 5: enforce, and charge less ---

    async def _enforce(self, found: ResizeRound) -> bool:
        """True if less is charged than before. A size that is enforced in the container that runs now, and charged as it is,
        is left alone."""
        is_less = False
        for key in sorted(self.node.cache.resized):
            allocation, share = self.node.cache.get(key), self.node.cache.resized.get(key)
            if allocation is None or share is None or allocation.resized_to != share.target:
                continue
            isolation = self.enforcement.isolation_of(allocation)
            if isolation is None:
                continue
            instance, known = self.node.claim_pods.instance(key), self._enforced.get(key)
            is_enforced = known is not None and (known.target, known.instance) == (share.target, instance)
            if is_enforced and instance and share.charged == share.target:
                continue
            try:
                why_not = await self.enforcement.enforce(allocation)
            except AgentError as e:
                why_not = str(e)
            if why_not:
                found.unenforced[key] = why_not
                self._enforced.pop(key, None)
                continue
            if not is_enforced:
                self._enforced[key] = _Enforced(target=share.target, instance=instance, since=_boot_s())
            # The await may have let an Allocate or a pod's end change it: then the next round decides.
            if self.node.cache.resized.get(key) is share:
                is_less |= self._charge_less(share, isolation, instance)
        return is_less

    def _charge_less(self, share: ResizedShare, isolation: Isolation, instance: str) -> bool:
        new = enforced(share, isolation, instance, uses_no_more=bool(instance) and self._uses_no_more(share))
        if new.is_over:
            self.node.cache.forget_resized(share.key)
        elif new != share:
            self.node.cache.charge(new)
        return new.charged != share.charged

    def _uses_no_more(self, share: ResizedShare) -> bool:
        """True if the share's processes have no more than the target, by the driver, in a sample taken after the target was
        enforced; a container's own word does not count."""
        if share.charged.memory > share.target.memory:
            # Memory that was allocated stays with its processes whatever the limit: only the driver can say that it is
            # less.
            self.request_usage()
        usage, known = self._usage, self._enforced.get(share.key)
        # An earlier sample says nothing: a process may have allocated up to the old limit since.
        if usage is None or known is None or usage.sampled_boot_s < known.since + SETTLED_S:
            return False
        gpu = usage.gpus.get(share.gpu)
        use = usage.containers.get((share.key, share.gpu))
        if gpu is None or gpu.processes is None or use is None or use.memory_bytes is None:
            return False
        return use.memory_bytes <= (share.target.memory * self.node.names.unit_mib(share.kind)) << 20


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _grows(candidate: tuple[Allocation, DesiredSize]) -> tuple[bool, ContainerKey]:
    allocation, desired = candidate
    return target_of(allocation, desired).at_least(allocation.size) != allocation.size, allocation.key


# --- what the pods show ---


class ResizeReports(Struct, kw_only=True, eq=False):
    """Writes the pods' Events and annotations; for a claim those of the pods that use it. Call `report` after each round,
    while the pods are known. State owned: each pod's own status and its claims'; what was reported."""

    node: Node
    annotations: PodAnnotations
    events: PodEvents
    clock: Callable[[], float] = time.monotonic
    _statuses: dict[PodUid, dict[PodUid, str]] = field(default_factory=dict)
    _reported_refusals: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_REPORTED))
    _reported_sizes: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_REPORTED))
    _reported_at: dict[PodUid, float] = field(default_factory=dict)

    @property
    def has_reported(self) -> bool:
        """Something of a pod that may be there."""
        return bool(self._statuses or self._reported_at)

    def report(self, found: ResizeRound, compared: Collection[PodUid]) -> None:
        for known in (self._reported_at, self._statuses):
            for uid in [uid for uid in known if not self.node.cache.of_pod(uid) and self.node.pods.get(uid) is None]:
                del known[uid]
        reasons = {key: one.reason for key, one in found.refused.items()}
        uids = {key.pod_uid for key in (*self.node.cache.resized, *found.refused)} | found.unknown.keys()
        for uid in sorted(uids):
            if users := self.node.claim_pods.using(uid):
                self._report_pod(uid, users, found, reasons)
        for uid in {uid for uid in compared if self.node.cache.of_pod(uid)} - uids:
            self._show_status(uid, self.node.claim_pods.using(uid), None)

    def _report_pod(
        self, uid: PodUid, users: Sequence[Pod], found: ResizeRound, reasons: Mapping[ContainerKey, ResizeReason]
    ) -> None:
        """The status always; an Event for each refusal and each size, once, and not too often."""
        names, allocations = self.node.names, self.node.cache.of_pod(uid)
        text = ";".join(pod.annotations.get(RESIZE_ANNOTATION, "") for pod in users)
        self._show_status(uid, users, status_text(allocations, self.node.cache.resized, reasons, found.unenforced))
        if self.clock() - self._reported_at.get(uid, float("-inf")) < EVENT_PAUSE_S:
            return

        def refuse(subject: str, what: str, detail: str) -> None:
            if self._reported_refusals.is_new(what, subject):
                self._reported_at[uid] = self.clock()
                for pod in users:
                    self.events.warned(pod, RESIZE_REFUSED, detail)

        if (unknown := found.unknown.get(uid)) is not None:
            refuse(f"{uid}/", text, f"{RESIZE_ANNOTATION} names a container {unknown}, which the pod does not have.")
        for allocation in allocations:
            key, subject = allocation.key, f"{uid}/{allocation.key.container}"
            share = self.node.cache.resized.get(key)
            name = f"{'Container' if allocation.claim is None else 'Claim'} {shown_name(allocation, allocations)}"
            if (refused := found.refused.get(key)) is not None:
                refuse(subject, f"{text} {refused.reason}", f"{name} keeps its share: {refused.detail}")
            elif key not in found.unenforced and share is not None:
                self._reported_refusals.is_over(subject)
                size, allocated = (
                    describe(one, share.kind, names) for one in (allocation.size, allocation.allocated_size)
                )
                detail = f"{name} has {size} now; allocated were {allocated}."
                if self._reported_sizes.is_new(detail, subject):
                    self._reported_at[uid] = self.clock()
                    for pod in users:
                        self.events.noted(pod, RESIZED, detail)

    def _show_status(self, uid: PodUid, users: Sequence[Pod], status: str | None) -> None:
        for pod in users:
            before = self._statuses.get(pod.uid, {})
            parts = {one: text for one, text in {**before, uid: status}.items() if text is not None}
            self._statuses[pod.uid] = parts
            if not parts:
                del self._statuses[pod.uid]
            text = bounded_status([entry for one in sorted(parts) for entry in parts[one].split(";")])
            if parts != before or pod.annotations.get(RESIZE_STATUS_ANNOTATION) != text:
                self.annotations.resize_status(pod, text)
