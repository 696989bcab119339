"""A library for isolation hami-core: no more than the header of a shared object, which is all that the agent reads."""

from __future__ import annotations

import os
import struct
from pathlib import Path

INSIDE = "/usr/local/vgpu/libvgpu.so"
MACHINES = {"x86_64": 62, "aarch64": 183}


def fake_library(path: Path, *, machine: int | None = None) -> Path:
    """An ELF header of 64 bits for this machine, without sections and segments."""
    number = MACHINES[os.uname().machine] if machine is None else machine
    identification = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(identification + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0))
    return path
