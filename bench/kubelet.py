"""The kubelet of the benchmark: registration with dial-back, PodResources with its rate limit, admissions one at a time.

It does what a kubelet does towards a device plugin and nothing else, with everything encoded ahead. Not the embedded
kubelet of gpushare_agent/sandbox, whose own work (records, checkpoint, pod workers) would be measured along.
State owned: the pods that it lists, the free devices, and the times of what happened.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.http2 import CallError, Handler, Http2Connection, dial
from bench.pods import BenchPod, Device, device
from gpushare_agent.core.kit.protobuf import bytes_field, integer_field, string_list
from gpushare_agent.core.wire.v1 import GetPodResourcesRequest
from gpushare_agent.core.wire.v1beta1 import PreferredAllocationResponse, RegisterRequest
from gpushare_agent.sandbox.kubelet.plugin_endpoint import parse_devices
from gpushare_agent.sandbox.state_directory import NodePaths

_PLUGIN = "/v1beta1.DevicePlugin"
_CALLS_PER_S, _BURST = 100.0, 10.0
"""The kubelet's rate limit of PodResources."""


@dataclass(slots=True, kw_only=True)
class Plugin:
    """One registered plugin. Times are of time.perf_counter, `message` is its newest device list, `listed_at` the time
    of the first one and `received_at` of this one."""

    resource: str
    connection: Http2Connection
    registered_at: float
    stream_opened_at: float = 0.0
    listed_at: float = 0.0
    received_at: float = 0.0
    message: bytes = b""
    _devices: dict[str, Device] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, Device]:
        """Decoded when first asked for: while lists are awaited, decoding one would hold up the other."""
        if not self._devices:
            self._devices = _devices(self.resource, self.message)
        return self._devices

    def receive(self, message: bytes) -> None:
        self.received_at = time.perf_counter()
        self.listed_at = self.listed_at or self.received_at
        self.message, self._devices = message, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """Seconds of the two calls of one resource."""

    preferred_s: float
    allocate_s: float

    @property
    def total_s(self) -> float:
        return self.preferred_s + self.allocate_s


class RefusedPodError(Exception):
    """The plugin failed a call, or its answer cannot be used."""


