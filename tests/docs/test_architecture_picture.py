"""The picture of docs/explanation/architecture.md is what its command makes, and shows each program of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.docs.architecture_picture import (
    ARROWS,
    CORE,
    HEIGHT,
    OTHERS,
    PROGRAMS,
    ROOT,
    THEMES,
    WIDTH,
    outdated,
    picture,
)


def test_the_committed_files_are_what_the_command_makes() -> None:
    """`python -m tests.docs.architecture_picture --write` writes them."""
    assert outdated() == []


def test_it_has_each_program_of_the_package_and_the_core() -> None:
    """A folder of gpushare_agent/ is a program, over core/."""
    folders = {path.parent.name for path in (ROOT / "gpushare_agent").glob("*/__init__.py")}
    assert {*PROGRAMS, CORE.lines[0]} == folders
    assert all(box.has_core and box.is_own for box in PROGRAMS.values())


@pytest.mark.parametrize("theme", THEMES)
def test_all_text_can_be_read_on_a_phone(theme: str) -> None:
    """343 pixels are left of 375: 9 for a letter. No box stands on another one, and none leaves the picture."""
    root = ElementTree.fromstring(picture(theme))
    assert float(root.attrib["font-size"]) * 343 / WIDTH >= 9
    assert all("font-size" not in one.attrib for one in root.iter() if one is not root)
    boxes = [*PROGRAMS.values(), *(box for box in OTHERS if box.lines != ("container",))]
    for box in (*boxes, CORE):
        assert 0 < box.x < box.x + box.width < WIDTH and 0 < box.y < box.y + box.height < HEIGHT
        # As wide as in a font with wide letters, bold ones wider.
        assert all(len(line) * 6.2 + 4 <= box.width for line in box.lines[1:]) and len(box.lines[0]) * 8 <= box.width
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            apart = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y, (one, other)


@pytest.mark.parametrize("theme", THEMES)
def test_its_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    """WCAG's 4.5 to 1 for every pair that is used, 3 to 1 for lines."""
    colours = THEMES[theme]
    texts = [("text", behind) for behind in ("page", "frame", "own")] + [
        ("soft", "frame"),
        ("soft", "own"),
        ("soft", "page"),
    ]
    assert all(_contrast(colours[text], colours[behind]) >= 4.5 for text, behind in [*texts, ("on_core", "core")])
    assert all(_contrast(colours["edge"], colours[behind]) >= 3 for behind in ("page", "frame"))


def test_the_page_shows_it_in_both_themes_and_says_it_in_words() -> None:
    """A reader without pictures gets the same."""
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"<picture>.*?</picture>", page, re.S)
    assert all(f"../screenshots/architecture-{theme}.svg" in shown for theme in THEMES)
    assert len(re.findall(r'alt="([^"]+)"', shown)[0]) > 100
    assert {len(arrow.points) >= 2 for arrow in ARROWS} == {True}


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
