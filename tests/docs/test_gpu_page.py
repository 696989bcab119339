"""What the pages say of a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.report import render
from tests.docs import gpu_page

MEASURED = gpu_page.results()


def rows_of(table: gpu_page.Table) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in table[1]}


def test_the_recorded_results_are_those_of_a_run() -> None:
    """The report of the measurement can be made of them, and the tables name the GPU."""
    assert "NVIDIA H200" in render(MEASURED)
    assert gpu_page.gpu_measured()[0].startswith("NVIDIA H200, 143,771 MiB")


def test_what_the_former_regulator_did_says_so() -> None:
    """Two shares, three, and costs alone."""
    text, _ = table = gpu_page.gpu_regulator()
    assert "has not run on a real GPU yet" in text
    assert rows_of(table)["30 + 60, agent stopped"] == ["30.3 + 60.6", "", ""]
    assert rows_of(table)["20 + 30 + 50"][0] == "11.1 + 31.0 + 42.8"


def test_the_readme_says_which_regulator_shared_the_gpu() -> None:
    """Nobody is to take the former one's numbers for today's."""
    text, _ = table = gpu_page.gpu_numbers()
    assert text.startswith("One NVIDIA H200, driver 580.") and "today's has not run on a GPU" in text
    assert rows_of(table)["30 and 60 cores, together"] == ["35.8 and 45.0, again 30.9 and 36.7 %"]


def test_a_newer_run_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the former one is said then, and what was not measured has no row."""
    newer: dict[str, Any] = {**MEASURED, "steps": [one for one in MEASURED["steps"] if "," not in one["step"]]}
    del newer["regulator"]
    monkeypatch.setattr(gpu_page, "results", lambda: newer)
    text, _ = table = gpu_page.gpu_regulator()
    assert text == "NVIDIA H200:"
    assert [row for row in rows_of(table) if "stopped" in row] == []
    text, _ = table = gpu_page.gpu_numbers()
    assert "regulator" not in text and rows_of(table)["30 and 60 cores, together"] == ["35.8 and 45.0 %"]
