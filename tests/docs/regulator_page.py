"""What the page of the regulator says of cells.py's cells: tables of bench/measured/regulator.json, which
`python -m tests.gpushare.cells --into bench/measured/regulator.json --as after` writes. What the file has as "before" is of
the library of commit 13071af9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpushare.cells import CELLS, Cell, Result, recorded, shown

RESULTS = Path(__file__).parents[2] / "bench/measured/regulator.json"
_HEADLINES = {
    "30 + 60, kernels of 1 ms": "30+60 1ms both",
    "30 + 60, of 1 ms, each waited for": "30+60 1ms sync both",
    "20 + 30 + 50, of 1 ms, each waited for": "20+30+50 1ms sync",
    "30 + 60, of 100 µs, each waited for": "30+60 100us sync both",
    "30, a function that takes 5 µs 1,000 times, then 50 ms": "data 30 1000x5us+50ms",
}
_GROUPS = {
    "agent away, or no utilization": r"agent (away|dies)|no NVML",
    "lengths that depend on data": r"^data ",
    "kinds and streams": r"^(kinds|streams|fills) ",
    "a program after another one": r"^start ",
    "other turns than 2 ms, other changes of context": r"^driver (turns|changes) ",
    "other drivers: rows, events, launches": r"^driver ",
    "elastic, resized": r"^(elastic|resized) ",
    "inside a MIG instance": r"^instance ",
    "alone": r"^alone \d+ \d+[mu]s( sync)?$",
}


def regulator_groups() -> list[list[str]]:
    """Of each group of cells how many are outside, and how far its worst is off; all of them last."""
    numbers = _numbers()
    groups: dict[str, list[Cell]] = {}
    for cell in CELLS:
        groups.setdefault(_group(cell), []).append(cell)
    rows = []
    for name, cells in groups.items():
        found = [recorded(numbers, cell) for cell in cells]
        worst = max((_points(one) for one in found if one), default=0.0)
        rows.append([name, str(len(cells)), _outside(found), f"{worst:.1f}"])
    return [*rows, ["all", str(len(CELLS)), _outside([recorded(numbers, cell) for cell in CELLS]), ""]]


def regulator_cells() -> str:
    """Some cells' percent of the GPU's time, and the groups that have a cell outside."""
    numbers = _numbers()
    lines = [f"- {text}: {_later(numbers, name)}" for text, name in _HEADLINES.items()]
    *groups, (_, cells, outside, _) = regulator_groups()
    lines += ["", f"Outside are {outside} of {cells} cells:", ""]
    lines += [
        f"- {name}: {those} of {count}, by at most {worst}" for name, count, those, worst in groups if those != "0"
    ]
    return "\n".join(lines)


def _numbers() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["after"]


def _group(cell: Cell) -> str:
    of_name = next((group for group, pattern in _GROUPS.items() if re.search(pattern, cell.name)), None)
    count = len(cell.tenants)
    if of_name == "lengths that depend on data":
        return f"{of_name}, {'alone' if count == 1 else 'next to another'}"
    return of_name or ("ways to launch" if count == 1 else "two shares" if count == 2 else "three and more")


def _outside(found: Sequence[Result | None]) -> str:
    """In brackets how many more in the first second alone."""
    later = sum(one is None or bool(one.outside()) for one in found)
    first = sum(one is not None and not one.outside() and bool(one.outside_at_first()) for one in found)
    return f"{later} (+{first})" if first else str(later)


def _points(result: Result) -> float:
    """How far the share that is furthest off is, after the first second."""
    return max(
        max(found.later[0] - each.expected, each.expected - found.later[1], 0.0)
        if not each.bound
        else max(0.0, (bare or 0.0) - found.later[0])
        for each, found, bare in zip(result.cell.tenants, result.found, result.bare, strict=True)
    )


def _later(numbers: Mapping[str, Any], name: str) -> str:
    """Net, or net/gross."""
    [cell] = [cell for cell in CELLS if cell.name == name]
    result = recorded(numbers, cell)
    return shown([found.later for found in result.found]) if result else "did not end"
