"""The handlers of RuntimeClasses that pods of this node name, from the API server.

An admission asks for one and waits a moment at most. Where the API server does not tell (no right, no such class, no
answer), the class's name counts as its handler: most are named so. The handler of a class never changes, but a class may be
deleted and made again. State owned: the handlers, and when each was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog
from msgspec import Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

WAIT_S = 1.0
"""With the 2 s of a pod's lookup it is less than the kubelet's call may take."""
KEPT_S = 60.0
MAX_KEPT = 256


class _RuntimeClass(Struct):
    handler: str


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

    async def learn(self, pods: Iterable[Pod]) -> None:
        """Reads the handlers of these pods' classes that were not read within KEPT_S. Waits WAIT_S for each at most."""
        for name in sorted({pod.runtime_class for pod in pods if pod.runtime_class}):
            now = self.clock()
            if self._api is None or now - self._read_at.get(name, float("-inf")) < KEPT_S:
                continue
            if len(self._read_at) >= MAX_KEPT:  # only a static pod names a class that there is not
                self._read_at.clear()
                self.handlers.clear()
            self._read_at[name] = now
            try:
                raw = await self._api.get_runtime_class(name, timeout_s=WAIT_S)
                self.handlers[name] = decoded(_CLASS, raw, f"RuntimeClass {name}").handler
            except AgentError as e:
                if self._unread.is_new(str(e), name):
                    known = self.handlers.get(name, name)
                    log.warning(
                        "runtime_class_not_read", name=name, error=str(e), then=f"its handler counts as {known}"
                    )
