"""gpu-manager's display messages, made from the node's snapshot: the graph, the usage, the version. Pure.

A message is a dictionary as gpu-manager's gateway writes it: the proto's own field names, zero and empty fields left out.
`encode_usage` gives the bytes of the one that is large: the generated classes need 100 ms for 200 containers, this 2 ms.
Units are gpu-manager's: gpu in percent of a GPU (`spec` in GPUs), memory in MiB. What the driver does not report is
left out, for the messages know no third state; /api/v1/node has it. Formats: protos/display.proto and
docs/reference/display.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from gpushare_agent.kit.wire_build import bytes_field, varint
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.observability.node_snapshot import NO_REASON, NodeSnapshot
from gpushare_agent.placement.topology_tree import render_tree

CLUSTER_ANNOTATION = "clusterName"
USER_VARIABLE = "SUBMITTER"
_DIGITS = 3
"""Of a float: 7.000000000000001 percent helps nobody."""
_FIXED_32 = 5
"""The wire type of a float."""


def graph_text(snapshot: NodeSnapshot) -> str:
    """The topology tree as text, each GPU with what is used of it (by processes) and what can still be allocated."""
    notes = {gpu.index: _gpu_note(gpu, snapshot) for gpu in snapshot.inventory.gpus}
    labels = {gpu.index: gpu.label for gpu in snapshot.inventory.gpus}
    return render_tree(snapshot.inventory.topology, notes, labels) + "\n"


def usage_json(snapshot: NodeSnapshot) -> dict[str, Any]:
    """What each container uses and may use, by pod UID and container name."""
    found: dict[str, dict[str, Any]] = {}
    gpus = snapshot.inventory.by_uuid()
    for facts in sorted(snapshot.containers, key=lambda facts: facts.allocation.key):
        allocation = facts.allocation
        pod = found.setdefault(allocation.key.pod_uid, _pod_stat(allocation.namespace, facts.pod))
        pod["stat"][allocation.key.container] = _filled(
            {"dev": _devices(allocation.key, allocation.gpus, gpus, snapshot)}
        )
        pod["spec"][allocation.key.container] = _filled(
            {"gpu": _number(facts.cores / CORES_PER_GPU), "mem": _number(facts.memory_bytes / MIB)}
        )
    return _filled({"usage": {uid: _filled(stat) for uid, stat in found.items()}})


def encode_usage(document: Mapping[str, Any]) -> bytes:
    """The bytes of UsageResponse for what `usage_json` gave."""
    return b"".join(_map_entry(1, uid, _encode_pod(stat)) for uid, stat in sorted(document.get("usage", {}).items()))


def _encode_pod(stat: Mapping[str, Any]) -> bytes:
    return b"".join(
        (
            *(_map_entry(1, name, _encode_devices(devices)) for name, devices in sorted(stat.get("stat", {}).items())),
            *(_text(number, stat.get(name)) for number, name in ((2, "project"), (3, "user"), (4, "cluster"))),
            *(
                _map_entry(5, name, _float(1, spec.get("gpu")) + _float(2, spec.get("mem")))
                for name, spec in sorted(stat.get("spec", {}).items())
            ),
        )
    )


def _encode_devices(devices: Mapping[str, Any]) -> bytes:
    return b"".join(bytes_field(1, _encode_device(device)) for device in devices.get("dev", ()))


def _encode_device(device: Mapping[str, Any]) -> bytes:
    pids = b"".join(map(varint, device.get("pids", ())))
    return (
        _text(1, device.get("id"))
        + _text(2, device.get("card_idx"))
        + _float(10, device.get("gpu"))
        + _float(11, device.get("mem"))
        + (bytes_field(12, pids) if pids else b"")
    )


def _map_entry(number: int, key: str, value: bytes) -> bytes:
    return bytes_field(number, bytes_field(1, key.encode()) + bytes_field(2, value))


def _text(number: int, text: str | None) -> bytes:
    return bytes_field(number, text.encode()) if text else b""


def _float(number: int, value: float | None) -> bytes:
    return varint(number << 3 | _FIXED_32) + struct.pack("<f", value) if value else b""


def _gpu_note(gpu: Gpu, snapshot: NodeSnapshot) -> str:
    """gpu-manager's words and units (bytes) for one GPU, and its health where that keeps it from being used."""
    sample = snapshot.usage.gpus.get(gpu.uuid) if snapshot.usage is not None else None
    used_bytes = sample.memory_used_bytes if sample is not None else None
    pids = [process.pid for process in (sample.processes or ())] if sample is not None else []
    total_bytes = gpu.memory_mib * MIB
    cores, capacity = snapshot.cores(gpu)
    cores_left = capacity - cores
    memory_left = total_bytes - snapshot.memory_allocated_bytes.get(gpu.uuid, 0) if capacity else 0
    note = (
        f"(pids: [{' '.join(map(str, pids))}], usedMemory: {used_bytes or 0}, totalMemory: {total_bytes}, "
        f"allocatableCores: {max(0, cores_left)}, allocatableMemory: {max(0, memory_left)})"
    )
    if (reason := snapshot.unhealthy_reasons.get(gpu.uuid)) is not None:
        note += f" Unhealthy: {_one_line(reason)}"
    if (reason := snapshot.cordoned.get(gpu.uuid)) is not None:
        note += f" Cordoned: {_one_line(reason) or NO_REASON}"
    return note


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _pod_stat(namespace: str, pod: Pod | None) -> dict[str, Any]:
    """Of a pod that the informer has not seen yet, only the namespace is known. A container without a request has an empty
    spec, as in gpu-manager."""
    return {
        "stat": {},
        "project": namespace,
        "user": _submitter(pod) if pod is not None else "",
        "cluster": pod.annotations.get(CLUSTER_ANNOTATION, "") if pod is not None else "",
        "spec": {c.name: {} for c in pod.containers if c.kind is ContainerKind.MAIN} if pod is not None else {},
    }


def _submitter(pod: Pod) -> str:
    """From the first main container only, as in gpu-manager."""
    named = [c.env[USER_VARIABLE] for c in pod.containers if c.kind is ContainerKind.MAIN and USER_VARIABLE in c.env]
    return named[0] if named else ""


def _devices(
    key: ContainerKey, uuids: tuple[GpuUuid, ...], gpus: Mapping[GpuUuid, Gpu], snapshot: NodeSnapshot
) -> list[dict[str, Any]]:
    known = sorted((gpus[uuid] for uuid in uuids if uuid in gpus), key=lambda gpu: gpu.index)
    return [_device(gpu, key, snapshot) for gpu in known]


def _device(gpu: Gpu, key: ContainerKey, snapshot: NodeSnapshot) -> dict[str, Any]:
    use = snapshot.usage.containers.get((key, gpu.uuid)) if snapshot.usage is not None else None
    return _filled(
        {
            "id": gpu.bus_id,
            "card_idx": str(gpu.index),
            "gpu": _number((use.sm_ratio or 0.0) * 100) if use is not None else 0,
            "mem": _number((use.memory_bytes or 0) / MIB) if use is not None else 0,
            "pids": list(use.pids) if use is not None else [],
        }
    )


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are zero or empty."""
    return {name: value for name, value in message.items() if value}


def _number(value: float) -> float:
    """Whole ones without `.0`, as Go writes them."""
    rounded = round(value, _DIGITS)
    return int(rounded) if rounded.is_integer() else rounded
