"""Embedded nodes, and the cluster of them on one API server with one scheduler, where a scheduler extender can be tried.

A node is a kubelet and a container runtime in one state directory. The agents and the extender are not part of it: give
each node's `agent_arguments()` to `gpushare-agent run`, and the address of the extender to `open_embedded_cluster`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import ClientSession
from msgspec import Struct, structs

from gpushare_agent.core.kit.supervision import forever, stop_task
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.api.access import make_certificate
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.kubelet.calls import CallObserver, NodeParts
from gpushare_agent.sandbox.kubelet.kubelet import EmbeddedKubelet
from gpushare_agent.sandbox.pod_controllers import PodControllers
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.runtime.cri_server import cri_socket
from gpushare_agent.sandbox.scheduler.scheduler import (
    EmbeddedScheduler,
    ExtenderCalls,
    ExtenderScheduler,
    SchedulerTimes,
)
from gpushare_agent.sandbox.state_directory import NodePaths, prepare_state_directory


class EmbeddedNode(NodeParts, frozen=True, kw_only=True, eq=False):
    """A running node. `api.signal` wakes up after every change of its API objects, kubelet and containers."""

    kubelet: EmbeddedKubelet

    def agent_arguments(self) -> list[str]:
        """Flags of `gpushare-agent run` for an agent of this node with simulated GPUs."""
        flags = {
            "driver": "simulated",
            "simulated.device-nodes": "true",
            "node-name": self.name,
            "kubeconfig": self.paths.kubeconfig,
            "root": self.paths.state,
            "mps.control": self.paths.mps_control,
            # on a busy machine an agent is offered a pod before it has loaded its Kubernetes client and read the Node
            "kubelet.pod-lookup-timeout-s": 4,
            "runtime.endpoint": self.paths.runtime_socket,
            "runtime.cgroup-root": self.runtime.cgroup_root,
            "runtime.proc-root": self.runtime.proc_root,
            "simulated.faults": self.paths.faults,
            "simulated.usage": self.paths.usage,
        }
        return [f"--{flag}={value}" for flag, value in flags.items()]


@asynccontextmanager
async def open_node_on(
    api: EmbeddedApiServer,
    paths: NodePaths,
    *,
    name: str,
    seed: int,
    times: KubeletTimes | None,
    cgroups: str | None = None,
    calls: CallObserver | None = None,
) -> AsyncIterator[EmbeddedNode]:
    """Kubelet and container runtime of one node of this API server. Raises StartupError."""
    # Of an earlier node: this one's GPUs are new.
    for left in (paths.health_state, paths.resize_state, paths.faults, paths.usage):
        left.unlink(missing_ok=True)
    paths.make_directories()
    api.write_kubeconfig(paths.kubeconfig)
    runtime = ContainerRuntime(paths.state, api.signal, cgroups)
    parts = NodeParts(
        name=name, paths=paths, api=api, runtime=runtime, times=times or KubeletTimes(), rng=random.Random(seed),
        calls=calls or CallObserver(),
    )  # fmt: skip
    kubelet, cri = EmbeddedKubelet(parts), cri_socket(runtime, paths.runtime_socket)
    # `kubectl logs` reads the files of the runtime of the pod's node.
    api.subresources.runtimes[name] = runtime
    try:
        async with running_task("kubelet", kubelet.run):
            # Before the kubelet: an agent that finds no runtime falls back to the pods' statuses.
            await cri.serve()
            await kubelet.start()
            yield EmbeddedNode(**structs.asdict(parts), kubelet=kubelet)
    finally:
        await cri.stop()
        runtime.close()


@asynccontextmanager
async def running_task(name: str, body: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """An endless body, as a task of that name, until the block ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever(name, body), name=name)
        try:
            yield
        finally:
            await stop_task(task)


_HISTORY = 20_000
"""Changes that a watch may lag behind: with many nodes a moment has more of them."""


class EmbeddedCluster(Struct, frozen=True, kw_only=True):
    """Running nodes, in the order of their names as given. `paths` are those of the whole, not of a node."""

    paths: NodePaths
    api: EmbeddedApiServer
    nodes: tuple[EmbeddedNode, ...]


def paths_of_node(whole: NodePaths, name: str, count: int) -> NodePaths:
    """A single node lies in the state directory itself, several in a directory of their name below."""
    return whole if count == 1 else NodePaths(state=whole.state / name)


@asynccontextmanager
async def open_embedded_cluster(
    state: Path,
    *,
    node_names: Sequence[str],
    extender_url: str = "",
    names: ResourceNames | None = None,
    kubelet_version: str = "1.36",
    times: KubeletTimes | None = None,
    scheduler_times: SchedulerTimes | None = None,
) -> AsyncIterator[EmbeddedCluster]:
    """The nodes run until the block ends.

    With `extender_url`, the prefix before the verbs, the scheduler asks the extender there; it may come later: pods wait
    until it answers. Raises StartupError.
    """
    paths = prepare_state_directory(state)
    # 30 ms of openssl.
    certificate = await asyncio.to_thread(make_certificate, paths.state)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            EmbeddedApiServer(version=kubelet_version, history_limit=_HISTORY, certificate=certificate)
        )
        api.write_kubeconfig(paths.kubeconfig)
        # Before the nodes: a Deployment may be applied while they start.
        await stack.enter_async_context(running_task("pod controllers", PodControllers(api).run))
        scheduler: EmbeddedScheduler | ExtenderScheduler = EmbeddedScheduler(api=api, names=names)
        if extender_url:
            # One for all calls: connections to the extender are used again.
            session = await stack.enter_async_context(ClientSession())
            scheduler = ExtenderScheduler(api=api, extender=ExtenderCalls(extender_url, session), times=scheduler_times)
        await stack.enter_async_context(running_task("scheduler", scheduler.run))
        nodes = []
        for number, name in enumerate(node_names):
            # Each node's own directory, so that agents share no path.
            own = prepare_state_directory(paths_of_node(paths, name, len(node_names)).state)
            opened = open_node_on(api, own, name=name, seed=number, times=times)
            nodes.append(await stack.enter_async_context(opened))
        yield EmbeddedCluster(paths=paths, api=api, nodes=tuple(nodes))
