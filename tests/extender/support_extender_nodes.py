"""Several embedded nodes with agents in this process, and extenders for the embedded scheduler: the real one, and one that
does as it is told, for tests of the scheduler."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from gpushare_agent.core.kube.client import open_cluster_api
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.extender.app import ExtenderParts, build
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.node import EmbeddedCluster, EmbeddedNode, open_embedded_cluster
from gpushare_agent.sandbox.scheduler.scheduler import SchedulerTimes
from tests.agent.support_agent import InnerAgent, open_agent, wait_synced
from tests.extender.support_extender import eventually, serving_extender
from tests.kit.support_http import free_port
from tests.sandbox.support_sandbox import CORE, MEMORY, SHORT_TIMES, NodeUnderTest, SmallPlugin, device_ids, under_test
from tests.support_deadline import DEADLINE_S
from tests.support_threads import remove_directory

CALM = ("--allocation.check-period-s=5", "--health.check-period-s=5", "--sample-period-s=10")
QUICK = SchedulerTimes(first_backoff_s=0.05, last_backoff_s=0.5)


class ClusterUnderTest(EmbeddedCluster, frozen=True, kw_only=True):
    """An embedded cluster with what tests do to it, wait for and read."""

    nodes: tuple[NodeUnderTest, ...]

    async def wait_until(self, found: Callable[[], Any], what: str) -> Any:
        return await self.api.signal.wait_until(found, DEADLINE_S, what)

    async def wait_bound(self, name: str) -> str:
        """The node of the pod."""
        return str(await self.wait_until(lambda: self.node_of(name), f"pod {name} on a node"))

    def node_of(self, name: str) -> str:
        return str(self.api.pod("default", name)["spec"].get("nodeName", ""))

    def condition_of(self, name: str) -> dict[str, Any]:
        return self.nodes[0].condition_of(name)

    @asynccontextmanager
    async def with_plugins(self, **cores: int) -> AsyncIterator[None]:
        """By node: how many cores its plugin offers."""
        async with AsyncExitStack() as stack:
            for node in self.nodes:
                devices = device_ids(f"GPU-{node.name}", count=cores[node.name])
                await stack.enter_async_context(node.open_plugin(SmallPlugin(CORE, devices)))
            yield

    @asynccontextmanager
    async def open_agents(self, *flags: Sequence[str]) -> AsyncIterator[list[InnerAgent]]:
        """One for each node, in the order of the nodes, each with its flags. They work seldom: there may be many."""
        async with AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(open_agent(node, *CALM, *own, wait=False))
                for node, own in zip(self.nodes, flags, strict=True)
            ]
            for node, agent in zip(self.nodes, agents, strict=True):
                await self.wait_until(partial(_offers, node), f"the devices of node {node.name}")
                await wait_synced(agent.parts)
            yield agents


@asynccontextmanager
async def open_cluster(
    *names: str, extender_url: str = "", times: KubeletTimes = SHORT_TIMES, scheduler_times: SchedulerTimes = QUICK
) -> AsyncIterator[ClusterUnderTest]:
    """In a short directory below /tmp, which is removed afterwards."""
    state = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        async with open_embedded_cluster(
            state, node_names=names, extender_url=extender_url, times=times, scheduler_times=scheduler_times
        ) as cluster:
            nodes = tuple(map(under_test, cluster.nodes))
            yield ClusterUnderTest(paths=cluster.paths, api=cluster.api, nodes=nodes)
    finally:
        remove_directory(state)


@dataclass
class ReportedExtender:
    """Answers as the test says: `fits` gives the reason why a pod does not fit on a node, empty where it does."""

    fits: Callable[[str, str], str] = lambda pod, node: ""
    score: Callable[[str, str], int] = lambda pod, node: 0
    before_bind: Callable[[str], Awaitable[str]] | None = None
    """May wait; a text is the error of the bind."""
    filter_error: str = ""
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    """Verb, pod, and the nodes or the node."""
    cluster: ClusterUnderTest | None = None
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/scheduler"

    def asked(self, verb: str, pod: str) -> list[Any]:
        return [what for name, subject, what in self.seen if (name, subject) == (verb, pod)]

    async def filter(self, request: web.Request) -> web.Response:
        args = await request.json()
        assert set(args) == {"Pod", "NodeNames"}
        pod, names = args["Pod"]["metadata"]["name"], args["NodeNames"]
        self.seen.append(("filter", pod, names))
        if self.filter_error:
            return web.json_response({"Error": self.filter_error})
        failed = {name: reason for name in names if (reason := self.fits(pod, name))}
        return web.json_response({
            "Nodes": None, "NodeNames": [name for name in names if name not in failed], "FailedNodes": failed,
            "FailedAndUnresolvableNodes": None, "Error": "",
        })  # fmt: skip

    async def prioritize(self, request: web.Request) -> web.Response:
        args = await request.json()
        pod, names = args["Pod"]["metadata"]["name"], args["NodeNames"]
        self.seen.append(("prioritize", pod, names))
        return web.json_response([{"Host": name, "Score": self.score(pod, name)} for name in names])

    async def bind(self, request: web.Request) -> web.Response:
        args = await request.json()
        assert set(args) == {"PodName", "PodNamespace", "PodUID", "Node"}
        self.seen.append(("bind", args["PodName"], args["Node"]))
        error = await self.before_bind(args["PodName"]) if self.before_bind is not None else ""
        if not error:
            assert self.cluster is not None
            self.cluster.api.bind_pod(args["PodNamespace"], args["PodName"], args["Node"], uid=args["PodUID"])
        return web.json_response({"Error": error})


@asynccontextmanager
async def serving(extender: ReportedExtender) -> AsyncIterator[ReportedExtender]:
    app = web.Application()
    app.router.add_post("/scheduler/filter", extender.filter)
    app.router.add_post("/scheduler/priorities", extender.prioritize)
    app.router.add_post("/scheduler/bind", extender.bind)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", extender.port).start()
        yield extender
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await runner.cleanup()


@asynccontextmanager
async def open_reported(
    extender: ReportedExtender, names: Sequence[str], *, scheduler_times: SchedulerTimes = QUICK
) -> AsyncIterator[ClusterUnderTest]:
    """A cluster whose scheduler asks this extender."""
    async with (
        serving(extender),
        open_cluster(*names, extender_url=extender.url, scheduler_times=scheduler_times) as cluster,
    ):
        extender.cluster = cluster
        yield cluster


# --- the extender itself, and agents, in this process ---


@asynccontextmanager
async def open_extender(cluster: ClusterUnderTest, port: int, *flags: str) -> AsyncIterator[ExtenderParts]:
    """It leads at once, and has listed the cluster."""
    arguments = [
        f"--kubeconfig={cluster.paths.kubeconfig}", f"--extender.port={port}", "--extender.leader-elect=false", *flags,
    ]  # fmt: skip
    settings = load_settings(arguments, {}).settings
    async with open_cluster_api(kubeconfig=settings.kubeconfig, request_s=2.0) as api:
        parts = build(settings, api)
        async with serving_extender(parts):
            await eventually(lambda: not parts.leadership.not_ready())
            yield parts


def _offers(node: EmbeddedNode) -> bool:
    """The kubelet has the devices of both resources; the Node object is told at once, not at the next interval."""
    healthy = node.kubelet.devices.capacity()
    if all(healthy.get(name, (0, 0))[1] for name in (CORE, MEMORY)):
        node.kubelet.push_node_status()
        return True
    return False
