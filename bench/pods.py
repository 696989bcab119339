"""The pods of the benchmark, as the API server, the kubelet's PodResources API and a device plugin each see them.

Encoded once, ahead of what is measured. Formats: protos/podresources.proto, protos/deviceplugin.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpushare_agent.core.kit.protobuf import bytes_field, integer_field
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE

NAMESPACE = "bench"
CONTAINER = "main"
FOREIGN_RESOURCE = "example.com/fabric-port"
"""Of another device plugin: the node has 3,360 IDs of ours, and 5,000 shall be listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device ID. `entry` is how PodResources lists it, `offer` how GetPreferredAllocation offers it."""

    id: str
    entry: bytes
    offer: bytes

    @property
    def gpu(self) -> str:
        return self.id.rpartition("-")[0]


def device(resource: str, name: str, numa: int) -> Device:
    node = integer_field(1, numa) if numa else b""
    listed = bytes_field(1, resource.encode()) + bytes_field(2, name.encode())
    topology = bytes_field(3, bytes_field(1, node))
    return Device(id=name, entry=bytes_field(2, listed + topology), offer=bytes_field(1, name.encode()))


@dataclass(slots=True, kw_only=True)
class BenchPod:
    """A pod of one container, and the devices that it holds by resource."""

    name: str
    requests: dict[str, int]
    raw: dict[str, Any] = field(default_factory=dict)
    allocated: dict[str, list[Device]] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    """What Allocate answered."""
    listed: bytes = b""
    listed_backwards: bytes = b""

    def hold(self, resource: str, devices: list[Device]) -> None:
        self.allocated[resource] = devices
        self.encode()

    def encode(self) -> None:
        """Makes `listed`: field 1 of a List answer; and the same with its devices in another order."""
        entries = [one.entry for devices in self.allocated.values() for one in devices]
        self.listed, self.listed_backwards = self._encoded(entries), self._encoded(entries[::-1])

    def _encoded(self, devices: list[bytes]) -> bytes:
        container = bytes_field(1, CONTAINER.encode()) + b"".join(devices)
        body = bytes_field(1, self.name.encode()) + bytes_field(2, NAMESPACE.encode()) + bytes_field(3, container)
        return bytes_field(1, body)

    @property
    def uid(self) -> str:
        """The API server's; once it is created there."""
        return str(self.raw["metadata"]["uid"])

    @property
    def gpu(self) -> str:
        """The GPU of its cores, as its device IDs name it; empty where it has none, or several."""
        gpus = {one.gpu for one in self.allocated.get(VCORE_RESOURCE, ())}
        return gpus.pop() if len(gpus) == 1 else ""

    @property
    def blocks(self) -> int:
        return len(self.allocated.get(VMEMORY_RESOURCE, ()))


def bench_pod(name: str, cores: int, blocks: int) -> BenchPod:
    pod = BenchPod(name=name, requests={VCORE_RESOURCE: cores, VMEMORY_RESOURCE: blocks})
    pod.encode()
    return pod


def manifest(pod: BenchPod, node_name: str) -> dict[str, Any]:
    limits = {resource: str(count) for resource, count in pod.requests.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node_name,
            "containers": [{"name": CONTAINER, "image": "bench", "resources": {"limits": limits}}],
        },
    }


def running_status(container_id: str = "") -> dict[str, Any]:
    state = {"name": CONTAINER, "ready": True, "restartCount": 0, "state": {"running": {}}}
    if container_id:
        state["containerID"] = f"containerd://{container_id}"
    return {"phase": "Running", "containerStatuses": [state]}
