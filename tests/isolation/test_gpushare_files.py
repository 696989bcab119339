"""libgpushare and each container's `usage` on the host, on real files: what is put back, replaced, refused and shortened."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.gpushare import files as files_module
from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_PATH
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import (
    USAGE_BYTES,
    USAGE_NAME,
    GpuLimits,
    encode_usage,
    usage_head_bytes,
)
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, Rejected, StartupError, Unavailable
from gpushare_agent.core.model.names import PodUid
from tests.isolation.support_library import fake_library
from tests.isolation.support_tenant import open_usages

UID = PodUid("11111111-2222-3333-4444-555555555555")
KEY = ContainerKey(UID, "cuda")
OTHER = ContainerKey(PodUid("99999999-2222-3333-4444-555555555555"), "cuda")


@pytest.fixture
def library(short_dir: Path) -> Library:
    return Library(fake_library(short_dir / "libgpushare.so"), short_dir / "own")


@pytest.fixture
def files(library: Library, short_dir: Path) -> GpushareFiles:
    return GpushareFiles(library, short_dir / "vm", lambda _: [GpuLimits(uuid="GPU-0", memory_bytes=1 << 30)])


def usage_of(files: GpushareFiles, key: ContainerKey = KEY) -> Path:
    return files.container_directory(key) / USAGE_NAME


# ---- `usage` that is read all the time ----


def test_the_file_of_a_share_stays_open_until_it_has_another_one(files: GpushareFiles) -> None:
    files.prepare(KEY)
    usage = usage_of(files)
    assert files.usage_head(KEY, 1) == encode_usage()[: usage_head_bytes(1)]
    with usage.open("r+b") as written:
        written.write(b"paid")
    assert files.usage_head(KEY, 1)[:4] == b"paid"
    assert open_usages(files.containers) == [str(usage)]
    files.prepare(KEY)
    assert files.usage_head(KEY, 1)[:4] == encode_usage()[:4]
    assert open_usages(files.containers) == [str(usage)]
    files.release((), ())
    assert open_usages(files.containers) == []


def test_a_file_that_cannot_be_read_any_more_is_opened_again(files: GpushareFiles) -> None:
    files.prepare(KEY)
    files.usage_head(KEY, 1)
    usage = usage_of(files)
    usage.unlink()
    with pytest.raises(Corrupt):
        files.usage_head(KEY, 1)
    usage.write_bytes(encode_usage())
    for size in (USAGE_BYTES - 1, USAGE_BYTES + 1):
        assert files.usage_head(KEY, 1)
        os.truncate(usage, size)
        with pytest.raises(Corrupt):
            files.usage_head(KEY, 1)
        os.truncate(usage, USAGE_BYTES)
    assert files.usage_head(KEY, 1)
    assert open_usages(files.containers) == [str(usage)]


def test_only_so_many_files_stay_open_and_none_when_nobody_reads_them_any_more(
    library: Library, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_MOST_OPEN", 1)
    files = GpushareFiles(library, short_dir / "vm", lambda _: [GpuLimits(uuid="GPU-0", memory_bytes=1 << 30)])
    for key in (KEY, OTHER):
        files.prepare(key)
        assert files.usage_head(key, 1)
    assert open_usages(files.containers) == [str(usage_of(files))]
    del files
    assert open_usages(short_dir) == []


# ---- the library ----


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


@pytest.mark.parametrize("kind", ["directory", "text", "empty", "fifo", "truncated"])
def test_what_is_no_elf_file_is_a_start_up_error(short_dir: Path, kind: str) -> None:
    """The dynamic loader would skip it with a line on stderr, and nothing would be limited."""
    path = short_dir / "libgpushare.so"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes({"empty": b"", "text": b"#!/bin/sh\n", "truncated": b"\x7fELF\x02\x01\x01"}[kind])
    with pytest.raises(StartupError, match=str(path)):
        Library(path, short_dir / "own").check()


def test_a_library_for_another_machine_is_a_start_up_error(short_dir: Path) -> None:
    other = 183 if os.uname().machine == "x86_64" else 62
    path = fake_library(short_dir / "libgpushare.so", machine=other)
    with pytest.raises(StartupError, match="for EM_") as error:
        Library(path, short_dir / "own").check()
    assert str(path) in str(error.value)


def test_a_link_to_the_library_is_as_good_as_the_library(short_dir: Path) -> None:
    """Operators keep versions next to each other."""
    fake_library(short_dir / "libgpushare.so.2")
    link = short_dir / "libgpushare.so"
    link.symlink_to("libgpushare.so.2")
    Library(link, short_dir / "own").check()


def test_a_directory_that_cannot_be_made_is_reported_with_its_path(short_dir: Path) -> None:
    """At the start as a start-up error, later as something to try again."""
    (short_dir / "file").write_text("")
    library = Library(fake_library(short_dir / "libgpushare.so"), short_dir / "file/own")
    with pytest.raises(StartupError, match="file/own"):
        library.install()
    with pytest.raises(Unavailable, match=r"setting libgpushare\.directory"):
        GpushareFiles(library, short_dir / "vm").prepare(KEY)


# ---- a container's files ----


def test_any_user_may_write_the_use_whatever_the_umask(files: GpushareFiles) -> None:
    """No directory on the way has a sticky bit, behind which a second user would be refused."""
    before = os.umask(0o077)
    try:
        files.prepare(KEY)
    finally:
        os.umask(before)
    usage = usage_of(files)
    assert stat.S_IMODE(usage.stat().st_mode) == 0o666
    assert not any(parent.stat().st_mode & stat.S_ISVTX for parent in usage.parents[:3])


@pytest.mark.parametrize("place", [UID, f"{UID}/cuda", f"{UID}/cuda/{USAGE_NAME}"])
def test_a_link_on_the_way_is_replaced_and_not_followed(files: GpushareFiles, short_dir: Path, place: str) -> None:
    """What it leads to is as before."""
    outside = short_dir / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    link = files.containers / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with capture_logs():
        files.prepare(KEY)
    assert not link.is_symlink() and usage_of(files).is_file()
    assert sorted(path.name for path in outside.iterdir()) == ["kept"]


@pytest.mark.parametrize(
    ("uid", "name"), [("..", "cuda"), ("a/b", "cuda"), (UID, ".."), (UID, "a/b"), (UID, "A"), (UID, ""), ("", "cuda")]
)
def test_no_path_is_made_of_a_name_that_kubernetes_would_not_admit(files: GpushareFiles, uid: str, name: str) -> None:
    key = ContainerKey(PodUid(uid), name)
    for attempt in (files.prepare, partial(files.usage_head, gpus=1), files.cut, files.container_directory):
        with pytest.raises(Rejected):
            attempt(key)
    assert files.oversized([key]) == [] and not files.containers.exists()


def test_before_anything_was_made_there_is_nothing_to_list(files: GpushareFiles) -> None:
    """And looking makes nothing."""
    assert files.list_pods() == () and files.oversized([KEY]) == []
    assert not files.containers.exists() and not files.library.directory.exists()


# ---- files that a tenant made large ----


def test_a_file_larger_than_the_library_makes_it_is_cut(files: GpushareFiles) -> None:
    """What is mapped stays; the largest is named first."""
    for key, more in ((KEY, 1 << 20), (OTHER, 2 << 20)):
        files.prepare(key)
        os.truncate(usage_of(files, key), USAGE_BYTES + more)
    found = files.oversized([KEY, OTHER, ContainerKey(PodUid("never-prepared"), "cuda")])
    assert [key for key, _ in found] == [OTHER, KEY] and found[0][1] >= USAGE_BYTES + (2 << 20)
    for key, _ in found:
        files.cut(key)
        assert usage_of(files, key).read_bytes() == encode_usage()
    assert files.oversized([KEY, OTHER]) == []


def test_blocks_beyond_a_files_length_are_cut_too(files: GpushareFiles) -> None:
    """fallocate takes them without a change of the length; and the length is the new one while a file is being cut."""
    files.prepare(KEY)
    usage = usage_of(files)
    if shutil.which("fallocate") is None:
        pytest.skip("no fallocate(1)")
    command = ["fallocate", "-n", "-o", "0", "-l", str(32 << 20), str(usage)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this file system cannot: {done.stderr.decode()}")
    assert usage.stat().st_size == USAGE_BYTES and usage.stat().st_blocks * 512 > 16 << 20
    assert [key for key, _ in files.oversized([KEY])] == [KEY]
    files.cut(KEY)
    assert usage.stat().st_blocks * 512 < 8 << 20 and files.oversized([KEY]) == []


LEASING = """
import fcntl, os, signal, sys

