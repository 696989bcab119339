"""Compares each container's vDevice directory with what it should be, writes what differs, and keeps a server on its socket.

`changed_by_others` and `write_directories` block and run in a thread; `DirectoryReconciler` decides what they get.
What the agent does not know yet is not overwritten: at its start the pods' annotations and processes come seconds after the
containers, and a running container must not lose its elastic limit or its list of processes meanwhile.

`VDeviceConfigs` has the bytes of vcuda.config, from a container's allocation, the pod's elastic limit and the driver's
version: they are needed every second, and encoded anew only where an input has changed.

State owned, by `DirectoryReconciler`: the servers by container, what was last written, and the failures in the log; by
`VDeviceConfigs`: the last ones by container.
Format: docs/reference/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.isolation.shares import core_limit, limit_annotations, share_limits
from gpushare_agent.isolation.vdevice.container_processes import ContainerProcesses, Processes
from gpushare_agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.isolation.vdevice.format import VDeviceConfig, decode_config, encode_config
from gpushare_agent.isolation.vdevice.server import RunsBlocking, VDeviceServer
from gpushare_agent.kit.sockets import FileIdentity
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, Corrupt, Unavailable
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

log = structlog.get_logger(__name__)

Stamps = tuple[FileIdentity | None, FileIdentity | None]

_REPORTED_FAILURES = 4096
"""More than the containers of a node."""


class Written(Struct, frozen=True, kw_only=True):
    """What the agent wrote last, and the files' identities then. `pids` None: a list of a previous agent."""

    config: bytes
    pids: tuple[int, ...] | None
    stamps: Stamps


class DesiredDirectory(Struct, frozen=True, kw_only=True):
    """`is_config_known`: the pod's annotations are known. `pids` None: not known now. `socket`: of the running server."""

    key: ContainerKey
    config: bytes
    is_config_known: bool
    pids: tuple[int, ...] | None
    before: Written | None
    socket: FileIdentity | None

    @property
    def is_as_written(self) -> bool:
        """Nothing is to be written, provided the files and the socket are still those of before."""
        before = self.before
        return (
            before is not None
            and self.socket is not None
            and self.is_config_known
            and before.config == self.config
            and (self.pids is None or self.pids == before.pids)
        )


class Result(Struct, frozen=True, kw_only=True):
    """`written` None where it failed. `has_socket`: the running server's socket is in place."""

    key: ContainerKey
    written: Written | None
    has_socket: bool
    error: AgentError | None = None


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...
    def sharers(self, key: ContainerKey) -> Mapping[ContainerKey, str] | None: ...


def changed_by_others(files: VDeviceFiles, as_written: Iterable[DesiredDirectory]) -> list[DesiredDirectory]:
    """Those whose files or socket were changed or removed. Runs for most containers each second: three stats each."""
    return [one for one in as_written if not _has_socket(files, one) or not _has_stamps(files, one)]


def write_directories(files: VDeviceFiles, desired: Iterable[DesiredDirectory]) -> list[Result]:
    """Writes the directories in order; one that cannot be written does not stop the others."""
    results = []
    for one in desired:
        try:
            results.append(_write_directory(files, one))
        except AgentError as e:
            results.append(Result(key=one.key, written=None, has_socket=False, error=e))
    return results


def _has_socket(files: VDeviceFiles, one: DesiredDirectory) -> bool:
    return one.socket is not None and files.has_socket(one.key, one.socket)


def _has_stamps(files: VDeviceFiles, one: DesiredDirectory) -> bool:
    return one.before is not None and files.stamps(one.key) == one.before.stamps


def _write_directory(files: VDeviceFiles, one: DesiredDirectory) -> Result:
    key, before = one.key, one.before
    has_socket = _has_socket(files, one)
    is_untouched = has_socket and _has_stamps(files, one)
    # Not known now: what was written last is better than an empty list, under which the library limits nobody.
    pids = one.pids if one.pids is not None or before is None else before.pids
    if before is not None and is_untouched and (before.config, before.pids) == (one.config, pids):
        return Result(key=key, written=before, has_socket=True)
    # A restarted agent knows the pods' annotations seconds later; a container that runs must not lose its elastic limit
    # until then.
    config = one.config if one.is_config_known else _with_existing_limit(one.config, files.read_config(key))
    # Also where a file alone was replaced: what else is in there is not known.
    if before is None or not is_untouched:
        # Neither known nor written by this agent: a list that a former agent left stays; without one the file is empty, for
        # the library expects it beside vcuda.config.
        files.prepare(key, pids=pids if pids is not None else files.read_pids(key) or (), config=config)
    else:
        if pids is not None and pids != before.pids:
            files.write_pids(key, pids)
        if config != before.config:
            files.write_config(key, config)
    return Result(key=key, written=Written(config=config, pids=pids, stamps=files.stamps(key)), has_socket=has_socket)


