"""What was measured, with its target: the table, and the same as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement in the unit that is shown. A target of None is none. `failed` says what else than time was wrong."""

    name: str
    unit: str
    runs: int
    median: float
    p99: float
    target_median: float | None = None
    target_p99: float | None = None
    failed: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"missed: {self.failed}"
        targets = ((self.median, self.target_median), (self.p99, self.target_p99))
        if all(target is None for _, target in targets):
            return ""
        return "met" if all(target is None or value <= target for value, target in targets) else "missed"


def row(
    name: str,
    values: Sequence[float],
    *,
    unit: str = "ms",
    target_median: float | None = None,
    target_p99: float | None = None,
    failed: str = "",
    note: str = "",
) -> Row:
    """The row of `values`, of which there must be one at least."""
    return Row(
        name=name,
        unit=unit,
        runs=len(values),
        median=statistics.median(values),
        p99=percentile(values, 0.99),
        target_median=target_median,
        target_p99=target_p99,
        failed=failed,
        note=note,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed: the worst one, where there are below 100."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def print_table(rows: Sequence[Row], console: Console, title: str) -> None:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("what", overflow="fold")
    for heading in ("runs", "median", "p99", "target median", "target p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in rows:
        style = "red" if one.verdict.startswith("missed") else None
        table.add_row(
            one.name,
            str(one.runs),
            shown(one.median, one.unit),
            shown(one.p99, one.unit) if one.runs > 1 else "",
            shown(one.target_median, one.unit),
            shown(one.target_p99, one.unit),
            one.verdict,
            style=style,
        )
    console.print(table)
    for note in dict.fromkeys(one.note for one in rows if one.note):
        names = "; ".join(one.name for one in rows if one.note == note)
        console.print(f"- {names}: {note}", soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one part of the benchmark, and the machine with its load."""

    name: str
    machine: str
    rows: list[Row]


def as_json(parts: Sequence[Part]) -> str:
    found = {
        part.name: {
            "machine": part.machine,
            "measurements": [{**asdict(one), "verdict": one.verdict} for one in part.rows],
        }
        for part in parts
    }
    return json.dumps(found, indent=2) + "\n"


def from_json(text: str) -> dict[str, Part]:
    """What `as_json` wrote, by name."""
    # What is worked out from the others is written for readers of the file alone.
    return {
        name: Part(
            name=name,
            machine=found["machine"],
            rows=[
                Row(**{key: value for key, value in one.items() if key != "verdict"}) for one in found["measurements"]
            ],
        )
        for name, found in json.loads(text).items()
    }


def shown(value: float | None, unit: str) -> str:
    """With as many digits as mean something; None is empty."""
    if value is None:
        return ""
    digits = 0 if unit == "bytes" else 3 if value < 0.1 else 2 if value < 10 else 1
    return f"{value:,.{digits}f} {unit}"


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel reports no VmRSS")
