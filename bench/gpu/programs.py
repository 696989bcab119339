"""Programs that print one JSON object a line and wait for a line where they print `{"action": "wait"}` (probe.c,
torch_program.py), each bounded in time.

State owned: the child process and what it printed. Only this process is ever signalled, by its PID.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_END_TIMEOUT_S = 5.0
_TAIL_BYTES = 1200
_MOST_LINES = 10_000

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program printed and how it ended. `code` is None where its time was over."""

    lines: list[Line] = field(default_factory=list)
    code: int | None = None
    stderr: str = ""

    def of(self, action: str) -> list[Line]:
        return [line for line in self.lines if line.get("action") == action]

    def first(self, action: str) -> Line:
        """Raises StepFailed, with how the program ended, where it printed no such line."""
        found = [line for line in self.of(action) if "failed" not in line]
        if not found:
            raise StepFailed(self.why())
        return found[0]

    def why(self) -> str:
        """How it ended, in one line."""
        ended = "its time was over" if self.code is None else f"exit code {self.code}"
        failed = "; ".join(f"{line['failed']}: {line.get('error', '')}" for line in self.lines if "failed" in line)
        return "; ".join(filter(None, (ended, failed, " | ".join(self.stderr.splitlines()[-4:]))))


class StepFailed(Exception):  # noqa: N818 - the report's word for it
    """A step of the measurement could not be carried out; the others go on."""


class Program:
    """One child process. `finish` must be called, also after a failure; it ends the process."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by finish
        self._process = subprocess.Popen(  # noqa: S603 - the programs of the package
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=dict(env), cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        self._lines: list[Line] = []
        self._rest = b""
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_wait(self, timeout_s: float) -> bool:
        """Whether it waits now; False where it has ended, or did not come so far in time."""
        seen = len(self._lines)
        self._read(time.monotonic() + timeout_s, lambda: self._is_waiting(seen))
        return self._is_waiting(seen)

    def go(self) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(b"\n")
            stdin.flush()
        except BrokenPipeError:
            return  # it has ended; finish says how

    def kill(self) -> None:
        """At once, with all that it has started: what a program cannot know of."""
        self._kill()

    def finish(self, timeout_s: float) -> Outcome:
        """Waits until it ends, and ends it where the time is over."""
        deadline = time.monotonic() + timeout_s
        code: int | None = None
        try:
            self._read(deadline, lambda: False)
            code = self._process.wait(max(0.0, deadline - time.monotonic()) if self._ended else 0.0)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self._kill()
            raise
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        self._stderr.close()
        return Outcome(lines=self._lines, code=code, stderr=tail)

    def _kill(self) -> None:
        """Its whole process group: `unshare` and what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return  # in a call of the driver that does not return; the report has the step as failed

    def _is_waiting(self, seen: int) -> bool:
        return any(line.get("action") == "wait" for line in self._lines[seen:])

    def _read(self, deadline: float, is_enough: Callable[[], bool]) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not self._ended and not is_enough() and (left_s := deadline - time.monotonic()) > 0:
                if not selector.select(left_s):
                    return
                chunk = os.read(stdout.fileno(), 65536)
                self._ended = not chunk
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                self._lines += [line for text in whole if (line := _parsed(text)) is not None]
                del self._lines[_MOST_LINES:]


def _parsed(text: bytes) -> Line | None:
    """None for what a library before the program prints."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def run_program(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    at_wait: Callable[[int], None] | None = None,
) -> Outcome:
    """Runs it to its end; `at_wait` is called, with 0, 1, …, each time that it waits, and then it goes on."""
    program = Program(command, env=env)
    deadline = time.monotonic() + timeout_s
    number = 0
    try:
        while at_wait is not None and program.until_wait(deadline - time.monotonic()):
            at_wait(number)
            program.go()
            number += 1
    except BaseException:
        program.finish(0.0)
        raise
    return program.finish(deadline - time.monotonic())


def run_in_turn(
    programs: Mapping[str, Program],
    stages: int,
    stage_s: float,
    start_s: float,
    during: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Outcome]:
    """Each waits before each of its stages; first the stage of one, then that of the next, so that what is compared was
    measured in the same seconds. `stage_s` and `start_s` are bounds; `during` is entered for each stage of each. Raises
    StepFailed where one does not start."""
    ready = [False]
    try:
        ready = [program.until_wait(start_s) for program in programs.values()]
        for _ in range(stages if all(ready) else 0):
            for name, program in programs.items():
                with during(name):
                    program.go()
                    program.until_wait(stage_s)
    finally:
        outcomes = {name: program.finish(stage_s if all(ready) else 0.0) for name, program in programs.items()}
    return _all_ready(outcomes, ready)


def run_together(
    programs: Mapping[str, Program],
    stage_s: Sequence[float],
    start_s: float,
    during: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Outcome]:
    """Each waits before each of its stages, and all go on at once when all wait; `during` is entered for each stage.
    Raises StepFailed where one does not start."""
    ready = [False]
    try:
        for stage, seconds in enumerate(stage_s):
            ready = [program.until_wait(start_s) for program in programs.values()]
            if not all(ready):
                break
            with during(stage):
                for program in programs.values():
                    program.go()
                time.sleep(seconds)
    finally:
        outcomes = {name: program.finish(start_s if all(ready) else 0.0) for name, program in programs.items()}
    return _all_ready(outcomes, ready)


def _all_ready(outcomes: dict[str, Outcome], ready: Sequence[bool]) -> dict[str, Outcome]:
    if not all(ready):
        raise StepFailed("; ".join(f"{name}: {outcome.why()}" for name, outcome in outcomes.items()))
    return outcomes
