"""What is kept over a restart of the agent of the last day: the curves of its use, and the last changes of each GPU.

history.json in state_directory, by kit/state_file.py, which also says what becomes of one that is not this format:

    {"version": 1, "slot": 5893632, "gpus": [{"uid": "GPU-…", "last": 5893632, "points": "…"}],
     "containers": [{"uid": "…", "container": "main", "owner": {"namespace": "…", "pod": "…", "gpus": ["GPU-…"]}, …}],
     "changes": [{"at": 1768089600.0, "uuid": "GPU-…", "what": "unhealthy", "reason": "…", "xid": 0, "count": 1}]}

A slot is a step of five minutes since the epoch. `points` are base64 of zlib of 288 ratios and 288 sizes in bytes, floats of
32 bits as the machine has them; NaN is a gap. The file is written after each step, and at the end.

State owned: the file, and `GpuChanges` with each GPU's changes.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import structlog
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.observability.usage_history import (
    DAY_POINTS,
    DAY_S,
    MAX_CONTAINERS,
    MAX_GPUS,
    DayHistory,
    Owner,
    SavedCurve,
    SavedDay,
    UsageHistory,
)
from gpushare_agent.core.kit.state_file import StateFile
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NodeEventReason, Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, describe_event
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import GpuUuid, PodUid

log = structlog.get_logger(__name__)

FILE = "history.json"
MAX_BYTES = 10 << 20
MAX_CHANGES = 32
MAX_REASON_CHARS = 160
_CURVE_BYTES = 2 * DAY_POINTS * array("f").itemsize

_Name = Annotated[str, Meta(max_length=253)]
_Slot = Annotated[int, Meta(ge=0, le=1 << 40)]
_STATES = frozenset({"unhealthy", "recovered", "cordoned", "uncordoned"})


class GpuChange(Struct, frozen=True, kw_only=True):
    """`what` is the Event's reason in lower case without `gpu`, or the kind of the driver's event; of those the last one of
    its `xid` stands for `count`. `at` is seconds since the epoch."""

    at: Annotated[float, Meta(ge=0, lt=1 << 37)]
    uuid: _Name
    what: Annotated[str, Meta(max_length=32)]
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
    xid: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    count: Annotated[int, Meta(ge=1, le=1 << 60)] = 1


class GpuChanges(Struct, eq=False):
    """The last MAX_CHANGES of each GPU, oldest first, of at most MAX_GPUS GPUs and MIG instances."""

    clock: Callable[[], float] = time.time
    _changes: dict[str, list[GpuChange]] = field(default_factory=dict)

    def health_changed(self, uuid: GpuUuid, what: NodeEventReason, reason: str) -> None:
        self._add(GpuChange(at=self.clock(), uuid=uuid, what=what.lower().removeprefix("gpu"), reason=reason))

    def event_came(self, event: GpuEvent, count: int) -> None:
        reason, kind = describe_event(event), event.kind.value
        self._add(
            GpuChange(at=self.clock(), uuid=event.uuid or "", what=kind, reason=reason, xid=event.xid, count=count)
        )

    def newest(self) -> Mapping[str, list[GpuChange]]:
        """Newest first."""
        return {uuid: found[::-1] for uuid, found in self._changes.items()}

    def restore(self, saved: Iterable[GpuChange], gpus: GpuInventory) -> None:
        """Puts what was saved before what has happened since the start."""
        since, self._changes = self._changes, {}
        known = gpus.by_uuid()
        for change in saved:
            self._add(change)
        for uuid, found in list(self._changes.items()):
            last = next((one for one in reversed(found) if one.what in _STATES), None)
            is_back = uuid in known and known[GpuUuid(uuid)].is_healthy
            # An agent that starts reports no GPU as recovered.
            if last is not None and last.what == "unhealthy" and is_back and uuid not in since:
                self.health_changed(GpuUuid(uuid), NodeEventReason.GPU_RECOVERED, "healthy when the agent started")
        for found in since.values():
            for change in found:
                self._add(change)

    def take_over(self, previous: GpuChanges) -> None:
        self._changes = previous._changes

    def _add(self, change: GpuChange) -> None:
        if len(change.reason) > MAX_REASON_CHARS:
            change = replace(change, reason=f"{change.reason[: MAX_REASON_CHARS - 1]}…")
        found = self._changes.pop(change.uuid, [])
        if change.what in _STATES:
            last = next((one for one in reversed(found) if one.what in _STATES), None)
            # An agent that starts reports a GPU again that was unhealthy before.
            is_new = last is None or (last.what, last.reason) != (change.what, change.reason)
            found += [change] if is_new else []
        else:
            # A program can cause Xids without end: they must not push out what happened to the GPU.
            same = [one for one in found if (one.what, one.xid) == (change.what, change.xid)]
            counted = replace(change, count=change.count + sum(one.count for one in same))
            found = [*(one for one in found if one not in same), counted]
        # Last in the dictionary: the GPU whose last change is the oldest gives way.
        self._changes[change.uuid] = found[-MAX_CHANGES:]
        if len(self._changes) > MAX_GPUS:
            del self._changes[next(iter(self._changes))]


class _Curve(Struct, kw_only=True, omit_defaults=True):
    """`uid` is of a GPU or, with a `container`, of a pod."""

    last: _Slot
    points: bytes
    uid: _Name
    container: _Name = ""
    owner: Owner | None = None


class _Document(Struct, kw_only=True):
    version: Literal[1]
    slot: _Slot
    gpus: Annotated[list[_Curve], Meta(max_length=MAX_GPUS)]
    containers: Annotated[list[_Curve], Meta(max_length=MAX_CONTAINERS)]
    changes: Annotated[list[GpuChange], Meta(max_length=MAX_CHANGES * MAX_GPUS)]


class SavedPast(Struct, kw_only=True, eq=False):
    """`run` makes the day's points of the `recent` curves and keeps them. Without a `directory` they last as long as the
    agent."""

    directory: Path | None
    recent: UsageHistory
    gpus: Callable[[], GpuInventory]
    day: DayHistory = field(default_factory=lambda: DayHistory(DAY_S, DAY_POINTS, clock=time.time))
    changes: GpuChanges = field(default_factory=GpuChanges)
    _failure: ReportOnce = field(default_factory=ReportOnce)
    _file: StateFile[_Document] | None = None
    _is_loaded: bool = False

    def __post_init__(self) -> None:
        if self.directory is not None:
            self._file = StateFile(
                self.directory / FILE,
                "the use of the last day",
                _Document,
                event="history_corrupt",
                lost="the curves of the last day begin again",
                most_bytes=MAX_BYTES,
                has_copy=False,
            )

    async def run(self) -> NoReturn:
        """One point for each step, and one writing of the file, until cancelled; then the last one."""
        await self.load()
        try:
            while True:
                await asyncio.sleep(self.day.due_s())
                if not self.day.version:  # the disk may have been slow at the boot
                    await self.load()
                self.day.fold(self.recent)
                await self.save()
        finally:
            if self._is_loaded or self.day.version:  # changes alone do not replace a past that could not be read
                await self.save()

    def take_over(self, previous: SavedPast) -> None:
        """From the agent before a reload, which is newer than the file."""
        self.day.take_over(previous.day)
        self.changes.take_over(previous.changes)
        self._is_loaded = previous._is_loaded

    async def load(self) -> None:
        """What cannot be read costs only the past."""
        if self._file is None or self._is_loaded:
            return
        try:
            found = await self._file.load(_read, lambda: None)
        except Unavailable as e:
            log.warning("history_not_read", error=str(e), then="the curves of the last day begin again")
            return
        self._is_loaded = True
        if found is not None:
            self.day.restore(found[0])
            self.changes.restore(found[1], self.gpus())

    async def save(self) -> None:
        """Writes the file, if there is anything to keep; a failure is logged once."""
        changes = [change for found in self.changes.newest().values() for change in reversed(found)]
        if self._file is None or not (self.day.version or changes):
            return
        try:
            await self._file.save(partial(_document, self.day.saved(), changes))
        except Unavailable as e:
            if self._failure.is_new("cannot be written"):
                log.warning("history_not_saved", error=str(e), then="it is tried again after the next step")
        else:
            self._failure.is_over()
            self._is_loaded = True  # what is in it is known


def _document(day: SavedDay, changes: list[GpuChange]) -> _Document:
    def curve(uid: str, saved: SavedCurve, container: str = "", owner: Owner | None = None) -> _Curve:
        last, ratios, sizes = saved
        points = zlib.compress(ratios.tobytes() + sizes.tobytes())
        return _Curve(uid=uid, container=container, owner=owner, last=last, points=points)

    return _Document(
        version=1,
        slot=day.slot,
        gpus=[curve(uuid, saved) for uuid, saved in day.gpus.items()],
        containers=[
            curve(key.pod_uid, saved, key.container, day.owners.get(key)) for key, saved in day.containers.items()
        ],
        changes=changes,
    )


def _read(document: _Document) -> tuple[SavedDay, list[GpuChange]]:
    """Raises Corrupt."""
    containers = {ContainerKey(PodUid(one.uid), one.container): one for one in document.containers}
    day = SavedDay(
        slot=document.slot,
        gpus={GpuUuid(one.uid): _curve(one, document.slot) for one in document.gpus},
        containers={key: _curve(one, document.slot) for key, one in containers.items()},
        owners={key: one.owner for key, one in containers.items() if one.owner is not None},
    )
    return day, document.changes


def _curve(one: _Curve, newest: int) -> SavedCurve:
    try:
        # Bounded: a few bytes can be a gigabyte of zeros.
        values = array("f", zlib.decompressobj().decompress(one.points, _CURVE_BYTES + 1))
    except (zlib.error, ValueError) as e:
        raise Corrupt(f"a curve of it is damaged: {e}") from e
    # NaN is neither. What readers do not take for a number costs them all curves.
    if len(values) != 2 * DAY_POINTS or any(value < 0 or value >= 1 << 53 for value in values):
        raise Corrupt("a curve of it is damaged")
    return min(one.last, newest), values[:DAY_POINTS], values[DAY_POINTS:]
