"""The scheduler extender of the sandbox: a child process on a port of this machine, on the embedded API server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext

from msgspec import Struct

from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.node import running_task
from gpushare_agent.sandbox.state_directory import NodePaths
from gpushare_agent.settings.settings import Settings

_HOST = "127.0.0.1"


class PlannedExtender(Struct, frozen=True, kw_only=True):
    """`url` is the prefix before the verbs."""

    url: str
    process: AgentProcess


def plan_extender(
    settings: Settings, paths: NodePaths, flags: Sequence[str], notify: Callable[[str], None]
) -> PlannedExtender:
    """Not yet running. There is one only, so it leads without election: after a kill it would wait for its own lease."""
    port = free_port()
    arguments = [
        f"--kubeconfig={paths.kubeconfig}",
        "--extender.leader-elect=false",
        *flags,
        f"--extender.addr={_HOST}",
        f"--extender.port={port}",
    ]
    process = AgentProcess(arguments, paths.extender_log, notify, command="extender", name="the extender")
    return PlannedExtender(url=f"http://{_HOST}:{port}/scheduler", process=process)


_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port for a child process. It stays bound here, without listening, until this process ends: else another server could
    get the number before the child's first start, or between two. The child can listen: it sets SO_REUSEADDR too."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((_HOST, 0))
    _RESERVED.append(reserved)
    port: int = reserved.getsockname()[1]
    return port


@asynccontextmanager
async def running_extender(planned: PlannedExtender | None) -> AsyncIterator[None]:
    """Until the block ends; nothing where there is none."""
    async with nullcontext() if planned is None else running_task("extender process", planned.process.run):
        yield
