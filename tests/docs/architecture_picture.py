"""The picture of docs/explanation/architecture.md. architecture-light.svg is drawn by hand;
`python -m tests.docs.architecture_picture --write` makes the dark one, which differs in its colours; a test compares.

A forge shows an SVG as an image, which does not know the theme of the page around it: <picture> chooses between the files.
No text is smaller than 12 of 460 units of width, so that it can be read on a phone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LIGHT, DARK = (Path(__file__).parents[2] / f"docs/screenshots/architecture-{theme}.svg" for theme in ("light", "dark"))
OWN, CORE, EDGE, FRAME = "#ddf4e4", "#1a7f37", "#818b98", "#f6f8fa"
"""What is of this project, what imports core/, edges and arrows, and what has boxes in it."""
IN_THE_DARK = {
    OWN: "#12341f", CORE: "#3fb950", EDGE: "#8b949e", FRAME: "#151b23", "#ffffff": "#0d1117", "#1f2328": "#f0f6fc",
    "#59636e": "#a7b1bc",
}  # fmt: skip


def dark_picture() -> str:
    return re.sub("#[0-9a-f]{6}", lambda found: IN_THE_DARK[found[0]], LIGHT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    is_outdated = DARK.read_text(encoding="utf-8") != dark_picture()
    if is_outdated and "--write" in sys.argv:
        DARK.write_text(dark_picture(), encoding="utf-8")
    sys.exit(is_outdated and "--write" not in sys.argv)
