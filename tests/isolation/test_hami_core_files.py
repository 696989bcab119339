"""What isolation hami-core keeps on the host, on real files."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.region_format import FILE_BYTES
from gpushare_agent.isolation.tenant_files import cut
from gpushare_agent.kit.directories import DIRECTORY, opened
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import Corrupt, Rejected, StartupError, Unavailable
from gpushare_agent.model.names import PodUid
from tests.isolation.support_hami_core import INSIDE, fake_library, region_file

UID = PodUid("11111111-2222-3333-4444-555555555555")
OTHER = PodUid("99999999-2222-3333-4444-555555555555")
KEY = ContainerKey(UID, "cuda")


@pytest.fixture
def files(short_dir: Path) -> HamiCoreFiles:
    return HamiCoreFiles(fake_library(short_dir / "libvgpu.so"), short_dir / "hami")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_preload_file_names_the_library_in_the_container(files: HamiCoreFiles) -> None:
    """One line, readable by all; containers of the directory are root's alone."""
    files.check_library()
    files.install()
    preload = files.directory / "ld.so.preload"
    assert preload.read_text() == f"{INSIDE}\n"
    assert (mode(preload), mode(files.directory / "containers")) == (0o644, 0o700)
    assert sorted(path.name for path in files.directory.iterdir()) == ["containers", "ld.so.preload", "libvgpu.so"]


def test_a_new_library_takes_the_name_and_leaves_the_old_file_to_those_who_have_it(files: HamiCoreFiles) -> None:
    """A container's mount is of the file, as is an open descriptor. The same content is not copied again."""
    files.install()
    installed = files.directory / "libvgpu.so"
    assert installed.read_bytes() == files.library.read_bytes() and mode(installed) == 0o644
    first = installed.stat().st_ino
    files.install()
    assert installed.stat().st_ino == first
    with installed.open("rb") as old:
        before = files.library.read_bytes()
        files.library.write_bytes(before + b"newer")
        files.install()
        assert old.read() == before
    assert installed.read_bytes() == before + b"newer"


def test_the_preload_file_is_replaced_in_one_step(files: HamiCoreFiles) -> None:
    """A reader has the old file or the new one; the same content is not written again."""
    files.install()
    preload = files.directory / "ld.so.preload"
    first = preload.stat().st_ino
    files.install()
    assert preload.stat().st_ino == first
    preload.write_text("/somewhere/else.so\n")
    with preload.open() as old:
        files.install()
        assert old.read() == "/somewhere/else.so\n"
    assert preload.read_text() == f"{INSIDE}\n" and preload.stat().st_ino != first


def test_a_container_gets_an_empty_file_that_any_user_may_write(files: HamiCoreFiles) -> None:
    """Whatever the umask; no directory on the way has a sticky bit, behind which a second user would be refused."""
    before = os.umask(0o077)
    try:
        files.prepare(KEY)
    finally:
        os.umask(before)
    cache = files.cache_file(KEY)
    assert cache == files.directory / f"containers/{UID}/cuda/cuda.cache"
    assert (cache.stat().st_size, mode(cache)) == (0, 0o666)
    assert not any(mode(parent) & stat.S_ISVTX for parent in cache.parents[:4])
    assert mode(files.directory / "containers") == 0o700


def test_a_restarted_container_gets_a_new_file(files: HamiCoreFiles) -> None:
    """The library would count the processes of the earlier life; the old file is not written to, for it may be mapped."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    cache.write_bytes(b"x" * 4096)
    with cache.open("rb") as old:
        files.prepare(KEY)
        assert os.fstat(old.fileno()).st_size == 4096
    assert cache.stat().st_size == 0 and mode(cache) == 0o666


@pytest.mark.parametrize("place", ["containers", f"containers/{UID}", f"containers/{UID}/cuda", "cache"])
def test_a_link_on_the_way_is_replaced_and_not_followed(files: HamiCoreFiles, short_dir: Path, place: str) -> None:
    """What it leads to is as before."""
    outside = short_dir / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    files.prepare(KEY)
    link = files.cache_file(KEY) if place == "cache" else files.directory / place
    shutil.rmtree(files.directory / "containers")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with capture_logs():
        files.prepare(KEY)
    assert not link.is_symlink() and files.cache_file(KEY).is_file()
    assert sorted(path.name for path in outside.iterdir()) == ["kept"]


def remove_all_aside(files: HamiCoreFiles) -> None:
    for name in files.list_aside():
        files.remove_aside(name)


def test_what_a_container_has_written_is_renamed_and_removed_later(files: HamiCoreFiles) -> None:
    """The kernel frees a file of many pieces for half a minute: neither a start nor the end of a pod removes one."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    inodes = [cache.stat().st_ino]
    files.prepare(KEY)
    inodes.append(cache.stat().st_ino)
    files.keep_started(KEY, "a" * 64)
    files.keep_started(KEY, "b" * 64)
    inodes.append(cache.stat().st_ino)
    files.remove_pod(UID)
    aside = files.directory / "containers/removed"
    assert mode(aside) == 0o700 and not (files.directory / "containers" / UID).exists()
    assert set(inodes) <= {path.stat().st_ino for path in aside.rglob("*")}
    remove_all_aside(files)
    assert list(aside.iterdir()) == [] and files.list_aside() == ()
    files.remove_aside("gone already")


