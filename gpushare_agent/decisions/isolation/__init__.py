"""What makes a share real inside a container: one pure function per isolation (docs/isolation.md shows how to add one).

An isolation turns what a container holds and the node's settings into container edits. What must exist on the host before
the container starts (directories, sockets) is prepared by a service that the isolation names; `none` needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpushare_agent.decisions.isolation.none import edit_none
from gpushare_agent.decisions.isolation.request import IsolationPaths, IsolationRequest
from gpushare_agent.decisions.isolation.vcuda import edit_vcuda
from gpushare_agent.model.allocations import ContainerEdits

ISOLATIONS: Mapping[str, Callable[[IsolationRequest], ContainerEdits]] = {
    "none": edit_none,
    "vcuda": edit_vcuda,
}

__all__ = ["ISOLATIONS", "IsolationPaths", "IsolationRequest"]
