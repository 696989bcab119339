"""Shared objects of the host: class, machine and soname from the ELF file, and the dynamic loader's cache, /etc/ld.so.cache.

The ELF file is read by pyelftools. Source of the cache's format: glibc, sysdeps/generic/dl-cache.h. It begins
`glibc-ld.so.cache1.1`, uint32 count, uint32 length of the strings, uint8 flags, 19 bytes more; an entry is int32 flags,
uint32 key, uint32 value, uint32 unused, uint64 hwcap, with offsets from the first byte; all little-endian on machines with
NVIDIA drivers. Before glibc 2.32 ldconfig wrote a table for libc5 before it (`ld.so-1.7.0`), which is skipped.

Nothing in the cache is trusted: every offset is checked, and what leads outside is Corrupt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import InterpSegment
from msgspec import Struct

from gpushare_agent.agent.delivery.volume_plan import ElfClass
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.model.errors import Corrupt, NotFound, os_errors_as

MAX_BYTES = 64 * 1024 * 1024
"""A large distribution's cache has about 300 KiB."""

_MAX_STRING_BYTES = 4096
_OLD_MAGIC, _MAGIC = b"ld.so-1.7.0", b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sIIB19x")
_ENTRY = struct.Struct("<iIIIQ")
_BIG_ENDIAN_FLAG = 3

# pyelftools checks little of what it reads: a damaged file ends in any of these, wherever its numbers lead (OSError: a
# place in the file that no file has).
_DAMAGED = (ELFError, ConstructError, struct.error, OSError, ValueError, LookupError, TypeError, AttributeError,
            OverflowError, AssertionError, RecursionError)  # fmt: skip


class ElfFile(Struct, frozen=True, kw_only=True):
    """`machine` is ELF's name, such as EM_X86_64; `interpreter` the dynamic loader that a program asks for. It and `soname`
    are empty where the file has none."""

    elf_class: ElfClass
    machine: str
    soname: str
    interpreter: str = ""


class Interface(Struct, frozen=True, kw_only=True):
    """`glibc` is the highest version that the file needs of the C library, such as (2, 17), empty where it names none;
    `defined` are the names of its dynamic symbols that others can use."""

    glibc: tuple[int, ...]
    defined: frozenset[str]


def read_elf(path: Path) -> ElfFile:
    """The facts of a shared object, or a program.

    Raises:
        NotFound: there is no readable file.
        Corrupt: it is no ELF file, or a damaged one, or its soname is no file name.
    """
    with _opened(path) as elf:
        elf_class = elf.elfclass
        if elf_class not in (32, 64):
            raise ValueError(f"its ELF class is {elf_class}")
        sonames = [
            str(cast("Any", tag).soname)  # an attribute that the class makes up from the tag's name
            for segment in elf.iter_segments("PT_DYNAMIC")
            if isinstance(segment, DynamicSegment)
            for tag in segment.iter_tags("DT_SONAME")
        ]
        soname = sonames[0] if sonames else ""
        # It becomes the name of a link in the volume.
        if "/" in soname or "\0" in soname or soname in (".", "..") or len(soname.encode()) > 255:
            raise ValueError(f"its soname {soname[:80]!r} is no file name")
        loaders = [s.get_interp_name() for s in elf.iter_segments("PT_INTERP") if isinstance(s, InterpSegment)]
        return ElfFile(
            elf_class=cast("ElfClass", elf_class),
            machine=str(elf["e_machine"]),
            soname=soname,
            interpreter=loaders[0][:255] if loaders else "",
        )


def read_interface(path: Path) -> Interface:
    """What a shared object needs and gives, from its sections .gnu.version_r and .dynsym. Raises as `read_elf` does."""
    with _opened(path) as elf:
        needs, symbols = elf.get_section_by_name(".gnu.version_r"), elf.get_section_by_name(".dynsym")
        versions = needs.iter_versions() if isinstance(needs, GNUVerNeedSection) else ()
        names = [str(one.name) for _, group in versions for one in group]
        numbers = [name.removeprefix("GLIBC_").split(".") for name in names if name.startswith("GLIBC_")]
        glibc = max((tuple(map(int, parts)) for parts in numbers if all(map(str.isdecimal, parts))), default=())
        table = symbols.iter_symbols() if isinstance(symbols, SymbolTableSection) else ()
        return Interface(glibc=glibc, defined=frozenset(s.name for s in table if s["st_shndx"] != "SHN_UNDEF"))


@contextmanager
def _opened(path: Path) -> Iterator[ELFFile]:
    """Whatever is done with it: a damaged file is Corrupt."""
    with os_errors_as(NotFound, f"{path} cannot be read"):
        file = path.open("rb")
    with file:
        try:
            yield ELFFile(file)
        except _DAMAGED as error:
            raise Corrupt(f"{path} is no shared object that can be read: {error}") from error


class CacheEntry(Struct, frozen=True, kw_only=True):
    """`name` is a soname (or a file name, where a library has none), `path` absolute on the host."""

    name: str
    path: str
    hwcap: int


def read_loader_cache(path: Path) -> tuple[CacheEntry, ...] | None:
    """The entries in the cache's order, which is the loader's preference; None if there is no cache.

    Raises:
        Corrupt: the file cannot be read, or is no such cache.
    """
    with os_errors_as(Corrupt, f"the loader's cache {path} cannot be read"):
        try:
            content = read_regular(path, MAX_BYTES, follow=True)
        # Images and hosts with musl have none: not an error.
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        return parse_loader_cache(content)
    except Corrupt as error:
        raise Corrupt(f"the loader's cache {path} cannot be used: {error}; run ldconfig on the host") from error


def parse_loader_cache(content: bytes) -> tuple[CacheEntry, ...]:
    """Raises Corrupt: it is no cache, cut short, or leads outside itself."""
    start = content.find(_MAGIC) if content.startswith(_OLD_MAGIC) else 0
    if start < 0 or not content.startswith(_MAGIC, start):
        raise Corrupt("it begins like none of the known forms")
    content = content[start:]
    if len(content) < _HEADER.size:
        raise Corrupt("it ends within its header")
    _, count, _, flags = _HEADER.unpack_from(content)
    if flags & _BIG_ENDIAN_FLAG == _BIG_ENDIAN_FLAG:
        raise Corrupt("it is of a big-endian machine")
    table_end = _HEADER.size + count * _ENTRY.size
    # Before anything is made of it: the count is the file's own word.
    if table_end > len(content):
        raise Corrupt(f"it says {count} entries, for which it is too short")
    return tuple(
        CacheEntry(name=_string(content, key), path=_string(content, value), hwcap=hwcap)
        for _, key, value, _, hwcap in _ENTRY.iter_unpack(content[_HEADER.size : table_end])
    )


def _string(content: bytes, start: int) -> str:
    end = content.find(b"\0", start, start + _MAX_STRING_BYTES) if start < len(content) else -1
    if end < 0:
        raise Corrupt(f"a string at byte {start} has no end")
    return os.fsdecode(content[start:end])
