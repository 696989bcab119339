"""The two modes of a sandbox that runs: once, until every pod runs, has ended or fits nowhere, and live, until Ctrl-C.

Output: the report or the live tables; lines for people go to `Session.notify`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct
from rich.text import Text

from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_sandbox import has_several_nodes, pod_line, print_document, reason_text, report_tables
from gpushare_agent.cli.screen import Screen, View
from gpushare_agent.sandbox.agent_process import last_lines
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.report import SandboxDocument
from gpushare_agent.sandbox.workload import WorkloadPlayer

STEADY_TIMEOUT_S = 60.0
_NOTICES_KEPT, _NOTICES_SHOWN = 50, 2
_KEYS = "Ctrl-C ends the sandbox and removes everything  ? all commands  j k scroll"
_GAP = "  "
_WAIT_REPORTED_AFTER_S = 2.0
_SAMPLED_WITHIN_S, _SAMPLED_POLL_S = 5.0, 0.2
"""An agent samples each second while it is asked."""
_REDRAW_S = 0.25
_READ_AGAIN_S = 1.0
"""Processes start and end, and the agent writes its files, without an event of the node."""
_STILL_S = 3.0
"""More than two back-offs of the scheduler, and than an agent needs to report its allocations."""


class Notices:
    """Lines for people: printed, or kept for the live view while it has the screen."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr
        self._kept: deque[str] = deque(maxlen=_NOTICES_KEPT)
        self._show: Callable[[], None] | None = None

    def __call__(self, text: str) -> None:
        # While the view has the screen a printed line would be drawn over.
        if self._show is None:
            print(text, file=sys.stderr if self._to_stderr else sys.stdout, flush=True)
        else:
            self._kept.extend(text.splitlines())
            self._show()

    def newest(self, count: int) -> list[str]:
        return list(self._kept)[-count:]

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[], None]) -> Iterator[None]:
        """Notices go to the view until the block ends, when they are printed: the screen goes with its last state."""
        self._show = show
        try:
            yield
        finally:
            self._show = None
            for line in self._kept:
                self(line)


class Session(Struct, frozen=True, kw_only=True):
    """A running sandbox as its modes use it. `form` is that of the report."""

    controller: SandboxController
    manifests: Sequence[Manifest]
    form: Form
    notify: Notices
    players: Sequence[WorkloadPlayer]
    next_steps: tuple[str, ...]


async def _create(session: Session) -> None:
    """Creates the pods when the agents have registered: before that no pod fits."""
    controller, notify = session.controller, session.notify
    async with reported_after(_WAIT_REPORTED_AFTER_S, "waiting for the agent to register its resources…", notify):
        is_registered = await controller.wait_registered()
    late = next((one for one in controller.nodes if not one.is_registered()), None)
    # Pods are created all the same: a pod that stays Pending is what a person must see.
    if not is_registered and late is not None:
        notify(
            f"{late.agent.name} has not registered its resources; pods that want them will stay Pending. "
            "The end of its log:\n"
            f"{last_lines(late.shown.node.paths.agent_log)}"
        )
    for line in controller.apply(session.manifests):
        notify(line)


