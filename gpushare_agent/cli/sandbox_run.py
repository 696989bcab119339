"""One run of the sandbox: puts embedded nodes, agents and extender together and runs a mode (sandbox_modes.py) on them.

State owned: the state directory while it runs. SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from msgspec import Struct

from gpushare_agent.cli.command_line import Form, runnable
from gpushare_agent.cli.sandbox_extender import PlannedExtender, plan_extender, running_extender
from gpushare_agent.cli.sandbox_modes import Notices, Session, run_live, run_once
from gpushare_agent.cli.sandbox_nodes import (
    RunningNode,
    agent_lines,
    build_node,
    check_driver,
    node_names,
    running,
)
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.model.errors import StartupError
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.control import open_control
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.node import EmbeddedCluster, EmbeddedNode, open_embedded_cluster, paths_of_node
from gpushare_agent.sandbox.state_directory import NodePaths, default_state_directory, owned_state_directory
from gpushare_agent.settings.settings import Settings, load_settings

_INTERRUPTED = 130
_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)


class Plan(Struct, frozen=True, kw_only=True):
    """The run of the command line. `flags` go to the agents as they are, and behind them those of each node; `form` is
    that of the report."""

    state: Path
    kubelet_version: str
    flags: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    is_once: bool
    form: Form
    node_flags: tuple[tuple[str, ...], ...] = ((),)
    has_extender: bool = False


async def run(plan: Plan) -> int:
    """Returns the exit code. Raises AgentError for what a person must change."""
    loaded = load_settings(plan.flags, os.environ)
    setup_logging("warning", loaded.settings.log.format)  # of the embedded parts; the agents have their own logs
    names = node_names(loaded, len(plan.node_flags))
    whole = NodePaths(state=plan.state.absolute())
    drivers = [
        check_driver(name, paths_of_node(whole, name, len(names)), (*plan.flags, *flags))
        for name, flags in zip(names, plan.node_flags, strict=True)
    ]
    notify = Notices(to_stderr=plan.is_once or plan.form in ("json", "yaml"))
    stop = _stop_on_signals()
    with owned_state_directory(plan.state) as paths:
        _check_port(loaded.settings.web.addr, loaded.settings.web.port)
        extender = plan_extender(loaded.settings, paths, plan.flags, notify) if plan.has_extender else None
        async with open_embedded_cluster(
            paths.state, node_names=names, kubelet_version=plan.kubelet_version, times=_TIMES,
            extender_url=extender.url if extender is not None else "",
        ) as cluster:  # fmt: skip
            nodes = [
                await build_node(
                    node,
                    (*plan.flags, *flags),
                    driver,
                    notify,
                    is_first=node is cluster.nodes[0],
                    is_only=len(names) == 1,
                )
                for node, flags, driver in zip(cluster.nodes, plan.node_flags, drivers, strict=True)
            ]
            controller = SandboxController(
                nodes=tuple(node.controller for node in nodes),
                extender=extender.process if extender is not None else None,
            )
            session = Session(
                controller=controller, manifests=plan.manifests, form=plan.form, notify=notify,
                players=[node.player for node in nodes if node.player is not None],
            )  # fmt: skip
            notes = _introduce(cluster, plan, nodes, extender, notify)
            async with (
                open_control(paths.control_socket, controller.handle),
                running_extender(extender),
                running(nodes),
            ):
                work = run_once(session) if plan.is_once else run_live(session, notes)
                return await _until_stopped(work, stop, _INTERRUPTED if plan.is_once else 0)


def _introduce(
    cluster: EmbeddedCluster,
    plan: Plan,
    nodes: Sequence[RunningNode],
    extender: PlannedExtender | None,
    notify: Callable[[str], None],
) -> list[str]:
    """Reports the parts; returns what a person can do with a live sandbox."""
    settings, first = nodes[0].settings, nodes[0].controller
    webs = " ".join(node.controller.shown.addresses["web"] for node in nodes)
    debug = f"  debug {first.shown.addresses['debug']}" if len(nodes) == 1 and first.shown.addresses["debug"] else ""
    logs = first.shown.node.paths.agent_log if len(nodes) == 1 else f"{cluster.paths.state}/*/agent.log"
    asked = f"  extender {extender.url}, log {cluster.paths.extender_log}" if extender is not None else ""
    places = f"web {webs}{debug}  API server {cluster.api.url}  agent's log {logs}{asked}"
    what = f"embedded node {first.name}" if len(nodes) == 1 else f"{len(nodes)} embedded nodes"
    notify(f"{what}, kubelet {plan.kubelet_version}, in {cluster.paths.state}")
    notify(f"{settings.driver} GPUs; {_containers_text(first.shown.node)}{_isolation_text(settings)}")
    where = "" if plan.state == default_state_directory() else f" --state-dir {plan.state}"
    return [
        f"other terminal: {runnable()} sandbox{where} "
        "status | apply -f FILE | delete NAME | exec POD -- COMMAND | fail-gpu N | heal-gpu N | restart-kubelet | "
        f"kill-agent{' | kill-extender' if extender is not None else ''}",
        _kubectl_text(cluster),
        places,
        "\n".join([_agents_text(nodes), *(f"  {line}" for line in agent_lines(nodes[0]))]),
        "Ctrl-C ends the sandbox and removes everything",
    ]


def _kubectl_text(cluster: EmbeddedCluster) -> str:
    if cluster.api.certificate is None:
        return "kubectl sends no token without TLS: install openssl, which makes the certificate, and start again"
    kubeconfig = shlex.quote(str(cluster.paths.kubeconfig))
    return f"export KUBECONFIG={kubeconfig}\n  for kubectl and other clients, as on a cluster"


def _containers_text(node: EmbeddedNode) -> str:
    if reason := node.kubelet.runtime.why_no_processes:
        return f"{reason} (root can): no exec, no commands of image sandbox/host, no PIDs, and the GPUs show no use"
    return "each container is a real process, which only waits unless its image is sandbox/host"


def _agents_text(nodes: Sequence[RunningNode]) -> str:
    if len(nodes) == 1:
        return "its agent:"
    return f"the agent of {nodes[0].controller.name} (`status` has every node's web, debug and control socket):"


def _isolation_text(settings: Settings) -> str:
    """Where a share is not limited."""
    if settings.isolation not in ISOLATIONS or ISOLATIONS[settings.isolation].limits:
        return ""
    return f"\nisolation {settings.isolation}: shares are allocated and not enforced; containers get no limit"


def _check_port(host: str, port: int) -> None:
    """Fails before the agent does, which would be a second later, and again after each restart."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the agent does
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of {host}, for the agent's web server, is in use: choose another with --port (0: any free)"
            ) from error
        raise StartupError(
            f"the agent's web server cannot listen on {host}:{port}: {error.strerror}; change --web.addr or --port"
        ) from error


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until_stopped(work: Coroutine[object, object, int], stop: asyncio.Event, interrupted: int) -> int:
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work, name="sandbox"), group.create_task(stop.wait(), name="signals")}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    results = [task.result() for task in done if not task.cancelled() and task.get_name() == "sandbox"]
    return results[0] if results else interrupted
