"""The node's GPUs and their containers as a table, from the node's document. Pure: values in, a table out.

A narrow terminal gets fewer columns, in the order of DROPPED_FIRST; the first column stays. A high one gets the GPUs'
curves.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Sort
from gpushare_agent.core.cli.render_text import (
    CORES_COLUMN,
    GAP,
    MEMORY_COLUMN,
    PHASE_STYLES,
    PIPE_WIDTH,
    allocated_line,
    bar,
    counted,
    gib,
    gpu_label,
    gpus_in_words,
    health_reasons,
    health_style,
    health_word,
    is_given_whole,
    load_style,
    of_cores,
    percent,
    plain,
    plain_cell,
    sums,
    width_of,
)
from gpushare_agent.core.model.usage import SmSource
from gpushare_agent.core.node_report import documents

FIRST, STATE, SM, ALLOC, TEMP, POWER = "GPU / CONTAINER", "STATE", "SM %", "ALLOC GiB", "TEMP °C", "POWER W"
SM_BAR, MEMORY_BAR = "", " "
"""Columns without a name."""
COLUMNS = (FIRST, STATE, CORES_COLUMN, SM, SM_BAR, MEMORY_COLUMN, MEMORY_BAR, ALLOC, TEMP, POWER)
DROPPED_FIRST = (ALLOC, MEMORY_BAR, SM_BAR, POWER, TEMP, STATE, CORES_COLUMN, SM, MEMORY_COLUMN)
"""As a whole: a part of a number would be read as another number."""
MIN_FIRST_WIDTH = 15
BEFORE_NAMES = dict.fromkeys((POWER, TEMP, STATE), 20) | dict.fromkeys(
    (CORES_COLUMN, SM, MEMORY_COLUMN), MIN_FIRST_WIDTH
)
"""Worth more than whole names: the first column is cut to this width before one of these goes."""
SHORT_NAMES = {TEMP: "°C", POWER: "W"}
BARS = {SM_BAR: SM, MEMORY_BAR: MEMORY_COLUMN}
"""Each draws the value to its left."""
BAR_WIDTH, SHORT_BAR_WIDTH = 10, 6
PAID = "*"
"""Follows the compute of a container that the driver does not report."""
PAID_NOTE = "* paid, as libgpushare counts: of several that compute the driver's samples name one"
MPS_NOTE = "mps: not known of each container; the driver counts it in the process of the MPS server"
NOT_LIMITED = "!"
"""Follows the memory of a container that runs without a limit."""
NOT_LIMITED_NOTE = "! without a limit: explain POD and the pod's Events say why, and what to do"
SHORT_STATE_WIDTH = len("Unhealthy")
REASON_INDENT = "    "


class Choice(Struct, frozen=True, kw_only=True):
    """The part of the node that is shown, and its order. `filter` is a part of NAMESPACE/POD/CONTAINER."""

    sort: Sort = "gpu"
    filter: str = ""
    has_processes: bool = False
    has_bars: bool = True


class Line(Struct, frozen=True, kw_only=True):
    """One row, by column. A GPU's is bold; `style` is the state's colour; `loads` are ratios, for bars and colours. A row
    of the first column alone is as wide as all columns."""

    cells: Mapping[str, str]
    loads: Mapping[str, float | None] = field(default_factory=dict)
    is_gpu: bool = False
    style: str = ""
    uuid: str = ""
    """Of the GPU whose curves may follow."""
    curves: Text | None = None
    """Next to the cells, or the row itself."""


ALL = Choice()
MOST_CURVE_LINES, MIN_CURVE_WIDTH = 6, 8
BLOCKS = " ▁▂▃▄▅▆▇█"


def top_lines(document: documents.NodeDocument, width: int = PIPE_WIDTH, choice: Choice = ALL) -> list[Line]:
    """A line for each GPU, below it why it is out of service, as many lines as that needs in this width, and one line for
    each of its containers and for each unattributed process. A filter leaves out GPUs without a container that fits."""
    containers = [one for one in document["containers"] if choice.filter in _name(one)]
    lines: list[Line] = []
    for gpu in sorted(document["gpus"], key=_order(choice.sort, _gpu_loads)):
        parts = [(one, part) for one in containers for part in one["gpus"] if part["uuid"] == gpu["uuid"]]
        # Without a filter an idle GPU is shown; with one it would only push down what was searched.
        if choice.filter and not parts:
            continue
        lines += gpu_lines(gpu, width)
        for container, part in sorted(parts, key=_order(choice.sort, lambda pair: _part_loads(*pair))):
            lines.append(_container_line(container, part))
            lines += _process_lines(part["usage"] or {}) if choice.has_processes else ()
        # They have no name that a filter could match.
        lines += [_unattributed_line(process) for process in gpu["unattributed"] if not choice.filter]
    for divided in document["mig_gpus"] if not choice.filter else ():
        cells = {FIRST: f"{divided['index']} {divided['name']}", STATE: health_word(divided), CORES_COLUMN: "MIG"}
        style = health_style(cells[STATE])
        lines.append(Line(cells=cells, is_gpu=True, style=style))
        lines += _wrapped([*health_reasons(divided), *divided.get("texts", ())], width, style)
    without_gpu = [container for container in containers if not container["gpus"]]
    if without_gpu:
        lines.append(Line(cells={FIRST: "on no GPU that the driver names"}, is_gpu=True))
        lines += [_container_line(container, None) for container in without_gpu]
    return lines


def _order(sort: Sort, loads: Callable[[Any], Mapping[str, float | None]]) -> Callable[[Any], float]:
    """The highest first; those without a value last. By GPU the document's own order stays."""
    # The sort is stable, so equal keys leave the order as it is.
    return lambda one: 0.0 if sort == "gpu" else -(loads(one)[sort] or 0.0)


