"""The report on a terminal that is drawn again and again: it must fit, or the terminal would scroll away what matters.

One line for each pod, then one for each GPU, then the notes; what has no room is counted. `status` shows everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpushare_agent.sandbox.node_view import (
    ALLOCATED,
    NARROW,
    gpu_text,
    gpu_use,
    has_several_nodes,
    health_text,
    memory_asked,
    node_text,
    reason_text,
    short_limit_text,
    status_of,
    used_text,
)

_LINES_BETWEEN = 5
"""Two headings, two empty lines, and the line of the cursor."""


def live_view(document: dict[str, Any], notes: Sequence[str], *, width: int, height: int) -> RenderableType:
    """At most `height` - 1 lines, where that has room for the notes, one pod and one GPU."""
    is_several = has_several_nodes(document)
    pods = document["pods"]
    gpus = [{**gpu, "node": node["name"]} for node in document["nodes"] for gpu in node["cards"]]
    room = height - _LINES_BETWEEN - sum(_line_count(note, width) for note in notes)
    for_pods, for_gpus = _shared_room(room, len(pods), len(gpus))
    return Group(
        *_cut(partial(_pods_table, is_several=is_several), pods, for_pods, "pods", width),
        Text(""),
        *_cut(partial(_gpus_table, is_several=is_several), gpus, for_gpus, "GPUs", width),
        Text(""),
        *(Text(note) for note in notes),
    )


def _line_count(note: str, width: int) -> int:
    return len(Text(note).wrap(Console(width=width), width))


def _shared_room(room: int, pods: int, gpus: int) -> tuple[int, int]:
    """Lines for pods and for GPUs. The GPUs give way first, down to a third of the room."""
    for_gpus = min(gpus, max(room - pods, room // 3, 1))
    return max(1, room - for_gpus), for_gpus


def _cut(make: Any, rows: list[dict[str, Any]], lines: int, what: str, width: int) -> list[RenderableType]:
    if len(rows) <= lines:
        return [make(rows, width)]
    shown = rows[: max(0, lines - 1)]
    more = f"{len(rows) - len(shown)} more {what}, see `gpushare-agent sandbox status`"
    return [make(shown, width), Text(more, style="dim", no_wrap=True, overflow="ellipsis")]


def _table(*columns: str, longest: dict[str, int]) -> Table:
    """No lines around it; the last column takes what is left and is cut there."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=longest.get(column))
    table.add_column(columns[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _pods_table(pods: list[dict[str, Any]], width: int, *, is_several: bool) -> Table:
    """The containers of a pod stand side by side, in the order of the manifest. Where there is no room for what was asked
    and what is told, it is what the containers are told."""
    is_narrow = width < NARROW
    asked, used = ((), ()) if is_narrow else (("cores", "blocks"), ("used",))
    longest = {
        "pod": max(12, width // 4),
        "GPUs": 12,
        "limit": max(14, width // 5),
        "used": max(10, width // 8),
        "PIDs": max(6, width // 6),
    }
    places = ("node",) if is_several else ()
    table = _table("pod", "status", *places, *asked, "GPUs", "limit", *used, "PIDs", "reason", longest=longest)
    for pod in pods:
        namespace = "" if pod["namespace"] == "default" else f"{pod['namespace']}/"
        containers = pod["containers"]
        requests = ["+".join(str(c["vcore"]) for c in containers), "+".join(map(memory_asked, containers))]
        table.add_row(
            f"{namespace}{pod['name']}", status_of(pod), *([node_text(pod)] if is_several else ()),
            *(() if is_narrow else requests),
            " ".join(map(gpu_text, containers)), " ".join(map(short_limit_text, containers)),
            *(() if is_narrow else [" ".join(used_text(c).replace(" %, ", "%/").replace(" MiB", "M") for c in containers)]),
            _pids(containers, is_narrow=is_narrow), " ".join(reason_text(pod).split()),
        )  # fmt: skip
    return table


def _pids(containers: list[dict[str, Any]], *, is_narrow: bool) -> str:
    """How many in each container, and all of them, as far as there is room."""
    counts = "+".join(str(len(c["pids"])) for c in containers)
    pids = " ".join(str(pid) for c in containers for pid in c["pids"])
    return counts if is_narrow or not pids else f"{counts}: {pids}"


def _gpus_table(gpus: list[dict[str, Any]], width: int, *, is_several: bool) -> Table:
    name, used = (("name",), ("used",)) if width >= NARROW else ((), ())
    places = ("node",) if is_several else ()
    table = _table(*places, "GPU", *name, *ALLOCATED, *used, "health", longest={"name": width // 4})
    for gpu in gpus:
        place = (gpu["node"],) if is_several else ()
        use = (*gpu_use(gpu), *([used_text(gpu)] if used else ()))
        table.add_row(*place, str(gpu["index"]), *(gpu[key] for key in name), *use, health_text(gpu))
    return table
