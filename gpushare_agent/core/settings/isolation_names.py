"""The names of all isolations, for the settings and for what is decided about a pod's annotation."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

_COMBINATIONS = ("gpushare+driver", "mps+driver")
"""`A+driver` is A for compute, with the driver's own limit of memory."""


@cache
def isolation_names() -> tuple[str, ...]:
    """Sorted: the packages of gpushare_agent/agent/isolation that have a module `edits`, and the combinations of them.

    The folders are listed, not imported: the isolations are above the settings, and most of them not in use.
    """
    found = find_spec("gpushare_agent.agent.isolation")
    folders = found.submodule_search_locations if found is not None else None
    packages = {path.parent.name for folder in folders or () for path in Path(folder).glob("*/edits.py")}
    return tuple(sorted([*(name.replace("_", "-") for name in packages), *_COMBINATIONS]))
