"""The recipes of CONTRIBUTING.md: each diff applies to the package as it is, and the line below it finds what was added."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_RECIPE = re.compile(r"^### (.+?)\n.*?^```diff\n(.*?)^```\n\n```\n(.*?)\n```$", re.S | re.M)
RECIPES = _RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def outcome(copy: Path, line: str) -> int:
    """The exit code of the shell's line, which finds the copy's package and the tests' support."""
    environment = os.environ | {"PYTHONPATH": f"{copy}:{ROOT}", "NODE_NAME": "node"}
    line = line.replace("python ", f"{sys.executable} ", 1)
    return subprocess.run(["bash", "-c", line], cwd=copy, env=environment, check=False, timeout=120).returncode


def test_there_is_one_for_what_people_add_every_week() -> None:
    words = ("setting", "metric", "annotation", "field", "command")
    assert [word for (title, _, _), word in zip(RECIPES, words, strict=True) if word not in title] == []


@pytest.mark.parametrize(("diff", "line"), [(diff, line) for _, diff, line in RECIPES], ids=[one[0] for one in RECIPES])
def test_a_recipe_does_what_it_says(diff: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "gpushare_agent", tmp_path / "gpushare_agent", ignore=shutil.ignore_patterns("__pycache__"))
    assert outcome(tmp_path, line) == 1, "without the recipe the line finds nothing"
    subprocess.run(["git", "apply", "-p0", "-C1", "-"], input=diff, text=True, cwd=tmp_path, check=True, timeout=30)
    assert outcome(tmp_path, line) == 0
