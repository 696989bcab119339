"""Keeps the vDevice directory of every container with cores true: prepares it, polls it, refreshes it, removes it.

Level-triggered: each poll compares the allocation cache with the directories, so a lost event costs some seconds. Between
two polls of all only the pods that `changed` named are polled, and the processes of the others compared with those listed
last. A container is prepared when it is allocated (ahead.py). Containers that run when the agent starts get their socket
back in the first poll.
Nothing here waits for the runtime or the API server except the reading of container IDs, which has a task of its own;
access to files and cgroups runs in threads and is bounded.

State owned: the servers by container, what was last written, which containers were prepared recently, those that changed
or whose processes did, the refreshes under way, and the failures in the log. The processes are `ContainerProcesses`'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.delivery.volume_directory import installed_driver_version
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.agent.isolation import ISOLATIONS, isolations_in_use
from gpushare_agent.agent.isolation.ahead import PreparedAhead
from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.part import IsolationHost
from gpushare_agent.agent.isolation.tenant_files import REMOVAL_TIMEOUT_S
from gpushare_agent.agent.isolation.vdevice.container_processes import ContainerProcesses, Instance, Processes
from gpushare_agent.agent.isolation.vdevice.files import BoundSocket, VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.reconcile import (
    DesiredDirectory,
    Directories,
    VDeviceConfigs,
    Written,
)
from gpushare_agent.agent.isolation.vdevice.server import VDeviceServer
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.agent.runtime.node_probes import require_writable
from gpushare_agent.core.kit.bounded_grpc import SharedBudget
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.process import read_open_files_limit
from gpushare_agent.core.kit.supervision import ReportOnce, forever, wait_for
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.directory_names import is_nameable
from gpushare_agent.core.model.errors import AgentError, RefusalReason, Refused, Rejected, Unavailable
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.names import PodUid

if TYPE_CHECKING:
    from gpushare_agent.agent.admission.claim_pods import ClaimPods

log = structlog.get_logger(__name__)
T = TypeVar("T")

_REPORTED_FAILURES = 4096
"""More than the containers of a node."""
STOP_TIMEOUT_S = 1.0
"""A disk that hangs must not delay the end of the process."""
POLLED_SHARE = 5
"""In a burst of starts the polls of the recent ones take at most one part in so many of the time: PreStartContainer waits
for the one under way."""
WRITTEN_AT_ONCE = 64
AHEAD_DELAY_S = 0.03
FILES_TIMEOUT_S = 5.0
"""One poll of all containers, or the preparation of one pod's; the kubelet waits 30 s for PreStartContainer."""


class Intervals(Struct, frozen=True, kw_only=True):
    """Seconds between two comparisons of a container's processes: where the last one found others, where not, and where it
    was prepared less than `recent_for_s` ago; between two refreshes of a container whose programs register; between two
    reads of container IDs while one is unknown; and between two removals of stale directories. Of so many comparisons of all
    one is a poll of everything."""

    poll_s: float = 1.0
    settled_poll_s: float = 6.0
    """A program is listed when it registers, as each does at its start: these are for what does not."""
    polls_of_all: int = 5
    recent_poll_s: float = 0.2
    recent_poll_max_s: float = 0.5
    recent_for_s: float = 5.0
    refresh_s: float = 0.1
    ids_s: float = 1.0
    ids_max_periods: int = 32
    cleanup_s: float = 5.0
    settled_cleanup_s: float = 60.0
    """Between two looks for what was put aside, while this agent has put nothing aside: another may have left it."""

    def recent_pause_s(self, age_s: float, took_s: float) -> float:
        """Between two polls of those prepared recently, the last of them `age_s` ago; the one before took `took_s`."""
        # PreStartContainer waits for a poll under way: of 100 starts at once it took 80 to 128 ms before polls had a fifth
        # of the time, 25 to 46 ms with it.
        return max(self.recent_poll_s, min(age_s / 2, self.recent_poll_max_s), (POLLED_SHARE - 1) * took_s)


UNREAD = Intervals(settled_poll_s=30.0, polls_of_all=1, recent_for_s=0.0)
"""Where no isolation in use reads the lists of processes: only the polls of all containers. The lists are then for
containers of an isolation that was in use before, and for programs that register."""


