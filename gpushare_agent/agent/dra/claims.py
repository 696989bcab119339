"""Prepared claims: enters them in the ledger, prepares the host, writes their CDI specs, and ends them.

An error costs the pod 60 to 90 s, because the kubelet tries again only then: so the call waits for what will come soon,
`wait_s` at most. The record is written last and before the answer, so whatever is recorded is whole, and a call that is
repeated for it changes nothing. But after a boot, or when the driver was loaded again, the numbers of a recorded GPU
may be another one's: specs are made again then, and a claim whose GPU is gone gets none. A claim of a place for a MIG
instance gets another instance there. After a boot the host is prepared again, by the call that the kubelet makes then.
Ending works from the record alone: the claim may be gone from the API server. Each outcome is counted and recorded; its
Event on the pod is the kubelet's own. Where a prepared claim loses its GPU the Event is ours.

State owned: `_prepared` by UID and whether each has its spec, the last refusal of claims that the kubelet has not
unprepared yet, and its part of the allocation cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

import structlog
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.admission.decisions.ledger import Ledger
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.dra.decisions.edits import (
    PreparedClaim,
    conflict,
    gone,
    other_claims,
    prepare_again,
    prepare_claim,
)
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.mig.instances import HOLD_S, MigInstances, not_yet
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.machine import this_boot
from gpushare_agent.core.claims.claim import AllocatedClaim, ClaimPolicy, read_claim
from gpushare_agent.core.claims.devices import device_name, is_placement_name
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import ChangeSignal, Reconciler, ReportOnce
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.allocations import Allocation, Charge, ClaimRef, ClaimShare, ContainerKey
from gpushare_agent.core.model.decision_records import CLAIMS_RESOURCE, Asked, DecisionRecord, Outcome
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import MIB, VDEVICE_DIRECTORY, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import WHOLE_GPU, Request, ResourceNames
from gpushare_agent.core.placement.gpu_account import describe_request


def allocations_of(claim: PreparedClaim, names: ResourceNames, at: float) -> list[Allocation]:
    """One for each result, but none for admin access: the scheduler does not count it and gives the GPU to others."""
    return [
        Allocation(
            key=one.key,
            namespace=claim.ref.namespace,
            pod_name=claim.pod,
            kind=ContainerKind.MAIN,
            gpus=(GpuUuid(one.gpu),),
            is_whole=one.is_whole,
            allocated_at=at,
            charge=Charge(cores=one.cores, wholes=1)
            if one.is_whole
            else Charge(cores=one.cores, blocks=one.memory_mib // names.memory_block_mib, shares=1),
            claim=ClaimShare(
                ref=claim.ref,
                shown_as=claim.shown_as,
                request=one.name,
                isolation=one.isolation,
                core_limit=one.core_limit,
                view=one.view,
            ),
        )
        for one in claim.charged
    ]


def shortage(claim: PreparedClaim, ledger: Ledger, names: ResourceNames) -> str:
    """Why the claim has no room, empty if it has: the scheduler counts a share as free when its pod is deleted by force,
    before its containers have ended."""
    accounts = {account.uuid: account for account in ledger.accounts(names)}
    for one in claim.charged:
        if one.is_unlimited:  # the scheduler does not count it either
            continue
        known = accounts[GpuUuid(one.gpu)]
        # Also on an unhealthy GPU: its device has a taint, which the pod then tolerates. An instance is a GPU to claims:
        # whether it takes shares is their isolation's to say.
        account = replace(known, is_healthy=True, takes_shares=True, instance="")
        request = WHOLE_GPU
        if not one.is_whole:
            request = Request(cores=one.cores, blocks=one.memory_mib // names.memory_block_mib, is_share=True)
        if (lack := account.lack(request)) is not None:
            others = [other for other in ledger.allocations.values() if account.uuid in other.gpus]
            users = ", ".join(sorted({_user(other) for other in others})[:5])
            return (
                f"GPU {known.label} cannot serve {describe_request(request, names)}: {lack.of_gpu_in_detail()}. It is"
                f" still used by {users}; the claim gets its part when their containers have ended"
            )
        # The next result of this claim finds what this one takes.
        accounts[account.uuid] = replace(account.allocate(request), instance=known.instance)
    return ""


def _user(allocation: Allocation) -> str:
    if allocation.claim is not None:
        return f"claim {allocation.claim.ref.namespace}/{allocation.claim.ref.name}"
    return f"pod {allocation.namespace}/{allocation.pod_name}"


log = structlog.get_logger(__name__)

T = TypeVar("T")

PREPARE_WAIT_S = 40.0
"""How long a claim waits for what is missing. The kubelet's limit is 45 s."""
FILES_TIMEOUT_S = 5.0
FINAL = (RefusalReason.INVALID_REQUEST, RefusalReason.UNKNOWN_DEVICE)
"""Waiting changes nothing."""
POLL_S = 1.0
"""The period of looks while waiting: the API server, the inventory and the isolation report no change here."""


