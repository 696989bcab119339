"""For isolations with a library in the container: one of no more than a header."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from gpushare_agent.agent.isolation.gpushare.library import MARK

MACHINES = {"x86_64": 62, "aarch64": 183}


def fake_library(path: Path, *, machine: int | None = None) -> Path:
    """An ELF header of 64 bits for this machine, without sections and segments, and the mark of libgpushare's."""
    number = MACHINES[os.uname().machine] if machine is None else machine
    identification = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = identification + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0)
    path.write_bytes(header + MARK)
    return path
