"""What is on the embedded nodes: GPUs with their use, pods with what they got. One JSON document, also behind the tables.

The GPUs are those of the agent's own document: nothing is charged a second time here. The rest is the kubelet's side (its
records, the device IDs, the Allocate answers, the containers' processes), what ResourceClaims give, from the API server's
objects, what a container itself would read at /etc/vcuda, and what the sandbox simulates it to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

from msgspec import Struct, field

from gpushare_agent.cluster.kube.claims import main_request
from gpushare_agent.cluster.kube.objects import whole_number
from gpushare_agent.cluster.kube.scheduling import DEFAULT_SCHEDULER
from gpushare_agent.isolation.vdevice.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    decode_config,
    decode_pids,
)
from gpushare_agent.kit.regular_file import read_regular
from gpushare_agent.kubelet.device_table import DeviceIds
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import MIB, VDEVICE_DIRECTORY, GpuUuid, split_device_id
from gpushare_agent.model.pods import ContainerSpec
from gpushare_agent.model.resources import ResourceNames, parts_of, request_of
from gpushare_agent.sandbox.kubelet.container_config import VDEVICE_VARIABLE, container_of, parsed_answer
from gpushare_agent.sandbox.kubelet.pod_worker import PREPARE_FAILED
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import RawObject, claim_names, containers_of, is_mirror
from gpushare_agent.sandbox.scheduler.claim_objects import results_of

# --- claims ---

_DEVICE = "gpu-"


class ClaimRow(TypedDict):
    """One result of a claim: its part of one GPU."""

    claim: str
    request: str
    gpu: int
    cores: int
    memory_mib: int


def claimed_shares(node: EmbeddedNode, namespace: str, name: str) -> list[ClaimRow]:
    """The shares of a claim, as far as it is allocated on the node."""
    found: list[ClaimRow] = []
    for one in results_of(node.api.store.find("resourceclaims", (namespace, name)) or {}):
        # A device's name has the GPU's index: gpu-3.
        number = one.device.removeprefix(_DEVICE)
        if one.pool == node.name and number.isdigit():
            amounts = one.consumed_capacity or {}
            cores, memory = (whole_number(amounts.get(part, 0), part) for part in ("cores", "memory"))
            share = ClaimRow(claim=name, request=one.request, gpu=int(number), cores=cores, memory_mib=memory // MIB)
            found.append(share)
    return found


def shares_of_container(node: EmbeddedNode, pod: RawObject, container: str) -> list[ClaimRow]:
    """The shares that a container names; none of a pod that has no node."""
    if not pod["spec"].get("resourceClaims") or not pod["spec"].get("nodeName"):
        return []
    names = claim_names(pod)
    found: list[ClaimRow] = []
    for entry in (container_of(pod, container).get("resources") or {}).get("claims") or ():
        requested = entry.get("request")
        for one in claimed_shares(node, pod["metadata"]["namespace"], names.get(entry["name"], "")):
            if requested in (None, "", main_request(one["request"])) and one not in found:
                found.append(one)
    return found


def sliced_health(node: EmbeddedNode, gpus: Sequence[Gpu]) -> dict[GpuUuid, bool]:
    """Whether nothing is wrong with each GPU in the node's slices: a device of which something is has a taint."""
    by_name = {f"{_DEVICE}{gpu.index}": gpu.uuid for gpu in gpus}
    devices = [
        device
        for raw in node.api.store.all("resourceslices")
        if raw["spec"].get("nodeName") == node.name
        for device in raw["spec"].get("devices") or ()
    ]
    return {by_name[one["name"]]: not one.get("taints") for one in devices if one["name"] in by_name}


def vdevice_directory(node: EmbeddedNode, pod_uid: str, container: str) -> Path | None:
    """The directory in which a running container's claim has its vDevice files, None where it has none."""
    found = node.kubelet.runtime.find(pod_uid, container)
    path = found.env.get(VDEVICE_VARIABLE) if found is not None and found.is_running else None
    return None if path is None else Path(path).parent


def waiting_message(node: EmbeddedNode, pod: RawObject, reason: str) -> str:
    """The newest Event of a pending pod with this reason: its status does not say why its claims are not prepared."""
    found = [one for one in node.api.events() if one.get("reason") == reason]
    events = [one for one in found if one.get("involvedObject", {}).get("uid") == pod["metadata"]["uid"]]
    return str(events[-1].get("message")) if events else ""


