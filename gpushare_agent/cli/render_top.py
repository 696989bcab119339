"""The node's GPUs and their containers as a table, from the node's document. Pure: values in, a table out.

A narrow terminal gets fewer columns, in the order of DROPPED_FIRST; the first column and what
changes stay.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from gpushare_agent.cli.render_text import (
    GAP,
    PIPE_WIDTH,
    counted,
    gpu_label,
    health_reasons,
    health_style,
    health_word,
    mib,
    out_of_service,
    percent,
    plain,
    plain_cell,
    width_of,
)

FIRST = "GPU / CONTAINER"
COLUMNS = (FIRST, "STATE", "CORES", "SM %", "USED MiB", "ALLOC MiB", "TOTAL MiB", "TEMP °C", "POWER W")
STATE = "STATE"
DROPPED_FIRST = ("POWER W", "TEMP °C", "TOTAL MiB", "ALLOC MiB", STATE)
MIN_FIRST_WIDTH = 16
SHORT_STATE_WIDTH = len("Unhealthy")
REASON_INDENT = "    "
_PHASES = {"Running": "green", "Pending": "yellow", "Failed": "red", "Terminating": "magenta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row. A GPU's is bold; `style` is the state's colour. A row of one cell is as wide as all columns."""

    cells: tuple[str, ...]
    is_gpu: bool
    style: str = ""


def top_lines(document: dict[str, Any], width: int = PIPE_WIDTH) -> list[Line]:
    """A line for each GPU, below it why it is out of service, as many lines as that needs in this width, and one line for
    each of its containers and for each unattributed process."""
    lines: list[Line] = []
    for gpu in document["cards"]:
        lines += [_gpu_line(gpu), *_reason_lines(gpu, width)]
        lines += [
            _container_line(container, part)
            for container in document["containers"]
            for part in container["cards"]
            if part["uuid"] == gpu["uuid"]
        ]
        lines += [_unattributed_line(process) for process in gpu["strangers"]]
    unplaced = [container for container in document["containers"] if not container["cards"]]
    if unplaced:
        lines.append(Line(cells=("on no GPU that the driver names", *([""] * (len(COLUMNS) - 1))), is_gpu=True))
        lines += [_container_line(container, None) for container in unplaced]
    return lines


def _gpu_line(gpu: dict[str, Any]) -> Line:
    usage = gpu["usage"] or {}
    state = health_word(gpu)
    return Line(
        cells=(
            f"{gpu_label(gpu)} {gpu['name']}",
            state,
            f"{gpu['cores']['allocated']}/{gpu['cores']['capacity']}",
            percent(usage.get("sm_ratio")),
            mib(usage.get("memory_used_bytes")),
            mib(gpu["memory"]["allocated_bytes"]),
            mib(gpu["memory"]["capacity_bytes"]),
            _number(usage.get("temperature_celsius")),
            _power(usage),
        ),
        is_gpu=True,
        style=health_style(state),
    )


def _reason_lines(gpu: dict[str, Any], width: int) -> list[Line]:
    style = health_style(health_word(gpu))
    text_width = max(1, width - len(REASON_INDENT))
    return [
        Line(cells=(REASON_INDENT + part,), is_gpu=False, style=style)
        for reason in health_reasons(gpu)
        for part in textwrap.wrap(reason, text_width)
    ]


def _container_line(container: dict[str, Any], part: dict[str, Any] | None) -> Line:
    usage = (part or {}).get("usage") or {}
    limit = container["memory_bytes"] if part is None else part["memory_bytes"]
    name = f"  {container['namespace']}/{container['pod']}/{container['container']}"
    cells = (
        name,
        container["phase"],
        _cores(container),
        percent(usage.get("sm_ratio")),
        mib(usage.get("memory_bytes")),
        mib(limit),
        "",
        "",
        "",
    )
    return Line(cells=cells, is_gpu=False, style=_PHASES.get(container["phase"], ""))


def _cores(container: dict[str, Any]) -> str:
    """`30`, elastic `30–60`, `whole` for a container that has its GPUs for itself."""
    if container["is_whole"]:
        return "whole"
    ceiling = container["core_limit"]
    return f"{container['cores']}–{ceiling}" if ceiling and ceiling > container["cores"] else str(container["cores"])


