"""The embedded node for tests: short times, a state directory of its own, and a small device plugin to talk to it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpclib.client import Channel
from grpclib.const import Handler
from msgspec import structs
from msgspec.structs import replace

from gpushare_agent.agent.gpus.simulated.driver import simulated_uuid
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.wire import v1, v1beta1
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.api.patch import MERGE, patched
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.controller import NodeController
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.kubelet.device_manager import DeviceRecord
from gpushare_agent.sandbox.node import EmbeddedNode, open_node_on, running_task
from gpushare_agent.sandbox.scheduler.scheduler import EmbeddedScheduler
from gpushare_agent.sandbox.state_directory import prepare_state_directory
from tests.fakes.kubelet_calls import CallLog, PluginCall
from tests.kit.support_grpc import served_at
from tests.support_deadline import DEADLINE_S as DEADLINE_S  # noqa: PLC0414 - exported on
from tests.support_threads import remove_directory

if TYPE_CHECKING:
    from tests.agent.support_agent import InnerAgent

CORES = 100
BLOCKS = 96
"""Memory blocks of a simulated GPU."""

Held = dict[tuple[str, str], tuple[frozenset[str], frozenset[str]]]
"""(pod UID, container) -> vcore IDs, vmemory IDs."""
CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"
_LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
SHORT_TIMES = KubeletTimes(
    admission_delay_s=0.05, status_interval_s=0.03, first_status_s=0.01, container_start_s=0.0, start_retry_s=0.1
)
HELD_ADMISSIONS = replace(SHORT_TIMES, admission_delay_s=3600.0)
"""A kubelet that is started admits pods after `node.kubelet.begin_admissions()`."""


@asynccontextmanager
async def open_test_node(
    state: Path | None = None,
    *,
    kubelet_version: str = "1.36",
    seed: int = 0,
    times: KubeletTimes = SHORT_TIMES,
    node_name: str = "node-a",
    cgroups: str | None = None,
) -> AsyncIterator[NodeUnderTest]:
    """A node with an API server and a scheduler of its own, in `state` or a short directory below /tmp, which is removed
    afterwards. `cgroups` insists on a kind: v2, v1 or none. Use it inside a test, not as a fixture: a TaskGroup must be left
    by the task that entered it.
    """
    own = None if state is not None else Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        paths = prepare_state_directory(own or state)
        async with (
            EmbeddedApiServer(version=kubelet_version) as api,
            running_task("scheduler", EmbeddedScheduler(api=api).run),
            open_node_on(
                api, paths, name=node_name, seed=seed, times=times, cgroups=cgroups, calls=CallLog(api.signal)
            ) as node,
        ):
            yield under_test(node)
    finally:
        if own is not None:
            remove_directory(own)


def pod(name: str, *containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **extra: Any) -> dict[str, Any]:
    """A Pod manifest; `extra` are fields of its spec, `annotations` those of its metadata."""
    metadata: dict[str, Any] = {"name": name, "annotations": extra.pop("annotations", {})}
    spec = {"containers": list(containers) or [container("main")], **extra}
    if init:
        spec["initContainers"] = list(init)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def container(name: str = "main", **limits: int) -> dict[str, Any]:
    """`cores`, `blocks`, or any resource by its `_`-less name through `limits_of`."""
    names = {"cores": CORE, "blocks": MEMORY}
    return limits_of(name, {names[key]: count for key, count in limits.items()})


FOO = "example.com/foo"
"""A resource of somebody else's plugin."""


def foo(name: str = "main", count: int = 1, **extra: Any) -> dict[str, Any]:
    """A container that asks for it."""
    return limits_of(name, {FOO: count}, **extra)


def foo_plugin(count: int = 10, node: int | None = None, **extra: Any) -> SmallPlugin:
    """`node` is the NUMA node of all devices."""
    return SmallPlugin(FOO, {f"foo-{n}": ("Healthy", node) for n in range(count)}, **extra)


def bound(manifest: dict[str, Any]) -> dict[str, Any]:
    """Past the scheduler, as a pod with a node name is."""
    return {**manifest, "spec": {**manifest["spec"], "nodeName": "node-a"}}


def limits_of(name: str, limits: dict[str, int], **extra: Any) -> dict[str, Any]:
    return {"name": name, "image": "busybox", "resources": {"limits": {k: str(v) for k, v in limits.items()}}, **extra}


