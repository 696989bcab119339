"""observability/http/cpu_profile.py: what is busy shows with its stack, what waits does not, and nobody waits for the
sampling.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from gpushare_agent.observability.http import cpu_profile
from gpushare_agent.observability.http.cpu_profile import take_profile


def burn_visibly(is_over: Callable[[], bool]) -> None:
    while not is_over():
        sum(range(50))


async def test_what_keeps_the_loop_busy_is_in_the_profile() -> None:
    """Outermost first, the thread's name in front, the number of samples behind."""

    async def be_busy() -> None:
        while True:
            burn_visibly(partial(_is_after, time.monotonic() + 0.02))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        busy = group.create_task(be_busy())
        profile = await take_profile(0.3, 200)
        busy.cancel()
    lines = [line for line in profile.text().splitlines() if "test_cpu_profile.burn_visibly" in line]
    assert lines
    stack, _, count = lines[0].rpartition(" ")
    assert int(count) > 0
    assert stack.startswith("MainThread;")
    frames = stack.split(";")
    assert any(frame.endswith("be_busy") for frame in frames)


async def test_an_idle_loop_leaves_nothing_unless_asked_for() -> None:
    """Waiting in the selector is no use of time."""
    quiet = await take_profile(0.1, 100)
    whole = await take_profile(0.1, 100, with_idle=True)
    assert not [stack for stack in quiet.stacks if stack.endswith("EpollSelector.select")]
    assert quiet.idle > 0
    assert [stack for stack in whole.stacks if stack.endswith("EpollSelector.select")]
    assert whole.idle == 0


async def test_other_threads_show_by_name_while_they_use_the_processor() -> None:
    """A busy one is there, one that only waits is not; a name cannot break the format."""
    is_over = threading.Event()
    busy = threading.Thread(target=burn_visibly, args=(is_over.is_set,), name="nvml;call 7", daemon=True)
    waiting = threading.Thread(target=is_over.wait, name="waiting", daemon=True)
    busy.start()
    waiting.start()
    try:
        profile = await take_profile(0.3, 200)
    finally:
        is_over.set()
        await asyncio.to_thread(busy.join)
        await asyncio.to_thread(waiting.join)
    assert [stack for stack in profile.stacks if stack.startswith("nvml:call 7;")]
    assert not [stack for stack in profile.stacks if stack.startswith("waiting")]


async def test_the_sampling_thread_is_gone_after_a_cancelled_profile() -> None:
    """Whoever asked has left: nobody samples for a minute in vain."""
    async with asyncio.TaskGroup() as group:
        profile = group.create_task(take_profile(60, 100))
        while not _samplers():
            await asyncio.sleep(0)
        profile.cancel()
        await asyncio.wait({profile})
    async with asyncio.timeout(10):
        while _samplers():
            await asyncio.sleep(0.005)


async def test_the_loop_runs_while_it_is_sampled() -> None:
    """The profile is one task among others."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await take_profile(0.2, 100)
        counting.cancel()
    assert turns > 5


async def test_the_number_of_different_stacks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much is one line, so that the sum stays right."""
    monkeypatch.setattr(cpu_profile, "MAX_STACKS", 0)
    profile = await take_profile(0.05, 100, with_idle=True)
    assert list(profile.stacks) == ["(further stacks)"]


async def test_a_deep_stack_keeps_its_inner_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames where the time goes are the inner ones."""
    monkeypatch.setattr(cpu_profile, "MAX_DEPTH", 3)
    profile = await take_profile(0.05, 100, with_idle=True)
    assert {len(stack.split(";")) for stack in profile.stacks if stack.startswith("MainThread")} == {4}
    assert any(stack.endswith("EpollSelector.select") for stack in profile.stacks)


def _is_after(moment: float) -> bool:
    return time.monotonic() >= moment


def _samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cpu-profile"]
