"""A Python that is too old says so itself: what is run from a checkout is kept from it by no `requires-python`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST_READ = ("noxfile.py", "gpushare_agent/__init__.py", "gpushare_agent/__main__.py")
AS_OLDER = """
import runpy, sys, types
sys.version, sys.version_info = "3.10.1 (main)", (3, 10, 1, "final", 0)
sys.modules |= dict(nox=types.ModuleType("nox"), tomllib=None)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("name", FIRST_READ)
def test_what_an_older_python_reads_first_is_no_syntax_error_there(name: str) -> None:
    """Down to the oldest on which a nox runs that reads the file."""
    ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.parametrize("name", ["noxfile.py", "gpushare_agent/__main__.py"])
def test_an_older_python_is_one_line(name: str) -> None:
    """Which Python it is, and which it must be."""
    done = subprocess.run(
        [sys.executable, "-c", AS_OLDER, str(ROOT / name)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("gpushare-agent needs Python 3.11 or newer, this is 3.10.1: ")