@dataclass
class SmallPlugin(v1beta1.DevicePluginBase):
    """A device plugin that prefers the first IDs, answers with `answer`, and notes what it was asked.

    `on_allocate` and `on_preferred` run inside the handlers, before the answer.
    """

    resource: str
    devices: dict[str, tuple[str, int | None]]
    """ID -> health, NUMA node."""
    prefers: bool = True
    wants_pre_start: bool = False
    answer: v1beta1.ContainerAllocateResponse = field(default_factory=v1beta1.ContainerAllocateResponse)
    preferred: Callable[[list[str], list[str], int], list[str]] | None = None
    on_preferred: Callable[[], Awaitable[None]] | None = None
    on_allocate: Callable[[list[str]], Awaitable[None]] | None = None
    on_pre_start: Callable[[list[str]], Awaitable[None]] | None = None
    seen: list[tuple[str, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._version = 0
        self.streams_ended = asyncio.Event()

    def __mapping__(self) -> dict[str, Handler]:
        mapping = super().__mapping__()
        watch = mapping[_LIST_AND_WATCH]

        async def noted(stream: Any) -> None:
            try:
                await watch.func(stream)
            finally:
                self.streams_ended.set()

        return {**mapping, _LIST_AND_WATCH: watch._replace(func=noted)}

    async def set_devices(self, devices: dict[str, tuple[str, int | None]]) -> None:
        async with self._changed:
            self.devices, self._version = devices, self._version + 1
            self._changed.notify_all()

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        self.seen.append(("GetDevicePluginOptions", []))
        return v1beta1.DevicePluginOptions(
            pre_start_required=self.wants_pre_start, get_preferred_allocation_available=self.prefers
        )

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        self.seen.append(("ListAndWatch", []))
        sent = -1
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._version != sent)  # noqa: B023 - evaluated at once
                sent, devices = self._version, dict(self.devices)
            yield v1beta1.ListAndWatchResponse(devices=[device_of(name, *state) for name, state in devices.items()])

    async def get_preferred_allocation(
        self, message: v1beta1.PreferredAllocationRequest
    ) -> v1beta1.PreferredAllocationResponse:
        request = message.container_requests[0]
        self.seen.append(("GetPreferredAllocation", list(request.available_device_ids)))
        if self.on_preferred is not None:
            await self.on_preferred()
        must, available = request.must_include_device_ids, request.available_device_ids
        if self.preferred is not None:
            ids = self.preferred(available, must, request.allocation_size)
        else:
            order = {name: position for position, name in enumerate(self.devices)}
            free = sorted(set(available) - set(must), key=order.__getitem__)
            ids = [*must, *free][: request.allocation_size]
        return v1beta1.PreferredAllocationResponse(
            container_responses=[v1beta1.ContainerPreferredAllocationResponse(device_ids=ids)]
        )

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        ids = list(message.container_requests[0].device_ids)
        self.seen.append(("Allocate", ids))
        if self.on_allocate is not None:
            await self.on_allocate(ids)
        return v1beta1.AllocateResponse(container_responses=[self.answer])

    async def pre_start_container(self, message: v1beta1.PreStartContainerRequest) -> v1beta1.PreStartContainerResponse:
        self.seen.append(("PreStartContainer", list(message.device_ids)))
        if self.on_pre_start is not None:
            await self.on_pre_start(list(message.device_ids))
        return v1beta1.PreStartContainerResponse()


def device_of(name: str, health: str, numa: int | None) -> v1beta1.Device:
    topology = None if numa is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa)])
    return v1beta1.Device(id=name, health=health, topology=topology)


def key_of(gpu: str) -> str:
    """What the agent's device IDs of a GPU begin with."""
    return gpu.removeprefix("GPU-")[:8]


def device_ids(*gpus: str, count: int, numa: int | None = 0) -> dict[str, tuple[str, int | None]]:
    return {f"{key_of(gpu)}-{n}": ("Healthy", numa) for gpu in gpus for n in range(count)}


def by_container(answer: v1.ListPodResourcesResponse) -> dict[str, dict[str, set[str]]]:
    """`pod/container` -> resource -> IDs, the entries of one resource merged."""
    found: dict[str, dict[str, set[str]]] = {}
    for listed in answer.pod_resources:
        for item in listed.containers:
            devices = found.setdefault(f"{listed.name}/{item.name}", {})
            for entry in item.devices:
                devices.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return found


def controller_of(node: EmbeddedNode) -> NodeController:
    """Of a node without an agent."""
    return NodeController(
        node=node,
        gpus=(),
        names=ResourceNames(vcore=CORE, vmemory=MEMORY),
        agent=AgentProcess([], node.paths.agent_log, lambda _: None),
        faults=GpuFaults(node.paths.faults, 2),
        addresses={"web": "http://localhost:1"},
    )