def _gpu_loads(gpu: documents.GpuDocument) -> dict[str, float | None]:
    usage = gpu["usage"] or {}
    cores = gpu["cores"]["allocated"] / (gpu["cores"]["capacity"] or 1)
    return {"sm": usage.get("sm_ratio"), "memory": usage.get("memory_used_bytes"), "cores": cores}


def _part_loads(container: documents.ContainerDocument, part: documents.ContainerGpu) -> dict[str, float | None]:
    usage = part["usage"] or {}
    return {"sm": usage.get("sm_ratio"), "memory": usage.get("memory_bytes"), "cores": container["cores"]}


def gpu_lines(gpu: documents.GpuDocument, width: int) -> list[Line]:
    """The GPU, and why it is out of service."""
    usage, memory = gpu["usage"] or {}, gpu["memory"]
    used, style = usage.get("memory_used_bytes"), health_style(health_word(gpu))
    line = Line(
        cells={
            FIRST: f"{gpu_label(gpu)} {gpu['name']}",
            STATE: health_word(gpu),
            CORES_COLUMN: "whole" if is_given_whole(gpu) else f"{gpu['cores']['allocated']}/{gpu['cores']['capacity']}",
            SM: percent(usage.get("sm_ratio")),
            MEMORY_COLUMN: f"{gib(used)}/{gib(memory['capacity_bytes'])}",
            ALLOC: gib(memory["allocated_bytes"]),
            TEMP: _number(usage.get("temperature_celsius")),
            POWER: _power(usage),
        },
        loads={SM: usage.get("sm_ratio"), MEMORY_COLUMN: _ratio(used, memory["capacity_bytes"])},
        is_gpu=True,
        style=style,
    )
    *before, last = [line, *_wrapped(health_reasons(gpu), width, style)]
    return [*before, replace(last, uuid=gpu["uuid"])]


def _wrapped(texts: Sequence[str], width: int, style: str) -> list[Line]:
    text_width = max(1, width - len(REASON_INDENT))
    parts = [part for text in texts for part in textwrap.wrap(plain(text), text_width)]
    return [Line(cells={FIRST: REASON_INDENT + part}, style=style) for part in parts]


def _name(container: documents.ContainerDocument) -> str:
    return f"{container['namespace']}/{container['pod']}/{container['container']}"


def _container_line(container: documents.ContainerDocument, part: documents.ContainerGpu | None) -> Line:
    usage: documents.ContainerUsage = (part["usage"] if part is not None else None) or {}
    limit = container["memory_bytes"] if part is None else part["memory_bytes"]
    used = usage.get("memory_bytes")
    cores = "whole" if container["is_whole"] else of_cores(container["cores"], container["core_limit"])
    source = usage.get("sm_source")
    return Line(
        cells={
            FIRST: f"  {_name(container)}",
            STATE: container["phase"],
            CORES_COLUMN: cores,
            SM: SmSource.MPS
            if source == SmSource.MPS
            else percent(usage.get("sm_ratio")) + (PAID if source == SmSource.LIBRARY else ""),
            MEMORY_COLUMN: f"{gib(used)}/{gib(limit)}" + (NOT_LIMITED if container["not_limited"] else ""),
        },
        loads={SM: usage.get("sm_ratio"), MEMORY_COLUMN: _ratio(used, limit)},
        # Any other word is the kubelet's reason why a container does not run, such as CrashLoopBackOff.
        style=PHASE_STYLES.get(container["phase"], "red"),
    )


