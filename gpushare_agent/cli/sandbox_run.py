"""One run of the sandbox: embedded nodes and agents put together, pods created, shown until they settle or Ctrl-C comes."""

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
from gpushare_agent.sandbox.cgroup_tree import NO_CGROUPS
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.cluster import EmbeddedCluster, open_embedded_cluster, paths_of_node
from gpushare_agent.sandbox.control import open_control
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.kubelet_boot import KubeletTimes
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.node_view import has_several_nodes, pod_line, print_document, reason_text, report_tables
from gpushare_agent.sandbox.state_directory import NodePaths, default_state_directory, owned_state_directory
from gpushare_agent.settings.settings import Settings, load_settings

SETTLE_TIMEOUT_S = 60.0
_WAIT_REPORTED_AFTER_S = 2.0
_INTERRUPTED = 130
_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)
_REDRAW_S = 0.25
_READ_AGAIN_S = 1.0
"""Processes come and go, and the agent writes its files, without a word to the node."""
_STILL_S = 3.0
"""More than two back-offs of the scheduler, and than it takes an agent to tell what its pods hold."""


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
    tell = _teller(to_stderr=plan.is_once or plan.form == "json")
    stop = _stop_on_signals()
    with owned_state_directory(plan.state) as paths:
        _check_port(loaded.settings.web.addr, loaded.settings.web.port)
        extender = plan_extender(loaded.settings, paths, plan.flags, tell) if plan.has_extender else None
        async with open_embedded_cluster(
            paths.state, node_names=names, kubelet_version=plan.kubelet_version, times=_TIMES,
            extender_url=extender.url if extender is not None else "",
        ) as cluster:  # fmt: skip
            nodes = [
                await build_node(
                    node,
                    (*plan.flags, *flags),
                    driver,
                    tell,
                    is_first=node is cluster.nodes[0],
                    is_only=len(names) == 1,
                )
                for node, flags, driver in zip(cluster.nodes, plan.node_flags, drivers, strict=True)
            ]
            bench = SandboxController(
                nodes=tuple(node.bench for node in nodes), extender=extender.process if extender is not None else None
            )
            notes = _introduce(cluster, plan, nodes, extender, tell)
            async with (
                open_control(paths.control_socket, bench.handle),
                running_extender(extender),
                running(nodes),
            ):
                work = _once(bench, plan, tell, nodes) if plan.is_once else _live(bench, plan, tell, notes)
                return await _until_stopped(work, stop, _INTERRUPTED if plan.is_once else 0)


def _introduce(
    cluster: EmbeddedCluster,
    plan: Plan,
    nodes: Sequence[RunningNode],
    extender: PlannedExtender | None,
    tell: Callable[[str], None],
) -> list[str]:
    """Says what there is; returns what a person can do with a live sandbox."""
    settings, first = nodes[0].settings, nodes[0].bench
    webs = " ".join(node.bench.shown.addresses["web"] for node in nodes)
    debug = f"  debug {first.shown.addresses['debug']}" if len(nodes) == 1 and first.shown.addresses["debug"] else ""
    logs = first.shown.node.paths.agent_log if len(nodes) == 1 else f"{cluster.paths.state}/*/agent.log"
    asked = f"  extender {extender.url}, log {cluster.paths.extender_log}" if extender is not None else ""
    places = f"web {webs}{debug}  API server {cluster.api.url}  agent's log {logs}{asked}"
    what = f"embedded node {first.name}" if len(nodes) == 1 else f"{len(nodes)} embedded nodes"
    tell(f"{what}, kubelet {plan.kubelet_version}, in {cluster.paths.state}")
    tell(f"{settings.driver} GPUs; {_containers(first.shown.node)}{_kept(settings)}")
    if not plan.is_once:  # gone when the prompt is back
        tell(places)
    where = "" if plan.state == default_state_directory() else f" --state-dir {plan.state}"
    return [
        f"from another terminal: gpushare-agent sandbox{where} "
        "apply -f FILE | delete NAME | exec POD -- COMMAND | fail-card N | heal-card N | restart-kubelet | "
        f"kill-agent | {'kill-extender | ' if extender is not None else ''}status",
        "\n".join([_whom(nodes), *(f"  {line}" for line in agent_lines(nodes[0]))]),
        "Ctrl-C ends the sandbox and removes everything",
    ]


def _containers(node: EmbeddedNode) -> str:
    if node.kubelet.runtime.kind == "none":
        return f"{NO_CGROUPS} (root can): no exec, no commands of image sandbox/host, no PIDs, and the GPUs show no use"
    return "each container is a real process, which only waits unless its image is sandbox/host"


