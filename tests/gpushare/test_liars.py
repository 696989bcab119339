"""Containers that write nonsense into their `usage`, next to an honest one, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpushare.cells import cell_named, machine_for, run
from tests.gpushare.support_gpushare import GpushareBuilt

pytestmark = pytest.mark.isolation

POINTS, MOST_LOST = 3.0, 4.0


@pytest.mark.parametrize("seed", [1, 3, 6, 9])
def test_random_bytes_in_a_region_cost_nobody_else_anything(gpushare: GpushareBuilt, tmp_path: Path, seed: int) -> None:
    """The whole `usage` of one container, twenty times a second; its own program has no more than its share, and ends."""
    cell = cell_named("30+60 1ms sync both")
    honest, liar = run(machine_for(gpushare, tmp_path / "machine", cell), cell, lies=str(seed))
    assert honest.is_within(30) and liar.later[0] <= 60 + POINTS, (honest, liar)


@pytest.mark.parametrize("name", ["30+60 1ms sync both", "30+60 50ms sync both"])
def test_one_that_hides_what_it_computes_takes_little_from_others(
    gpushare: GpushareBuilt, tmp_path: Path, name: str
) -> None:
    """A hundred times a second its bucket is full, and its counters say that it has done nothing."""
    cell = cell_named(name)
    honest, liar = run(machine_for(gpushare, tmp_path / "machine", cell), cell, lies="hides")
    assert liar.later[0] > 60 + POINTS, "it lies in vain: this asks nothing"
    assert honest.later[0] - MOST_LOST <= 30 <= honest.later[1] + MOST_LOST, (honest, liar)