class BenchKubelet:
    """Open with `async with`. `start` and `restart` make the sockets; calls and answers run in its task group."""

    def __init__(self, paths: NodePaths) -> None:
        self.plugin_directory = paths.device_plugin_path
        self.pod_resources_socket = paths.pod_resources_socket
        paths.make_directories()
        self.plugins: dict[str, Plugin] = {}
        self.pods: dict[str, BenchPod] = {}
        self.calls = 0
        """Of PodResources, refused ones included."""
        self.last_call_at = 0.0
        self.changed = asyncio.Condition()
        self._rng = random.Random(1)
        self._tokens, self._filled_at = _BURST, time.monotonic()
        self._servers: list[asyncio.Server] = []
        self._connections: list[Http2Connection] = []
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> BenchKubelet:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.stop()
        await self._group.__aexit__(*exception)  # type: ignore[arg-type]  # the three arguments, passed on

    # --- start and stop ---

    async def start(self) -> float:
        """Makes both sockets; the time at which kubelet.sock was there."""
        answers: dict[str, Handler] = {
            "/v1.PodResourcesLister/List": self._list,
            "/v1.PodResourcesLister/Get": self._get,
        }
        await self._serve(self.pod_resources_socket, answers)
        at = time.perf_counter()
        await self._serve(self.plugin_directory / "kubelet.sock", {"/v1beta1.Registration/Register": self._register})
        return at

    def stop(self) -> None:
        """Cuts every connection, as the end of the process does; socket files stay."""
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.close()
        for plugin in self.plugins.values():
            plugin.connection.close()
        self._servers, self._connections = [], []
        self.plugins = {}

    async def restart(self) -> float:
        """Ends, removes every socket of the directory, as a starting kubelet does, and starts again."""
        self.stop()
        await asyncio.sleep(0.05)
        for path in self.plugin_directory.iterdir():
            if path.is_socket():
                path.unlink()
        return await self.start()

    async def _serve(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))

        def accept() -> Http2Connection:
            connection = Http2Connection(handlers, self._group)
            self._connections.append(connection)
            return connection

        self._servers.append(await asyncio.get_running_loop().create_unix_server(accept, sock=listener))

    async def wait(self, resources: tuple[str, ...], timeout_s: float) -> None:
        """Until the plugins of `resources` are registered and their first lists have come. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(
                lambda: all(name in self.plugins and self.plugins[name].listed_at for name in resources)
            )

    # --- registration ---

    async def _register(self, message: bytes) -> bytes:
        request = RegisterRequest.parse(message)
        try:
            connection = await dial(self.plugin_directory / request.endpoint)
        except OSError as error:
            # The agent registers before it has seen that its socket was removed: the kubelet refuses, and it comes again.
            raise CallError(str(error)) from error
        await connection.call(f"{_PLUGIN}/GetDevicePluginOptions", b"")
        name = request.resource_name
        plugin = Plugin(resource=name, connection=connection, registered_at=time.perf_counter())
        self.plugins[name] = plugin
        self._group.create_task(self._follow(plugin), name=f"list {name}")
        return b""

    async def _follow(self, plugin: Plugin) -> None:
        def receive(message: bytes) -> None:
            plugin.receive(message)
            self._group.create_task(self._notify_changed(), name="notify of devices")

        plugin.stream_opened_at = time.perf_counter()
        try:
            await plugin.connection.subscribe(f"{_PLUGIN}/ListAndWatch", receive)
        except CallError:
            return  # the plugin, or this kubelet, ended

    async def _notify_changed(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # --- PodResources ---

    async def _list(self, _message: bytes) -> bytes:
        self._spend_token()
        pods = list(self.pods.values())
        # As a kubelet, which ranges over Go's maps: pods and devices are in another order each time.
        first = self._rng.randrange(max(1, len(pods)))
        pods = pods[first:] + pods[:first]
        return b"".join([pod.listed_backwards if self.calls % 2 else pod.listed for pod in pods])

    async def _get(self, message: bytes) -> bytes:
        self._spend_token()
        pod = self.pods.get(GetPodResourcesRequest.parse(message).pod_name)
        if pod is None:
            raise CallError("pod not found")
        return pod.listed

    def _spend_token(self) -> None:
        self.calls += 1
        now = self.last_call_at = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._filled_at) * _CALLS_PER_S)
        self._filled_at = now
        if self._tokens < 1.0:
            raise CallError("rejected by rate limit")
        self._tokens -= 1.0

    # --- admission ---

    async def admit(self, pod: BenchPod, resources: tuple[str, ...]) -> dict[str, CallTimes]:
        """Lists the pod and asks for its resources in this order. Raises RefusedPodError."""
        self.pods[pod.name] = pod
        try:
            return {resource: await self._allocate(pod, resource) for resource in resources}
        except RefusedPodError:
            self.remove(pod.name)
            raise

    async def pre_start(self, pod: BenchPod, resource: str) -> float:
        """PreStartContainer of the pod's container; seconds until the plugin agreed. Raises CallError."""
        ids = string_list(1, [one.id for one in pod.allocated[resource]])
        started = time.perf_counter()
        await self.plugins[resource].connection.call(f"{_PLUGIN}/PreStartContainer", ids)
        return time.perf_counter() - started

    def remove(self, name: str) -> None:
        self.pods.pop(name, None)

    async def wait_quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Until PodResources was not called for so long. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                left = self.last_call_at + quiet_s - time.monotonic()
                if left <= 0:
                    return
                await asyncio.sleep(left)

    async def _allocate(self, pod: BenchPod, resource: str) -> CallTimes:
        plugin, count = self.plugins[resource], pod.requests[resource]
        taken = {one.id for other in self.pods.values() for one in other.allocated.get(resource, ())}
        free = [one for one in plugin.devices.values() if one.id not in taken]
        self._rng.shuffle(free)
        offer = bytes_field(1, b"".join([one.offer for one in free]) + integer_field(3, count))
        try:
            started = time.perf_counter()
            answer = await plugin.connection.call(f"{_PLUGIN}/GetPreferredAllocation", offer)
            preferred_at = time.perf_counter()
            preferred = PreferredAllocationResponse.parse(answer).container_responses[0].device_ids
            offered_ids = {one.id for one in free}
            if len(set(preferred)) != count or not offered_ids.issuperset(preferred):
                preferred = [one.id for one in free[:count]]  # as a kubelet does: the refusal comes from Allocate
            asked_at = time.perf_counter()
            answer = await plugin.connection.call(
                f"{_PLUGIN}/Allocate", bytes_field(1, string_list(1, self._rng.sample(preferred, count)))
            )
            ended = time.perf_counter()
        except CallError as error:
            raise RefusedPodError(f"{pod.name}, {resource}: {error}") from error
        pod.answers[resource] = answer
        pod.hold(resource, [plugin.devices[name] for name in preferred])
        return CallTimes(preferred_s=preferred_at - started, allocate_s=ended - asked_at)


def _devices(resource: str, message: bytes) -> dict[str, Device]:
    """The healthy devices of a ListAndWatchResponse."""
    healthy = [one for one in parse_devices(message).values() if one.is_healthy]
    return {one.id: device(resource, one.id, (*one.numa_nodes, 0)[0]) for one in healthy}