# --- vDevice files ---


class VDevice(TypedDict):
    """The limits as the container reads them."""

    cores: int
    memory_mib: int
    core_limit: int
    is_limited: bool
    pids: list[int]


def read_vdevice(directory: Path) -> VDevice | None:
    """The document's "vdevice" of the container whose directory this is; None where a file is missing or torn: the reader
    in the container needs both."""
    try:
        config = decode_config(read_regular(directory / CONFIG_NAME, CONFIG_BYTES + 1))
        pids = decode_pids(read_regular(directory / PIDS_NAME, 4 * MAX_PIDS + 1))
    # Torn or gone: the next drawing reads it again.
    except (OSError, Corrupt):
        return None
    return {
        "cores": config.utilization, "memory_mib": config.memory_bytes // MIB, "core_limit": config.limit,
        "is_limited": config.enable, "pids": list(pids),
    }  # fmt: skip


# --- the document ---

HEALTHY = "Healthy"
_UNHEALTHY = "Unhealthy"
UNKNOWN = "Unknown"
"""Health of a GPU while no agent offers it."""


class Processes(TypedDict):
    """The first process and all of them, as this machine counts them; none of a container that does not run."""

    pid: int | None
    pids: Sequence[int]


class ContainerRow(Processes):
    """`used` is what the container uses of its GPUs together."""

    name: str
    gpus: list[int]
    labels: list[str]
    claims: list[ClaimRow]
    vcore: int
    vmemory: int
    gpu_mem: int
    memory_mib: int
    units: dict[str, int]
    env: dict[str, str]
    mounts: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    annotations: dict[str, str]
    used: Mapping[str, float] | None
    vdevice: VDevice | None


class PodRow(TypedDict):
    namespace: str
    name: str
    uid: str
    node: str
    phase: str
    is_terminating: bool
    reason: str
    message: str
    annotations: dict[str, str]
    containers: list[ContainerRow]


class NodeRow(TypedDict):
    """`gpus` are those of the agent's document, with the kubelet's `health`."""

    name: str
    capacity: dict[str, int]
    addresses: dict[str, str]
    gpus: list[Any]


class SandboxDocument(TypedDict):
    """The document of `gpushare-agent sandbox -o json`; `node` where there is one alone."""

    node: NotRequired[NodeRow]
    nodes: list[NodeRow]
    pods: list[PodRow]


_MOUNT, _DEVICE_NODE = ("host_path", "container_path", "read_only"), ("host_path", "container_path", "permissions")
"""Fields of the messages that the document has."""


class ReportedNode(Struct, kw_only=True, eq=False):
    """A node, the GPUs of its agent, and the agent's resources."""

    node: EmbeddedNode
    gpus: Sequence[Gpu]
    names: ResourceNames = ResourceNames()
    by_claims: bool = False
    """The agent is a DRA driver, too."""
    agent_document: dict[str, Any] = field(default_factory=dict)
    """The last /api/v1/node of the agent, empty before the first; controller.py reads it."""
    used: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """By pod UID and container, what it uses of its GPUs together; the workload player fills it in."""
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Where this node's agent is asked: `web`, `control_socket`; empty texts for what there is not."""


