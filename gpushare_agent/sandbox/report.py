"""The state of the embedded nodes: the documents of their agents, and the pods. The tables use the same JSON document.

Only the agents' documents have what the agents know. The rest comes from the kubelet (what it gave each container, its
processes) and from the API server (phases and reasons, also of pods that wait or were refused).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

from msgspec import Struct, field

from gpushare_agent.core.claims.devices import device_name
from gpushare_agent.core.kube.claims import main_request
from gpushare_agent.core.kube.objects import whole_number
from gpushare_agent.core.kube.scheduling import DEFAULT_SCHEDULER
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.resources import ResourceNames, parts_of
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from gpushare_agent.sandbox.kubelet.container_config import container_of, parsed_answer
from gpushare_agent.sandbox.kubelet.pod_worker import PREPARE_FAILED
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import RawObject, claim_names, container_claims, containers_of, is_mirror
from gpushare_agent.sandbox.scheduler.claim_objects import results_of

# --- claims ---


class ClaimRow(TypedDict):
    """One result of a claim: its part of one GPU."""

    claim: str
    request: str
    gpu: int
    cores: int
    memory_mib: int


def claimed_shares(shown: ReportedNode, namespace: str, name: str) -> list[ClaimRow]:
    """The shares of a claim, as far as it is allocated on the node."""
    found: list[ClaimRow] = []
    indexes = {device_name(gpu.uuid): gpu.index for gpu in shown.gpus}
    for one in results_of(shown.node.api.store.find("resourceclaims", (namespace, name)) or {}):
        # A place for a MIG instance has its GPU's name before its own.
        index = indexes.get(one.device.partition("-mig-")[0])
        if one.pool == shown.node.name and index is not None:
            amounts = one.consumed_capacity or {}
            cores, memory = (whole_number(amounts.get(part, 0), part) for part in ("cores", "memory"))
            share = ClaimRow(claim=name, request=one.request, gpu=index, cores=cores, memory_mib=memory // MIB)
            found.append(share)
    return found


def shares_of_container(shown: ReportedNode, pod: RawObject, container: str) -> list[ClaimRow]:
    """The shares that a container names; none of a pod that has no node."""
    names = claim_names(pod)
    if not names or not pod["spec"].get("nodeName"):
        return []
    found: list[ClaimRow] = []
    for name, requested in container_claims(pod, container_of(pod, container)):
        for one in claimed_shares(shown, pod["metadata"]["namespace"], names.get(name, "")):
            if requested in ("", main_request(one["request"])) and one not in found:
                found.append(one)
    return found


def waiting_message(node: EmbeddedNode, pod: RawObject, reason: str) -> str:
    """The newest Event of a pending pod with this reason: its status does not say why its claims are not prepared."""
    found = [one for one in node.api.events() if one.get("reason") == reason]
    events = [one for one in found if one.get("involvedObject", {}).get("uid") == pod["metadata"]["uid"]]
    return str(events[-1].get("message")) if events else ""


# --- the document ---


class ContainerRow(TypedDict):
    """What the kubelet has given it, and its first process and all of them, as this machine counts them; none of a
    container that does not run."""

    name: str
    gpus: list[int]
    env: dict[str, str]
    mounts: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    annotations: dict[str, str]
    pid: int | None
    pids: Sequence[int]


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


class SandboxDocument(TypedDict):
    """The document of `gpushare-agent sandbox -o json`; `node` where there is one alone. Each is the document of the node's
    agent, empty before its first answer, with `name`, `capacity`, `addresses` and `is_offered`."""

    node: NotRequired[dict[str, Any]]
    nodes: list[dict[str, Any]]
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
    addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The addresses of this node's agent: `web`, `control_socket`; an empty text if there is none."""