def take(*_):
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as e:
        print(e, flush=True)

file = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, take)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("taken", flush=True)
while True:
    signal.pause()
"""


def test_a_tenant_with_a_lease_on_its_file_does_not_keep_it_large(files: GpushareFiles) -> None:
    """Root in a container owns the file, and may lease it: the kernel then refuses whoever opens it without waiting. It
    takes the lease again as soon as it is asked for it."""
    files.prepare(KEY)
    usage = usage_of(files)
    os.truncate(usage, USAGE_BYTES + (1 << 20))
    with subprocess.Popen([sys.executable, "-c", LEASING, str(usage)], stdout=subprocess.PIPE, text=True) as tenant:
        try:
            assert tenant.stdout is not None and tenant.stdout.readline() == "taken\n"
            with pytest.raises(Unavailable):
                files.usage_head(KEY, 1)
            files.cut(KEY)
        finally:
            tenant.kill()
    assert files.oversized([KEY]) == [] and usage.read_bytes() == encode_usage()


def test_a_file_that_another_container_of_the_pod_has_open_is_shortened_until_it_lets_go(files: GpushareFiles) -> None:
    """It got the descriptor by a socket: without a name the file could grow unseen until the disk is full."""
    files.prepare(KEY)
    vdevice = VDeviceFiles(files.containers)
    with usage_of(files).open("r+b") as passed_on:
        files.prepare(KEY)
        (aside,) = vdevice.list_aside()
        for _ in range(2):
            os.truncate(passed_on.fileno(), 1 << 30)
            vdevice.remove_aside(aside)
            assert os.fstat(passed_on.fileno()).st_size == USAGE_BYTES and vdevice.list_aside() == (aside,)
    vdevice.remove_aside(aside)
    assert vdevice.list_aside() == () and usage_of(files).is_file()


def test_a_tenant_that_opens_its_file_while_it_is_looked_at_ends_no_agent(
    files: GpushareFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of its place does not count as open. By SIGIO the kernel would end the agent, which handles none."""
    files.prepare(KEY)
    vdevice, place = VDeviceFiles(files.containers), os.open(usage_of(files), os.O_PATH)
    files.prepare(KEY)
    signals: list[int] = []
    former = signal.signal(signal.SIGIO, lambda number, _: signals.append(number))
    original, refused = fcntl.fcntl, []

    def control(file: int, command: int, argument: int) -> int:
        result: int = original(file, command, argument)
        if command == fcntl.F_SETLEASE:
            try:
                os.close(os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK))
            except BlockingIOError as e:
                refused.append(e)
        return result

    monkeypatch.setattr(fcntl, "fcntl", control)
    try:
        (aside,) = vdevice.list_aside()
        vdevice.remove_aside(aside)
    finally:
        signal.signal(signal.SIGIO, former)
        os.close(place)
    assert refused and not signals and vdevice.list_aside() == ()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("/etc/hostname")], ids=["pipe", "link"])
def test_what_is_no_regular_file_is_not_waited_for_nor_cut(files: GpushareFiles, make: Callable[[Path], None]) -> None:
    files.prepare(KEY)
    usage_of(files).unlink()
    make(usage_of(files))
    with pytest.raises(Corrupt, match="no regular file"):
        files.cut(KEY)
    assert files.oversized([KEY]) == []
