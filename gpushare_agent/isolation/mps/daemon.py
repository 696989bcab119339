"""The MPS control daemon as a child process, in the foreground and in a process group of its own.

Its output goes to this process's standard error, beside our log, so that no full pipe can stop it.
State owned: the child; only this child's process group is signalled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from gpushare_agent.isolation.mps.control import MpsControl
from gpushare_agent.model.errors import StartupError, Unavailable

TERM_TIMEOUT_S = 5.0
"""How long the daemon may take to end after SIGTERM."""
_KILL_TIMEOUT_S = 5.0


class MpsDaemonProcess:
    """One daemon after another; `control` knows the program and its environment."""

    def __init__(self, control: MpsControl) -> None:
        self._control = control
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
            if self._had_one:
                raise Unavailable(f"a process of the ended daemon still uses {files.pipe}: {sign}")
            raise StartupError(
                f"an MPS control daemon already runs in {files.pipe}: {sign}. It and its clients are left alone, and no "
                "second one was started. Let the agent use that one without this command, or end it with `echo quit "
                f"| CUDA_MPS_PIPE_DIRECTORY={files.pipe} {program}`, or choose another mps.pipe_directory"
            )
        removed = files.remove_stale()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(program, "-f"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                stderr=sys.stderr.fileno(),
                env=self._control.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{program} cannot be run: {error.strerror or error}") from error
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
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            if wait_s <= 0:
                continue
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await process.wait()
                    return
