"""One run of the embedded kubelet, from its start to its stop.

State owned: the pods known since the start. Its sync loop is level-triggered: it compares the API server's pods with the
known ones and makes one step, so removals and deletions of the same moment come before the next admission. An admission
holds up everything else, as in a real kubelet.
"""

from __future__ import annotations

import asyncio
import platform
import random
from collections.abc import Awaitable, Collection, Coroutine

import structlog

from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.sockets import bind_unix_socket
from gpushare_agent.kit.supervision import wait_for
from gpushare_agent.sandbox.api.server import HOST, EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletBehaviour, KubeletTimes
from gpushare_agent.sandbox.kubelet.calls import CallLog
from gpushare_agent.sandbox.kubelet.device_manager import AllocationFailed, DeviceManager
from gpushare_agent.sandbox.kubelet.dra_manager import DraManager
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginEndpoint, RegistrationService
from gpushare_agent.sandbox.kubelet.pod_resources import PodResourcesService
from gpushare_agent.sandbox.kubelet.pod_worker import FORCED_GRACE_S, KnownPod, PodState, PodWorkers
from gpushare_agent.sandbox.pod_manifest import grace_s, is_terminal, timestamp
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.state_directory import NodePaths

log = structlog.get_logger(__name__)

REJECTED_REASON = "UnexpectedAdmissionError"
_SOCKET_MODE = 0o600
_CANCEL_AGAIN_S = 0.5
_PLAIN_CAPACITY = {"cpu": "8", "memory": "32Gi", "pods": "110"}


