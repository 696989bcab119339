"""What the endurance run's programs call wrong (share_program.py), so that a limit that is lost is seen."""

from __future__ import annotations

import json
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.e2e.share_program import wrong

CORES, MEMORY_MIB = 20, 1024
KEPT: dict[str, dict[str, Any]] = {
    "info": {"total_mib": 1024},
    "alloc": {"blocks": 11},
    "launch": {"kernels": 300, "seconds": 1.0},
}


def found(steps: dict[str, dict[str, Any]], code: int = 0) -> list[str]:
    lines = [json.dumps({"action": action} | step) for action, step in steps.items()]
    return list(wrong(CompletedProcess([], code, "\n".join(lines), ""), CORES, MEMORY_MIB))


def test_a_program_within_its_share_is_not_wrong() -> None:
    """With what it saved while it was idle; a machine that is busy makes it slower, which is not wrong either."""
    assert found(KEPT) == [] and found(KEPT | {"launch": {"kernels": 1, "seconds": 9.0}}) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"info": {"total_mib": 24576}}, "memory is 24576 MiB, not 1024"),
        ({"alloc": {"blocks": 12}}, "took 12 blocks of 64 MiB of 1024 MiB"),
        ({"alloc": {"blocks": 10}}, "took 10 blocks"),
        ({"launch": {"kernels": 500, "seconds": 1.0}}, "kept the GPU busy for 0.5 s of 1.0, with 20 cores"),
        ({"launch": {"kernels": 0, "seconds": 1.0}}, "kept the GPU busy for 0.0 s"),
    ],
)
def test_a_program_that_has_more_or_less_is_wrong(changed: dict[str, dict[str, Any]], text: str) -> None:
    [only] = found(KEPT | changed)
    assert text in only


def test_a_program_that_fails_is_wrong() -> None:
    assert "ended with 11" in found({}, code=11)[0]
