"""One run of the sandbox: embedded node and agent put together, pods created, shown until they settle or Ctrl-C comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from gpushare_agent.apps.node_parts import open_driver
from gpushare_agent.apps.node_values import resource_names
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.model.errors import StartupError, Unavailable
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.sandbox.agent_process import AgentProcess, last_lines
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.control import open_control
from gpushare_agent.sandbox.kubelet_boot import KubeletTimes
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.mps_stand_in import open_mps_stand_in
from gpushare_agent.sandbox.node import EmbeddedNode, open_embedded_node
from gpushare_agent.sandbox.node_live_view import live_view
from gpushare_agent.sandbox.node_report import ReportedNode
from gpushare_agent.sandbox.node_view import pod_line, print_document, reason_text
from gpushare_agent.sandbox.state_directory import default_state_directory, owned_state_directory
from gpushare_agent.sandbox.workbench import Workbench
from gpushare_agent.services.gpu_watch import GpuDriver
from gpushare_agent.settings import LoadedSettings, Settings, SettingsError, load_settings

SETTLE_TIMEOUT_S = 60.0
_WAIT_TOLD_AFTER_S = 2.0
_INTERRUPTED = 130
_NODE_NAME = "sandbox"
_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)
_REDRAW_S = 0.25
_LOOK_AGAIN_S = 1.0
"""Processes come and go, and the agent writes its files, without a word to the node."""
_CARDS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. `flags` go to the agent as they are; `form` is "table" or "json"."""

    state: Path
    kubelet_version: str
    flags: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    is_once: bool
    form: str


async def run(plan: Plan) -> int:
    """Returns the exit code. Raises AgentError for what a person must change."""
    loaded = load_settings(plan.flags, os.environ)
    setup_logging("warning", loaded.settings.log.format)  # of the embedded parts; the agent has its own log
    shown_as = ("--driver=simulated", f"--node-name={_node_name(loaded)}")  # what the node gives its agent
    driver = _driver(load_settings((*shown_as, *plan.flags), os.environ).settings)
    tell = _teller(to_stderr=plan.is_once or plan.form == "json")
    stop = _stop_on_signals()
    with owned_state_directory(plan.state) as paths:
        _check_port(loaded.settings.web.addr, loaded.settings.web.port)
        async with open_embedded_node(
            paths.state, node_name=_node_name(loaded), kubelet_version=plan.kubelet_version, times=_TIMES
        ) as node:
            bench, notes = await _set_up(node, plan, driver, tell)
            async with _mps_stand_in(node, plan), _running_agent(bench, driver):
                work = _once(bench, plan, tell) if plan.is_once else _live(bench, plan, tell, notes)
                return await _until_stopped(work, stop, _INTERRUPTED if plan.is_once else 0)


def _driver(settings: Settings) -> GpuDriver:
    """Raises SettingsError for a topology file that cannot be used: a mistake of the command line, as any other setting."""
    try:
        return open_driver(settings)
    except StartupError as error:
        raise SettingsError([str(error)]) from error


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


async def _set_up(
    node: EmbeddedNode, plan: Plan, driver: GpuDriver, tell: Callable[[str], None]
) -> tuple[Workbench, list[str]]:
    """The workbench, not yet running, and what a person should know about it."""
    arguments = [*node.agent_arguments(), *plan.flags]
    settings = load_settings(arguments, os.environ).settings
    resources, log_file = settings.resources, node.paths.agent_log
    inventory = await driver.read()
    shown = ReportedNode(
        node=node, cards=inventory.cards, vcore=resources.vcore, vmemory=resources.vmemory,
        memory_block_mib=resources.memory_block_mib, gpu_mem=resource_names(settings).gpu_mem,
        gpu_mem_unit_mib=resource_names(settings).gpu_mem_unit_mib,
    )  # fmt: skip
    agent = AgentProcess(arguments, log_file, tell)
    bench = Workbench(shown=shown, agent=agent)
    places = f"web http://{settings.web.addr}:{settings.web.port}  API server {node.api.url}  agent's log {log_file}"
    tell(
        f"embedded node {node.name}, kubelet {plan.kubelet_version}, in {node.paths.state}\n"
        f"stand-ins: {settings.driver} cards; each container is a real process, which only waits unless its image is "
        f"sandbox/host{_kept(settings)}" + ("" if plan.is_once else f"\n{places}")  # gone when the prompt is back
    )
    where = "" if plan.state == default_state_directory() else f" --state-dir {plan.state}"
    return bench, [
        places,
        f"from another terminal: gpushare-agent sandbox{where} "
        "apply -f FILE | delete NAME | exec POD -- COMMAND | restart-kubelet | kill-agent | status",
        "Ctrl-C ends the sandbox and removes everything",
    ]


def _kept(settings: Settings) -> str:
    """Only where it is not what people expect of a share: that of the default is in every table."""
    if settings.isolation != IsolationName.NONE:
        return ""
    return "\nisolation none: shares are booked and not kept; containers are told no limit"


