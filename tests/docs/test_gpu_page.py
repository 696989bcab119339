"""What the pages say of a real GPU."""

from __future__ import annotations

from pathlib import Path
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


def test_the_guide_to_isolations_has_what_mps_did() -> None:
    """The compute is that of the table; memory, lost work and two programs without MPS are those of the run."""
    found = {(one["isolation"], one["step"]): one["found"] for one in MEASURED["steps"]}
    memory = {step: of["gpu_mib"] for (isolation, step), of in found.items() if isolation == "mps" and "memory" in step}
    managed = memory.pop("memory managed")
    compute = rows_of(gpu_page.gpu_measured())["30 alone, 60 alone"][1].replace(", ", " and ")
    lost = 1 - found["mps", "torch"]["matmul"]["tflops"] / found["bare", "torch"]["matmul"]["tflops"]
    page = (Path(__file__).parents[2] / "docs/how-to/choose-isolation.md").read_text(encoding="utf-8")
    for words in (
        f"| {compute} %, the same in each half second |",
        f"| at most {max(memory.values()):,.0f} MiB; managed memory {managed:,.0f} |",
        f"| {100 * lost:.0f} %; a launch takes as long",
        f"had {100 * found['bare', 'two programs']['p0']['of_bare']:.0f} % of the bare rate each",
    ):
        assert words in page
    for name, one in found["mps", "compute 30+60"].items():
        assert max(one["windows"]) - min(one["windows"]) < 0.003, name


def test_what_the_former_regulator_did_says_so() -> None:
    """Two shares, three, and costs alone."""
    text, _ = table = gpu_page.gpu_regulator()
    assert "has not run on a real GPU yet" in text
    assert rows_of(table)["30 + 60, agent stopped"] == ["30.3 + 60.6", "", ""]
    assert rows_of(table)["20 + 30 + 50"][0] == "11.1 + 31.0 + 42.8"


def test_a_newer_run_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the former one is said then, and what was not measured has no row."""
    newer: dict[str, Any] = {**MEASURED, "steps": [one for one in MEASURED["steps"] if "," not in one["step"]]}
    del newer["regulator"]
    monkeypatch.setattr(gpu_page, "results", lambda: newer)
    text, _ = table = gpu_page.gpu_regulator()
    assert text == "NVIDIA H200:"
    assert [row for row in rows_of(table) if "stopped" in row] == []
    assert gpu_page.gpu_error() == "alone at most 0.2 points, next to others at most 15"
