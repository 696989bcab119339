"""Keeps one MPS control daemon running: starts it, waits until it answers, starts it again when it ends, and drains it.

| condition | meaning | next |
|---|---|---|
| starting | the daemon was started and has not answered yet | serving, or waiting |
| serving | it answers | not answering, or waiting |
| not answering | it runs and does not answer; it is not ended, because that would end its clients | serving, or waiting |
| waiting | it has ended; the next start follows after a delay | starting, or the end with an error |
| draining | no longer needed; its clients get time to end | stopped |
| stopped | it has ended | |

The daemon is a child process in the foreground, in a process group of its own, which alone is signalled. Its output goes to
this process's standard error, with our log, so that no full pipe can stop it.

State owned: the child, the condition, and the number of consecutive failed starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.isolation.mps.control import MpsControl
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import at_most
from gpushare_agent.core.model.errors import StartupError, Unavailable, os_errors_as

log = structlog.get_logger(__name__)

_POLL_S = 0.1
"""Between two polls while waiting."""
_STEADY_S = 60.0
"""A daemon that served so long is restarted at once after its end."""


class Condition(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    NOT_ANSWERING = "not answering"
    WAITING = "waiting"
    DRAINING = "draining"
    STOPPED = "stopped"


class Timeouts(Struct, frozen=True, kw_only=True):
    """`start_s` bounds a start, `most_bad_starts` in a row end the supervisor; `drain_s` is for clients, `end_s` for the
    daemon after the command quit."""

    start_s: float
    probe_period_s: float
    drain_s: float
    end_s: float = 5.0
    most_bad_starts: int = 5
    backoff: Backoff


class MpsSupervision(Struct, eq=False):
    """`percentage` is the default for clients without a limit of their own. `on_condition` is called at every change."""

    daemon: MpsDaemonProcess
    control: MpsControl
    percentage: int
    timeouts: Timeouts
    on_condition: Callable[[Condition], None]
    _condition: Condition = field(default_factory=lambda: Condition.STOPPED)
    _bad_starts: int = 0
    _failures: int = 0

    async def run(self) -> NoReturn:
        """Until cancelled; the daemon runs on then, for `drain`.

        Raises:
            StartupError: it cannot be started, several times in a row; or another daemon has taken its place.
        """
        while True:
            try:
                await self._start()
                served_from = time.monotonic()
                why = await self._serve()
                # A crash after a minute of service is a new one: its restart waits the shortest delay.
                self._failures = 1 if time.monotonic() - served_from >= _STEADY_S else self._failures + 1
            except Unavailable as error:
                why = str(error)
                self._bad_starts += 1
                self._failures += 1
            # One that runs and did not answer after its start is killed at once: it has no clients yet.
            await self.daemon.end(timeout_s=0)
            self._become(Condition.WAITING)
            if self._bad_starts >= self.timeouts.most_bad_starts:
                raise StartupError(
                    f"the MPS control daemon could not be started {self._bad_starts} times in a row, the last time because "
                    f"{why}. Its own output is above and in its control.log (next to mps.pipe_directory). No further start "
                    "is tried"
                )
            delay_s = self.timeouts.backoff.delay_s(self._failures)
            log.error("mps_daemon_down", reason=why, next_start_in_s=round(delay_s, 2))
            await asyncio.sleep(delay_s)

    async def _start(self) -> None:
        """Until it answers and has its defaults. Raises Unavailable."""
        self._become(Condition.STARTING)
        removed = await self.daemon.start()
        if removed:
            log.warning("mps_stale_files_removed", names=removed, of="a daemon that has ended")
        log.info("mps_daemon_started", pid=self.daemon.pid)
        last = "it was not polled"
        try:
            async with asyncio.timeout(self.timeouts.start_s):
                while True:
                    try:
                        await self.control.get_default_active_thread_percentage()
                        # At each start: a daemon forgets it.
                        await self.control.set_default_active_thread_percentage(self.percentage)
                        break
                    except Unavailable as error:
                        last = str(error)
                    if self.daemon.exit_code is not None:
                        raise Unavailable(f"it {_ending(self.daemon.exit_code)} before it answered{self.daemon.doubt}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable(f"it did not answer within {self.timeouts.start_s:g} s of its start: {last}") from error
        # It answered: the count is of starts that failed in a row.
        self._bad_starts = 0
        self._become(Condition.SERVING)

    async def _serve(self) -> str:
        """Waits until it ends; returns how it did."""
        while True:
            await at_most(self.timeouts.probe_period_s, self.daemon.wait())
            if self.daemon.exit_code is not None:
                return f"it {_ending(self.daemon.exit_code)}"
            try:
                await self.control.get_default_active_thread_percentage()
            except Unavailable as error:
                # Where it has ended meanwhile, `wait` above says so in the next turn.
                if self.daemon.exit_code is None and self._condition is Condition.SERVING:
                    log.error(
                        "mps_daemon_does_not_answer",
                        reason=str(error),
                        then="not ended, for its clients would lose their GPU",
                    )
                    self._become(Condition.NOT_ANSWERING)
            else:
                self._become(Condition.SERVING)

    async def drain(self) -> None:
        """Waits a bounded time for the clients, then ends the daemon. After `run` was cancelled."""
        self._become(Condition.DRAINING)
        if self.daemon.pid and self.daemon.exit_code is None:
            left = await self._wait_for_clients()
            if left:
                log.warning(
                    "mps_clients_left", clients=left, waited_s=self.timeouts.drain_s, then="they lose their GPU"
                )
            await self._quit()
        await self.daemon.end(timeout_s=self.timeouts.end_s)
        self._become(Condition.STOPPED)

    async def end_now(self) -> None:
        """Ends the daemon without waiting for clients: the time to drain is over."""
        await self.daemon.end(timeout_s=1.0)
        self._become(Condition.STOPPED)

    async def _wait_for_clients(self) -> list[int]:
        """PIDs of the clients that still run when the time is over."""
        clients: list[int] = []
        try:
            async with asyncio.timeout(self.timeouts.drain_s):
                while self.daemon.exit_code is None:
                    found = await self.control.list_clients()
                    if found != clients:
                        log.info("mps_waits_for_clients", clients=found, at_most_s=self.timeouts.drain_s)
                    clients = found
                    # The daemon can end now: no program loses its GPU.
                    if not clients:
                        return []
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return clients
        except Unavailable as error:
            log.warning("mps_clients_unknown", reason=str(error), then="not waited for")
        return []

    async def _quit(self) -> None:
        try:
            await self.control.quit()
            async with asyncio.timeout(self.timeouts.end_s):
                await self.daemon.wait()
        # Not the end: `end` signals what did not quit.
        except (Unavailable, TimeoutError) as error:
            log.warning("mps_daemon_did_not_quit", reason=str(error) or "it still runs", then="SIGTERM, then SIGKILL")

    def _become(self, condition: Condition) -> None:
        if condition is self._condition:
            return
        self._condition = condition
        log.info("mps_condition", condition=condition.value)
        self.on_condition(condition)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


TERM_TIMEOUT_S = 5.0
"""How long the daemon may take to end after SIGTERM."""
_KILL_TIMEOUT_S = 5.0


MULTI_USER = "-multiuser-server"
"""NVIDIA's option for one server of all users."""


