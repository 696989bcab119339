"""gpu-manager's display messages, made from the node's snapshot: the graph, the usage, the version. Pure.

A message has the proto's own field names, and as JSON leaves out zero and empty fields, as gpu-manager's gateway does.
`encode_usage` gives the bytes of the one that is large: the generated classes need 100 ms for 200 containers, this 2 ms.
Units are gpu-manager's: gpu in percent of a GPU (`spec` in GPUs), memory in MiB. What the driver does not report is
left out, for the messages know no third state; /api/v1/node has it. Formats: protos/display.proto and
docs/reference/display.md.
"""

from __future__ import annotations

import struct

from msgspec import Struct, field

from gpushare_agent.kit.protobuf import bytes_field, varint
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MIB
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.observability.node_snapshot import NO_REASON, NodeSnapshot
from gpushare_agent.placement.topology import render_tree

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


class DeviceUse(Struct, omit_defaults=True, kw_only=True):
    """DeviceInfo."""

    id: str = ""
    card_idx: str = ""
    gpu: float = 0
    mem: float = 0
    pids: list[int] = field(default_factory=list)


class Devices(Struct, omit_defaults=True):
    dev: list[DeviceUse] = field(default_factory=list)


class Spec(Struct, omit_defaults=True):
    gpu: float = 0
    mem: float = 0


class PodStat(Struct, omit_defaults=True, kw_only=True):
    """ContainerStat: of one pod, by container."""

    stat: dict[str, Devices] = field(default_factory=dict)
    project: str = ""
    user: str = ""
    cluster: str = ""
    spec: dict[str, Spec] = field(default_factory=dict)


class Usage(Struct, omit_defaults=True):
    """UsageResponse: by pod UID."""

    usage: dict[str, PodStat] = field(default_factory=dict)


def usage_document(snapshot: NodeSnapshot) -> Usage:
    """What each container uses and may use, by pod UID and container name."""
    found: dict[str, PodStat] = {}
    gpus = snapshot.inventory.by_uuid()
    for facts in sorted(snapshot.containers, key=lambda facts: facts.allocation.key):
        key = facts.allocation.key
        pod = found.setdefault(key.pod_uid, _pod_stat(facts.allocation.namespace, facts.pod))
        known = sorted((gpus[uuid] for uuid in facts.allocation.gpus if uuid in gpus), key=lambda gpu: gpu.index)
        pod.stat[key.container] = Devices([_device(gpu, key, snapshot) for gpu in known])
        pod.spec[key.container] = Spec(_number(facts.cores / CORES_PER_GPU), _number(facts.memory_bytes / MIB))
    return Usage(found)


def encode_usage(document: Usage) -> bytes:
    """The bytes of UsageResponse."""
    return b"".join(_map_entry(1, uid, _encode_pod(stat)) for uid, stat in sorted(document.usage.items()))


def _encode_pod(pod: PodStat) -> bytes:
    return b"".join(
        (
            *(_map_entry(1, name, _encode_devices(devices)) for name, devices in sorted(pod.stat.items())),
            *(_text(number, text) for number, text in ((2, pod.project), (3, pod.user), (4, pod.cluster))),
            *(
                _map_entry(5, name, _float(1, spec.gpu) + _float(2, spec.mem))
                for name, spec in sorted(pod.spec.items())
            ),
        )
    )


def _encode_devices(devices: Devices) -> bytes:
    return b"".join(bytes_field(1, _encode_device(device)) for device in devices.dev)


def _encode_device(device: DeviceUse) -> bytes:
    pids = b"".join(map(varint, device.pids))
    return (
        _text(1, device.id)
        + _text(2, device.card_idx)
        + _float(10, device.gpu)
        + _float(11, device.mem)
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


def _pod_stat(namespace: str, pod: Pod | None) -> PodStat:
    """Of a pod that the informer has not seen yet, only the namespace is known. A container without a request has an empty
    spec, as in gpu-manager."""
    if pod is None:
        return PodStat(project=namespace)
    return PodStat(
        project=namespace,
        user=_submitter(pod),
        cluster=pod.annotations.get(CLUSTER_ANNOTATION, ""),
        spec={c.name: Spec() for c in pod.containers if c.kind is ContainerKind.MAIN},
    )


def _submitter(pod: Pod) -> str:
    """From the first main container only, as in gpu-manager."""
    named = [c.env[USER_VARIABLE] for c in pod.containers if c.kind is ContainerKind.MAIN and USER_VARIABLE in c.env]
    return named[0] if named else ""


def _device(gpu: Gpu, key: ContainerKey, snapshot: NodeSnapshot) -> DeviceUse:
    found = DeviceUse(id=gpu.bus_id, card_idx=str(gpu.index))
    use = snapshot.usage.containers.get((key, gpu.uuid)) if snapshot.usage is not None else None
    if use is not None:
        found.gpu = _number((use.sm_ratio or 0.0) * 100)
        found.mem = _number((use.memory_bytes or 0) / MIB)
        found.pids = list(use.pids)
    return found


def _number(value: float) -> float:
    """Whole ones without `.0`, as Go writes them."""
    rounded = round(value, _DIGITS)
    return int(rounded) if rounded.is_integer() else rounded
