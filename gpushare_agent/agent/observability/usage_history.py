"""The last minutes of use, for the dashboard's curves: a ring buffer of points for each GPU and each container; and
the last day, with a point for five minutes of these (`DayHistory`, which saved_past.py fills and keeps over a restart).

A point is the mean of the rounds that stand for its time; one without a round is None, so that a gap is seen as a gap.
What is gone is dropped once its last point has left the window, or where there is no room for what is there. A container's
values are the sums over its GPUs. The day's points are placed by the wall clock, which alone goes on over a restart: where
it is set back, what would be in the future is dropped.

State owned: the ring buffers, and the slot that is being filled. Changed by `add`, which the sampling calls, and `fold`.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import ContainerUse, UsageRound

K = TypeVar("K", GpuUuid, ContainerKey)
Point = tuple[float | None, float | None]
"""A ratio and a size."""

MAX_GPUS = 64
MAX_CONTAINERS = 512
"""The most curves at once, of MIG instances as of GPUs; those of both spans take 2.8 MiB then."""
HISTORY_POINTS = 180
"""Points of one curve."""
DAY_S, DAY_POINTS = 86_400.0, 288
RATIO_DIGITS = 4


class UsageHistory(Struct, eq=False):
    """The last `history_s` seconds in `points` points. `clock` is monotonic: the wall clock's jumps move no point.

    `allocations` has a container's namespace and pod; they are kept as long as its curve.
    """

    history_s: float
    points: int
    allocations: Callable[[], Mapping[ContainerKey, Allocation]] = dict
    clock: Callable[[], float] = time.monotonic
    version: int = 0
    """Grows with each round."""
    _owners: dict[ContainerKey, Owner] = field(default_factory=dict)
    _slot: int = 0
    _at: float | None = None
    _gpus: dict[GpuUuid, Pair] = field(default_factory=dict)
    _containers: dict[ContainerKey, Pair] = field(default_factory=dict)

    @property
    def _step_s(self) -> float:
        return self.history_s / self.points

    def add(self, usage: UsageRound | None) -> None:
        """One round; None, no round, leaves a gap."""
        if usage is None:
            return
        self.version += 1
        # Whole steps of the clock, not time since the last point: rounds that come late do not move the points.
        now = self.clock()
        self._slot, self._at = math.floor(now / self._step_s), usage.sampled_at
        allocations, containers = self.allocations(), _by_container(usage.containers)
        for key, uses in containers.items():
            # The allocation may have been freed since the sample; its curve goes on with the owner that it had.
            if (allocation := allocations.get(key)) is not None:
                gpus = tuple(sorted(use.uuid for use in uses))
                self._owners[key] = Owner(namespace=allocation.namespace, pod=allocation.pod_name, gpus=gpus)
        self._put(
            {uuid: (gpu.sm_ratio, gpu.memory_used_bytes) for uuid, gpu in usage.gpus.items()},
            {
                key: (_sum(use.sm_ratio for use in uses), _sum(use.memory_bytes for use in uses))
                for key, uses in containers.items()
            },
            since=math.floor((now - usage.covered_s) / self._step_s),
        )

    def _put(self, gpus: Mapping[GpuUuid, Point], containers: Mapping[ContainerKey, Point], *, since: int) -> None:
        """One more value of each in the slots after `since` up to the present one, and in that."""
        oldest = self._slot - self.points
        self._gpus = {uuid: pair for uuid, pair in self._gpus.items() if pair.last_slot > oldest}
        self._containers = {key: pair for key, pair in self._containers.items() if pair.last_slot > oldest}
        self._put_each(self._gpus, gpus, MAX_GPUS, since)
        self._put_each(self._containers, containers, MAX_CONTAINERS, since)
        self._owners = {key: owner for key, owner in self._owners.items() if key in self._containers}

    def _put_each(self, pairs: dict[K, Pair], points: Mapping[K, Point], most: int, since: int) -> None:
        # Pods that start and fail in a loop make a new curve each, which lives for the whole window, and so does each life
        # of a MIG instance: those that ended first give way.
        if (excess := len(pairs.keys() | points.keys()) - most) > 0:
            for key in sorted(pairs.keys() - points.keys(), key=lambda key: pairs[key].last_slot)[:excess]:
                del pairs[key]
        for key, (ratio, size) in points.items():
            pair = pairs.get(key)
            if pair is None and len(pairs) < most:
                pair = pairs[key] = Pair(self.points, self._slot - 1)  # its slots before are empty
            if pair is not None:  # else it has no curve until another one is dropped
                pair.add(self._slot, ratio, size, since=since)

    def take_over(self, previous: UsageHistory) -> None:
        """The curves of an agent that has read its settings again; none if the steps have changed."""
        # The means cannot be divided into other steps.
        if (previous._step_s, previous.points) != (self._step_s, self.points):
            return
        self._gpus, self._containers, self._owners = previous._gpus, previous._containers, previous._owners
        self._slot, self._at, self.version = previous._slot, previous._at, previous.version

    def means(self, length_s: float) -> tuple[dict[GpuUuid, Point], dict[ContainerKey, Point]]:
        """The mean of each curve's last `length_s`, of those that have any."""
        newest, most = math.floor(self.clock() / self._step_s), max(1, round(length_s / self._step_s))
        return _means(self._gpus, newest, most), _means(self._containers, newest, most)

    def pieces(self, *, gpus: bool = True, containers: bool = True, container: str = "") -> Iterator[bytes]:
        """The document as JSON, in pieces of some kilobytes: a full one takes 40 ms, and the caller may do something else
        between two. It shows the moment of the call, whatever is added meanwhile. Oldest point first; `at` is when the
        newest round was, None before the first. `container` names one, as the document does."""
        at, newest = self.now()
        head = _json({"at": at, "step_seconds": self._step_s})[:-1]
        halves: dict[str, list[_Curve]] = {}
        if gpus:
            halves["gpus"] = [
                (str(uuid), {}, "memory_used_bytes", pair.points(newest)) for uuid, pair in sorted(self._gpus.items())
            ]
        if containers:
            halves["containers"] = [
                (name, self._owner(key), "memory_bytes", pair.points(newest))
                for key, pair in sorted(self._containers.items())
                if (name := f"{key.pod_uid}/{key.container}") == (container or name)
            ]
        return _pieces(head, halves)

    def now(self) -> tuple[float | None, int]:
        """When the newest point was, and its slot."""
        return self._at, self._slot

    def _owner(self, key: ContainerKey) -> dict[str, object]:
        known = self._owners.get(key)
        return {
            "namespace": known.namespace if known is not None else None,
            "pod": known.pod if known is not None else None,
            "container": key.container,
            "gpus": list(known.gpus) if known is not None else [],
        }


