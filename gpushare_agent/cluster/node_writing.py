"""Keeps something on the node's object true: the loop that node_facts.py and node_held.py share.

Level, not edge: `compare` looks after every change and after a while without any, and patches what differs. Failures are
retried and told, in the log, once an hour for the same one. The mutable state is: whether something changed, and what was
complained of last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.slot import ApiSlot
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Rejected

log = structlog.get_logger(__name__)

PERIOD_S = 300.0
"""Between two looks at a node where nothing changed, and after a refusal."""
CALL_TIMEOUT_S = 15.0
COMPLAIN_AGAIN_S = 3600.0
ROLE = "gpushare-agent-node-facts"
CURE = f"give the agent's account the ClusterRole {ROLE} (manifests/base/rbac.yaml), or set facts.is_written: false"


class PatchesNodes(Protocol):
    async def get_node(self, name: str) -> dict[str, Any]: ...

    async def patch_node_metadata(
        self, name: str, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None: ...


class NodeWriting:
    """`attach` once the API server can be reached, `changed` at any time, `run` once. `told` is the log's
    event of a failure, `lost` what is missing meanwhile."""

    def __init__(
        self,
        *,
        node_name: str,
        reported: str,
        lost: str,
        period_s: float,
        backoff: Backoff,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._reported = reported
        self._lost = lost
        self._period_s = period_s
        self._backoff = backoff
        self._clock = clock
        self._api: ApiSlot[PatchesNodes] = ApiSlot(None)
        self._is_changed = asyncio.Event()
        self._complained: tuple[str, float] | None = None

    def attach(self, api: PatchesNodes) -> None:
        self._api.put(api)

    def changed(self) -> None:
        self._is_changed.set()

    async def run(
        self,
        compare: Callable[[PatchesNodes], Awaitable[bool]],
        *,
        gap_s: Callable[[bool], float],
        wait_s: Callable[[], float],
    ) -> NoReturn:
        """Until cancelled. `compare` says whether it patched, after which `gap_s` is kept before the next look; `wait_s` is
        how long to wait for a change. A missing right is asked for again each period, any other failure with back-off."""
        api = await self._api.get()
        failures = 0
        while True:
            self._is_changed.clear()
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    is_patched = await compare(api)
                failures, self._complained = 0, None
            except (AgentError, TimeoutError) as e:
                failures += 1
                self._complain(str(e) or f"no answer within {CALL_TIMEOUT_S:g} s", is_refused=isinstance(e, Rejected))
                await asyncio.sleep(self._period_s if isinstance(e, Rejected) else self._backoff.delay_s(failures))
                continue
            await asyncio.sleep(gap_s(is_patched))
            await self._wait_changed(wait_s())

    async def _wait_changed(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._is_changed.wait()
        except TimeoutError:
            return

    def _complain(self, text: str, *, is_refused: bool) -> None:
        now, known = self._clock(), self._complained
        if known is not None and known[0] == text and now - known[1] < COMPLAIN_AGAIN_S:
            return
        self._complained = (text, now)
        cure = CURE if is_refused else "none: it is tried again"
        log.warning(self._reported, node=self._node_name, error=text, lost=self._lost, cure=cure)
