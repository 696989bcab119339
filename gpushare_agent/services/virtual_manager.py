"""Keeps the vDevice directory of every container that has cores: its files, its socket, and who may use it.

Level, not edge: each round compares the allocation cache with what is there, so a lost event costs a second. A container
is prepared before it starts (PreStartContainer waits for it); containers that run when the agent starts get their socket
back in the first round. Nothing here waits for the runtime or the API server but the learning of container IDs, which has
a task of its own; what touches files or cgroups runs in threads and is bounded.

State owned: the servers by container, the container IDs as last told, and what was last written.
Format: docs/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import structlog

from gpushare_agent.adapters.cgroups import CgroupDir
from gpushare_agent.adapters.vdevice_files import VDeviceFiles
from gpushare_agent.decisions.vdevice_limits import core_limit, driver_numbers, vdevice_share
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.supervision import forever
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.cgroup_paths import PeerIdentity
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused, Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.vdevice import encode_config, is_container_name, is_pod_uid
from gpushare_agent.services.vdevice_server import CountsRegistrations, VDeviceServer
from gpushare_agent.services.vdevice_upkeep import Upkeep, Upkept, Written, keep_up

log = structlog.get_logger(__name__)
T = TypeVar("T")

FILES_TIMEOUT_S = 5.0
"""One round over all containers, or the preparing of one pod's; the kubelet waits 30 s for PreStartContainer."""


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...


class Ids(Protocol):
    """Container IDs; services/container_ids.py."""

    async def running(self) -> Mapping[ContainerKey, str]: ...
    async def owner_of(self, container_id: str) -> ContainerKey | None: ...


class ContainerCgroups(Protocol):
    """Every method raises Unavailable where the file system does not answer."""

    async def find_many_in_thread(self, wanted: Iterable[tuple[str, PodUid | None]]) -> Mapping[str, CgroupDir]: ...
    async def pids_round_in_thread(self, directories: Iterable[CgroupDir]) -> Mapping[str, list[int] | None]: ...
    async def identify_in_thread(self, pid: int) -> PeerIdentity | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualManagerPace:
    """Seconds: between two looks at the processes, between two questions for container IDs that are not known, and
    between two looks for directories of pods that are gone."""

    round_s: float = 1.0
    ids_s: float = 1.0
    cleaning_s: float = 30.0


