"""The nodes of one run of the sandbox: the parts of each, and their tasks while the sandbox runs.

A node has its agent, a child process; the player of its containers' usage; and, with isolation mps, a fake MPS control
daemon. sandbox_run.py has the order of the whole.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from gpushare_agent.cli.agent_client import local_url, open_agent_client, read_node
from gpushare_agent.cli.command_line import runnable
from gpushare_agent.cli.sandbox_extender import free_port
from gpushare_agent.gpus.part import NodeDriver, health_policy, open_driver
from gpushare_agent.isolation.mps.edits import ISOLATION as MPS
from gpushare_agent.isolation.part import build_probes
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.model.errors import StartupError, Unavailable
from gpushare_agent.model.isolation import isolation_parts
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from gpushare_agent.sandbox.controller import NodeController
from gpushare_agent.sandbox.fake_mps import open_fake_mps
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.report import ReportedNode
from gpushare_agent.sandbox.state_directory import NodePaths
from gpushare_agent.sandbox.workload import WorkloadPlayer
from gpushare_agent.settings.settings import LoadedSettings, Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from gpushare_agent.cli.agent_documents import NodeDocument

NODE_NAME = "sandbox"
_AGENT_TIMEOUT_S = 2.0
"""It listens on this machine; the report waits for its answer."""


class RunningNode(Struct, frozen=True, kw_only=True):
    """One node, and what runs for it."""

    controller: NodeController
    settings: Settings
    player: WorkloadPlayer | None


def node_names(loaded: LoadedSettings, count: int) -> list[str]:
    """The node name of the settings where one is set, else a name of the sandbox's. Several are numbered."""
    source = loaded.sources["node_name"]
    is_set = source.startswith(("flag", "variable GPUSHARE")) or source.endswith((".yaml", ".yml"))
    name = loaded.settings.node_name if is_set else NODE_NAME
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def check_driver(name: str, paths: NodePaths, flags: Sequence[str]) -> NodeDriver:
    """The GPUs as the node's agent will see them. Raises SettingsError for a topology file that cannot be used: a mistake
    of the command line, as any other setting."""
    arguments = ("--driver=simulated", f"--simulated.faults={paths.faults}", *flags, f"--node-name={name}")
    try:
        return open_driver(load_settings(arguments, os.environ).settings)
    except StartupError as error:
        raise SettingsError([str(error)]) from error


async def build_node(
    node: EmbeddedNode,
    flags: Sequence[str],
    driver: NodeDriver,
    notify: Callable[[str], None],
    *,
    is_first: bool = True,
    is_only: bool = True,
) -> RunningNode:
    """The node's parts, not yet running. `flags` are those of the command line; they win over the sandbox's own, except for
    the name, and for a port that the first node has."""
    own = [f"--node-name={node.name}", f"--debug.port={debug_port(flags, is_first=is_first)}"]
    if load_settings(flags, os.environ).settings.web.port == 0:
        own.append(f"--web.port={free_port()}")  # can be printed, and stays over restarts of the agent
    arguments = [*node.agent_arguments(), *flags, *own]
    settings = load_settings(arguments, os.environ).settings
    note = await _check_isolation(settings, node.paths, driver)
    if note and is_first:
        notify(note)
    inventory = await driver.read()
    shown = ReportedNode(
        node=node, gpus=inventory.gpus, names=resource_names(settings, inventory.mig_profiles),
        addresses=addresses_of(settings), by_claims=bool(settings.dra.gpus),
    )  # fmt: skip
    node.api.add_agent(node.name, AgentServer(url=shown.addresses["web"], log=node.paths.agent_log))
    controller = NodeController(
        shown=shown,
        agent=AgentProcess(
            arguments, node.paths.agent_log, notify, name="the agent" if is_only else f"the agent of {node.name}"
        ),
        faults=GpuFaults(settings.simulated.faults, len(inventory.gpus), health_policy(settings)),
        read_agent=partial(_read_agent, shown.addresses["web"]),
    )
    return RunningNode(controller=controller, settings=settings, player=_player(shown, settings))


