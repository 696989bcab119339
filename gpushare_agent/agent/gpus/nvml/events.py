"""Events of the GPUs from an NVML event set: critical Xids and double-bit ECC errors.

Blocking, called by driver.py in a thread of its own: it waits in NVML, and an event that comes ends the wait at once. State
owned: the event set, the GPUs that are registered in it and an error that is still to be raised. A set ends with the opening
that made it.

The set is made again when a GPU answers that was missing or did not answer before: a reset voids its registration. A GPU
that fails stays registered, because its last Xid may still come.

Source: NVML API reference (nvmlEventSetWait_v2, nvmlDeviceRegisterEvents).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Set
from typing import Any

import pynvml
import structlog

from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlError, NvmlSession, ask, call
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind
from gpushare_agent.core.model.names import GpuUuid

log = structlog.get_logger(__name__)

MAX_EVENTS = 1024
"""In one call; the rest stays in NVML until the next one."""

_NO_WAIT_MS = 1
"""For the event that is not there: NVML delivers from a queue and answers at once while there is one."""
_SLICE_MS = 500
"""Of one call of NVML: nothing ends it but an event, and what else should end the wait takes no longer than this."""

_NO_INSTANCE = 0xFFFFFFFF
"""For an event of the whole GPU."""

_UNSUPPORTED = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND")
_TYPES = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


class NvmlEvents:
    def __init__(self, session: NvmlSession) -> None:
        self._session = session
        session.before_close = self._free
        self._set: Any = None
        self._covered: Set[tuple[GpuUuid, int]] = frozenset()
        self._by_address: dict[int, GpuUuid] = {}
        self._pending_error: Unavailable | None = None
        self._without_events = ReportOnce()
        self._unsupported_in_opening = 0

    def take(self, wait_s: float) -> list[GpuEvent]:
        """Events since the last call, oldest first. Without any it waits up to `wait_s` for the first one, unless the
        driver has no events at all, or a poll finds other GPUs meanwhile.

        Raises:
            Unavailable: NVML cannot be opened or waiting failed. Raised once; the next call makes a new set.
        """
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error
        events: list[GpuEvent] = []
        try:
            with self._session.used("waiting for events of the GPUs"):
                self._take(events, wait_s)
        except Unavailable as error:
            if not events:
                raise
            # With the next call: neither the events nor the failure are lost.
            self._pending_error = error
        return events

    def _take(self, events: list[GpuEvent], wait_s: float) -> None:
        # The driver has no events; a reloaded one, in another opening, may.
        if self._unsupported_in_opening == self._session.openings:
            return
        polled = self._session.answering
        # Drained before the set is made again, which would lose what is in it.
        self._drain(events, 0.0, polled)
        if len(events) < MAX_EVENTS:  # a full drain may have left more in the set
            self._cover(polled)
        # The set may be new: what was in the old one is returned before the wait for more.
        if not events:
            self._drain(events, wait_s, polled)

    def _free(self) -> None:
        """The next `take` makes a new set."""
        if self._set is not None:
            try:
                call("nvmlEventSetFree", self._set)
            except NvmlError as error:
                log.warning("nvml_event_set_not_freed", reason=str(error))
        self._set, self._by_address = None, {}

    def _cover(self, polled: Set[tuple[GpuUuid, int]] | None) -> None:
        handles = self._session.handles()
        answering = {(uuid, 0) for uuid in handles} if polled is None else polled
        # One that did not answer meanwhile has another number, also where no call of this came between: a reset voids its
        # registration.
        if self._set is not None and answering <= self._covered:
            return
        # One set for all GPUs: NVML has no call that takes a GPU out of a set.
        self._free()
        try:
            self._set = call("nvmlEventSetCreate")
        except CallError as error:
            if error.name not in _UNSUPPORTED:
                raise Unavailable(
                    f"making an event set failed: NVML: {error}. It is tried again at the next call."
                ) from error
            self._unsupported_in_opening = self._session.openings
            log.warning(
                "nvml_has_no_events", reason=str(error), effect="Xid errors are not seen; GPUs are still polled"
            )
            return
        self._covered = answering
        # Those that could be registered: without any there is nothing to wait for.
        self._by_address = {_address(handles[u]): u for u in sorted(handles) if self._register(u, handles[u])}

    def _register(self, uuid: GpuUuid, handle: Any) -> bool:
        reason = "the GPU reports neither Xid nor double-bit ECC errors"
        try:
            # NVML refuses a mask with a type that the GPU does not support.
            types = _TYPES & call("nvmlDeviceGetSupportedEventTypes", handle)
            if types:
                call("nvmlDeviceRegisterEvents", handle, types, self._set)
        except CallError as error:
            types, reason = 0, str(error)
        if types:
            self._without_events.is_over(uuid)
        elif self._without_events.is_new("not registered", uuid):
            log.warning("gpu_without_events", uuid=uuid, reason=reason, effect="its Xid errors are not seen")
        return bool(types)

    def _drain(self, events: list[GpuEvent], wait_s: float, polled: Set[tuple[GpuUuid, int]] | None) -> None:
        if not self._by_address:
            return
        until, taken = time.monotonic() + wait_s, 0
        while taken < MAX_EVENTS:
            started_at = time.monotonic()
            must_end = taken or self._session.must_close or self._session.answering != polled
            wait_ms = min(max(0 if must_end else int((until - started_at) * 1000), _NO_WAIT_MS), _SLICE_MS)
            try:
                data = call("nvmlEventSetWait_v2", self._set, wait_ms)
            except CallError as error:
                if error.name != "TIMEOUT":
                    self._free()
                    raise Unavailable(
                        f"waiting for events of the GPUs failed: NVML: {error}. The event set is made again at the next "
                        "call; what happens until then is seen only by polls of the GPUs. See NVRM and Xid lines in "
                        "`dmesg`."
                    ) from error
                # None came in this slice; else none is left.
                if wait_ms <= _NO_WAIT_MS:
                    return
                # Libraries that stand in for a driver answer at once, which must not keep a CPU busy.
                time.sleep(max(0.0, started_at + wait_ms / 1000 - time.monotonic()))
                continue
            taken += 1
            if (event := self._event(data)) is not None:
                events.append(event)

    def _event(self, data: Any) -> GpuEvent | None:
        uuid = self._gpu_of(data.device)
        # NVML has -1, unsigned, for an event of the whole GPU.
        gi, ci = (None if number == _NO_INSTANCE else number for number in (data.gpuInstanceId, data.computeInstanceId))
        if data.eventType & pynvml.nvmlEventTypeXidCriticalError:
            return GpuEvent(kind=GpuEventKind.XID, uuid=uuid, xid=data.eventData, gi=gi, ci=ci)
        if data.eventType & pynvml.nvmlEventTypeDoubleBitEccError:
            return GpuEvent(kind=GpuEventKind.DOUBLE_BIT_ECC, uuid=uuid, gi=gi, ci=ci)
        return None

    def _gpu_of(self, device: Any) -> GpuUuid | None:
        """The GPU of an event, by the handle first: a GPU that fell off the bus no longer answers the call for its
        UUID."""
        address = _address(device)
        # Without an address the driver does not name the GPU.
        if not address or address in self._by_address:
            return self._by_address.get(address)
        uuid = ask("nvmlDeviceGetUUID", device)
        return GpuUuid(uuid) if uuid is not None else None


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
