"""Reads what a shared object says of itself: ELF class, machine, soname (by pyelftools)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from gpushare_agent.isolation.driver_volume.values import ElfClass
from gpushare_agent.model.errors import Corrupt, NotFound

# pyelftools checks little of what it reads: a damaged file ends in any of these, wherever its numbers lead (OSError: a
# place in the file that no file has).
_DAMAGED = (ELFError, ConstructError, struct.error, OSError, ValueError, LookupError, TypeError, AttributeError,
            OverflowError, AssertionError, RecursionError)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFile:
    """`machine` is ELF's name, such as EM_X86_64; `soname` is empty where the file has none."""

    elf_class: ElfClass
    machine: str
    soname: str


def read_elf(path: Path) -> ElfFile:
    """The facts of a shared object.

    Raises:
        NotFound: there is no readable file.
        Corrupt: it is no ELF file, or a damaged one, or its soname is no file name.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        try:
            return _read(file)
        except _DAMAGED as error:
            raise Corrupt(f"{path} is no shared object that can be read: {error}") from error


def _read(file: IO[bytes]) -> ElfFile:
    elf = ELFFile(file)
    elf_class, machine = elf.elfclass, elf["e_machine"]
    if elf_class not in (32, 64):
        raise ValueError(f"its ELF class is {elf_class}")
    sonames = [
        str(cast("Any", tag).soname)  # an attribute that the class makes up from the tag's name
        for segment in elf.iter_segments("PT_DYNAMIC")
        if isinstance(segment, DynamicSegment)
        for tag in segment.iter_tags("DT_SONAME")
    ]
    soname = sonames[0] if sonames else ""
    if "/" in soname or "\0" in soname or soname in (".", "..") or len(soname.encode()) > 255:
        raise ValueError(f"its soname {soname[:80]!r} is no file name")
    return ElfFile(elf_class=cast("ElfClass", elf_class), machine=str(machine), soname=soname)