def _whom(nodes: Sequence[RunningNode]) -> str:
    if len(nodes) == 1:
        return "its agent:"
    return f"the agent of {nodes[0].bench.name} (`status` has every node's web, debug and control socket):"


def _kept(settings: Settings) -> str:
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


def _teller(*, to_stderr: bool) -> Callable[[str], None]:
    """The stream is looked up at each line: the live view puts its own in the place of stdout."""

    def tell(text: str) -> None:
        print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)

    return tell


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


async def _create(bench: SandboxController, plan: Plan, tell: Callable[[str], None]) -> None:
    """When the agent has registered: until then the scheduler would turn every pod away."""
    async with reported_after(_WAIT_REPORTED_AFTER_S, "waiting for the agent to register its resources…"):
        is_registered = await bench.wait_registered()
    late = next((one for one in bench.nodes if not one.is_registered()), None)
    if not is_registered and late is not None:
        tell(
            f"{late.agent.name} has not registered its resources; pods that want them will stay Pending. "
            "The end of its log:\n"
            f"{last_lines(late.shown.node.paths.agent_log)}"
        )
    for name in bench.create(plan.manifests):
        tell(f"pod {name} created")


@asynccontextmanager
async def reported_after(seconds: float, text: str) -> AsyncIterator[None]:
    """Says on standard error what is waited for, where it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, lambda: print(text, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()


async def _once(bench: SandboxController, plan: Plan, tell: Callable[[str], None], nodes: Sequence[RunningNode]) -> int:
    await _create(bench, plan, tell)
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            await _wait_settled(bench)
    except TimeoutError:
        tell(f"not every pod has settled after {SETTLE_TIMEOUT_S:g} s; this is how they stand")
    for node in nodes:
        if node.player is not None:
            node.player.play()  # what has started just now uses something, too
    document = bench.document()
    print_document(document, plan.form)
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        tell(f"{pod['namespace']}/{pod['name']} is {pod['phase']}: {reason_text(pod) or 'no reason given'}")
    if others:
        tell("exit code 1: not every pod is Running or Succeeded")
    return 1 if others else 0


async def _wait_settled(bench: SandboxController) -> None:
    """With an extender a pod that waits may have been turned away because what another pod got was not known yet: it counts
    as settled when nothing has come of it for a while."""
    signal_ = bench.api.signal
    while True:
        await signal_.wait_until(bench.is_settled, SETTLE_TIMEOUT_S)
        if bench.extender is None or not bench.has_waiting():
            return
        with contextlib.suppress(TimeoutError):
            await signal_.wait_until(lambda: not bench.has_waiting() or not bench.is_settled(), _STILL_S)
            continue
        return


async def _live(bench: SandboxController, plan: Plan, tell: Callable[[str], None], notes: list[str]) -> int:
    """Endless."""
    for note in notes:
        tell(note)
    async with asyncio.TaskGroup() as group:
        group.create_task(_create(bench, plan, tell), name="create-pods")
        if sys.stdout.isatty() and plan.form == "table":
            await _draw(bench)
        else:
            await _print_changes(bench, tell)
    return 0


async def _draw(bench: SandboxController) -> None:
    """The tables of `status`, drawn again after each change; rich cuts what the terminal has no lines for."""
    signal_, console = bench.api.signal, Console()
    drawn: tuple[dict[str, Any], int] | None = None
    with Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True) as live:
        while True:
            seen = signal_.count
            current = bench.document(), console.width
            if current != drawn:  # to draw costs as much as to read
                live.update(report_tables(*current), refresh=True)
                drawn = current
            await _wait_for_change(signal_, seen)


async def _print_changes(bench: SandboxController, tell: Callable[[str], None]) -> None:
    """A line for every pod that is new, has changed, or has gone."""
    signal_, shown = bench.api.signal, dict[str, str]()
    while True:
        seen = signal_.count
        document = bench.document()
        lines = {pod["uid"]: pod_line(pod, has_node=has_several_nodes(document)) for pod in document["pods"]}
        for uid, line in lines.items():
            if shown.get(uid) != line:
                tell(line)
        for uid in shown.keys() - lines.keys():
            tell(f"gone: {shown[uid]}")
        shown = lines
        await _wait_for_change(signal_, seen)


async def _wait_for_change(changes: ChangeSignal, seen: int) -> None:
    """After the next change, or a while; never at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_AGAIN_S):
            await changes.wait(seen)
    await asyncio.sleep(_REDRAW_S)
