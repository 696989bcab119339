"""The report of a GPU measurement, from recorded results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.report import render
from bench.gpu.run import RESULTS as RESULTS_NAME
from bench.gpu.run import CannotRun, merge, write_results

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
    """By NVML's number of the process, which is exact to a granule."""
    results = recorded()
    step = next(s for s in results["steps"] if (s["isolation"], s["step"]) == ("hami-core", "memory plain"))
    step["found"]["processes_mib"] = {"7": 66.0, "8": 4608.0}
    assert row_of(render(results), "plain", "Memory")[1] == "3794 (4608), **512 over**, CUDA_ERROR_OUT_OF_MEMORY"


def test_what_the_agent_warned_of_stands_below() -> None:
    """Such as a limit that the driver did not take."""
    results = recorded()
    step = next(s for s in results["steps"] if (s["isolation"], s["step"]) == ("hami-core", "view"))
    step["found"]["agent_warned"] = ["container main runs without its memory limit"]
    assert "The agent warned: hami-core: container main runs without its memory limit." in render(results)


def test_compute_is_shown_against_the_bare_machine() -> None:
    """A percentage and the spread of its windows, for each share alone and next to the other."""
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


def part(folder: Path, *steps: tuple[str, str], **changed: Any) -> Path:
    """A folder with results of these steps, which are (name, state)."""
    results = recorded() | changed
    of_name = {step["step"]: step for step in results["steps"] if step["isolation"] == "hami-core"}
    results["steps"] = [{**of_name[name], "state": state, "reason": "late"} for name, state in steps]
    folder.mkdir()
    (folder / RESULTS_NAME).write_text(json.dumps(results))
    return folder


def test_two_parts_make_one_report(tmp_path: Path) -> None:
    """Of a step that both have, the one that was done; their times together."""
    first = part(tmp_path / "1", ("pods", "done"), ("compute 30", "skipped"), took_s=100.0)
    second = part(tmp_path / "2", ("pods", "failed"), ("compute 30", "done"), ("compute 60", "done"), took_s=50.5)
    merge([first, second], tmp_path / "both")
    merged = json.loads((tmp_path / "both" / RESULTS_NAME).read_text())
    assert [(step["step"], step["state"]) for step in merged["steps"]] == [
        ("pods", "done"), ("compute 30", "done"), ("compute 60", "done"),
    ]  # fmt: skip
    assert merged["took_s"] == 150.5
    assert "150.5 s" in (tmp_path / "both" / "report.md").read_text()


def test_parts_of_two_gpus_are_not_merged(tmp_path: Path) -> None:
    """Nor a folder without results."""
    first = part(tmp_path / "1", ("pods", "done"))
    other = part(tmp_path / "2", ("pods", "done"), machine=recorded()["machine"] | {"gpu": "another"})
    with pytest.raises(CannotRun, match="different GPUs"):
        merge([first, other], tmp_path / "both")
    with pytest.raises(CannotRun, match="no results"):
        merge([first, tmp_path], tmp_path / "both")


def test_a_row_of_a_series_is_one_line(tmp_path: Path) -> None:
    """And the text is the same JSON."""
    results = recorded()
    results["steps"][0]["found"]["series"] = [[1, 2.5, "a  b"], [None, "[", "x\n{"]]
    write_results(tmp_path, results)
    text = (tmp_path / RESULTS_NAME).read_text()
    assert json.loads(text) == results
    assert '[1, 2.5, "a  b"]' in text


def test_a_machine_without_programs_still_has_a_report() -> None:
    """Where CUDA does not start, the machine and the reason."""
    results = recorded()
    failed = {"state": "failed", "reason": "exit code 1; cuInit: CUDA_ERROR_NO_DEVICE", "seconds": 0.1, "found": None}
    results["steps"] = [{"isolation": "bare", "step": "facts", **failed}]
    report = render(results)
    assert "CUDA_ERROR_NO_DEVICE" in report
    assert "## Memory" not in report
