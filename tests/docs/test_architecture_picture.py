"""The picture of docs/explanation/architecture.md shows each program of the package and can be read, in both themes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.docs.architecture_picture import CORE, DARK, EDGE, FRAME, IN_THE_DARK, LIGHT, OWN, dark_picture

PICTURE = ElementTree.fromstring(LIGHT.read_text(encoding="utf-8"))
WIDTH, HEIGHT = (int(PICTURE.attrib[name]) for name in ("width", "height"))


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int
    fill: str

    def has(self, x: int, y: int) -> bool:
        return self.x <= x <= self.x + self.width and self.y <= y <= self.y + self.height


class Text(NamedTuple):
    words: str
    is_bold: bool
    fill: str
    on: Box
    """What was drawn last under it."""


def drawn() -> tuple[list[Box], list[Text]]:
    """All but the page's ground, in the order of the file. The strip of a program that imports core/ is a path."""
    boxes, texts = list[Box](), list[Text]()
    for one in PICTURE:
        kind, has = one.tag.rpartition("}")[2], one.attrib
        if kind == "rect" and "x" in has:
            boxes.append(Box(*(int(has[name]) for name in ("x", "y", "width", "height")), has["fill"]))
        elif kind == "path" and has["fill"] != "none":
            x, y, width = map(int, re.findall(r"\d+", has["d"])[:3])
            boxes.append(Box(x, y, width, 16, has["fill"]))
        elif kind == "text":
            on = [box for box in boxes if box.has(int(has["x"]), int(has["y"]))][-1]
            texts.append(Text(one.text or "", "font-weight" in has, has["fill"], on))
    return boxes, texts


BOXES, TEXTS = drawn()


def test_the_dark_picture_is_what_the_command_makes() -> None:
    """`python -m tests.docs.architecture_picture --write` writes it."""
    assert DARK.read_text(encoding="utf-8") == dark_picture()


def test_it_has_each_program_of_the_package_with_its_core() -> None:
    """A folder of gpushare_agent/ is a program, over core/; libgpushare is the only other thing of this project."""
    folders = {path.parent.name for path in (LIGHT.parents[2] / "gpushare_agent").glob("*/__init__.py")}
    own = {one.words.split()[0]: one.on for one in TEXTS if one.on.fill == OWN and one.is_bold}
    cores = [one.on for one in TEXTS if one.words == "core"]
    assert own.keys() == folders - {"core"} | {"libgpushare"}
    assert [name for name, box in own.items() if not any(box.has(core.x, core.y) for core in cores)] == ["libgpushare"]
    assert {core.fill for core in cores} == {CORE} and len(cores) == len(own)  # with that of core itself


def test_all_text_can_be_read_on_a_phone() -> None:
    """343 pixels are left of 375: 9 for a letter. No box stands across the edge of another one or of the picture."""
    assert float(PICTURE.attrib["font-size"]) * 343 / WIDTH >= 9
    assert all("font-size" not in one.attrib for one in PICTURE)
    for one in TEXTS:
        # As wide as in a font with wide letters, bold ones wider. The texts of arrows stand on a frame.
        width = len(one.words) * (8 if one.is_bold else 6.2)
        assert width <= one.on.width or one.on.fill == FRAME, one
    for box in BOXES:
        assert 0 < box.x < box.x + box.width < WIDTH and 0 < box.y < box.y + box.height < HEIGHT
    for one, other in combinations(BOXES, 2):
        is_inside = one.has(other.x, other.y) and one.has(other.x + other.width, other.y + other.height)
        is_next = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert is_inside or is_next or one.y + one.height <= other.y or other.y + other.height <= one.y, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    """WCAG's 4.5 to 1 for every pair that is used, 3 to 1 for lines."""
    in_theme = {colour: colour for colour in IN_THE_DARK} if theme == "light" else IN_THE_DARK
    assert [one for one in TEXTS if _contrast(in_theme[one.fill], in_theme[one.on.fill]) < 4.5] == []
    assert all(_contrast(in_theme[EDGE], in_theme[behind]) >= 3 for behind in ("#ffffff", FRAME))


def test_the_page_shows_it_in_both_themes_and_says_it_in_words() -> None:
    """A reader without pictures gets the same."""
    page = (LIGHT.parents[1] / "explanation/architecture.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"<picture>.*?</picture>", page, re.S)
    assert all(f"../screenshots/{path.name}" in shown for path in (LIGHT, DARK))
    assert len(re.findall(r'alt="([^"]+)"', shown)[0]) > 100


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(colour: str) -> Iterator[float]:
    for at in (1, 3, 5):
        part = int(colour[at : at + 2], 16) / 255
        yield part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
