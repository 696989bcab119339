"""Keeps the vDevice directory of every container that has cores: its files, its socket, and who may use it.

Level, not edge: each round compares the allocation cache with what is there, so a lost event costs a second. A container
is prepared before it starts (PreStartContainer waits for it); containers that run when the agent starts get their socket
back in the first round. Nothing here waits for the runtime or the API server but the learning of container IDs, which has
a task of its own; what touches files or cgroups runs in threads and is bounded.

State owned: the servers by container, and what was last written.
Format: docs/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

import structlog

from gpushare_agent.isolation.vcuda.config_format import is_container_name, is_pod_uid
from gpushare_agent.isolation.vcuda.configs import VDeviceConfigs
from gpushare_agent.isolation.vcuda.container_processes import ContainerProcesses, Life, Processes
from gpushare_agent.isolation.vcuda.files import VDeviceFiles
from gpushare_agent.isolation.vcuda.server import CountsRegistrations, IdentifyPeer, VDeviceServer
from gpushare_agent.isolation.vcuda.upkeep import Settled, Upkeep, Upkept, Written, disturbed, keep_up
from gpushare_agent.kit.bounded_grpc import SharedBudget
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.supervision import forever
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused, Rejected, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 1.0
"""A disk that hangs must not hold up the end of the process."""
FILES_TIMEOUT_S = 5.0
"""One round over all containers, or the preparing of one pod's; the kubelet waits 30 s for PreStartContainer."""


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualManagerPace:
    """Seconds: between two looks at the processes, also of a container prepared less than `young_for_s` ago; between two
    questions for container IDs that are not known; and between two looks for directories of pods that are gone."""

    round_s: float = 1.0
    young_round_s: float = 0.2
    young_for_s: float = 5.0
    ids_s: float = 1.0
    ids_slowest_rounds: int = 32
    cleaning_s: float = 5.0


