"""Keeps the node's labels and its annotation about the cards true (decisions/node_facts.py says what they are).

Level, not edge: the node is read when something changed and every few minutes, and patched only where it differs; a
change undone by hand comes back that way. Not in any admission's path. No state but what was last complained of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.adapters.kube.slot import ApiSlot
from gpushare_agent.decisions.node_facts import NodeFacts, plan_node_patch
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Rejected

log = structlog.get_logger(__name__)

PERIOD_S = 300.0
GAP_S = 2.0
"""Between two patches: a card that flaps must not write to the API server with every look."""
CALL_TIMEOUT_S = 15.0
COMPLAIN_AGAIN_S = 3600.0
ROLE = "gpushare-agent-node-facts"


class PatchesNodes(Protocol):
    async def get_node(self, name: str) -> dict[str, Any]: ...

    async def patch_node_metadata(
        self, name: str, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None: ...


class NodeFactsWriter:
    """`changed` at any time, `attach` when the API server can be reached, `run` once.

    `wanted` is None while nothing is known of the cards: then what an earlier agent wrote stays.
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
        self._backoff = backoff or Backoff(base_s=1.0, cap_s=period_s)
        self._clock = clock
        self._api: ApiSlot[PatchesNodes] = ApiSlot(None)
        self._is_changed = asyncio.Event()
        self._complained: tuple[str, float] | None = None
        self._foreign: Sequence[str] = ()
        self._unusable: Sequence[str] = ()

    def attach(self, api: PatchesNodes) -> None:
        self._api.put(api)

    def changed(self) -> None:
        """The cards are not what they were: look soon."""
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
                self._complain(str(e) or f"no answer within {CALL_TIMEOUT_S:g} s", is_refused=isinstance(e, Rejected))
                await asyncio.sleep(self._period_s if isinstance(e, Rejected) else self._backoff.delay_s(failures))
                continue
            if is_patched:
                await asyncio.sleep(self._gap_s)
            await self._wait_changed()

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

    async def _wait_changed(self) -> None:
        try:
            async with asyncio.timeout(self._period_s):
                await self._is_changed.wait()
        except TimeoutError:
            return

    def _complain(self, text: str, *, is_refused: bool) -> None:
        """Once, and again after an hour of the same."""
        now = self._clock()
        if (
            self._complained is not None
            and self._complained[0] == text
            and now - self._complained[1] < COMPLAIN_AGAIN_S
        ):
            return
        self._complained = (text, now)
        cure = (
            f"give the agent's account the ClusterRole {ROLE} (manifests/base/rbac.yaml), or set facts.is_written: false"
            if is_refused
            else "none: it is tried again"
        )
        log.warning("node_facts_not_written", node=self._node_name, error=text, cure=cure)
