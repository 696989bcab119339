"""How the kubelet names this node's devices: `<key>-<n>`, such as `8f3e2b1c-17`. The agent itself names them by the GPU's
whole UUID (`model.names.DeviceId`); this module translates at the kubelet's sockets and records.

Kubelets write every device ID of a container into its pod's status (from 1.36, or with ResourceHealthStatus), into
PodResources and into their checkpoint, so an ID is as short as it can be:

- The key is the first eight hexadecimal digits of the GPU's UUID, more where another GPU of the node begins with the same.
  It does not depend on indexes, nor on other GPUs as long as none begins alike. n is a decimal number.
- An ID is read as that of the one GPU whose UUID begins with the key, however long that is. Where none or several do, it
  names a GPU that the node does not have, and stays allocated until its container ends: a GPU put in the place of another
  does not inherit its IDs. (One in 500 million does, for each of eight GPUs, by beginning alike.)
- A GPU that the driver shows later, or again, is known by the IDs that its containers hold (`add_gpus`).

A unit under NVIDIA's names has its terms behind a slash, `8f3e2b1c-2/4s` (model/resources.py). NVIDIA's own plugin writes
`<GPU UUID>` and `<GPU UUID>::<n>` (internal/rm/devices.go of k8s-device-plugin v0.20.0): containers hold these where this
agent takes its place.

Agents from before the release of 2.0.0a1 wrote `<GPU UUID>::<n>`. The kubelet counts by ID, so one that a container holds is
listed as the container holds it until it ends, and the others in the present form. Two texts are two devices to the kubelet,
and here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from gpushare_agent.model.names import (
    DeviceId,
    GpuUuid,
    device_id,
    known_as,
    kubelet_text,
    split_device_id,
    unit_id,
    unit_suffix,
)
from gpushare_agent.model.resources import UnitTerms

KEY_CHARS = 8
_TEXT = re.compile(r"([^-~:/]+)-(0|[1-9][0-9]{0,5})(?:/([1-9][0-9]{0,3}[ms]?))?", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_PREFIXES = re.compile(r"(?:[A-Z]+-)+")


class DeviceIds:
    """The texts of one node's device IDs, for all resources. State owned: the keys of its GPUs, which do not change, and
    the texts that were announced, for speed."""

    def __init__(self, gpus: Iterable[GpuUuid] = ()) -> None:
        self._digits: dict[GpuUuid, str] = {}
        self._keys: dict[GpuUuid, str] = {}
        self._gpus: dict[str, GpuUuid] = {}
        self._announced: dict[str, DeviceId] = {}
        self._units: dict[GpuUuid, UnitTerms] = {}
        self.add_gpus(gpus)

    @property
    def gpus(self) -> int:
        """How many GPUs have a key; IDs that were read when there were fewer may name others now."""
        return len(self._keys)

    def expect_units(self, units: Mapping[GpuUuid, UnitTerms]) -> None:
        """The terms that `<GPU UUID>::<n>` of NVIDIA's plugin is read with: its text does not have them."""
        self._units = dict(units)

    def add_gpus(self, gpus: Iterable[GpuUuid]) -> bool:
        """Give those a key that have none; True where there are such."""
        new = [gpu for gpu in gpus if gpu not in self._keys]
        self._digits |= {gpu: _digits(gpu) for gpu in new}
        for gpu in new:
            self._keys[gpu] = key = self._key(gpu)
            self._gpus[key] = gpu
        return bool(new)

    def read(self, texts: Collection[str]) -> list[DeviceId]:
        """The devices of these texts, in their order. What is no device ID of ours comes back as it is."""
        try:  # thousands of them are offered in every admission
            return list(map(self._announced.__getitem__, texts))
        except KeyError:
            return [self._announced.get(text) or self._read(text) for text in texts]

    def write(self, device: str) -> str:
        """The text of a device that the kubelet knows or is to know. The inverse of `read`."""
        gpu, _, number = device.partition("::")
        key = self._keys.get(GpuUuid(gpu))
        if key is not None and _NUMBER.fullmatch(number):  # thousands at the start, so the rest is for other forms
            announced = f"{key}-{number}"
            self._announced[announced] = DeviceId(device)
            return announced
        if (text := kubelet_text(device)) is not None:
            return text
        split = split_device_id(device)
        if split is None or split[0] not in self._keys:
            return device
        text = f"{self._keys[split[0]]}-{split[1]}"
        if terms := unit_suffix(device):
            text += f"/{terms}"
        self._announced[text] = DeviceId(device)
        return text

    def _read(self, text: str) -> DeviceId:
        if "::" in text or text in self._keys:
            return self._read_long(text)
        match = _TEXT.fullmatch(text)
        if match is None:
            return DeviceId(text)
        key, number, terms = match[1], int(match[2]), match[3]
        gpu = self._gpus.get(key) or self._begins_with(key)
        device = (
            device_id(gpu or GpuUuid(key), number) if terms is None else unit_id(gpu or GpuUuid(key), number, terms)
        )
        return device if gpu is not None and self._keys[gpu] == key else known_as(device, text)

    def _read_long(self, text: str) -> DeviceId:
        """NVIDIA's, and of agents from before 2.0.0a1: `<GPU UUID>::<n>` may be either, by the resource. Only
        NVIDIA's resources read the terms."""
        if text in self._keys:
            return known_as(unit_id(GpuUuid(text), 0, "1"), text)
        split = split_device_id(text)
        if split is None:
            return DeviceId(text)
        terms = self._units.get(split[0])
        if terms is None or terms.is_whole or split[1] >= terms.of:
            return known_as(device_id(*split), text)
        return known_as(unit_id(*split, str(terms.of)), text)

    def _begins_with(self, key: str) -> GpuUuid | None:
        found = [gpu for gpu, digits in self._digits.items() if digits.startswith(key)] if len(key) >= KEY_CHARS else []
        return found[0] if len(found) == 1 else None

    def _key(self, gpu: GpuUuid) -> str:
        own = self._digits[gpu]
        others = [digits for other, digits in self._digits.items() if other != gpu]
        lengths = range(KEY_CHARS, len(own))
        return next((own[:n] for n in lengths if not any(other.startswith(own[:n]) for other in others)), own)


def _digits(gpu: GpuUuid) -> str:
    """The UUID without the kind before it (`GPU-`, `MIG-`) and without dashes."""
    return _PREFIXES.sub("", gpu, count=1).replace("-", "")
