"""Virtual devices: PreStartContainer, RegisterVDevice, one round over the processes, and what two hundred servers cost.

The files of cgroups and of /proc are ordinary ones of the same shape, in the node's state directory, so that a container's
processes are whatever a run needs; sockets, peer credentials and the agent are real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from bench.containers import Containers
from bench.http2 import dial
from bench.node import BLOCK_MIB, BLOCKS_PER_GPU, GPUS, POD_BLOCKS, POD_CORES, RESOURCES, BenchNode, open_node
from bench.pods import CONTAINER, NAMESPACE, BenchPod, bench_pod
from bench.results import Row, row
from gpushare_agent.agent.admission.claim_pods import ClaimPods
from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.vdevice.container_processes import ContainerProcesses
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.reconcile import VDeviceConfigs
from gpushare_agent.agent.isolation.vdevice.server import METHOD
from gpushare_agent.agent.isolation.vdevice.virtual_manager import Intervals, VirtualManager
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.formats.vdevice import decode_config, decode_pids
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import CORES_PER_GPU, VCORE_RESOURCE, DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.core.wire.vcuda import VDeviceRequest
from gpushare_agent.sandbox.state_directory import NodePaths

_PRE_START_MS, _REGISTER_MS, _ROUND_MS, _SERVERS_MIB = 10.0, 5.0, 20.0, 20.0
_SEEN_S, _FREED_S = 0.03, 0.05
_BETWEEN_CALLS_S = 0.11
"""Longer than lies between two refreshes of one container."""
_KNOWN_S, _SERVED_S = 5.0, 15.0
_PROCESSES, _SHARES, _SERVERS = 20, 100, 200
_FIRST_PID = 100_000
_NEVER_S = 3600.0


async def pre_start_rows(node: BenchNode, runs: int) -> list[Row]:
    """A share is admitted, and its container about to start: directory, files and socket are made before the answer."""
    times, faults = [], []
    for number in range(runs):
        pod = bench_pod(f"started-{number:04d}", POD_CORES, POD_BLOCKS)
        node.create(pod)
        await asyncio.sleep(_SEEN_S)
        await node.kubelet.admit(pod, RESOURCES)
        times.append(await node.kubelet.pre_start(pod, VCORE_RESOURCE) * 1000)
        faults += _unprepared(node, pod)
        node.delete(pod)
        await asyncio.sleep(_FREED_S)
    return [
        row(
            "PreStartContainer of a share",
            times,
            target_median=_PRE_START_MS,
            failed="; ".join(faults[:3]),
            note="directory, vcuda.config, pids.config and vcuda.sock of a new container are there with the answer",
        )
    ]


def _unprepared(node: BenchNode, pod: BenchPod) -> list[str]:
    directory = _directory(node, pod)
    try:
        config = decode_config((directory / "vcuda.config").read_bytes())
        is_right = (config.utilization, config.memory_bytes) == (POD_CORES, POD_BLOCKS * BLOCK_MIB * 2**20)
        is_right &= (directory / "pids.config").is_file() and (directory / "vcuda.sock").is_socket()
    except OSError as error:
        return [str(error)]
    return [] if is_right else [f"{directory} is not what {pod.name} was given"]


async def register_rows(node: BenchNode, runs: int) -> list[Row]:
    """One running container whose list of processes differs at each registration, which are by name and by ID in turn."""
    pod = bench_pod("registering", POD_CORES, POD_BLOCKS)
    node.create(pod)
    await asyncio.sleep(_SEEN_S)
    await node.kubelet.admit(pod, RESOURCES)
    await node.kubelet.pre_start(pod, VCORE_RESOURCE)
    containers = Containers(node.state / "cgroup")
    uid = pod.uid
    containers.put(uid, _pids(0))
    node.run(pod, containers.id_of(uid), containers.text_of(uid))
    by_name = bytes(VDeviceRequest(pod_uid=uid, container_name=CONTAINER))
    by_id = bytes(VDeviceRequest(pod_uid=uid, container_id=containers.id_of(uid)))
    await _wait_listed(node, pod, by_name)
    times: dict[bytes, list[float]] = {by_name: [], by_id: []}
    faults = []
    for number in range(1, 2 * runs + 1):
        message = by_name if number % 2 else by_id
        containers.put(uid, _pids(number))
        times[message].append(await _register(node, pod, message) * 1000)
        if _listed(node, pod) != tuple(_pids(number)):
            faults.append(f"after registration {number} pids.config was not the cgroup's list")
        await asyncio.sleep(_BETWEEN_CALLS_S)
    node.delete(pod)
    note = "a connection of its own, the peer's cgroup looked up, 20 processes of which one is new: pids.config is rewritten"
    return [
        row(f"RegisterVDevice by {how}", times[message], target_median=_REGISTER_MS, failed="; ".join(faults[:3]), note=note)
        for how, message in (("name", by_name), ("ID", by_id))
    ]  # fmt: skip


async def _register(node: BenchNode, pod: BenchPod, message: bytes) -> float:
    """Seconds from before the connection to the answer."""
    started = time.perf_counter()
    connection = await dial(_directory(node, pod) / "vcuda.sock")
    try:
        await connection.call(METHOD, message)
        return time.perf_counter() - started
    finally:
        connection.close()


async def _wait_listed(node: BenchNode, pod: BenchPod, message: bytes) -> None:
    """Until the agent knows the container's ID from the pod's status."""
    async with asyncio.timeout(_KNOWN_S):
        while _listed(node, pod) != tuple(_pids(0)):
            await _register(node, pod, message)
            await asyncio.sleep(_BETWEEN_CALLS_S)


def _listed(node: BenchNode, pod: BenchPod) -> tuple[int, ...]:
    return decode_pids((_directory(node, pod) / "pids.config").read_bytes())


def _directory(node: BenchNode, pod: BenchPod) -> Path:
    return NodePaths(state=node.state).virtual_manager / pod.uid / CONTAINER


def _pids(number: int, first: int = _FIRST_PID) -> Sequence[int]:
    """Of one container; the last differs with `number`."""
    return [*range(first, first + _PROCESSES - 1), first + _PROCESSES + number % 1000]


async def round_rows(state: Path, runs: int) -> list[Row]:
    """The manager's poll of 100 shares in this process: processor time of all its threads."""
    containers = Containers(state / "cgroup")
    uids = [PodUid(f"00000000-0000-4000-8000-{number:012d}") for number in range(_SHARES)]
    world = _World(uids, containers)
    cgroups = Cgroups(state / "cgroup")
    processes = ContainerProcesses(cast(ContainerIds, world), cgroups, clock=time.monotonic)
    manager = VirtualManager(
        files=VDeviceFiles(state / "vm"),
        allocations=lambda: world.allocations,
        pods=cast(ClaimPods, world),
        configs=VDeviceConfigs(
            inventory=lambda: world.inventory,
            driver_version=lambda: "550.54.14",
            names=ResourceNames(memory_block_mib=BLOCK_MIB),
            on_problem=lambda _pod, _text: None,
        ),
        processes=processes,
        registered=world.vdevice_registered,
        clock=time.monotonic,
        intervals=Intervals(poll_s=_NEVER_S, ids_s=_NEVER_S),
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(manager.run())
        try:
            await manager.poll()
            await processes.read_ids()
            still = await _rounds(manager, state, world, runs, is_changing=False)
            changing = await _rounds(manager, state, world, runs, is_changing=True)
        finally:
            running.cancel()
    note = f"the benchmark's process, over {_SHARES} containers with {_PROCESSES} processes each, by process_time(3)"
    return [
        row("one round over the processes, none changed: processor time", still, target_median=_ROUND_MS, note=note),
        row("  every container has a new process: processor time", changing, target_median=_ROUND_MS, note=note),
    ]


async def _rounds(manager: VirtualManager, state: Path, world: _World, runs: int, *, is_changing: bool) -> list[float]:
    times = []
    for number in range(runs + 1):
        world.put(number if is_changing else 0)
        before = time.process_time()
        await manager.poll()
        if number:  # the first makes directories and sockets
            times.append((time.process_time() - before) * 1000)
        world.check(state / "vm", number if is_changing else 0)
    return times


class _World:
    """Everything around the manager: 100 shares that run."""

    is_synced = True

    def __init__(self, uids: Sequence[PodUid], containers: Containers) -> None:
        gpu = GpuUuid("GPU-0")
        self._uids, self._containers = uids, containers
        self._pods = {
            uid: Pod(uid=uid, namespace=NAMESPACE, name=uid, phase=PodPhase.RUNNING, containers=()) for uid in uids
        }
        self.inventory = GpuInventory(gpus=(), topology=build_topology((), ()), driver_version="550.54.14")
        self.allocations = {
            (key := ContainerKey(uid, CONTAINER)): Allocation(
                key=key, namespace=NAMESPACE, pod_name=uid, kind=ContainerKind.MAIN, gpus=(gpu,),
                ids={
                    ResourceKind.VCORE: frozenset(DeviceId(f"{gpu}::{n}") for n in range(POD_CORES)),
                    ResourceKind.VMEMORY: frozenset(DeviceId(f"{gpu}::{n}") for n in range(POD_BLOCKS)),
                },
            )
            for uid in uids
        }  # fmt: skip

    def put(self, number: int) -> None:
        for position, uid in enumerate(self._uids):
            self._containers.put(uid, _pids(number, _FIRST_PID + 2000 * position))

    def check(self, root: Path, number: int) -> None:
        """Raises RuntimeError where a list is not the container's."""
        for position, uid in enumerate(self._uids):
            listed = decode_pids((root / uid / CONTAINER / "pids.config").read_bytes())
            if listed != tuple(_pids(number, _FIRST_PID + 2000 * position)):
                raise RuntimeError(f"pids.config of {uid} is not what its cgroup says")

    def get(self, uid: PodUid) -> Pod | None:
        return self._pods.get(uid)

    def shares_of(self, uid: PodUid) -> Mapping[ContainerKey, Allocation]:
        return {key: self.allocations[key] for key in [ContainerKey(uid, CONTAINER)] if key in self.allocations}

    def sharers(self, _key: ContainerKey) -> None:
        """No claims here."""

    async def running(self, _uids: object = None) -> Mapping[ContainerKey, str]:
        return {key: self._containers.id_of(key.pod_uid) for key in self.allocations}

    async def owner_of(self, _container_id: str) -> ContainerKey | None:
        return None

    def vdevice_registered(self, code: str) -> None:
        """Nobody registers here."""


async def memory_rows() -> list[Row]:
    """The agent with 200 shares, once serving their sockets and once not."""
    found = {}
    for isolation in ("none", "vcuda"):
        async with open_node(isolation=isolation) as node:
            cores, blocks = GPUS * CORES_PER_GPU // _SERVERS, GPUS * BLOCKS_PER_GPU // _SERVERS
            node.fill(_SERVERS, cores, blocks)
            await node.start_agent()
            if isolation == "vcuda":
                await wait_sockets(node, _SERVERS)
            found[isolation] = node.agent.resident_mib()
    cost = found["vcuda"] - found["none"]
    note = (
        f"resident memory of the agent with {_SERVERS} shares, less {found['none']:.1f} MiB of one with isolation none"
    )
    return [row(f"{_SERVERS} vDevice servers", [cost], unit="MiB", target_median=_SERVERS_MIB, note=note)]


async def wait_sockets(node: BenchNode, count: int, timeout_s: float = _SERVED_S) -> None:
    """Until so many containers are served. Raises RuntimeError."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if node.served() == count:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise RuntimeError(f"not {count} containers are served; the agent's log:\n{node.agent.log_tail()}") from None
