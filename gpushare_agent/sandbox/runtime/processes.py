"""A container's first process: kept before its first instruction until it is in its cgroup, and its exit observed.

A small shell waits for one line, then becomes the command: so nothing of a container runs outside its cgroup. The kernel
kills the process if the sandbox dies first. Where no cgroup can be created a container has no process; a timer ends it.
State owned: the process, until it has been waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

_GATE = '[ "$PPID" = "$1" ] || exit 1; shift; read -r _ || exit 1; exec "$@" </dev/null'
"""A parent that has died before the kernel was asked for the death signal is no longer the parent: nothing then runs on."""
_END_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_SETPRIV = shutil.which("setpriv")
"""It asks the kernel for the death signal without a fork of this interpreter, which costs four times as much."""
_PREFIX = [_SETPRIV, "--pdeathsig", "KILL"] if _SETPRIV else []
_libc = ctypes.CDLL(None)


class ContainerProcess:
    """Raises OSError where nothing can be started. Use it in the event loop's thread, which must outlive it."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: Path) -> None:
        self._fd: int | None = None
        with output.open("ab") as file:
            self._process = subprocess.Popen(  # noqa: S603 - to run what manifests say is its purpose
                [*_PREFIX, "/bin/sh", "-c", _GATE, "sh", str(os.getpid()), *command],
                stdin=subprocess.PIPE, stdout=file, stderr=file, env=dict(env), cwd=cwd, start_new_session=True,
                preexec_fn=None if _SETPRIV else end_with_parent,  # noqa: PLW1509 - only where setpriv is missing
            )  # fmt: skip

        self._gate = cast(IO[bytes], self._process.stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self, on_exit: Callable[[int], None]) -> None:
        """Lets it run. `on_exit` gets the exit code, 128 and the signal's number where one ended it, once."""
        self._fd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._fd, self._ended, on_exit)
        with contextlib.suppress(BrokenPipeError), self._gate:  # killed already: its exit is observed
            self._gate.write(b"\n")

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing where it has ended."""
        self._process.send_signal(number)

    def end(self) -> int | None:
        """Kills it and waits, blocking, for a moment; `on_exit` is not called any more. None where it does not go."""
        self._forget_fd()
        self._process.kill()
        self._gate.close()
        try:
            return exit_code(self._process.wait(_END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return None

    def _ended(self, on_exit: Callable[[int], None]) -> None:
        self._forget_fd()
        on_exit(exit_code(self._process.wait()))

    def _forget_fd(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class AbsentProcess:
    """Stands in the place of a process where no cgroup can be created: ends with code 0 after `run_s`, None for never."""

    pid = 0

    def __init__(self, run_s: float | None) -> None:
        self._run_s = run_s
        self._on_exit: Callable[[int], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def release(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        if self._run_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._run_s, self._ended, 0)

    def send_signal(self, number: signal.Signals) -> None:
        """Ends it, as a process that handles no signal."""
        asyncio.get_running_loop().call_soon(self._ended, exit_code(-number))

    def end(self) -> int | None:
        self._ended(exit_code(-signal.SIGKILL), is_reported=False)
        return exit_code(-signal.SIGKILL)

    def _ended(self, code: int, *, is_reported: bool = True) -> None:
        on_exit, self._on_exit = self._on_exit, None
        if self._timer is not None:
            self._timer.cancel()
        if on_exit is not None and is_reported:
            on_exit(code)


def exit_code(returncode: int) -> int:
    """The exit code as a shell and a container runtime count: a signal's number counts from 128 on."""
    return returncode if returncode >= 0 else 128 - returncode


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Called in the child before exec: the kernel sends it this signal when the sandbox dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
