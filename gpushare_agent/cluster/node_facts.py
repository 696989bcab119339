"""Keeps the node's labels and its annotation about the GPUs true (cluster/node_facts_wanted.py says what they are).

Level, not edge: the node is read when something changed and every few minutes, and patched only where it differs; a
change undone by hand comes back that way. Not in any admission's path. The loop is node_writing.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import structlog

from gpushare_agent.cluster.node_facts_wanted import NodeFacts, plan_node_patch
from gpushare_agent.cluster.node_writing import PERIOD_S, NodeWriting, PatchesNodes
from gpushare_agent.kit.backoff import Backoff

log = structlog.get_logger(__name__)

GAP_S = 2.0
"""Between two patches: a GPU that flaps must not write to the API server with every look."""


class NodeFactsWriter:
    """`changed` at any time, `attach` when the API server can be reached, `run` once.

    `wanted` is None while nothing is known of the GPUs: then what an earlier agent wrote stays.
    """

    def __init__(
        self,
        *,
        node_name: str,
        wanted: Callable[[], NodeFacts | None],
        period_s: float = PERIOD_S,
        gap_s: float = GAP_S,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._wanted = wanted
        self._period_s = period_s
        self._gap_s = gap_s
        self._writing = NodeWriting(
            node_name=node_name,
            reported="node_facts_not_written",
            lost="labels and GPUs on the node's object are those of before",
            period_s=period_s,
            backoff=backoff or Backoff(base_s=1.0, cap_s=period_s),
            clock=clock,
        )
        self._foreign: Sequence[str] = ()
        self._unusable: Sequence[str] = ()

    def attach(self, api: PatchesNodes) -> None:
        self._writing.attach(api)

    def changed(self) -> None:
        """The GPUs are not what they were: look soon."""
        self._writing.changed()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._writing.run(
            self._compare,
            gap_s=lambda is_patched: self._gap_s if is_patched else 0.0,
            wait_s=lambda: self._period_s,
        )

    async def _compare(self, api: PatchesNodes) -> bool:
        """One look; whether the node was patched."""
        if self._wanted() is None:
            return False
        raw_node = await api.get_node(self._node_name)
        wanted = self._wanted()  # the newest: the node may have taken a while to read
        if wanted is None:
            return False
        patch = plan_node_patch(raw_node, wanted)
        if wanted.unusable != self._unusable:
            self._unusable = wanted.unusable
            log.error("node_labels_unusable", labels=list(wanted.unusable), then="left out", cure="mend node_labels")
        if patch.foreign != self._foreign:
            self._foreign = patch.foreign
            if patch.foreign:
                log.warning("node_labels_held_by_others", labels=list(patch.foreign), then="left as they are")
        if patch.is_empty:
            return False
        await api.patch_node_metadata(self._node_name, labels=patch.labels, annotations=patch.annotations)
        log.info(
            "node_facts_written",
            node=self._node_name,
            labels={name: value for name, value in patch.labels.items() if value is not None},
            removed=[name for name, value in patch.labels.items() if value is None],
            annotations=sorted(patch.annotations),
        )
        return True
