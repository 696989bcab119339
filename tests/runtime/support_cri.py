"""The agent's client of a container runtime, closed at the end; and what a runtime says that the agent does not read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from gpushare_agent.agent.runtime.cri import SERVICE, RuntimeClient, runtime_endpoints
from gpushare_agent.core.kit.grpc_client import UnixChannel
from gpushare_agent.core.wire.runtime import v1
from tests.support_deadline import DEADLINE_S


@asynccontextmanager
async def open_runtime(
    endpoint: str, *, timeout_s: float = DEADLINE_S, known: Sequence[Path] = ()
) -> AsyncIterator[RuntimeClient]:
    with closing(RuntimeClient(runtime_endpoints(endpoint, known), timeout_s=timeout_s)) as client:
        yield client


async def all_containers(socket: Path) -> dict[str, v1.Container]:
    """By ID, whatever their state."""
    with closing(UnixChannel(socket)) as channel:
        request = v1.ListContainersRequest()
        answer = await channel.unary(f"{SERVICE}/ListContainers", request, v1.ListContainersResponse)
        return {one.id: one for one in answer.containers}


async def reported_pid(socket: Path, container_id: str) -> int | None:
    """The PID of the container's first process, as crictl shows it; None where the runtime says none."""
    with closing(UnixChannel(socket)) as channel:
        request = v1.ContainerStatusRequest(container_id=container_id, verbose=True)
        answer = await channel.unary(f"{SERVICE}/ContainerStatus", request, v1.ContainerStatusResponse)
        pid = json.loads(answer.info.get("info", "{}")).get("pid")
        return int(pid) if pid else None