def gpus_of(ids: Iterable[str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that these IDs name, by index."""
    uuids = set(_uuids_of(ids, gpus))
    return [gpu for gpu in gpus if gpu.uuid in uuids]


def parts_of_gpus(ids: Iterable[str], gpus: Sequence[Gpu]) -> dict[GpuUuid, Fraction]:
    """How much of each GPU these units under NVIDIA's names are."""
    return parts_of(DeviceIds(gpu.uuid for gpu in gpus).read(list(ids)))


def _uuids_of(ids: Iterable[str], gpus: Sequence[Gpu]) -> list[GpuUuid]:
    """The GPU of each ID as the kubelet has it."""
    devices = DeviceIds(gpu.uuid for gpu in gpus).read(list(ids))
    return [parts[0] for parts in map(split_device_id, devices) if parts is not None]


def report(*shown: ReportedNode) -> SandboxDocument:
    """All nodes are of one API server."""
    nodes = [_node(one) for one in shown]
    by_name = {one.node.name: one for one in shown}
    # Agents are pods for kubectl, and no workload for this report.
    pods = [raw for raw in shown[0].node.api.pods() if not is_mirror(raw)]
    document: SandboxDocument = {
        "nodes": nodes,
        "pods": [_pod(by_name.get(pod["spec"].get("nodeName", ""), shown[0]), pod) for pod in pods],
    }
    return {"node": nodes[0], **document} if len(nodes) == 1 else document


def _node(shown: ReportedNode) -> NodeRow:
    raw = shown.node.api.object_of("nodes", ("", shown.node.name)) or {}
    capacity = raw.get("status", {}).get("capacity", {})
    return {
        "name": shown.node.name,
        "capacity": {name: int(count) for name, count in sorted(capacity.items()) if "/" in name},
        "addresses": dict(shown.addresses),
        "gpus": _gpus(shown),
    }


def _gpus(shown: ReportedNode) -> list[dict[str, Any]]:
    """The GPUs as the agent shows them, with the kubelet's `health`: an agent that has ended, or that the kubelet has not
    registered again, offers nothing, whatever it says itself."""
    health = gpu_health(shown)
    return [gpu | {"health": health.get(gpu["uuid"], UNKNOWN)} for gpu in shown.agent_document.get("gpus", ())]


def gpu_health(shown: ReportedNode) -> dict[GpuUuid, str]:
    """The health of each GPU as the kubelet has it, or the slice; nothing of GPUs that no agent offers. Where NVIDIA's
    resources are served beside cores, a device of one is Unhealthy while the other has the GPU, so one that is Healthy
    shows that its GPU is."""
    sliced = sliced_health(shown.node, shown.gpus)
    health = {uuid: HEALTHY if is_healthy else _UNHEALTHY for uuid, is_healthy in sliced.items()}
    devices = shown.node.kubelet.devices.health(shown.names.vcore)
    for uuid, is_healthy in zip(_uuids_of(devices, shown.gpus), devices.values(), strict=True):
        # One Unhealthy ID of a GPU shows it: the agent reports all of a GPU's at once.
        health[uuid] = HEALTHY if is_healthy and health.get(uuid) != _UNHEALTHY else _UNHEALTHY
    for resource in (shown.names.vcore, *shown.names.gpu) if shown.names.gpu else ():
        offered = shown.node.kubelet.devices.health(resource)
        healthy = [device for device, is_healthy in offered.items() if is_healthy]
        health |= dict.fromkeys(_uuids_of(healthy, shown.gpus), HEALTHY)
    return health


def reason_and_message(pod: RawObject) -> tuple[str, str]:
    """Why a pod is where it is: from its status, else from the scheduler, else from a container that waits or has failed,
    also in a pod that runs: a container that ends again and again would show in nothing else."""
    status = pod.get("status") or {}
    if status.get("reason") or status.get("message"):
        return status.get("reason", ""), status.get("message", "")
    # PodScheduled stays in the status of a pod that runs: it says why only while the pod waits.
    for condition in status.get("conditions", ()) if status.get("phase") == "Pending" else ():
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            return condition.get("reason", ""), condition.get("message", "")
    spec = pod.get("spec") or {}
    scheduler = spec.get("schedulerName", DEFAULT_SCHEDULER)
    if not spec.get("nodeName") and scheduler != DEFAULT_SCHEDULER and status.get("phase") == "Pending":
        return "", f"waits for the scheduler {scheduler}"
    return _container_reason((*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())))


def _container_reason(statuses: Sequence[RawObject]) -> tuple[str, str]:
    """The reason of the first container that waits, else of the first that has failed."""
    for status in statuses:
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            last = status.get("lastState", {}).get("terminated")
            ended = f", exit code {last.get('exitCode')}" if last else ""
            return waiting.get("reason", ""), f"{waiting['message']}{ended}"
    for status in statuses:
        ended_now = status.get("state", {}).get("terminated", {})
        if ended_now.get("exitCode"):
            text = f"container {status['name']} ended with exit code {ended_now['exitCode']}"
            return ended_now.get("reason", ""), text
    return "", ""


def _pod(shown: ReportedNode, pod: RawObject) -> PodRow:
    metadata = pod["metadata"]
    reason, message = reason_and_message(pod)
    if not message and pod["status"]["phase"] == "Pending" and pod["spec"].get("resourceClaims"):
        message = waiting_message(shown.node, pod, PREPARE_FAILED)
        reason = PREPARE_FAILED if message else reason
    # A refused pod has nothing, though an earlier resource of it was answered.
    status = pod["status"]
    is_refused = status["phase"] == "Failed" and bool(status.get("reason") or status.get("message"))
    allocated = {} if is_refused else _newest_allocations(shown, metadata["uid"])
    return {
        "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"],
        "node": pod["spec"].get("nodeName", ""),
        "phase": pod["status"]["phase"], "is_terminating": "deletionTimestamp" in metadata,
        "reason": reason, "message": message,
        "annotations": dict(sorted((metadata.get("annotations") or {}).items())),
        "containers": [
            _container(shown, pod, spec, allocated.get(spec.name, {}))
            for spec in containers_of(pod)
        ],
    }  # fmt: skip