def _process_lines(usage: documents.ContainerUsage) -> list[Line]:
    """The 64 with the most memory, as far as they were asked for."""
    pids, processes = usage.get("pids", ()), usage.get("processes", ())
    lines = []
    for one in processes:
        inner, command = one.get("pid_in_container"), one.get("command")
        text = f"    process {one['pid']} {command or ''}".rstrip() + (f", inside {inner}" if inner is not None else "")
        cells = {FIRST: text, **_use_of_process(one)}
        lines.append(Line(cells=cells, loads={SM: one["sm_ratio"]}))
    more = len(pids) - len(processes) if processes else 0
    return [*lines, *([Line(cells={FIRST: f"    {more} more, with less memory"})] if more > 0 else ())]


def _use_of_process(process: documents.ContainerProcess) -> dict[str, str]:
    return {SM: percent(process["sm_ratio"]), MEMORY_COLUMN: gib(process["memory_bytes"])}


def _unattributed_line(process: documents.UnattributedProcess) -> Line:
    name = f"{process['pid']} {process.get('command') or ''}".rstrip()
    cells = {FIRST: f"  process {name} of no container", STATE: process["kind"], **_use_of_process(process)}
    return Line(cells=cells, loads={SM: process["sm_ratio"]}, style="yellow")


# --- curves ---


