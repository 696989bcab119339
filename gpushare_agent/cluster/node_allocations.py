"""Keeps the node's annotation about who holds what of each GPU true (cluster/node_allocations_wanted.py says what is in
it).

Level, not edge: what is wanted is worked out anew after each change, and patched where it differs from what was written
last; every few minutes the node itself is read, so that what somebody undid comes back. One patch a second at the most,
however many pods come. Not in any admission's path. The loop is
node_writing.py. The mutable state is: what was written last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import structlog

from gpushare_agent.cluster.node_annotations import ALLOCATIONS_ANNOTATION
from gpushare_agent.cluster.node_writing import PERIOD_S, NodeWriting, PatchesNodes
from gpushare_agent.kit.backoff import Backoff

log = structlog.get_logger(__name__)

GAP_S = 1.0
"""Between two patches."""
LOOK_GAP_S = 0.05
"""Between two looks at the ledger: one pod's Allocates come in a burst."""
NOT_YET_S = 0.5
"""Between two looks at books that are not to be trusted yet: that they are is told by nobody."""
RETRY_CAP_S = 30.0


class NodeAllocationsWriter:
    """`changed` at any time, `attach` when the API server can be reached, `run` once.

    `wanted` is the text that the node should have, None while the ledger is not to be trusted yet.
    """

    def __init__(
        self,
        *,
        node_name: str,
        wanted: Callable[[], str | None],
        gap_s: float = GAP_S,
        period_s: float = PERIOD_S,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._wanted = wanted
        self._gap_s = gap_s
        self._period_s = period_s
        self._clock = clock
        self._writing = NodeWriting(
            node_name=node_name,
            reported="node_held_not_written",
            lost="the scheduler extender counts this node's new pods wherever they could be",
            period_s=period_s,
            backoff=backoff or Backoff(base_s=1.0, cap_s=RETRY_CAP_S),
            clock=clock,
        )
        self._written: str | None = None
        self._read_at: float | None = None

    def attach(self, api: PatchesNodes) -> None:
        self._writing.attach(api)

    def changed(self) -> None:
        """Somebody holds something else than before, or is known better: look soon."""
        self._writing.changed()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._writing.run(
            self._compare_or_forget,
            gap_s=lambda is_patched: self._gap_s if is_patched else min(LOOK_GAP_S, self._gap_s),
            wait_s=lambda: self._period_s if self._wanted() is not None else NOT_YET_S,
        )

    async def _compare_or_forget(self, api: PatchesNodes) -> bool:
        try:
            return await self._compare(api)
        except BaseException:  # cancelled by the time limit too
            self._written = self._read_at = None  # a patch that timed out may have been taken: look again
            raise

    async def _compare(self, api: PatchesNodes) -> bool:
        """One look; whether the node was patched."""
        if self._wanted() is None:
            return False
        if self._read_at is None or self._clock() - self._read_at >= self._period_s:
            self._written = _annotation(await api.get_node(self._node_name))
            self._read_at = self._clock()
        wanted = self._wanted()  # the newest: the node may have taken a while to read
        if wanted is None or wanted == self._written:
            return False
        await api.patch_node_metadata(self._node_name, labels={}, annotations={ALLOCATIONS_ANNOTATION: wanted})
        self._written = wanted
        log.debug("node_held_written", node=self._node_name, chars=len(wanted))
        return True


def _annotation(raw_node: Mapping[str, Any]) -> str | None:
    raw_metadata = raw_node.get("metadata")
    raw_annotations = raw_metadata.get("annotations") if isinstance(raw_metadata, dict) else None
    text = raw_annotations.get(ALLOCATIONS_ANNOTATION) if isinstance(raw_annotations, dict) else None
    return text if isinstance(text, str) else None
