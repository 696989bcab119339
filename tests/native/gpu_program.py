"""gpu_program.c: how it is built, and what it says of its steps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.native.build import NATIVE, build_program

DEADLINE_S = 120.0
"""For anything that a loaded machine may take long for; a program's own time comes on top."""


def linked_to(driver: Path) -> list[str]:
    """Every symbol of a program is a weak one, so the linker must not leave the library out."""
    return [f"-L{driver}", "-Wl,--no-as-needed", "-lcuda", "-ldl"]


def build_gpu_program(directory: Path, driver: Path) -> None:
    """`gpu_program`, and `gpu_program_linked` for the way `link`. Raises CannotBuildError."""
    source = NATIVE / "gpu_program.c"
    build_program(directory / "gpu_program", source, ["-ldl"])
    build_program(directory / "gpu_program_linked", source, ["-DLINKED", *linked_to(driver)])


Step = dict[str, Any]


def steps_in(output: str) -> list[Step]:
    """Of its whole lines so far; libraries may write others."""
    lines = output[: output.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def blocks_in(steps: Sequence[Step]) -> list[int]:
    """What each of the steps that ask for memory got."""
    return [step["blocks"] for step in steps if step["action"] == "alloc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`code` is None where it had to be killed at the deadline."""

    steps: list[Step]
    code: int | None
    error: str

    def step(self, action: str) -> Step:
        """The last one of that name; empty where the program did not come so far."""
        return next((step for step in reversed(self.steps) if step["action"] == action), {})

    def rates(self) -> list[float]:
        return [step["rate"] for step in self.steps if step["action"] == "launch"]

    def blocks(self) -> list[int]:
        return blocks_in(self.steps)


def end_of(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Ended:
    """Kills it at the deadline."""
    is_late = False
    try:
        output, error = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        is_late = True
        process.kill()
        output, error = process.communicate()
    return Ended(steps=steps_in(output), code=None if is_late else process.returncode, error=error)


def finish(process: subprocess.Popen[str]) -> Ended:
    """AssertionError at the deadline."""
    ended = end_of(process)
    assert ended.code is not None, f"the program did not end; {ended}"
    return ended