def _with_existing_limit(config: bytes, existing: bytes | None) -> bytes:
    """The elastic limit comes from the pod's annotations; until they are known the file's own stays."""
    if existing is None:
        return config
    try:
        old, new = decode_config(existing), decode_config(config)
    except Corrupt:
        return config
    # Only where nothing else differs: memory and cores are known, and count at once.
    return existing if replace(old, limit=new.limit, hard_limit=new.hard_limit) == new else config


class DirectoryReconciler(Struct, kw_only=True, eq=False):
    """`run_blocking` runs a blocking call in a thread, bounded; `new_server` makes a server that has not started."""

    files: VDeviceFiles
    pods: Pods
    configs: VDeviceConfigs
    processes: ContainerProcesses
    run_blocking: RunsBlocking
    new_server: Callable[[ContainerKey], VDeviceServer]
    _servers: dict[ContainerKey, VDeviceServer] = field(default_factory=dict)
    _written: dict[ContainerKey, Written] = field(default_factory=dict)
    _failures: ReportOnce = field(default_factory=lambda: ReportOnce(_REPORTED_FAILURES))
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_closed: bool = False

    async def reconcile(
        self, allocations: Mapping[ContainerKey, Allocation], processes: Mapping[ContainerKey, Processes] | None
    ) -> list[Result]:
        """Makes directory, files and server of each container what its allocation demands; the results of those that were
        written. `processes` None: the containers have none yet. In this order:

        | | container | action |
        |---|---|---|
        | 1 | config, PIDs and server are as last written, and the pod is known | only checks the files' identities |
        | 2 | as 1, but a file or the socket was changed or removed by others | as 3 |
        | 3 | any other | directory, PIDs and config are written where they differ |
        | 4 | writing failed | the error is the result; a server that runs stays |
        | 5 | written, and its server's socket is in place | none |
        | 6 | written, and its server's socket is missing or replaced | the server stops, then as 7 |
        | 7 | written, without a server | a new server starts; where that fails the error is the result |

        Raises:
            Unavailable: the disk does not answer, or the agent is shutting down.
        """
        async with self._lock:
            if self._is_closed:
                raise Unavailable("the agent is shutting down")
            everything = [self._desired(allocations[key], self._pids_of(key, processes)) for key in sorted(allocations)]
            desired = [one for one in everything if not one.is_as_written]
            if as_written := [one for one in everything if one.is_as_written]:
                check = partial(changed_by_others, self.files, as_written)
                desired += await self.run_blocking(check, f"checking {self.files.root}")
            if not desired:
                return []
            write = partial(write_directories, self.files, desired)
            results = await self.run_blocking(write, f"writing {self.files.root}")
            without_socket = [one.key for one in results if one.error is None and not one.has_socket]
            # Of those that failed the server stays: its socket may still be the one that the container has.
            await self._stop([key for key in without_socket if key in self._servers])
            return [await self._apply(one) for one in results]

    def is_new(self, allocation: Allocation) -> bool:
        """The container's directory is as it is to be at its start, by what was last written: without processes."""
        return self._desired(allocation, ()).is_as_written

    async def forget_others(self, keys: Collection[ContainerKey]) -> None:
        """Stops the servers of containers that are not in `keys`, and forgets what was written for them."""
        async with self._lock:  # a reconciliation under way may start such a server, which nobody would stop any more
            for key in [key for key in self._written if key not in keys]:
                del self._written[key]
                self._failures.is_over(_subject(key))
            await self._stop([key for key in self._servers if key not in keys])

    async def remove_pod(self, uid: PodUid, *, is_stale: Callable[[], bool]) -> bool:
        """Removes a pod's directory if `is_stale` still holds once no reconciliation runs; whether there was one. Raises as
        `VDeviceFiles.remove_pod`."""
        async with self._lock:
            return is_stale() and await self.run_blocking(partial(self.files.remove_pod, uid), f"removing {uid}")

    async def close(self, timeout_s: float) -> None:
        """Stops every server; `reconcile` raises from now on. Where a disk hangs for `timeout_s` the sockets' files stay."""
        # Before the lock: a reconciliation that waits for it must find the end.
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s), self._lock:  # a reconciliation under way may start a server
                await self._stop(list(self._servers))
        except TimeoutError:
            log.warning("vdevice_servers_left", count=len(self._servers), then="the next start replaces their sockets")
            async with asyncio.TaskGroup() as group:  # after a reload the process goes on
                for server in self._servers.values():
                    group.create_task(server.close(), name=f"close {server.key.container}")

    def log_failures(self, results: Iterable[Result]) -> None:
        """Each failure once for as long as its text stays the same."""
        for one in results:
            if one.error is not None and self._failures.is_new(str(one.error), _subject(one.key)):
                log.warning(
                    "vdevice_not_written", error=str(one.error), pod_uid=one.key.pod_uid, container=one.key.container
                )

    def _desired(self, allocation: Allocation, pids: tuple[int, ...] | None) -> DesiredDirectory:
        pod, server = self.pods.get(allocation.key.pod_uid), self._servers.get(allocation.key)
        return DesiredDirectory(
            key=allocation.key,
            config=self.configs.config(allocation, pod),
            is_config_known=pod is not None,
            pids=pids,
            before=self._written.get(allocation.key),
            socket=server.identity if server is not None else None,
        )

    def _pids_of(self, key: ContainerKey, processes: Mapping[ContainerKey, Processes] | None) -> tuple[int, ...] | None:
        """None where they are unknown: a list from before the container was prepared again does not count."""
        if processes is None:
            return ()
        found = processes.get(key)
        return found.pids if found is not None and self.processes.is_current(key, found) else None

    async def _apply(self, one: Result) -> Result:
        """Cases 4 to 7 of the table, for one container."""
        # What is on the disk now is not known, so the next poll compares all of it.
        if one.written is None:
            self._written.pop(one.key, None)
        else:
            self._written[one.key] = one.written
        if one.error is None and not one.has_socket:
            one = await self._start_server(one)
        if one.error is None and self._failures.is_over(_subject(one.key)):
            log.info("vdevice_written_again", pod_uid=one.key.pod_uid, container=one.key.container)
        return one

    async def _start_server(self, one: Result) -> Result:
        server = self.new_server(one.key)
        self._servers[one.key] = server  # before it starts: `close` stops what is in here
        try:
            await server.start()
        except AgentError as e:
            return replace(one, error=e)
        if self._is_closed:  # while it started; `close` may not have waited
            await _stop_one(server)
        return one

    async def _stop(self, keys: Iterable[ContainerKey]) -> None:
        """All at once: with peers that do not read each may take half a second."""
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(_stop_one(self._servers.pop(key)), name=f"stop {key.container}")