def test_a_start_renames_no_file_that_a_tenant_has(files: HamiCoreFiles) -> None:
    """The kernel would wait for whoever writes to it or shortens it: its directory is renamed, and the file stays there."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    inode = cache.stat().st_ino
    with opened(cache.parent, None, DIRECTORY) as before:
        files.prepare(KEY)
        assert os.lstat(cache.name, dir_fd=before).st_ino == inode
    assert cache.stat().st_ino != inode


def test_a_file_that_is_too_large_is_kept_once_it_is_cut(files: HamiCoreFiles) -> None:
    """A link to it would wait until the kernel has shortened it."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    os.truncate(cache, FILE_BYTES + 1)
    with pytest.raises(Unavailable, match="once it is shortened"):
        files.keep_started(KEY, "a" * 64)
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
    files.cut(KEY)
    files.keep_started(KEY, "a" * 64)
    assert cache.stat().st_size == 0 and cache.with_name(f"{cache.name}.{'a' * 64}").stat().st_size == FILE_BYTES


def test_a_file_larger_than_a_region_is_cut_to_one(files: HamiCoreFiles) -> None:
    """What is mapped stays; the largest is named first. A file without its length, or beyond what it says, has no region."""
    other = ContainerKey(OTHER, "cuda")
    region = region_file(slots=((41, 4141, 7),))
    for key, more in ((KEY, 1 << 20), (other, 2 << 20)):
        files.prepare(key)
        files.cache_file(key).write_bytes(region + bytes(more))
        with pytest.raises(Corrupt), files.opened_region(key):
            pass
    found = files.oversized([KEY, other, ContainerKey(PodUid("never-prepared"), "cuda")])
    assert [key for key, _ in found] == [other, KEY] and found[0][1] >= len(region) + (2 << 20)
    for key, _ in found:
        files.cut(key)
        assert files.cache_file(key).read_bytes() == region
        with files.opened_region(key) as opened:
            assert opened is not None and opened.head() is not None
    assert files.oversized([KEY, other]) == []