def _newest_allocations(shown: ReportedNode, pod_uid: str) -> dict[str, dict[str, tuple[tuple[str, ...], bytes]]]:
    """The IDs and the raw answer of the newest Allocate, by container and resource."""
    found: dict[str, dict[str, tuple[tuple[str, ...], bytes]]] = {}
    for call in shown.node.kubelet.log.of("Allocate", pod_uid=pod_uid):
        # A failed Allocate gave nothing.
        if not call.error:
            found.setdefault(call.container, {})[call.resource] = (call.device_ids, call.response)
    return found


def _container(
    shown: ReportedNode, pod: RawObject, spec: ContainerSpec, given: Mapping[str, tuple[tuple[str, ...], bytes]]
) -> ContainerRow:
    pod_uid = pod["metadata"]["uid"]
    has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")  # it has no GPU and no limit, whatever was answered
    answers = [parsed_answer(raw) for _, (_, raw) in sorted(given.items())]
    ids = next((given[name][0] for name in shown.names.binding_names if name in given), ())
    mounts = {m.container_path: m for answer in answers for m in answer.mounts}
    devices = {d.container_path: d for answer in answers for d in answer.devices}
    asked, claims = request_of(spec, shown.names), shares_of_container(shown.node, pod, spec.name)
    indexes = sorted({gpu.index for gpu in gpus_of(ids, shown.gpus)} | {share["gpu"] for share in claims})
    labels = {gpu.index: gpu.label for gpu in shown.gpus}
    given_at = mounts.get(VDEVICE_DIRECTORY)
    vdevice = Path(given_at.host_path) if given_at else vdevice_directory(shown.node, pod_uid, spec.name)
    return {
        "name": spec.name,
        "gpus": [] if has_ended else indexes,
        "labels": [] if has_ended else [labels.get(index, str(index)) for index in indexes],
        "claims": claims,
        "vcore": asked.cores,
        "vmemory": asked.blocks,
        "gpu_mem": asked.units,
        "memory_mib": shown.names.memory_mib(spec) + sum(one["memory_mib"] for one in claims),
        "units": {name: spec.requests[name] for name in shown.names.gpu if spec.requests.get(name)},
        "env": {k: v for answer in answers for k, v in sorted(answer.envs.items())},
        "mounts": [{name: getattr(one, name) for name in _MOUNT} for _, one in sorted(mounts.items())],
        "devices": [{name: getattr(one, name) for name in _DEVICE_NODE} for _, one in sorted(devices.items())],
        "annotations": {k: v for answer in answers for k, v in sorted(answer.annotations.items())},
        **container_processes(shown, pod_uid, spec.name),
        "used": None if has_ended else shown.used.get((pod_uid, spec.name)),
        "vdevice": read_vdevice(vdevice) if vdevice and not has_ended else None,
    }


def container_processes(shown: ReportedNode, pod_uid: str, name: str) -> Processes:
    runtime = shown.node.kubelet.runtime
    container = runtime.find(pod_uid, name)
    if container is None or not container.is_running:
        return {"pid": None, "pids": []}
    return {"pid": container.pid or None, "pids": runtime.pids(container)}