class VirtualManager:
    """`prepare` at any time, `run` once."""

    def __init__(  # noqa: PLR0913 - the composition hands in every collaborator by name
        self,
        *,
        files: VDeviceFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: Pods,
        inventory: Callable[[], GpuInventory],
        driver_version: Callable[[], str],
        memory_block_mib: int,
        ids: Ids,
        cgroups: ContainerCgroups,
        metrics: CountsRegistrations,
        complain: Callable[[Pod, str], None],
        clock: Callable[[], float],
        pace: VirtualManagerPace | None = None,
    ) -> None:
        self._files = files
        self._allocations = allocations
        self._pods = pods
        self._inventory = inventory
        self._driver_version = driver_version
        self._memory_block_mib = memory_block_mib
        self._ask_ids = ids
        self._cgroups = cgroups
        self._metrics = metrics
        self._complain = complain
        self._clock = clock
        self._pace = pace or VirtualManagerPace()
        self._thread = DaemonThread("vdevice-files", advice=f"Check the disk of {files.root}; it is tried again.")
        self._servers: dict[ContainerKey, VDeviceServer] = {}
        self._ids: dict[ContainerKey, str] = {}
        self._written: dict[ContainerKey, Written] = {}
        self._faults: dict[ContainerKey, str] = {}
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Make directory, files and socket of containers that are about to start. Nothing of an earlier life is left in
        the list of processes."""
        allocations = self._allocations()
        held = [allocations[key] for key in sorted(keys) if key in allocations]
        for one in held:
            self._ids.pop(one.key, None)
        try:
            kept = await self._keep({one.key: one for one in held}, {one.key: () for one in held})
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
            async with self._lock:  # a container that is being prepared right now is not left with a server
                await self._stop(list(self._servers))

    async def _rounds(self) -> NoReturn:
        cleaned_at = float("-inf")
        while True:
            try:
                await self.look()
                if self._pods.is_synced and self._clock() - cleaned_at >= self._pace.cleaning_s:
                    cleaned_at = self._clock()
                    await self.clean()
            except AgentError as e:
                log.warning("vdevice_round_failed", error=str(e), retried_in_s=self._pace.round_s)
            await asyncio.sleep(self._pace.round_s)

    async def _learn(self) -> NoReturn:
        while True:
            if any(key not in self._ids for key in self._wanted()):
                await self.learn_ids()
            await asyncio.sleep(self._pace.ids_s)

    async def learn_ids(self) -> None:
        """Take over the running containers' IDs. A source that is away delays, and loses nothing."""
        try:
            self._ids = dict(await self._ask_ids.running())
        except AgentError as e:
            log.warning("container_ids_unknown", error=str(e), retried_in_s=self._pace.ids_s)

    async def look(self) -> None:
        """One round: every container with cores is served and its files say what is so now; all others are not.

        Raises:
            Unavailable: the file system does not answer.
        """
        wanted = self._wanted()
        await self._stop([key for key in self._servers if key not in wanted])
        for known in (self._ids, self._written, self._faults):
            for key in [key for key in known if key not in wanted]:
                del known[key]
        ids = {key: self._ids[key] for key in wanted if key in self._ids}
        pids = await self._pids(ids)
        # Whatever was prepared meanwhile has begun a new life: what was read is of the one before.
        self._note_faults(
            await self._keep(wanted, {key: found for key, found in pids.items() if self._ids.get(key) == ids[key]})
        )

    async def clean(self) -> None:
        """Remove the directories of pods that are gone, by the pod store's word. Raises Unavailable."""
        there = await self._in_thread(self._files.list_pods, f"listing {self._files.root}")
        living = {key.pod_uid for key in self._allocations()}
        for uid in sorted(there):
            if uid in living or self._pods.get(uid) is not None:
                continue
            if await self._in_thread(partial(self._files.remove_pod, uid), f"removing {uid}"):
                log.info("vdevice_directory_removed", pod_uid=uid)

    async def refresh(self, key: ContainerKey, container_id: str | None) -> None:
        """A client registered: bring its files up to date now. Raises AgentError."""
        held = self._allocations().get(key)
        if held is None:
            raise Unavailable(f"container {key.container} of pod {key.pod_uid} holds nothing any more")
        if container_id is not None:
            self._ids[key] = container_id
        elif key not in self._ids:
            await self.learn_ids()
        pids = await self._pids({key: self._ids[key]} if key in self._ids else {})
        for one in await self._keep({key: held}, pids):
            if one.error is not None:
                raise one.error
        if container_id is not None:
            await self._in_thread(partial(self._files.copy_for_id, key, container_id), f"copying for {container_id}")

    async def find_container(self, container_id: str) -> ContainerKey | None:
        """Whose container this is. Raises Unavailable."""
        for key, known in self._ids.items():
            if known == container_id:
                return key
        return await self._ask_ids.owner_of(container_id)

    def _wanted(self) -> dict[ContainerKey, Allocation]:
        return {
            key: held
            for key, held in self._allocations().items()
            if held.vcore_ids and is_pod_uid(key.pod_uid) and is_container_name(key.container)
        }

    async def _keep(
        self, wanted: Mapping[ContainerKey, Allocation], pids: Mapping[ContainerKey, Collection[int]]
    ) -> list[Upkept]:
        """Files first, then the servers of those that have none. Raises Unavailable where the disk does not answer."""
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the agent is shutting down")
            work = [self._upkeep(held, pids.get(key)) for key, held in sorted(wanted.items())]
            kept = await self._in_thread(partial(keep_up, self._files, work), f"keeping {self._files.root}")
            return [await self._served(one) for one in kept]

    async def _served(self, one: Upkept) -> Upkept:
        if one.written is not None:
            self._written[one.key] = one.written
        else:
            self._written.pop(one.key, None)
        if one.error is not None or one.is_served:
            return one
        server = self._servers.get(one.key) or VDeviceServer(
            one.key,
            sockets=self._files,
            identify=self._cgroups.identify_in_thread,
            find_container=self.find_container,
            refresh=self.refresh,
            metrics=self._metrics,
            run_blocking=self._in_thread,
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

    def _upkeep(self, held: Allocation, pids: Collection[int] | None) -> Upkeep:
        pod, server = self._pods.get(held.key.pod_uid), self._servers.get(held.key)
        return Upkeep(
            key=held.key,
            config=self._config(held, pod),
            is_config_sure=pod is not None,
            pids=None if pids is None else tuple(sorted(pids)),
            before=self._written.get(held.key),
            socket=server.identity if server is not None else None,
        )

    def _config(self, held: Allocation, pod: Pod | None) -> bytes:
        annotations = pod.annotations if pod is not None else {}
        share = vdevice_share(held, annotations, self._inventory().by_uuid(), self._memory_block_mib)
        if pod is not None and not held.is_whole and (complaint := core_limit(annotations, held.cores).complaint):
            self._complain(pod, complaint)
        return encode_config(
            pod_uid=held.key.pod_uid,
            container=held.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            hard_limit=not share.core_limit,
            driver=driver_numbers(self._driver_version()),
            enable=share.is_limited,
        )

    async def _pids(self, ids: Mapping[ContainerKey, str]) -> dict[ContainerKey, list[int]]:
        """Host PIDs of the containers whose cgroup is there; one that went takes its ID with it."""
        if not ids:
            return {}
        places = await self._cgroups.find_many_in_thread([(id_, key.pod_uid) for key, id_ in ids.items()])
        found = await self._cgroups.pids_round_in_thread(places.values())
        result: dict[ContainerKey, list[int]] = {}
        for key, id_ in ids.items():
            pids = found.get(id_)
            if pids is not None:
                result[key] = pids
            elif self._ids.get(key) == id_:
                del self._ids[key]
        return result