def _unattributed_line(process: dict[str, Any]) -> Line:
    cells = (
        f"  process {process['pid']} of no container",
        process["kind"],
        "",
        percent(process["sm_ratio"]),
        mib(process["memory_bytes"]),
        *([""] * 4),
    )
    return Line(cells=cells, is_gpu=False, style="yellow")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _power(usage: dict[str, Any]) -> str:
    used, limit = usage.get("power_watts"), usage.get("power_limit_watts")
    return f"{_number(used)}/{_number(limit)}" if limit is not None else _number(used)


def columns_for(lines: Sequence[Line], width: int) -> dict[str, int]:
    """Which columns fit into the width, and how wide each may be."""
    rows = [line.cells for line in lines if len(line.cells) > 1]
    widths = {
        name: max(width_of([name]), width_of([plain_cell(cells[n]) for cells in rows]))
        for n, name in enumerate(COLUMNS)
    }
    if _needs(widths) > width:
        widths[STATE] = min(widths[STATE], SHORT_STATE_WIDTH)
    for name in DROPPED_FIRST:
        if _needs(widths) <= width:
            break
        del widths[name]
    others = _needs(widths) - widths[FIRST]
    widths[FIRST] = max(MIN_FIRST_WIDTH, min(widths[FIRST], width - others))
    return widths


def _needs(widths: Mapping[str, int]) -> int:
    return sum(width + GAP for width in widths.values())


def top_table(lines: Sequence[Line], width: int, shown: Sequence[Line] | None = None) -> Group:
    """The rows of `shown` (all without it); the columns are chosen for all `lines`, so that scrolling moves none."""
    widths = columns_for(lines, width)
    header = _row({name: Text(name) for name in widths}, widths, style="bold")
    return Group(header, *(_line(line, widths, width) for line in (lines if shown is None else shown)))


def _line(line: Line, widths: Mapping[str, int], width: int) -> Text:
    if len(line.cells) == 1:
        text = Text(plain_cell(line.cells[0]), style=line.style, no_wrap=True)
        text.truncate(width, overflow="ellipsis")
        return text
    cells = {name: Text(plain_cell(cell)) for name, cell in zip(COLUMNS, line.cells, strict=True) if name in widths}
    is_out_of_service = line.is_gpu and line.style != health_style("Healthy")
    for name in (STATE, FIRST) if is_out_of_service else (STATE,):
        if name in cells:
            cells[name].stylize(line.style)
    return _row(cells, widths, style="bold" if line.is_gpu else "")


def _row(cells: Mapping[str, Text], widths: Mapping[str, int], *, style: str) -> Text:
    """Not by rich's Table, which has no row of one cell over all columns."""
    row = Text(style=style, no_wrap=True, overflow="crop")
    for name, cell in cells.items():
        cell.truncate(widths[name], overflow="ellipsis")
        align: Literal["left", "right"] = "left" if name in (FIRST, STATE) else "right"
        cell.align(align, widths[name])
        row.append_text(cell).append(" " * GAP)
    return row


def heading(document: dict[str, Any]) -> Text:
    """The node in one line, and below it why the agent is not ready."""
    agent, gpus = document["agent"], document["cards"]
    parts = [
        f"node {document['node']}",
        "ready" if agent["is_ready"] else "NOT READY",
        f"{counted(len(gpus), 'GPU')}{out_of_service(gpus)}",
        counted(len(document["containers"]), "container"),
        f"isolation {agent['isolation']}",
        f"driver {agent['driver']} {agent['driver_version']}".rstrip(),
        _sampled(document),
    ]
    text = Text("  ".join(map(plain, parts)), style="" if agent["is_ready"] else "yellow")
    for reason in agent["not_ready"]:
        text.append(f"\n  not ready: {plain(reason)}")
    return text


def _sampled(document: dict[str, Any]) -> str:
    sampled_at = document["agent"]["sampled_at"]
    if sampled_at is None:
        return "usage not sampled yet"
    age_s = max(0.0, document["at"] - sampled_at)
    period_s = document["agent"]["sample_period_seconds"]
    return f"usage sampled {age_s:.0f} s ago" if age_s > 3 * period_s else "usage is current"