class VirtualManager:
    """`prepare` at any time, `run` once."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        files: VDeviceFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: Pods,
        configs: VDeviceConfigs,
        processes: ContainerProcesses,
        identify: IdentifyPeer,
        metrics: CountsRegistrations,
        clock: Callable[[], float],
        pace: VirtualManagerPace | None = None,
    ) -> None:
        self._files = files
        self._allocations = allocations
        self._pods = pods
        self._configs = configs
        self._processes = processes
        self._identify = identify
        self._metrics = metrics
        self._clock = clock
        self._pace = pace or VirtualManagerPace()
        self._thread = DaemonThread("vdevice-files", advice=f"Check the disk of {files.root}; it is tried again.")
        self._servers: dict[ContainerKey, VDeviceServer] = {}
        self._prepared_at: dict[ContainerKey, float] = {}
        self._has_young = asyncio.Event()
        self._written: dict[ContainerKey, Written] = {}
        self._faults: dict[ContainerKey, str] = {}
        self._shared = SharedBudget(clock=clock)
        self._not_ours: set[str] = set()
        self._refreshes: dict[ContainerKey, _Refreshes] = {}
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Make directory, files and socket of containers that are about to start. Nothing of an earlier life is left in
        the list of processes."""
        wanted = self._wanted()
        if strange := sorted(key for key in keys if not _is_nameable(key)):
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"no directory can be named after pod {strange[0].pod_uid!r}, container {strange[0].container!r}.",
            )
        held = [wanted[key] for key in sorted(keys) if key in wanted]
        for one in held:
            self._processes.begin_life(one.key)
            self._prepared_at[one.key] = self._clock()
            self._has_young.set()
        try:
            kept = await self._keep({one.key: one for one in held}, None)
            error = next((one.error for one in kept if one.error is not None), None)
        except AgentError as e:
            error = e
        if error is None:
            return None
        log.error("vdevice_not_prepared", error=str(error))
        return Refused(
            reason=RefusalReason.NOT_READY,
            detail=f"the container's vDevice directory cannot be prepared: {error}. The kubelet tries again.",
        )

    async def run(self) -> None:
        """Until cancelled (its tasks are endless); then every server stops. A round that fails is logged and tried again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever("vdevice rounds", self._rounds), name="vdevice rounds")
                group.create_task(forever("container ids", self._learn), name="container ids")
        finally:
            self._is_closed = True
            try:
                async with (
                    asyncio.timeout(STOP_TIMEOUT_S),
                    self._lock,
                ):  # what is being prepared right now has a server too
                    await self._stop(list(self._servers))
            except TimeoutError:
                log.warning(
                    "vdevice_servers_left", count=len(self._servers), then="the next start replaces their sockets"
                )

    async def _rounds(self) -> NoReturn:
        cleaned_at = float("-inf")
        while True:
            await self._try(self.look)
            if self._pods.is_synced and self._clock() - cleaned_at >= self._pace.cleaning_s:
                cleaned_at = self._clock()
                await self._try(self.clean)
            await self._rest()

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except AgentError as e:
            log.warning("vdevice_round_failed", error=str(e), then="the next round tries again")

    async def _rest(self) -> None:
        """Until the next round; meanwhile those that have just been prepared are looked at more often: the library
        counts only processes that are in the list."""
        until = self._clock() + self._pace.round_s
        while (left_s := until - self._clock()) > 0:
            young = [key for key, at in self._prepared_at.items() if self._clock() - at < self._pace.young_for_s]
            if young:
                await asyncio.sleep(min(left_s, self._pace.young_round_s))
                await self._try(partial(self._look_at, young))
                continue
            self._prepared_at.clear()
            self._has_young.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._has_young.wait()
            except TimeoutError:
                return

    async def _learn(self) -> NoReturn:
        """An ID that nobody tells for long (of an init container that is over, say) is asked for ever more seldom."""
        asked: frozenset[Life] = frozenset()
        rounds, rounds_left = 1, 0
        while True:
            unknown = self._processes.unknown(self._wanted())
            if unknown - asked:
                rounds, rounds_left = 1, 0
            if unknown and rounds_left <= 0:
                await self._processes.learn()
                rounds_left, rounds = rounds, min(2 * rounds, self._pace.ids_slowest_rounds)
            asked, rounds_left = unknown, rounds_left - 1
            await asyncio.sleep(self._pace.ids_s)

    async def look(self) -> None:
        """One round: every container with cores is served and its files say what is so now; all others are not.

        Raises:
            Unavailable: the file system does not answer.
        """
        wanted = self._wanted()
        known: dict[ContainerKey, Any]
        for known in (self._prepared_at, self._written, self._faults, self._refreshes):
            for key in [key for key in known if key not in wanted]:
                del known[key]
        self._processes.keep_only(wanted)
        self._configs.keep_only(wanted)
        await self._stop([key for key in self._servers if key not in wanted])
        await self._look_at(self._wanted())

    async def _look_at(self, keys: Collection[ContainerKey]) -> None:
        processes = await self._processes.read(keys)
        self._note_faults(
            await self._keep({key: held for key, held in self._wanted().items() if key in keys}, processes)
        )

    async def clean(self) -> None:
        """Remove the directories of pods that are gone, by the pod store's word. Raises Unavailable."""
        there = await self._in_thread(self._files.pod_names, f"listing {self._files.root}")
        living = {key.pod_uid for key in self._allocations()}
        for uid in sorted(uid for uid in there if uid not in living):
            async with self._lock:  # whatever is prepared meanwhile keeps its directory
                if self._pods.get(uid) is not None or any(key.pod_uid == uid for key in self._allocations()):
                    continue
                try:
                    if await self._in_thread(partial(self._files.remove_pod, uid), f"removing {uid}"):
                        log.info("vdevice_directory_removed", pod_uid=uid)
                except Rejected as e:
                    if uid not in self._not_ours:
                        log.error("vdevice_directory_not_ours", error=str(e))
                    self._not_ours.add(uid)

    async def refresh(self, key: ContainerKey, container_id: str | None) -> None:
        """A client registered: bring its files up to date now. Of many that come at once two are carried out: the one under
        way, and one that begins after the last of them came. Raises AgentError."""
        came_at = self._clock()
        queue = self._refreshes.setdefault(key, _Refreshes())
        async with queue.turn:
            if queue.begun_at is None or queue.begun_at < came_at or queue.container_id != container_id:
                queue.begun_at = None
                begun_at = self._clock()
                await self._refresh(key, container_id)
                queue.begun_at, queue.container_id = begun_at, container_id

    async def _refresh(self, key: ContainerKey, container_id: str | None) -> None:
        held = self._allocations().get(key)
        if held is None:
            raise Unavailable(f"container {key.container} of pod {key.pod_uid} holds nothing any more")
        if container_id is not None:
            if not self._processes.note(key, container_id):
                raise Unavailable(f"container {key.container} is being started anew: register again when it runs")
        elif not self._processes.is_known(key):
            await self._processes.learn()
        for one in await self._keep({key: held}, await self._processes.read([key])):
            if one.error is not None:
                raise one.error
        if container_id is not None:
            await self._in_thread(partial(self._files.copy_for_id, key, container_id), f"copying for {container_id}")

    def _wanted(self) -> dict[ContainerKey, Allocation]:
        allocations = self._allocations().items()
        return {key: held for key, held in allocations if (held.vcore_ids or held.gpu_mem_ids) and _is_nameable(key)}

    async def _keep(
        self, wanted: Mapping[ContainerKey, Allocation], processes: Mapping[ContainerKey, Processes] | None
    ) -> list[Upkept]:
        """Files first, then the servers of those that have none. `processes` None: there are none yet.

        Raises:
            Unavailable: the disk does not answer, or the agent is shutting down.
        """
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the agent is shutting down")
            settled, work = self._sorted_out(wanted, processes)
            if settled:
                touched = await self._in_thread(
                    partial(disturbed, self._files, settled), f"looking at {self._files.root}"
                )
                work += [self._upkeep(wanted[key], self._pids_of(key, processes)) for key in touched]
            if not work:
                return []
            kept = await self._in_thread(partial(keep_up, self._files, work), f"keeping {self._files.root}")
            stale = [one.key for one in kept if one.error is None and not one.is_served and one.key in self._servers]
            await self._stop(stale)  # together: peers that do not read make each take half a second
            return [await self._served(one) for one in kept]

    def _sorted_out(
        self, wanted: Mapping[ContainerKey, Allocation], processes: Mapping[ContainerKey, Processes] | None
    ) -> tuple[list[Settled], list[Upkeep]]:
        """Those of which nothing has changed as far as the agent knows, and those with something to do."""
        settled, work = [], []
        for key, held in sorted(wanted.items()):
            pids = self._pids_of(key, processes)
            before, server, pod = self._written.get(key), self._servers.get(key), self._pods.get(key.pod_uid)
            identity = server.identity if server is not None else None
            if (
                before is not None
                and identity is not None
                and pod is not None
                and before.config == self._configs.config(held, pod)
                and (pids is None or pids == before.pids)
                and key not in self._faults
            ):
                settled.append(Settled(key=key, stamps=before.stamps, socket=identity))
            else:
                work.append(self._upkeep(held, pids))
        return settled, work

    async def _served(self, one: Upkept) -> Upkept:
        if one.written is not None:
            self._written[one.key] = one.written
        else:
            self._written.pop(one.key, None)
        if one.error is not None or one.is_served:
            return one
        server = VDeviceServer(
            one.key,
            sockets=self._files,
            identify=self._identify,
            find_container=self._processes.owner_of,
            refresh=self.refresh,
            metrics=self._metrics,
            run_blocking=self._in_thread,
            shared=self._shared,
        )
        self._servers[one.key] = server  # before it starts: whatever is in here is stopped at the end
        try:
            await server.start()
        except AgentError as e:
            return Upkept(key=one.key, written=one.written, is_served=False, error=e)
        return one

    async def _stop(self, keys: Iterable[ContainerKey]) -> None:
        """All at once: each may take half a second."""
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self._stop_one(self._servers.pop(key)), name=f"stop {key.container}")

    async def _stop_one(self, server: VDeviceServer) -> None:
        try:
            await server.stop()
        except AgentError as e:
            log.warning("vdevice_socket_left", error=str(e), pod_uid=server.key.pod_uid, container=server.key.container)

    async def _in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)

    def _note_faults(self, kept: Iterable[Upkept]) -> None:
        """In the log once for each text, and when it is over."""
        for one in kept:
            fields = {"pod_uid": one.key.pod_uid, "container": one.key.container}
            if one.error is None:
                if self._faults.pop(one.key, None) is not None:
                    log.info("vdevice_kept_again", **fields)
            elif self._faults.get(one.key) != str(one.error):
                self._faults[one.key] = str(one.error)
                log.warning("vdevice_not_kept", error=str(one.error), **fields)

    def _pids_of(self, key: ContainerKey, processes: Mapping[ContainerKey, Processes] | None) -> tuple[int, ...] | None:
        """None where they are not known: what was read of a container that has been prepared anew since does not count."""
        if processes is None:
            return ()
        found = processes.get(key)
        return found.pids if found is not None and self._processes.is_current(key, found) else None

    def _upkeep(self, held: Allocation, pids: tuple[int, ...] | None) -> Upkeep:
        pod, server = self._pods.get(held.key.pod_uid), self._servers.get(held.key)
        return Upkeep(
            key=held.key,
            config=self._configs.config(held, pod),
            is_config_sure=pod is not None,
            pids=pids,
            before=self._written.get(held.key),
            socket=server.identity if server is not None else None,
        )


@dataclass(slots=True)
class _Refreshes:
    """Of one container: who is at it, and when the last one that succeeded began, for which ID."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun_at: float | None = None
    container_id: str | None = None


@lru_cache(maxsize=8192)
def _is_nameable(key: ContainerKey) -> bool:
    return is_pod_uid(key.pod_uid) and is_container_name(key.container)
