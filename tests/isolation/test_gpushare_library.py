"""libgpushare on the host: what is installed, put back and refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_PATH
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.library import MARK, Library
from gpushare_agent.core.model.errors import StartupError, Unavailable
from tests.isolation.support_gpushare import KEY, World
from tests.isolation.support_library import fake_library


@pytest.fixture
def library(short_dir: Path) -> Library:
    return Library(fake_library(short_dir / "libgpushare.so"), short_dir / "own")


@pytest.fixture
def files(short_dir: Path) -> GpushareFiles:
    return World(short_dir).files


def test_a_new_library_takes_the_name_and_leaves_the_old_file_to_those_who_have_it(library: Library) -> None:
    """A container's mount is of the file, as is an open descriptor. The same content is not copied again."""
    library.install()
    installed = library.directory / "libgpushare.so"
    assert stat.S_IMODE(installed.stat().st_mode) == 0o644
    first, before = installed.stat().st_ino, installed.read_bytes()
    library.install()
    assert installed.stat().st_ino == first
    with installed.open("rb") as old:
        library.source.write_bytes(before + b"newer")
        library.install()
        assert old.read() == before
    assert installed.read_bytes() == before + b"newer"


def test_the_preload_file_is_replaced_in_one_step(library: Library) -> None:
    """A reader has the old file or the new one; the same content is not written again."""
    library.install()
    preload = library.directory / "ld.so.preload"
    first = preload.stat().st_ino
    library.install()
    assert preload.stat().st_ino == first
    preload.write_text("/somewhere/else.so\n")
    with preload.open() as old:
        library.install()
        assert old.read() == "/somewhere/else.so\n"
    assert preload.read_text() == f"{LIBRARY_PATH}\n" and preload.stat().st_ino != first


def test_a_library_that_was_removed_is_put_back(files: GpushareFiles) -> None:
    """From the image, when the next container starts; if it is in its place, the image's is not read."""
    files.prepare(KEY)
    installed = files.library.directory / "libgpushare.so"
    content = installed.read_bytes()
    installed.unlink()
    files.prepare(KEY)
    assert installed.read_bytes() == content
    files.library.source.unlink()
    files.prepare(KEY)


def test_without_the_library_no_container_is_prepared(files: GpushareFiles) -> None:
    """The runtime would make a directory instead, and every later container would find that."""
    files.library.source.unlink()
    with pytest.raises(Unavailable, match=str(files.library.source)):
        files.prepare(KEY)
    files.library.source.mkdir()
    with pytest.raises(Unavailable, match="no regular file"):
        files.prepare(KEY)
    assert not files.containers.exists()


KINDS = {"other machine": "for EM_"} | dict.fromkeys(("directory", "text", "empty", "fifo", "truncated", "half"), ".")


@pytest.mark.parametrize(("kind", "says"), KINDS.items())
def test_what_the_loader_would_skip_is_a_start_up_error(short_dir: Path, kind: str, says: str) -> None:
    """With a line on stderr, and nothing would be limited. As one that is half copied."""
    path = short_dir / "libgpushare.so"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "other machine":
        fake_library(path, machine=183 if os.uname().machine == "x86_64" else 62)
    else:
        program = Path("/proc/self/exe").read_bytes()
        half = program[: len(program) // 2]
        path.write_bytes({"empty": b"", "text": b"#!/bin/sh\n", "truncated": half[:7], "half": half}[kind])
    with pytest.raises(StartupError, match=says) as error:
        Library(path, short_dir / "own").check()
    assert str(path) in str(error.value)


def test_a_link_to_the_library_is_as_good_as_the_library(short_dir: Path) -> None:
    """Operators keep versions next to each other."""
    fake_library(short_dir / "libgpushare.so.2")
    link = short_dir / "libgpushare.so"
    link.symlink_to("libgpushare.so.2")
    Library(link, short_dir / "own").check()


def test_a_directory_that_cannot_be_made_is_reported_with_its_path(short_dir: Path) -> None:
    """At the start as a start-up error, later as something to try again, by the setting that has it."""
    (short_dir / "file").write_text("")
    library = Library(fake_library(short_dir / "libgpushare.so"), short_dir / "file/own")
    with pytest.raises(StartupError, match="file/own"):
        library.install()
    with pytest.raises(Unavailable, match=r"setting libgpushare\.directory"):
        GpushareFiles(library, short_dir / "vm").prepare(KEY)
    writable = Library(library.source, short_dir / "own")
    with pytest.raises(Unavailable, match=r"setting virtual_manager\.path"):
        GpushareFiles(writable, short_dir / "file/vm").prepare(KEY)


def test_without_a_library_simulated_gpus_say_that_none_is_needed(short_dir: Path) -> None:
    """It is the first line of a sandbox; where the library is there, or is needed, nothing is said."""
    own = short_dir / "own"
    optional = Library(short_dir / "none.so", own, is_optional=True)
    assert optional.missing_note.endswith(f"simulated GPUs need none, and {short_dir}/none.so is not there")
    assert not Library(short_dir / "none.so", own).missing_note
    assert not Library(fake_library(short_dir / "a.so"), own, is_optional=True).missing_note


def test_another_library_is_refused_with_the_cure(short_dir: Path) -> None:
    other = fake_library(short_dir / "other.so")
    other.write_bytes(other.read_bytes().replace(MARK, b""))
    with pytest.raises(Unavailable, match=r"is not libgpushare's: it would limit nobody.*native\.build_gpushare"):
        Library(other, short_dir / "own").look()
    with pytest.raises(StartupError, match="isolation gpushare has no library"):
        Library(short_dir / "none.so", short_dir / "own").check()
