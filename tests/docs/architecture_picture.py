"""The picture of docs/explanation/architecture.md: `python -m tests.docs.architecture_picture --write` makes it, in two
themes; a test compares.

A forge shows an SVG as an image, which does not know the theme of the page around it: <picture> chooses between the files.
No text is smaller than 12 of 460 units of width, so that it can be read on a phone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 460, 742
LINE = 16
"""Height of a line of text, and of the strip at the bottom of what imports core/."""
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "page": "#ffffff", "frame": "#f6f8fa", "edge": "#818b98", "text": "#1f2328", "soft": "#59636e",
        "own": "#ddf4e4", "own_edge": "#1a7f37", "core": "#1a7f37", "on_core": "#ffffff",
    },
    "dark": {
        "page": "#0d1117", "frame": "#151b23", "edge": "#8b949e", "text": "#f0f6fc", "soft": "#a7b1bc",
        "own": "#12341f", "own_edge": "#3fb950", "core": "#3fb950", "on_core": "#0d1117",
    },
}  # fmt: skip


class Box(NamedTuple):
    """A program, its first line bold. `is_own`: of this project; `has_core`: it imports core/."""

    x: int
    y: int
    width: int
    height: int
    lines: Sequence[str]
    is_own: bool = False
    has_core: bool = False


class Arrow(NamedTuple):
    """What two of them talk over: from one to the other or both ways, its text next to it."""

    points: Sequence[tuple[int, int]]
    lines: Sequence[str] = ()
    text_at: tuple[int, int] = (0, 0)
    anchor: str = "start"
    is_both: bool = True


FRAMES = (
    Box(8, 8, 444, 204, ("the cluster",)),
    Box(8, 220, 444, 300, ("a node",)),
    Box(8, 532, 444, 138, ("any machine, without a GPU",)),
)
PROGRAMS = {
    "kubectl": Box(18, 36, 124, 86, ("kubectl plugin", "top, explain,", "page of all nodes"), True, True),
    "extender": Box(162, 36, 124, 86, ("extender", "filter, rank, bind,", "preempt, quotas"), True, True),
    "agent": Box(246, 278, 196, 86, ("agent", "whom is a call for?", "which GPU? what limits?"), True, True),
    "sandbox": Box(
        18, 560, 234, 100,
        ("sandbox", "its own kubelet, API server,", "scheduler and runtime: the agent", "runs in it as on a node"),
        True, True),
    "simulation": Box(
        264, 560, 178, 100,
        ("simulation", "a workload, with the", "decisions of extender", "and agent, no sockets"), True, True),
}  # fmt: skip
"""By their folder of gpushare_agent/."""
OTHERS = (
    Box(330, 36, 112, 86, ("scheduler", "kube-scheduler")),
    Box(18, 172, 424, 30, ("API server",)),
    Box(18, 278, 106, 86, ("kubelet",)),
    Box(18, 430, 264, 80, ("container",)),
    Box(30, 456, 112, 44, ("your program",)),
    Box(154, 456, 116, 44, ("libgpushare", "C library"), True),
    Box(344, 430, 98, 80, ("driver", "NVIDIA's")),
)
ARROWS = (
    Arrow(((80, 122), (80, 172)), ("pods/proxy:", "reads agents"), (88, 142)),
    Arrow(((224, 122), (224, 172)), ("watches; binds,", "annotates pods"), (232, 142)),
    Arrow(((386, 122), (386, 172))),
    Arrow(((330, 79), (286, 79)), ("HTTP",), (309, 72), "middle", False),
    Arrow(((100, 202), (100, 278))),
    Arrow(((344, 202), (344, 278)), ("watches its pods; writes", "annotations, Events, labels"), (336, 247), "end"),
    Arrow(((124, 312), (246, 312)), ("device plugins,", "PodResources,", "claims: sockets"), (185, 332), "middle"),
    Arrow(((262, 364), (262, 400), (212, 400), (212, 456)),
          ("files: limits to read,", "usage to write;", "vDevice socket"), (204, 384), "end"),
    Arrow(((393, 364), (393, 430)), ("NVML",), (385, 402), "end", False),
    Arrow(((270, 478), (344, 478)), ("CUDA",), (313, 472), "middle", False),
    Arrow(((142, 478), (154, 478)), is_both=False),
)  # fmt: skip
CORE = Box(
    8, 682, 444, 52, ("core", "one library in each: values, placement,", "settings, API client, what nodes report")
)
TITLE = "Five small programs over one core, and a library in the container"


def picture(theme: str) -> str:
    colours = THEMES[theme]
    boxes = [*FRAMES, *PROGRAMS.values(), *OTHERS]
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colours["edge"]}"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, \'Segoe UI\', Roboto, \'Helvetica Neue\', Arial, sans-serif" font-size="12.5" role="img">',
        f"<title>{TITLE}</title>",
        f"<defs>{head}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{colours["page"]}"/>',
    ]
    for box in boxes:
        parts += _box(box, colours, is_frame=box in FRAMES or box.lines == ("container",))
    for arrow in ARROWS:
        parts += _arrow(arrow, colours)
    parts.append(_rect(CORE, colours["core"], colours["core"]))
    parts += _lines(CORE, colours["on_core"], colours["on_core"])
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box, colours: Mapping[str, str], *, is_frame: bool) -> Iterator[str]:
    edge = colours["own_edge"] if box.is_own else colours["edge"]
    yield _rect(box, colours["own" if box.is_own else "frame" if is_frame else "page"], edge, is_frame=is_frame)
    if is_frame:
        yield _text(box.lines[0], box.x + 10, box.y + 18, colours["soft"])
        return
    if box.has_core:
        top = box.y + box.height - LINE
        line = f"M{box.x} {top}h{box.width}v{LINE - 6}q0 6-6 6h-{box.width - 12}q-6 0-6-6z"
        yield f'<path d="{line}" fill="{colours["core"]}"/>'
        yield _text("core", box.x + box.width // 2, top + 12, colours["on_core"], "middle", is_bold=True)
    yield from _lines(box, colours["text"], colours["soft"])


def _rect(box: Box, fill: str, edge: str, *, is_frame: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if is_frame else ""
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="{fill}" '
        f'stroke="{edge}"{dashes}/>'
    )


def _lines(box: Box, first: str, others: str) -> Iterator[str]:
    """In the middle of what the strip leaves of the box."""
    height = box.height - LINE * box.has_core
    top = box.y + (height - LINE * len(box.lines)) / 2 + 12
    for number, line in enumerate(box.lines):
        yield _text(
            line, box.x + box.width // 2, top + LINE * number, others if number else first, "middle", is_bold=not number
        )


def _arrow(arrow: Arrow, colours: Mapping[str, str]) -> Iterator[str]:
    path = "M" + "L".join(f"{x} {y}" for x, y in arrow.points)
    both = ' marker-start="url(#head)"' if arrow.is_both else ""
    yield f'<path d="{path}" fill="none" stroke="{colours["edge"]}" stroke-width="1.5" marker-end="url(#head)"{both}/>'
    x, y = arrow.text_at
    for number, line in enumerate(arrow.lines):
        yield _text(line, x, y + LINE * number, colours["text"], arrow.anchor)


def _text(text: str, x: float, y: float, fill: str, anchor: str = "start", *, is_bold: bool = False) -> str:
    weight = ' font-weight="600"' if is_bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def path_of(theme: str) -> Path:
    return ROOT / f"docs/screenshots/architecture-{theme}.svg"


def outdated(*, write: bool = False) -> list[Path]:
    """The files that are not what this makes; with `write` they are afterwards."""
    found = []
    for theme in THEMES:
        path = path_of(theme)
        if not path.exists() or path.read_text(encoding="utf-8") != picture(theme):
            found.append(path)
            if write:
                path.write_text(picture(theme), encoding="utf-8")
    return found


if __name__ == "__main__":
    changed = outdated(write="--write" in sys.argv)
    sys.stdout.writelines(f"{path.relative_to(ROOT)}\n" for path in changed)
    sys.exit(bool(changed) and "--write" not in sys.argv)
