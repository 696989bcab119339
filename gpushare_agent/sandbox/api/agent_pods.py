"""The agents, which are child processes of the sandbox, as pods of the API server: clients find them, read their logs and
reach their web servers as on a cluster.

State owned: where the server and the log of each are.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from msgspec import Struct

from gpushare_agent.sandbox.api.responses import bad_request
from gpushare_agent.sandbox.pod_manifest import MIRROR_ANNOTATION, RawObject, timestamp

AGENT_NAMESPACE = "gpushare-system"
INSTEAD_OF_EXEC = (
    "type the command here as it stands behind `--`; cordon and uncordon need --socket with the path that"
    " `gpushare-agent sandbox status` names"
)
"""What a user does where a page says `kubectl exec AGENT -- …`: an agent of the sandbox is in no container."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
_CHUNK = 64 * 1024
_NOT_PASSED_ON = frozenset({"authorization", "host", "connection", "cookie"})


class AgentServer(Struct, frozen=True, kw_only=True):
    """Of one agent: the URL of its web server, and its log file."""

    url: str
    log: Path


class AgentPods:
    """By name of the pod."""

    def __init__(self) -> None:
        self.servers: dict[str, AgentServer] = {}

    def pod(self, node_name: str, server: AgentServer) -> RawObject:
        """The pod of a node's agent, as the manifests' DaemonSet would have it."""
        name, now, port = f"gpushare-agent-{node_name}", timestamp(), urlsplit(server.url).port
        self.servers[name] = server
        container = {"name": "agent", "image": "gpushare-agent", "ports": [{"name": "http", "containerPort": port}]}
        status = {"name": "agent", "image": "gpushare-agent", "imageID": "", "ready": True, "started": True,
                  "restartCount": 0, "state": {"running": {"startedAt": now}}}  # fmt: skip
        return {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": AGENT_NAMESPACE, "uid": str(uuid.uuid4()), "creationTimestamp": now,
                "labels": {"app.kubernetes.io/name": "gpushare-agent"}, "annotations": {MIRROR_ANNOTATION: "sandbox"},
            },
            "spec": {"nodeName": node_name, "containers": [container]},
            "status": {
                "phase": "Running", "startTime": now, "hostIP": "127.0.0.1", "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
                "containerStatuses": [status],
            },
        }  # fmt: skip

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """GET to the web server of an agent, `[http:]POD[:PORT]/proxy/PATH`; the other pods have none."""
        name = request.match_info["name"].removeprefix("http:").partition(":")[0]
        server = self.servers.get(name) if request.match_info["namespace"] == AGENT_NAMESPACE else None
        if server is None:
            bad_request(f"pod {name!r:.80} has no server in this sandbox: only agents' pods can be asked by proxy")
        path = request.path_qs.partition("/proxy")[2]
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _NOT_PASSED_ON}
        async with aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False) as session:
            try:
                async with session.get(server.url + (path or "/"), headers=headers, allow_redirects=False) as answer:
                    response = web.StreamResponse(status=answer.status, headers=_passed_back(answer))
                    await response.prepare(request)
                    async for chunk in answer.content.iter_chunked(_CHUNK):
                        await response.write(chunk)
                    return response
            except aiohttp.ClientConnectorError as error:
                raise web.HTTPServiceUnavailable(text=f"the agent does not answer at the moment: {error}") from error


def _passed_back(answer: aiohttp.ClientResponse) -> dict[str, str]:
    names = ("Content-Type", "Content-Encoding", "Content-Security-Policy", "ETag", "Cache-Control")
    return {name: answer.headers[name] for name in names if name in answer.headers}
