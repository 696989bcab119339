"""MPS for tests: directories, a daemon of the sandbox's, and a control program that misbehaves on demand."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from gpushare_agent.agent.isolation.mps.control import MpsControl
from tests.support_deadline import DEADLINE_S as DEADLINE_S  # noqa: PLC0414 - exported on
from tests.support_deadline import poll_until as poll_until  # noqa: PLC0414

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class MpsPlace:
    """A directory with all that MPS needs, and the files that tell the fake program how to behave."""

    root: Path

    @property
    def pipe(self) -> Path:
        return self.root / "pipe"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def program(self) -> Path:
        return self.root / "nvidia-cuda-mps-control"

    def control(self, *, timeout_s: float = DEADLINE_S, program: Path | None = None) -> MpsControl:
        return MpsControl(program or self.program, self.pipe, self.logs, timeout_s=timeout_s)

    def flags(self) -> list[str]:
        return [f"--mps-pipe={self.pipe}", f"--mps.control={self.program}"]

    def becomes(self, behaviour: str, text: str = "") -> None:
        (self.root / behaviour).write_text(text)

    def no_longer(self, behaviour: str) -> None:
        (self.root / behaviour).unlink()

    def record(self, beginning: str = "") -> list[str]:
        """What the fake noted, in order, of the lines that begin so."""
        path = self.root / "record"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(beginning)]

    def daemons(self) -> list[int]:
        """PIDs of all daemons that were started."""
        return [int(line.split()[1]) for line in self.record("daemon ")]


def mps_place(root: Path) -> MpsPlace:
    """The directories and the fake program, not running."""
    place = MpsPlace(root)
    place.pipe.mkdir()
    place.logs.mkdir()
    words = [sys.executable, str(ROOT / "tests/native/fake_mps_control.py"), str(root)]
    script(place.program, f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(words)} "$@"')
    return place


def script(path: Path, text: str) -> Path:
    """A shell script in place of the control program."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
