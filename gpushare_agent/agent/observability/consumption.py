"""What containers had and used of GPUs since the agent began: counters of GPU-seconds and byte-seconds, for costs.

What is allocated counts by the clock, from the allocation to its release, whether or not anybody reads. What is used counts
by the rounds of sampling, each for the time for which it stands. All is counted by the names of the row: a pod that is
created again goes on where its namesake was, so that no counter falls while anybody has the name.

State owned: the sums of each row, and what each container has of them now. Changed by allocations, GPUs and rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct, field

from gpushare_agent.agent.node import Node
from gpushare_agent.agent.observability.metrics.text import Labels, Series, labels_text
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import CORES_PER_GPU, DeviceId, GpuUuid, gpu_of
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.shares import on_gpu, share_limits
from gpushare_agent.core.model.usage import UsageRound

KEPT_S = 300.0
"""A row is shown so long after its container's end: Prometheus reads the last value, whenever it scrapes."""
MAX_ENDED = 512
"""The most of them: pods that start and fail in a loop have a row each."""

Size = tuple[int, int]
"""Cores, 1/100 of a GPU, and bytes of its memory: whole numbers, so that sums of them are exact."""
_Name = tuple[str, str, str, GpuUuid]
"""Namespace, pod, container, GPU."""
_SERIES = {
    "gpushare_container_gpu_seconds_total": "Seconds of a whole GPU that it was allocated, or used of its compute.",
    "gpushare_container_memory_byte_seconds_total": "Bytes of the GPU's memory by seconds, likewise.",
}
"""Name -> help, in the order of a row's values."""


class _Row(Struct):
    """`allocated` and `used` are GPU-seconds (the first in cores) and byte-seconds until `since`. `holders` counts the
    containers of the name. Of what is `is_known` the last round knew the use."""

    labels: Labels
    began_at: float
    since: float
    size: Size = (0, 0)
    holders: int = 0
    allocated: tuple[float, float] = (0.0, 0.0)
    used: tuple[float, float] = (0.0, 0.0)
    is_known: tuple[bool, bool] = (True, True)

    def allocated_until(self, now: float) -> tuple[float, float]:
        cores, size = self.size
        return self.allocated[0] + cores * (now - self.since), self.allocated[1] + size * (now - self.since)

    def lines(self, now: float) -> tuple[str, str]:
        """Of the two series. What was never anybody's has none: an init container whose devices a later one has too."""
        cores, size = self.allocated_until(now)
        if not (cores or size or self.used[0] or self.used[1]):
            return "", ""
        head = f"gpushare_container_gpu_seconds_total{{{self.labels},kind="
        seconds = f'{head}"allocated"}} {cores / CORES_PER_GPU:.3f}\n'
        if self.is_known[0]:
            seconds += f'{head}"used"}} {self.used[0]:.3f}\n'
        head = f"gpushare_container_memory_byte_seconds_total{{{self.labels},kind="
        sizes = f'{head}"allocated"}} {int(size)}\n'
        return seconds, f'{sizes}{head}"used"}} {int(self.used[1])}\n' if self.is_known[1] else sizes


