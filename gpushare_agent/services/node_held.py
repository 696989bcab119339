"""Keeps the node's annotation about who holds what of each card true (decisions/node_held.py says what is in it).

Level, not edge: what is wanted is worked out anew after each change, and patched where it differs from what was written
last; every few minutes the node itself is read, so that what somebody undid comes back. One patch a second at the most,
however many pods come. Not in any admission's path. The mutable state is: what was written last, and what was complained of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.adapters.kube.slot import ApiSlot
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Rejected
from gpushare_agent.model.node_annotations import HELD_ANNOTATION

log = structlog.get_logger(__name__)

GAP_S = 1.0
"""Between two patches."""
PERIOD_S = 300.0
"""Between two looks at the node, and after a refusal."""
LOOK_GAP_S = 0.05
"""Between two looks at the books: one pod's Allocates come in a burst."""
NOT_YET_S = 0.5
"""Between two looks at books that are not to be trusted yet: that they are is told by nobody."""
CALL_TIMEOUT_S = 15.0
COMPLAIN_AGAIN_S = 3600.0
RETRY_CAP_S = 30.0
ROLE = "gpushare-agent-node-facts"


class PatchesNode(Protocol):
    async def get_node(self, name: str) -> dict[str, Any]: ...

    async def patch_node_metadata(
        self, name: str, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None: ...


class NodeHeldWriter:
    """`changed` at any time, `attach` when the API server can be reached, `run` once.

    `wanted` is the text that the node should have, None while the books are not to be trusted yet.
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
        self._backoff = backoff or Backoff(base_s=1.0, cap_s=RETRY_CAP_S)
        self._clock = clock
        self._api: ApiSlot[PatchesNode] = ApiSlot(None)
        self._is_changed = asyncio.Event()
        self._written: str | None = None
        self._read_at: float | None = None
        self._complained: tuple[str, float] | None = None

    def attach(self, api: PatchesNode) -> None:
        self._api.put(api)

    def changed(self) -> None:
        """Somebody holds something else than before, or is known better: look soon."""
        self._is_changed.set()

    async def run(self) -> NoReturn:
        """Until cancelled. A missing right is asked for again each period, any other failure with back-off."""
        api = await self._api.get()
        failures = 0
        while True:
            self._is_changed.clear()
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    is_patched = await self._compare(api)
                failures, self._complained = 0, None
            except (AgentError, TimeoutError) as e:
                failures += 1
                self._written = self._read_at = None  # a patch that timed out may have been taken: look again
                self._complain(str(e) or f"no answer within {CALL_TIMEOUT_S:g} s", is_refused=isinstance(e, Rejected))
                await asyncio.sleep(self._period_s if isinstance(e, Rejected) else self._backoff.delay_s(failures))
                continue
            await asyncio.sleep(self._gap_s if is_patched else min(LOOK_GAP_S, self._gap_s))
            await self._wait_changed()

    async def _compare(self, api: PatchesNode) -> bool:
        """One look; whether the node was patched."""
        if self._wanted() is None:
            return False
        if self._read_at is None or self._clock() - self._read_at >= self._period_s:
            self._written = _annotation(await api.get_node(self._node_name))
            self._read_at = self._clock()
        wanted = self._wanted()  # the newest: the node may have taken a while to read
        if wanted is None or wanted == self._written:
            return False
        await api.patch_node_metadata(self._node_name, labels={}, annotations={HELD_ANNOTATION: wanted})
        self._written = wanted
        log.debug("node_held_written", node=self._node_name, chars=len(wanted))
        return True

    async def _wait_changed(self) -> None:
        try:
            async with asyncio.timeout(self._period_s if self._wanted() is not None else NOT_YET_S):
                await self._is_changed.wait()
        except TimeoutError:
            return

    def _complain(self, text: str, *, is_refused: bool) -> None:
        """Once, and again after an hour of the same."""
        now = self._clock()
        known = self._complained
        if known is not None and known[0] == text and now - known[1] < COMPLAIN_AGAIN_S:
            return
        self._complained = (text, now)
        cure = (
            f"give the agent's account the ClusterRole {ROLE} (manifests/base/rbac.yaml), or set facts.is_written: false"
            if is_refused
            else "none: it is tried again"
        )
        lost = "the scheduler extender counts this node's new pods wherever they could be"
        log.warning("node_held_not_written", node=self._node_name, error=text, lost=lost, cure=cure)


def _annotation(raw_node: Mapping[str, Any]) -> str | None:
    raw_metadata = raw_node.get("metadata")
    raw_annotations = raw_metadata.get("annotations") if isinstance(raw_metadata, dict) else None
    text = raw_annotations.get(HELD_ANNOTATION) if isinstance(raw_annotations, dict) else None
    return text if isinstance(text, str) else None