@asynccontextmanager
async def reported_after(seconds: float, text: str, notify: Callable[[str], None]) -> AsyncIterator[None]:
    """Reports what is waited for, where it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, notify, text)
    try:
        yield
    finally:
        timer.cancel()


async def run_once(session: Session) -> int:
    """Waits until every pod is steady and prints the report; 1 where a pod neither runs nor has succeeded, else 0."""
    controller, notify = session.controller, session.notify
    await _create(session)
    try:
        # A script must come to its end; the report has the pods that are not steady.
        async with asyncio.timeout(STEADY_TIMEOUT_S):
            await _wait_steady(controller)
    except TimeoutError:
        notify(f"not every pod runs or has ended after {STEADY_TIMEOUT_S:g} s; the report shows their state")
    document = await _document_with_use(session)
    print_document(document, session.form)
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        notify(f"{pod['namespace']}/{pod['name']} is {pod['phase']}: {reason_text(pod) or 'without a reason'}")
    if others:
        notify("exit code 1: not every pod is Running or Succeeded")
    return 1 if others else 0


async def _document_with_use(session: Session) -> SandboxDocument:
    """The report, with the use of containers that have just started: the agents' own, else GPUs would show less than what
    is in them."""
    for player in session.players:
        player.play()
    played_at, nodes = time.time(), session.controller.nodes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SAMPLED_WITHIN_S if session.players else 0):
            while any((one.shown.agent_document.get("sampled_at") or 0.0) < played_at for one in nodes):
                await asyncio.sleep(_SAMPLED_POLL_S)
                await session.controller.document()
    return await session.controller.document()


async def _wait_steady(controller: SandboxController) -> None:
    """With an extender a pod may be unschedulable because another pod's allocation was not known yet: it is steady when
    it has stayed so for a while."""
    signal_ = controller.api.signal
    while True:
        await signal_.wait_until(controller.is_steady, STEADY_TIMEOUT_S)
        if controller.extender is None or not controller.has_waiting():
            return
        with contextlib.suppress(TimeoutError):
            # Steady so far; only a change within _STILL_S says otherwise, so the timeout is the good end.
            await signal_.wait_until(lambda: not controller.has_waiting() or not controller.is_steady(), _STILL_S)
            continue
        return


async def run_live(session: Session, notes: Sequence[str]) -> int:
    """Prints `notes`, then shows the pods. Endless."""
    for note in notes:
        session.notify(note)
    async with asyncio.TaskGroup() as group:
        # A pipe or a file gets a line for each change, which a script can read.
        if sys.stdout.isatty() and session.form in ("table", "wide"):
            group.create_task(_create(session), name="create-pods")
            await _draw(session, notes)
        else:
            group.create_task(_create_and_tell(session), name="create-pods")
            await _print_changes(session.controller, session.notify)
    return 0


async def _create_and_tell(session: Session) -> None:
    await _create(session)
    session.notify(_GAP.join(session.next_steps))


class _LiveView:
    """The tables of `status`, below them the newest notices. Changed by keys and by the cluster, both on the event loop."""

    def __init__(self, session: Session, notes: Sequence[str], document: SandboxDocument) -> None:
        self.document = document
        self._session = session
        self._notes = notes
        self._has_help = False

    def press(self, key: str) -> bool:
        """q is no key here: it would end every pod."""
        if key == "?":
            self._has_help = not self._has_help
        # q is taken here, so that the screen does not see it.
        return key in ("?", "q", "Q")

    def show(self, width: int) -> View:
        body = Text("\n".join(self._notes)) if self._has_help else report_tables(self.document, width)
        notices = [Text(line, style="dim") for line in self._session.notify.newest(_NOTICES_SHOWN)]
        steps = self._session.next_steps
        # A line of its own for each where the terminal would cut the last one.
        whole = _GAP.join(steps)
        last = [whole] if len(whole) <= width else steps
        return View(head=(), body=body, foot=[*notices, Text(_KEYS, style="dim"), *map(Text, last)])


async def _draw(session: Session, notes: Sequence[str]) -> None:
    """On the whole screen, until cancelled."""
    view = _LiveView(session, notes, await session.controller.document())
    screen = Screen(view.show, view.press)
    async with asyncio.TaskGroup() as group:
        group.create_task(_follow(session.controller, view, screen), name="follow-the-cluster")
        with session.notify.shown_by(screen.is_changed.set):
            await screen.run(ends_on_signals=False)


async def _follow(controller: SandboxController, view: _LiveView, screen: Screen) -> None:
    while True:
        seen = controller.api.signal.count
        document = await controller.document()
        if document != view.document:  # to draw costs as much as to read
            view.document = document
            screen.is_changed.set()
        await _wait_for_change(controller, seen)


async def _print_changes(controller: SandboxController, notify: Callable[[str], None]) -> None:
    """A line for every pod that is new, has changed, or has gone."""
    signal_, shown = controller.api.signal, dict[str, str]()
    while True:
        seen = signal_.count
        document = await controller.document()
        lines = {pod["uid"]: pod_line(pod, has_node=has_several_nodes(document)) for pod in document["pods"]}
        for uid, line in lines.items():
            if shown.get(uid) != line:
                notify(line)
        # By UID: a pod made again under the same name is another, and the first one has gone.
        for uid in shown.keys() - lines.keys():
            notify(f"gone: {shown[uid]}")
        shown = lines
        await _wait_for_change(controller, seen)


async def _wait_for_change(controller: SandboxController, seen: int) -> None:
    """After the next change, or a while; never at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_AGAIN_S):
            await controller.api.signal.wait(seen)
    # A pod's start is a burst of events: one drawing for all of them.
    await asyncio.sleep(_REDRAW_S)