class VirtualManager:
    """`prepare` at any time, `run` once."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        files: VDeviceFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: ClaimPods,
        configs: VDeviceConfigs,
        processes: ContainerProcesses,
        registered: Callable[[str], None],
        clock: Callable[[], float],
        intervals: Intervals | None = None,
        only: frozenset[PodUid] | None = None,
    ) -> None:
        """`only`: the pods and claims that have a directory, where no other gets one; None: all."""
        self.files = files
        self._allocations = allocations
        self._pods = pods
        self._configs = configs
        self._processes = processes
        self.registered = registered
        self.owner_of, self.note_process = processes.owner_of, processes.note_process
        self.identify = processes.cgroups.identify_in_thread
        """The container of a process of this node; None if that cannot be known. Raises Unavailable: call again later."""
        self._clock = clock
        self._intervals = intervals or Intervals()
        self._only = only
        advice = f"Check the disk of {files.root}; it is tried again."
        self._thread = DaemonThread("vdevice-files", advice=advice)
        self._removal = DaemonThread("vdevice-removal", advice=advice)
        self._removal_failures = ReportOnce()
        self._has_aside = asyncio.Event()
        self._shared = SharedBudget(clock=clock, open_files=read_open_files_limit()[0])
        self._servers: dict[ContainerKey, VDeviceServer] = {}
        self._written: dict[ContainerKey, Written] = {}
        self._failures = ReportOnce(_REPORTED_FAILURES)
        self._lock = asyncio.Lock()
        self._is_closed = False
        self.ahead = PreparedAhead(self._prepare_ahead, delay_s=AHEAD_DELAY_S, clock=clock)
        self._has_root = False
        self._prepared_at: dict[ContainerKey, float] = {}
        self._has_recent = asyncio.Event()
        self._has_changed = True
        self._keys: dict[PodUid, set[ContainerKey]] = {}
        self._changed: set[PodUid] = set()
        self._unsettled: set[ContainerKey] = set()
        self._may_lack_ids = asyncio.Event()
        self._foreign = ReportOnce()
        self._refreshes: dict[ContainerKey, _Refreshes] = {}

    async def check(self) -> None:
        """The tree is there, or is made; not looked at again once it was. Raises Unavailable."""
        if not self._has_root:
            await self.in_thread(self.files.make_root, f"preparing {self.files.root}")
            self._has_root = True

    async def look(self) -> None:
        """Whether `check` and `prepare` can write. Writes nothing that stays. Raises Unavailable."""
        try:
            await self.in_thread(partial(require_writable, self.files.root), f"probing {self.files.root}")
        except Unavailable as e:
            raise Unavailable(f"{e}: no vDevice directory can be made there (setting virtual_manager.path)") from e

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Makes directory, files and socket of containers that are about to start. The list of processes of a previous
        instance is emptied."""
        # The API server admits no other names, and a directory of another name could lie anywhere.
        if invalid := sorted(key for key in keys if not is_nameable(key)):
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"no directory can be named after pod {invalid[0].pod_uid!r}, container {invalid[0].container!r}.",
            )
        desired = self._desired(keys)
        ahead = [key for key in desired if self.ahead.take(key)]
        # Prepared ahead, and still as it is to be: nothing waits for a thread, which in a burst gets no processor (107 ms
        # before, 4 ms after).
        is_done = len(ahead) == len(desired) and all(self._is_written(desired[key], ()) for key in ahead)
        for key in desired:
            # Even where all was prepared: the processes and the ID known so far are of the instance before.
            self._processes.begin_instance(key)
            self._prepared_at[key] = self._clock()
            self._unsettled.add(key)
            self._has_recent.set()
            self._may_lack_ids.set()
        self._has_aside.set()  # a part may have put the directory of the instance before aside
        error = None if is_done else await self._prepare(desired)
        if error is None:
            return None
        log.error("vdevice_not_prepared", error=str(error))
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"the container's vDevice directory cannot be prepared: {error}. The kubelet tries again.",
        )

    async def enforce(self, key: ContainerKey) -> None:
        """Writes vcuda.config of a share whose size was changed; the next poll would do so too. Raises AgentError."""
        processes = await self._processes.read([key])
        if error := (await self._reconcile(self._desired([key]), processes)).get(key):
            raise error

    async def run(self) -> None:
        """Until cancelled (its tasks are endless); then every server stops. A poll that fails is logged and repeated."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever("vdevices ahead", self.ahead.run), name="vdevices ahead")
                group.create_task(forever("vdevice polls", self._run_polls), name="vdevice polls")
                group.create_task(forever("container ids", self._run_ids), name="container ids")
                group.create_task(forever("vdevice removal", self._run_removal), name="vdevice removal")
        finally:
            # Last, when no task can start a server any more.
            await self._close(STOP_TIMEOUT_S)

    def changed(self, uid: PodUid | None = None) -> None:
        """The pod or claim, an allocation of it, or (None) a GPU: the next poll is one of it, or of everything, and soon."""
        if uid is None:
            self._has_changed = True
        elif keys := self._keys.get(uid, set()) | self._pods.shares_of(uid).keys():
            self._keys[uid] = keys
            self._changed.add(uid)
        else:
            return  # a pod without a share, or whose allocation is still to come
        self._has_recent.set()
        self._may_lack_ids.set()

    async def poll(self) -> None:
        """Reconciles every container that has cores, and stops the servers of all others. Raises Unavailable."""
        # Also those for which a registration, or a preparation, has written after their release was polled.
        kept = (*self._keys.values(), self._servers, self._written, self._refreshes, self._processes.keys())
        await self._poll_of(None, {key for keys in kept for key in keys})
        self._unsettled |= {key for key, _ in self._processes.unknown()}

    async def _poll_of(self, keys: Collection[ContainerKey] | None, known: Collection[ContainerKey]) -> None:
        """These containers, None: all; of the known ones some may be gone."""
        desired = self._desired(keys)
        for key in desired:
            self._keys.setdefault(key.pod_uid, set()).add(key)
        gone = set(known) - desired.keys()
        self.ahead.keep_only(lambda key: key not in gone)
        if gone:
            # Before the poll: a socket of a container that is gone must not answer for the time that writing takes.
            await self._forget(gone)
            desired = self._desired(keys)  # an allocation may have come while servers stopped
        await self._poll_containers(desired, is_of_all=keys is None)

    async def remove_stale(self) -> None:
        """Removes the directories of pods that neither the pod store nor an allocation names any more.

        A directory with entries that the agent never makes is reported once and stays. Raises Unavailable.
        """
        present = await self.in_thread(self.files.pod_names, f"listing {self.files.root}")
        for uid in sorted(uid for uid in present if self._is_stale(uid)):
            try:
                async with self._lock:  # asked again, once no reconciliation runs
                    remove = partial(self.files.remove_pod, uid)
                    is_removed = self._is_stale(uid) and await self.in_thread(remove, f"removing {uid}")
                if is_removed:
                    self._has_aside.set()
                    log.info("vdevice_directory_removed", pod_uid=uid)
            except Rejected as e:
                # Once, at error: only a person can say whose directory it is.
                if self._foreign.is_new(str(e), uid):
                    log.error("vdevice_directory_not_ours", error=str(e))

    async def remove_aside(self) -> None:
        """Removes what tenants have written, one file after the other: they decide how long that takes. One that cannot be
        removed does not stop the others, and is logged once. Raises Unavailable."""
        self._has_aside.clear()
        try:
            names = await self._removal.call(self.files.list_aside, "listing what was put aside", REMOVAL_TIMEOUT_S)
        except AgentError:
            self._has_aside.set()
            raise
        for name in names:
            self._has_aside.set()  # it may stay: one that a process has open is shortened at each call
            try:
                await self._removal.call(partial(self.files.remove_aside, name), f"removing {name}", REMOVAL_TIMEOUT_S)
            except AgentError as e:
                if self._removal_failures.is_new(str(e), name):
                    log.warning("vdevice_file_not_removed", error=str(e), then="it is tried again")

    async def refresh(self, key: ContainerKey, container_id: str | None, caller: PeerIdentity | None = None) -> None:
        """Brings the files of a container that registers up to date; of a claim the `caller` is one of its containers. Of
        many concurrent calls two are carried out: the one under way, and one that begins after the last of them came, not
        before `refresh_s` has passed. Raises AgentError."""
        if self._pods.sharers(key) is not None:
            if caller is not None and caller.container_id is not None:
                self._processes.note_sharer(key, caller.container_id, caller.pod_uid)
            container_id = None  # its files are at the top of the directory, which is several containers'
        # Before the lock: a refresh that began after this moment has seen the caller.
        came_at = self._clock()
        refreshes = self._refreshes.setdefault(key, _Refreshes())
        async with refreshes.lock:
            if refreshes.covers(came_at, container_id):
                return
            # A tenant may register in a loop: ten refreshes a second are all that it can cause.
            await asyncio.sleep(max(0.0, refreshes.begun_at + self._intervals.refresh_s - self._clock()))
            refreshes.begun_at, refreshes.is_done = self._clock(), False
            await self._refresh(key, container_id)
            refreshes.is_done, refreshes.container_id = True, container_id

    async def _refresh(self, key: ContainerKey, container_id: str | None) -> None:
        # The container runs, so what was prepared ahead is in use: polls may list its processes from now on.
        self.ahead.take(key)
        allocation = self._allocations().get(key)
        # The pod ended while its program registered.
        if allocation is None:
            raise Unavailable(f"container {key.container} of pod {key.pod_uid} has no allocation any more")
        if container_id is not None:
            if not self._processes.note(key, container_id):
                raise Unavailable(f"container {key.container} is being restarted: register again when it runs")
        elif not self._processes.is_known(key):
            await self._processes.read_ids([key])
        processes = await self._processes.read([key])
        if key not in processes and self._processes.is_awaited(key):
            raise Unavailable(f"the processes of container {key.container} are not known yet: register again")
        if error := (await self._reconcile({key: allocation}, processes)).get(key):
            raise error
        if container_id is not None:
            await self.in_thread(partial(self.files.copy_for_id, key, container_id), f"copying for {container_id}")

    async def _prepare(self, desired: Mapping[ContainerKey, Allocation]) -> AgentError | None:
        try:
            errors = await self._reconcile(desired, None)
        except AgentError as e:
            return e
        return next(iter(errors.values()), None)

    async def _prepare_ahead(self, keys: Sequence[ContainerKey]) -> Collection[ContainerKey]:
        desired = self._desired(keys)
        return desired if await self._prepare(desired) is None else ()

    async def _reconcile(
        self, allocations: Mapping[ContainerKey, Allocation], processes: Mapping[ContainerKey, Processes] | None
    ) -> dict[ContainerKey, AgentError]:
        """Makes directory, files and server of each container what its allocation demands; the errors of those where that
        failed. `processes` None: the containers have none yet. In this order:

        | | container | action |
        |---|---|---|
        | 1 | config, PIDs, server and the files' identities are as last written | none |
        | 2 | any other, also what others have changed | directory, PIDs and config are written where they differ |
        | 3 | writing failed | a server that runs stays |
        | 4 | written, and its server's socket is in place | none |
        | 5 | written, and its server's socket is missing or replaced | a new one is bound, the server stops, then as 6 |
        | 6 | written, without a server | a new server starts on the new socket |

        Raises:
            Unavailable: the disk does not answer, or the agent is shutting down.
        """
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the agent is shutting down")
            desired = [
                self._desired_directory(allocations[key], self._pids_of(key, processes)) for key in sorted(allocations)
            ]
            if not desired:
                return {}
            directories = Directories(self.files, desired)
            try:
                return await self._written_and_served(directories)
            # Cancellation too: the thread goes on. What it binds later must not stay without a server, and what it writes is
            # not known.
            except BaseException:
                directories.close()
                for one in desired:
                    self._written.pop(one.key, None)
                raise

    async def _written_and_served(self, directories: Directories) -> dict[ContainerKey, AgentError]:
        outcomes = await self.in_thread(directories.write, f"writing {self.files.root}")
        # What is on the disk where it failed is not known: the next poll compares all of it.
        self._written |= {key: one for key, one in outcomes.items() if isinstance(one, Written)}
        errors = {key: one for key, one in outcomes.items() if isinstance(one, AgentError)}
        for key in errors:
            self._written.pop(key, None)
        # Of those that failed the server stays: its socket may still be the one that the container has.
        lacking = list(directories.bound)
        await self._stop([key for key in lacking if key in self._servers])
        for key in lacking:
            if (error := await self._start_server(key, directories.bound.pop(key))) is not None:
                errors[key] = error
        for key in outcomes.keys() - errors.keys():
            if self._failures.is_over(_subject(key)):
                log.info("vdevice_written_again", pod_uid=key.pod_uid, container=key.container)
        return errors

    def _is_written(self, allocation: Allocation, pids: tuple[int, ...] | None) -> bool:
        """The container's directory is as it is to be, by what was last written; without processes as at its start."""
        new = self._desired_directory(allocation, pids)
        is_same = new.before is not None and new.before.config == new.config and pids in (None, new.before.pids)
        return is_same and new.is_config_known and new.socket is not None

    async def _forget(self, keys: Collection[ContainerKey]) -> None:
        """Stops the servers of containers that have no share any more, and forgets all that is kept of them."""
        self._processes.forget(keys)
        self._configs.forget(keys)
        for key in keys:
            self._prepared_at.pop(key, None)
            self._refreshes.pop(key, None)
            self._unsettled.discard(key)
            self._keys[key.pod_uid] = self._keys.get(key.pod_uid, set()) - {key}
            if not self._keys[key.pod_uid]:
                del self._keys[key.pod_uid]
        async with self._lock:  # a reconciliation under way may start such a server, which nobody would stop any more
            for key in keys:
                if self._written.pop(key, None) is not None:
                    self._failures.is_over(_subject(key))
            await self._stop([key for key in keys if key in self._servers])

    async def _close(self, timeout_s: float) -> None:
        """Stops every server; `_reconcile` raises from now on. Where a disk hangs for so long the sockets' files stay."""
        # Before the lock: a reconciliation that waits for it must find the end.
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s), self._lock:  # a reconciliation under way may start a server
                # One that was given up may still write: it must not bind in place of the next agent of this process.
                await self.in_thread(lambda: None, "ending what is written")
                await self._stop(list(self._servers))
        except (TimeoutError, Unavailable):
            log.warning("vdevice_servers_left", count=len(self._servers), then="the next start replaces their sockets")
            async with asyncio.TaskGroup() as group:  # after a reload the process goes on
                for server in self._servers.values():
                    group.create_task(server.close(), name=f"close {server.key.container}")

    def _desired_directory(self, allocation: Allocation, pids: tuple[int, ...] | None) -> DesiredDirectory:
        pod, server = self._pods.get(allocation.key.pod_uid), self._servers.get(allocation.key)
        return DesiredDirectory(
            key=allocation.key,
            config=self._configs.config(allocation, pod),
            is_config_known=pod is not None or allocation.claim is not None,
            pids=pids,
            before=self._written.get(allocation.key),
            socket=server.identity if server is not None else None,
        )

    def _pids_of(self, key: ContainerKey, processes: Mapping[ContainerKey, Processes] | None) -> tuple[int, ...] | None:
        """None where they are unknown: a list from before the container was prepared again does not count."""
        if processes is None:
            return ()
        found = processes.get(key)
        return found.pids if found is not None and self._processes.is_current(key, found) else None

    async def _start_server(self, key: ContainerKey, bound: BoundSocket) -> AgentError | None:
        server = VDeviceServer(key, self, is_claims=self._pods.sharers(key) is not None, shared=self._shared)
        self._servers[key] = server  # before it starts: `close` stops what is in here
        try:
            await server.start(bound)
        except AgentError as e:
            return e
        if self._is_closed:  # while it started; `close` may not have waited
            await self._stop_one(server)
        return None

    async def _stop(self, keys: Iterable[ContainerKey]) -> None:
        """All at once: with peers that do not read each may take half a second."""
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self._stop_one(self._servers.pop(key)), name=f"stop {key.container}")

    async def _stop_one(self, server: VDeviceServer) -> None:
        try:
            # The directory of a pod that is gone is removed as a whole.
            await (server.close() if self._is_stale(server.key.pod_uid) else server.stop())
        except AgentError as e:
            log.warning("vdevice_socket_left", error=str(e), pod_uid=server.key.pod_uid, container=server.key.container)

    async def _run_polls(self) -> NoReturn:
        cleaned_at, compared_at, comparisons = float("-inf"), float("-inf"), 0
        while True:
            begun_at = self._clock()
            is_due = begun_at - compared_at >= self._intervals.settled_poll_s
            if self._has_changed or (is_due and comparisons % self._intervals.polls_of_all == 0):
                self._has_changed, comparisons = False, 0
                self._changed.clear()
                await self._try(self.poll)
            else:
                await self._try(partial(self._poll_changed, is_of_all=is_due))
            if is_due or not comparisons:
                compared_at, comparisons = self._clock(), comparisons + 1
            if self._pods.is_synced and self._clock() - cleaned_at >= self._intervals.cleanup_s:
                cleaned_at = self._clock()
                await self._try(self.remove_stale)
            await self._pause(self._clock() - begun_at)

    async def _run_removal(self) -> NoReturn:
        while True:
            await self._try(self.remove_aside)
            await asyncio.sleep(self._intervals.cleanup_s)
            await wait_for(self._has_aside, self._intervals.settled_cleanup_s)

    async def _pause(self, took_s: float) -> None:
        """Until the next poll. Those that were prepared recently are compared more often, because the in-container library
        counts only processes that are in the list."""
        polled_at = self._clock()
        while (left_s := polled_at + self._period_s() - self._clock()) > 0:
            now, recent_for_s = self._clock(), self._intervals.recent_for_s
            young = [key for key, prepared_at in self._prepared_at.items() if now - prepared_at < recent_for_s]
            # Without those that have ended, which the next poll forgets.
            if recent := self._desired(young):
                age_s = now - max(self._prepared_at[key] for key in recent)
                await asyncio.sleep(min(left_s, self._intervals.recent_pause_s(age_s, took_s)))
                self._unsettled |= recent.keys()
                return
            self._prepared_at.clear()
            self._has_recent.clear()
            if not await wait_for(self._has_recent, left_s):
                return

    def _period_s(self) -> float:
        is_settled = not (self._has_changed or self._changed or self._unsettled)
        return self._intervals.settled_poll_s if is_settled else self._intervals.poll_s

    async def _poll_changed(self, *, is_of_all: bool) -> None:
        """The containers of pods that changed, and those with other processes than before."""
        of_changed = {key for uid in self._changed for key in self._keys.get(uid, ())}
        self._changed.clear()
        compared, self._unsettled = self._unsettled - of_changed, set()
        if keys := of_changed | await self._processes.changed(None if is_of_all else compared):
            self._unsettled |= keys  # what has changed is compared soon again
            await self._poll_of(keys, keys)

    def _unlike_written(
        self, keys: Collection[ContainerKey], processes: Mapping[ContainerKey, Processes]
    ) -> dict[ContainerKey, Allocation]:
        """Those whose files have to hold something else than what was written last. Whether another program has changed the
        files themselves is compared by the polls of all."""
        desired = self._desired(keys).items()
        return {key: one for key, one in desired if not self._is_written(one, self._pids_of(key, processes))}

    async def _poll_containers(self, keys: Collection[ContainerKey], *, is_of_all: bool) -> None:
        # Those that have not started have no processes; their pod's sandbox is none of theirs.
        processes = await self._processes.read(set(keys) - self.ahead.prepared)
        await self._write(self._desired(keys) if is_of_all else self._unlike_written(keys, processes), processes)

    async def _write(
        self, allocations: Mapping[ContainerKey, Allocation], processes: Mapping[ContainerKey, Processes]
    ) -> None:
        self._may_lack_ids.set()  # of those that have ended
        keys, errors = sorted(allocations), dict[ContainerKey, AgentError]()
        # In parts, each bounded in time: a restarted agent has to write for all, and containers that start wait for a part.
        for first in range(0, len(keys), WRITTEN_AT_ONCE):
            part = {key: allocations[key] for key in keys[first : first + WRITTEN_AT_ONCE]}
            errors |= await self._reconcile(part, processes)
        for key, error in errors.items():
            if self._failures.is_new(str(error), _subject(key)):  # once for as long as its text stays the same
                log.warning("vdevice_not_written", error=str(error), pod_uid=key.pod_uid, container=key.container)
        # What could not be written is tried at the next poll, not five later.
        self._changed |= {key.pod_uid for key in errors}

    async def _run_ids(self) -> NoReturn:
        """Reads container IDs while one is unknown; one that stays unknown (of an ended init container, say) ever less
        often."""
        unknown: frozenset[Instance] = frozenset()
        periods, periods_left = 1, 0
        while True:
            if not unknown:
                await self._may_lack_ids.wait()
                self._may_lack_ids.clear()
            # Also before the first question for a container: when it was prepared it has still to start.
            await asyncio.sleep(self._intervals.ids_s)
            requested, unknown = unknown, self._processes.unknown()
            # A container that is new, or started again, is asked for at once; the others keep their longer periods.
            if unknown - requested:
                periods, periods_left = 1, 0
            if unknown and periods_left <= 0:
                await self._processes.read_ids()
                periods_left, periods = periods, min(2 * periods, self._intervals.ids_max_periods)
            periods_left -= 1

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except AgentError as e:
            log.warning("vdevice_poll_failed", error=str(e), then="the next poll tries again")
            self._has_changed = True

    def _is_stale(self, uid: PodUid) -> bool:
        # Both: the pod store may be late for a pod that was allocated a moment ago, and claims are in no pod store.
        # Before the first list of pods every one would look stale.
        return self._pods.is_synced and self._pods.get(uid) is None and not self._pods.shares_of(uid)

    def _desired(self, keys: Collection[ContainerKey] | None = None) -> dict[ContainerKey, Allocation]:
        """The containers that need a directory, of `keys` if it is given: all of pods, because an annotation may change the
        isolation until they start, and claims under one that mounts it."""
        found = dict(self._allocations() if keys is None else {})
        for uid in {key.pod_uid for key in keys or ()}:
            found |= {key: one for key, one in self._pods.shares_of(uid).items() if key in (keys or ())}
        found = {key: one for key, one in found.items() if self._only is None or key.pod_uid in self._only}
        return {key: one for key, one in found.items() if _has_directory(one) and is_nameable(key)}

    def is_sharer(self, key: ContainerKey, user: ContainerKey) -> bool:
        """Whether the second, a container, uses the claim that the first names. Raises Unavailable: not known yet."""
        if self._pods.get(user.pod_uid) is None:
            # Not "no": a false answer would refuse a program that starts before the watch has brought its pod.
            raise Unavailable(f"pod {user.pod_uid} is not known yet: register again")
        return user in (self._pods.sharers(key) or ())

    async def in_thread(self, blocking: Callable[[], T], what: str) -> T:
        """What may block, bounded; `what` names it. Raises Unavailable if there is no answer."""
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)


