"""kit/watch_path.py on a real file system. The poll is so slow here that only an event can end a wait in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.core.kit.watch_path import DirectoryWatch
from tests.support_deadline import DEADLINE_S
from tests.support_process import no_free_descriptor

NEVER_S = 3600.0


async def next_event(watch: DirectoryWatch, act: Callable[[], object]) -> None:
    """Starts waiting, acts, and expects the wait to end."""
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(watch.wait_change())
        await asyncio.sleep(0)
        assert not waiting.done()
        act()
        await waiting


async def drain(watch: DirectoryWatch) -> None:
    """Reads what earlier acts have queued."""
    try:
        async with asyncio.timeout(0.05):
            while True:
                await watch.wait_change()
    except TimeoutError:
        pass


async def test_creating_moving_and_deleting_a_file_each_end_a_wait(short_dir: Path) -> None:
    """Every change of a name in the directory is reported."""
    outside = short_dir.parent / f"{short_dir.name}-x"
    outside.touch()
    with closing(DirectoryWatch(short_dir, poll_s=NEVER_S)) as watch:
        await watch.wait_change()
        for act in (
            (short_dir / "a").touch,
            lambda: (short_dir / "a").rename(short_dir / "b"),
            (short_dir / "b").unlink,
            lambda: outside.rename(short_dir / "c"),
            lambda: (short_dir / "c").rename(outside),
        ):
            await drain(watch)
            await next_event(watch, act)
    outside.unlink()


@pytest.mark.parametrize("before", ["missing", "moved away", "removed"])
async def test_a_directory_that_is_made_is_noticed_and_then_watched(before: str, short_dir: Path) -> None:
    """Later than the watch, or in the place of another: while it is missing it is polled; once it is there, events count."""
    directory = short_dir / "dp"
    if before != "missing":
        directory.mkdir()
    with closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01)) as watch:
        await watch.wait_change()
        if before == "moved away":
            directory.rename(short_dir / "old")
        elif before == "removed":
            directory.rmdir()
        directory.mkdir()
        await drain(watch)
        await next_event(watch, (directory / "a").touch)


async def test_an_event_that_is_lost_with_its_wait_costs_no_later_one(short_dir: Path) -> None:
    """The wait ends, as at a poll, in the turn of the loop in which the end of the directory was read; the new directory may
    have the number of the old one."""
    directory = short_dir / "dp"
    directory.mkdir()
    with closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01)) as watch:
        await watch.wait_change()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(watch.wait_change())
            await asyncio.sleep(0)
            directory.rmdir()
            directory.mkdir()
            for _ in range(2):  # the events are read in the second turn, and the wait goes on in the third
                await asyncio.sleep(0)
            waiting.cancel()
        await drain(watch)
        await next_event(watch, (directory / "a").touch)


async def test_without_inotify_the_directory_is_polled_until_descriptors_are_free(short_dir: Path) -> None:
    """Which is reported once. Then only an event can end the wait."""
    with closing(DirectoryWatch(short_dir, poll_s=NEVER_S, fast_poll_s=0.01, retry_s=0.0)) as watch:
        with capture_logs() as logs, no_free_descriptor():
            for _ in range(5):
                await watch.wait_change()
        assert [entry["event"] for entry in logs] == ["directory_not_watched"]
        watch.fast_poll_s = NEVER_S
        async with asyncio.timeout(DEADLINE_S):
            await watch.wait_change()
        await next_event(watch, (short_dir / "a").touch)


async def test_the_descriptor_is_closed_with_the_block(short_dir: Path) -> None:
    """Nothing is left open."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    with closing(DirectoryWatch(short_dir)) as watch:
        await watch.wait_change()
        assert open_files() > before
    assert open_files() == before
