"""The dynamic loader's cache, as the real ldconfig writes it and as garbage."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpushare_agent.agent.delivery.elf import parse_loader_cache, read_loader_cache
from gpushare_agent.core.model.errors import Corrupt
from tests.isolation.support_driver import LIBRARY_DIRECTORY_32, FakeHost, has_m32

NEW = b"glibc-ld.so.cache1.1"


def new_cache(strings: bytes, *entries: tuple[int, int, int], flags: int = 2) -> bytes:
    """A cache of the new form; offsets of the entries count from the strings' start."""
    start = 48 + 24 * len(entries)
    rows = b"".join(struct.pack("<iIIIQ", 0x303, start + key, start + value, 0, hwcap) for key, value, hwcap in entries)
    return struct.pack("<20sIIB19x", NEW, len(entries), len(strings), flags) + rows + strings


def old_cache(strings: bytes, *entries: tuple[int, int]) -> bytes:
    rows = b"".join(struct.pack("<iII", 3, key, value) for key, value in entries)
    return struct.pack("<11sxI", b"ld.so-1.7.0", len(entries)) + rows + strings


@pytest.mark.parametrize("form", ["new", "compat"])
def test_every_form_that_ldconfig_writes_is_read(short_dir: Path, form: str) -> None:
    """The sonames lead to the paths of the host's root, in the new and the combined form."""
    host = FakeHost(short_dir)
    if has_m32():
        host.add_library("libcuda", directory=LIBRARY_DIRECTORY_32, m32=True)
    cache = host.ldconfig(form)
    assert cache.read_bytes().startswith(NEW if form == "new" else b"ld.so-1.7.0")
    entries = read_loader_cache(cache)
    assert entries is not None
    found = {(entry.name, entry.path) for entry in entries}
    for stem in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        assert (f"{stem}.so.1", f"/usr/lib/x86_64-linux-gnu/{stem}.so.1") in found
    if has_m32():
        assert ("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1") in found


def test_hardware_capabilities_are_reported(short_dir: Path) -> None:
    """A build that only some processors can run is recognised as such."""
    made = parse_loader_cache(new_cache(b"liba.so\0/a\0/b\0", (0, 8, 0), (0, 11, 1 << 62)))
    assert [(entry.name, entry.path, bool(entry.hwcap)) for entry in made] == [
        ("liba.so", "/a", False),
        ("liba.so", "/b", True),
    ]


def test_in_a_combined_cache_the_new_table_counts() -> None:
    """The old one is for programs of another age, and its strings are elsewhere."""
    old = old_cache(b"", (0, 0))
    combined = old + bytes(-len(old) % 8) + new_cache(b"liba.so\0/a\0", (0, 8, 0))
    assert [(entry.name, entry.path) for entry in parse_loader_cache(combined)] == [("liba.so", "/a")]


def test_a_missing_cache_is_none_and_no_error(short_dir: Path) -> None:
    """Some hosts have none."""
    assert read_loader_cache(short_dir / "ld.so.cache") is None
    assert read_loader_cache(short_dir / "no/ld.so.cache") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "known forms"),
        (b"\x7fELF", "known forms"),
        (NEW, "header"),
        (b"ld.so-1.7.0", "known forms"),
        (old_cache(b"a\0", (0, 0)), "known forms"),
        (new_cache(b"")[:20] + struct.pack("<I", 0xFFFFFFFF) + bytes(24), "entries"),
        (new_cache(b"liba.so", (0, 0, 0)), "no end"),
        (new_cache(b"liba.so\0", (0, 1 << 31, 0)), "no end"),
        (new_cache(b"x" * 5000 + b"\0", (0, 0, 0)), "no end"),
        (new_cache(b"", flags=3), "big-endian"),
    ],
)
def test_a_damaged_cache_is_corrupt_and_says_how(short_dir: Path, content: bytes, reason: str) -> None:
    """Nothing is read beyond the file, and the message names it."""
    path = short_dir / "ld.so.cache"
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=reason) as caught:
        read_loader_cache(path)
    assert str(path) in str(caught.value)


WHOLE = new_cache(b"liba.so\0/usr/lib/liba.so\0", (0, 8, 0), (0, 8, 1))


@given(
    st.sampled_from([b"", NEW, b"ld.so-1.7.0\0", WHOLE]),
    st.binary(max_size=400),
    st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 255)), max_size=4),
    st.integers(0, 500),
)
@example(NEW, b"\xff" * 300, [], 500)
def test_whatever_bytes_a_cache_has_it_is_read_or_corrupt(
    head: bytes, garbage: bytes, changed: list[tuple[int, int]], size: int
) -> None:
    """Bytes behind a right beginning, some of it changed, and cut short: nothing else is raised."""
    content = bytearray(head + garbage)
    for at, byte in changed:
        content[at : at + 1] = bytes([byte])
    with suppress(Corrupt):
        parse_loader_cache(bytes(content[:size]))