def gpus_of(ids: Iterable[str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that these IDs name, by index."""
    uuids = parts_of_gpus(ids, gpus)
    return [gpu for gpu in gpus if gpu.uuid in uuids]


def parts_of_gpus(ids: Iterable[str], gpus: Sequence[Gpu]) -> dict[GpuUuid, Fraction]:
    """The part of each GPU that these units under NVIDIA's names are."""
    return parts_of(DeviceIds(gpu.uuid for gpu in gpus).read(list(ids)))


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


def _node(shown: ReportedNode) -> dict[str, Any]:
    raw = shown.node.api.store.find("nodes", ("", shown.node.name)) or {}
    capacity = raw.get("status", {}).get("capacity", {})
    return {
        "name": shown.node.name,
        "capacity": {name: int(count) for name, count in sorted(capacity.items()) if "/" in name},
        "addresses": dict(shown.addresses),
        "is_offered": is_offered(shown),
        "gpus": [],
        "containers": [],
    } | shown.agent_document


def is_offered(shown: ReportedNode) -> bool:
    """Whether the agent offers a GPU: one that has ended, or that the kubelet has not registered again, offers none,
    whatever its last document says."""
    devices = shown.node.kubelet.devices.capacity()
    slices = shown.node.api.store.all("resourceslices")
    return any(devices.get(name, (0, 0))[1] for name in shown.names.binding_names) or any(
        raw["spec"].get("nodeName") == shown.node.name for raw in slices
    )


def reason_and_message(pod: RawObject) -> tuple[str, str]:
    """Why a pod is where it is: from its status, else from the scheduler, else from a container that waits or has failed.
    This includes running pods, because nothing else would show a container that ends again and again."""
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
    if not message and pod["status"]["phase"] == "Pending" and claim_names(pod):
        message = waiting_message(shown.node, pod, PREPARE_FAILED)
        reason = PREPARE_FAILED if message else reason
    return {
        "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"],
        "node": pod["spec"].get("nodeName", ""),
        "phase": pod["status"]["phase"], "is_terminating": "deletionTimestamp" in metadata,
        "reason": reason, "message": message,
        "annotations": dict(sorted((metadata.get("annotations") or {}).items())),
        "containers": [_container(shown, pod, spec.name) for spec in containers_of(pod)],
    }  # fmt: skip


def ids_of(shown: ReportedNode, pod_uid: str, container: str) -> tuple[str, ...]:
    """The IDs that name a container's GPUs: those of cores or of whole GPUs. Memory's IDs are counters."""
    records = shown.node.kubelet.devices.records.of_container(pod_uid, container)
    return next((records[name].ids for name in shown.names.binding_names if name in records), ())


def _container(shown: ReportedNode, pod: RawObject, container: str) -> ContainerRow:
    pod_uid, answers, gpus = pod["metadata"]["uid"], list[ContainerAllocateResponse](), set[int]()
    # The kubelet keeps the records of an ended pod, which has nothing any more, until the next allocation.
    if pod["status"]["phase"] not in ("Succeeded", "Failed"):
        given = shown.node.kubelet.devices.records.of_container(pod_uid, container)
        answers = [parsed_answer(record.response) for _, record in sorted(given.items())]
        gpus = {gpu.index for gpu in gpus_of(ids_of(shown, pod_uid, container), shown.gpus)}
        gpus |= {share["gpu"] for share in shares_of_container(shown, pod, container)}
    runtime = shown.node.kubelet.runtime
    run = runtime.find(pod_uid, container)
    mounts = {m.container_path: m for answer in answers for m in answer.mounts}
    devices = {d.container_path: d for answer in answers for d in answer.devices}
    return {
        "name": container,
        "gpus": sorted(gpus),
        "env": {k: v for answer in answers for k, v in sorted(answer.envs.items())},
        "mounts": [{name: getattr(one, name) for name in _MOUNT} for _, one in sorted(mounts.items())],
        "devices": [{name: getattr(one, name) for name in _DEVICE_NODE} for _, one in sorted(devices.items())],
        "annotations": {k: v for answer in answers for k, v in sorted(answer.annotations.items())},
        "pid": run.pid if run is not None and run.is_running else None,
        "pids": runtime.pids(run) if run is not None else [],
    }
