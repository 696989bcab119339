"""The watch on what an isolation needs on the host: its reason, its subscribers, and its recovery."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.part import AvailabilityWatch
from gpushare_agent.core.model.errors import Unavailable
from tests.cluster.support_kube import running


class ScriptedDaemon:
    """Answers as `reason` says, once it is let through."""

    def __init__(self) -> None:
        self.reason = ""
        self.polled = 0
        self.open = asyncio.Event()
        self.open.set()
        self.changed = asyncio.Condition()

    async def check(self) -> None:
        self.polled += 1
        async with self.changed:
            self.changed.notify_all()
        await self.open.wait()
        if self.reason:
            raise Unavailable(self.reason)

    async def wait_polled(self, times: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.polled >= times)


async def test_nothing_is_believed_of_a_daemon_that_was_not_polled() -> None:
    """Before the first poll has ended it counts as unavailable."""
    daemon = ScriptedDaemon()
    watch = AvailabilityWatch("mps", [daemon.check], [], period_s=0.001)
    assert "not been checked yet" in watch.unavailable_reason
    daemon.open.clear()
    async with running(watch.run):
        await daemon.wait_polled(1)
        assert "not been checked yet" in watch.unavailable_reason
        daemon.open.set()
        await daemon.wait_polled(daemon.polled + 2)  # the poll before has ended
        assert watch.unavailable_reason == ""


async def test_a_change_is_reported_once_and_recovery_comes_by_itself() -> None:
    """In the log and to subscribers; polls with the same result are not reported, another reason is."""
    daemon = ScriptedDaemon()
    watch = AvailabilityWatch("mps", [daemon.check], [], period_s=0.001)
    reported: list[str] = []
    watch.subscribe(lambda: reported.append(watch.unavailable_reason))
    with capture_logs() as logs:
        async with running(watch.run):
            for daemon.reason in ("", "no answer", "no directory", ""):
                await daemon.wait_polled(daemon.polled + 3)  # the poll before the last has ended, with this answer
    assert reported == ["", "no answer", "no directory", ""]
    is_there, is_away = "isolation_available", "isolation_unavailable"
    assert [line["event"] for line in logs] == [is_there, is_away, is_away, is_there]
    assert logs[1]["reason"] == "no answer" and logs[1]["log_level"] == "error" and logs[1]["isolation"] == "mps"