class Consumption(Struct, eq=False):
    """Of what the node's ledger has allocated. `clock` is monotonic."""

    node: Node
    clock: Callable[[], float] = time.monotonic
    _rows: dict[_Name, _Row] = field(default_factory=dict)
    _held: dict[ContainerKey, dict[_Name, Size]] = field(default_factory=dict)
    _ended: dict[_Name, float] = field(default_factory=dict)
    """The oldest first."""
    _is_taken_over: bool = False

    def changed(self, key: ContainerKey) -> None:
        """A container's allocation; of a pod with init containers others' sizes may follow."""
        if self.node.cache.get(key) is None:
            self._hold(key, {})
        self._count(self.node.cache.of_pod(key.pod_uid))

    def gpus_changed(self) -> None:
        """Sizes may follow: of a MIG instance that is made for a claim, or a GPU that comes back."""
        for uid in {key.pod_uid: None for key in self.node.cache.view()}:
            self._count(self.node.cache.of_pod(uid))

    def add(self, usage: UsageRound | None) -> None:
        """One round; None, no round: nothing is known to be used."""
        if usage is None:
            return
        if self._is_taken_over:
            # The records have been read: what ended during the reload is none of them.
            for key in self._held.keys() - self.node.cache.view().keys():
                self.changed(key)
            self._is_taken_over = False
        now = self.clock()
        for (key, uuid), use in usage.containers.items():
            for name in self._held.get(key, ()):
                if name[3] == uuid:
                    row = self._rows[name]
                    seconds = min(usage.covered_s, now - row.began_at)
                    ratio, size = use.sm_ratio or 0.0, use.memory_bytes or 0
                    row.used = row.used[0] + ratio * seconds, row.used[1] + size * seconds
                    row.is_known = use.sm_ratio is not None, use.memory_bytes is not None

    def take_over(self, previous: Consumption) -> None:
        """Goes on with the sums of an agent that has read its settings again; all count on meanwhile."""
        self._rows, self._held, self._ended = previous._rows, previous._held, previous._ended
        self._is_taken_over = True

    def series(self) -> Iterator[Series]:
        now = self.clock()
        self._drop_ended(now)
        columns = zip(*(row.lines(now) for row in self._rows.values()), strict=True)
        for (name, text), lines in zip(_SERIES.items(), columns, strict=False):
            yield Series(name, text, "counter", lines)

    def _count(self, allocations: Sequence[Allocation]) -> None:
        """All of one pod. The kubelet hands an init container's devices on to the containers after it, and keeps them for
        the pod's whole life: each counts for the last that has it."""
        gpus, now = self.node.inventory.current.by_uuid(), self.clock()
        taken: dict[ResourceKind, set[DeviceId]] = {}
        for one in sorted(allocations, key=lambda one: one.kind is ContainerKind.INIT):
            # The name may not be known yet: of a container that only the kubelet's checkpoint has.
            if one.pod_name:
                limits = share_limits(one, None, gpus, self.node.names)
                head = one.namespace, one.pod_name, one.container_name
                known = [gpus[uuid] for uuid in one.gpus if uuid in gpus]
                sizes = {gpu.uuid: on_gpu(one, limits.cores, limits.memory_bytes, gpu) for gpu in known}
                if one.kind is ContainerKind.INIT:
                    sizes = {uuid: _without(one, uuid, size, taken) for uuid, size in sizes.items()}
                labels = {
                    "namespace": head[0],
                    "node": self.node.settings.node_name,
                    "pod": head[1],
                    "container": head[2],
                }
                for gpu in known:
                    row = self._rows.setdefault((*head, gpu.uuid), _Row("", now, now))
                    row.labels = labels_text(**labels, uuid=gpu.uuid, gpu=str(gpu.index))
                self._hold(one.key, {(*head, uuid): size for uuid, size in sizes.items()})
            if len(allocations) > 1:
                for kind, ids in one.ids.items():
                    taken.setdefault(kind, set()).update(ids)

    def _hold(self, key: ContainerKey, new: dict[_Name, Size]) -> None:
        """From now on the container has `new`."""
        now, old = self.clock(), self._held.pop(key, {})
        if new:
            self._held[key] = new
        for name in {**old, **new}:
            row, (less, fewer), (more, greater) = self._rows[name], old.get(name, (0, 0)), new.get(name, (0, 0))
            row.allocated, row.since = row.allocated_until(now), now
            row.size = row.size[0] + more - less, row.size[1] + greater - fewer
            if not row.holders:
                row.began_at = now
                self._ended.pop(name, None)
            row.holders += (name in new) - (name in old)
            if not row.holders:
                self._ended[name] = now
        self._drop_ended(now)

    def _drop_ended(self, now: float) -> None:
        while self._ended:
            name, ended_at = next(iter(self._ended.items()))
            if now - ended_at < KEPT_S and len(self._ended) <= MAX_ENDED:
                return
            del self._ended[name], self._rows[name]


def _without(one: Allocation, uuid: GpuUuid, size: Size, taken: Mapping[ResourceKind, Collection[DeviceId]]) -> Size:
    """The size without the devices that are `taken`."""

    def left(kind: ResourceKind, ids: Collection[DeviceId]) -> float:
        return sum(device not in taken.get(kind, ()) for device in ids) / len(ids) if ids else 1.0

    # The kubelet may ask for the memory first.
    bound = next((kind for kind in one.ids if kind.binds_gpu), ResourceKind.VCORE)
    part = left(bound, [device for device in one.ids_of(bound) if gpu_of(device) == uuid])
    # Memory comes with whole GPUs and replicas. A share has blocks, which may name any GPU.
    blocks = () if one.is_whole else one.ids_of(one.memory_kind)
    return round(size[0] * part), round(size[1] * (left(one.memory_kind, blocks) if blocks else part))
