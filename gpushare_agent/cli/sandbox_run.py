"""One run of the sandbox: embedded nodes and agents put together, pods created, and shown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from gpushare_agent.cli.sandbox_extender import PlannedExtender, plan_extender, running_extender
from gpushare_agent.cli.sandbox_nodes import RunningNode, agent_lines, build_node, check_driver, node_names, running
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.model.errors import StartupError
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.sandbox.agent_process import last_lines
from gpushare_agent.sandbox.cluster import EmbeddedCluster, open_embedded_cluster, paths_of_node
from gpushare_agent.sandbox.control import open_control
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.kubelet.behaviour import KubeletTimes
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.report.tables import has_several_nodes, pod_line, print_document, reason_text, report_tables
from gpushare_agent.sandbox.state_directory import NodePaths, default_state_directory, owned_state_directory
from gpushare_agent.settings.settings import Settings, load_settings

STEADY_TIMEOUT_S = 60.0
_WAIT_REPORTED_AFTER_S = 2.0
_INTERRUPTED = 130
_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)
_REDRAW_S = 0.25
_READ_AGAIN_S = 1.0
"""Processes come and go, and the agent writes its files, without a change of the node."""
_STILL_S = 3.0
"""More than two back-offs of the scheduler, and than it takes an agent to report what its pods are allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. `flags` go to the agents as they are, and behind them those of each node; `form` is "table" or
    "json"."""

    state: Path
    kubelet_version: str
    flags: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    is_once: bool
    form: str
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
    notify = _notifier(to_stderr=plan.is_once or plan.form == "json")
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
            notes = _introduce(cluster, plan, nodes, extender, notify)
            async with (
                open_control(paths.control_socket, controller.handle),
                running_extender(extender),
                running(nodes),
            ):
                work = (
                    _once(controller, plan, notify, nodes) if plan.is_once else _live(controller, plan, notify, notes)
                )
                return await _until_stopped(work, stop, _INTERRUPTED if plan.is_once else 0)


def _introduce(
    cluster: EmbeddedCluster,
    plan: Plan,
    nodes: Sequence[RunningNode],
    extender: PlannedExtender | None,
    notify: Callable[[str], None],
) -> list[str]:
    """Says what there is; returns what a person can do with a live sandbox."""
    settings, first = nodes[0].settings, nodes[0].controller
    webs = " ".join(node.controller.shown.addresses["web"] for node in nodes)
    debug = f"  debug {first.shown.addresses['debug']}" if len(nodes) == 1 and first.shown.addresses["debug"] else ""
    logs = first.shown.node.paths.agent_log if len(nodes) == 1 else f"{cluster.paths.state}/*/agent.log"
    asked = f"  extender {extender.url}, log {cluster.paths.extender_log}" if extender is not None else ""
    places = f"web {webs}{debug}  API server {cluster.api.url}  agent's log {logs}{asked}"
    what = f"embedded node {first.name}" if len(nodes) == 1 else f"{len(nodes)} embedded nodes"
    notify(f"{what}, kubelet {plan.kubelet_version}, in {cluster.paths.state}")
    notify(f"{settings.driver} GPUs; {_containers_text(first.shown.node)}{_isolation_text(settings)}")
    if not plan.is_once:  # gone when the prompt is back
        notify(places)
    where = "" if plan.state == default_state_directory() else f" --state-dir {plan.state}"
    return [
        f"from another terminal: gpushare-agent sandbox{where} "
        "apply -f FILE | delete NAME | exec POD -- COMMAND | fail-card N | heal-card N | restart-kubelet | "
        f"kill-agent | {'kill-extender | ' if extender is not None else ''}status",
        "\n".join([_agents_text(nodes), *(f"  {line}" for line in agent_lines(nodes[0]))]),
        "Ctrl-C ends the sandbox and removes everything",
    ]


def _containers_text(node: EmbeddedNode) -> str:
    if reason := node.kubelet.runtime.why_no_processes:
        return f"{reason} (root can): no exec, no commands of image sandbox/host, no PIDs, and the GPUs show no use"
    return "each container is a real process, which only waits unless its image is sandbox/host"


def _agents_text(nodes: Sequence[RunningNode]) -> str:
    if len(nodes) == 1:
        return "its agent:"
    return f"the agent of {nodes[0].controller.name} (`status` has every node's web, debug and control socket):"


def _isolation_text(settings: Settings) -> str:
    """Only where it is not what people expect of a share: that of the default is in every table."""
    if settings.isolation != IsolationName.NONE:
        return ""
    return "\nisolation none: shares are booked and not kept; containers are told no limit"


def _check_port(host: str, port: int) -> None:
    """Now, and not when the agent meets it a second later, and again."""
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


def _notifier(*, to_stderr: bool) -> Callable[[str], None]:
    """The stream is looked up at each line: the live view puts its own in the place of stdout."""

    def notify(text: str) -> None:
        print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)

    return notify


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until_stopped(work: Coroutine[Any, Any, int], stop: asyncio.Event, interrupted: int) -> int:
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work, name="sandbox"), group.create_task(stop.wait(), name="signals")}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    results = [task.result() for task in done if not task.cancelled() and task.get_name() == "sandbox"]
    return results[0] if results else interrupted


async def _create(controller: SandboxController, plan: Plan, notify: Callable[[str], None]) -> None:
    """When the agent has registered: until then the scheduler would turn every pod away."""
    async with reported_after(_WAIT_REPORTED_AFTER_S, "waiting for the agent to register its resources…"):
        is_registered = await controller.wait_registered()
    late = next((one for one in controller.nodes if not one.is_registered()), None)
    if not is_registered and late is not None:
        notify(
            f"{late.agent.name} has not registered its resources; pods that want them will stay Pending. "
            "The end of its log:\n"
            f"{last_lines(late.shown.node.paths.agent_log)}"
        )
    for name in controller.create(plan.manifests):
        notify(f"pod {name} created")


@asynccontextmanager
async def reported_after(seconds: float, text: str) -> AsyncIterator[None]:
    """Says on standard error what is waited for, where it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, lambda: print(text, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()


async def _once(
    controller: SandboxController, plan: Plan, notify: Callable[[str], None], nodes: Sequence[RunningNode]
) -> int:
    await _create(controller, plan, notify)
    try:
        async with asyncio.timeout(STEADY_TIMEOUT_S):
            await _wait_steady(controller)
    except TimeoutError:
        notify(f"not every pod runs or has ended after {STEADY_TIMEOUT_S:g} s; this is how they stand")
    for node in nodes:
        if node.player is not None:
            node.player.play()  # what has started just now uses something, too
    document = controller.document()
    print_document(document, plan.form)
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        notify(f"{pod['namespace']}/{pod['name']} is {pod['phase']}: {reason_text(pod) or 'no reason given'}")
    if others:
        notify("exit code 1: not every pod is Running or Succeeded")
    return 1 if others else 0


async def _wait_steady(controller: SandboxController) -> None:
    """With an extender a pod may be unschedulable because another pod's allocation was not known yet: it is steady when
    it has stayed so for a while."""
    signal_ = controller.api.signal
    while True:
        await signal_.wait_until(controller.is_steady, STEADY_TIMEOUT_S)
        if controller.extender is None or not controller.has_waiting():
            return
        with contextlib.suppress(TimeoutError):
            await signal_.wait_until(lambda: not controller.has_waiting() or not controller.is_steady(), _STILL_S)
            continue
        return


async def _live(controller: SandboxController, plan: Plan, notify: Callable[[str], None], notes: list[str]) -> int:
    """Endless."""
    for note in notes:
        notify(note)
    async with asyncio.TaskGroup() as group:
        group.create_task(_create(controller, plan, notify), name="create-pods")
        if sys.stdout.isatty() and plan.form == "table":
            await _draw(controller)
        else:
            await _print_changes(controller, notify)
    return 0


async def _draw(controller: SandboxController) -> None:
    """The tables of `status`, drawn again after each change; rich cuts what the terminal has no lines for."""
    signal_, console = controller.api.signal, Console()
    drawn: tuple[dict[str, Any], int] | None = None
    with Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True) as live:
        while True:
            seen = signal_.count
            current = controller.document(), console.width
            if current != drawn:  # to draw costs as much as to read
                live.update(report_tables(*current), refresh=True)
                drawn = current
            await _wait_for_change(controller, seen)


async def _print_changes(controller: SandboxController, notify: Callable[[str], None]) -> None:
    """A line for every pod that is new, has changed, or has gone."""
    signal_, shown = controller.api.signal, dict[str, str]()
    while True:
        seen = signal_.count
        document = controller.document()
        lines = {pod["uid"]: pod_line(pod, has_node=has_several_nodes(document)) for pod in document["pods"]}
        for uid, line in lines.items():
            if shown.get(uid) != line:
                notify(line)
        for uid in shown.keys() - lines.keys():
            notify(f"gone: {shown[uid]}")
        shown = lines
        await _wait_for_change(controller, seen)


async def _wait_for_change(controller: SandboxController, seen: int) -> None:
    """After the next change, or a while; never at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_AGAIN_S):
            await controller.api.signal.wait(seen)
    await asyncio.sleep(_REDRAW_S)
