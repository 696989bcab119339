"""`gpushare-agent top`: the node's GPUs and their containers, once or as a live table.

The live table polls the agent, stays while the agent is unavailable (and shows it), and ends with q or Ctrl-C. Without a
terminal there is one table. State owned: the terminal's mode, put back at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gpushare_agent.cli.agent_client import AgentClient, read_node
from gpushare_agent.cli.agent_pods import AgentTarget, open_agent
from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_text import in_namespace, plain, print_as
from gpushare_agent.cli.render_top import heading, top_lines, top_table
from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings.settings import Settings

_KEYS_AT_ONCE = 64
_KEY = re.compile(r"\x1b\[[A-Z]|.", re.DOTALL)
_OTHER_LINES = 3
"""The table's header, the foot, and the agent's problem."""
_HELP = "q ends, j and k (or the arrows) scroll"


async def run(
    settings: Settings, target: AgentTarget, *, once: bool, interval_s: float, namespace: str = "", form: Form
) -> int:
    """Prints or shows the node. Raises AgentError where the first request fails."""
    async with open_agent(settings, target) as agent:
        document = in_namespace(await read_node(agent), namespace)
        if once or form in ("json", "yaml") or not (sys.stdout.isatty() and sys.stdin.isatty()):
            print_as(form, document, lambda width: _tables(document, width))
        else:
            await _show_live(agent, document, interval_s, namespace)
    return 0


def _tables(document: dict[str, Any], width: int) -> Sequence[RenderableType]:
    lines = top_lines(document, width)
    note = [] if lines else [Text("this node has no GPU that the driver can name")]
    return [heading(document), top_table(lines, width), *note]


@dataclass(slots=True)
class _Screen:
    """What is shown. Changed by keys and by the poll, both on the event loop."""

    document: dict[str, Any]
    problem: str = ""
    first_line: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    is_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def press(self, keys: str) -> None:
        """What was typed since the last time: letters, and the arrows' sequences."""
        for key in _KEY.findall(keys):
            if key in ("q", "Q"):
                self.is_over.set()
            elif key in ("j", "\x1b[B"):
                self.first_line += 1
            elif key in ("k", "\x1b[A"):
                self.first_line = max(0, self.first_line - 1)
        self.is_changed.set()

    def view(self, width: int, height: int) -> RenderableType:
        """As many lines as the terminal has; the rest is counted."""
        head, lines = heading(self.document), top_lines(self.document, width)
        head_lines = sum(-(-max(1, cell_len(line)) // width) for line in head.plain.splitlines())
        lines_left = max(1, height - head_lines - _OTHER_LINES)
        self.first_line = min(self.first_line, max(0, len(lines) - lines_left))
        shown = lines[self.first_line : self.first_line + lines_left]
        hidden = len(lines) - len(shown)
        foot = f"{_HELP}; {hidden} more lines" if hidden else "q ends"
        problem = [Text(plain(self.problem)[: width - 1], style="red")] if self.problem else []
        return Group(head, top_table(lines, width, shown), *problem, Text(foot, style="dim"))


async def _show_live(agent: AgentClient, document: dict[str, Any], interval_s: float, namespace: str) -> None:
    screen, console = _Screen(document), Console(highlight=False)
    with _terminal(screen), Live(console=console, screen=True, auto_refresh=False) as live:
        async with asyncio.TaskGroup() as group:
            poll = group.create_task(_poll(agent, screen, interval_s, namespace), name="poll the agent")
            draw = group.create_task(_draw(screen, console, live), name="draw the screen")
            await screen.is_over.wait()
            poll.cancel()
            draw.cancel()


async def _poll(agent: AgentClient, screen: _Screen, interval_s: float, namespace: str) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            screen.document, screen.problem = in_namespace(await read_node(agent), namespace), ""
        except AgentError as e:
            screen.problem = f"as of the last answer: {e}"
        screen.is_changed.set()


async def _draw(screen: _Screen, console: Console, live: Live) -> None:
    while True:
        screen.is_changed.clear()
        live.update(screen.view(console.width, console.height), refresh=True)
        await screen.is_changed.wait()


@contextlib.contextmanager
def _terminal(screen: _Screen) -> Iterator[None]:
    """Keys come one by one and unechoed; Ctrl-C and SIGTERM end the table as q does; a new size draws it again."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, lambda: _read_keys(stdin, screen))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, screen.is_over.set)
    loop.add_signal_handler(signal.SIGWINCH, screen.is_changed.set)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH):
            loop.remove_signal_handler(number)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _read_keys(stdin: int, screen: _Screen) -> None:
    keys = os.read(stdin, _KEYS_AT_ONCE).decode("ascii", "replace")
    if not keys:  # the terminal is gone
        screen.is_over.set()
    screen.press(keys)
