"""Which of NVIDIA's kernel modules runs, and its version, from `/proc/driver/nvidia/version`. State owned: none.

The first line is one of these (the driver's kernel module writes it; the words "Open Kernel Module" are in one alone):

    NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (...)  Thu Jan 23 22:50:36 UTC 2025
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpushare_agent.model.gpus import KernelModule

_MAX_BYTES = 4096
_VERSION = re.compile(r"\b(\d{1,6}\.\d{1,6}(?:\.\d{1,6})?)\b")


def read_kernel_module(proc: Path) -> KernelModule | None:
    """`proc` is the node's /proc. None where no NVIDIA driver is loaded, or the file says nothing that is known."""
    try:
        file = os.open(proc / "driver/nvidia/version", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(file, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(file)
    return parse_kernel_module(text)


def parse_kernel_module(text: str) -> KernelModule | None:
    line = text.split("\n", 1)[0]
    version = _VERSION.search(line)
    if version is None or "Kernel Module" not in line:
        return None
    return KernelModule(version=version[1], is_open="Open Kernel Module" in line)
