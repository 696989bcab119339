"""The two modes of a sandbox that runs: once, until every pod runs, has ended or fits nowhere, and live, until Ctrl-C.

Output: the report or the live tables; lines for people go to `Session.notify`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live

from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_sandbox import has_several_nodes, pod_line, print_document, reason_text, report_tables
from gpushare_agent.sandbox.agent_process import last_lines
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.workload_player import WorkloadPlayer

STEADY_TIMEOUT_S = 60.0
_WAIT_REPORTED_AFTER_S = 2.0
_REDRAW_S = 0.25
_READ_AGAIN_S = 1.0
"""Processes start and end, and the agent writes its files, without an event of the node."""
_STILL_S = 3.0
"""More than two back-offs of the scheduler, and than an agent needs to report its allocations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running sandbox as its modes use it. `form` is that of the report."""

    controller: SandboxController
    manifests: Sequence[Manifest]
    form: Form
    notify: Callable[[str], None]
    players: Sequence[WorkloadPlayer]


async def _create(session: Session) -> None:
    """Creates the pods when the agents have registered: before that no pod fits."""
    controller, notify = session.controller, session.notify
    async with reported_after(_WAIT_REPORTED_AFTER_S, "waiting for the agent to register its resources…"):
        is_registered = await controller.wait_registered()
    late = next((one for one in controller.nodes if not one.is_registered()), None)
    if not is_registered and late is not None:
        notify(
            f"{late.agent.name} has not registered its resources; pods that want them will stay Pending. "
            "The end of its log:\n"
            f"{last_lines(late.shown.node.paths.agent_log)}"
        )
    for line in controller.apply(session.manifests):
        notify(line)


@asynccontextmanager
async def reported_after(seconds: float, text: str) -> AsyncIterator[None]:
    """Prints to standard error what is waited for, where it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, lambda: print(text, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()


async def run_once(session: Session) -> int:
    """Until every pod is steady; prints the report. Returns 1 where a pod neither runs nor has succeeded, else 0."""
    controller, notify = session.controller, session.notify
    await _create(session)
    try:
        async with asyncio.timeout(STEADY_TIMEOUT_S):
            await _wait_steady(controller)
    except TimeoutError:
        notify(f"not every pod runs or has ended after {STEADY_TIMEOUT_S:g} s; the report shows their state")
    for player in session.players:
        player.play()  # the containers that have just started have usage, too
    document = controller.document()
    print_document(document, session.form)
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        notify(f"{pod['namespace']}/{pod['name']} is {pod['phase']}: {reason_text(pod) or 'without a reason'}")
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


async def run_live(session: Session, notes: Sequence[str]) -> int:
    """Prints `notes`, then shows the pods. Endless."""
    for note in notes:
        session.notify(note)
    async with asyncio.TaskGroup() as group:
        group.create_task(_create(session), name="create-pods")
        if sys.stdout.isatty() and session.form in ("table", "wide"):
            await _draw(session.controller)
        else:
            await _print_changes(session.controller, session.notify)
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
