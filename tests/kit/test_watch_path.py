"""kit/watch_path.py on a real file system. The poll is so slow here that only an event can end a wait in time."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.core.kit.watch_path import DirectoryWatch
from tests.kubelet.support_plugin import short_directory

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


async def test_the_first_wait_ends_at_once() -> None:
    """What happened before the watch began is not known, so the caller has to compare."""
    with short_directory() as directory, closing(DirectoryWatch(directory, poll_s=NEVER_S)) as watch:
        await watch.wait_change()


async def test_creating_moving_and_deleting_a_file_each_end_a_wait() -> None:
    """Every change of a name in the directory is reported."""
    with short_directory() as directory:
        outside = directory.parent / f"{directory.name}-x"
        outside.touch()
        with closing(DirectoryWatch(directory, poll_s=NEVER_S)) as watch:
            await watch.wait_change()
            for act in (
                (directory / "a").touch,
                lambda: (directory / "a").rename(directory / "b"),
                (directory / "b").unlink,
                lambda: outside.rename(directory / "c"),
                lambda: (directory / "c").rename(outside),
            ):
                await drain(watch)
                await next_event(watch, act)
        outside.unlink()


async def test_a_directory_that_is_made_later_is_noticed_and_then_watched() -> None:
    """While it is missing it is polled; once it is there, events count."""
    with short_directory() as top:
        directory = top / "later"
        with closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01)) as watch:
            await watch.wait_change()
            directory.mkdir()
            await drain(watch)
            await next_event(watch, (directory / "a").touch)


@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_replaced_directory_is_watched_in_place_of_the_old_one(is_moved: bool) -> None:
    """Renamed away or removed, and made again under the same name: files in the new one are reported."""
    with short_directory() as top:
        directory = top / "dp"
        directory.mkdir()
        with closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01)) as watch:
            await watch.wait_change()
            if is_moved:
                directory.rename(top / "old")
            else:
                directory.rmdir()
            directory.mkdir()
            await drain(watch)
            await next_event(watch, (directory / "a").touch)


async def test_an_event_that_is_lost_with_its_wait_costs_no_later_one() -> None:
    """The wait ends, as at a poll, in the turn of the loop in which the end of the directory was read; the new directory may
    have the number of the old one."""
    with short_directory() as top:
        directory = top / "dp"
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


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """The process may open no more files, inotify instances among them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_inotify_the_directory_is_polled_and_that_is_reported_once() -> None:
    """A process that may open no more files still notices."""
    with (
        short_directory() as directory,
        closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01, retry_s=0.0)) as watch,
    ):
        with capture_logs() as logs, no_free_descriptor():
            for _ in range(5):
                await watch.wait_change()
        assert [entry["event"] for entry in logs] == ["directory_not_watched"]


async def test_inotify_is_tried_again() -> None:
    """Once descriptors are free, events count: the poll is slow then, and only an event can end the wait."""
    with (
        short_directory() as directory,
        closing(DirectoryWatch(directory, poll_s=NEVER_S, fast_poll_s=0.01, retry_s=0.0)) as watch,
    ):
        with no_free_descriptor():
            await watch.wait_change()
        await watch.wait_change()
        await next_event(watch, (directory / "a").touch)


async def test_the_descriptor_is_closed_with_the_block() -> None:
    """Nothing is left open."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with short_directory() as directory:
        before = open_files()
        with closing(DirectoryWatch(directory)) as watch:
            await watch.wait_change()
            assert open_files() > before
        assert open_files() == before
