"""What ListAndWatch sends for one resource, every device ID with its health and NUMA node; and how the kubelet names the
devices.

One frame per device is kept encoded: protobuf messages that hold only repeated fields merge when they are put one after
another, so a change of one device encodes one device.

The kubelet names this node's devices: `<key>-<n>`, such as `8f3e2b1c-17`. The agent itself names them by the GPU's
whole UUID (`core.model.names.DeviceId`); `DeviceIds` translates at the kubelet's sockets and records.

Kubelets write every device ID of a container into its pod's status (from 1.36, or with ResourceHealthStatus), into
PodResources and into their checkpoint, so an ID is as short as it can be:

- The key is the first eight hexadecimal digits of the GPU's UUID, more where another GPU of the node begins with the same.
  It does not depend on indexes, nor on other GPUs as long as none begins alike. n is a decimal number.
- An ID is read as that of the one GPU whose UUID begins with the key, however long that is. Where none or several do, it
  names a GPU that the node does not have, and stays allocated until its container ends: a GPU that replaces another
  does not inherit its IDs. (One in 500 million does, for each of eight GPUs, by beginning alike.)
- A GPU that the driver shows later, or again, is known by the IDs that its containers hold (`add_gpus`).

A unit under NVIDIA's names has its replica layout behind a slash, `8f3e2b1c-2/4s` (model/resources.py). NVIDIA's own plugin
writes `<GPU UUID>` and `<GPU UUID>::<n>` (internal/rm/devices.go of k8s-device-plugin v0.20.0): containers hold these where
this agent takes its place.

The kubelet counts by ID, so a unit that a container holds under another text is listed as the container holds it until it
ends, and the others in the present form. Two texts are two devices to the kubelet, and here.

State owned: the devices of one resource, their frames, and a version that grows with every change.
Format: ListAndWatchResponse of protos/deviceplugin.proto.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.kit.protobuf import bytes_field, integer_field
from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.device_ids import DeviceIds, OfferedIds
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.names import DeviceId, GpuUuid, device_id
from gpushare_agent.core.model.resources import Measure, ResourceKind, ResourceNames

MIB_OF_GIB = 1024
WITHDRAWN_S = 60.0
"""How long an ID that is no longer offered stays in the list, Unhealthy. Longer than an admission: when the kubelet has an
Allocate's answer it looks up each ID in the list that it has by then, and Kubernetes 1.36.3 ends there with a nil pointer
where one is gone (seen; allocateContainerResources in pkg/kubelet/cm/devicemanager/manager.go)."""
MAX_LIST_BYTES = 4 * 1024 * 1024 - 1024
"""The kubelet's gRPC client takes 4 MiB (measured: RESOURCE_EXHAUSTED above); a little is left for the framing."""
STATUS_ENTRY_BYTES = len('{"resourceID":"","health":"Healthy"},')
"""Of a device ID in `status.containerStatuses[].allocatedResourcesStatus` (measured on 1.36), without the ID."""
MAX_STATUS_BYTES = 512 * 1024
"""A pod's status should stay below this: the kubelet sends it with every change of the pod, the API server to all that
watch pods, and etcd takes objects up to 1.5 MiB (`--max-request-bytes`), beyond which the kubelet can report nothing of the
pod. A third of that leaves room for a second container and for what else a pod has."""


class DeviceRow(Struct, frozen=True, kw_only=True):
    """One device ID as the kubelet sees it. `numa` is None where the host has no NUMA node for the GPU."""

    id: str
    healthy: bool
    numa: int | None = None