class KubeletBoot:
    """`run` returns when `until` does."""

    def __init__(  # noqa: PLR0913 - what one run is made of, each by keyword
        self,
        *,
        node_name: str,
        behaviour: KubeletBehaviour,
        api: EmbeddedApiServer,
        devices: DeviceManager,
        dra: DraManager,
        runtime: ContainerRuntime,
        calls: CallLog,
        rng: random.Random,
        times: KubeletTimes,
    ) -> None:
        self.devices = devices
        self.dra = dra
        self.is_listening = False
        self._node_name = node_name
        self._behaviour = behaviour
        self._api = api
        self._signal = api.signal
        self._runtime = runtime
        self._has_pushed = False
        self._ready_since = timestamp()
        self._times = times
        self._pods: dict[str, KnownPod] = {}
        self._may_admit = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = PodWorkers(api, runtime, devices, dra, times, rng)
        self._pod_resources = PodResourcesService(
            listed=self.listed_pods,
            find=self._find_listed,
            devices=devices,
            calls=calls,
            rng=rng,
            has_get=behaviour.has_pod_resources_get,
            notify=api.signal.notify,
        )

    def begin_admissions(self) -> None:
        """Before the delay is over."""
        self._may_admit.set()

    async def run(self, paths: NodePaths, *, until: Awaitable[None]) -> None:
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
                await until
                await self._end([pod_resources, registration])
        finally:
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
        if not self.is_listening:
            endpoint.close()
            return
        self.devices.add_endpoint(endpoint)
        self._spawn(self.devices.follow(endpoint), f"device-stream {endpoint.resource}")

    # --- what PodResources and the device manager ask ---

    def active_pods(self) -> set[str]:
        return {uid for uid, pod in self._pods.items() if pod.is_active}

    def listed_pods(self) -> list[KnownPod]:
        lists_ended = self._behaviour.lists_ended_pods
        return [pod for pod in self._pods.values() if lists_ended or pod.is_active]

    def _find_listed(self, namespace: str, name: str) -> KnownPod | None:
        wanted = (namespace, name)
        return next((p for p in self._pods.values() if (p.identity.namespace, p.identity.name) == wanted), None)

    # --- the sync loop ---

    async def _sync_forever(self) -> None:
        await wait_for(self._may_admit, self._times.admission_delay_s)
        self._stop_deleted_pods()
        self._spawn(self._reconcile_claims_forever(), "kubelet-claims")
        mine, changes = self._api.pods_by_node, self._api.pods_by_node.signal_of(self._node_name)
        first = {raw["metadata"]["uid"] for raw in mine.of(self._node_name)}
        while True:
            self._note_ready(first)
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
        """Whether something was done."""
        wanted = {p["metadata"]["uid"]: p for p in self._api.pods_by_node.of(self._node_name)}
        for uid in [uid for uid in self._pods if uid not in wanted]:
            await self._remove(self._pods.pop(uid))
            return True
        for uid, raw in wanted.items():
            pod = self._pods.get(uid)
            if pod is not None and raw["metadata"].get("deletionTimestamp") and pod.state is not PodState.STOPPING:
                pod.raw = raw
                await self._begin_termination(pod)
                return True
        for uid, raw in wanted.items():
            if uid not in self._pods:
                self._pods[uid] = KnownPod.of(raw)
                await self._take_up(self._pods[uid])
                return True
        return False

    async def _take_up(self, pod: KnownPod) -> None:
        if is_terminal(pod.raw):
            pod.state = PodState.ENDED
        elif not pod.raw["metadata"].get("deletionTimestamp"):
            await self._admit(pod)
        self._signal.notify()

    async def _admit(self, pod: KnownPod) -> None:
        try:
            for container in pod.containers:
                await self.devices.allocate(pod.identity, container)
        except AllocationFailed as error:
            log.info("pod_rejected", pod=pod.identity.name, reason=str(error))
            self._workers.reject(pod, REJECTED_REASON, f"Allocate failed due to {error}, which is unexpected")
            if self._runtime.living(pod.identity.uid):
                pod.worker = self._start(pod, self._workers.stop_processes(pod, FORCED_GRACE_S))
            return
        pod.state = PodState.ADMITTED
        pod.worker = self._start(pod, self._workers.run(pod))

    async def _remove(self, pod: KnownPod) -> None:
        """The object has gone. After a forced deletion the processes live on for a while, without their devices."""
        await _cancel({pod.worker} if pod.worker is not None else ())
        if self._runtime.living(pod.identity.uid) or pod.raw["spec"].get("resourceClaims"):
            self._start(pod, self._workers.stop_and_unprepare(pod, FORCED_GRACE_S))
        self._runtime.forget(pod.identity.uid)
        self._signal.notify()

    async def _begin_termination(self, pod: KnownPod) -> None:
        if pod.state in (PodState.REJECTED, PodState.ENDED):
            self._workers.confirm_deletion(pod)
            return
        pod.state = PodState.STOPPING
        await _cancel({pod.worker} if pod.worker is not None else ())
        pod.worker = self._start(pod, self._workers.terminate(pod, grace_s(pod.raw)))

    def _start(self, pod: KnownPod, body: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return self._spawn(body, f"pod {pod.identity.namespace}/{pod.identity.name}")

    def _stop_deleted_pods(self) -> None:
        """Containers of pods that were deleted while the kubelet was down."""
        known = {raw["metadata"]["uid"] for raw in self._api.pods()}
        for uid in self._runtime.pods() - known:
            for container in self._runtime.living(uid):
                self._runtime.stop(container, FORCED_GRACE_S)
            self._runtime.forget(uid)

    async def _reconcile_claims_forever(self) -> None:
        """Claims of pods that ended while the kubelet was down, or whose driver was."""
        while True:
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
        is_reset = not self._has_pushed and not devices
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
                    "kubeletVersion": self._behaviour.release, "containerRuntimeVersion": "embedded://1",
                    "operatingSystem": "linux", "osImage": "gpushare-agent sandbox", "architecture": platform.machine(),
                    "kernelVersion": platform.release(),
                },
            },
        })  # fmt: skip


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Again, where it was swallowed: grpclib turns a cancellation into its own error when the connection breaks then."""
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
