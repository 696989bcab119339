"""Containers that write nonsense into their `usage`, next to an honest one, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpushare.cells import cell_named, machine_for, run
from tests.gpushare.support_gpushare import GpushareBuilt

pytestmark = pytest.mark.isolation

POINTS = 3.0


@pytest.mark.parametrize("seed", [1, 3, 6, 9])
def test_random_bytes_in_a_region_cost_nobody_else_anything(gpushare: GpushareBuilt, tmp_path: Path, seed: int) -> None:
    """The whole `usage` of one container, twenty times a second; its own program has no more than its share, and ends."""
    cell = cell_named("30+60 1ms sync both")
    honest, liar = run(machine_for(gpushare, tmp_path / "machine", cell), cell, seed=seed)
    assert honest.is_within(30) and liar.later[0] <= 60 + POINTS, (honest, liar)
