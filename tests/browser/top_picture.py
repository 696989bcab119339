"""docs/screenshots/top.svg: `gpushare-agent top` of a node that is made up, drawn as a picture. The same at each call:
numbers from sine waves, blocks as rectangles, so that no font of a reader's machine leaves gaps in a curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from gpushare_agent.core.cli.screen import Screen
from gpushare_agent.core.model.names import GIB
from gpushare_agent.core.node_report.documents import HistoryDocument, NodeDocument
from gpushare_agent.kubectl.render_top import Choice
from gpushare_agent.kubectl.top import _Top

COLUMNS, ROWS = 94, 30
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14
GROUND, TEXT = "#16202a", "#dbe3ea"
COLOURS = {"green": "#6cc78a", "yellow": "#e3b54c", "red": "#f0806f", "cyan": "#4fb7d3", "magenta": "#b790e8"}
LEVELS = "▁▂▃▄▅▆▇█"
STEPS, STEP_S = 180, 5.0
GPU_BYTES = 80 * GIB
SHARES = (
    ((0,), "vision/detector-7d9f8b6c5-x2x4z/main", 30, 24, 0.24, 0.7),
    ((0,), "nlp/embedder-0/main", 40, 32, 0.31, 0.6),
    ((0,), "research/notebook-anna/main", 20, 16, 0.02, 0.4),
    ((1,), "nlp/reranker-5c6d7f8b9-kq8lm/main", 50, 40, 0.46, 0.74),
    ((2, 3), "research/train-two-gpus/trainer", 200, 0, 0.93, 0.72),
)
"""GPUs, name, cores, limit of memory in GiB, the use of a GPU's SMs, the use of the limit."""


def wave(step: int, high: float, turns: float) -> float:
    angle = 2 * math.pi * turns * step / STEPS
    return round(high * (0.75 + 0.17 * math.sin(angle) + 0.08 * math.sin(3.7 * angle)), 3)


def scene() -> tuple[NodeDocument, HistoryDocument]:
    usage = {"temperature_celsius": 0, "power_limit_watts": 700.0}
    gpus: list[Any] = [
        {
            "index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100 80GB HBM3", "is_healthy": True,
            "health_reason": None, "cordoned": None, "cores": {"allocated": 0, "capacity": 100},
            "memory": {"allocated_bytes": 0, "capacity_bytes": GPU_BYTES}, "unattributed": [],
        }
        for index in range(4)
    ]  # fmt: skip
    containers: list[Any] = []
    history: Any = {"step_seconds": STEP_S, "gpus": {}}
    for indexes, name, cores, limit_gib, sm, filled in SHARES:
        limit = limit_gib * GIB or GPU_BYTES
        namespace, pod, container = name.split("/")
        parts = []
        for index in indexes:
            gpus[index]["cores"]["allocated"] += min(100, cores)
            gpus[index]["memory"]["allocated_bytes"] += limit
            use = {"sm_ratio": wave(STEPS, sm, 3 + sm), "memory_bytes": limit * filled}
            parts.append({"index": index, "uuid": f"GPU-{index}", "memory_bytes": limit, "usage": use})
            curves = history["gpus"].setdefault(
                f"GPU-{index}", {"sm_ratio": [0.0] * STEPS, "memory_used_bytes": [0.0] * STEPS}
            )
            for step in range(STEPS):
                curves["sm_ratio"][step] += wave(step + 1, sm, 3 + sm)
                curves["memory_used_bytes"][step] += limit * filled * min(1.0, 0.5 + step / 100)
        containers.append(
            {
                "namespace": namespace, "pod": pod, "container": container, "phase": "Running", "is_whole": cores >= 100,
                "cores": cores, "core_limit": None, "memory_bytes": limit, "gpus": parts,
                "not_limited": "",
            }
        )  # fmt: skip
    for gpu in gpus:
        curves = history["gpus"][gpu["uuid"]]
        sm = curves["sm_ratio"][-1]
        gpu["usage"] = usage | {
            "sm_ratio": sm, "memory_used_bytes": curves["memory_used_bytes"][-1],
            "temperature_celsius": round(32 + 42 * sm), "power_watts": round(90 + 560 * sm),
        }  # fmt: skip
    agent = {
        "is_ready": True, "not_ready": [], "isolation": "gpushare", "driver": "nvml", "driver_version": "570.124.06",
        "sample_period_seconds": 1.0, "sampled_at": 1.0,
    }  # fmt: skip
    document: Any = {"schema": 2, "node": "gpu-1", "at": 1.0, "agent": agent, "gpus": gpus, "containers": containers}
    return document | {"mig_gpus": []}, history


def screen_lines() -> Iterator[list[Segment]]:
    document, history = scene()
    top = _Top(document, Choice())
    top.history = history
    console = Console(
        width=COLUMNS, height=ROWS, force_terminal=True, color_system="standard", highlight=False, no_color=False
    )
    return Segment.split_lines(console.render(Screen(top.view, top.press)))


def top_picture() -> str:
    """The picture's SVG."""
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, ROWS * CELL_HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
        "<title>gpushare-agent top of a node with four GPUs, whose numbers are made up</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13.5" shape-rendering="crispEdges"'
        f' fill="{TEXT}">',
    ]
    for row, segments in enumerate(screen_lines()):
        column, top = 0, MARGIN + row * CELL_HEIGHT
        for text, style, _ in segments:
            for start, word in words_of(text):
                parts.append(drawn(word, MARGIN + (column + start) * CELL_WIDTH, top, style or Style.null()))
            column += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def words_of(text: str) -> Iterable[tuple[int, str]]:
    """The words of a line with their columns, and runs of one block: fonts differ in the width of all else."""
    start = 0
    for end in range(1, len(text) + 1):
        before, after = text[end - 1], text[end : end + 1]
        is_block = before in LEVELS or (after and after in LEVELS)
        if after == before or (after and not is_block and " " not in (before, after)):
            continue
        if before != " ":
            yield start, text[start:end]
        start = end


def drawn(word: str, left: float, top: float, style: Style) -> str:
    colour = style.color.name if style.color is not None else ""
    look = f' fill="{COLOURS[colour]}"' if colour in COLOURS else ""
    look += ' opacity="0.65"' if style.dim else ""
    width, block = len(word) * CELL_WIDTH, word[0]
    if block in LEVELS:
        high = CELL_HEIGHT * (LEVELS.index(block) + 1) / 8
        box = f'x="{left:.1f}" y="{top + CELL_HEIGHT - high:.2f}" width="{width:.1f}" height="{high:.2f}"'
        return f"<rect {box} {look}/>"
    look += ' font-weight="600"' if style.bold else ""
    place = f'x="{left:.1f}" y="{top + 13:g}" textLength="{width:.1f}"'
    return f"<text {place}{look}>{escape(word)}</text>"
