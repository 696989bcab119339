"""`kubectl logs`: what a container has printed, from the file of its node's runtime.

A node is here as soon as it runs. Lines have no times, and of restarts there is one file: what would need them is refused.
State owned: which node has which runtime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from gpushare_agent.sandbox.api.agent_pods import AgentPods
from gpushare_agent.sandbox.api.responses import bad_request, query_number
from gpushare_agent.sandbox.pod_manifest import RawObject, is_mirror, is_terminal
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime

_POLL_S = 0.25
_CHUNK = 64 * 1024
_MOST_TAIL = 10 * 2**20
_REFUSED = ("previous", "timestamps", "sinceSeconds", "sinceTime")


class ContainerLogs:
    def __init__(self, agents: AgentPods) -> None:
        self.runtimes: dict[str, ContainerRuntime] = {}
        self._agents = agents

    async def serve(self, request: web.Request, pod: RawObject) -> web.StreamResponse:
        """Ends with the container where it follows."""
        if asked := [name for name in _REFUSED if request.query.get(name) not in (None, "", "false")]:
            bad_request(
                f"{', '.join(asked)}: the sandbox keeps one log of a container over its restarts, without times"
            )
        name = _container_name(pod, request.query.get("container", ""))
        path, is_over = self._log_of(pod, name)
        limit = query_number(request, "limitBytes", 0)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        offset = await asyncio.to_thread(_tail_offset, path, request.query.get("tailLines"))
        follows = request.query.get("follow") in ("true", "1")
        await _copy(response, path, offset, is_over if follows else lambda: True, limit or None)
        return response

    def _log_of(self, pod: RawObject, name: str) -> tuple[Path, Callable[[], bool]]:
        """The file, and whether nothing comes any more."""
        if is_mirror(pod):
            return self._agents.servers[pod["metadata"]["name"]].log, lambda: False
        runtime = self.runtimes.get(pod["spec"].get("nodeName", ""))
        container = runtime.find(pod["metadata"]["uid"], name) if runtime is not None else None
        if runtime is None or container is None:
            state = "never started" if is_terminal(pod) else "is waiting to start"
            bad_request(f'container "{name}" in pod "{pod["metadata"]["name"]}" {state}: {_why(pod, name)}')
        return runtime.log_of(container), lambda: not container.is_running


async def _copy(
    response: web.StreamResponse, path: Path, offset: int, is_over: Callable[[], bool], limit: int | None
) -> None:
    while limit is None or limit > 0:
        is_last = is_over()  # before the read: nothing is printed after the end
        while chunk := _read(path, offset, min(_CHUNK, limit if limit is not None else _CHUNK)):
            await response.write(chunk)
            offset, limit = offset + len(chunk), None if limit is None else limit - len(chunk)
        if is_last:
            return
        await asyncio.sleep(_POLL_S)


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)
    except FileNotFoundError:  # nothing printed yet
        return b""


def _tail_offset(path: Path, lines: str | None) -> int:
    """Where the last `lines` lines begin, of the last ten MiB."""
    if lines is None or not lines.isdigit() or not path.exists():
        return 0
    size = path.stat().st_size
    end = _read(path, max(0, size - _MOST_TAIL), _MOST_TAIL)
    kept = end.splitlines(keepends=True)[-int(lines) :] if int(lines) else []
    return size - sum(map(len, kept))


def _container_name(pod: RawObject, asked: str) -> str:
    spec, where = pod["spec"], pod["metadata"]["name"]
    names = [c["name"] for c in (*(spec.get("initContainers") or ()), *spec["containers"])]
    if asked and asked not in names:
        bad_request(f"container {asked} is not valid for pod {where}")
    if not asked and len(names) > 1:
        bad_request(f"a container name must be specified for pod {where}, choose one of: [{' '.join(names)}]")
    return asked or names[0]


def _why(pod: RawObject, name: str) -> str:
    status = pod.get("status") or {}
    if is_terminal(pod):
        return ": ".join(filter(None, (f"the pod is {status['phase']}", status.get("reason"), status.get("message"))))
    for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if one["name"] == name and "waiting" in one.get("state", {}):
            return str(one["state"]["waiting"].get("reason"))
    return "ContainerCreating" if pod["spec"].get("nodeName") else "the pod is on no node yet"