def with_history(
    lines: Sequence[Line], document: documents.NodeDocument, history: documents.HistoryDocument, width: int, room: int
) -> list[Line]:
    """The lines, and the curves of each GPU that has computed: below it, where `room` more lines are enough for all, else
    next to it, where the table leaves the columns."""
    drawn: dict[str, Callable[[int, int], list[Text]]] = {}
    for gpu in document["gpus"]:
        curves, size = history["gpus"].get(gpu["uuid"], {}), gpu["memory"]["capacity_bytes"]
        sm, memory = curves.get("sm_ratio", ()), [_ratio(used, size) for used in curves.get("memory_used_bytes", ())]
        # MIG instances may have no SM use.
        if any(sm) or (any(memory) and set(sm) <= {None}):
            drawn[gpu["uuid"]] = partial(_curves, sm, memory, history["step_seconds"])
    count = min(MOST_CURVE_LINES, room // max(1, sum(line.uuid in drawn for line in lines)))
    columns = width - _needs(columns_for(lines, width))
    found = []
    for line in lines:
        rows = drawn[line.uuid](width if count > 0 else columns, max(1, count)) if line.uuid in drawn else []
        if count > 0:
            found += [line, *(Line(cells={}, curves=row) for row in rows)]
        else:
            found.append(replace(line, curves=rows[0]) if rows else line)
    return found


def _curves(
    sm: Sequence[float | None], memory: Sequence[float | None], step_s: float, width: int, count: int
) -> list[Text]:
    """In `count` lines; none where the width is too small."""
    before, between = f"{REASON_INDENT}{max(len(sm), len(memory)) * step_s / 60:.0f} min  SM ", "  memory "
    room = (width - len(before) - len(between)) // 2
    if room < MIN_CURVE_WIDTH:
        return []
    pairs = zip(blocks(sm, room, count), blocks(memory, room, count), strict=True)
    names = [(" " * len(before), " " * len(between))] * (count - 1) + [(before, between)]
    return [
        Text.assemble((first, "dim"), (left, "cyan"), (second, "dim"), (right, "magenta"))
        for (first, second), (left, right) in zip(names, pairs, strict=True)
    ]


def blocks(ratios: Sequence[float | None], width: int, count: int) -> list[str]:
    """A curve in `count` lines, each cell the mean of its steps; blank where none has a sample."""
    heights = []
    for cell in range(width):
        first, after = (len(ratios) * edge // width for edge in (cell, cell + 1))
        known = [ratio for ratio in ratios[first : max(after, first + 1)] if ratio is not None]
        mean = sum(known) / len(known) if known else 0.0
        # What is known and nearly nothing is a line on the ground.
        heights.append(max(1, round(mean * count * 8)) if known else 0)
    return ["".join(BLOCKS[max(0, min(8, height - 8 * line))] for height in heights) for line in reversed(range(count))]


def notes(lines: Sequence[Line]) -> list[Text]:
    """The meaning of each mark in these lines."""
    marks = {(SM, PAID): PAID_NOTE, (SM, SmSource.MPS): MPS_NOTE, (MEMORY_COLUMN, NOT_LIMITED): NOT_LIMITED_NOTE}
    return [
        Text(note, style="dim")
        for (column, mark), note in marks.items()
        if any(line.cells.get(column, "").endswith(mark) for line in lines)
    ]


def _ratio(used: float | None, whole: float | None) -> float | None:
    return None if used is None or not whole else used / whole


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _power(usage: documents.GpuUsage) -> str:
    used, limit = usage.get("power_watts"), usage.get("power_limit_watts")
    return f"{_number(used)}/{_number(limit)}" if limit is not None else _number(used)


def columns_for(lines: Sequence[Line], width: int, *, has_bars: bool = True) -> dict[str, int]:
    """The columns that fit into the width, and how wide each may be."""
    rows = [line.cells for line in lines if len(line.cells) > 1]
    widths = {
        name: max(width_of([name]), width_of([plain_cell(cells.get(name, "")) for cells in rows]))
        for name in COLUMNS
        if name not in BARS or has_bars
    }
    widths |= {name: BAR_WIDTH for name in BARS if has_bars}
    others = [plain_cell(cells[FIRST]) for cells in rows if STATE in cells]
    processes = [plain_cell(cells[FIRST]) for cells in rows if STATE not in cells]
    widths[FIRST] = max(width_of([FIRST, *others]), width_of(processes) - _spanned(widths))
    if _needs(widths) > width:
        # Narrower bars and names, and a cut state, before a column goes.
        widths[STATE] = min(widths[STATE], SHORT_STATE_WIDTH)
        widths |= {name: SHORT_BAR_WIDTH for name in BARS if has_bars}
        for name, short in SHORT_NAMES.items():
            widths[name] = width_of([short, *(cells.get(name, "") for cells in rows)])
    # One at a time, so that a wide terminal loses as little as it must.
    for name in DROPPED_FIRST:
        cut = max(0, widths[FIRST] - BEFORE_NAMES.get(name, widths[FIRST]))
        if _needs(widths) - cut <= width:
            break
        widths.pop(name, None)
    # What is left is the first column's: a cut name is better than no use.
    rest = _needs(widths) - widths[FIRST]
    widths[FIRST] = max(MIN_FIRST_WIDTH, min(widths[FIRST], width - rest))
    return widths


def _spanned(widths: Mapping[str, int]) -> int:
    """The first column's further width in a line of a process, which has neither state nor cores."""
    return sum(widths[name] + GAP for name in (STATE, CORES_COLUMN) if name in widths)


def _needs(widths: Mapping[str, int]) -> int:
    return sum(width + GAP for width in widths.values()) - GAP


def header_line(widths: Mapping[str, int], sort: Sort = "gpu") -> Text:
    """The columns' names, that of the order underlined."""
    sorted_by = {"sm": SM, "memory": MEMORY_COLUMN, "cores": CORES_COLUMN}.get(sort)
    fits = {name: name if width_of([name]) <= width else SHORT_NAMES[name] for name, width in widths.items()}
    names = {name: Text(fits[name], style="underline" if name == sorted_by else "") for name in widths}
    return _row(names, widths, style="bold")


def top_table(lines: Sequence[Line], width: int, choice: Choice = ALL) -> tuple[Text, list[Text]]:
    """Header and rows."""
    widths = columns_for(lines, width, has_bars=choice.has_bars)
    return header_line(widths, choice.sort), [_line(line, widths, width) for line in lines]


def _line(line: Line, widths: Mapping[str, int], width: int) -> Text:
    if line.curves is not None and not line.cells:
        return line.curves
    # A reason may be a sentence: it may run over all columns.
    if len(line.cells) == 1:
        text = Text(plain_cell(line.cells[FIRST]), style=line.style, no_wrap=True)
        text.truncate(width, overflow="ellipsis")
        return text
    if STATE not in line.cells:
        widths = {
            name: width + (_spanned(widths) if name == FIRST else 0)
            for name, width in widths.items()
            if name not in (STATE, CORES_COLUMN)
        }
    cells = {name: _cell(line, name, widths[name]) for name in widths}
    is_out_of_service = line.is_gpu and line.style != health_style("Healthy")
    for name in (STATE, FIRST) if is_out_of_service else (STATE,):
        if name in cells:
            cells[name].stylize(line.style)
    return _row(cells, widths, style="bold" if line.is_gpu else "").append_text(line.curves or Text())


def _cell(line: Line, name: str, width: int) -> Text:
    if name in BARS:
        return bar(line.loads.get(BARS[name]), width)
    load, text = line.loads.get(name), plain_cell(line.cells.get(name, ""))
    # Pods of one owner differ at their names' end.
    if name == FIRST and CORES_COLUMN in line.cells and not line.is_gpu and width_of([text]) > width:
        text = f"{text[: width - width // 2 - 1]}…{text[-(width // 2) :]}"
    return Text(text, style="" if load is None else load_style(load))


def _row(cells: Mapping[str, Text], widths: Mapping[str, int], *, style: str) -> Text:
    """Not with rich's Table, which has no row of one cell over all columns."""
    row = Text(style=style, no_wrap=True, overflow="crop")
    for name, cell in cells.items():
        cell.truncate(widths[name], overflow="ellipsis")
        align: Literal["left", "right"] = "left" if name in (FIRST, STATE, *BARS) else "right"
        cell.align(align, widths[name])
        row.append_text(Text(" " * GAP if row else "")).append_text(cell)
    return row


def heading(document: documents.NodeDocument, width: int = PIPE_WIDTH) -> list[Text]:
    """The node in one line, all its GPUs together in another, as much of each as fits; below why the agent is not ready."""
    agent, gpus = document["agent"], document["gpus"]
    style = "" if agent["is_ready"] else "yellow"
    node = [
        f"node {document['node']}",
        "ready" if agent["is_ready"] else "NOT READY",
        "".join(gpus_in_words([(gpus, document["mig_gpus"])])),
        counted(len(document["containers"]), "container"),
        _sampled(document),
        f"isolation {agent['isolation']}",
        f"driver {agent['driver']} {agent['driver_version']}".rstrip(),
    ]
    reasons = [f"  not ready: {plain(reason)}" for reason in agent["not_ready"]]
    lines = [_fitted(node, width), *([_fitted(together(gpus), width)] if gpus else ())]
    return [Text(line, style=style) for line in [*lines, *reasons]]


def together(gpus: Sequence[documents.GpuDocument]) -> list[str]:
    """Use is a part of all GPUs together. GPUs without a sample count as idle."""
    usages = [gpu["usage"] for gpu in gpus if gpu["usage"]]
    busy = [ratio for usage in usages if (ratio := usage.get("sm_ratio")) is not None]
    used = [size for usage in usages if (size := usage.get("memory_used_bytes")) is not None]
    return [
        allocated_line(*sums(gpus)),
        # Divided by all GPUs: those without a sample count as idle.
        f"used: SM {percent(sum(busy) / len(gpus) if busy else None)} %, memory {gib(sum(used) if used else None)} GiB",
    ]


def _fitted(parts: Sequence[str], width: int) -> str:
    """The first ones, as many as the line has room for, and the first in any case."""
    line = plain(parts[0])
    for part in map(plain, parts[1:]):
        if width_of([f"{line}  {part}"]) > width:
            break
        line = f"{line}  {part}"
    return line


def _sampled(document: documents.NodeDocument) -> str:
    sampled_at = document["agent"]["sampled_at"]
    if sampled_at is None:
        return "usage not sampled yet"
    age_s = max(0.0, document["at"] - sampled_at)
    period_s = document["agent"]["sample_period_seconds"]
    # The agent shows usage for three periods, so until then it is as good as it gets.
    return f"usage sampled {age_s:.0f} s ago" if age_s > 3 * period_s else "usage is current"


def node_tables(document: documents.NodeDocument, width: int, choice: Choice) -> Sequence[RenderableType]:
    """The whole view of the node."""
    lines = top_lines(document, width, choice)
    note = notes(lines) if lines else [Text("this node has no GPU that the driver can name")]
    header, rows = top_table(lines, width, choice)
    return [*heading(document, width), Group(header, *rows), *note]
