"""What passed between the embedded kubelet and others: calls to device plugins, and calls of its PodResources API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct, field

from gpushare_agent.model.errors import Unavailable


class CallSubject(Struct, frozen=True, kw_only=True):
    """The container that a call is for, and the resource. Never sent: the device-plugin API names no pod."""

    pod_uid: str
    pod_name: str
    container: str
    resource: str


class PluginCall(Struct, frozen=True, kw_only=True):
    """One finished call to a device plugin.

    `device_ids` are the IDs asked for (Allocate, PreStartContainer) or the available ones (GetPreferredAllocation);
    `response` is the raw answer; `error` the failure as the kubelet words it, else empty. Times are seconds on the
    monotonic clock.
    """

    method: str
    subject: CallSubject
    device_ids: tuple[str, ...]
    must_include: tuple[str, ...] = ()
    size: int = 0
    response: bytes = b""
    error: str = ""
    started_at: float
    finished_at: float

    @property
    def resource(self) -> str:
        return self.subject.resource

    @property
    def pod_uid(self) -> str:
        return self.subject.pod_uid

    @property
    def container(self) -> str:
        return self.subject.container


class OpenCall(Struct, frozen=True, kw_only=True):
    """A call to a plugin that has not been answered yet."""

    method: str
    subject: CallSubject


class PodResourcesCall(Struct, frozen=True, kw_only=True):
    """One call of the PodResources API. `inside` are the plugin calls open at that moment."""

    method: str
    inside: tuple[OpenCall, ...]
    is_refused: bool = False
    """By the rate limit."""
    at: float = field(default_factory=time.monotonic)


class CallLog(Struct, kw_only=True):
    """Everything that passed since the node was opened, over all starts of its kubelet."""

    calls: list[PluginCall] = field(default_factory=list)
    open_calls: list[OpenCall] = field(default_factory=list)
    pod_resources_calls: list[PodResourcesCall] = field(default_factory=list)

    @contextmanager
    def opened(
        self,
        method: str,
        subject: CallSubject,
        device_ids: Sequence[str],
        *,
        must_include: Sequence[str] = (),
        size: int,
    ) -> Iterator[CallAnswer]:
        """Keeps the call open while the block runs, and then notes its answer or failure."""
        answer, started_at, open_call = CallAnswer(), time.monotonic(), OpenCall(method=method, subject=subject)
        self.open_calls.append(open_call)
        # What stands where the block is left by a cancellation, which is no failure of the plugin.
        error = "the kubelet stopped during the call"
        try:
            yield answer
            error = ""
        except Unavailable as failure:
            error = str(failure)
            raise
        finally:
            # In any case: a call that was cut off is open no more.
            self.open_calls.remove(open_call)
            self.calls.append(
                PluginCall(
                    method=method,
                    subject=subject,
                    device_ids=tuple(device_ids),
                    must_include=tuple(must_include),
                    size=size,
                    response=answer.raw,
                    error=error,
                    started_at=started_at,
                    finished_at=time.monotonic(),
                )
            )

    def of(self, method: str, *, pod_uid: str = "") -> list[PluginCall]:
        return [c for c in self.calls if c.method == method and pod_uid in ("", c.pod_uid)]


class CallAnswer(Struct):
    """Filled in by the caller before its block ends."""

    raw: bytes = b""
