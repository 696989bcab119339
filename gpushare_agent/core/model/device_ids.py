"""The kubelet's names of this node's devices: `<key>-<n>`, such as `8f3e2b1c-17`. Pure, but for what a `DeviceIds`
remembers.

The agent itself names them by the GPU's whole UUID (`core.model.names.DeviceId`); `DeviceIds` translates at the kubelet's
sockets and records. What the form is for: agent/kubelet/device_table.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import cached_property

from gpushare_agent.core.model.names import (
    DeviceId,
    GpuUuid,
    device_id,
    gpu_of,
    known_as,
    kubelet_text,
    named_gpus,
    read_former_id,
    split_device_id,
    unit_id,
    unit_suffix,
)
from gpushare_agent.core.model.resources import ReplicaLayout

KEY_CHARS = 8
_TEXT = re.compile(r"([^-~:/]+)-(0|[1-9][0-9]{0,5})(?:/([1-9][0-9]{0,3}[ms]?))?", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_PREFIXES = re.compile(r"(?:[A-Z]+-)+")
_LENGTHS = tuple(bytes((255 if length == 10 else length,)) for length in range(128))
"""What is before a text in `announced`: thousands are looked up in a call."""


class OfferedIds(Set[DeviceId]):
    """The IDs of an offer, thousands: those of an earlier one, of which only the `changed` ones are or are not in this one,
    so that neither is copied. It does not change."""

    def __init__(self, ids: Iterable[DeviceId] = ()) -> None:
        # No copy of a frozenset; the operators of Set make their results of what only can be iterated over.
        self._ids = frozenset(ids)
        self._changed = frozenset[DeviceId]()
        self._earlier: OfferedIds | None = None

    def but(self, changed: Iterable[DeviceId]) -> OfferedIds:
        """The offer in which these IDs, and no others, are not as in this one."""
        offer = OfferedIds(self._ids)
        offer._changed, offer._earlier = self._changed.symmetric_difference(changed), self
        return offer

    def copy(self) -> OfferedIds:
        """The same IDs without an earlier offer behind them."""
        return OfferedIds(self._ids ^ self._changed)

    def __contains__(self, device: object) -> bool:
        return (device in self._ids) != (device in self._changed)

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self._ids ^ self._changed)

    def __len__(self) -> int:
        return len(self._ids) + len(self._changed) - 2 * len(self._ids & self._changed)

    def of(self, devices: Mapping[DeviceId, object]) -> Set[DeviceId]:
        """Those of the devices that are offered, in a step of C for each of the fewer."""
        return _in_both(self._ids, devices) ^ _in_both(self._changed, devices)

    @cached_property
    def by_gpu(self) -> Counter[GpuUuid]:
        """How many there are of each GPU."""
        if self._earlier is None:
            return Counter(named_gpus(self._ids))
        counts = Counter(self._earlier.by_gpu)
        for device in self._changed ^ self._earlier._changed:
            counts[gpu_of(device)] += 1 if device in self else -1
        return counts


def _in_both(ids: frozenset[DeviceId], devices: Mapping[DeviceId, object]) -> Set[DeviceId]:
    # Python itself goes through all of a mapping, and through all of a set where a mapping's keys are the first operand.
    return devices.keys() & ids if len(ids) < len(devices) else ids.intersection(devices)


class DeviceIds:
    """The texts of one node's device IDs, for all resources. State owned: the keys of its GPUs, which do not change, and
    the texts that were announced, for speed."""

    def __init__(self, gpus: Iterable[GpuUuid] = (), resources: Collection[str] | None = None) -> None:
        """`resources` are the names that the node offers; None: whatever a container holds may be a device of ours."""
        self._resources = resources
        self._digits: dict[GpuUuid, str] = {}
        self._keys: dict[GpuUuid, str] = {}
        self._gpus: dict[str, GpuUuid] = {}
        self.announced: dict[bytes, DeviceId] = {}
        """By their texts as an offer of the kubelet has them (`decode_preferred_allocation` of kit/protobuf.py)."""
        self._texts: dict[str, str] = {}
        self._units: dict[GpuUuid, ReplicaLayout] = {}
        self.add_gpus(gpus)

    def expect_units(self, units: Mapping[GpuUuid, ReplicaLayout]) -> None:
        """The replica layouts by which `<GPU UUID>::<n>` of NVIDIA's plugin is read: its text does not have them."""
        self._units = dict(units)

    def add_gpus(self, gpus: Iterable[GpuUuid]) -> bool:
        """Gives a key to each GPU without one; True where there was one. `gpus` are all that there are: MIG instances that
        are gone are forgotten, because one that is made again has another UUID."""
        present = dict.fromkeys(gpus)
        for gone in [gpu for gpu in self._keys if gpu not in present and gpu.startswith("MIG-")]:
            del self._gpus[self._keys.pop(gone)], self._digits[gone]
        new = [gpu for gpu in present if gpu not in self._keys]
        self._digits |= {gpu: _digits(gpu) for gpu in new}
        for gpu in new:
            self._keys[gpu] = key = self._key(gpu)
            self._gpus[key] = gpu
        return bool(new)

    def read(self, texts: Collection[str]) -> list[DeviceId]:
        """The devices that these texts name, in their order. A text that is no device ID of ours comes back as it is."""
        known = self.announced.get
        return [known(_field(text)) or self._read(text) for text in texts]

    def read_fields(self, fields: Iterable[bytes]) -> frozenset[DeviceId] | None:
        """Of an offer, for `decode_preferred_allocation`; None where one was not announced."""
        try:
            return frozenset(map(self.announced.__getitem__, fields))
        except KeyError:
            return None

    def hash_of(self, device: DeviceId) -> int:
        """Of the device's field in an offer."""
        return hash(_field(self._texts.get(device) or self.write(device)))

    def read_held(self, resource: str, texts: Collection[str]) -> frozenset[DeviceId]:
        """What a container holds of a resource. Empty for another plugin's: a node may have more of them than of ours, and
        for each of them a text would be kept."""
        devices = frozenset(self.read(texts))
        if self._resources is None or resource in self._resources:
            return devices
        is_ours = any(split_device_id(one) is not None or read_former_id(one) is not None for one in devices)
        return devices if is_ours else frozenset()

    def write_all(self, devices: Iterable[str]) -> list[str]:
        return [self._texts.get(device) or self.write(device) for device in devices]

    def write(self, device: str) -> str:
        """The text of a device that the kubelet knows or is to know. The inverse of `read`."""
        gpu, _, number = device.partition("::")
        key = self._keys.get(GpuUuid(gpu))
        if key is not None and _NUMBER.fullmatch(number):  # thousands at the start; what follows is for other forms
            announced = f"{key}-{number}"
            self.announced[_field(announced)], self._texts[device] = DeviceId(device), announced
            return announced
        # A container holds it under another text: the kubelet counts by text, so it must be listed as it knows it.
        if (text := kubelet_text(device)) is not None:
            return text
        split = split_device_id(device)
        # The node no longer has the GPU: the text is already what the kubelet knows.
        if split is None or split[0] not in self._keys:
            return device
        text = f"{self._keys[split[0]]}-{split[1]}"
        if replicas := unit_suffix(device):
            text += f"/{replicas}"
        # It is then found without parsing: the kubelet offers thousands of such texts in each call.
        self.announced[_field(text)] = DeviceId(device)
        return text

    def _read(self, text: str) -> DeviceId:
        if "::" in text or text in self._keys:
            return self._read_long(text)
        match = _TEXT.fullmatch(text)
        if match is None:
            return DeviceId(text)
        key, number, replicas = match[1], int(match[2]), match[3]
        gpu = self._gpus.get(key) or self._begins_with(key)
        device = (
            device_id(gpu or GpuUuid(key), number)
            if replicas is None
            else unit_id(gpu or GpuUuid(key), number, replicas)
        )
        # A shorter or longer key than the present one: another agent wrote it, and a container may still hold the text.
        return device if gpu is not None and self._keys[gpu] == key else known_as(device, text)

    def _read_long(self, text: str) -> DeviceId:
        """NVIDIA's form. Where the GPU's replica layout lacks the number, the settings have changed since: the whole GPU."""
        if text in self._keys:
            return known_as(unit_id(GpuUuid(text), 0, "1"), text)
        split = split_device_id(text)
        if split is None:
            return DeviceId(text)
        replicas = self._units.get(split[0])
        if replicas is None or replicas.is_whole or split[1] >= replicas.of:
            return known_as(device_id(*split), text)
        return known_as(unit_id(*split, str(replicas.of)), text)

    def _begins_with(self, key: str) -> GpuUuid | None:
        found = [gpu for gpu, digits in self._digits.items() if digits.startswith(key)] if len(key) >= KEY_CHARS else []
        return found[0] if len(found) == 1 else None

    def _key(self, gpu: GpuUuid) -> str:
        own = self._digits[gpu]
        others = [digits for other, digits in self._digits.items() if other != gpu]
        lengths = range(KEY_CHARS, len(own))
        return next((own[:n] for n in lengths if not any(other.startswith(own[:n]) for other in others)), own)


def _field(text: str) -> bytes:
    content = text.encode()
    return _LENGTHS[len(content) & 127] + content


def _digits(gpu: GpuUuid) -> str:
    """The UUID without the kind before it (`GPU-`, `MIG-`) and without dashes."""
    return _PREFIXES.sub("", gpu, count=1).replace("-", "")
