"""An embedded kubelet: it admits the pods of its node, one at a time, keeps the node's status, and serves PodResources v1.

It behaves towards device plugins and PodResources clients as a real one was measured to (docs/reference/sandbox.md); its
containers are child processes of this one (runtime/containers.py). `EmbeddedKubelet.run` is the only task that its opener
starts; `start`, `stop` and `restart` set what it does and wait until it is done. One run from start to stop is a
`KubeletBoot`. Its sync loop is level-triggered: it compares the API server's pods with the known ones and makes one step,
so removals and deletions of the same moment come before the next admission. An admission holds up everything else, as in
a real kubelet. State owned: the pods known since the start, the token bucket of PodResources, and what outlives a start
(claims, calls, containers).
"""

from __future__ import annotations

import asyncio
import platform
import random
import stat
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from msgspec import Struct, field

from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.protobuf import bytes_field
from gpushare_agent.kit.rate import TokenBucket
from gpushare_agent.kit.sockets import bind_unix_socket
from gpushare_agent.kit.supervision import wait_for
from gpushare_agent.model.errors import NotFound
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.sandbox.api.server import HOST, EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes, behaviour_of
from gpushare_agent.sandbox.kubelet.calls import CallLog, PodResourcesCall
from gpushare_agent.sandbox.kubelet.device_manager import CHECKPOINT_NAME, AllocationFailed, DeviceManager, DeviceRecord
from gpushare_agent.sandbox.kubelet.dra_manager import MAX_DRA_CALLS, ClaimRecords, DraCalls, DraManager
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginEndpoint, RegistrationService
from gpushare_agent.sandbox.kubelet.pod_worker import FORCED_GRACE_S, KnownPod, PodState, PodWorkers
from gpushare_agent.sandbox.pod_manifest import grace_s, is_terminal, timestamp
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.state_directory import NodePaths
from gpushare_agent.wire.v1 import GetPodResourcesRequest

log = structlog.get_logger(__name__)

POD_RESOURCES_CALLS_PER_S = 100.0
POD_RESOURCES_BURST = 10.0
_SERVICE = "/v1.PodResourcesLister"


def _full_bucket() -> TokenBucket:
    clock = time.monotonic
    return TokenBucket(rate=POD_RESOURCES_CALLS_PER_S, burst=POD_RESOURCES_BURST, clock=clock)


class PodResourcesService(Struct, kw_only=True, eq=False):
    """`listed` returns the pods of List, `find` one of Get; `has_get`: this version of the kubelet has Get switched on."""

    listed: Callable[[], list[KnownPod]]
    find: Callable[[str, str], KnownPod | None]
    devices: DeviceManager
    calls: CallLog
    rng: random.Random
    has_get: bool
    notify: Callable[[], None]
    _tokens: TokenBucket = field(default_factory=_full_bucket)

    def __mapping__(self) -> dict[str, Handler]:
        methods = {"List": self._list, "Get": self._get}
        return {f"{_SERVICE}/{name}": self._handler(name, method) for name, method in methods.items()}

    def _handler(self, name: str, method: Callable[[bytes], bytes]) -> Handler:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self._admit_call(name)
            await stream.send_message(method(request or b""))

        serve: Callable[[Any], Awaitable[None]] = handle
        return Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)

    def _admit_call(self, method: str) -> None:
        is_refused = not self._tokens.take()
        # What was open at that moment: tests prove by it that no List runs while an Allocate is open.
        inside = tuple(self.calls.open_calls)
        self.calls.pod_resources_calls.append(PodResourcesCall(method=method, inside=inside, is_refused=is_refused))
        self.notify()
        if is_refused:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _list(self, _request: bytes) -> bytes:
        pods = self.listed()
        # Also in the middle of an Allocate, whose IDs are then free again: a fault of the real kubelet (device_manager.py).
        self.devices.update_allocated()
        # In no order that a client could rely on.
        self.rng.shuffle(pods)
        return b"".join([bytes_field(1, self._pod_message(pod)) for pod in pods])

    def _get(self, raw_request: bytes) -> bytes:
        # A kubelet without the feature gate answers with this status and text, not with UNIMPLEMENTED.
        if not self.has_get:
            raise GRPCError(Status.UNKNOWN, "PodResources API Get method disabled")
        request = GetPodResourcesRequest.parse(raw_request)
        pod = self.find(request.pod_namespace, request.pod_name)
        if pod is None:
            text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            raise GRPCError(Status.UNKNOWN, text)
        return bytes_field(1, self._pod_message(pod))

    def _pod_message(self, pod: KnownPod) -> bytes:
        """A PodResources message of the pod's main containers and sidecars."""
        where = pod.identity
        parts = [bytes_field(1, where.name.encode()), bytes_field(2, where.namespace.encode())]
        for container in pod.containers:
            # As measured: entries of init containers are not listed, of sidecars they are.
            if container.kind is not ContainerKind.INIT:
                message = self.devices.records.container_message(where.uid, container.name, self.rng)
                parts.append(bytes_field(3, message))
        return b"".join(parts)


