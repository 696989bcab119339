"""For the tests of `gpushare-agent check`: a node that is complete, and its findings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from gpushare_agent.agent.commands.check import check_node
from gpushare_agent.core.model.finding import Finding, Level
from gpushare_agent.core.settings.settings import Settings, load_settings
from gpushare_agent.core.wire.runtime import v1
from tests.cluster.support_kube import write_kubeconfig
from tests.fakes.api_server import FakeApiServer, Seen, answers, fake_api, raw_status
from tests.kit.support_grpc import served_at
from tests.settings.support_settings import ListeningSocket, listening

NODE = "node-1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Runtime(v1.RuntimeServiceBase):
    """A container runtime that answers with its version, and to nothing else."""

    async def version(self, message: v1.VersionRequest) -> v1.VersionResponse:
        return v1.VersionResponse(runtime_name="containerd", runtime_version="v2.1.0")


@dataclass
class Node:
    """A directory that is complete, its sockets, and the flags that point the check there."""

    path: Path
    kubelet: ListeningSocket
    pod_resources: ListeningSocket
    runtime: Path
    api: FakeApiServer

    def flags(self, *more: str) -> list[str]:
        kubeconfig = write_kubeconfig(self.path, self.api.url, {"token": "t"})
        return [
            f"--node-name={NODE}",
            "--driver=simulated",
            "--isolation=vcuda",  # that with the most to check
            f"--device-plugin-path={self.kubelet.path.parent}",
            f"--kubelet.pod-resources-socket={self.pod_resources.path}",
            f"--container-runtime-endpoint=unix://{self.runtime}",
            f"--virtual-manager-path={self.path / 'vm'}",
            f"--runtime.cgroup-root={self.path / 'cgroup'}",
            f"--libgpushare.directory={self.path / 'library'}",
            f"--kubeconfig={kubeconfig}",
            *more,
        ]

    def settings(self, *more: str) -> Settings:
        return load_settings(self.flags(*more), {}).settings


def node_api(
    version: str = "v1.34.2",
    forbidden: tuple[str, ...] = (),
    taints: Sequence[Mapping[str, str]] = (),
    **meta: Any,
) -> Callable[..., Any]:
    """Answers for the node of 96 CPUs, and access reviews that allow all but the named verbs."""

    async def behave(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        if seen.path == REVIEWS:
            attributes = seen.body["spec"]["resourceAttributes"]
            subresource = f"/{attributes['subresource']}" if "subresource" in attributes else ""
            allowed = f"{attributes['verb']} {attributes['resource']}{subresource}" not in forbidden
            return await answers(201, {"status": {"allowed": allowed}})(server, seen, request)
        elif seen.path == f"/api/v1/nodes/{NODE}":
            status = {"nodeInfo": {"kubeletVersion": version}, "allocatable": {"cpu": "96"}}
            raw_node = {"metadata": {"name": NODE, **meta}, "spec": {"taints": taints}, "status": status}
            return await answers(200, raw_node)(server, seen, request)
        else:
            return await answers(404, raw_status(404, "not found"))(server, seen, request)

    return behave


@asynccontextmanager
async def complete_node(directory: Path, behaviour: Callable[..., Any] | None = None) -> AsyncIterator[Node]:
    (directory / "cgroup").mkdir()
    (directory / "cgroup" / "cgroup.controllers").touch()
    async with (
        listening(directory / "device-plugins" / "kubelet.sock") as kubelet,
        listening(directory / "pod-resources" / "kubelet.sock") as pod_resources,
        served_at(directory / "runtime.sock", Runtime(), mode=0o660) as runtime,
        fake_api(others=[behaviour or node_api()]) as api,
    ):
        yield Node(path=directory, kubelet=kubelet, pod_resources=pod_resources, runtime=runtime, api=api)


def not_ok(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is not Level.OK]


async def only(what: str, node: Node, *flags: str) -> Finding:
    """The finding about one thing, alone of its kind."""
    (found,) = [finding for finding in await check_node(node.settings(*flags)) if finding.what == what]
    return found
