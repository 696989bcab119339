"""What makes a share real inside a container: one pure function per isolation (docs/isolation.md shows how to add one).

An isolation turns what a container holds and the node's settings into container edits. What must exist on the host before
the container starts (directories, sockets) is prepared by a service that the isolation names; `none` needs nothing.

A new isolation is one file here, with an `ISOLATION` in it and named like its line in model/isolation.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from gpushare_agent.isolation.request import (
    HamiCoreConfig,
    Isolation,
    IsolationConfig,
    IsolationRequest,
    MpsConfig,
    Preparation,
)
from gpushare_agent.model.isolation import IsolationName


def _of(name: IsolationName) -> Isolation:
    module = "none" if name is IsolationName.NONE else f"{name.replace('-', '_')}.edits"
    found: Isolation = import_module(f"{__name__}.{module}").ISOLATION
    return found


ISOLATIONS: Mapping[IsolationName, Isolation] = {name: _of(name) for name in IsolationName}

__all__ = [
    "ISOLATIONS",
    "HamiCoreConfig",
    "Isolation",
    "IsolationConfig",
    "IsolationRequest",
    "MpsConfig",
    "Preparation",
]
