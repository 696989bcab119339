"""What sysfs has of the machine: the product's name of its firmware, and of a GPU its PCI class and the head of its PCI
configuration space. Each is read once, at most 256 bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_MAX_BYTES = 256


@cache
def machine_name(path: Path = Path("/sys/class/dmi/id/product_name")) -> str:
    """Empty where the firmware has none."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


@cache
def pci_class(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Such as 0x030200, a 3D controller; None where the host does not show it."""
    try:
        with (devices / kernel_bus_id(bus_id) / "class").open("rb") as file:
            return int(file.read(_MAX_BYTES), 16)
    except (OSError, ValueError):
        return None


@cache
def pci_configuration(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> bytes | None:
    """The first 256 bytes, of which the kernel gives 64 without CAP_SYS_ADMIN; None where the host does not show it."""
    try:
        with (devices / kernel_bus_id(bus_id) / "config").open("rb", buffering=0) as file:
            return file.read(_MAX_BYTES)
    except (OSError, ValueError):
        return None


def kernel_bus_id(bus_id: str) -> str:
    """A canonical bus ID as sysfs names it: a domain of at least four digits, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"
