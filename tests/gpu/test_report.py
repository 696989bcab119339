"""The report of a GPU measurement, from recorded results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu.report import render

RESULTS = Path(__file__).parents[1] / "data" / "gpu" / "results.json"
"""Recorded on the fake driver of tests/native with the real library of HAMi-core: its numbers say nothing of a GPU."""


def recorded() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    return results


def row_of(report: str, first_cell: str, heading: str) -> list[str]:
    """The cells of a row in the section of a heading."""
    section = report.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {first_cell} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_limit_that_holds_and_one_that_does_not_read_differently() -> None:
    """What a share gave, what the GPU had in use for it, and why it was not more."""
    report = render(recorded())
    assert row_of(report, "plain", "Memory") == [
        "plain", "3794 (4095), CUDA_ERROR_OUT_OF_MEMORY", "**6144 (6445), no limit met**",
    ]  # fmt: skip
    assert row_of(report, "pool", "Memory")[1] == "**6144 (6445), no limit met**"


def test_what_exceeds_the_share_is_named() -> None:
    """A limit that comes too late."""
    results = recorded()
    step = next(s for s in results["steps"] if (s["isolation"], s["step"]) == ("hami-core", "memory plain"))
    step["found"]["gpu_mib"] = 4608.0
    assert row_of(render(results), "plain", "Memory")[1] == "3794 (4608), **512 over**, CUDA_ERROR_OUT_OF_MEMORY"


def test_what_the_agent_warned_of_stands_below() -> None:
    """Such as a limit that the driver did not take."""
    results = recorded()
    step = next(s for s in results["steps"] if (s["isolation"], s["step"]) == ("hami-core", "view"))
    step["found"]["agent_warned"] = ["container main runs without its memory limit"]
    assert "The agent warned: hami-core: container main runs without its memory limit." in render(results)


def test_compute_is_shown_against_the_bare_machine() -> None:
    """A percentage and the spread of its windows, for each share alone and beside the other."""
    results = recorded()
    step = next(s for s in results["steps"] if (s["isolation"], s["step"]) == ("hami-core", "compute 30"))
    step["found"]["a"] = {"error": "", "of_bare": 0.312, "windows": [0.05, *[0.3] * 8, 0.6], "launches_per_s": 300.0}
    assert row_of(render(results), "hami-core", "Compute: launches")[1] == "31 % (30–60)"


def test_steps_that_failed_or_were_skipped_are_listed_with_the_reason() -> None:
    """And the report of a run that has not ended says so."""
    results = recorded()
    del results["took_s"]
    results["steps"] = [
        *results["steps"][:6],
        {"isolation": "mps", "step": "start", "state": "skipped", "reason": "no | daemon", "seconds": 0, "found": None},
    ]
    report = render(results)
    assert "| mps | start | skipped | no / daemon |" in report
    assert "not ended" in report


def test_a_machine_without_programs_still_has_a_report() -> None:
    """Where CUDA does not start, the machine and the reason."""
    results = recorded()
    failed = {"state": "failed", "reason": "exit code 1; cuInit: CUDA_ERROR_NO_DEVICE", "seconds": 0.1, "found": None}
    results["steps"] = [{"isolation": "bare", "step": "facts", **failed}]
    report = render(results)
    assert "CUDA_ERROR_NO_DEVICE" in report
    assert "## Memory" not in report
