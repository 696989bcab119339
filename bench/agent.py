"""The agent as a child process of the benchmark: start, readiness, memory, processor time, stop.

State owned: the running process. Only this process is ever signalled, by its PID.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.results import resident_mib

_STOP_TIMEOUT_S = 10.0
_DROPPED = ("GPUSHARE_", "PYTHONDONTWRITEBYTECODE")
"""The latter, because an image has its modules compiled."""
_NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
"""In a cluster the agent is given the API server's authority. For the benchmark's server, which has no TLS, the library
would read all of the system's: 20 ms before READY and 1.1 MiB."""
_ROOT = Path(__file__).parents[1]


class BenchAgent:
    """`start`, then `wait_ready`, then `stop`. Says where its log is when it fails."""

    def __init__(self, arguments: Sequence[str], state: Path, environment: Mapping[str, str]) -> None:
        """`environment` is added to this process's own."""
        self._environment = environment
        self.arguments = ["run", *arguments]
        self._command = [sys.executable, "-m", "gpushare_agent", *self.arguments]
        self._log = state / "agent.log"
        self._notify_path = state / "notify.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._notify: socket.socket | None = None

    def become(self, command: Sequence[str]) -> None:
        """Another program in its place: another device plugin does not say when it is ready."""
        self._command = [*command]

    async def start(self) -> float:
        """The time at which the process was asked for."""
        self._notify_path.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notify.bind(str(self._notify_path))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        environment = {**kept, **_NO_CERTIFICATES, **self._environment, "NOTIFY_SOCKET": str(self._notify_path)}
        with self._log.open("ab") as log:
            started = time.perf_counter()
            self._process = await asyncio.create_subprocess_exec(
                *self._command, cwd=_ROOT, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        return started

    async def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Until the agent says that it is registered, synced and listening. Raises RuntimeError."""
        if self._notify is None:
            raise RuntimeError("the agent was not started")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_recv(self._notify, 64)
        except TimeoutError:
            raise RuntimeError(f"the agent is not ready after {timeout_s:g} s; its log:\n{self.log_tail()}") from None

    async def stop(self) -> float:
        """SIGTERM; seconds until the process has ended."""
        process, self._process = self._process, None
        if self._notify is not None:
            self._notify.close()
        if process is None or process.returncode is not None:
            return 0.0
        started = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise RuntimeError(f"the agent did not end within {_STOP_TIMEOUT_S:g} s") from None
        return time.perf_counter() - started

    async def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        process, self._process = self._process, None
        if self._notify is not None:
            self._notify.close()
        if process is None or process.returncode is not None:
            raise RuntimeError(f"the agent has ended; its log:\n{self.log_tail()}")
        process.kill()
        await process.wait()

    @property
    def _pid(self) -> int:
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError(f"the agent has ended; its log:\n{self.log_tail()}")
        return self._process.pid

    def resident_mib(self) -> float:
        return resident_mib(self._pid)

    def processor_s(self) -> float:
        """Processor time of all its threads so far, by the process's own clock (clock_getcpuclockid(3))."""
        return time.clock_gettime((~self._pid << 3) | 2)

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