async def _stop_one(server: VDeviceServer) -> None:
    try:
        await server.stop()
    except AgentError as e:
        log.warning("vdevice_socket_left", error=str(e), pod_uid=server.key.pod_uid, container=server.key.container)


def _subject(key: ContainerKey) -> str:
    return f"{key.pod_uid}/{key.container}"


_DRIVER = re.compile(r"(\d{1,6})\.(\d{1,6})")


class VDeviceConfigs(Struct, kw_only=True, eq=False):
    """`on_problem` is called with an elastic limit that is ignored, each time that it is read."""

    inventory: Callable[[], GpuInventory]
    driver_version: Callable[[], str]
    names: ResourceNames
    on_problem: Callable[[Pod, str], None]
    _encoded: dict[ContainerKey, tuple[tuple[object, ...], bytes]] = field(default_factory=dict)

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        for key in [key for key in self._encoded if key not in keys]:
            del self._encoded[key]

    def config(self, allocation: Allocation, pod: Pod | None) -> bytes:
        """`pod` None: its annotations are not known yet; the config has no elastic limit then."""
        inputs = (allocation, pod, self.inventory(), self.driver_version())
        known = self._encoded.get(allocation.key)
        # By identity: values are replaced, never changed.
        if known is not None and all(old is new for old, new in zip(known[0], inputs, strict=True)):
            return known[1]
        config = self._encode(allocation, pod)
        self._encoded[allocation.key] = (inputs, config)
        return config

    def _encode(self, allocation: Allocation, pod: Pod | None) -> bytes:
        annotations = limit_annotations(allocation, pod)
        share = share_limits(allocation, annotations, self.inventory().by_uuid(), self.names)
        # A problem of the annotation concerns shares of vcore alone; the others have no elastic limit.
        is_pods = pod is not None and not allocation.is_whole and allocation.claim is None and not allocation.unit_ids
        if pod is not None and is_pods and (problem := core_limit(annotations, share.cores).problem):
            self.on_problem(pod, problem)
        config = VDeviceConfig(
            pod_uid=allocation.key.pod_uid,
            container=allocation.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            # gpu-manager's pair: with a ceiling the library lets a container above its cores while the GPU is idle.
            hard_limit=not share.core_limit,
            driver=driver_numbers(self.driver_version()),
            enable=share.is_limited,
        )
        return encode_config(config)


def driver_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a driver version such as 580.159.04; (0, 0) where it has none (simulated GPUs)."""
    match = _DRIVER.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
