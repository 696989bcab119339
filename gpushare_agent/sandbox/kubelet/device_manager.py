"""The embedded kubelet's device manager. It asks the plugins which IDs a container gets, as a real one asks them.

State owned: the known resources with their devices, the set of allocated IDs, the records, the IDs that later containers
of the pod under admission may reuse. The set of allocated IDs is kept next to the records, and is rebuilt from them
whenever a device pod has ended. An Allocate that is open then loses its IDs, and the next admission is offered them again.
The real kubelet has this fault, and it stays here on purpose (docs/reference/sandbox.md).

The records outlive a restart in `kubelet_internal_checkpoint`, which has the shape of a real one
(docs/reference/formats.md): node -> IDs, AllocResp in base64, entries of ended pods until the next allocation. The
Checksum is a CRC of our own: the real one hashes Go structures.

Calls for admissions are serial because the kubelet's sync loop is; nothing here makes them so.
"""

from __future__ import annotations

import base64
import json
import random
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.protobuf import bytes_field, integer_field, string_list
from gpushare_agent.core.kit.regular_file import replace_whole
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.sandbox.kubelet.calls import CallSubject, NodeParts
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginCallError, PluginDevice, PluginEndpoint

log = structlog.get_logger(__name__)

CHECKPOINT_NAME = "kubelet_internal_checkpoint"
NO_NODE = -1
"""The kubelet's key for devices without topology."""


class DeviceRecord(Struct, frozen=True, kw_only=True):
    """The IDs of one resource of one container, by NUMA node, with the plugin's raw answer.

    `listed` holds one ContainerDevices entry per ID as a ready field 2 of ContainerResources; `entry` is the record in the
    checkpoint.
    """

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes
    listed: tuple[bytes, ...]
    entry: Mapping[str, object]


def make_record(
    owner: tuple[str, str], resource: str, nodes_by_id: Mapping[str, tuple[int, ...]], response: bytes
) -> DeviceRecord:
    by_node: dict[int, list[str]] = {}
    for device, nodes in nodes_by_id.items():
        # A device with two NUMA nodes stands under both, as in a real checkpoint.
        for node in nodes or (NO_NODE,):
            by_node.setdefault(node, []).append(device)
    entry = {
        "PodUID": owner[0], "ContainerName": owner[1], "ResourceName": resource,
        "DeviceIDs": {str(node): ids for node, ids in sorted(by_node.items())},
        "AllocResp": base64.b64encode(response).decode(),
    }  # fmt: skip
    return DeviceRecord(
        pod_uid=owner[0], container=owner[1], resource=resource, ids=tuple(nodes_by_id), response=response,
        # One entry for each ID, as measured: a reader that keeps one entry for each resource loses devices.
        listed=tuple(bytes_field(2, listed_device(resource, *item)) for item in nodes_by_id.items()),
        entry=entry,
    )  # fmt: skip


def listed_device(resource: str, device: str, nodes: tuple[int, ...]) -> bytes:
    """A ContainerDevices message with one ID."""
    name = bytes_field(1, resource.encode()) + bytes_field(2, device.encode())
    topology = b"".join(bytes_field(1, integer_field(1, node) if node else b"") for node in nodes)
    return name + (bytes_field(3, topology) if nodes else b"")