def under_test(node: EmbeddedNode) -> NodeUnderTest:
    return NodeUnderTest(**structs.asdict(node))


class NodeUnderTest(EmbeddedNode, frozen=True, kw_only=True, eq=False):
    """An embedded node with what tests do to it, wait for and read. Everything that waits has a deadline."""

    async def start_pods(self, *pods: dict[str, Any]) -> None:
        """Until they run."""
        for one in pods:
            self.api.create_pod(one)
        await self.wait_running(*(one["metadata"]["name"] for one in pods))

    async def remove_pod(self, name: str, **how: Any) -> None:
        """Until it is gone."""
        self.api.delete_pod("default", name, **how)
        await self.wait_gone(name)

    async def settle_pod(self, made: dict[str, Any]) -> str:
        """Until it runs or is refused; the message of the status."""
        self.api.create_pod(made)
        return await self.wait_settled(made["metadata"]["name"])

    def kill_container(self, name: str, container: str = "main") -> None:
        """Ends a container's process as a crash would."""
        found = self.container_of(name, container)
        assert found is not None and found.is_running
        self.kubelet.runtime.kill(found)

    def uid_of(self, name: str) -> PodUid:
        return PodUid(self.api.pod("default", name)["metadata"]["uid"])

    def container_of(self, name: str, container: str = "main") -> Any:
        """The runtime's newest run of it, None before the first."""
        return self.kubelet.runtime.find(self.uid_of(name), container)

    def container_status(self, name: str, container: str = "main") -> dict[str, Any]:
        """What the pod's status says of it, empty before the first word."""
        statuses = self.api.pod("default", name)["status"].get("containerStatuses") or []
        return next((one for one in statuses if one["name"] == container), {})

    def waiting(self, name: str, container: str = "main") -> dict[str, str]:
        """Reason and message of a container that waits."""
        return dict(self.container_status(name, container).get("state", {}).get("waiting", {}))

    def restarts(self, name: str, container: str = "main") -> int:
        return int(self.container_status(name, container).get("restartCount", 0))

    def printed(self, name: str, container: str = "main") -> str:
        """The container's log."""
        path = self.paths.logs / f"default_{name}_{container}.log"
        return path.read_text() if path.exists() else ""

    def condition_of(self, name: str) -> dict[str, Any]:
        """The pod's PodScheduled, empty where the scheduler has not spoken."""
        conditions = self.api.pod("default", name)["status"].get("conditions") or ()
        return next((one for one in conditions if one["type"] == "PodScheduled"), {})

    def messages(self, reason: str) -> list[str]:
        """Those of the Events with that reason."""
        return [event["message"] for event in self.api.events() if event["reason"] == reason]

    def events_of(self, name: str) -> list[tuple[str, str]]:
        """Reason and message of the Events about an object of that name."""
        events = [event for event in self.api.events() if event["involvedObject"]["name"] == name]
        return [(event["reason"], event["message"]) for event in events]

    def annotate(self, name: str, annotations: dict[str, str | None]) -> None:
        """As a client's patch of a pod: None takes one away."""
        raw = self.api.pod("default", name)
        self.api.store.replace("pods", patched(raw, {"metadata": {"annotations": annotations}}, MERGE))

    def healthy(self, resource: str) -> int:
        """How many healthy devices the kubelet has of a resource that was registered."""
        return self.kubelet.devices.capacity()[resource][1]

    def states_of(self, uuid: str) -> set[bool]:
        """The health of a GPU's IDs, of both resources, as the kubelet has them."""
        return {
            state
            for resource in (CORE, MEMORY)
            for device, state in self.kubelet.devices.health(resource).items()
            if device.startswith(key_of(uuid))
        }

    async def register(self, plugin: SmallPlugin, socket_name: str, *, version: str = "v1beta1") -> None:
        channel = Channel(path=str(self.paths.device_plugin_path / "kubelet.sock"))
        try:
            request = v1beta1.RegisterRequest(version=version, endpoint=socket_name, resource_name=plugin.resource)
            await v1beta1.RegistrationStub(channel).register(request)
        finally:
            channel.close()

    @asynccontextmanager
    async def serving(self, plugin: SmallPlugin, socket_name: str) -> AsyncIterator[SmallPlugin]:
        """The plugin on its socket, not registered. Leaving the block cuts its connections, as its process's end does."""
        async with served_at(self.paths.device_plugin_path / socket_name, plugin):
            yield plugin

    @asynccontextmanager
    async def open_plugin(self, plugin: SmallPlugin, socket_name: str = "") -> AsyncIterator[SmallPlugin]:
        """Serving, registered, and its devices known to the kubelet and in the Node object."""
        socket_name = socket_name or f"{plugin.resource.rpartition('/')[2]}.sock"
        async with self.serving(plugin, socket_name):
            await self.register(plugin, socket_name)
            healthy = sum(health == "Healthy" for health, _ in plugin.devices.values())
            await self.wait_allocatable(plugin.resource, healthy)
            yield plugin

    @asynccontextmanager
    async def pod_resources(self) -> AsyncIterator[v1.PodResourcesListerStub]:
        channel = Channel(path=str(self.paths.pod_resources_socket))
        try:
            yield v1.PodResourcesListerStub(channel, timeout=DEADLINE_S)
        finally:
            channel.close()

    async def list_pods(self) -> dict[str, dict[str, set[str]]]:
        async with self.pod_resources() as stub:
            return by_container(await stub.list())

    def arguments(self, *flags: str) -> list[str]:
        """Flags of an agent for this node: no fixed port, everything periodic often."""
        fast = ["--web.port=0", "--allocation.check-period-s=0.2", "--health.check-period-s=0.05"]
        return [*self.agent_arguments(), *fast, *flags]

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """What a child said under this name; the line that is being written right now does not count yet."""
        if not self.paths.agent_log.exists():
            return []
        whole = self.paths.agent_log.read_text().rpartition("\n")[0]
        lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def calls_of(self, name: str, method: str = "Allocate") -> list[PluginCall]:
        return [c for c in self.calls.calls if c.pod_name == name and c.method == method]

    def plugin_socket(self, kind: str) -> Path:
        """Of the one agent that has sockets there; `kind` is vcore, vmemory or gpumem."""
        (found,) = self.paths.device_plugin_path.glob(f"{kind}-*.sock")
        return found

    def active_records(self) -> list[DeviceRecord]:
        """The allocations of pods that have not ended."""
        return [record for record in self.kubelet.devices.records.all() if record.pod_uid in self.kubelet.active_pods()]

    def kubelet_held(self) -> Held:
        """The kubelet's records of pods that live, as the ledger has them."""
        found: dict[tuple[str, str], dict[str, frozenset[str]]] = {}
        for record in self.active_records():
            found.setdefault((record.pod_uid, record.container), {})[record.resource] = frozenset(record.ids)
        return _held(found)

    def given(self) -> Held:
        """What living containers have been given by the answered Allocates, whatever anybody has noted of it."""
        last: dict[tuple[str, str, str], PluginCall] = {}
        for call in self.calls.calls:
            if call.method == "Allocate" and not call.error:
                last[call.pod_uid, call.container, call.resource] = call
        found: dict[tuple[str, str], dict[str, frozenset[str]]] = {}
        for (uid, container, resource), call in last.items():
            if self.kubelet.runtime.is_running(uid, container):
                found.setdefault((uid, container), {})[resource] = frozenset(call.device_ids)
        return _held(found)

    def gpus_of(self, name: str, container: str = "main") -> set[str]:
        """The UUIDs of the GPUs whose vcore IDs a running container was given."""
        keys = {device.rpartition("-")[0] for device in self.kubelet_held()[self.uid_of(name), container][0]}
        uuids = {uuid for index in range(16) if key_of(uuid := simulated_uuid(self.name, index)) in keys}
        assert len(uuids) == len(keys)
        return uuids

    def assert_nothing_shared(self, *, blocks: int = BLOCKS) -> None:
        """No ID is held by two live containers, each container is on one GPU or on whole ones, and no GPU is overfull."""
        held = self.given()
        for kind in (0, 1):
            ids = [device for both in held.values() for device in both[kind]]
            assert len(ids) == len(set(ids)), f"held twice: {sorted({d for d in ids if ids.count(d) > 1})[:5]}"
        used: dict[str, int] = {}
        for key, (vcores, vmemory) in sorted(held.items()):
            per_gpu: dict[str, int] = {}
            for device in vcores:
                key = device.rpartition("-")[0]
                per_gpu[key] = per_gpu.get(key, 0) + 1
            if not vcores:  # a GPU under one of NVIDIA's names
                continue
            assert len(per_gpu) == 1 or set(per_gpu.values()) == {CORES}, (key, per_gpu)
            if len(vcores) < CORES:
                gpu = next(iter(per_gpu))
                used[gpu] = used.get(gpu, 0) + len(vmemory)
        assert all(count <= blocks for count in used.values()), used

    async def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        return await self.kubelet.wait_for(condition, DEADLINE_S, what)

    async def wait_allocatable(self, resource: str, count: int) -> None:
        def is_shown() -> bool:
            raw = self.api.store.find("nodes", ("", self.name)) or {}
            # The Node object outlives the kubelet.
            is_known = self.kubelet.devices.capacity().get(resource, (0, 0))[1] == count
            return is_known and raw.get("status", {}).get("allocatable", {}).get(resource) == str(count)

        await self.kubelet.wait_for(is_shown, DEADLINE_S, f"{count} {resource} allocatable on the node")

    async def wait_devices(self, resource: str, known: int, healthy: int) -> None:
        """The kubelet knows so many devices of it, of them so many are healthy."""
        devices = self.kubelet.devices
        what = f"{healthy} of {known} {resource} healthy"
        await self.wait_until(lambda: devices.capacity().get(resource) == (known, healthy), what)

    async def wait_annotation(self, name: str, key: str, value: str) -> dict[str, str]:
        """All annotations of a pod, once this one has the value."""

        def found() -> dict[str, str]:
            return dict(self.api.pod("default", name)["metadata"].get("annotations", {}))

        await self.wait_until(lambda: found().get(key) == value, f"annotation {key} of pod {name}")
        return found()

    async def wait_registered(self) -> None:
        """The kubelet has healthy devices of both resources, and the scheduler knows it."""

        def is_shown() -> bool:
            raw = (self.api.store.find("nodes", ("", self.name)) or {}).get("status", {}).get("allocatable", {})
            healthy = {name: str(count) for name, (_, count) in self.kubelet.devices.capacity().items() if count}
            return all(name in healthy and raw.get(name) == healthy[name] for name in (CORE, MEMORY))

        await self.wait_until(is_shown, "both resources allocatable")

    async def wait_healthy_devices(self) -> None:
        """The kubelet alone has them, of both resources: for a test without an API server."""

        def is_there() -> bool:
            capacity = self.kubelet.devices.capacity()
            return all(capacity.get(name, (0, 0))[1] for name in (CORE, MEMORY))

        await self.wait_until(is_there, "healthy devices of both resources")

    async def wait_phase(self, name: str, *phases: str, namespace: str = "default") -> dict[str, Any]:
        def settled() -> dict[str, Any] | None:
            raw = self.api.find_pod(namespace, name)
            return raw if raw is not None and raw["status"]["phase"] in phases else None

        found = await self.kubelet.wait_for(settled, DEADLINE_S, f"pod {name} in phase {' or '.join(phases)}")
        assert found is not None
        return found

    async def wait_settled(self, name: str) -> str:
        """Running or Failed; the message of the status."""
        raw = await self.wait_phase(name, "Running", "Failed")
        return str(raw["status"].get("message", ""))

    async def wait_running(self, *names: str) -> None:
        for name in names:
            await self.wait_settled(name)
            found = self.api.pod("default", name)["status"]
            assert found["phase"] == "Running", (name, found)

    async def wait_gone(self, name: str, *, namespace: str = "default") -> None:
        await self.kubelet.wait_for(lambda: self.api.find_pod(namespace, name) is None, DEADLINE_S, f"pod {name} gone")

    async def wait_ledger_equal(self, agent: InnerAgent) -> None:
        """The ledger of the agent are the kubelet's records of the pods that live."""
        try:
            await self.wait_until(lambda: agent.held() == self.kubelet_held(), "a ledger like the kubelet's records")
        except TimeoutError as error:
            raise AssertionError(f"agent: {_brief(agent.held())}\nkubelet: {_brief(self.kubelet_held())}") from error

    async def wait_sound(self, agent: InnerAgent) -> None:
        """The ledger is the kubelet's, and nothing is given twice."""
        await self.wait_ledger_equal(agent)
        self.assert_nothing_shared()


def _held(by_resource: dict[tuple[str, str], dict[str, frozenset[str]]]) -> Held:
    return {key: (ids.get(CORE, frozenset()), ids.get(MEMORY, frozenset())) for key, ids in by_resource.items()}


def _brief(held: Held) -> dict[str, tuple[int, int]]:
    return {f"{uid[:8]}/{name}": (len(both[0]), len(both[1])) for (uid, name), both in sorted(held.items())}
