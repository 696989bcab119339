"""How far a long command is: a bar with the time left at a terminal, elsewhere a line now and then. On standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Report = Callable[[str, int, int], None]
"""What is done, how much of it, of how much."""
LINE_PERIOD_S = 5.0


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Report]:
    """For what is counted in `unit`. The bars are gone with the block."""
    if not sys.stderr.isatty():
        yield _lines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _lines(unit: str) -> Report:
    printed_at = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= LINE_PERIOD_S:
            printed_at = time.monotonic()
            print(f"{what}: {done} of {total} {unit}", file=sys.stderr, flush=True)

    return report