class Claims(Struct, kw_only=True, eq=False):
    """Call `restore` once, before the first call; `attach` when the API server can be reached."""

    node: Node
    policy: Callable[[], EditPolicy]
    claim_policy: ClaimPolicy = ClaimPolicy()
    files: ClaimFiles
    isolation: Isolations
    runtime_classes: RuntimeClasses
    mig: MigInstances
    prepare_wait_s: float = PREPARE_WAIT_S
    clock: Callable[[], float] = time.monotonic
    pods_timeout_s: float = 2.0
    boot_id: str = field(default_factory=this_boot)
    _api: KubeApi | None = None
    _prepared: dict[str, PreparedClaim] = field(default_factory=dict)
    _refusals: dict[str, Refused] = field(default_factory=dict)
    asked: dict[str, ClaimRef] = field(default_factory=dict)
    """The claims that the kubelet asked for, by UID, and that are neither prepared nor unprepared: such a one may hold
    places for instances. Others only read it."""
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _changes: ChangeSignal = field(default_factory=ChangeSignal)
    _has_spec: dict[str, bool | None] = field(default_factory=dict)
    """None: it has none, and its pods are still to be warned."""
    _reconciler: Reconciler = field(default_factory=Reconciler)
    _not_written: ReportOnce = field(default_factory=ReportOnce)
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "claims", advice="Check that the agent may write in state_directory and cdi.spec_directories."
        )
    )

    def attach(self, api: KubeApi) -> None:
        self._api = api
        self.changed()

    def changed(self) -> None:
        """Something changed that a call may wait for: an allocation, the GPUs."""
        self._changes.notify()
        self._reconciler.request()

    def is_answered(self, uid: str) -> bool:
        """True if another call for the claim would change nothing: it is prepared, or the answer is final."""
        refused = self._refusals.get(uid)
        return uid in self._prepared or (refused is not None and refused.reason in FINAL)

    @property
    def prepared(self) -> Mapping[str, PreparedClaim]:
        """The prepared claims by UID; valid until the next change."""
        return self._prepared

    async def vdevices(self) -> dict[str, str]:
        """The vDevice directories, on the host, that recorded claims were given. Raises Unavailable."""
        return {
            f"claim {claim.ref.namespace}/{claim.ref.name}": mount.host_path
            for claim in await self._in_thread(self.files.load, "reading the claims' records")
            for one in claim.results
            for mount in one.edits.mounts
            if mount.container_path == VDEVICE_DIRECTORY
        }

    async def restore(self) -> None:
        """Enters in the ledger what an earlier agent has recorded, and writes their specs for the GPUs of now. Raises
        Unavailable: the records cannot be read."""
        # Charged without a check for room: their containers run with these GPUs.
        for claim in await self._in_thread(self.files.load, "reading the claims' records"):
            self._charge(claim)
        self.mig.restore({uid: claim.places for uid, claim in self._prepared.items() if claim.places})
        # The owner of the instances makes none before all are restored.
        await self.refresh(may_make=False)
        remove = partial(self.files.remove_other_specs, set(self._prepared))
        try:
            for uid in await self._in_thread(remove, "removing stale CDI specs"):
                log.info("claim_spec_removed", claim_uid=uid, why="no record of it: its claim was never prepared whole")
        except Unavailable as e:  # they harm nobody
            log.warning("claim_specs_not_removed", error=str(e), then="the next start removes them")
        log.info("claims_restored", claims=len(self._prepared))
        self._reconciler.request()

    async def run(self) -> NoReturn:
        """Keeps the specs right while the GPUs change, until cancelled."""
        await self._reconciler.run(self.refresh, self._due_s, pause_s=POLL_S)

    def _due_s(self) -> float | None:
        """Pods are listed without a change that `changed` tells of."""
        return POLL_S if None in self._has_spec.values() else None

    async def refresh(self, *, may_make: bool = True) -> None:
        """Makes the specs of claims again whose GPUs have other numbers now, and removes those of claims whose GPU is gone:
        a container that restarts would get another one's device. Writes those that may be missing. Where `may_make`,
        instances that are gone are made again: a container that restarts needs one, and nobody calls for it."""
        # A driver that is not loaded yet has said nothing of any GPU; Prepare waits for it.
        if not self.node.inventory.is_read:
            return
        again = self._again()
        # All at once: one that waits for its instance holds up no other.
        async with asyncio.TaskGroup() as group:
            for uid, claim in self._prepared.items():
                made = again(claim)
                is_gone = isinstance(made, Refused)
                is_to_make = is_gone and may_make and bool(claim.places)
                if is_to_make or not (is_gone or made is claim) or self._has_spec.get(uid) is not (not is_gone):
                    group.create_task(self._refresh(claim, may_make), name="claim's spec")

    async def _refresh(self, claim: PreparedClaim, may_make: bool) -> None:
        try:
            async with self._lock(claim.ref.uid):
                if self._prepared.get(claim.ref.uid) is claim:
                    made = await self._made_again(claim) if may_make else self._again()(claim)
                    await self._enter(claim, made, may_warn=may_make)
                    self._not_written.is_over(claim.ref.uid)
        except AgentError as e:  # its running containers need it no more, and Prepare writes it again
            if self._not_written.is_new(str(e), claim.ref.uid):
                log.error("claim_spec_not_written", claim=claim.ref.name, claim_uid=claim.ref.uid, error=str(e))

    def _again(self) -> Callable[[PreparedClaim], PreparedClaim | Refused]:
        """Makes a claim again by what the node has now, which is looked up once."""
        inventory, policy, places = self.node.gpus(), self.policy(), self.mig.gpus
        gpus = {gpu.uuid: gpu for gpu in inventory.gpus if not gpu.is_gone}

        def again(claim: PreparedClaim) -> PreparedClaim | Refused:
            made = prepare_again(claim, gpus, policy, places)
            # Another claim may have the new instance: one that the scheduler placed there when this one's pod was deleted by
            # force.
            if isinstance(made, Refused) or made.places == claim.places:
                return made
            why = shortage(made, self.node.cache.ledger(inventory), self.node.names)
            return not_yet(why) if why else made

        return again

    async def _made_again(self, claim: PreparedClaim, at_most_s: float = HOLD_S) -> PreparedClaim | Refused:
        """With its instances made again where they are gone; under its lock, or one that has ended would hold them."""
        if claim.places and (refused := await self.mig.hold(claim.ref.uid, claim.places, at_most_s)) is not None:
            return refused
        return self._again()(claim)

    async def _enter(self, claim: PreparedClaim, made: PreparedClaim | Refused, *, may_warn: bool = True) -> None:
        """Writes what a prepared claim is now, under its lock. `may_warn` its pods of a GPU that is gone: not before its
        instance was to be made again. Raises Unavailable: a file cannot be written, or the host not be prepared for another
        instance or after a boot."""
        uid, name = claim.ref.uid, claim.ref.name
        if isinstance(made, Refused):
            await self._in_thread(partial(self.files.remove_spec, uid), f"removing the CDI spec of {name}")
            before, may_warn = self._has_spec.get(uid, True), may_warn and self.node.pods.is_synced
            if before:
                log.error("claim_without_gpu", claim=name, claim_uid=uid, why=made.detail)
            if before is not False and may_warn:
                # Nobody calls for a container that restarts: the runtime alone says that it cannot resolve a device.
                key = ContainerKey(PodUid(uid), name)
                self.isolation.host.warn_of(key, "ClaimWithoutGPU", f"has no GPU now: {made.detail}")
            self._has_spec[uid] = False if may_warn else None
            return
        if (made.places, made.boot_id) != (claim.places, claim.boot_id):
            # The host's files are made from the ledger. The record is last: cut off before, all is done again.
            self._charge(made)
            await self._carry_out(made, lambda: self._charge(claim))
        else:
            # Only what changed is recorded: the record may be a newer agent's, which has more in it.
            await self._save(made, self.files.write_spec if made is claim else self.files.save)
        self._prepared[uid], self._has_spec[uid] = made, True
        if made.results != claim.results:
            why = "the driver numbers its GPUs otherwise now, or has made its instances again"
            log.warning("claim_made_again", claim=name, claim_uid=uid, why=why)

    async def prepare(self, ref: ClaimRef) -> PreparedClaim | Refused:
        """Idempotent by UID. If cancelled, nothing is charged, unless the claim was being recorded already: then it is
        charged until the kubelet asks again, or unprepares it."""
        async with self._lock(ref.uid):
            # Under a lock for each claim: the kubelet repeats a call whose answer it did not get, also while the first
            # still runs.
            known = ref.uid in self._prepared
            if not known:
                self.asked[ref.uid] = ref
            made = await self._prepare(ref, self.clock() + self.prepare_wait_s)
            if isinstance(made, PreparedClaim):
                self._refusals.pop(ref.uid, None)
                self.asked.pop(ref.uid, None)
                if not known:
                    record_prepared(self.node, made)
            else:
                if self._refusals.get(ref.uid) != made:  # the kubelet asks again and again
                    record_refused(self.node, ref, made)
                self._refusals[ref.uid] = made  # until it unprepares the claim, as it does with failed ones too
                if made.reason in FINAL and not known:
                    self.mig.release(ref.uid)
            return made

    async def unprepare(self, ref: ClaimRef) -> None:
        """Ends a claim; an unknown one has ended. Raises Unavailable: a file cannot be removed; the claim stays charged."""
        async with self._lock(ref.uid):
            # Also of an unknown one: a Prepare that was cut off may have left files.
            await self._in_thread(partial(self.files.remove, ref.uid), f"removing the files of claim {ref.name}")
            self._refusals.pop(ref.uid, None)
            self.asked.pop(ref.uid, None)
            self.mig.release(ref.uid)
            if self._release(ref.uid):
                log.info("claim_unprepared", namespace=ref.namespace, claim=ref.name, claim_uid=ref.uid)

    async def _prepare(self, ref: ClaimRef, ends_at: float) -> PreparedClaim | Refused:
        while True:
            # Counted before it is tried: what changes during the try ends the wait.
            wait: Callable[[float], Awaitable[object]] = partial(self._changes.wait, self._changes.count)
            try:
                outcome = await self._try(ref, ends_at)
            except AgentError as e:
                # What the host lacks tells nobody when it is there. But the charge that was taken back has woken all that
                # wait: two such claims would wake each other without a pause.
                outcome, wait = Refused(RefusalReason.NOT_READY, str(e)), asyncio.sleep
            if isinstance(outcome, PreparedClaim) or outcome.reason in FINAL:
                return outcome
            left_s = ends_at - self.clock()
            if left_s <= 0:
                return outcome
            await wait(min(POLL_S, left_s))

    async def _try(self, ref: ClaimRef, ends_at: float) -> PreparedClaim | Refused:
        """A refusal other than FINAL may be gone in a moment. Raises Unavailable: the host cannot be prepared, or a file not
        be written; nothing new is charged then."""
        if not self.node.inventory.is_read:
            return not_yet("the driver has not listed the GPUs yet")
        if (known := self._prepared.get(ref.uid)) is not None:
            made = await self._made_again(known, ends_at - self.clock())
            # Its containers are new, and what was made for those before the boot does not serve them.
            if isinstance(made, PreparedClaim) and made.boot_id != self.boot_id:
                made = replace(made, boot_id=self.boot_id)
            await self._enter(known, made)
            if made is known:  # its record too: the call before may have been cut off
                await self._save(known, self.files.save)
            # One of those may be the claim's.
            return not_yet(made.detail) if isinstance(made, Refused) and self.node.gpus().unreadable else made
        try:
            claim = await self._read(ref)
            pods = await self._pods_of(claim)
            await self.runtime_classes.learn(pods)
            others = await self._other_claims(claim, pods)
        except (NotFound, Corrupt) as e:
            return _invalid(str(e))
        except AgentError as e:
            return not_yet(str(e))
        # Before it is decided: the edits name the instance. It stays the claim's until the kubelet unprepares it.
        places = sorted({one.device for one in claim.results if is_placement_name(one.device) and not one.is_admin})
        if places and (refused := await self.mig.hold(ref.uid, places, ends_at - self.clock())) is not None:
            return refused
        made = self._decide_and_charge(claim, pods, others)
        if isinstance(made, Refused):
            return made
        # Charged already: the awaits that follow must not let another claim or pod take the same part.
        await self._carry_out(made, lambda: self._release(ref.uid))
        gpus = [_shown(gpu) for gpu in gpus_of(self.node, made)]
        log.info("claim_prepared", namespace=ref.namespace, claim=ref.name, claim_uid=ref.uid, pod=made.pod, gpus=gpus)
        return made

    async def _carry_out(self, made: PreparedClaim, undo: Callable[[], object]) -> None:
        """Prepares the host for what is charged, and records it. Raises Unavailable where that cannot be: `undo` has taken
        the charge back then."""
        is_saving = False
        try:
            await self._prepare_host(made)
            is_saving = True
            await self._save(made, self.files.save)
        except BaseException as e:
            # If cut off while saving, the record is still written and the next agent reads it: so it stays charged.
            if not is_saving or not isinstance(e, asyncio.CancelledError):
                undo()
            raise

    async def _save(self, claim: PreparedClaim, write: Callable[[PreparedClaim], None]) -> None:
        """Raises Unavailable."""
        await self._in_thread(partial(write, claim), f"recording claim {claim.ref.name}")

    async def _prepare_host(self, made: PreparedClaim) -> None:
        """Raises Unavailable."""
        # The files of a share that is prepared again are those of its isolation: nobody makes them where it is not in use.
        policy = self.policy()
        shares = {one.isolation for one in made.charged if not one.is_whole and ISOLATIONS[one.isolation].limits}
        if unkept := shares - {policy.isolation, *policy.allowed}:
            raise Unavailable(
                f"isolation {min(unkept)}, which limits its share, is not in use on this node any more. Allow it (setting"
                " isolations_allowed), or delete the pod and create it again"
            )
        # The names of a new instance: the check that its appearance has requested may not have run yet.
        if made.places and self.isolation.cdi_watch is not None:
            await self.isolation.cdi_watch.check()
        for keys in made.keys_by_isolation.values():
            if (refused := await self.isolation.prepare(keys)) is not None:
                raise Unavailable(refused.detail)

    async def _other_claims(self, claim: AllocatedClaim, pods: Sequence[Pod]) -> dict[str, AllocatedClaim]:
        """The other claims of this driver, by name, of containers that use this one. Raises Unavailable."""
        found: dict[str, AllocatedClaim] = {}
        for name in other_claims(claim.ref.name, pods):
            with suppress(NotFound, Corrupt):  # of another driver, or refused itself
                found[name] = await self._get(claim.ref.namespace, name)
        return found

    async def _read(self, ref: ClaimRef) -> AllocatedClaim:
        """Raises NotFound, Corrupt, Unavailable."""
        try:
            claim = await self._get(ref.namespace, ref.name)
        except NotFound as e:
            raise NotFound("it is gone from the API server") from e
        # The API server is asked by name: it may have a newer claim than the one of this call.
        if claim.ref.uid != ref.uid:
            raise NotFound("another claim has its name now")
        return claim

    async def _get(self, namespace: str, name: str) -> AllocatedClaim:
        """Raises NotFound, Corrupt, Unavailable."""
        if self._api is None:
            raise Unavailable("the agent has no connection to the API server yet")
        return self.read(await self._api.get_claim(namespace, name))

    def read(self, raw: Raw) -> AllocatedClaim:
        """Raises Corrupt: it is not of this driver and node, or asks for something impossible."""
        return read_claim(raw, pool=self.node.settings.node_name, policy=self.claim_policy)

    async def _pods_of(self, claim: AllocatedClaim) -> list[Pod]:
        """The pods for which the claim is reserved: only they say which of its requests a container gets. One may never get
        here, so after a while the known ones suffice, as when a pod joins the claim later. Raises Unavailable: none is."""

        def known() -> list[Pod]:
            found = [pod for _, uid in claim.users if (pod := self.node.pods.get(uid)) is not None]
            return [pod for pod in found if claim.ref.name in pod.claims.values()]

        with suppress(TimeoutError):
            # All of them, or the time is over: one reserved for a pod that never gets here would hold up the others.
            await self.node.pods.changes.wait_until(lambda: len(known()) == len(claim.users), self.pods_timeout_s)
        if not (pods := known()):
            raise Unavailable("the agent does not know the claim's pod yet")
        return pods

    def _decide_and_charge(
        self, claim: AllocatedClaim, pods: Sequence[Pod], others: Mapping[str, AllocatedClaim]
    ) -> PreparedClaim | Refused:
        """No await in here: two claims cannot be given the same share."""
        inventory, pool = self.node.gpus(), self.node.settings.node_name
        gpus = {device_name(gpu.uuid): gpu for gpu in inventory.gpus if not gpu.is_gone} | dict(self.mig.gpus)
        mine = self.node.gpu_split.claimable
        for result in claim.results:
            gpu = gpus.get(result.device)
            if gpu is None:
                if inventory.unreadable or is_placement_name(result.device):
                    more = ", and admin access makes no instance there" if result.is_admin else ""
                    return not_yet(f"{result.device} is not in the inventory of node {pool}{more}")
                return gone(result.device.replace("gpu-", "GPU-", 1).replace("mig-", "MIG-", 1))
            # The slice is changed a moment after the setting: the scheduler may still have chosen by the old one.
            if gpu.uuid not in mine:
                return not_yet(
                    f"{result.device} is not offered to claims on node {pool} now (settings dra.gpus, mig.on_demand)"
                )
        for name, other in others.items():
            # The pod's other claim makes its instance in another call; a container's list has the GPUs of all its claims.
            if any(is_placement_name(one.device) and one.device not in gpus for one in other.results):
                return not_yet(f"the MIG instance of claim {name}, which the pod has too, is not there yet")
        known = {name: one for name, one in others.items() if all(r.device in gpus for r in one.results)}
        made = prepare_claim(claim, gpus, pods, self.policy(), self.node.names.memory_block_mib, known)
        if isinstance(made, Refused):
            return made
        # Before the capacity: no waiting changes that two claims set the same variable.
        if why := conflict(made, self._prepared.values(), pods):
            return _invalid(why)
        for isolation in made.keys_by_isolation:
            if why := self.isolation.unavailable_reason(isolation):
                return not_yet(f"isolation {isolation}: {why}")
        if why := shortage(made, self.node.cache.ledger(inventory), self.node.names):
            return not_yet(why)
        made = replace(made, boot_id=self.boot_id)
        self._charge(made)
        return made

    def _charge(self, claim: PreparedClaim) -> None:
        self._prepared[claim.ref.uid] = claim
        for allocation in allocations_of(claim, self.node.names, self.clock()):
            self.node.cache.put(allocation)

    def _release(self, uid: str) -> bool:
        if self._prepared.pop(uid, None) is None:
            return False
        self._has_spec.pop(uid, None)
        self.node.cache.release_pod(PodUid(uid))
        self.changed()
        return True

    def _lock(self, uid: str) -> asyncio.Lock:
        # Held weakly: it goes with the last call for the claim, so that claims which were never prepared leave nothing.
        lock = self._locks.get(uid)
        if lock is None:
            lock = self._locks[uid] = asyncio.Lock()
        return lock

    async def _in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)


