"""Which of the driver's control nodes the host has now. They may come after the agent: the first user of a GPU makes them.

State owned: which were absent at the last look, for the log. A look takes no more than a stat in devtmpfs, which is memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import structlog

log = structlog.get_logger(__name__)


class ControlNodes:
    """`paths` in the order in which containers get them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._absent: tuple[str, ...] = ()

    def present(self) -> tuple[str, ...]:
        """Those that exist; a container that named another would not start."""
        found = tuple(path for path in self._paths if os.path.exists(path))  # noqa: PTH110 - at each Allocate
        absent = tuple(path for path in self._paths if path not in found)
        if absent != self._absent:
            self._absent = absent
            log.warning("control_nodes_absent", paths=list(absent), then="containers get those that are there")
        return found
