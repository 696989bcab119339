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

TENANT_FILES = "agent/isolation/tenant_files.py"
CHANGES = {"rename", "renames", "link", "symlink", "truncate", "ftruncate", "unlink", "remove", "rmdir", "rmtree"}
CHANGES |= {
    "hardlink_to",
    "symlink_to",
    "write_text",
    "write_bytes",
    "touch",
    "O_WRONLY",
    "O_RDWR",
    "O_TRUNC",
    "O_CREAT",
}
HELPERS = {"remove_tree", "replace_file", "clear_path"}
"""Of core/kit/directories.py."""
NOT_A_TENANTS = {
    "agent/delivery/cdi_files.py": "the directory of CDI's specs, in no container",
    "agent/delivery/volume_directory.py": "the driver's volume, which containers have read-only",
    "agent/dra/claim_files.py": "the records of claims, in no container",
    "agent/isolation/gpushare/files.py": "gpushare.config, which containers have read-only",
    "agent/isolation/gpushare/library.py": "the library, which containers have read-only",
    "agent/isolation/gpushare/probe.py": "the directory of the agent's own program, in no container",
    "agent/isolation/mps/files.py": "what an ended daemon has left, in the process that starts the next one",
    "agent/isolation/vdevice/files.py": "vcuda.config, pids.config and vcuda.sock, which containers have read-only",
}
"""The other modules there that change files by themselves, and which."""


def test_one_module_changes_the_files_that_a_tenant_can_write() -> None:
    """The kernel may take half a minute for it, so no other module renames, opens to write, shortens or removes one."""
    folders = ("agent/isolation", "agent/delivery", "agent/admission", "agent/dra")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): changes(path) for path in modules}
    assert {path for path, names in found.items() if names} - {TENANT_FILES} == NOT_A_TENANTS.keys()
    own = found[TENANT_FILES] - {"O_WRONLY", "O_CREAT"}  # of a new file
    assert own == {"rename", "unlink", "remove_tree", "O_RDWR", "ftruncate"}
    # Who else knows the name of such a file reads it, or gives it to a container.
    writers = [path for path, names in found.items() if names and path != TENANT_FILES]
    named = {
        path for path in writers if re.search(r"USAGE_NAME|\busage\b\"", (ROOT / path).read_text(encoding="utf-8"))
    }
    assert named <= {
        f"agent/isolation/{name}" for name in ("gpushare/files.py", "gpushare/probe.py", "vdevice/files.py")
    }


def changes(path: Path) -> set[str]:
    """What a module names that changes files: of os, shutil, Path and HELPERS."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in CHANGES and not _is_collections(node):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in HELPERS:
            found.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            is_write = node.func.attr == "open" and isinstance(mode, str) and set(mode) & set("wax+")
            # Of Path it has one argument, of str two.
            is_replace = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            found |= {node.func.attr} if is_write or is_replace else set()
    return found


def _is_collections(node: ast.Attribute) -> bool:
    """`remove` of a list or of the driver, not of os."""
    return node.attr == "remove" and not (isinstance(node.value, ast.Name) and node.value.id == "os")
