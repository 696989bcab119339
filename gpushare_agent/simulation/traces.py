"""Reads clusters and workloads from CSV files: the project's own columns, or those of Alibaba's cluster-trace-gpu-v2023.

The header shows which. docs/how-to/simulate.md lists the columns, and the assumptions for the values that the trace lacks:
the memory of its GPUs and of its pods.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from gpushare_agent.core.model.errors import Corrupt, NotFound
from gpushare_agent.core.model.names import CORES_PER_GPU
from gpushare_agent.simulation.workload import (
    SMALLEST_MEMORY_MIB,
    Arrival,
    Cluster,
    Machine,
    Shape,
    Workload,
    memory_of,
)

N = TypeVar("N", int, float)
MAX_ROWS = 1_000_000
MAX_GPUS = 64
MAX_MEMORY_MIB = 1 << 24
MAX_SECONDS = 1e9
_MILLI_PER_CORE = 10

NODE_COLUMNS = ("name", "gpus", "memory_mib", "model")
POD_COLUMNS = ("name", "arrival_s", "duration_s", "cores", "memory_mib")
"""The columns of pods; `models` and `gang` may be left out."""
TRACE_NODE_COLUMNS = ("sn", "gpu", "model")
TRACE_POD_COLUMNS = (
    "name", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip


class _Row(Struct, frozen=True, kw_only=True):
    """One line of a file. Its methods raise Corrupt, with the file and the line."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        value = self.cells[column].strip()
        # What is missing stands in the trace as nan.
        return "" if value.lower() == "nan" else value

    def name(self, column: str) -> str:
        value = self.text(column)
        if not value or len(value) > 253 or not value.isprintable():
            raise self.wrong(column, "a name of 1 to 253 printable characters")
        return value

    def whole(self, column: str, most: int, least: int = 0) -> int:
        return self._number(int, column, least, most, f"a whole number from {least} to {most}")

    def seconds(self, column: str) -> float:
        return self._number(float, column, 0, MAX_SECONDS, f"seconds from 0 to {MAX_SECONDS:.0f}")

    def _number(self, kind: Callable[[str], N], column: str, least: float, most: float, expected: str) -> N:
        with suppress(ValueError):
            value = kind(self.text(column))
            if least <= value <= most:
                return value
        raise self.wrong(column, expected)

    def models(self, column: str) -> tuple[str, ...]:
        return tuple(sorted({model.strip() for model in self.text(column).split("|") if model.strip()}))

    def wrong(self, column: str, expected: str) -> Corrupt:
        return Corrupt(f"{self.path}, line {self.line}: {column} is {self.cells[column][:80]!r}, expected {expected}")


def read_cluster(path: Path) -> Cluster:
    """The nodes that have GPUs. Raises NotFound, Corrupt."""
    nodes = {}
    for row, is_trace in _rows(path, NODE_COLUMNS, TRACE_NODE_COLUMNS):
        model, gpus = row.text("model"), row.whole("gpu" if is_trace else "gpus", MAX_GPUS)
        memory_mib = memory_of(model) if is_trace else row.whole("memory_mib", MAX_MEMORY_MIB, 1)
        name = row.name("sn" if is_trace else "name")
        if name in nodes:
            raise Corrupt(f"{path}, line {row.line}: node {name} is listed twice")
        # Nodes without GPUs are in the trace as well: none of the pods goes there.
        if gpus:
            nodes[name] = Machine(model=model, gpus=gpus, memory_mib=memory_mib).node(name)
    if not nodes:
        raise Corrupt(f"{path}: no node of it has a GPU, so there is nothing to simulate on")
    return Cluster(source=path.name, nodes=tuple(nodes[name] for name in sorted(nodes)))


