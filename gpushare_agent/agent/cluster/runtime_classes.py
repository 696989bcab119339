"""The handlers of RuntimeClasses that pods of this node name, from the API server.

An admission asks for one and waits a moment at most. Where the API server does not tell (no right, no such class, no
answer), the class's former handler counts, else its name: most are named so. The handler of a class never changes, but a
class may be deleted and made again. State owned: the handlers, and when each was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

import structlog
from msgspec import Meta, Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

WAIT_S = 1.0
KEPT_S = 60.0
MAX_KEPT = 256


class _RuntimeClass(Struct):
    handler: Annotated[str, Meta(max_length=253)]


_CLASS = Decoder(_RuntimeClass)


class RuntimeClasses(Struct, kw_only=True, eq=False):
    """`attach` when the API server can be reached."""

    clock: Callable[[], float] = time.monotonic
    handlers: dict[str, str] = field(default_factory=dict)
    """By the class's name; those that are not known, or not for now, are left out."""
    _read_at: dict[str, float] = field(default_factory=dict)
    _api: KubeApi | None = None
    _unread: ReportOnce = field(default_factory=ReportOnce)

    def attach(self, api: KubeApi) -> None:
        self._api = api

    async def learn(self, pods: Iterable[Pod], timeout_s: float = WAIT_S) -> None:
        """Reads the handlers of these pods' classes that were not read within KEPT_S. Waits at most `timeout_s` in all."""
        ends_at = self.clock() + min(timeout_s, WAIT_S)
        for name in sorted({pod.runtime_class for pod in pods if pod.runtime_class}):
            if self._api is None or self.clock() - self._read_at.get(name, float("-inf")) < KEPT_S:
                continue
            try:
                # Not 0 where others took the time: that is the client's usual time.
                raw = await self._api.get_runtime_class(name, timeout_s=max(0.01, ends_at - self.clock()))
                handler = decoded(_CLASS, raw, f"RuntimeClass {name}").handler
            except AgentError as e:  # asked again by the next admission
                if self._unread.is_new(str(e), name):
                    then = f"its handler counts as {self.handlers.get(name, name)}"
                    log.warning("runtime_class_not_read", name=name, error=str(e), then=then)
                continue
            # Noted with the answer, not before: another call that waits for it now must not go on without it.
            self._read_at.pop(name, None)
            self._read_at[name], self.handlers[name] = self.clock(), handler
            if len(self._read_at) > MAX_KEPT:
                oldest = next(iter(self._read_at))
                del self._read_at[oldest], self.handlers[oldest]