class DeviceTable:
    """The devices of one resource. Changed by its owner through `set_devices`, read by any number of streams. What is no
    longer offered stays for `WITHDRAWN_S`."""

    def __init__(self, devices: Sequence[DeviceRow] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, DeviceRow] = {}
        self._withdrawn: dict[str, float] = {}
        self._is_sent = False
        self._frames: dict[str, bytes] = {}
        self._encoded = b""
        self.changes = ChangeSignal()
        """Of the list; the plugin notifies, too, when it serves another table in place of this one."""
        self.offer = ExpectedOffer()
        if devices:
            self.set_devices(devices)

    @property
    def devices(self) -> tuple[DeviceRow, ...]:
        """The devices, in the order in which they are sent."""
        return tuple(self._rows.values())

    def withdrawn_left_s(self) -> float | None:
        """Seconds until `set_devices` is due for what was withdrawn, None where nothing was."""
        return max(0.0, min(self._withdrawn.values()) - self._clock()) if self._withdrawn else None

    def take_over(self, previous: DeviceTable) -> None:
        """This list follows that of `previous`, which the kubelet has."""
        own = tuple(row for row in self._rows.values() if row.id not in self._withdrawn)
        self._rows = {**previous._rows, **self._rows}
        self._withdrawn = {**previous._withdrawn, **self._withdrawn}
        self._frames = {**previous._frames, **self._frames}
        self._is_sent |= previous._is_sent
        self.set_devices(own)

    def set_devices(self, devices: Sequence[DeviceRow]) -> bool:
        """Replaces the list; true if anything differs from before, order included. Then every waiter wakes."""
        rows = {row.id: row for row in devices}
        # The withdrawn rows come last, so that the list of what is offered keeps its order.
        rows |= self._withdraw(rows)
        # dict equality ignores order, and the order is a part of what is sent.
        if rows == self._rows and list(rows) == list(self._rows):
            return False
        # Of thousands of rows those of one GPU change at a time: only these are encoded again.
        frames = {
            row.id: self._frames[row.id] if self._rows.get(row.id) == row else _frame(row) for row in rows.values()
        }
        # What is too long for the kubelet it takes not at all: the withdrawn rows go, whose admission is over by then
        # as a rule.
        if self._withdrawn and sum(map(len, frames.values())) > MAX_LIST_BYTES:
            self._rows, self._withdrawn = {row.id: row for row in devices if row.id in self._rows}, {}
            return self.set_devices(devices)
        self._rows, self._frames = rows, frames
        self._encoded = b"".join(frames.values())
        self.changes.notify()
        return True

    def _withdraw(self, offered: Collection[str]) -> dict[str, DeviceRow]:
        """The rows that are not offered any more and stay for a while."""
        now = self._clock()
        # Before the first ListAndWatch no kubelet has an ID of this list that it could look up.
        known = self._rows if self._is_sent else ()
        until = {id_: self._withdrawn.get(id_, now + WITHDRAWN_S) for id_ in known if id_ not in offered}
        self._withdrawn = {id_: at for id_, at in until.items() if at > now}
        return {id_: replace(self._rows[id_], healthy=False) for id_ in self._withdrawn}

    def encode(self) -> bytes:
        """The whole ListAndWatchResponse, to be sent."""
        self._is_sent = True
        return self._encoded


MOST_CHANGED = 64
"""IDs in which an expected offer may differ from a set that is kept: with more of them it becomes that set."""


class ExpectedOffer:
    """The IDs that the kubelet will offer next: those of its last offer, without what was allocated since, with what was
    freed. It offers thousands, each time in another order, and nearly always these. An offer of as many with the same sum of
    hashes is these, and no ID of it is looked up: Python's hash of bytes has 64 bits and a key that is the process's own,
    and is 0 for no bytes.

    State owned: the IDs of an earlier offer, those that have changed since, and the sum of what is expected. A wrong
    expectation costs lookups.
    """

    def __init__(self) -> None:
        self._earlier = OfferedIds()
        self._changed = set[DeviceId]()
        self._sum = 0

    def read(self, ids: DeviceIds, fields: list[bytes]) -> OfferedIds | None:
        """What an offer's fields stand for; None where one was not announced."""
        total, expected = sum(map(hash, fields)), self._earlier.but(self._changed)
        if total == self._sum and len(expected) == len(fields):
            if len(self._changed) > MOST_CHANGED:
                self._earlier, self._changed = expected.copy(), set()
            return expected
        found = ids.read_fields(fields)
        if found is None:
            return None
        offer = OfferedIds(found)
        if len(found) == len(fields):  # an ID twice would be in the sum twice, and once in the set
            self._earlier, self._sum = offer, total
            self._changed.clear()
        return offer

    def change(self, ids: DeviceIds, *, freed: Iterable[DeviceId] = (), taken: Iterable[DeviceId] = ()) -> None:
        """An allocation has changed."""
        for devices, is_taken in ((freed, False), (taken, True)):
            for device in devices:
                is_there = (device in self._earlier) != (device in self._changed)
                if is_there == is_taken:
                    self._changed ^= {device}
                    self._sum += -ids.hash_of(device) if is_taken else ids.hash_of(device)


