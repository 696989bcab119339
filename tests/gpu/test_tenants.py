"""What the GPU measurement makes of programs that compute at the same time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.gpu.driver import rows_shape, turns_of
from bench.gpu.programs import Program, StepFailed, run_in_turn, run_together
from bench.gpu.tenants import usage_columns

ROOT = Path(__file__).parents[2]
STAGES = """
import sys, time
for stage in range(2):
    print('{"action": "wait"}', flush=True)
    sys.stdin.readline()
    print('{"action": "stage", "at": %r}' % time.monotonic(), flush=True)
    time.sleep(0.05)
"""
MS = 1_000_000


def programs(*scripts: str) -> dict[str, Program]:
    return {str(i): Program([sys.executable, "-c", one], env=dict(os.environ)) for i, one in enumerate(scripts)}


def test_what_is_measured_in_turn_alternates() -> None:
    """The first stage of one, the first of the other, then the second ones."""
    outcomes = run_in_turn(programs(STAGES, STAGES), 2, 10.0, 10.0)
    first, second = ([line["at"] for line in outcome.of("stage")] for outcome in outcomes.values())
    assert first[0] < second[0] < first[1] < second[1]


def test_what_runs_together_begins_at_once() -> None:
    """Each stage when all wait for it."""
    outcomes = run_together(programs(STAGES, STAGES), [0.05, 0.05], 10.0)
    first, second = ([line["at"] for line in outcome.of("stage")] for outcome in outcomes.values())
    assert max(first[0], second[0]) < min(first[1], second[1])


@pytest.mark.parametrize(
    "begins", [lambda made: run_in_turn(made, 2, 10.0, 10.0), lambda made: run_together(made, [0.1], 10.0)]
)
def test_one_that_does_not_start_is_the_reason(begins: object) -> None:
    """And the others are ended."""
    assert callable(begins)
    with pytest.raises(StepFailed, match="no GPU"):
        begins(programs(STAGES, "raise SystemExit('no GPU')"))


def test_turns_are_read_from_the_timer() -> None:
    """Two programs with turns of 2 ms and 0.13 ms between them: where both compute."""
    period, loss = 4 * MS + 260_000, 130_000
    first = [[at * period, at * period + 2 * MS] for at in range(20)]
    second = [[begin + 2 * MS + loss, end + 2 * MS + loss] for begin, end in first]
    shape = turns_of([[[0, 1000], *first[1:]], second])
    assert (shape["turn_ms"], shape["away_ms"], shape["loss_us"]) == (2.0, 2.26, 130.0)
    assert shape["lost_percent"] == pytest.approx(6.1, abs=0.2)
    assert set(turns_of([[], first]).values()) == {None}


def test_rows_are_counted_by_process() -> None:
    """A row that several answers have counts once."""
    rows = [[100, 7, 50, 99], [200, 7, 50, 99], [200, 8, 150, 99], [300, 7, 250, 96]]
    assert rows_shape(rows) == {"answers": 3, "most_processes": 2, "rows_by_process": [2, 1], "percent": 98.2}
    assert rows_shape([])["percent"] is None


def test_the_columns_of_a_series_are_the_librarys() -> None:
    """As gpushare_agent's own reader has them."""
    columns = usage_columns((ROOT / "native/gpushare/format.h").read_text())
    assert columns["tokens"] == (24, "q")
    assert [columns[name] for name in ("launched", "launches", "throttled")] == [(48, "Q"), (56, "Q"), (64, "Q")]
    assert columns["scale"][1] == "d"
    assert max(at for at, _ in columns.values()) < 256
