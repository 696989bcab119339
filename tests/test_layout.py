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


# ---- what a tenant can write ----

CHANGES = {
    *["rename", "renames", "link", "symlink", "truncate", "ftruncate", "unlink", "remove", "rmdir", "rmtree", "move"],
    *["hardlink_to", "symlink_to", "write_text", "write_bytes", "touch", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_CREAT"],
}
HELPERS = {"remove_tree", "replace_file", "clear_path"}
"""Of core/kit/directories.py."""
CHANGING = {
    "agent/isolation/tenant_files.py": {
        *("rename", "unlink", "remove_tree", "ftruncate", "O_RDWR"),
        *("O_WRONLY", "O_CREAT"),  # of a new file
    },
    # The specs of CDI and the records of claims are in no container; the driver's volume containers have read-only.
    "agent/delivery/cdi_files.py": {"replace_file", "unlink"},
    "agent/delivery/volume_directory.py": {
        *("O_CREAT", "O_RDWR", "open", "rename", "rmtree", "symlink_to", "unlink"),
    },
    "agent/dra/claim_files.py": {"replace_file", "unlink"},
    # gpushare.config, next to `usage`: nothing there is renamed, shortened or removed by itself.
    "agent/isolation/gpushare/files.py": {"O_RDWR", "replace_file"},
    "agent/isolation/gpushare/library.py": {"replace_file"},
    # The directory of the agent's own program, and what an ended daemon of MPS has left.
    "agent/isolation/gpushare/probe.py": {"open", "rmdir", "unlink", "write_bytes"},
    "agent/isolation/mps/files.py": {"O_RDWR", "unlink"},
    # vcuda.config and pids.config, their half-written copies, and what lies in the place of the socket.
    "agent/isolation/vdevice/files.py": {"remove_tree", "replace_file", "clear_path"},
}
"""What each module there that changes files uses for it."""


def test_one_module_changes_the_files_that_a_tenant_can_write() -> None:
    """The kernel may take half a minute for it, so no other module renames, opens to write, shortens or removes one."""
    folders = ("agent/isolation", "agent/delivery", "agent/admission", "agent/dra")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): changes(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: names for path, names in found.items() if names} == CHANGING


@pytest.mark.parametrize(
    "line",
    [
        *(
            "os.rename(a, b, src_dir_fd=c)",
            "os.replace(a, b)",
            "path.replace(b)",
            "from os import unlink",
            "path.unlink()",
        ),
        *("os.open(a, os.O_RDWR)", "open(a, 'w')", "path.open('r+b')", "path.open(mode='ab')", "os.truncate(a, 0)"),
        *("shutil.move(a, b)", "remove_tree(a, b)", "os.remove(a)"),
    ],
)
def test_what_changes_a_file_is_found(line: str) -> None:
    assert changes(line) and not changes("text.replace(a, b); keys.remove(a); path.open('rb'); os.open(a, os.O_RDONLY)")


def changes(source: str) -> set[str]:
    """What a module names that changes files: of os, shutil, Path and HELPERS."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            found |= CHANGES & {one.name for one in node.names}
        elif isinstance(node, ast.Attribute) and node.attr in CHANGES | {"replace"}:
            # `remove` of a list, `replace` of a text.
            if node.attr not in ("remove", "replace") or (isinstance(node.value, ast.Name) and node.value.id == "os"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in HELPERS:
            found.add(node.id)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [*node.args, *(one.value for one in node.keywords if one.arg == "mode")]
            texts = [one.value for one in modes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            is_write = name == "open" and any(set(text) & set("wax+") for text in texts)
            # Of Path it has one argument, of str two.
            is_replace = (
                isinstance(node.func, ast.Attribute) and name == "replace" and len(node.args) == 1 and not node.keywords
            )
            found |= {name} if is_write or is_replace else set()
    return found
