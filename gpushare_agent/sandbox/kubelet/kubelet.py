"""An embedded kubelet: it admits the pods of its node, one at a time, keeps the node's status, and serves PodResources v1.

It behaves towards device plugins and PodResources clients as a real one was measured to (docs/reference/sandbox.md); its
containers are child processes of this one (runtime/containers.py). `EmbeddedKubelet.run` is the only task that its opener
starts; `start`, `stop` and `restart` set what it does and wait until it is done. Its sync loop is level-triggered: it
compares the API server's pods with the known ones and makes one step, so removals and deletions of the same moment come
before the next admission. An admission holds up everything else, as in a real kubelet. State owned: the pods known since
the start, the token bucket of PodResources, and what outlives a start (claims, calls, containers).
"""

from __future__ import annotations

import asyncio
import platform
import stat
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import structlog
from grpclib import GRPCError, Status

from gpushare_agent.core.kit.grpc_server import GrpcServer
from gpushare_agent.core.kit.protobuf import bytes_field
from gpushare_agent.core.kit.rate import TokenBucket
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.kit.supervision import wait_for
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.wire.v1 import GetPodResourcesRequest, ListPodResourcesRequest, PodResourcesListerBase
from gpushare_agent.sandbox.held_port import HOST
from gpushare_agent.sandbox.kubelet.calls import NodeParts
from gpushare_agent.sandbox.kubelet.device_manager import CHECKPOINT_NAME, AllocationFailed, DeviceManager
from gpushare_agent.sandbox.kubelet.dra_manager import ClaimRecords, DraManager
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginEndpoint, RegistrationService
from gpushare_agent.sandbox.kubelet.pod_worker import FORCED_GRACE_S, PodState, PodWorker
from gpushare_agent.sandbox.pod_manifest import grace_s, is_terminal, timestamp

log = structlog.get_logger(__name__)

POD_RESOURCES_CALLS_PER_S = 100.0
POD_RESOURCES_BURST = 10.0


class PodResourcesService(PodResourcesListerBase):
    """PodResources v1 of the pods that the kubelet knows. Its answers, with thousands of devices, are encoded by hand."""

    def __init__(self, kubelet: EmbeddedKubelet) -> None:
        self._kubelet = kubelet
        self._parts = kubelet.parts
        self._tokens = TokenBucket(rate=POD_RESOURCES_CALLS_PER_S, burst=POD_RESOURCES_BURST, clock=time.monotonic)

    def _take_token(self, name: str) -> None:
        self._parts.calls.pod_resources_call(name)
        if not self._tokens.take():
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")

    async def list(self, message: ListPodResourcesRequest) -> Any:
        self._take_token("List")
        pods = self._kubelet.listed_pods()
        # Also in the middle of an Allocate. Its IDs are then free again: a fault of the real kubelet (device_manager.py).
        self._kubelet.devices.update_allocated()
        # In no order that a client could rely on.
        self._parts.rng.shuffle(pods)
        return b"".join([bytes_field(1, self._pod_message(pod)) for pod in pods])

    async def get(self, message: GetPodResourcesRequest) -> Any:
        self._take_token("Get")
        # A kubelet without the feature gate answers with this status and text, not with UNIMPLEMENTED.
        if not self._parts.api.behaviour.has_pod_resources_get:
            raise GRPCError(Status.UNKNOWN, "PodResources API Get method disabled")
        named = message.pod_namespace, message.pod_name
        for pod in self._kubelet.pods.values():
            if (pod.identity.namespace, pod.identity.name) == named:
                return bytes_field(1, self._pod_message(pod))
        raise GRPCError(Status.UNKNOWN, f"pod {message.pod_name} in namespace {message.pod_namespace} not found")

    def _pod_message(self, pod: PodWorker) -> bytes:
        """A PodResources message of the pod's main containers and sidecars."""
        where = pod.identity
        parts = [bytes_field(1, where.name.encode()), bytes_field(2, where.namespace.encode())]
        for container in pod.containers:
            # As measured: entries of init containers are not listed, of sidecars they are.
            if container.kind is not ContainerKind.INIT:
                records = self._kubelet.devices.records
                parts.append(bytes_field(3, records.container_message(where.uid, container.name, self._parts.rng)))
        return b"".join(parts)