@asynccontextmanager
async def _mps_stand_in(node: EmbeddedNode, plan: Plan) -> AsyncIterator[None]:
    """A daemon for isolation mps, unless a person has named the directory of one."""
    settings = load_settings([*node.agent_arguments(), *plan.flags], os.environ).settings
    paths = node.paths
    is_used = IsolationName.MPS in (settings.isolation, *settings.isolations_allowed)
    if not is_used or settings.mps.pipe_directory != paths.mps_pipe:
        yield
        return
    async with open_mps_stand_in(paths.mps_pipe, paths.mps_logs, paths.mps_control):
        yield


def _node_name(loaded: LoadedSettings) -> str:
    """The agent's node name where a person has given one; the host's name would say nothing here."""
    source = loaded.sources["node_name"]
    is_given = source.startswith(("flag", "variable GPUSHARE")) or source.endswith((".yaml", ".yml"))
    return loaded.settings.node_name if is_given else _NODE_NAME


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


@asynccontextmanager
async def _running_agent(bench: Workbench, driver: GpuDriver) -> AsyncIterator[None]:
    async with open_control(bench.shown.node.paths.control_socket, bench.handle), asyncio.TaskGroup() as group:
        task = group.create_task(forever("agent process", bench.agent.run), name="agent-process")
        cards = group.create_task(forever("cards", lambda: _watch_cards(bench, driver)), name="cards")
        try:
            yield
        finally:
            await stop_task(cards)
            await stop_task(task)


async def _watch_cards(bench: Workbench, driver: GpuDriver) -> None:
    """Why a card is not well: the kubelet is only told that it is not. Endless."""
    shown = bench.shown
    while True:
        try:
            read = (await driver.read()).cards
            found = {card.uuid: card.unhealthy_reason for card in read if card.unhealthy_reason}
        except Unavailable as error:
            found = {card.uuid: str(error) for card in shown.cards}
        if found != shown.ailments:
            shown.ailments.clear()
            shown.ailments.update(found)
            shown.node.signal.notify()
        await asyncio.sleep(_CARDS_INTERVAL_S)


async def _create(bench: Workbench, plan: Plan, tell: Callable[[str], None]) -> None:
    """When the agent has registered: until then the scheduler would turn every pod away."""
    async with told_after(_WAIT_TOLD_AFTER_S, "waiting for the agent to register its resources…"):
        is_registered = await bench.wait_registered()
    if not is_registered:
        tell(
            "the agent has not registered its resources; pods that want them will stay Pending. The end of its log:\n"
            f"{last_lines(bench.shown.node.paths.agent_log)}"
        )
    for name in bench.create(plan.manifests):
        tell(f"pod {name} created")


@asynccontextmanager
async def told_after(seconds: float, text: str) -> AsyncIterator[None]:
    """Says on standard error what is waited for, where it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, lambda: print(text, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()


async def _once(bench: Workbench, plan: Plan, tell: Callable[[str], None]) -> int:
    await _create(bench, plan, tell)
    try:
        await bench.shown.node.signal.wait_until(bench.is_settled, SETTLE_TIMEOUT_S)
    except TimeoutError:
        tell(f"not every pod has settled after {SETTLE_TIMEOUT_S:g} s; this is how they stand")
    document = bench.document()
    print_document(document, plan.form)
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        tell(f"{pod['namespace']}/{pod['name']} is {pod['phase']}: {reason_text(pod) or 'no reason given'}")
    if others:
        tell("exit code 1: not every pod is Running or Succeeded")
    return 1 if others else 0


async def _live(bench: Workbench, plan: Plan, tell: Callable[[str], None], notes: list[str]) -> int:
    """Endless."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_create(bench, plan, tell), name="create-pods")
        if sys.stdout.isatty() and plan.form == "table":
            await _draw(bench, notes)
        else:
            for note in notes[1:]:
                tell(note)
            await _print_changes(bench, tell)
    return 0


async def _draw(bench: Workbench, notes: list[str]) -> None:
    signal_ = bench.shown.node.signal
    console = Console()
    drawn: tuple[dict[str, Any], int, int] | None = None
    with Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True) as live:
        while True:
            seen = signal_.count
            document, (width, height) = bench.document(), console.size
            if (document, width, height) != drawn:  # to draw costs as much as to look
                live.update(live_view(document, notes, width=width, height=height), refresh=True)
                drawn = document, width, height
            await _next_look(signal_, seen)


async def _print_changes(bench: Workbench, tell: Callable[[str], None]) -> None:
    """A line for every pod that is new, has changed, or has gone."""
    signal_, shown = bench.shown.node.signal, dict[str, str]()
    while True:
        seen = signal_.count
        lines = {pod["uid"]: pod_line(pod) for pod in bench.document()["pods"]}
        for uid, line in lines.items():
            if shown.get(uid) != line:
                tell(line)
        for uid in shown.keys() - lines.keys():
            tell(f"gone: {shown[uid]}")
        shown = lines
        await _next_look(signal_, seen)


async def _next_look(changes: ChangeSignal, seen: int) -> None:
    """After the next change, or a while; never at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_AGAIN_S):
            await changes.wait(seen)
    await asyncio.sleep(_REDRAW_S)