class DeviceRecords:
    """The records by pod UID, container and resource, in order of allocation, and their checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, dict[str, dict[str, DeviceRecord]]] = {}

    def insert(self, record: DeviceRecord) -> None:
        self._records.setdefault(record.pod_uid, {}).setdefault(record.container, {})[record.resource] = record

    def of_container(self, pod_uid: str, container: str) -> Mapping[str, DeviceRecord]:
        return self._records.get(pod_uid, {}).get(container, {})

    def all(self) -> list[DeviceRecord]:
        return [r for pod in self._records.values() for container in pod.values() for r in container.values()]

    def pods(self) -> set[str]:
        return set(self._records)

    def remove(self, pod_uids: Iterable[str]) -> None:
        for pod_uid in pod_uids:
            self._records.pop(pod_uid, None)

    def allocated(self) -> dict[str, set[str]]:
        """The IDs by resource, made from the records alone: what an open Allocate is about to get is not in it."""
        found: dict[str, set[str]] = {}
        for record in self.all():
            found.setdefault(record.resource, set()).update(record.ids)
        return found

    def container_message(self, pod_uid: str, container: str, rng: random.Random) -> bytes:
        """A ContainerResources message; resources and IDs come in another order each time."""
        parts = [bytes_field(1, container.encode())]
        records = list(self.of_container(pod_uid, container).values())
        # A real kubelet ranges over Go maps: no client may rely on an order.
        rng.shuffle(records)
        for record in records:
            turn = rng.randrange(len(record.listed)) if record.listed else 0
            parts.extend((*record.listed[turn:], *record.listed[:turn]))
        return b"".join(parts)

    # --- the checkpoint ---

    def write(self, registered: Mapping[str, Collection[str]]) -> None:
        """`registered` holds each resource's healthy IDs. Replaces the file in one step."""
        # By msgspec: a node has tens of thousands of IDs, and each admission writes the file.
        data = {"PodDeviceEntries": [record.entry for record in self.all()], "RegisteredDevices": registered}
        text = msgspec.json.encode(data)
        replace_whole(self._path, b'{"Data":%b,"Checksum":%d}' % (text, zlib.crc32(text)))

    def read(self) -> set[str]:
        """Takes the records from the file; returns the resources that were registered. Starts empty without one."""
        try:
            raw = json.loads(self._path.read_text())["Data"]
            # Go writes null for an empty list.
            for entry in raw["PodDeviceEntries"] or ():
                owner = (entry["PodUID"], entry["ContainerName"])
                self.insert(
                    make_record(owner, entry["ResourceName"], _nodes_by_id(entry), base64.b64decode(entry["AllocResp"]))
                )
            return set(raw["RegisteredDevices"] or ())
        # The first start of a node, or somebody has removed it: everything begins at zero.
        except FileNotFoundError:
            return set()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "checkpoint_unreadable", path=str(self._path), error=repr(error), consequence="starting without records"
            )
            self._records.clear()
            return set()


def _nodes_by_id(entry: Mapping[str, Mapping[str, list[str]]]) -> dict[str, tuple[int, ...]]:
    nodes: dict[str, tuple[int, ...]] = {}
    for node, ids in entry["DeviceIDs"].items():
        for device in ids:
            # The inverse of `make_record`: an ID under two nodes has both again.
            nodes[device] = (*nodes.get(device, ()), int(node)) if int(node) != NO_NODE else ()
    return nodes


STOPPED_GRACE_S = 300.0
"""How long a plugin's devices still count in the node's capacity after its end."""


class AllocationFailed(Rejected):
    """A container cannot get its devices; the text is what the kubelet puts after "Allocate failed due to"."""


class PodIdentity(Struct, frozen=True, kw_only=True):
    uid: str
    namespace: str
    name: str


class _Resource(Struct):
    """The state of one resource. Without an endpoint it is only known from the checkpoint."""

    endpoint: PluginEndpoint | None = None
    devices: Mapping[str, PluginDevice] = field(default_factory=dict)
    shuffled: list[PluginDevice] = field(default_factory=list)
    healthy: frozenset[str] = frozenset()
    stopped_at: float | None = None
    """When the plugin that registered last was disconnected; None while it is connected."""