def test_blocks_beyond_a_files_length_are_cut_too(files: HamiCoreFiles) -> None:
    """fallocate takes them without a change of the length; and the length is the new one while a file is being cut."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    cache.write_bytes(region_file())
    if shutil.which("fallocate") is None:
        pytest.skip("no fallocate(1)")
    done = subprocess.run(
        ["fallocate", "-n", "-o", "0", "-l", str(32 << 20), str(cache)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this file system cannot: {done.stderr.decode()}")
    assert cache.stat().st_size == FILE_BYTES and cache.stat().st_blocks * 512 > 16 << 20
    assert [key for key, _ in files.oversized([KEY])] == [KEY]
    with pytest.raises(Corrupt), files.opened_region(KEY):
        pass
    files.cut(KEY)
    assert cache.stat().st_blocks * 512 < 8 << 20 and files.oversized([KEY]) == []


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


def test_a_tenant_with_a_lease_on_its_file_does_not_keep_it_large(files: HamiCoreFiles) -> None:
    """Root in a container owns the file, and may lease it: the kernel then refuses whoever opens it without waiting. It
    takes the lease again as soon as it is asked for it."""
    files.prepare(KEY)
    cache = files.cache_file(KEY)
    cache.write_bytes(region_file() + bytes(1 << 20))
    with subprocess.Popen([sys.executable, "-c", LEASING, str(cache)], stdout=subprocess.PIPE, text=True) as tenant:
        try:
            assert tenant.stdout is not None and tenant.stdout.readline() == "taken\n"
            with pytest.raises(Unavailable), files.opened_region(KEY):
                pass
            files.cut(KEY)
        finally:
            tenant.kill()
    assert files.oversized([KEY]) == [] and cache.read_bytes() == region_file()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("/etc/hostname")], ids=["pipe", "link"])
def test_what_is_no_regular_file_is_not_waited_for_nor_cut(
    files: HamiCoreFiles, make: Callable[[Path], None], short_dir: Path
) -> None:
    make(short_dir / "usage")
    with opened(short_dir, None, DIRECTORY) as directory, pytest.raises(Corrupt, match="no regular file"):
        cut("usage", directory, FILE_BYTES)


def test_removing_a_pod_takes_everything_and_leaves_the_others(files: HamiCoreFiles, short_dir: Path) -> None:
    """A planted link is removed, not what it leads to."""
    kept = short_dir / "kept"
    kept.write_text("kept")
    for key in (KEY, ContainerKey(UID, "second"), ContainerKey(OTHER, "cuda")):
        files.prepare(key)
    (files.cache_file(KEY).parent / "planted").symlink_to(kept)
    assert files.list_pods() == (UID, OTHER)
    assert files.remove_pod(UID) is True
    assert files.list_pods() == (OTHER,)
    assert files.remove_pod(UID) is False
    remove_all_aside(files)
    assert files.list_aside() == () and kept.read_text() == "kept"


def test_before_anything_was_made_there_is_nothing_to_list_or_remove(files: HamiCoreFiles) -> None:
    """And looking makes nothing."""
    assert files.list_pods() == () and files.remove_pod(UID) is False
    assert files.list_aside() == () and files.oversized([KEY]) == []
    assert not files.directory.exists()


@pytest.mark.parametrize(
    ("uid", "name"), [("..", "cuda"), ("a/b", "cuda"), (UID, ".."), (UID, "a/b"), (UID, "A"), (UID, ""), ("", "cuda")]
)
def test_no_path_is_made_of_a_name_that_kubernetes_would_not_admit(files: HamiCoreFiles, uid: str, name: str) -> None:
    """Neither made nor removed."""
    key = ContainerKey(PodUid(uid), name)
    with pytest.raises(Rejected):
        files.prepare(key)
    with pytest.raises(Rejected):
        files.cache_file(key)
    if uid != UID:
        with pytest.raises(Rejected):
            files.remove_pod(PodUid(uid))
    assert not files.directory.exists()


def test_a_library_that_is_missing_is_a_start_up_error_with_path_and_cure(short_dir: Path) -> None:
    """It is known before a pod comes."""
    missing = short_dir / "no/libvgpu.so"
    with pytest.raises(StartupError) as error:
        HamiCoreFiles(missing, short_dir / "hami").check_library()
    assert str(missing) in str(error.value) and "--hami-core.library" in str(error.value)
    assert "No such file" in str(error.value)


@pytest.mark.parametrize("kind", ["directory", "text", "empty", "fifo", "truncated"])
def test_what_is_no_elf_file_is_a_start_up_error(short_dir: Path, kind: str) -> None:
    """The dynamic loader would skip it with a line on stderr, and nothing would be limited."""
    path = short_dir / "libvgpu.so"
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "truncated":
            path.write_bytes(b"\x7fELF\x02\x01\x01")
        case _:
            path.write_text("" if kind == "empty" else "#!/bin/sh\n")
    with pytest.raises(StartupError, match=str(path)):
        HamiCoreFiles(path, short_dir / "hami").check_library()


def test_a_library_for_another_machine_is_a_start_up_error(short_dir: Path) -> None:
    """So is one of 32 bits on a node of 64."""
    other = 183 if os.uname().machine == "x86_64" else 62
    path = fake_library(short_dir / "libvgpu.so", machine=other)
    with pytest.raises(StartupError, match="for EM_") as error:
        HamiCoreFiles(path, short_dir / "hami").check_library()
    assert str(path) in str(error.value)


def test_a_link_to_the_library_is_as_good_as_the_library(short_dir: Path) -> None:
    """Operators keep versions beside each other."""
    fake_library(short_dir / "libvgpu.so.2")
    link = short_dir / "libvgpu.so"
    link.symlink_to("libvgpu.so.2")
    HamiCoreFiles(link, short_dir / "hami").check_library()


def test_a_library_that_was_removed_is_put_back(files: HamiCoreFiles) -> None:
    """From the image, when the next container starts; where it is in its place the image's is not read."""
    files.prepare(KEY)
    installed = files.directory / "libvgpu.so"
    content = installed.read_bytes()
    installed.unlink()
    files.prepare(KEY)
    assert installed.read_bytes() == content
    files.library.unlink()
    files.prepare(KEY)


def test_without_the_library_no_container_is_prepared(files: HamiCoreFiles) -> None:
    """The runtime would make a directory in its place, and every later container would find that."""
    files.library.unlink()
    with pytest.raises(Unavailable, match=str(files.library)):
        files.prepare(KEY)
    files.library.mkdir()
    with pytest.raises(Unavailable, match="no regular file"):
        files.prepare(KEY)


def test_a_directory_that_cannot_be_made_is_reported_with_its_path(short_dir: Path) -> None:
    """At the start as a start-up error, later as something to try again."""
    (short_dir / "file").write_text("")
    files = HamiCoreFiles(fake_library(short_dir / "libvgpu.so"), short_dir / "file/hami")
    with pytest.raises(StartupError, match="file/hami"):
        files.install()
    with pytest.raises(Unavailable, match=r"hami_core\.directory"):
        files.prepare(KEY)


def test_the_fake_library_has_this_machines_elf_header() -> None:
    """Else the tests above would fail for another reason."""
    header = Path(sys.executable).resolve().read_bytes()[:20]
    assert struct.unpack("<H", header[18:20])[0] in (62, 183)
