"""Long answers in steps: a generator yields where the event loop may do other work, and returns the answer. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

A = TypeVar("A")
Steps = Generator[None, None, A]


async def in_steps(steps: Steps[A]) -> A:
    """The answer; other tasks of the loop run between two steps. May be cancelled there."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            answer: A = done.value
            return answer
        # One turn of the loop: everything that is ready runs, then this goes on.
        await asyncio.sleep(0)


def at_once(steps: Steps[A]) -> A:
    """The answer without a pause, for callers that have no loop."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            answer: A = done.value
            return answer
