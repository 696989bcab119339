"""The calls between the embedded kubelet and others (to device plugins, and of its PodResources API), and
what the kubelet's parts share."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct, field

from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.state_directory import NodePaths

MAX_DRA_CALLS = 1000


class CallSubject(Struct, kw_only=True, eq=False):
    """The container that a call is for, and the resource. Never sent: the device-plugin API names no pod."""

    pod_uid: str
    pod_name: str
    container: str
    resource: str


class PluginCall(CallSubject, kw_only=True, eq=False):
    """One call to a device plugin.

    `device_ids` are the IDs asked for (Allocate, PreStartContainer) or the available ones (GetPreferredAllocation);
    `response` is the raw answer; `error` the failure as the kubelet words it, else empty. Times are seconds on the
    monotonic clock.
    """

    method: str
    device_ids: tuple[str, ...]
    must_include: tuple[str, ...] = ()
    size: int = 0
    response: bytes = b""
    error: str = "the kubelet stopped during the call"
    started_at: float = field(default_factory=time.monotonic)
    finished_at: float = 0.0


class PodResourcesCall(Struct, frozen=True, kw_only=True):
    """One call of the PodResources API. `inside` are the plugin calls open at that moment."""

    method: str
    inside: tuple[PluginCall, ...]
    at: float = field(default_factory=time.monotonic)


class CallLog(Struct, kw_only=True):
    """Everything that passed since the node was opened, over all starts of its kubelet."""

    calls: list[PluginCall] = field(default_factory=list)
    open_calls: list[PluginCall] = field(default_factory=list)
    """Those that have not been answered yet."""
    pod_resources_calls: list[PodResourcesCall] = field(default_factory=list)
    dra_calls: deque[tuple[str, tuple[str, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_DRA_CALLS))
    """The last calls to DRA drivers: method, claims' names."""

    @contextmanager
    def opened(self, call: PluginCall) -> Iterator[PluginCall]:
        """Keeps the call open while the block runs, which sets its response, and then notes its failure."""
        self.open_calls.append(call)
        try:
            yield call
            call.error = ""
        except Unavailable as failure:
            call.error = str(failure)
            raise
        finally:
            # In any case: a call that was cut off is open no more.
            self.open_calls.remove(call)
            call.finished_at = time.monotonic()
            self.calls.append(call)

    def of(self, method: str, *, pod_uid: str = "") -> list[PluginCall]:
        return [c for c in self.calls if c.method == method and pod_uid in ("", c.pod_uid)]


class NodeParts(Struct, frozen=True, kw_only=True, eq=False):
    """What the parts of a node share, over all starts of its kubelet."""

    name: str
    paths: NodePaths
    api: EmbeddedApiServer
    runtime: ContainerRuntime
    times: KubeletTimes
    rng: random.Random
    log: CallLog = field(default_factory=CallLog)
