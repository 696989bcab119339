"""The house's rule that no linter knows: what a folder lets others import."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "gpushare_agent"
FOLDERS = sorted(
    path.parent.relative_to(ROOT)
    for path in [*ROOT.glob("*/__init__.py"), *ROOT.glob("agent/*/__init__.py")]
    if path.parent.name != "core"
)
"""The programs, and the folders of the agent. Of core everything is for everybody."""


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_names_what_others_import(folder: Path) -> None:
    """Its docstring's line `Others import: …` has every such module and no other; the rest may change unseen."""
    docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.search(r"^Others import: (.+?)\.$", docstring, flags=re.M | re.S)
    assert named is not None, f"{folder}/__init__.py says nothing of what others import"
    others = (names for path, names in all_imports().items() if not path.is_relative_to(ROOT / folder))
    prefix = ".".join(("gpushare_agent", *folder.parts, ""))
    modules = {name.removeprefix(prefix) for names in others for name in names if name.startswith(prefix)}
    assert set(re.split(r",\s+", named[1])) == (modules or {"nothing"})


@cache
def all_imports() -> dict[Path, set[str]]:
    """Of each module those that it imports."""
    return {path: imported_modules(path) for path in ROOT.rglob("*.py") if "wire" not in path.parts}


def imported_modules(path: Path) -> set[str]:
    """The dotted names of the package's modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for name in found if (module := _module(name)) is not None}


@cache
def _module(name: str) -> str | None:
    parts = name.split(".")
    while len(parts) > 2:
        path = ROOT.parent.joinpath(*parts)
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts)
        parts.pop()
    return None
