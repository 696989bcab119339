"""The container runtime interface (CRI v1) of the embedded node: the calls that an agent makes to a real containerd.

It has only the three calls that the project uses: Version, ListContainers, ContainerStatus; others are UNIMPLEMENTED.
Its answers have the shape of containerd's, the labels are the kubelet's. State owned: the socket. It can be stopped and
started while the containers run, as a runtime is when it is upgraded.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status

import gpushare_agent
from gpushare_agent.core.kit.grpc_server import GrpcServer, ServedSocket
from gpushare_agent.core.wire.runtime import v1
from gpushare_agent.sandbox.runtime.containers import Container, ContainerRuntime

SOCKET_MODE = 0o600
_NS_PER_S = 1_000_000_000


def cri_socket(runtime: ContainerRuntime, path: Path) -> ServedSocket:
    """Not yet served. It may be stopped and served again."""
    return ServedSocket(path, lambda: GrpcServer([_RuntimeService(runtime)]), mode=SOCKET_MODE)


class _RuntimeService(v1.RuntimeServiceBase):
    def __init__(self, runtime: ContainerRuntime) -> None:
        self._runtime = runtime

    async def version(self, message: v1.VersionRequest) -> v1.VersionResponse:
        return v1.VersionResponse(
            version="0.1.0",
            runtime_name="gpushare-sandbox",
            runtime_version=gpushare_agent.__version__,
            runtime_api_version="v1",
        )

    async def list_containers(self, message: v1.ListContainersRequest) -> v1.ListContainersResponse:
        found = map(_listed, self._runtime.containers())
        # An absent filter lists all.
        asked = message.filter
        return v1.ListContainersResponse(containers=[c for c in found if asked is None or _matches(c, asked)])

    async def container_status(self, message: v1.ContainerStatusRequest) -> v1.ContainerStatusResponse:
        for container in self._runtime.containers():
            if container.id == message.container_id:
                # containerd's info, as crictl shows it; PID 0 if it does not run.
                info = {"sandboxID": _pod_sandbox_id(container), "pid": container.pid if container.is_running else 0}
                return v1.ContainerStatusResponse(
                    status=_status(container), info={"info": json.dumps(info)} if message.verbose else {}
                )
        text = f'an error occurred when try to find container "{message.container_id}": not found'
        raise GRPCError(Status.NOT_FOUND, text)


def _listed(container: Container) -> v1.Container:
    return v1.Container(pod_sandbox_id=_pod_sandbox_id(container), **_common(container))


def _status(container: Container) -> v1.ContainerStatus:
    return v1.ContainerStatus(
        # Started when created: there is no image to unpack in between.
        started_at=int(container.created_at * _NS_PER_S),
        finished_at=int(container.ended_at * _NS_PER_S),
        exit_code=container.exit_code or 0,
        **_common(container),
    )


def _common(container: Container) -> dict[str, Any]:
    """The fields that both messages have."""
    is_running = container.is_running
    return {
        "id": container.id,
        "metadata": v1.ContainerMetadata(name=container.name, attempt=container.attempt),
        "state": v1.ContainerState.CONTAINER_RUNNING if is_running else v1.ContainerState.CONTAINER_EXITED,
        "created_at": int(container.created_at * _NS_PER_S),
        "labels": {
            "io.kubernetes.container.name": container.name,
            "io.kubernetes.pod.name": container.pod_name,
            "io.kubernetes.pod.namespace": container.pod_namespace,
            "io.kubernetes.pod.uid": container.pod_uid,
        },
        "annotations": {"io.kubernetes.container.restartCount": str(container.attempt)},
    }


def _matches(container: v1.Container, asked: v1.ContainerFilter) -> bool:
    return (
        asked.id in ("", container.id)
        and asked.pod_sandbox_id in ("", container.pod_sandbox_id)
        and (asked.state is None or asked.state.state == container.state)
        and asked.label_selector.items() <= container.labels.items()
    )


def _pod_sandbox_id(container: Container) -> str:
    return hashlib.sha256(container.pod_uid.encode()).hexdigest()
