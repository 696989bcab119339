"""The pictures of the documents show what there is: `python -m tests.browser.screenshots docs/screenshots` makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.browser.screenshots import COMMAND, DIRECTORY, INPUTS, PAGES, SCENES, inputs_of
from tests.browser.top_picture import top_picture

ROOT = Path(__file__).parents[2]
MOST_BYTES = 250_000


def test_the_picture_of_top_is_what_top_shows() -> None:
    """To the letter: it is made of a fixed document."""
    assert (DIRECTORY / "top.svg").read_text(encoding="utf-8") == top_picture(), f"run `{COMMAND} top`"


@pytest.mark.parametrize("scene", SCENES)
def test_the_pictures_of_a_page_are_of_its_files(scene: str) -> None:
    """A browser draws no two alike, so what they are made of is compared: the page's files, and what is shown."""
    made, now = json.loads((DIRECTORY / INPUTS).read_text(encoding="utf-8")).get(scene, {}), inputs_of(scene)
    changed = sorted(name for name in made.keys() | now.keys() if made.get(name) != now.get(name))
    assert not changed, f"{', '.join(changed)} changed since the pictures were taken: run `{COMMAND} {scene}`"


def test_the_inputs_are_all_files_of_a_page_without_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment changes no picture; a line does, also of what a module imports."""
    assert {"index.html", "dashboard.css", "app.js", "gpus.js", "dom.js", "icon.svg"} <= inputs_of("node").keys()
    assert "gpus.js" not in inputs_of("cluster")
    for file in PAGES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("tests.browser.screenshots.PAGES", tmp_path)
    before = inputs_of("node")
    for name, comment in (("dom.js", "\n// a note\n/* and\nanother */\n"), ("dashboard.css", "\n/* a note */\n")):
        (tmp_path / name).write_text((tmp_path / name).read_text() + comment)
    assert inputs_of("node") == before
    (tmp_path / "dom.js").write_text((tmp_path / "dom.js").read_text() + "\nexport const more = 1;\n")
    after = inputs_of("node")
    assert {name for name in after if after[name] != before[name]} == {"dom.js"}


def test_each_picture_is_small_shown_and_described() -> None:
    """None is left over, and each has a text for who does not see it."""
    pictures = {path.name for path in DIRECTORY.iterdir()} - {INPUTS}
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    text = "\n".join(texts)
    images = re.findall(r"!\[([^\]]*)\]\([^)]*screenshots/", text) + re.findall(r'<img alt="([^"]*)"', text)
    assert [words for words in images if len(words) < 10] == []
    assert pictures == set(re.findall(r"screenshots/([\w-]+\.(?:png|svg))", text))
    assert {name for name in pictures if (DIRECTORY / name).stat().st_size > MOST_BYTES} == set()
