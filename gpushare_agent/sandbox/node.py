"""One embedded node: kubelet and container runtime in one state directory. API server and scheduler: cluster.py.

The agent itself is not part of it: give `agent_arguments()` to `gpushare-agent run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from msgspec import Struct

from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.kubelet.kubelet import EmbeddedKubelet
from gpushare_agent.sandbox.runtime.cri_server import CriServer
from gpushare_agent.sandbox.state_directory import NodePaths


class EmbeddedNode(Struct, frozen=True, kw_only=True):
    """A running node. `api.signal` wakes up after every change of its API objects, kubelet and containers."""

    name: str
    paths: NodePaths
    api: EmbeddedApiServer
    kubelet: EmbeddedKubelet
    cri: CriServer

    def agent_arguments(self) -> list[str]:
        """Flags of `gpushare-agent run` for an agent of this node with simulated GPUs."""
        flags = {
            "driver": "simulated",
            "simulated.device-nodes": "true",
            "node-name": self.name,
            "kubeconfig": self.paths.kubeconfig,
            **self.paths.of_agent,
            "isolation": "vcuda",  # of those that limit, the one that needs neither a library nor a daemon
            "mps.control": self.paths.mps_control,
            # on a busy machine an agent is offered a pod before it has loaded its Kubernetes client and read the Node
            "kubelet.pod-lookup-timeout-s": 10,
            "runtime.endpoint": self.paths.runtime_socket,
            "runtime.cgroup-root": self.kubelet.runtime.cgroup_root,
            "simulated.faults": self.paths.faults,
            "simulated.usage": self.paths.usage,
            "debug.port": 0,
        }
        return [f"--{flag}={value}" for flag, value in flags.items()]


@asynccontextmanager
async def open_node_on(
    api: EmbeddedApiServer,
    paths: NodePaths,
    *,
    node_name: str,
    kubelet_version: str,
    seed: int,
    times: KubeletTimes | None,
    cgroups: str | None,
) -> AsyncIterator[EmbeddedNode]:
    """Kubelet and container runtime of one node of this API server. Raises StartupError."""
    for left in (
        paths.health_state,
        paths.resize_state,
        paths.faults,
        paths.usage,
    ):  # of an earlier node: this one's GPUs are new
        left.unlink(missing_ok=True)
    api.write_kubeconfig(paths.kubeconfig)
    kubelet = EmbeddedKubelet(
        paths=paths, node_name=node_name, api=api, version=kubelet_version, seed=seed, times=times,
        cgroups=cgroups,
    )  # fmt: skip
    api.logs.runtimes[node_name] = kubelet.runtime
    cri = CriServer(kubelet.runtime, paths.runtime_socket)
    try:
        async with running_task("kubelet", kubelet.run):
            await cri.start()
            await kubelet.start()
            yield EmbeddedNode(name=node_name, paths=paths, api=api, kubelet=kubelet, cri=cri)
    finally:
        await cri.stop()
        kubelet.runtime.close()


@asynccontextmanager
async def running_task(name: str, body: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """An endless body, as a task of that name, until the block ends."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever(name, body), name=name)
        try:
            yield
        finally:
            await stop_task(task)
