"""Which device IDs the embedded kubelet has given to which container, and its checkpoint file.

State owned: the records, and `kubelet_internal_checkpoint`, whose shape is that of a real one (docs/reference/formats.md):
node -> IDs, AllocResp in base64, entries of ended pods until the next allocation. The Checksum is a CRC of our own: the real
one hashes Go structures.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog
from msgspec import Struct

from gpushare_agent.kit.wire_build import bytes_field
from gpushare_agent.sandbox.kubelet import wire_frames

log = structlog.get_logger(__name__)

CHECKPOINT_NAME = "kubelet_internal_checkpoint"
NO_NODE = -1
"""The kubelet's key for devices without topology."""


class DeviceRecord(Struct, frozen=True, kw_only=True):
    """The IDs of one resource of one container, by NUMA node, with the plugin's raw answer.

    `listed` holds one ContainerDevices entry per ID as a ready field 2 of ContainerResources; `entry_json` is the
    record's text in the checkpoint.
    """

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes
    listed: tuple[bytes, ...]
    entry_json: str


def make_record(
    owner: tuple[str, str], resource: str, nodes_by_id: Mapping[str, tuple[int, ...]], response: bytes
) -> DeviceRecord:
    by_node: dict[int, list[str]] = {}
    for device, nodes in nodes_by_id.items():
        for node in nodes or (NO_NODE,):
            by_node.setdefault(node, []).append(device)
    entry = {
        "PodUID": owner[0], "ContainerName": owner[1], "ResourceName": resource,
        "DeviceIDs": {str(node): ids for node, ids in sorted(by_node.items())},
        "AllocResp": base64.b64encode(response).decode(),
    }  # fmt: skip
    return DeviceRecord(
        pod_uid=owner[0], container=owner[1], resource=resource, ids=tuple(nodes_by_id), response=response,
        listed=tuple(bytes_field(2, listed_device(resource, *item)) for item in nodes_by_id.items()),
        entry_json=json.dumps(entry),
    )  # fmt: skip


def listed_device(resource: str, device: str, nodes: tuple[int, ...]) -> bytes:
    """A ContainerDevices message with one ID."""
    name = bytes_field(1, resource.encode()) + bytes_field(2, device.encode())
    return name + (bytes_field(3, wire_frames.topology_message(nodes)) if nodes else b"")


class DeviceRecords:
    """By pod UID, container and resource, in order of allocation."""

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
        """By resource, made from the records alone: what an open Allocate is about to get is not in it."""
        found: dict[str, set[str]] = {}
        for record in self.all():
            found.setdefault(record.resource, set()).update(record.ids)
        return found

    def container_message(self, pod_uid: str, container: str, rng: random.Random) -> bytes:
        """A ContainerResources message; resources and IDs come in another order each time."""
        parts = [bytes_field(1, container.encode())]
        records = list(self.of_container(pod_uid, container).values())
        rng.shuffle(records)
        for record in records:
            turn = rng.randrange(len(record.listed)) if record.listed else 0
            parts.extend((*record.listed[turn:], *record.listed[:turn]))
        return b"".join(parts)

    # --- the checkpoint ---

    def write(self, registered_json: Mapping[str, str]) -> None:
        """`registered_json` holds each resource's healthy IDs as a JSON list. Replaces the file in one step."""
        entries = ",".join(record.entry_json for record in self.all())
        registered = ",".join(f"{json.dumps(name)}:{ids}" for name, ids in sorted(registered_json.items()))
        text = f'{{"PodDeviceEntries":[{entries}],"RegisteredDevices":{{{registered}}}}}'
        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_text(f'{{"Data":{text},"Checksum":{zlib.crc32(text.encode())}}}')
        temporary.replace(self._path)

    def read(self) -> set[str]:
        """Takes the records from the file; returns the resources that were registered. Starts empty without one."""
        try:
            raw = json.loads(self._path.read_text())["Data"]
            for entry in raw["PodDeviceEntries"] or ():
                owner = (entry["PodUID"], entry["ContainerName"])
                self.insert(
                    make_record(owner, entry["ResourceName"], _nodes_by_id(entry), base64.b64decode(entry["AllocResp"]))
                )
            return set(raw["RegisteredDevices"] or ())
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
            nodes[device] = (*nodes.get(device, ()), int(node)) if int(node) != NO_NODE else ()
    return nodes
