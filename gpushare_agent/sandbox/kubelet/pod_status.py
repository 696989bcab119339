"""What the embedded kubelet reports of a pod: phase, conditions and container statuses, as raw JSON.

Device health per container (allocatedResourcesStatus) is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpushare_agent.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.sandbox.pod_manifest import RawObject, timestamp
from gpushare_agent.sandbox.runtime.containers import Container

_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")


def _state(container: Container | None, waiting: str) -> dict[str, Any]:
    if container is None or (waiting and not container.is_running):
        reason, _, message = waiting.partition(": ")
        return {"waiting": {"reason": reason or "PodInitializing", **({"message": message} if message else {})}}
    if container.exit_code is None:
        return {"running": {"startedAt": container.started_at}}
    return _terminated(container)


def _terminated(container: Container) -> dict[str, Any]:
    return {
        "terminated": {
            "containerID": f"containerd://{container.id}", "exitCode": container.exit_code,
            "reason": "Completed" if container.exit_code == 0 else "Error",
            "startedAt": container.started_at, "finishedAt": container.finished_at,
        }
    }  # fmt: skip


def container_status(
    raw: Mapping[str, Any], spec: ContainerSpec, container: Container | None, *, restarts: int, waiting: str
) -> dict[str, Any]:
    is_running = container is not None and container.is_running
    is_done = spec.kind is ContainerKind.INIT and container is not None and container.exit_code == 0
    status = {
        "name": spec.name, "image": raw.get("image", ""), "imageID": "", "lastState": {}, "restartCount": restarts,
        "ready": is_running or is_done, "started": is_running, "state": _state(container, waiting),
        "allocatedResources": {name: str(count) for name, count in spec.requests.items()},
    }  # fmt: skip
    if container is not None and waiting and not container.is_running:
        status["lastState"] = _terminated(container)
    if container is not None:
        status["containerID"] = f"containerd://{container.id}"
    return status


def pod_status(
    raw: RawObject,
    containers: Sequence[tuple[ContainerSpec, Container | None, int, str]],
    *,
    phase: str,
    started_at: str,
) -> dict[str, Any]:
    """`containers` holds each spec, in order, with its newest run, its restarts and why it waits."""
    raw_by_name = {c["name"]: c for c in (*(raw["spec"].get("initContainers") or ()), *raw["spec"]["containers"])}
    init: list[dict[str, Any]] = []
    main: list[dict[str, Any]] = []
    for spec, container, restarts, waiting in containers:
        status = container_status(raw_by_name[spec.name], spec, container, restarts=restarts, waiting=waiting)
        (main if spec.kind is ContainerKind.MAIN else init).append(status)
    is_ready = phase == "Running" and all(s["ready"] for s in main)
    values = {
        kind: "True" if is_ready or (kind == "Initialized" and phase != "Pending") else "False" for kind in _CONDITIONS
    }
    return {
        "phase": phase, "startTime": started_at, "hostIP": "127.0.0.1", "qosClass": "BestEffort",
        "conditions": [{"type": kind, "status": value, "lastTransitionTime": timestamp()} for kind, value in values.items()],
        **({"initContainerStatuses": init} if init else {}), "containerStatuses": main,
    }  # fmt: skip