async def _read_agent(url: str) -> NodeDocument:
    async with open_agent_client(url, timeout_s=_AGENT_TIMEOUT_S) as agent:
        return await read_node(agent)


async def _check_isolation(settings: Settings, paths: NodePaths, driver: NodeDriver) -> str:
    """What its shares do without, empty where nothing is missing. Raises StartupError where the agent would wait for a
    library or a daemon that nobody brings."""
    probes = build_probes(settings, driver)
    notes = []
    try:
        for name in isolation_parts(settings.isolation):
            if name in probes and probes[name].is_for_sandbox and not _has_fake_mps(name, settings, paths):
                await probes[name].check()
                notes += [probes[name].note] if probes[name].note else []
    except (StartupError, Unavailable) as error:
        raise StartupError(
            f"no share could be given under isolation {settings.isolation}: {error}. Without a setting of the isolation the"
            " sandbox takes one that needs neither a library nor a daemon"
        ) from error
    return "; ".join(notes)


def debug_port(flags: Sequence[str], *, is_first: bool) -> int:
    """The port of the flags on the first node, else a free one, which stays over restarts of the agent."""
    loaded = load_settings(flags, os.environ)
    is_set = is_first and loaded.sources["debug.port"] != "default"
    return (loaded.settings.debug.port if is_set else 0) or free_port()


def addresses_of(settings: Settings) -> dict[str, str]:
    """The agent's addresses on this machine; empty for what a setting has switched off."""
    debug, socket = settings.debug, settings.control.socket
    return {
        "web": local_url(settings.web.addr, settings.web.port),
        "debug": f"{local_url(debug.addr, debug.port)}/debug/" if debug.addr else "",
        "control_socket": str(socket.absolute()) if socket is not None else "",
    }


def agent_lines(node: RunningNode) -> list[str]:
    """What a person types to ask the node's agent, as it must be written for this one."""
    where = node.controller.shown.addresses
    server = "" if where["web"] == addresses_of(load_settings((), {}).settings)["web"] else f" --server {where['web']}"
    cordon = [f"cordon GPU --socket {shlex.quote(where['control_socket'])}"] if where["control_socket"] else []
    return [f"{runnable()} {line}" for line in (f"top{server}", f"explain POD{server}", *cordon)]


def _player(shown: ReportedNode, settings: Settings) -> WorkloadPlayer | None:
    """None where the settings name another usage file, or none."""
    path = shown.node.paths.usage
    if settings.driver != "simulated" or settings.simulated.usage != path:
        return None
    return WorkloadPlayer(shown, path, isolation=settings.isolation, allowed=settings.isolations_allowed)


@asynccontextmanager
async def running(nodes: Sequence[RunningNode]) -> AsyncIterator[None]:
    """Runs agents, players and polls until the block ends."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(_fake_mps(node))
        async with asyncio.TaskGroup() as group:
            agents, others = [], []
            for node in nodes:
                name = node.controller.name
                agents.append(
                    group.create_task(forever("agent process", node.controller.agent.run), name=f"agent {name}")
                )
                if node.player is not None:
                    others.append(group.create_task(forever("workload", node.player.run), name=f"workload {name}"))
            try:
                yield
            finally:
                for task in others:
                    await stop_task(task)
                for task in agents:
                    task.cancel()
                await asyncio.wait(agents)


def _has_fake_mps(isolation: str, settings: Settings, paths: NodePaths) -> bool:
    return isolation == MPS.name and settings.mps.pipe_directory == paths.mps_pipe


@asynccontextmanager
async def _fake_mps(node: RunningNode) -> AsyncIterator[None]:
    """A daemon for isolation mps, unless a person has named the directory of one."""
    settings, paths = node.settings, node.controller.shown.node.paths
    if not any(_has_fake_mps(name, settings, paths) for name in settings.isolation_parts_in_use):
        yield
        return
    async with open_fake_mps(paths.mps_pipe, paths.mps_logs, paths.mps_control):
        yield
