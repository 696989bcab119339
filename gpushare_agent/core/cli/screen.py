"""A terminal's whole screen, drawn again after each change: a head, a body that scrolls, a foot. For `top` and the sandbox.

State owned: the terminal's mode, put back at the end, and the first line of the body that is shown.
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gpushare_agent.core.cli.render_text import counted

_KEYS_AT_ONCE = 64
_KEY = re.compile(r"\x1b\[[0-9]*[A-Z~]|.", re.DOTALL)
_SCROLL_KEYS = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1}
_PAGE_KEYS = {" ": 1, "\x1b[6~": 1, "b": -1, "\x1b[5~": -1}
MIN_BODY_LINES = 1


def has_screen() -> bool:
    """Whether standard output is a terminal on which a screen can be drawn: on a dumb one nothing would be shown."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class View(Struct, frozen=True, kw_only=True):
    """The shown content. Head and foot are always there; the foot ends with how many lines of the body are not."""

    head: Sequence[Text]
    body: RenderableType
    foot: Sequence[Text]


class Screen:
    """`show` makes the view for a width and height. `press` gets each key first, and returns whether it was meant for it."""

    def __init__(self, show: Callable[[int, int], View], press: Callable[[str], bool] = lambda key: False) -> None:
        self._show = show
        self._press = press
        self._first_line = 0
        self._page = MIN_BODY_LINES
        self.is_over = asyncio.Event()
        self.is_changed = asyncio.Event()

    async def run(self, follow: Coroutine[Any, Any, None], *, ends_on_signals: bool) -> None:
        """Shows the screen until q, next to `follow`, which changes what is shown, without an end. With `ends_on_signals`
        until Ctrl-C or SIGTERM, too; else the caller handles them."""
        console = Console(highlight=False)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow, name="follow what is shown")
            # Without rich's own thread: what is drawn is changed on the event loop alone.
            with self._terminal(ends_on_signals), Live(console=console, screen=True, auto_refresh=False) as live:
                while not self.is_over.is_set():
                    # Before drawing: a change in the meantime draws once more.
                    self.is_changed.clear()
                    live.update(self, refresh=True)
                    await self.is_changed.wait()
            following.cancel()

    def end(self) -> None:
        self.is_over.set()
        self.is_changed.set()

    def press(self, keys: str) -> None:
        """The keys that were typed since the last time: letters, and the arrows' sequences."""
        for key in _KEY.findall(keys):
            # The view first: while a filter is typed, q is a letter.
            if self._press(key):
                continue
            if key in ("q", "Q"):
                self.end()
            self._first_line += _SCROLL_KEYS.get(key, 0) + _PAGE_KEYS.get(key, 0) * self._page
        self.is_changed.set()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields head and foot, and as many lines of the body as the terminal has left."""
        width, height = options.max_width, console.height
        view = self._show(width, height)
        free = options.update(height=None)
        head, foot = (
            [line for text in texts for line in _cut(console, free, text)] for texts in (view.head, view.foot)
        )
        body = console.render_lines(view.body, free, pad=False)
        self._page = max(MIN_BODY_LINES, height - len(head) - len(foot))
        hidden = max(0, len(body) - self._page)
        # Here, where the height is known: the terminal may have grown, or lines may have gone.
        self._first_line = max(0, min(self._first_line, hidden))
        if hidden and foot:
            more = Text(f"{counted(hidden, 'more line')} (j, k)  ", style="bold").append_text(view.foot[-1])
            foot[-1:] = _cut(console, free, more)
        shown = body[self._first_line : self._first_line + self._page]
        blank: list[list[Segment]] = [[]] * (self._page - len(shown))
        # Cut to the screen: one line more would scroll the head away.
        for line in (head + shown + blank + foot)[:height]:
            yield from line
            yield Segment.line()

    @contextlib.contextmanager
    def _terminal(self, ends_on_signals: bool) -> Iterator[None]:
        """Keys come one by one and unechoed; a new size draws the screen again."""
        loop = asyncio.get_running_loop()
        # The sandbox has handlers of its own, and a loop has one for each signal.
        numbers = (signal.SIGINT, signal.SIGTERM) if ends_on_signals else ()
        for number in numbers:
            loop.add_signal_handler(number, self.end)
        # rich asks for the size only when it draws.
        loop.add_signal_handler(signal.SIGWINCH, self.is_changed.set)
        try:
            with self._keys() if sys.stdin.isatty() else contextlib.nullcontext():
                yield
        finally:
            for number in (*numbers, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def _keys(self) -> Iterator[None]:
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        # Not raw: Ctrl-C stays a signal.
        tty.setcbreak(stdin)
        loop.add_reader(stdin, self._read_keys, stdin)
        try:
            yield
        finally:
            loop.remove_reader(stdin)
            # Without flushing: what was typed ahead is the shell's.
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    def _read_keys(self, stdin: int) -> None:
        try:
            # Not sys.stdin, whose buffer would keep keys from the loop.
            keys = os.read(stdin, _KEYS_AT_ONCE).decode("ascii", "replace")
        except OSError:
            keys = ""
        if not keys:  # the terminal is gone
            self.end()
        self.press(keys)


def _cut(console: Console, options: ConsoleOptions, text: Text) -> list[list[Segment]]:
    """One line, which ends with … where the terminal is too narrow."""
    line = text.copy()
    line.no_wrap, line.overflow = True, "ellipsis"
    return console.render_lines(line, options, pad=False)[:1]