class DayHistory(UsageHistory):
    """The last day. `history_s` and `points` are DAY_S and DAY_POINTS but in tests, `clock` the wall clock."""

    def fold(self, recent: UsageHistory) -> None:
        """Adds the point of the step that has just ended: the means of the recent curves."""
        slot = math.floor(self.clock() / self._step_s) - 1
        if slot == self._slot:  # the clock was set back a little: the step has its point
            return
        if slot < self._slot:
            for pair in (*self._gpus.values(), *self._containers.values()):
                pair.set_back(slot - 1)
        self._slot, self.version = slot, self.version + 1
        gpus, containers = recent.means(self._step_s)
        # A new dictionary: a thread may be writing the former one.
        self._owners = self._owners | {key: recent._owners[key] for key in containers if key in recent._owners}
        self._put(gpus, containers, since=slot)

    def due_s(self) -> float:
        """The time to the end of the present step, and a little: a timer that ends early must not find the step before."""
        return self._step_s - (self.clock() - _LATE_S) % self._step_s

    def now(self) -> tuple[float | None, int]:
        # Also before the first step since a start has ended: what was saved long ago is not of now.
        newest = max(self._slot, math.floor(self.clock() / self._step_s) - 1)
        return (newest + 1) * self._step_s if self._slot else None, newest

    def saved(self) -> SavedDay:
        """A copy of the curves, oldest point first."""
        return SavedDay(
            slot=self._slot,
            gpus={uuid: (pair.last_slot, *pair.points(self._slot)) for uuid, pair in self._gpus.items()},
            containers={key: (pair.last_slot, *pair.points(self._slot)) for key, pair in self._containers.items()},
            owners=self._owners,
        )

    def restore(self, saved: SavedDay) -> None:
        """Begins with what was saved, unless there is something already."""
        if self._slot:
            return
        self._slot, self._owners, self.version = saved.slot, dict(saved.owners), self.version + 1
        self._gpus = {uuid: Pair(self.points, saved.slot, curve) for uuid, curve in saved.gpus.items()}
        self._containers = {key: Pair(self.points, saved.slot, curve) for key, curve in saved.containers.items()}


_LATE_S = 1.0
SavedCurve = tuple[int, "array[float]", "array[float]"]
"""Its last slot; the ratios and the sizes."""


class SavedDay(Struct, frozen=True, kw_only=True):
    """`slot` is that of the newest point."""

    slot: int
    gpus: Mapping[GpuUuid, SavedCurve]
    containers: Mapping[ContainerKey, SavedCurve]
    owners: Mapping[ContainerKey, Owner]


