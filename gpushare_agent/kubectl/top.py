"""`gpushare-agent top`: the node's GPUs and their containers, once or as a live table.

The live table polls the agent, stays while the agent is unavailable (and shows it), and ends with q or Ctrl-C. Without a
terminal there is one table.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from msgspec.structs import replace
from rich.console import Group
from rich.text import Text

from gpushare_agent.core.cli.command_line import SORTS, Invocation
from gpushare_agent.core.cli.render_text import in_namespace, plain, print_as
from gpushare_agent.core.cli.screen import Screen, View
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.node_report.documents import NodeDocument
from gpushare_agent.kubectl.agent_client import node_of, open_agent, read_node
from gpushare_agent.kubectl.render_top import Choice, heading, node_tables, notes, top_lines, top_table

_ERASE, _END, _CANCEL = ("\x7f", "\b"), ("\n", "\r"), "\x1b"
_MAX_FILTER_CHARS = 100
_KEYS = "q ends  ? help  s sort  / filter  p processes"
_HELP = """\
q          end
j k ↓ ↑    scroll; space and b by a page
s          order by GPU, SM, memory, GPU cores (the highest first)
/          show only containers whose NAMESPACE/POD/CONTAINER has what you type; Enter keeps it, Esc clears it
p          list the processes of each container
?          this help, and back

GPU CORES  allocated and all, in hundredths of the GPU; of a container its limit, `40–60` with an elastic ceiling
SM %       use of the whole GPU; green below 10 %, yellow below 75 %, red above. 31*: what a container paid, as libgpushare
           counts, while others compute there: of several the driver's samples name one
MEMORY     used and all; of a container used and its limit
ALLOC      memory allocated to containers
"""


async def run(call: Invocation) -> int:
    """Prints or shows the node; `-o wide` lists processes. Raises AgentError where the first request fails."""
    options, form = call.options, call.options.output
    choice = Choice(sort=options.sort, has_processes=form == "wide")
    async with open_agent(call, call.settings(), node_of(call)) as agent:

        async def read() -> NodeDocument:
            document = await read_node(agent)
            document["containers"] = in_namespace(document["containers"], options.namespace)
            return document

        # Before the screen is taken: where no agent answers, the error stays to be read.
        document = await read()
        # Keys come from standard input: without a terminal there nobody could end the table.
        if options.once or form in ("json", "yaml") or not (sys.stdout.isatty() and sys.stdin.isatty()):
            choice = replace(choice, has_bars=sys.stdout.isatty())
            print_as(form, document, lambda width: node_tables(document, width, choice))
        else:
            await _show_live(read, _Top(document, choice), options.interval)
    return 0


class _Top:
    """The state of the view. Keys and the poll change it, both on the event loop."""

    def __init__(self, document: NodeDocument, choice: Choice) -> None:
        self.document = document
        self.problem = ""
        self._choice = choice
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
            self._choice = replace(self._choice, has_processes=not self._choice.has_processes)
        elif key == "s":
            after = (SORTS.index(self._choice.sort) + 1) % len(SORTS)
            self._choice = replace(self._choice, sort=SORTS[after])
        elif key == _CANCEL:
            # Esc clears a filter that was confirmed, too.
            self._choice = replace(self._choice, filter="")
        else:
            return False
        return True

    def _type(self, key: str) -> None:
        text = self._choice.filter
        if key in _ERASE:
            text = text[:-1]
        elif key == _CANCEL:
            text = ""
        elif key.isprintable() and len(text) < _MAX_FILTER_CHARS:
            text += key
        # Any other key goes on, also one that was not taken because the filter is full.
        self._is_typing = key not in (*_END, _CANCEL)
        self._choice = replace(self._choice, filter=text)

    def view(self, width: int) -> View:
        head = heading(self.document, width)
        problem = [Text(plain(self.problem), style="red")] if self.problem else []
        if self._has_help:
            return View(head=head, body=Text(_HELP), foot=[*problem, Text("? back  q ends", style="dim")])
        lines = top_lines(self.document, width, self._choice)
        header, rows = top_table(lines, width, self._choice)
        body = Group(*rows) if lines else Text("no GPU or container to show", style="yellow")
        return View(head=[*head, header], body=body, foot=[*notes(lines), *problem, self._foot()])

    def _foot(self) -> Text:
        if self._is_typing:
            return Text(f"filter: {self._choice.filter}▏  Enter keeps it, Esc clears it")
        chosen = f"  [{self._choice.filter}]" if self._choice.filter else ""
        order = f"  by {self._choice.sort}" if self._choice.sort != "gpu" else ""
        return Text(f"{_KEYS}{order}{chosen}", style="dim")


async def _show_live(read: Callable[[], Awaitable[NodeDocument]], top: _Top, interval_s: float) -> None:
    screen = Screen(top.view, top.press)
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(_poll(read, top, screen, interval_s), name="poll the agent")
        try:
            await screen.run(ends_on_signals=True)
        finally:
            # The poll is endless, and the group would wait for it.
            poll.cancel()


async def _poll(read: Callable[[], Awaitable[NodeDocument]], top: _Top, screen: Screen, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            top.document, top.problem = await read(), ""
        except AgentError as e:
            # The last numbers stay: an agent that restarts is away for a second.
            top.problem = f"as of the last answer: {e}"
        screen.is_changed.set()
