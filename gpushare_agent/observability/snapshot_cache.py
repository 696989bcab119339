"""The node's snapshot, made once for all readers: on the first read after a round of sampling or a change, and after
`max_age_s` without either, for what has no notification (whether the agent is ready).

State owned: the last snapshot, when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpushare_agent.observability.node_snapshot import NodeSnapshot

MAX_AGE_S = 1.0


class SnapshotCache:
    """Its values are shared between readers: do not change them."""

    def __init__(
        self,
        make: Callable[[], NodeSnapshot],
        *,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at = float("-inf")
        self._snapshot: NodeSnapshot | None = None

    def expire(self) -> None:
        """Something has changed: the next reader gets a new snapshot."""
        self._made_at = float("-inf")

    def current(self) -> NodeSnapshot:
        if self._snapshot is None or self._clock() - self._made_at >= self._max_age_s:
            self._snapshot = self._make()
            self._made_at = self._clock()
        return self._snapshot