def _invalid(why: str) -> Refused:
    return Refused(RefusalReason.INVALID_REQUEST, f"{why}.")


def gpus_of(node: Node, claim: PreparedClaim) -> list[Gpu]:
    """Those of the claim that the inventory has, by index."""
    by_uuid = node.gpus().by_uuid()
    found = {one.gpu: by_uuid[GpuUuid(one.gpu)] for one in claim.results if one.gpu in by_uuid}
    return sorted(found.values(), key=lambda gpu: gpu.index)


def _shown(gpu: Gpu) -> str:
    return gpu.label if gpu.mig is None else f"{gpu.label} ({gpu.mig.profile})"


def record_prepared(node: Node, claim: PreparedClaim) -> None:
    node.metrics.admission(CLAIMS_RESOURCE, "allocated", "")
    gpus = gpus_of(node, claim)
    record = DecisionRecord(
        resource=CLAIMS_RESOURCE,
        outcome=Outcome.ALLOCATED,
        explanation=f"the scheduler chose GPU {', '.join(map(_shown, gpus))} for claim {claim.ref.name}",
        pod=claim.pod,
        policy="scheduler",
        gpus=tuple(gpu.index for gpu in gpus),
        labels=tuple(gpu.label for gpu in gpus),
        asked=Asked(
            cores=sum(one.cores for one in claim.results),
            memory_bytes=sum(one.memory_mib for one in claim.results) * MIB,
        ),
    )
    _record(node, claim.ref, record)


def record_refused(node: Node, ref: ClaimRef, refused: Refused) -> None:
    node.metrics.admission(CLAIMS_RESOURCE, "refused", refused.reason.value)
    reason, why = refused.reason.value, refused.detail
    record = DecisionRecord(resource=CLAIMS_RESOURCE, outcome=Outcome.REFUSED, reason=reason, explanation=why)
    _record(node, ref, record)


def _record(node: Node, ref: ClaimRef, record: DecisionRecord) -> None:
    """The pod that uses the claim is named in it."""
    named = (
        (pod, name)
        for pod in node.pods.pods()
        if pod.namespace == ref.namespace
        for name, claim in pod.claims.items()
        if claim == ref.name
    )
    pod, shown_as = next(named, (None, ref.name))
    record = replace(record, at=time.time(), namespace=ref.namespace, container=f"claim:{shown_as}")
    node.decisions.add(record, pod)