class MpsDaemonProcess:
    """One daemon after another; `control` knows the program and its environment."""

    def __init__(self, control: MpsControl, *, is_multi_user: bool = False) -> None:
        self._control = control
        self._options = (MULTI_USER,) if is_multi_user else ()
        self.doubt = (
            f"; it was given {MULTI_USER} (mps.multi_user), which an older driver may lack" if is_multi_user else ""
        )
        self._process: asyncio.subprocess.Process | None = None
        self._had_one = False

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> list[str]:
        """Starts one where none runs; returns the files of an ended one that were removed for it.

        Raises:
            StartupError: no program, or a daemon of others uses the pipe directory.
            Unavailable: the program cannot be run now, or a process of the last daemon still runs.
        """
        program = self._control.program()
        if program is None:
            raise StartupError(
                "the MPS control program is not installed (setting mps.control), so no daemon was started. It comes with "
                "the NVIDIA driver; in a container NVIDIA's runtime brings it with NVIDIA_DRIVER_CAPABILITIES=compute"
            )
        files = self._control.files
        if sign := await asyncio.to_thread(files.live_daemon):
            # Servers of the last daemon run on while they have clients: that is waited for, a foreign daemon is not.
            if self._had_one:
                raise Unavailable(f"a process of the ended daemon still uses {files.pipe}: {sign}")
            raise StartupError(
                f"an MPS control daemon already runs in {files.pipe}: {sign}. It and its clients are left alone, and no "
                "second one was started. Let the agent use that one without this command, or end it with `echo quit "
                f"| CUDA_MPS_PIPE_DIRECTORY={files.pipe} {program}`, or choose another mps.pipe_directory"
            )
        removed = files.remove_stale()
        with os_errors_as(Unavailable, f"{program} cannot be run"):
            self._process = await asyncio.create_subprocess_exec(
                *(program, "-f", *self._options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                stderr=sys.stderr.fileno(),
                env=self._control.environment(),
                start_new_session=True,
            )
        self._had_one = True
        return removed

    async def wait(self) -> int:
        """Until it has ended: its exit code, negative for a signal. Cancelled, it runs on."""
        assert self._process is not None  # noqa: S101 - only started daemons are waited for
        return await self._process.wait()

    async def end(self, *, timeout_s: float = TERM_TIMEOUT_S) -> None:
        """SIGTERM, and after `timeout_s` SIGKILL, for its process group; waits for its end.

        Servers of a daemon that ended by itself are not signalled: their clients may run on.
        """
        # Taken first, so that a second call signals nothing.
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            if wait_s <= 0:
                continue
            with suppress(ProcessLookupError):
                # The group, because the daemon starts a server for each user.
                os.killpg(process.pid, number)
            if await at_most(wait_s, process.wait()):
                return
