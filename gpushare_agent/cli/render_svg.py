"""The node's GPUs, their branches and their NVLinks as an SVG, from the document of `graph`. Pure.

A branch is a box around its GPUs, an NVLink a curve below them; a GPU's two bars are its allocated cores and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from gpushare_agent.cli.render_text import gib, gpu_label, health_line, health_word, plain
from gpushare_agent.model.topology import Branch

_GPU_WIDTH, _GPU_HEIGHT, _GAP, _TITLE = 150, 96, 12, 20
_BAR_WIDTH = _GPU_WIDTH - 20
_COLOURS = {"Healthy": "#0072b2", "Cordoned": "#8a6d00"}
_UNHEALTHY = "#b00020"
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.name{font-weight:bold}"
    ".branch{fill:none;stroke:#999}.link{fill:none;stroke:#009e73}"
)


def graph_svg(document: dict[str, Any], tree: Branch) -> str:
    """`tree` is the document's, read. Names come from elsewhere: the writer escapes all texts."""
    gpus = {gpu["index"]: gpu for gpu in document["cards"]}
    width, height = _size(tree)
    links = list(_nvlinks(document["links"]))
    below = 60 if links else 0
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", role="img",
        viewBox=f"0 0 {width + 2 * _GAP} {height + 2 * _GAP + _TITLE + below}",
    )  # fmt: skip
    ElementTree.SubElement(root, "title").text = f"GPUs of node {plain(document['node'])}"
    ElementTree.SubElement(root, "style").text = _STYLE
    _text(root, _GAP, _GAP + 12, f"node {plain(document['node'])}", "name")
    places: dict[int, int] = {}
    _draw(root, tree, gpus, (_GAP, _GAP + _TITLE), places)
    bottom = _GAP + _TITLE + height
    for first, second, kind in links:
        if first in places and second in places:
            _link(root, places[first], places[second], bottom, kind)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _size(branch: Branch) -> tuple[int, int]:
    """Width and height."""
    parts = [_size(child) for child in branch.children] or [(_GPU_WIDTH, _GPU_HEIGHT)] * len(branch.gpus)
    width = sum(part[0] for part in parts) + _GAP * (len(parts) + 1)
    return width, max((part[1] for part in parts), default=0) + _TITLE + _GAP


def _draw(
    root: ElementTree.Element, branch: Branch, gpus: dict[int, Any], at: tuple[int, int], places: dict[int, int]
) -> None:
    """Notes in `places` where the middle of each GPU is."""
    (x, y), (width, height) = at, _size(branch)
    _add(root, "rect", x=x, y=y, width=width, height=height, rx=6).set("class", "branch")
    _text(root, x + 8, y + 14, branch.kind.name)
    x, y = x + _GAP, y + _TITLE
    for child in branch.children:
        _draw(root, child, gpus, (x, y), places)
        x += _size(child)[0] + _GAP
    for index in () if branch.children else branch.gpus:
        if index in gpus:
            _gpu(root, gpus[index], x, y)
        places[index] = x + _GPU_WIDTH // 2
        x += _GPU_WIDTH + _GAP


def _gpu(root: ElementTree.Element, gpu: dict[str, Any], x: int, y: int) -> None:
    cores, memory = gpu["cores"], gpu["memory"]
    colour = _COLOURS.get(health_word(gpu), _UNHEALTHY)
    box = _add(root, "rect", x=x, y=y, width=_GPU_WIDTH, height=_GPU_HEIGHT, rx=4, fill="#fff", stroke=colour)
    ElementTree.SubElement(box, "title").text = f"{plain(gpu['name'])}, {plain(gpu['uuid'])}, {health_line(gpu)}"
    _text(root, x + 10, y + 18, f"GPU {gpu_label(gpu)}  {health_word(gpu)}", "name")
    allocated = (
        (cores["allocated"], cores["capacity"], f"{cores['allocated']}/{cores['capacity']} GPU cores"),
        (
            memory["allocated_bytes"],
            memory["capacity_bytes"],
            f"{gib(memory['allocated_bytes'])}/{gib(memory['capacity_bytes'])} GiB",
        ),
    )
    for row, (part, whole, text) in enumerate(allocated):
        top = y + 38 + row * 32
        _text(root, x + 10, top, text)
        filled = min(1.0, part / whole) if whole else 0.0
        _add(root, "rect", x=x + 10, y=top + 5, width=_BAR_WIDTH, height=8, fill="#e4e4e4")
        _add(root, "rect", x=x + 10, y=top + 5, width=round(_BAR_WIDTH * filled), height=8, fill=colour)


def _nvlinks(links: list[list[str]]) -> Iterator[tuple[int, int, str]]:
    for first, row in enumerate(links):
        for second, kind in enumerate(row[first + 1 :], first + 1):
            if kind.startswith("NV"):
                yield first, second, kind


def _link(root: ElementTree.Element, first: int, second: int, bottom: int, kind: str) -> None:
    middle, depth = (first + second) // 2, bottom + 20 + min(60, abs(second - first) // 12)
    curve = ElementTree.SubElement(
        root, "path", {"class": "link", "d": f"M{first} {bottom} Q{middle} {depth} {second} {bottom}"}
    )
    ElementTree.SubElement(curve, "title").text = plain(kind)


def _add(root: ElementTree.Element, name: str, **values: int | str) -> ElementTree.Element:
    return ElementTree.SubElement(root, name, {key: str(value) for key, value in values.items()})


def _text(root: ElementTree.Element, x: int, y: int, text: str, style: str = "") -> None:
    element = _add(root, "text", x=x, y=y)
    element.text = text
    if style:
        element.set("class", style)
