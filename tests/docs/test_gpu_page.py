"""What the pages say of a real GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.report import render
from tests.docs import gpu_page
from tests.docs.regulator_page import regulator_cells, regulator_groups

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
        f": {compute} %, the same in each half second\n",
        f": at most {max(memory.values()):,.0f} MiB; managed memory {managed:,.0f}\n",
        f": {100 * lost:.0f} %; a launch takes as long",
        f"had {100 * found['bare', 'two programs']['p0']['of_bare']:.0f} % of the bare rate each",
    ):
        assert words in page
    for name, one in found["mps", "compute 30+60"].items():
        assert max(one["windows"]) - min(one["windows"]) < 0.003, name


def test_what_the_former_regulator_did_says_so() -> None:
    """Two shares, three, and costs alone."""
    text, rows = gpu_page.gpu_measured()[0], rows_of(gpu_page.gpu_measured())
    assert "gpushare with its former regulator" in text
    assert rows["30 + 60, agent stopped"] == ["30.3 + 60.6", ""]
    assert rows["20 + 30 + 50"][0] == "11.1 + 31.0 + 42.8"
    assert "has not run on a real GPU yet" in gpu_page.gpu_regulator()[0]
    assert rows_of(gpu_page.gpu_regulator())["kernels and copies in 99"] == ["83.2"]
    assert gpu_page.gpu_two_shares() == {"gpushare": "35.8 and 45.0", "hami-core": "38.1 and 52.5"}


def test_the_readme_says_which_regulator_shared_the_gpu() -> None:
    """Nobody is to take the former one's numbers for today's."""
    text, _ = table = gpu_page.gpu_numbers()
    assert text.startswith("One NVIDIA H200, driver 580.") and "today's has not run on a GPU" in text
    assert rows_of(table)["30 and 60 cores, together"] == ["35.8 and 45.0 %; a second time 30.9 and 36.7 %"]


def test_a_newer_run_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the former one is said then, and what was not measured has no row."""
    newer: dict[str, Any] = {**MEASURED, "steps": [one for one in MEASURED["steps"] if "," not in one["step"]]}
    del newer["regulator"]
    monkeypatch.setattr(gpu_page, "results", lambda: newer)
    text, rows = gpu_page.gpu_measured()[0], rows_of(gpu_page.gpu_measured())
    assert "former" not in text
    assert [row for row in rows if "stopped" in row] == []
    assert gpu_page.gpu_regulator()[0] == "NVIDIA H200:"
    numbers = gpu_page.gpu_numbers()
    assert "regulator" not in numbers[0] and rows_of(numbers)["30 and 60 cores, together"] == ["35.8 and 45.0 %"]


def test_the_page_says_how_exact_a_share_is_as_it_was_measured() -> None:
    """What a user reads first: alone, memory, and what the cells say of today's regulator."""
    page = (gpu_page.RESULTS.parents[2] / "docs/explanation/isolation.md").read_text(encoding="utf-8")
    rows = rows_of(gpu_page.gpu_measured())
    found = _numbers(rows, "30 alone, 60 alone", "cuLaunchKernelEx, a graph, cooperative, in 30")
    alone = max(abs(one - cores) for cores, one in zip((30, 60, 30, 30, 30), found, strict=True))
    assert f"within {alone:.1f} points alone" in page and rows["30 + 60"][0] == "35.8 + 45.0"
    of_process = _numbers(rows, "MiB of 4,096, 9 kinds: refused after; NVML has of the process")[2:]
    assert f"to {max(abs(one - 4096) for one in of_process):.0f} MiB of the limit" in page
    cells = regulator_cells()
    assert "there 30 and 60 get\n29 and 58" in page and ": 29/30 + 58/61\n" in cells
    plain = [row[3] for row in regulator_groups() if row[0] in ("alone", "two shares", "three and more")]
    assert len(plain) == 3 and f"at most {max(map(float, plain))} points off" in page


def _numbers(rows: dict[str, list[str]], *names: str) -> list[float]:
    """Of gpushare."""
    return [float(one.replace(",", "")) for name in names for one in re.findall(r"[\d][\d,.]*\d", rows[name][0])]
