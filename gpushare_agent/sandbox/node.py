"""The embedded node put together: API server, scheduler and kubelet in one state directory. Several of them: cluster.

The agent itself is not part of it: give `agent_arguments()` to `gpushare-agent run`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.model.errors import StartupError
from gpushare_agent.model.names import VMEMORY_SOCKET
from gpushare_agent.sandbox.api_access import write_kubeconfig
from gpushare_agent.sandbox.api_server import EmbeddedApiServer
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.cri_server import CriServer
from gpushare_agent.sandbox.kubelet import EmbeddedKubelet
from gpushare_agent.sandbox.kubelet_boot import KubeletTimes
from gpushare_agent.sandbox.scheduler import EmbeddedScheduler

UNIX_ADDRESS_LIMIT = 107
"""Bytes of a unix socket's path on Linux."""


class Scheduler(Protocol):
    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePaths:
    """Where things are, all below the state directory."""

    state: Path

    @property
    def device_plugin_path(self) -> Path:
        return self.state / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        return self.state / "pod-resources" / "kubelet.sock"

    @property
    def virtual_manager(self) -> Path:
        return self.state / "vm"

    @property
    def mps_pipe(self) -> Path:
        """The pipe directory of the stand-in for the MPS control daemon, which runs where isolation mps is in use."""
        return self.state / "mps" / "pipe"

    @property
    def mps_logs(self) -> Path:
        return self.state / "mps" / "log"

    @property
    def mps_control(self) -> Path:
        """The stand-in's control program, under the real one's name."""
        return self.state / "mps" / "nvidia-cuda-mps-control"

    @property
    def runtime_socket(self) -> Path:
        """Where the container runtime answers CRI."""
        return self.state / "containerd.sock"

    @property
    def logs(self) -> Path:
        """What containers print: `<namespace>_<pod>_<container>.log`."""
        return self.state / "logs"

    @property
    def cdi(self) -> Path:
        """The only directory where the container runtime looks for CDI specs."""
        return self.state / "cdi"

    @property
    def kubeconfig(self) -> Path:
        """Holds the API server's token: mode 0600."""
        return self.state / "kubeconfig"

    @property
    def agent_log(self) -> Path:
        return self.state / "agent.log"

    @property
    def control_socket(self) -> Path:
        return self.state / "control.sock"

    @property
    def agent_control_socket(self) -> Path:
        """The agent's own, for `cordon` and `uncordon`."""
        return self.state / "agent-control.sock"

    @property
    def display_socket(self) -> Path:
        return self.state / "gpu-manager.sock"

    @property
    def health_state(self) -> Path:
        return self.state / "health.json"

    @property
    def faults(self) -> Path:
        """What fails at the simulated GPUs."""
        return self.state / "faults.json"

    @property
    def usage(self) -> Path:
        """What the containers' processes use of the simulated GPUs."""
        return self.state / "usage.json"

    @property
    def extender_log(self) -> Path:
        return self.state / "extender.log"

    @property
    def owner(self) -> Path:
        """Locked by the process that runs the node, whose PID it holds."""
        return self.state / "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedNode:
    """A running node. `signal` wakes up after every change of its API objects, kubelet and containers."""

    name: str
    paths: NodePaths
    api: EmbeddedApiServer
    kubelet: EmbeddedKubelet
    cri: CriServer

    @property
    def signal(self) -> ChangeSignal:
        return self.api.signal

    def agent_arguments(self) -> list[str]:
        """Flags of `gpushare-agent run` for an agent of this node with simulated GPUs."""
        flags = {
            "driver": "simulated",
            "simulated.device-nodes": "true",
            "node-name": self.name,
            "kubeconfig": self.paths.kubeconfig,
            "kubelet.device-plugin-path": self.paths.device_plugin_path,
            "kubelet.pod-resources-socket": self.paths.pod_resources_socket,
            "virtual-manager.path": self.paths.virtual_manager,
            "mps.pipe-directory": self.paths.mps_pipe,
            "mps.log-directory": self.paths.mps_logs,
            "mps.control": self.paths.mps_control,
            "cdi.spec-directories": self.paths.cdi,
            "runtime.endpoint": self.paths.runtime_socket,
            "runtime.cgroup-root": self.kubelet.runtime.cgroup_root,
            "runtime.proc-root": self.kubelet.runtime.proc_root,
            "simulated.faults": self.paths.faults,
            "simulated.usage": self.paths.usage,
            "health.state-file": self.paths.health_state,
            "control.socket": self.paths.agent_control_socket,
            "display.socket": self.paths.display_socket,
            "debug.port": 0,
        }
        return [f"--{flag}={value}" for flag, value in flags.items()]


def prepare_state_directory(state: Path) -> NodePaths:
    """Makes the directory. Raises StartupError where it cannot serve."""
    paths = NodePaths(state=state.absolute())
    longest = max(len(os.fsencode(p)) for p in (paths.device_plugin_path / VMEMORY_SOCKET, paths.pod_resources_socket))
    if longest > UNIX_ADDRESS_LIMIT:
        raise StartupError(
            f"the state directory {paths.state} cannot hold sockets: a socket's path would have {longest} bytes, "
            f"{UNIX_ADDRESS_LIMIT} are possible; choose a shorter one with --state-dir, such as /tmp/gpushare"
        )
    try:
        paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.virtual_manager.mkdir(exist_ok=True)
        probe = paths.state / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise StartupError(
            f"the state directory {paths.state} cannot be used: {error.strerror or error}; "
            "it must be a directory, or not exist, and be writable: choose another with --state-dir"
        ) from error
    return paths


@asynccontextmanager
async def open_embedded_node(
    state: Path,
    *,
    node_name: str = "sandbox",
    kubelet_version: str = "1.36",
    api_port: int = 0,
    seed: int = 0,
    times: KubeletTimes | None = None,
    cgroups: str | None = None,
) -> AsyncIterator[EmbeddedNode]:
    """A node whose kubelet listens; it runs until the block ends, which also ends its containers and their cgroups.

    `cgroups` insists on a kind: v2, v1 or files. Raises StartupError. What the block leaves of files in `state` stays there.
    """
    paths = prepare_state_directory(state)
    async with (
        EmbeddedApiServer(port=api_port, version=kubelet_version, seed=seed) as api,
        running_scheduler(EmbeddedScheduler(api=api)),
        open_node_on(
            api, paths, node_name=node_name, kubelet_version=kubelet_version, seed=seed, times=times, cgroups=cgroups
        ) as node,
    ):
        yield node


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
    for left in (paths.health_state, paths.faults, paths.usage):  # of an earlier node: this one's GPUs are new
        left.unlink(missing_ok=True)
    write_kubeconfig(paths.kubeconfig, api.url, api.token)
    kubelet = EmbeddedKubelet(
        directory=paths.state, node_name=node_name, api=api, version=kubelet_version, seed=seed, times=times,
        cgroups=cgroups,
    )  # fmt: skip
    cri = CriServer(kubelet.runtime, paths.runtime_socket)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("kubelet", kubelet.run), name="kubelet")
            try:
                await cri.start()
                await kubelet.start()
                yield EmbeddedNode(name=node_name, paths=paths, api=api, kubelet=kubelet, cri=cri)
            finally:
                await stop_task(task)
    finally:
        await cri.stop()
        kubelet.runtime.close()


@asynccontextmanager
async def running_scheduler(scheduler: Scheduler) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("scheduler", scheduler.run), name="scheduler")
        try:
            yield
        finally:
            await stop_task(task)
