"""Counts what a piece of code executes: how it grows says what no timing can on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class Steps:
    """How much was executed: lines of Python, and calls of functions of Python and C. `lines` has them by function."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}

    @property
    def count(self) -> int:
        return sum(self.lines.values())

    def add(self, frame: FrameType) -> None:
        name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
        self.lines[name] = self.lines.get(name, 0) + 1

    def more_than(self, other: Steps) -> dict[str, int]:
        """By how much each function took more than in `other`, the most first: what takes less must not hide it."""
        more = {name: count - other.lines.get(name, 0) for name, count in self.lines.items()}
        return {name: count for name, count in sorted(more.items(), key=lambda one: -one[1]) if count > 0}


@contextmanager
def counted() -> Iterator[Steps]:
    """Counts what this thread executes meanwhile. A loop counts as often as it turns; one inside a function of C, such as
    the copy of a dictionary, does not."""
    steps = Steps()
    before = sys.gettrace(), sys.getprofile()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            steps.add(frame)
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            steps.add(frame)

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        yield steps
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