def device_rows(
    inventory: GpuInventory,
    devices: Mapping[GpuUuid, Sequence[DeviceId]],
    ids: DeviceIds,
    withheld: Collection[DeviceId] = (),
    kept: Collection[DeviceId] = (),
) -> list[DeviceRow]:
    """The `devices` of every GPU, in order of GPU index; a GPU's health is that of all of them but those `withheld`, and
    those `kept`, which are healthy."""
    return [
        DeviceRow(id=text, healthy=device in kept or (is_healthy and device not in withheld), numa=gpu.numa_node)
        for gpu in sorted(inventory.gpus, key=lambda gpu: gpu.index)
        for is_healthy in (gpu.is_healthy,)
        for device, text in zip(devices[gpu.uuid], ids.write_all(devices[gpu.uuid]), strict=True)
    ]


def check_lists(inventory: GpuInventory, names: ResourceNames) -> None:
    """Checks that the kubelet can receive the lists of memory blocks and of GPUShare's units.

    Raises StartupError: it cannot; the text names the smallest block size, or the unit, that works.
    """
    for kind in names.kinds:
        is_blocks, unit_mib = kind.measure is Measure.BLOCKS, names.unit_mib(kind)
        size = list_bytes(inventory.gpus, unit_mib) if is_blocks or kind.measure is Measure.UNITS else 0
        if size <= MAX_LIST_BYTES:
            continue
        works = smallest_block_mib(inventory.gpus)
        remedy = "GiB" if works <= MIB_OF_GIB else "GiB on a node with fewer GPUs: here GiB does not fit either"
        raise StartupError(
            f"cannot announce {names.name(kind)}: {sum(gpu.memory_mib // unit_mib for gpu in inventory.gpus)} "
            f"{'blocks' if is_blocks else 'units'} of {unit_mib} MiB make a ListAndWatch message of {size} bytes, and the "
            f"kubelet takes at most {MAX_LIST_BYTES}. The agent does not start. Set "
            + (
                f"the memory block size (resources.memory_block_mib) to {works} MiB or more"
                if is_blocks
                else f"gpushare.unit to {remedy}"
            )
        )


def smallest_block_mib(gpus: Sequence[Gpu]) -> int:
    """The smallest power of two, in MiB, whose blocks of all GPUs fit one message.

    A block that is larger than every GPU always fits, because then there is none.
    """
    block_mib = 1
    while list_bytes(gpus, block_mib) > MAX_LIST_BYTES:
        block_mib *= 2
    return block_mib


def list_bytes(gpus: Sequence[Gpu], unit_mib: int) -> int:
    """The size of the ListAndWatch message for blocks of this size, without building it. "Unhealthy" is the longer text."""
    ids = DeviceIds(gpu.uuid for gpu in gpus)
    return sum(
        count * len(_frame(DeviceRow(id=ids.write(device_id(gpu.uuid, number)), healthy=False, numa=gpu.numa_node)))
        for gpu in gpus
        for number, count in _digit_groups(gpu.memory_mib // unit_mib)
    )


def status_bytes(gpus: Sequence[Gpu], names: ResourceNames) -> int:
    """What the kubelet writes into the status of a pod that has all cores and memory of the node, in JSON."""
    ids = DeviceIds(gpu.uuid for gpu in gpus)

    def of(kind: ResourceKind) -> int:
        return sum(
            count * (STATUS_ENTRY_BYTES + len(ids.write(device_id(gpu.uuid, number))))
            for gpu in gpus
            for number, count in _digit_groups(names.units(gpu, kind))
        )

    return max(of(ResourceKind.VCORE) + of(ResourceKind.VMEMORY), of(ResourceKind.GPU_MEM) if names.gpu_mem else 0)


def _digit_groups(count: int) -> Iterator[tuple[int, int]]:
    """Splits 0..count-1 by number of digits: one member of each group, and how many there are."""
    first, limit = 0, 10
    while first < count:
        yield first, min(count, limit) - first
        first, limit = limit, limit * 10


def _frame(row: DeviceRow) -> bytes:
    """A ListAndWatchResponse with this one device."""
    content = row.id.encode()
    before, after = _around(len(content), row.healthy, row.numa)
    return before + content + after


@cache
def _around(id_bytes: int, is_healthy: bool, numa: int | None) -> tuple[bytes, bytes]:
    """What is before and after an ID of this length, the same in thousands of frames."""
    after = bytes_field(2, (Health.HEALTHY if is_healthy else Health.UNHEALTHY).encode())
    # Without a NUMANode the kubelet's topology manager takes any node to do, so node 0 must be there though it is empty, as
    # proto3 writes it.
    if numa is not None:
        after += bytes_field(3, bytes_field(1, integer_field(1, numa) if numa else b""))
    frame = bytes_field(1, bytes_field(1, bytes(id_bytes)) + after)
    return frame[: -id_bytes - len(after)], after