T = TypeVar("T")

_SWITCH_TIMEOUT_S = 30.0
REJECTED_REASON = "UnexpectedAdmissionError"
_SOCKET_MODE = 0o600
_CANCEL_AGAIN_S = 0.5
_PLAIN_CAPACITY = {"cpu": "8", "memory": "32Gi", "pods": "110"}


class EmbeddedKubelet:
    """The state of one start. The next start makes its own; between them no device and no pod is known."""

    def __init__(self, parts: NodeParts) -> None:
        self.parts = parts
        self.api = parts.api
        self.runtime = parts.runtime
        self.claims: ClaimRecords = {}
        """Prepared claims, over all starts."""
        self._signal = parts.api.signal
        self._starts = 0
        self._is_wanted = False
        self._forget()

    def _forget(self) -> None:
        """The state of a kubelet that does not run."""
        self._is_up = self.is_running = False
        self.pods: dict[str, PodWorker] = {}
        self._has_pushed = False
        self._may_admit = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self.devices = DeviceManager(self.parts, self.active_pods, has_records=False)
        self._dra = DraManager(parts=self.parts, records=self.claims, boot=self._starts)

    # --- running ---

    async def run(self) -> None:
        """Runs one start after another, without an end, while it is to run. Cancelling ends the containers too."""
        try:
            while True:
                await self._wait_wanted(True)
                await self._run_once()
        finally:
            self.runtime.close()

    async def _run_once(self) -> None:
        paths = self.parts.paths
        # Before the sockets are made, as measured: every socket goes, the plugins' too, and they have to notice.
        self._clean_plugin_directory()
        self._is_up = True
        self._starts += 1
        self.devices = DeviceManager(self.parts, self.active_pods)
        self._dra = DraManager(parts=self.parts, records=self.claims, boot=self._starts)
        self._ready_since = timestamp()
        registration = GrpcServer([RegistrationService(paths.device_plugin_path, self._accept)])
        pod_resources = GrpcServer([PodResourcesService(self)])
        try:
            async with self._group:
                await pod_resources.serve(bind_unix_socket(paths.pod_resources_socket, mode=_SOCKET_MODE))
                await registration.serve(bind_unix_socket(paths.device_plugin_path / "kubelet.sock", mode=_SOCKET_MODE))
                self.is_running = True
                self._signal.notify()
                self._spawn(self._sync_forever(), "kubelet-sync")
                self._spawn(self._push_forever(), "kubelet-node-status")
                self._spawn(self._dra.run(), "kubelet-dra-drivers")
                # The block ends when the kubelet is stopped; its tasks are cancelled in order below.
                await self._wait_wanted(False)
                await self._end(pod_resources, registration)
        finally:
            # Again, where the block ended by an error or a cancellation.
            await self._end(pod_resources, registration)
            self._forget()
            self._signal.notify()

    async def _end(self, *servers: GrpcServer) -> None:
        """Stops everything at once, as the end of the process does. Calls stop first, because a closed connection would
        make them fail and continue with a rejection. A second call does nothing.
        """
        self.is_running = False
        await _cancel(self._tasks)
        self.devices.close()
        self._dra.close()
        for server in servers:
            await server.stop()

    async def _wait_wanted(self, is_wanted: bool) -> None:
        # No deadline: what is waited for is the life of the node.
        await self._signal.wait_until(lambda: self._is_wanted == is_wanted)

    async def start(self) -> None:
        """Returns when both sockets listen; admissions begin `times.admission_delay_s` later."""
        self._want(True)
        await self.wait_for(lambda: self.is_running, _SWITCH_TIMEOUT_S, "the kubelet's sockets")

    async def stop(self) -> None:
        """Containers run on and socket files stay, as with a real kubelet."""
        self._want(False)
        await self.wait_for(lambda: not self._is_up, _SWITCH_TIMEOUT_S, "the end of the kubelet")

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def _want(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._signal.notify()

    def begin_admissions(self) -> None:
        """Admits at once, instead of after `times.admission_delay_s`: for who waits for something else first."""
        self._may_admit.set()

    @property
    def has_wiped_slices(self) -> bool:
        """Whether old slices were deleted: those that are there now were made after this start."""
        return self._dra.has_wiped_slices

    def _spawn(self, body: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(body, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self, endpoint: PluginEndpoint) -> None:
        # A plugin that registered while the kubelet stopped: nobody follows its stream.
        if not self.is_running:
            endpoint.close()
            return
        self.devices.add_endpoint(endpoint)
        self._spawn(self.devices.follow(endpoint), f"device-stream {endpoint.resource}")

    def _clean_plugin_directory(self) -> None:
        for path in self.parts.paths.device_plugin_path.iterdir():
            mode = path.lstat().st_mode
            is_file = not stat.S_ISDIR(mode) and path.name != CHECKPOINT_NAME
            if stat.S_ISSOCK(mode) or (is_file and self.parts.api.behaviour.removes_plugin_files):
                path.unlink()

    # --- the sync loop ---

    async def _sync_forever(self) -> None:
        # A real kubelet admits some 1.05 s after its start; until then List is empty.
        await wait_for(self._may_admit, self.parts.times.admission_delay_s)
        self._stop_deleted_pods()
        self._spawn(self._reconcile_claims_forever(), "kubelet-claims")
        mine, changes = self.api.pods_by_node, self.api.pods_by_node.signal_of(self.parts.name)
        # Later pods are admissions as any: only these are waited for before records are forgotten.
        first = {raw["metadata"]["uid"] for raw in mine.of(self.parts.name)}
        while True:
            self._note_ready(first)
            # Before the step: a change during it is seen at once.
            seen = changes.count
            if not await self._sync_step():
                await changes.wait(seen)

    def _note_ready(self, first: set[str]) -> None:
        """The pods that were there at the start have been taken up or are gone; later ones need not be waited for."""
        if not self.devices.is_ready:
            left = {raw["metadata"]["uid"] for raw in self.api.pods_by_node.of(self.parts.name)} & first
            self.devices.is_ready = left <= self.pods.keys()
            self._signal.notify()

    async def _sync_step(self) -> bool:
        """Makes one step; whether something was done."""
        bound = {p["metadata"]["uid"]: p for p in self.api.pods_by_node.of(self.parts.name)}
        # Removals first: what they free may let the next admission fit.
        for uid in [uid for uid in self.pods if uid not in bound]:
            await self._remove(self.pods.pop(uid))
            return True
        # Then deletions, which free devices as well.
        for uid, raw in bound.items():
            pod = self.pods.get(uid)
            if pod is not None and raw["metadata"].get("deletionTimestamp") and pod.state is not PodState.STOPPING:
                pod.raw = raw
                await self._begin_termination(pod)
                return True
        for uid, raw in bound.items():
            if uid not in self.pods:
                pod = self.pods[uid] = PodWorker(raw, self.parts, self.devices, self._dra)
                # It ended before the kubelet was started: nothing is called for it.
                if is_terminal(raw):
                    pod.state = PodState.ENDED
                # A pod that is being deleted before it was taken up is never admitted.
                elif not raw["metadata"].get("deletionTimestamp"):
                    await self._admit(pod)
                self._signal.notify()
                return True
        return False

    async def _admit(self, pod: PodWorker) -> None:
        try:
            # In spec order, init containers first (measured); the first failure rejects the pod.
            for container in pod.containers:
                await self.devices.allocate(pod.identity, container)
        except AllocationFailed as error:
            log.info("pod_rejected", pod=pod.identity.name, reason=str(error))
            pod.reject(REJECTED_REASON, f"Allocate failed due to {error}, which is unexpected")
            # A pod ran before a restart of the kubelet, and its plugin came too late: its containers are killed
            # (measured).
            if pod.living():
                self._start(pod, pod.stop_processes(FORCED_GRACE_S))
            return
        pod.state = PodState.ADMITTED
        self._start(pod, pod.run())

    async def _remove(self, pod: PodWorker) -> None:
        """Forgets a pod without an object. After a forced deletion the processes live on for a while, without their
        devices."""
        # The worker first: it would start containers again.
        await _cancel(pod.tasks)
        if pod.living() or pod.raw["spec"].get("resourceClaims"):
            # Not awaited: the share is free to the scheduler before the processes are gone, as in the real one.
            self._start(pod, pod.stop_and_unprepare(FORCED_GRACE_S))
        self.runtime.forget(pod.identity.uid)
        self._signal.notify()

    async def _begin_termination(self, pod: PodWorker) -> None:
        # Nothing runs: the object may go at once.
        if pod.state in (PodState.REJECTED, PodState.ENDED):
            pod.confirm_deletion()
            return
        pod.state = PodState.STOPPING
        await _cancel(pod.tasks)
        self._start(pod, pod.terminate(grace_s(pod.raw)))

    def _start(self, pod: PodWorker, body: Coroutine[None, None, None]) -> None:
        pod.tasks = [self._spawn(body, f"pod {pod.identity.namespace}/{pod.identity.name}")]

    def _stop_deleted_pods(self) -> None:
        """Stops the containers of pods that were deleted while the kubelet was down."""
        known = {raw["metadata"]["uid"] for raw in self.api.pods()}
        for uid in self.runtime.pods() - known:
            for container in self.runtime.living(uid):
                self.runtime.stop(container, FORCED_GRACE_S)
            self.runtime.forget(uid)

    async def _reconcile_claims_forever(self) -> None:
        """Unprepares claims of pods that ended while the kubelet or the claims' driver was down."""
        while True:
            # Pods that are bound and not taken up yet count: their claims may have been prepared before a restart.
            mine = {raw["metadata"]["uid"] for raw in self.api.pods_by_node.of(self.parts.name) if not is_terminal(raw)}
            living = {uid for uid in self.runtime.pods() if self.runtime.living(uid)}
            await self._dra.unprepare_others(mine | living | self.active_pods())
            await asyncio.sleep(self.parts.times.claims_reconcile_s)

    # --- the Node object ---

    async def _push_forever(self) -> None:
        await asyncio.sleep(self.parts.times.first_status_s)
        while True:
            self.push_node_status()
            await asyncio.sleep(self.parts.times.status_interval_s)

    def push_node_status(self) -> None:
        """A plugin's resource stays once reported, with zero. What others put into the capacity stays and is copied to
        allocatable, except that a kubelet without a checkpoint begins with zero of all (`reconcileExtendedResource`)."""
        capacity, allocatable = dict(_PLAIN_CAPACITY), dict(_PLAIN_CAPACITY)
        known = (self.api.store.find("nodes", ("", self.parts.name)) or {}).get("status", {})
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
        self.api.apply_node({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": self.parts.name, "labels": {"kubernetes.io/hostname": self.parts.name}},
            "spec": {},
            "status": {
                "capacity": capacity, "allocatable": allocatable, "conditions": [ready],
                "addresses": [
                    {"type": "InternalIP", "address": HOST}, {"type": "Hostname", "address": self.parts.name}
                ],
                "nodeInfo": {
                    "kubeletVersion": self.parts.api.behaviour.release, "containerRuntimeVersion": "embedded://1",
                    "operatingSystem": "linux", "osImage": "gpushare-agent sandbox", "architecture": platform.machine(),
                    "kernelVersion": platform.release(),
                },
            },
        })  # fmt: skip

    # --- what happened, for views and tests ---

    def active_pods(self) -> set[str]:
        return {uid for uid, pod in self.pods.items() if pod.is_active}

    def listed_pods(self) -> list[PodWorker]:
        """What PodResources List would name now."""
        # Kubelets up to 1.33 go on listing pods that were rejected or have ended, until their object is deleted.
        lists_ended = self.parts.api.behaviour.lists_ended_pods
        return [pod for pod in self.pods.values() if lists_ended or pod.is_active]

    async def wait_for(self, found: Callable[[], T], deadline_s: float = 60.0, what: str = "") -> T:
        """The first true value of `found`; raises TimeoutError naming `what`."""
        return await self._signal.wait_until(found, deadline_s, what)


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: grpclib turns a cancellation into its own error if the connection breaks then."""
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
