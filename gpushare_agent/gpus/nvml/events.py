"""Events of the GPUs from an NVML event set: critical Xids and double-bit ECC errors.

Blocking, called by driver.py in a thread and with an opening of NVML of its own: it waits in NVML, and an event that comes
ends the wait at once. State owned: the event set, the GPUs that are registered in it and an error that is still to be
raised. A set ends with the opening that made it.

The set is made again when a GPU answers that was missing or did not answer before: a reset voids its registration. A GPU
that fails stays registered, for its last Xid may still come.

Source: NVML API reference (nvmlEventSetWait_v2, nvmlDeviceRegisterEvents).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Set
from typing import Any

import structlog

from gpushare_agent.gpus.health import GpuEvent, GpuEventKind
from gpushare_agent.gpus.nvml.session import CHECKLIST, DriverLostError, NvmlSession, text_of
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.names import GpuUuid

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


class NvmlEvents:
    """`must_end` tells a wait that the opening is to be closed, or that the GPUs are others."""

    def __init__(self, session: NvmlSession, must_end: Callable[[], bool]) -> None:
        self._session = session
        self._must_end = must_end
        self._set: Any = None
        self._opening = 0
        self._covered: Set[tuple[GpuUuid, int]] = frozenset()
        self._by_address: dict[int, GpuUuid] = {}
        self._pending_error: Unavailable | None = None
        self._without_events = ReportOnce()
        self._unsupported_in_opening = 0

    def take(self, wait_s: float, answering: Set[tuple[GpuUuid, int]] | None) -> list[GpuEvent]:
        """Events since the last call, oldest first. Without any it waits up to `wait_s` for the first one, unless the
        driver has no events at all. `answering`: of the last poll, as `Poll` has it; None before the first one.

        Raises:
            Unavailable: NVML cannot be opened or waiting failed. Raised once; the next call makes a new set.
        """
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error
        nvml = self._session.open()
        # The driver has no events; a reloaded one, in another opening, may.
        if self._unsupported_in_opening == self._session.openings:
            return []
        # Drained before the set is made anew, which would lose what is in it.
        events = self._drain(nvml, 0.0) if self._is_current() else []
        if self._pending_error is None and len(events) < MAX_EVENTS:  # a full drain may have left more in the set
            self._cover_or_raise(nvml, answering, has_events=bool(events))
        # The set may be new: what was in the old one is returned before the wait for more.
        return events or (self._drain(nvml, wait_s) if self._is_current() else [])

    def close(self) -> None:
        """Frees the set, where NVML is still open; the next `take` makes a new one."""
        if self._is_current():
            nvml = self._session.open()
            try:
                nvml.nvmlEventSetFree(self._set)
            except nvml.NVMLError as error:
                log.warning("nvml_event_set_not_freed", reason=str(error))
        self._set = None

    def _is_current(self) -> bool:
        return self._set is not None and self._opening == self._session.openings and self._session.is_open

    def _cover_or_raise(self, nvml: Any, answering: Set[tuple[GpuUuid, int]] | None, *, has_events: bool) -> None:
        try:
            self._cover(nvml, answering)
        except DriverLostError as error:
            self._session.close()
            self._raise_after_events(
                Unavailable(f"registering for events failed: {error.__cause__}. {CHECKLIST}"), has_events=has_events
            )
        except Unavailable as error:
            self._raise_after_events(error, has_events=has_events)

    def _raise_after_events(self, problem: Unavailable, *, has_events: bool) -> None:
        """Raises it now, or at the next call where this one has events to return."""
        if not has_events:
            raise problem
        self._pending_error = problem

    def _cover(self, nvml: Any, polled: Set[tuple[GpuUuid, int]] | None) -> None:
        answering = {(uuid, 0) for uuid in self._session.handles()} if polled is None else polled
        # One that did not answer meanwhile has another number, also where no call of this came between: a reset voids its
        # registration.
        if self._is_current() and answering <= self._covered:
            return
        # One set for all GPUs: NVML has no call that takes a GPU out of a set.
        self.close()
        try:
            self._set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._not_made(error)
            return
        self._opening = self._session.openings
        self._covered = answering
        handles = self._session.handles()
        # Those that could be registered: without any there is nothing to wait for.
        self._by_address = {_address(handles[u]): u for u in sorted(handles) if self._register(nvml, u, handles[u])}

    def _not_made(self, error: Exception) -> None:
        self._session.check_driver(error)
        if self._session.error_name(error) not in _UNSUPPORTED:
            raise Unavailable(
                f"making an event set failed: NVML: {error}. It is tried again at the next call."
            ) from error
        self._unsupported_in_opening = self._session.openings
        log.warning("nvml_has_no_events", reason=str(error), effect="Xid errors are not seen; GPUs are still polled")

    def _register(self, nvml: Any, uuid: GpuUuid, handle: Any) -> bool:
        desired = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            # NVML refuses a mask with a type that the GPU does not support.
            types = desired & nvml.nvmlDeviceGetSupportedEventTypes(handle)
            if types:
                nvml.nvmlDeviceRegisterEvents(handle, types, self._set)
        except nvml.NVMLError as error:
            self._session.check_driver(error)
            self._warn_without_events(uuid, str(error))
            return False
        if not types:
            self._warn_without_events(uuid, "the GPU reports neither Xid nor double-bit ECC errors")
        else:
            self._without_events.is_over(uuid)
        return bool(types)

    def _warn_without_events(self, uuid: GpuUuid, reason: str) -> None:
        if self._without_events.is_new("not registered", uuid):
            log.warning("gpu_without_events", uuid=uuid, reason=reason, effect="its Xid errors are not seen")

    def _drain(self, nvml: Any, wait_s: float) -> list[GpuEvent]:
        events: list[GpuEvent] = []
        if not self._by_address:
            return events
        until, taken = time.monotonic() + wait_s, 0
        while taken < MAX_EVENTS:
            started_at = time.monotonic()
            left_ms = 0 if taken or self._must_end() else int((until - started_at) * 1000)
            wait_ms = min(max(left_ms, _NO_WAIT_MS), _SLICE_MS)
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, wait_ms)
            except nvml.NVMLError as error:
                if self._session.error_name(error) != "TIMEOUT":
                    self._wait_failed(error, has_events=bool(events))
                # None came in this slice; else none is left.
                elif wait_ms > _NO_WAIT_MS:
                    # Libraries that stand in for a driver answer at once, which must not keep a core busy.
                    time.sleep(max(0.0, started_at + wait_ms / 1000 - time.monotonic()))
                    continue
                break
            taken += 1
            if (event := self._event(nvml, data)) is not None:
                events.append(event)
        return events

    def _wait_failed(self, error: Exception, *, has_events: bool) -> None:
        problem = Unavailable(
            f"waiting for events of the GPUs failed: NVML: {error}. The event set is made again at the next call; what "
            "happens until then is seen only by polls of the GPUs. See NVRM and Xid lines in `dmesg`."
        )
        try:
            self._session.check_driver(error)
            self.close()
        except DriverLostError:
            self._session.close()
        self._raise_after_events(problem, has_events=has_events)

    def _event(self, nvml: Any, data: Any) -> GpuEvent | None:
        uuid = self._gpu_of(nvml, data.device)
        # NVML has -1, unsigned, for an event of the whole GPU.
        gi, ci = (None if number == _NO_INSTANCE else number for number in (data.gpuInstanceId, data.computeInstanceId))
        if data.eventType & nvml.nvmlEventTypeXidCriticalError:
            return GpuEvent(kind=GpuEventKind.XID, uuid=uuid, xid=data.eventData, gi=gi, ci=ci)
        if data.eventType & nvml.nvmlEventTypeDoubleBitEccError:
            return GpuEvent(kind=GpuEventKind.DOUBLE_BIT_ECC, uuid=uuid, gi=gi, ci=ci)
        return None

    def _gpu_of(self, nvml: Any, device: Any) -> GpuUuid | None:
        """The GPU of an event, by the handle first: a GPU that fell off the bus no longer answers the call for its
        UUID."""
        address = _address(device)
        # Without an address the driver does not name the GPU.
        if not address or address in self._by_address:
            return self._by_address.get(address)
        try:
            return GpuUuid(text_of(nvml.nvmlDeviceGetUUID(device)))
        except nvml.NVMLError:
            return None


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