def _subject(key: ContainerKey) -> str:
    return f"{key.pod_uid}/{key.container}"


def _has_directory(allocation: Allocation) -> bool:
    if allocation.claim is not None:
        return ISOLATIONS[allocation.claim.isolation].mounts_vdevice
    # All pods with cores, whatever isolation they name: their annotation may change until they start.
    return bool(allocation.bound_ids) and not allocation.started_by


class _Refreshes(Struct):
    """The refreshes of one container: the lock of the one under way, when the last one began, whether it succeeded, and for
    which ID."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun_at: float = float("-inf")
    is_done: bool = False
    container_id: str | None = None

    def covers(self, came_at: float, container_id: str | None) -> bool:
        return self.is_done and self.begun_at >= came_at and self.container_id == container_id


def build_virtual_manager(
    host: IsolationHost, module: KernelModule | None, only: frozenset[PodUid] | None = None
) -> VirtualManager:
    """Not started."""
    node = host.node
    is_read = any(one.reads_processes for one in isolations_in_use(node.settings))
    return VirtualManager(
        files=VDeviceFiles(node.settings.virtual_manager.path),
        allocations=node.claim_pods.shares,
        pods=node.claim_pods,
        configs=VDeviceConfigs(
            inventory=node.gpus,
            driver_version=_driver_version(node, host.volumes),
            names=node.names,
            on_problem=lambda pod, text: host.warn(pod, "CoreLimitIgnored", text),
        ),
        processes=ContainerProcesses(
            ContainerIds(host.runtime, node.pods),
            host.cgroups,
            clock=time.monotonic,
            module=module,
            sharers=node.claim_pods.sharers,
        ),
        registered=node.metrics.vdevice_registered,
        clock=time.monotonic,
        intervals=Intervals() if is_read else UNREAD,
        only=only,
    )


def _driver_version(node: Node, volumes: Mapping[VolumeName, DriverVolume]) -> Callable[[], str]:
    """The version of the libraries that containers get, as they are at the agent's start, else as the driver says."""
    found = [version for volume in volumes.values() if (version := installed_driver_version(volume)) is not None]
    installed = ".".join(map(str, max(found))) if found else ""
    return lambda: installed or node.gpus().driver_version
