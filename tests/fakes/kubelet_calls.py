"""Everything that passed between an embedded kubelet and others, over all its starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct, field

from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.sandbox.kubelet.calls import CallObserver, CallSubject


class PluginCall(Struct, kw_only=True, eq=False):
    """One call to a device plugin. `response` is the raw answer; `error` the failure as the kubelet words it, else empty.
    Times are seconds on the monotonic clock."""

    method: str
    subject: CallSubject
    device_ids: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int
    response: bytes = b""
    error: str = "the kubelet stopped during the call"
    started_at: float = field(default_factory=time.monotonic)
    finished_at: float = 0.0

    @property
    def pod_uid(self) -> str:
        return self.subject.pod_uid

    @property
    def pod_name(self) -> str:
        return self.subject.pod_name

    @property
    def container(self) -> str:
        return self.subject.container

    @property
    def resource(self) -> str:
        return self.subject.resource

    def answered(self, response: bytes) -> None:
        self.response = response


class PodResourcesCall(Struct, frozen=True):
    """`inside` are the plugin calls that were open at that moment."""

    method: str
    inside: tuple[PluginCall, ...]


class CallLog(CallObserver):
    """Keeps all of them. `signal` wakes up at each begin and end."""

    def __init__(self, signal: ChangeSignal) -> None:
        self.calls: list[PluginCall] = []
        self.open_calls: list[PluginCall] = []
        self.pod_resources_calls: list[PodResourcesCall] = []
        self.dra_calls: list[tuple[str, tuple[str, ...]]] = []
        """Method and the claims' names."""
        self._signal = signal

    def of(self, method: str) -> list[PluginCall]:
        return [call for call in self.calls if call.method == method]

    @contextmanager
    def plugin_call(
        self, method: str, subject: CallSubject, ids: Sequence[str], must_include: Sequence[str] = (), size: int = 0
    ) -> Iterator[Callable[[bytes], None]]:
        call = PluginCall(
            method=method,
            subject=subject,
            device_ids=tuple(ids),
            must_include=tuple(must_include),
            size=size or len(ids),
        )
        self.open_calls.append(call)
        self._signal.notify()
        try:
            yield call.answered
            call.error = ""
        except Unavailable as failure:
            call.error = str(failure)
            raise
        finally:
            # In any case: a call that was cut off is open no more.
            self.open_calls.remove(call)
            call.finished_at = time.monotonic()
            self.calls.append(call)
            self._signal.notify()

    def pod_resources_call(self, method: str) -> None:
        self.pod_resources_calls.append(PodResourcesCall(method, tuple(self.open_calls)))
        self._signal.notify()

    def dra_call(self, method: str, claims: Sequence[str] = ()) -> None:
        self.dra_calls.append((method, tuple(claims)))
