"""Keeps the vDevice directory of every container that has cores: its files, its socket, and who may use it.

Level, not edge: each round compares the allocation cache with what is there, so a lost event costs a second. A container
is prepared before it starts (PreStartContainer waits for it); containers that run when the agent starts get their socket
back in the first round.

State owned: the servers by container, and the container IDs as the runtime last told them.
Format: docs/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.adapters.cgroups import CgroupDir
from gpushare_agent.adapters.runtime import RuntimeContainer, RuntimeState
from gpushare_agent.adapters.vdevice_files import VDeviceFiles
from gpushare_agent.decisions.vdevice_limits import core_limit, driver_numbers, vdevice_share
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.cgroup_paths import PeerIdentity
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused, Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.vdevice import encode_config, is_container_name, is_pod_uid
from gpushare_agent.services.vdevice_server import CountsRegistrations, VDeviceServer

log = structlog.get_logger(__name__)

RUNTIME_PAUSE_S = 2.0
"""Between two questions to the runtime for containers that it has not told yet."""


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...


class Runtime(Protocol):
    async def containers(self) -> list[RuntimeContainer]: ...


class ContainerCgroups(Protocol):
    async def find_many_in_thread(self, wanted: Iterable[tuple[str, PodUid | None]]) -> Mapping[str, CgroupDir]: ...
    async def pids_round_in_thread(self, directories: Iterable[CgroupDir]) -> Mapping[str, list[int] | None]: ...
    async def identify_in_thread(self, pid: int) -> PeerIdentity | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualManagerPace:
    """Seconds: between two looks at the processes, and between two looks for directories of pods that are gone."""

    round_s: float = 1.0
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
        memory_block_mib: int,
        runtime: Runtime,
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
        self._memory_block_mib = memory_block_mib
        self._runtime = runtime
        self._cgroups = cgroups
        self._metrics = metrics
        self._complain = complain
        self._clock = clock
        self._pace = pace or VirtualManagerPace()
        self._servers: dict[ContainerKey, VDeviceServer] = {}
        self._ids: dict[ContainerKey, str] = {}
        self._asked_at = float("-inf")
        self._is_runtime_away = False
        self._written: dict[ContainerKey, tuple[bytes, tuple[int, ...]]] = {}
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Make directory, files and socket of containers that are about to start. Nothing of an earlier life is left in
        the list of processes."""
        try:
            for key in sorted(keys):
                held = self._allocations().get(key)
                if held is not None:
                    self._ids.pop(key, None)
                    await self._set_up(held, pids=())
        except AgentError as e:
            log.error("vdevice_not_prepared", error=str(e))
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"the container's vDevice directory cannot be prepared: {e}. The kubelet tries again.",
            )
        return None

    async def run(self) -> NoReturn:
        """Until cancelled; then every server stops. A round that fails is logged and the next one tries again."""
        cleaned_at = float("-inf")
        try:
            while True:
                try:
                    await self.look()
                    if self._pods.is_synced and self._clock() - cleaned_at >= self._pace.cleaning_s:
                        cleaned_at = self._clock()
                        await self.clean()
                except AgentError as e:
                    log.warning("vdevice_round_failed", error=str(e), retried_in_s=self._pace.round_s)
                await asyncio.sleep(self._pace.round_s)
        finally:
            self._is_closed = True
            async with self._lock:  # a container that is being prepared right now is not left with a server
                for server in list(self._servers.values()):
                    await server.stop()
                self._servers.clear()

    async def look(self) -> None:
        """One round: every container with cores is served and its files say what is so now; all others are not."""
        wanted = {
            key: held
            for key, held in self._allocations().items()
            if held.vcore_ids and is_pod_uid(key.pod_uid) and is_container_name(key.container)
        }
        for key in [key for key in self._servers if key not in wanted]:
            await self._servers.pop(key).stop()
            self._ids.pop(key, None)
            self._written.pop(key, None)
        await self._learn_ids(wanted)
        pids = await self._pids({key: self._ids[key] for key in wanted if key in self._ids})
        for key, held in sorted(wanted.items()):
            try:
                await self._set_up(held, pids=pids.get(key))
            except AgentError as e:
                log.warning("vdevice_not_kept", pod_uid=key.pod_uid, container=key.container, error=str(e))

    async def clean(self) -> None:
        """Remove the directories of pods that are gone, by the pod store's word. Raises Unavailable."""
        for uid in sorted(await asyncio.to_thread(self._files.list_pods)):
            if any(key.pod_uid == uid for key in self._allocations()) or self._pods.get(uid) is not None:
                continue
            if await asyncio.to_thread(self._files.remove_pod, uid):
                log.info("vdevice_directory_removed", pod_uid=uid)

    async def refresh(self, key: ContainerKey, container_id: str | None) -> None:
        """A client registered: bring its files up to date now. Raises AgentError."""
        held = self._allocations().get(key)
        if held is None:
            raise Unavailable(f"container {key.container} of pod {key.pod_uid} holds nothing any more")
        if container_id is not None:
            self._ids[key] = container_id
        elif key not in self._ids:
            await self._ask_runtime()
        found = await self._pids({key: self._ids[key]} if key in self._ids else {})
        await self._set_up(held, pids=found.get(key))
        if container_id is not None:
            await asyncio.to_thread(self._files.copy_for_id, key, container_id)

    async def find_container(self, container_id: str) -> ContainerKey | None:
        """Whose container this is, as the runtime says. Raises Unavailable."""
        for key, known in self._ids.items():
            if known == container_id:
                return key
        for found in await self._runtime.containers():
            if found.id == container_id:
                return ContainerKey(found.pod_uid, found.container_name)
        return None

    async def _set_up(self, held: Allocation, *, pids: Sequence[int] | None) -> None:
        """Directory, files and server of one container; only what is missing or different is touched. `pids` None keeps
        the list as it is."""
        key = held.key
        config = self._config(held)
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the agent is shutting down")
            server = self._servers.get(key)
            is_new = server is None or not server.is_serving
            before = self._written.get(key)
            listed = tuple(sorted(pids)) if pids is not None else before[1] if before is not None else ()
            if is_new or before != (config, listed):
                await asyncio.to_thread(self._write, key, config, listed, is_new)
                self._written[key] = (config, listed)
            if is_new:
                server = server or VDeviceServer(
                    key,
                    sockets=self._files,
                    identify=self._cgroups.identify_in_thread,
                    find_container=self.find_container,
                    refresh=self.refresh,
                    metrics=self._metrics,
                )
                self._servers[key] = server  # before it starts: whatever is in here is stopped at the end
                await server.start()

    def _write(self, key: ContainerKey, config: bytes, pids: Sequence[int], is_new: bool) -> None:
        if is_new:
            self._files.prepare(key)
        self._files.write_pids(key, pids)
        self._files.write_config(key, config)  # last: its presence tells the library that both are there

    def _config(self, held: Allocation) -> bytes:
        pod = self._pods.get(held.key.pod_uid)
        annotations = pod.annotations if pod is not None else {}
        inventory = self._inventory()
        share = vdevice_share(held, annotations, inventory.by_uuid(), self._memory_block_mib)
        if pod is not None and not held.is_whole and (complaint := core_limit(annotations, held.cores).complaint):
            self._complain(pod, complaint)
        return encode_config(
            pod_uid=held.key.pod_uid,
            container=held.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            hard_limit=not share.core_limit,
            driver=driver_numbers(inventory.driver_version),
            enable=share.is_limited,
        )

    async def _learn_ids(self, wanted: Collection[ContainerKey]) -> None:
        if all(key in self._ids for key in wanted) or self._clock() - self._asked_at < RUNTIME_PAUSE_S:
            return
        await self._ask_runtime()

    async def _ask_runtime(self) -> None:
        """Take over the running containers' IDs; a runtime that is away delays, and loses nothing."""
        self._asked_at = self._clock()
        try:
            found = await self._runtime.containers()
        except AgentError as e:
            if not self._is_runtime_away:
                log.warning("runtime_away", error=str(e), then="lists of processes are not brought up to date")
            self._is_runtime_away = True
            return
        self._is_runtime_away = False
        running = [c for c in found if c.state is RuntimeState.RUNNING]
        self._ids = {ContainerKey(c.pod_uid, c.container_name): c.id for c in running}

    async def _pids(self, ids: Mapping[ContainerKey, str]) -> dict[ContainerKey, list[int]]:
        """Host PIDs of the containers whose cgroup is there; one that went takes its ID with it."""
        if not ids:
            return {}
        places = await self._cgroups.find_many_in_thread([(id_, key.pod_uid) for key, id_ in ids.items()])
        found = await self._cgroups.pids_round_in_thread(places.values())
        result: dict[ContainerKey, list[int]] = {}
        for key, id_ in ids.items():
            pids = found.get(id_)
            if pids is None:
                self._ids.pop(key, None)
            else:
                result[key] = pids
        return result