REJECTED_REASON = "UnexpectedAdmissionError"
_SOCKET_MODE = 0o600
_CANCEL_AGAIN_S = 0.5
_PLAIN_CAPACITY = {"cpu": "8", "memory": "32Gi", "pods": "110"}


class KubeletBoot:
    """One run of the kubelet, `number` counts them. `run` returns when `until` does."""

    def __init__(self, kubelet: EmbeddedKubelet, number: int, times: KubeletTimes) -> None:
        self._kubelet = kubelet
        self._node_name = kubelet.node_name
        self._api = api = kubelet.api
        self._signal = api.signal
        self._runtime = kubelet.runtime
        self._times = times
        self.devices = DeviceManager(
            directory=kubelet.paths.device_plugin_path, calls=kubelet.log, rng=kubelet.rng, active_pods=self.active_pods,
            is_running=kubelet.runtime.is_running, notify=api.signal.notify,
        )  # fmt: skip
        self.dra = DraManager(
            registry=kubelet.paths.plugin_registry, node_name=kubelet.node_name, api=api, records=kubelet.claims,
            boot=number, times=times, calls=kubelet.dra_calls,
        )  # fmt: skip
        self.is_listening = False
        self._has_pushed = False
        self._ready_since = timestamp()
        self._pods: dict[str, KnownPod] = {}
        self._may_admit = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = PodWorkers(
            api=api, runtime=kubelet.runtime, devices=self.devices, dra=self.dra, times=times, rng=kubelet.rng
        )
        self._pod_resources = PodResourcesService(
            listed=self.listed_pods, find=self._find_listed, devices=self.devices, calls=kubelet.log, rng=kubelet.rng,
            has_get=kubelet.behaviour.has_pod_resources_get, notify=api.signal.notify,
        )  # fmt: skip

    def begin_admissions(self) -> None:
        """Admits from now on, before the delay is over."""
        self._may_admit.set()

    async def run(self, *, until: Awaitable[None]) -> None:
        paths = self._kubelet.paths
        registration = GrpcServer([RegistrationService(paths.device_plugin_path, self._accept)])
        pod_resources = GrpcServer([self._pod_resources])
        try:
            async with self._group:
                await pod_resources.serve(bind_unix_socket(paths.pod_resources_socket, mode=_SOCKET_MODE))
                await registration.serve(bind_unix_socket(paths.device_plugin_path / "kubelet.sock", mode=_SOCKET_MODE))
                self.is_listening = True
                self._signal.notify()
                self._spawn(self._sync_forever(), "kubelet-sync")
                self._spawn(self._push_forever(), "kubelet-node-status")
                self._spawn(self.dra.run(), "kubelet-dra-drivers")
                # The block ends when the kubelet is stopped; its tasks are cancelled in order below.
                await until
                await self._end([pod_resources, registration])
        finally:
            # Again, where the block ended by an error or a cancellation.
            await self._end([pod_resources, registration])

    async def _end(self, servers: list[GrpcServer]) -> None:
        """Everything stops at once, as the process does: calls first, for a closed connection would let them fail and go
        on with a rejection. A second call does nothing.
        """
        self.is_listening = False
        await _cancel(self._tasks)
        self.devices.close()
        self.dra.close()
        for server in servers:
            await server.stop()

    def _spawn(self, body: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(body, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self, endpoint: PluginEndpoint) -> None:
        # A plugin that registered while the kubelet stopped: nobody follows its stream.
        if not self.is_listening:
            endpoint.close()
            return
        self.devices.add_endpoint(endpoint)
        self._spawn(self.devices.follow(endpoint), f"device-stream {endpoint.resource}")

    # --- what PodResources and the device manager ask ---

    def active_pods(self) -> set[str]:
        return {uid for uid, pod in self._pods.items() if pod.is_active}

    def listed_pods(self) -> list[KnownPod]:
        lists_ended = self._kubelet.behaviour.lists_ended_pods
        # Kubelets up to 1.33 go on listing pods that were rejected or have ended, until their object is deleted.
        return [pod for pod in self._pods.values() if lists_ended or pod.is_active]

    def _find_listed(self, namespace: str, name: str) -> KnownPod | None:
        named = (namespace, name)
        return next((p for p in self._pods.values() if (p.identity.namespace, p.identity.name) == named), None)

    # --- the sync loop ---

    async def _sync_forever(self) -> None:
        # A real kubelet admits some 1.05 s after its start; until then List is empty.
        await wait_for(self._may_admit, self._times.admission_delay_s)
        self._stop_deleted_pods()
        self._spawn(self._reconcile_claims_forever(), "kubelet-claims")
        mine, changes = self._api.pods_by_node, self._api.pods_by_node.signal_of(self._node_name)
        # Later pods are admissions as any: only these are waited for before records are forgotten.
        first = {raw["metadata"]["uid"] for raw in mine.of(self._node_name)}
        while True:
            self._note_ready(first)
            # Before the step: a change during it is seen at once.
            seen = changes.count
            if not await self._sync_step():
                await changes.wait(seen)

    def _note_ready(self, first: set[str]) -> None:
        """The pods that were there at the start have been taken up or are gone; later ones need not be waited for."""
        if not self.devices.is_ready:
            left = {raw["metadata"]["uid"] for raw in self._api.pods_by_node.of(self._node_name)} & first
            self.devices.is_ready = left <= self._pods.keys()
            self._signal.notify()

    async def _sync_step(self) -> bool:
        """Makes one step; whether something was done."""
        bound = {p["metadata"]["uid"]: p for p in self._api.pods_by_node.of(self._node_name)}
        # Removals first: what they free may let the next admission fit.
        for uid in [uid for uid in self._pods if uid not in bound]:
            await self._remove(self._pods.pop(uid))
            return True
        # Then deletions, which free devices as well.
        for uid, raw in bound.items():
            pod = self._pods.get(uid)
            if pod is not None and raw["metadata"].get("deletionTimestamp") and pod.state is not PodState.STOPPING:
                pod.raw = raw
                await self._begin_termination(pod)
                return True
        for uid, raw in bound.items():
            if uid not in self._pods:
                pod = self._pods[uid] = KnownPod.of(raw)
                # It ended before the kubelet was started: nothing is called for it.
                if is_terminal(raw):
                    pod.state = PodState.ENDED
                # A pod that is being deleted before it was taken up is never admitted.
                elif not raw["metadata"].get("deletionTimestamp"):
                    await self._admit(pod)
                self._signal.notify()
                return True
        return False

    async def _admit(self, pod: KnownPod) -> None:
        try:
            # In spec order, init containers first (measured); the first failure rejects the pod.
            for container in pod.containers:
                await self.devices.allocate(pod.identity, container)
        except AllocationFailed as error:
            log.info("pod_rejected", pod=pod.identity.name, reason=str(error))
            self._workers.reject(pod, REJECTED_REASON, f"Allocate failed due to {error}, which is unexpected")
            # A pod that ran before a restart of the kubelet, and whose plugin came too late: its containers are killed
            # (measured).
            if self._runtime.living(pod.identity.uid):
                pod.worker = self._start(pod, self._workers.stop_processes(pod, FORCED_GRACE_S))
            return
        pod.state = PodState.ADMITTED
        pod.worker = self._start(pod, self._workers.run(pod))

    async def _remove(self, pod: KnownPod) -> None:
        """Forgets a pod whose object has gone. After a forced deletion the processes live on for a while, without their
        devices."""
        # The worker first: it would start containers anew.
        await _cancel({pod.worker} if pod.worker is not None else ())
        if self._runtime.living(pod.identity.uid) or pod.raw["spec"].get("resourceClaims"):
            # Not awaited: the share is free to the scheduler before the processes are gone, as in the real one.
            self._start(pod, self._workers.stop_and_unprepare(pod, FORCED_GRACE_S))
        self._runtime.forget(pod.identity.uid)
        self._signal.notify()

    async def _begin_termination(self, pod: KnownPod) -> None:
        # Nothing runs: the object may go at once.
        if pod.state in (PodState.REJECTED, PodState.ENDED):
            self._workers.confirm_deletion(pod)
            return
        pod.state = PodState.STOPPING
        await _cancel({pod.worker} if pod.worker is not None else ())
        pod.worker = self._start(pod, self._workers.terminate(pod, grace_s(pod.raw)))

    def _start(self, pod: KnownPod, body: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return self._spawn(body, f"pod {pod.identity.namespace}/{pod.identity.name}")

    def _stop_deleted_pods(self) -> None:
        """Stops the containers of pods that were deleted while the kubelet was down."""
        known = {raw["metadata"]["uid"] for raw in self._api.pods()}
        for uid in self._runtime.pods() - known:
            for container in self._runtime.living(uid):
                self._runtime.stop(container, FORCED_GRACE_S)
            self._runtime.forget(uid)

    async def _reconcile_claims_forever(self) -> None:
        """Unprepares claims of pods that ended while the kubelet was down, or whose driver was."""
        while True:
            # Pods that are bound and not taken up yet count: their claims may have been prepared before a restart.
            mine = {
                raw["metadata"]["uid"] for raw in self._api.pods_by_node.of(self._node_name) if not is_terminal(raw)
            }
            living = {uid for uid in self._runtime.pods() if self._runtime.living(uid)}
            await self.dra.unprepare_others(mine | living | self.active_pods())
            await asyncio.sleep(self._times.claims_reconcile_s)

    # --- the Node object ---

    async def _push_forever(self) -> None:
        await asyncio.sleep(self._times.first_status_s)
        while True:
            self.push_node_status()
            await asyncio.sleep(self._times.status_interval_s)

    def push_node_status(self) -> None:
        """A plugin's resource stays once reported, with zero. What others put into the capacity stays and is copied to
        allocatable, except that a kubelet without a checkpoint begins with zero of all (`reconcileExtendedResource`)."""
        capacity, allocatable = dict(_PLAIN_CAPACITY), dict(_PLAIN_CAPACITY)
        known = (self._api.object_of("nodes", ("", self._node_name)) or {}).get("status", {})
        devices = self.devices.capacity()
        # Without a checkpoint the node's extended resources begin at zero, until a plugin registers.
        is_reset = not self._has_pushed and not devices
        # Others may write extended resources into the capacity, which a kubelet leaves there.
        for name, count in known.get("capacity", {}).items():
            if name not in _PLAIN_CAPACITY:
                capacity[name] = allocatable[name] = "0" if is_reset else count
        for name, (count, healthy) in devices.items():
            capacity[name], allocatable[name] = str(count), str(healthy)
        self._has_pushed = True
        times = {"lastHeartbeatTime": timestamp(), "lastTransitionTime": self._ready_since}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", **times}
        self._api.apply_node({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": self._node_name, "labels": {"kubernetes.io/hostname": self._node_name}},
            "spec": {},
            "status": {
                "capacity": capacity, "allocatable": allocatable, "conditions": [ready],
                "addresses": [
                    {"type": "InternalIP", "address": HOST}, {"type": "Hostname", "address": self._node_name}
                ],
                "nodeInfo": {
                    "kubeletVersion": self._kubelet.behaviour.release, "containerRuntimeVersion": "embedded://1",
                    "operatingSystem": "linux", "osImage": "gpushare-agent sandbox", "architecture": platform.machine(),
                    "kernelVersion": platform.release(),
                },
            },
        })  # fmt: skip


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: grpclib swallows a cancellation, as its own error, when the connection breaks then."""
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)


T = TypeVar("T")

_SWITCH_TIMEOUT_S = 30.0


class EmbeddedKubelet:
    """`cgroups` insists on a kind of them (cgroup_tree.py). Raises StartupError where it cannot be had."""

    def __init__(
        self,
        *,
        paths: NodePaths,
        node_name: str,
        api: EmbeddedApiServer,
        version: str,
        seed: int,
        times: KubeletTimes | None,
        cgroups: str | None,
    ) -> None:
        self.behaviour = behaviour_of(version)
        self.node_name = node_name
        self.paths = paths
        self.signal = api.signal
        self.log = CallLog()
        self.api = api
        self.rng = random.Random(seed)
        self._times = times or KubeletTimes()
        self.claims: ClaimRecords = {}
        """Prepared claims, over all starts."""
        self.dra_calls: DraCalls = deque(maxlen=MAX_DRA_CALLS)
        self._boots = 0
        for path in (paths.device_plugin_path, paths.pod_resources_socket.parent, paths.plugin_registry):
            path.mkdir(parents=True, exist_ok=True)
        self.runtime = ContainerRuntime(paths.state, self.signal, cgroups)
        self._boot: KubeletBoot | None = None
        self._is_started = False

    # --- running ---

    async def run(self) -> None:
        """Runs one boot after another, without an end, while it is to run. Cancelling ends the containers too."""
        try:
            while True:
                await self.signal_until(lambda: self._is_started)
                await self._run_boot()
        finally:
            self.runtime.close()

    async def _run_boot(self) -> None:
        # Before the sockets are made, as measured: every socket goes, the plugins' too, and they have to notice.
        self._clean_plugin_directory()
        self._boots += 1
        self._boot = boot = KubeletBoot(self, self._boots, self._times)
        try:
            await boot.run(until=self.signal_until(lambda: not self._is_started))
        finally:
            self._boot = None
            self.signal.notify()

    async def signal_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds. Without a deadline: for bodies that wait as long as they run."""
        # No deadline: what is waited for is the life of the node.
        while not condition():
            await self.signal.wait(self.signal.count)

    async def start(self) -> None:
        """Returns when both sockets listen; admissions begin `times.admission_delay_s` later."""
        self._is_started = True
        self.signal.notify()
        await self.signal.wait_until(
            lambda: self._boot is not None and self._boot.is_listening, _SWITCH_TIMEOUT_S, "the kubelet's sockets"
        )

    async def stop(self) -> None:
        """Containers run on and socket files stay, as with a real kubelet."""
        self._is_started = False
        self.signal.notify()
        await self.signal.wait_until(lambda: self._boot is None, _SWITCH_TIMEOUT_S, "the end of the kubelet")

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def is_running(self) -> bool:
        return self._boot is not None and self._boot.is_listening

    @property
    def has_wiped_slices(self) -> bool:
        """Slices that are there now are of after this start."""
        return self._boot is not None and self._boot.dra.has_wiped_slices

    def begin_admissions(self) -> None:
        """Admits at once, instead of after `times.admission_delay_s`: for who waits for something else first."""
        if self._boot is not None:
            self._boot.begin_admissions()

    def push_node_status(self) -> None:
        """Pushes the status at once, instead of at the next interval."""
        if self._boot is not None:
            self._boot.push_node_status()

    def _clean_plugin_directory(self) -> None:
        for path in self.paths.device_plugin_path.iterdir():
            mode = path.lstat().st_mode
            is_file = not stat.S_ISDIR(mode) and path.name != CHECKPOINT_NAME
            if stat.S_ISSOCK(mode) or (is_file and self.behaviour.removes_plugin_files):
                path.unlink()

    # --- what happened, for views and tests ---

    def records(self) -> list[DeviceRecord]:
        """The allocations on record, entries of ended pods included until they are forgotten."""
        return self._boot.devices.records.all() if self._boot is not None else []

    def active_records(self) -> list[DeviceRecord]:
        """Records of active pods."""
        active = self._boot.active_pods() if self._boot is not None else set()
        return [record for record in self.records() if record.pod_uid in active]

    def records_of(self, pod_uid: str, container: str) -> Mapping[str, DeviceRecord]:
        """One container's allocations, by resource."""
        return self._boot.devices.records.of_container(pod_uid, container) if self._boot is not None else {}

    def allocated(self, resource: str) -> frozenset[str]:
        """The IDs that the device manager counts as allocated: not always those of the records."""
        return self._boot.devices.allocated(resource) if self._boot is not None else frozenset()

    def capacity(self) -> dict[str, tuple[int, int]]:
        """Devices and healthy devices by resource. The Node object follows at the next status update."""
        return self._boot.devices.capacity() if self._boot is not None else {}

    def devices(self, resource: str) -> dict[str, bool]:
        """The plugin's devices and whether the kubelet holds them for healthy, in the plugin's order."""
        return self._boot.devices.devices(resource) if self._boot is not None else {}

    def listed_pods(self) -> list[KnownPod]:
        """What PodResources List would name now."""
        return self._boot.listed_pods() if self._boot is not None else []

    async def wait_for(self, found: Callable[[], T], deadline_s: float = 60.0, what: str = "") -> T:
        """The first true value of `found`; raises TimeoutError naming `what`."""
        return await self.signal.wait_until(found, deadline_s, what)

    def kill_container(self, namespace: str, pod_name: str, container: str) -> None:
        """Ends a container's process as a crash would. Raises NotFound."""
        uid = self.api.pod(namespace, pod_name)["metadata"]["uid"]
        found = self.runtime.find(uid, container)
        if found is None or not found.is_running:
            raise NotFound(f"no running container {container} in pod {namespace}/{pod_name}")
        self.runtime.kill(found)
