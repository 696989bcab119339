"""`gpushare-agent top`: the node's GPUs and their containers, once or as a live table.

The live table polls the agent, stays while the agent is unavailable (and shows it), and ends with q or Ctrl-C. Without a
terminal there is one table.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from msgspec.structs import replace
from rich.console import Group
from rich.text import Text

from gpushare_agent.core.cli.command_line import SORTS, Invocation
from gpushare_agent.core.cli.render_text import in_namespace, plain, print_as
from gpushare_agent.core.cli.screen import Screen, View, has_screen
from gpushare_agent.core.kit.supervision import wait_for
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.node_report.documents import HistoryDocument, NodeDocument
from gpushare_agent.kubectl.agent_client import AgentClient, node_of, open_agent, read_gpu_history, read_node
from gpushare_agent.kubectl.render_top import Choice, heading, node_tables, notes, top_lines, top_table, with_history

_ERASE, _END, _CANCEL = ("\x7f", "\b"), ("\n", "\r"), "\x1b"
_MAX_FILTER_CHARS = 100
_KEYS = "q ends  ? help  s sort  / filter  p processes"
_HELP = """\
q          end
j k ↓ ↑    scroll; space and b by a page
s          order by GPU, SM, memory, GPU cores (the highest first)
/          only containers whose NAMESPACE/POD/CONTAINER has what you type;
           Enter keeps it, Esc clears it
p          processes of each container: PID, program, PID inside the container
?          this help, and back

GPU CORES  allocated and all, in hundredths of the GPU; of a container its
           limit, `40–60` with an elastic ceiling
SM %       use of the whole GPU; green below 10 %, yellow below 75 %, red above;
           31*: what a container paid, as libgpushare counts, while others
           compute there: of several the driver's samples name one
MEMORY     used and all; of a container used and its limit
ALLOC      memory allocated to containers
15 min     use of SMs and of memory since then, where there is room; 100 % high
"""


async def run(call: Invocation) -> int:
    """Prints or shows the node; `-o wide` lists processes. Raises AgentError where the first request fails."""
    options, form = call.options, call.options.output
    choice = Choice(sort=options.sort, has_processes=form == "wide")
    async with open_agent(call, call.settings(), node_of(call)) as agent:
        # Before the screen is taken: where no agent answers, the error stays to be read.
        document = await _read(agent, options.namespace, choice)
        # Keys come from standard input: without a terminal there nobody could end the table.
        if options.once or form in ("json", "yaml") or not (has_screen() and sys.stdin.isatty()):
            choice = replace(choice, has_bars=sys.stdout.isatty())
            print_as(form, document, lambda width: node_tables(document, width, choice))
        else:
            top = _Top(document, choice)
            screen = Screen(top.view, top.press)
            await screen.run(_poll(agent, top, screen, options), ends_on_signals=True)
    return 0


async def _read(agent: AgentClient, namespace: str, choice: Choice) -> NodeDocument:
    document = await read_node(agent, has_processes=choice.has_processes)
    document["containers"] = in_namespace(document["containers"], namespace)
    return document


class _Top:
    """The state of the view. Keys and the poll change it, both on the event loop."""

    def __init__(self, document: NodeDocument, choice: Choice) -> None:
        self.document = document
        self.history = HistoryDocument(step_seconds=0.0, gpus={})
        self.choice = choice
        self.problem = ""
        self.is_wanted = asyncio.Event()
        """Set where a key asks for what the document lacks."""
        self._has_help = False
        self._is_typing = False

    def press(self, key: str) -> bool:
        """Whether the key was meant for the table, not for the screen."""
        if self._is_typing:
            self._type(key)
        elif key == "?":
            self._has_help = not self._has_help
        elif key == "/":
            self._is_typing = True
        elif key == "p":
            self.choice = replace(self.choice, has_processes=not self.choice.has_processes)
            self.is_wanted.set()
        elif key == "s":
            after = (SORTS.index(self.choice.sort) + 1) % len(SORTS)
            self.choice = replace(self.choice, sort=SORTS[after])
        elif key == _CANCEL:
            # Esc clears a filter that was confirmed, too.
            self.choice = replace(self.choice, filter="")
        else:
            return False
        return True

    def _type(self, key: str) -> None:
        text = self.choice.filter
        if key in _ERASE:
            text = text[:-1]
        elif key == _CANCEL:
            text = ""
        elif key.isprintable() and len(text) < _MAX_FILTER_CHARS:
            text += key
        # Any other key goes on, also one that was not taken because the filter is full.
        self._is_typing = key not in (*_END, _CANCEL)
        self.choice = replace(self.choice, filter=text)

    def view(self, width: int, height: int) -> View:
        head = heading(self.document, width)
        problem = [Text(plain(self.problem), style="red")] if self.problem else []
        if self._has_help:
            return View(head=head, body=Text(_HELP), foot=[*problem, Text("? back  q ends", style="dim")])
        lines = top_lines(self.document, width, self.choice)
        foot = [*notes(lines), *problem, self._foot()]
        room = height - len(head) - 1 - len(foot) - len(lines)
        lines = with_history(lines, self.document, self.history, width, room)
        header, rows = top_table(lines, width, self.choice)
        body = Group(*rows) if lines else Text("no GPU or container to show", style="yellow")
        return View(head=[*head, header], body=body, foot=foot)

    def _foot(self) -> Text:
        if self._is_typing:
            return Text(f"filter: {self.choice.filter}▏  Enter keeps it, Esc clears it")
        chosen = f"  [{self.choice.filter}]" if self.choice.filter else ""
        order = f"  by {self.choice.sort}" if self.choice.sort != "gpu" else ""
        return Text(f"{_KEYS}{order}{chosen}", style="dim")


async def _poll(agent: AgentClient, top: _Top, screen: Screen, options: Any) -> None:
    curves_read_at = float("-inf")
    while True:
        # A step of the curves takes several polls, and the agent's clock may be set back.
        if not 0 <= top.document["at"] - curves_read_at < top.history["step_seconds"]:
            with contextlib.suppress(AgentError):  # an agent that has none; the table stays without
                top.history = await read_gpu_history(agent)
            curves_read_at = top.document["at"]
            screen.is_changed.set()
        await wait_for(top.is_wanted, options.interval)
        top.is_wanted.clear()
        try:
            top.document, top.problem = await _read(agent, options.namespace, top.choice), ""
        except AgentError as e:
            # The last numbers stay: an agent that restarts is away for a second.
            top.problem = f"as of the last answer: {e}"
        screen.is_changed.set()
