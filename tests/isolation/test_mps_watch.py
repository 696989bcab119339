"""The watch on the MPS control daemon: what it says, whom it tells, and that it recovers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from structlog.testing import capture_logs

from gpushare_agent.isolation.mps.watch import NOT_ASKED, MpsWatch
from gpushare_agent.kit.supervision import stop_task
from gpushare_agent.model.errors import Unavailable

DEADLINE_S = 10.0


class ScriptedDaemon:
    """Answers as `trouble` says, once it is let through; notes how many asked at the same time."""

    def __init__(self) -> None:
        self.trouble = ""
        self.asked = 0
        self.at_once = 0
        self.most_at_once = 0
        self.open = asyncio.Event()
        self.open.set()
        self.changed = asyncio.Condition()

    async def check(self) -> None:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        async with self.changed:
            self.changed.notify_all()
        await self.open.wait()
        self.at_once -= 1
        if self.trouble:
            raise Unavailable(self.trouble)

    async def wait_asked(self, times: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(lambda: self.asked >= times)


@asynccontextmanager
async def running(watch: MpsWatch) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch.run())
        try:
            yield
        finally:
            await stop_task(task)


async def test_nothing_is_believed_of_a_daemon_that_was_not_asked() -> None:
    """Until the first look there is trouble; whoever waits for that look is woken up."""
    daemon = ScriptedDaemon()
    watch = MpsWatch(daemon, period_s=0.001)
    assert watch.trouble == NOT_ASKED
    daemon.open.clear()
    async with running(watch):
        await daemon.wait_asked(1)
        assert watch.trouble == NOT_ASKED
        daemon.open.set()
        async with asyncio.timeout(DEADLINE_S):
            await watch.wait_looked()
        assert watch.trouble == ""


async def test_a_change_is_reported_once_and_recovery_comes_by_itself() -> None:
    """In the log and to who subscribed; looks that find the same say nothing."""
    daemon = ScriptedDaemon()
    watch = MpsWatch(daemon, period_s=0.001)
    reported: list[str] = []
    watch.subscribe(lambda: reported.append(watch.trouble))
    with capture_logs() as logs:
        async with running(watch):
            for daemon.trouble in ("", "no answer", ""):
                await daemon.wait_asked(daemon.asked + 3)  # the look before the last has ended, with this answer
    assert reported == ["", "no answer", ""]
    assert [line["event"] for line in logs] == ["mps_serves", "mps_does_not_serve", "mps_serves"]
    assert logs[1]["reason"] == "no answer" and logs[1]["log_level"] == "error"


async def test_another_reason_is_news_too() -> None:
    """A person who cured the first one has to learn of the second."""
    daemon = ScriptedDaemon()
    watch = MpsWatch(daemon, period_s=60)
    reported: list[str] = []
    watch.subscribe(lambda: reported.append(watch.trouble))
    for daemon.trouble in ("no directory", "no directory", "no answer"):
        await watch.look()
    assert reported == ["no directory", "no answer"]


async def test_looks_never_overlap() -> None:
    """A slow daemon is asked again only when it has answered, however short the period."""
    daemon = ScriptedDaemon()
    async with running(MpsWatch(daemon, period_s=0.0)):
        for _ in range(5):
            daemon.open.clear()
            await daemon.wait_asked(daemon.asked + 1)
            await asyncio.sleep(0)
            assert daemon.at_once == 1
            daemon.open.set()
            await daemon.wait_asked(daemon.asked + 1)
    assert daemon.most_at_once == 1
