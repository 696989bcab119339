"""The `log` and `proxy` subresources of pods, and the agents as pods which have them.

Agents are child processes of the sandbox. The API server shows them as mirror pods, so clients find them, read their logs
and reach their web servers as on a cluster. A container's log is the file of its node's runtime. Lines have no times, and
all restarts share one file: requests that need more are refused. State owned: where the server and the log of each agent
are, and which node has which runtime.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from msgspec import Struct

from gpushare_agent.sandbox.api.responses import bad_request, query_number
from gpushare_agent.sandbox.pod_manifest import (
    MIRROR_ANNOTATION,
    RawObject,
    is_mirror,
    is_terminal,
    raw_containers,
    timestamp,
)
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime

AGENT_NAMESPACE = "gpushare-system"
INSTEAD_OF_EXEC = (
    "type the command here as it stands behind `--`; cordon and uncordon need --socket with the path that"
    " `gpushare-agent sandbox status` names"
)
"""The replacement for a page's `kubectl exec AGENT -- …`: an agent of the sandbox is in no container."""
_POLL_S = 0.25
_MOST_TAIL = 10 * 2**20
_REFUSED = ("previous", "timestamps", "sinceSeconds", "sinceTime")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
_CHUNK = 64 * 1024
_NOT_PASSED_ON = frozenset({"authorization", "host", "connection", "cookie"})
_PASSED_BACK = ("Content-Type", "Content-Encoding", "Content-Security-Policy", "ETag", "Cache-Control")


class AgentServer(Struct, frozen=True, kw_only=True):
    """An agent's web server, by its URL, and its log file."""

    url: str
    log: Path


def agent_pod(node_name: str, server: AgentServer) -> RawObject:
    """The pod of a node's agent, as the manifests' DaemonSet would have it."""
    now, port = timestamp(), urlsplit(server.url).port
    container = {"name": "agent", "image": "gpushare-agent", "ports": [{"name": "http", "containerPort": port}]}
    status = {"name": "agent", "image": "gpushare-agent", "imageID": "", "ready": True, "started": True,
              "restartCount": 0, "state": {"running": {"startedAt": now}}}  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": f"gpushare-agent-{node_name}", "namespace": AGENT_NAMESPACE, "uid": str(uuid.uuid4()),
            "creationTimestamp": now, "labels": {"app.kubernetes.io/name": "gpushare-agent"},
            "annotations": {MIRROR_ANNOTATION: "sandbox"},
        },
        "spec": {"nodeName": node_name, "containers": [container]},
        "status": {
            "phase": "Running", "startTime": now, "hostIP": "127.0.0.1", "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
            "containerStatuses": [status],
        },
    }  # fmt: skip


class PodSubresources:
    """What is behind the addresses `log` and `proxy`."""

    def __init__(self) -> None:
        self.servers: dict[str, AgentServer] = {}
        """By name of the agent's pod."""
        self.runtimes: dict[str, ContainerRuntime] = {}
        """By name of the node."""

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """GET to the web server of an agent, `[http:]POD[:PORT]/proxy/PATH`; the other pods have none."""
        # `http:POD:PORT` is how clients name scheme and port; an agent's pod has one server.
        name = request.match_info["name"].removeprefix("http:").partition(":")[0]
        server = self.servers.get(name) if request.match_info["namespace"] == AGENT_NAMESPACE else None
        if server is None:
            bad_request(f"pod {name!r:.80} has no server in this sandbox: only agents' pods can be asked by proxy")
        path = request.path_qs.partition("/proxy")[2]
        # The token is the sandbox's own: the agent must not see it.
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_PASSED_ON}
        # Compressed bodies pass as they are: the agent's Content-Encoding goes back to the client with them.
        # One for each request: few come.
        async with aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False) as session:
            try:
                async with session.get(server.url + (path or "/"), headers=headers, allow_redirects=False) as answer:
                    passed_back = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
                    response = web.StreamResponse(status=answer.status, headers=passed_back)
                    await response.prepare(request)
                    async for chunk in answer.content.iter_chunked(_CHUNK):
                        await response.write(chunk)
                    return response
            except aiohttp.ClientConnectorError as error:
                raise web.HTTPServiceUnavailable(text=f"the agent does not answer at the moment: {error}") from error

    async def log(self, request: web.Request, pod: RawObject) -> web.StreamResponse:
        """The response ends with the container where it follows the log."""
        # Refused and not ignored: a wrong log would look like the right one.
        if asked := [name for name in _REFUSED if request.query.get(name) not in (None, "", "false")]:
            bad_request(
                f"{', '.join(asked)}: the sandbox keeps one log of a container over its restarts, without times"
            )
        path, is_over = self._log_of(pod, _container_name(pod, request.query.get("container", "")))
        limit = query_number(request, "limitBytes", 0) or sys.maxsize
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        # Ten MiB may be read for it.
        offset = await asyncio.to_thread(_tail_offset, path, request.query.get("tailLines"))
        follows = request.query.get("follow") in ("true", "1")
        while limit > 0:
            is_last = not follows or is_over()  # before the read: nothing is printed after the end
            # In pieces: a log may have 10 MiB, and a client that reads slowly must not keep it in memory.
            while chunk := _read(path, offset, min(_CHUNK, limit)):
                await response.write(chunk)
                offset, limit = offset + len(chunk), limit - len(chunk)
            if is_last:
                break
            await asyncio.sleep(_POLL_S)
        return response

    def _log_of(self, pod: RawObject, name: str) -> tuple[Path, Callable[[], bool]]:
        """The file, and whether it is complete."""
        if is_mirror(pod):
            return self.servers[pod["metadata"]["name"]].log, lambda: False
        runtime = self.runtimes.get(pod["spec"].get("nodeName", ""))
        container = runtime.find(pod["metadata"]["uid"], name) if runtime is not None else None
        # Not started yet, or on a node that is gone.
        if runtime is None or container is None:
            state = "never started" if is_terminal(pod) else "is waiting to start"
            bad_request(f'container "{name}" in pod "{pod["metadata"]["name"]}" {state}: {_why(pod, name)}')
        return runtime.log_of(container), lambda: not container.is_running


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)
    except FileNotFoundError:  # nothing printed yet
        return b""


def _tail_offset(path: Path, lines: str | None) -> int:
    """The offset at which the last `lines` lines begin, of the last ten MiB."""
    if lines is None or not lines.isdigit() or not path.exists():
        return 0
    size = path.stat().st_size
    end = _read(path, max(0, size - _MOST_TAIL), _MOST_TAIL)
    tail = end.splitlines(keepends=True)[-int(lines) :] if int(lines) else []
    return size - sum(map(len, tail))


def _container_name(pod: RawObject, asked: str) -> str:
    where, names = pod["metadata"]["name"], [container["name"] for container in raw_containers(pod)]
    # In the words of a real API server, which kubectl shows.
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
