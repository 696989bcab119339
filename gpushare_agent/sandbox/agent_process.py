"""The agent, or the extender, as a child process of the sandbox: started, its output kept in a file, started again when
it ends.

State owned: the running process. Only this process is ever signalled, by its PID.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct

import gpushare_agent
from gpushare_agent.core.kit.process import end_process
from gpushare_agent.core.kit.supervision import at_most
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.sandbox.runtime.containers import end_with_parent

log = structlog.get_logger(__name__)

_STOP_TIMEOUT_S = 5.0
_QUICK_END_S = 5.0
_QUICK_ENDS = 3
_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 5.0
_LAST_LINES = 15
_REASON_PREFIX = "gpushare-agent: "
"""The start of the sentence with which the command line ends."""


def last_lines(log_file: Path) -> str:
    try:
        lines = log_file.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(the log {log_file} cannot be read: {error.strerror})"
    return "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:]) or "  | (no output)"


def last_reason(log_file: Path, offset: int = 0) -> str | None:
    """The newest reason after `offset` that the agent gave for its end; None if it gave none."""
    try:
        text = log_file.read_bytes()[offset:].decode(errors="replace")
    except OSError:
        return None
    reported = [line.removeprefix(_REASON_PREFIX) for line in text.splitlines() if line.startswith(_REASON_PREFIX)]
    return reported[-1] if reported else None


def _environment() -> dict[str, str]:
    """The child imports this same package. PYTHONPATH names it in a source checkout; the child finds an installed one
    itself."""
    root = str(Path(gpushare_agent.__file__).resolve().parents[1])
    # PYTHONPATH with site-packages in it would put them before the standard library.
    if root == str(Path(sysconfig.get_path("purelib")).resolve()):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


class AgentProcess(Struct, eq=False):
    """`run` keeps it running until it is cancelled. `notify` gets a line for people at every unexpected end; the line calls
    it `name`. `command` is that of the command line."""

    arguments: Sequence[str]
    log_file: Path
    notify: Callable[[str], None]
    command: str = "run"
    name: str = "the agent"
    _log_start: int = 0
    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def kill(self) -> bool:
        """SIGKILL; `run` starts the next one. Whether there was one."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    async def run(self) -> None:
        """Keeps it running, without an end. Raises StartupError, with the agent's own reason, where it ends again and
        again right after its start."""
        quick_ends, delay_s = 0, _FIRST_DELAY_S
        try:
            while True:
                started_at = time.monotonic()
                code = await self._run_once()
                if code < 0:  # killed by a signal, as kill-agent does: no fault of its own
                    self.notify(f"{self.name} was killed by signal {-code}; starting it again")
                    quick_ends, delay_s = 0, _FIRST_DELAY_S
                elif code == 0:  # asked to end, as SIGTERM does
                    self.notify(f"{self.name} has ended as it was asked to; starting it again")
                    quick_ends = 0
                else:
                    is_quick = time.monotonic() - started_at < _QUICK_END_S
                    # An end after a while is the first of a new row.
                    quick_ends = quick_ends + 1 if is_quick else 1
                    # 2 is a wrong command line or setting: the next start would read the same.
                    self._report_end(code, is_last=quick_ends >= _QUICK_ENDS or code == 2)
                    # A run that lasted does not reset it. Only a kill does, because it is no fault.
                    delay_s = min(delay_s * 2, _LAST_DELAY_S)
                await asyncio.sleep(delay_s)
        finally:
            await self._stop()

    async def _run_once(self) -> int:
        # -P: code in the caller's directory is not the agent. The directory itself stays, because paths are relative to it.
        command = [sys.executable, "-P", "-m", "gpushare_agent", self.command, *self.arguments]
        # A session of its own: Ctrl-C in the terminal reaches the sandbox alone, which ends its children in order.
        with self.log_file.open("ab") as output:
            # The log also has the earlier runs: a reason is looked for after this.
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM), env=_environment(),
            )  # fmt: skip
        return await self._process.wait()

    def _report_end(self, code: int, *, is_last: bool) -> None:
        """The whole end of the log only where the agent itself gave no reason, and once: the log goes with the sandbox."""
        reason = last_reason(self.log_file, self._log_start)
        text = f"{self.name} ended with exit code {code}: {reason or 'it gave no reason'}"
        if not is_last:
            self.notify(f"{text}; starting it again")
            return
        lines = "" if reason else f"; the last lines of its log:\n{last_lines(self.log_file)}"
        raise StartupError(f"{text}; it is not started again{lines}")

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        # In order, so that the agent leaves its kubelet and closes its driver.
        process.terminate()
        if not await at_most(_STOP_TIMEOUT_S, process.wait()):
            log.warning("agent_stop_slow", pid=process.pid, waited_s=_STOP_TIMEOUT_S, next="SIGKILL")
            await end_process(process, _STOP_TIMEOUT_S)
