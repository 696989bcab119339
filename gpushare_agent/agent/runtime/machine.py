"""What sysfs and /proc have of the machine: the product's name of its firmware, its free memory, of a GPU its PCI class and
the head of its PCI configuration space, which boot this is, which of NVIDIA's kernel modules runs, and what that says of a
GPU. Of sysfs each is read once, at most 256 bytes.

The first line of /proc/driver/nvidia/version is one of these (the driver's kernel module writes it; the words "Open Kernel
Module" are in one alone):

    NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (...)  Thu Jan 23 22:50:36 UTC 2025
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gpushare_agent.core.model.gpus import KernelModule

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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


def this_boot(path: Path = BOOT_ID) -> str:
    """The kernel's ID of this boot; empty where it cannot be read."""
    return (_beginning(path) or b"").decode("ascii", "ignore").strip()


def is_before_boot(status: os.stat_result) -> bool:
    """Whether a file was last written before this boot, if the wall clock was not set since."""
    return status.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


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


_MAX_PROC_BYTES = 4096
_VERSION = re.compile(r"\b(\d{1,6}\.\d{1,6}(?:\.\d{1,6})?)\b")


def read_kernel_module(proc: Path) -> KernelModule | None:
    """`proc` is the node's /proc. None where no NVIDIA driver is loaded, or the file says nothing that is known."""
    # Not cached: the driver may be upgraded while the agent runs.
    content = _beginning(proc / "driver/nvidia/version", _MAX_PROC_BYTES)
    return parse_kernel_module(content.decode("utf-8", "replace")) if content is not None else None


def parse_kernel_module(text: str) -> KernelModule | None:
    line = text.split("\n", 1)[0]
    version = _VERSION.search(line)
    if version is None or "Kernel Module" not in line:
        return None
    return KernelModule(version=version[1], is_open="Open Kernel Module" in line)


def available_memory_bytes(proc: Path = Path("/proc")) -> int:
    """What new programs can have of the host's memory; 0 where the kernel does not say."""
    number = _fields(proc / "meminfo").get("MemAvailable", "").removesuffix(" kB")
    return int(number) * 1024 if number.isdecimal() else 0


def read_gpu_fields(uuid: str, proc: Path) -> Mapping[str, str]:
    """What NVIDIA's kernel module says of a GPU, such as its `Device Minor` and `Bus Location`; empty where it says nothing.
    Source: nv_procfs_read_gpu_info in kernel-open/nvidia/nv-procfs.c of the open kernel modules."""
    found = map(_fields, sorted(proc.glob("driver/nvidia/gpus/*/information")))
    return next((fields for fields in found if fields.get("GPU UUID") == uuid), {})


def _fields(path: Path) -> Mapping[str, str]:
    """The lines `name: value` of a file; none where it cannot be read."""
    lines = (_beginning(path, _MAX_PROC_BYTES) or b"").decode("utf-8", "replace").splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
