"""What sysfs and /proc have of the machine: the product's name of its firmware, of a GPU its PCI class and the head of its
PCI configuration space, and which of NVIDIA's kernel modules runs. Of sysfs each is read once, at most 256 bytes.

The first line of /proc/driver/nvidia/version is one of these (the driver's kernel module writes it; the words "Open Kernel
Module" are in one alone):

    NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (...)  Thu Jan 23 22:50:36 UTC 2025
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from gpushare_agent.core.model.gpus import KernelModule

_MAX_BYTES = 256


# Cached for the process: none of the three changes while the machine runs, and each GPU's is asked at each poll.
@cache
def machine_name(path: Path = Path("/sys/class/dmi/id/product_name")) -> str:
    """The product's name of the machine; empty where the firmware has none."""
    return (_beginning(path) or b"").decode("ascii", "replace").strip()


@cache
def pci_class(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The PCI class, such as 0x030200, a 3D controller; None where the host does not show it."""
    try:
        return int(_beginning(devices / kernel_bus_id(bus_id) / "class") or b"", 16)
    except ValueError:
        return None


@cache
def pci_configuration(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> bytes | None:
    """The first 256 bytes, of which the kernel gives 64 without CAP_SYS_ADMIN; None where the host does not show it."""
    return _beginning(devices / kernel_bus_id(bus_id) / "config")


def _beginning(path: Path, most_bytes: int = _MAX_BYTES) -> bytes | None:
    """What one read of the file gives, because the kernel gives such files out whole; None where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(most_bytes)
    except OSError:
        return None


def kernel_bus_id(bus_id: str) -> str:
    """A canonical bus ID as sysfs names it: a domain of at least four digits, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


_MAX_VERSION_BYTES = 4096
_VERSION = re.compile(r"\b(\d{1,6}\.\d{1,6}(?:\.\d{1,6})?)\b")


def read_kernel_module(proc: Path) -> KernelModule | None:
    """`proc` is the node's /proc. None where no NVIDIA driver is loaded, or the file says nothing that is known."""
    # Not cached: the driver may be upgraded while the agent runs.
    content = _beginning(proc / "driver/nvidia/version", _MAX_VERSION_BYTES)
    return parse_kernel_module(content.decode("utf-8", "replace")) if content is not None else None


def parse_kernel_module(text: str) -> KernelModule | None:
    line = text.split("\n", 1)[0]
    version = _VERSION.search(line)
    if version is None or "Kernel Module" not in line:
        return None
    return KernelModule(version=version[1], is_open="Open Kernel Module" in line)