def read_workload(path: Path, *, block_mib: int) -> Workload:
    """The pods that ask for GPUs, in the order of their arrival, the first of them at 0. Raises NotFound, Corrupt."""
    arrivals: list[Arrival] = []
    skipped: Counter[str] = Counter()
    names: set[str] = set()
    for row, is_trace in _rows(path, POD_COLUMNS, TRACE_POD_COLUMNS):
        read = _trace_arrival(row, block_mib) if is_trace else _arrival(row, block_mib)
        # Why it is left out; the result counts the reasons.
        if isinstance(read, str):
            skipped[read] += 1
            continue
        if read.name in names:
            raise Corrupt(f"{path}, line {row.line}: pod {read.name} is listed twice")
        names.add(read.name)
        arrivals.append(read)
    if not arrivals:
        raise Corrupt(f"{path}: no pod of it asks for a GPU, so there is nothing to replay")
    # A trace counts from its own beginning, and its first pods may ask for no GPU.
    begin = min(arrival.at_s for arrival in arrivals)
    ordered = sorted(arrival._replace(at_s=arrival.at_s - begin) for arrival in arrivals)
    return Workload(source=path.name, arrivals=tuple(ordered), skipped=skipped)


def _arrival(row: _Row, block_mib: int) -> Arrival | str:
    cores, memory_mib = row.whole("cores", MAX_GPUS * CORES_PER_GPU), row.whole("memory_mib", MAX_MEMORY_MIB)
    if not cores and not memory_mib:
        return "asks for nothing of a GPU"
    models = row.models("models") if "models" in row.cells else ()
    in_gang = "gang" in row.cells and row.text("gang")
    return Arrival(
        at_s=row.seconds("arrival_s"),
        name=row.name("name"),
        shape=Shape(cores, -(-memory_mib // block_mib), models),
        duration_s=row.seconds("duration_s"),
        gang=row.name("gang") if in_gang else "",
    )


def _trace_arrival(row: _Row, block_mib: int) -> Arrival | str:
    gpus, milli = row.whole("num_gpu", MAX_GPUS), row.whole("gpu_milli", 1000)
    if not gpus or not milli:
        return "asks for nothing of a GPU"
    created, deleted = row.seconds("creation_time"), row.seconds("deletion_time")
    # How long it ran, without its wait there: waits are what the replay finds out.
    began = row.seconds("scheduled_time") if row.text("scheduled_time") else created
    if deleted < began:
        return "ends before it begins"
    models = row.models("gpu_spec")
    return Arrival(
        at_s=created,
        name=row.name("name"),
        shape=_trace_shape(gpus, milli, models, block_mib),
        duration_s=deleted - began,
    )


def _trace_shape(gpus: int, milli: int, models: tuple[str, ...], block_mib: int) -> Shape:
    """Several GPUs are always whole; a share asks for as large a part of the memory as of the cores."""
    if gpus > 1 or milli == 1000:
        return Shape(gpus * CORES_PER_GPU, 0, models)
    smallest_mib = min((memory_of(model) for model in models), default=SMALLEST_MEMORY_MIB)
    # 991 thousandths would round up to a whole GPU, which is another kind of request.
    cores = min(CORES_PER_GPU - 1, -(-milli // _MILLI_PER_CORE))
    return Shape(cores, max(1, smallest_mib * milli // 1000 // block_mib), models)


def _rows(path: Path, own: tuple[str, ...], trace: tuple[str, ...]) -> Iterator[tuple[_Row, bool]]:
    """Every line, and whether the file is a trace's."""
    try:
        # Spreadsheets write a byte order mark before the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            header = set(reader.fieldnames or ())
            is_trace = _is_trace(path, header, own, trace)
            for number, cells in enumerate(reader):
                # A pipe, or the wrong file, would be read until memory is full.
                if number >= MAX_ROWS:
                    raise Corrupt(f"{path}: more than {MAX_ROWS} lines; split it")
                yield _Row(path=path, line=reader.line_num, cells=cells), is_trace
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror or error}; name a CSV file") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise Corrupt(f"{path} is no CSV file in UTF-8: {error}") from error


def _is_trace(path: Path, header: set[str], own: tuple[str, ...], trace: tuple[str, ...]) -> bool:
    lacks_own, lacks_trace = ([one for one in required if one not in header] for required in (own, trace))
    if lacks_own and lacks_trace:
        raise Corrupt(
            f"{path}: the first line must name the columns {', '.join(own)}, or those of a trace ({', '.join(trace)}); "
            f"it lacks {', '.join(lacks_own)} of the former and {', '.join(lacks_trace)} of the latter"
        )
    return bool(lacks_own)