class Owner(Struct, frozen=True, kw_only=True):
    """The container of a curve. `gpus` are those of the last round."""

    namespace: Annotated[str, Meta(max_length=253)]
    pod: Annotated[str, Meta(max_length=253)]
    gpus: tuple[GpuUuid, ...]


class Pair:
    """A ratio and a size that are written together: of each of the last slots the mean, rounded; NaN if nothing was added.
    Slots go back by `set_back` alone."""

    __slots__ = ("_counts", "_slot", "_sums", "_values", "last_slot")

    def __init__(self, points: int, slot: int = -1, saved: SavedCurve | None = None) -> None:
        """Empty, or as it was saved when `slot` was the newest."""
        empty = array("f", [math.nan]) * points
        self.last_slot, ratios, sizes = saved if saved is not None else (0, empty, empty)
        self._slot, first = slot, points - (slot + 1) % points
        self._values = [one[first:] + one[:first] for one in (ratios, sizes)]
        self._sums, self._counts = [0.0, 0.0], [0, 0]

    def add(self, slot: int, ratio: float | None, size: float | None, *, since: int) -> None:
        """In the slots after `since`, and in this one."""
        # A container's first round does not stand for the time before it began.
        is_new, self.last_slot = not self.last_slot, slot
        for missed in range(slot if is_new else min(since + 1, slot), slot + 1):
            if missed != self._slot:
                self._clear(self._slot + 1, missed)
                self._slot, self._sums, self._counts = missed, [0.0, 0.0], [0, 0]
            self._add(0, ratio, RATIO_DIGITS)
            self._add(1, size, 0)

    def _add(self, place: int, value: float | None, digits: int) -> None:
        # JSON has no NaN, which is also how a gap is stored.
        if value is not None and math.isfinite(value):
            values = self._values[place]
            self._sums[place] += value
            self._counts[place] += 1
            values[self._slot % len(values)] = round(self._sums[place] / self._counts[place], digits)

    def points(self, newest: int) -> tuple[array[float], array[float]]:
        """The slots up to `newest`, which is not before the last one added to; oldest first."""
        most = len(self._values[0])
        missing, first = min(most, newest - self._slot), (newest + 1) % most
        # A copy, so that rounds which come while the answer is being encoded change nothing in it.
        turned = (one[first:] + one[:first] for one in self._values)
        ratios, sizes = (one[: most - missing] + array("f", [math.nan]) * missing for one in turned)
        return ratios, sizes

    def set_back(self, slot: int) -> None:
        """Drops what is of later slots."""
        self._clear(slot + 1, self._slot)
        self._slot, self.last_slot = min(self._slot, slot), min(self.last_slot, slot)

    def _clear(self, first: int, last: int) -> None:
        for values in self._values:
            most = len(values)
            # After a gap longer than the window each place is cleared once, not once for each slot that has passed.
            for passed in range(max(first, last - most + 1), last + 1):
                values[passed % most] = math.nan


_Curve = tuple[str, Mapping[str, object], str, "tuple[array[float], array[float]]"]
"""Name, owner, name of the size; a copy of the ratios and the sizes, oldest point first; NaN is a gap."""


def _pieces(head: bytes, halves: Mapping[str, Sequence[_Curve]]) -> Iterator[bytes]:
    yield head
    for half, curves in halves.items():
        yield b',"%s":{' % half.encode()
        for index, (name, owner, size_name, (ratios, sizes)) in enumerate(curves):
            document = {**owner, "sm_ratio": _values(ratios), size_name: _values(sizes, int)}
            yield (b"," if index else b"") + _json(name) + b":" + _json(document)
        yield b"}"
    yield b"}"


def _ratio(value: float) -> float:
    return round(value, RATIO_DIGITS)


def _values(points: array[float], kind: Callable[[float], float] = _ratio) -> list[float | None]:
    return [None if value != value else kind(value) for value in points]  # noqa: PLR0124 - NaN


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _means(pairs: Mapping[K, Pair], newest: int, most: int) -> dict[K, Point]:
    means = {
        key: (_mean(ratios[-most:]), _mean(sizes[-most:]))
        for key, pair in pairs.items()
        for ratios, sizes in [pair.points(newest)]
    }
    return {key: mean for key, mean in means.items() if mean != (None, None)}


def _mean(points: array[float]) -> float | None:
    known = [value for value in points if value == value]  # noqa: PLR0124 - NaN
    return sum(known) / len(known) if known else None


def _by_container(uses: Mapping[tuple[ContainerKey, GpuUuid], ContainerUse]) -> dict[ContainerKey, list[ContainerUse]]:
    found: dict[ContainerKey, list[ContainerUse]] = {}
    for (key, _), use in uses.items():
        found.setdefault(key, []).append(use)
    return found


def _sum(values: Iterator[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None
