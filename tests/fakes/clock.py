"""A clock that a test sets."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds; a test adds to `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