class DeviceManager:
    """One per start of the kubelet."""

    def __init__(self, parts: NodeParts, active_pods: Callable[[], set[str]], *, has_records: bool = True) -> None:
        self.records = DeviceRecords(parts.paths.device_plugin_path / CHECKPOINT_NAME)
        self.is_ready = False
        """All pods of the node have been seen once since the start."""
        # Known before any plugin registers: a pod that asks for one of them is rejected, where one that asks for a
        # resource that the node never heard of runs without it.
        self._resources = {name: _Resource() for name in (self.records.read() if has_records else ())}
        self._allocated = self.records.allocated()
        # Only those of the newest pod, because admissions are serial.
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})
        self._active_pods = active_pods
        self._parts = parts
        self._rng = parts.rng
        self._notify = parts.api.signal.notify
        self._endpoints: list[PluginEndpoint] = []

    # --- plugins ---

    def add_endpoint(self, endpoint: PluginEndpoint) -> None:
        """The newest registration of a resource is the one that counts. The one before stays connected and is ignored."""
        resource = self._resources.setdefault(endpoint.resource, _Resource())
        # The devices of before stay until the new plugin's first list.
        resource.endpoint, resource.stopped_at = endpoint, None
        self._endpoints.append(endpoint)

    async def follow(self, endpoint: PluginEndpoint) -> None:
        """Takes the plugin's device lists until its stream ends. The kubelet then disconnects the plugin that registered the
        resource last, even if it is another one (measured), and the devices are unhealthy."""
        reason = await endpoint.follow_devices(lambda devices: self._receive(endpoint, devices))
        endpoint.close()
        resource = self._resources[endpoint.resource]
        # By the resource's name, as the real one: the stream that ended may belong to another plugin than the one that is
        # disconnected.
        if resource.endpoint is not None and resource.stopped_at is None:
            resource.endpoint.close()
            # Unhealthy and not gone: capacity stays, allocatable is 0.
            resource.healthy = frozenset()
            resource.stopped_at = time.monotonic()
            log.info("plugin_stream_ended", resource=endpoint.resource, reason=reason)
            self._notify()

    def _receive(self, endpoint: PluginEndpoint, devices: Mapping[str, PluginDevice]) -> None:
        resource = self._resources[endpoint.resource]
        # The older plugin's stream stays open and counts no more.
        if resource.endpoint is not endpoint:
            return
        resource.devices = devices
        # Once for each list and not at each call: a list may have 100,000 IDs.
        resource.shuffled = self._rng.sample(list(devices.values()), len(devices))
        resource.healthy = frozenset(d.id for d in devices.values() if d.is_healthy)
        # Registered devices are in it too: after a restart they say which resources are known.
        self._write_checkpoint()
        self._notify()

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()

    def capacity(self) -> dict[str, tuple[int, int]]:
        """Devices and healthy devices of every resource ever seen since the start."""
        found = {}
        for name, resource in sorted(self._resources.items()):
            # Five minutes after a plugin's end (302 s measured); the resource's key stays with zero.
            is_gone = resource.stopped_at is not None and time.monotonic() - resource.stopped_at > STOPPED_GRACE_S
            found[name] = (0, 0) if is_gone else (len(resource.devices), len(resource.healthy))
        return found

    def health(self, resource: str) -> dict[str, bool]:
        """The plugin's devices and whether the kubelet holds them for healthy, in the plugin's order."""
        known = self._resources.get(resource)
        return {device: device in known.healthy for device in known.devices} if known is not None else {}

    def allocated(self, resource: str) -> frozenset[str]:
        return frozenset(self._allocated.get(resource, ()))

    # --- allocation ---

    def update_allocated(self) -> None:
        """Forgets the records of ended pods, and then rebuilds the allocated set. PodResources List does this too."""
        # Never the pod under admission, as in the real one: it may be in no list of active pods yet.
        gone = self.records.pods() - self._active_pods() - {self._reusable[0]}
        # Until all pods were seen once, a missing pod may only not have been taken up yet.
        if self.is_ready and gone:
            self.records.remove(gone)
            # Made from the records alone: the IDs of an Allocate that is open are not in them, and are offered again. So
            # it goes in the real one (once in 146 Allocates of ordinary churn).
            self._allocated = self.records.allocated()

    async def allocate(self, pod: PodIdentity, container: ContainerSpec) -> None:
        """Raises AllocationFailed. What earlier resources of the container got is kept until the pod is forgotten."""
        # Init containers' IDs pass to later containers of their pod, and to no others.
        if self._reusable[0] != pod.uid:
            self._reusable = (pod.uid, {})
        reusable = self._reusable[1]
        await self._allocate_resources(pod, container, reusable)
        for name, record in self.records.of_container(pod.uid, container.name).items():
            # An init container has ended when the next begins; a sidecar runs on with its IDs.
            if container.kind is ContainerKind.INIT:
                reusable.setdefault(name, set()).update(record.ids)
            else:
                reusable.setdefault(name, set()).difference_update(record.ids)

    async def _allocate_resources(
        self, pod: PodIdentity, container: ContainerSpec, reusable: dict[str, set[str]]
    ) -> None:
        requests = self._known_requests(container)
        # A pod without devices leaves the set alone, as in the real one.
        if requests:
            self.update_allocated()
        is_changed = False
        for name, count in requests:
            subject = CallSubject(pod.uid, pod.name, container.name, name)
            ids = await self._choose(subject, count, reusable.get(name, set()))
            # None: the container has them already, from before a restart.
            if ids:
                await self._allocate_ids(subject, ids)
                is_changed = True
        if is_changed:
            self._write_checkpoint()
            self._notify()

    def _known_requests(self, container: ContainerSpec) -> list[tuple[str, int]]:
        """The known resources that it requests, in random order, as the kubelet ranges over a Go map. An unknown resource
        is skipped: the pod runs without."""
        known = [
            item for item in container.requests.items() if item[0] in self._resources or item[0] in self._allocated
        ]
        self._rng.shuffle(known)
        return known

    async def _choose(self, subject: CallSubject, count: int, reusable: set[str]) -> list[str]:
        """The IDs to ask for; none where the container has its devices already."""
        name = subject.resource
        record = self.records.of_container(subject.pod_uid, subject.container).get(name)
        # In a kubelet's own words: the record is of another request than the spec's.
        if record is not None and len(record.ids) != count:
            raise AllocationFailed(
                f'pod "{subject.pod_uid}" container "{subject.container}" changed request for resource "{name}" '
                f"from {len(record.ids)} to {count}"
            )
        # After a restart plugins may register later than the pods are synced: what runs keeps its devices unasked.
        if not self.is_ready and self._parts.runtime.is_running(subject.pod_uid, subject.container):
            return []
        self._check_health(name, record.ids if record else ())
        if record is not None:
            return []
        # The init container's IDs first, without asking the plugin: as measured there is no GetPreferredAllocation for
        # them.
        chosen = self._take(name, self._rng.sample(sorted(reusable), min(count, len(reusable))))
        # All from the init container: Allocate is called with no question before it.
        if len(chosen) == count:
            return chosen
        return chosen + await self._choose_free(subject, count, chosen)

    def _check_health(self, name: str, allocated: tuple[str, ...]) -> None:
        resource = self._resources.get(name)
        if resource is None:
            raise AllocationFailed(f"cannot allocate unregistered device {name}")
        # Also where the plugin has just restarted: the pod is rejected for good, though the plugin comes back a second
        # later.
        if not resource.healthy:
            raise AllocationFailed(f"no healthy devices present; cannot allocate unhealthy devices {name}")
        if not resource.healthy.issuperset(allocated):
            raise AllocationFailed(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {name}"
            )

    async def _choose_free(self, subject: CallSubject, count: int, must_include: list[str]) -> list[str]:
        """Asks the plugin. Its answer is advice: what it leaves open is filled at random."""
        name = subject.resource
        resource = self._resources[name]
        taken, missing = self._allocated.get(name, set()), count - len(must_include)
        # `taken` may lack IDs that are in use (see the head): they are offered all the same.
        free = [d for d in resource.shuffled if d.id in resource.healthy and d.id not in taken]
        if len(free) < missing:
            raise AllocationFailed(
                f"requested number of devices unavailable for {name}. Requested: {missing}, Available: {len(free)}"
            )
        # Asked even where exactly as many are free as are needed (10 of 10 measured).
        preferred = await self._ask_preferred(subject, free, must_include, count)
        free_ids = {d.id for d in free}
        # Unknown IDs of the answer are ignored, and none counts twice.
        liked = [device for device in dict.fromkeys(preferred) if device in free_ids]
        chosen = self._rng.sample(liked, min(missing, len(liked)))
        left = missing - len(chosen)
        chosen += self._rng.sample([d.id for d in free if d.id not in set(chosen)], left) if left else []
        return self._take(name, chosen)

    async def _ask_preferred(
        self, subject: CallSubject, free: list[PluginDevice], must_include: list[str], count: int
    ) -> list[str]:
        endpoint = self._resources[subject.resource].endpoint
        if endpoint is None or not endpoint.options.get_preferred_allocation_available:
            return []
        # The list was shuffled when it arrived: at each call a rotation is enough for an order that nobody can rely on.
        turn = self._rng.randrange(len(free))
        offered = [*free[turn:], *free[:turn]]
        frames = b"".join([d.frame for d in offered]) + string_list(1, must_include)
        # The plugin sees them as available too: must-include IDs are a part of the set.
        ids = (*(d.id for d in offered), *must_include)
        try:
            with self._parts.calls.plugin_call("GetPreferredAllocation", subject, ids, must_include, count):
                return await endpoint.get_preferred_allocation(frames, must_include, count)
        except PluginCallError as error:
            raise AllocationFailed(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error

    def _take(self, name: str, ids: list[str]) -> list[str]:
        self._allocated.setdefault(name, set()).update(ids)
        return ids

    async def _allocate_ids(self, subject: CallSubject, ids: list[str]) -> None:
        endpoint = self._resources[subject.resource].endpoint
        # The IDs of an Allocate come in random order (measured).
        self._rng.shuffle(ids)
        try:
            if endpoint is None or endpoint.is_stopped:
                raise PluginCallError(f"endpoint {subject.resource} has been stopped")
            with self._parts.calls.plugin_call("Allocate", subject, ids) as answered:
                response = await endpoint.allocate(ids)
                answered(response or b"")
        except PluginCallError as error:
            # As the real one: IDs that this admission has chosen but not recorded are free again.
            self._allocated = self.records.allocated()
            raise AllocationFailed(str(error)) from error
        if response is None:
            raise AllocationFailed("no containers return in allocation response &AllocateResponse{}")
        devices = self._resources[subject.resource].devices
        # A device may have left the list since it was chosen; the record keeps its ID.
        nodes = {device: devices[device].numa_nodes if device in devices else () for device in ids}
        self.records.insert(make_record((subject.pod_uid, subject.container), subject.resource, nodes, response))

    # --- start of a container ---

    async def prepare_start(self, pod: PodIdentity, container: ContainerSpec) -> None:
        """Calls PreStartContainer if the plugin asks for it, then Allocate for what became known after the admission.

        Raises AllocationFailed; the container does not start then.
        """
        is_missing = False
        for name, _ in self._known_requests(container):
            await self._pre_start(CallSubject(pod.uid, pod.name, container.name, name))
            # The resource became known after the admission: the pod worker allocates it when the container starts, while
            # other admissions run.
            is_missing = is_missing or name not in self.records.of_container(pod.uid, container.name)
        if is_missing:
            await self.allocate(pod, container)

    async def _pre_start(self, subject: CallSubject) -> None:
        resource = self._resources.get(subject.resource)
        endpoint = resource.endpoint if resource else None
        # Without a plugin too: the container restarts with its old devices (measured).
        if endpoint is None or not endpoint.options.pre_start_required:
            return
        record = self.records.of_container(subject.pod_uid, subject.container).get(subject.resource)
        if record is None:
            raise AllocationFailed(
                f"no devices found allocated in local cache for pod {subject.pod_uid}, container {subject.container}, "
                f"resource {subject.resource}"
            )
        ids = self._rng.sample(record.ids, len(record.ids))
        try:
            if endpoint.is_stopped:
                raise PluginCallError(f"endpoint {subject.resource} has been stopped")
            with self._parts.calls.plugin_call("PreStartContainer", subject, ids):
                await endpoint.pre_start_container(ids)
        except PluginCallError as error:
            raise AllocationFailed(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def _write_checkpoint(self) -> None:
        resources = sorted(self._resources.items())
        self.records.write({name: [one for one in known.devices if one in known.healthy] for name, known in resources})
