"""Each container's files under isolation gpushare: made, resized, replaced, and whatever their tenant makes of them."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.gpushare import files as files_module
from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_PATH
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MOST_GPUS,
    USAGE_BYTES,
    USAGE_NAME,
    GpuLimits,
    Observed,
    encode_config,
    encode_usage,
    read_paid,
    usage_head_bytes,
)
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import MIB, GpuUuid, PodUid
from tests.isolation.support_gpushare import GPUS, KEY, LIMITS, OTHER, UID, UUID, World
from tests.isolation.support_tenant import open_usages
from tests.isolation.support_vdevice import plant
from tests.settings.support_settings import clean_environment
from tests.support_process import output_of


@pytest.fixture
def world(short_dir: Path) -> World:
    """Its container is prepared."""
    made = World(short_dir)
    made.files.prepare(KEY)
    return made


@pytest.fixture
def files(short_dir: Path) -> GpushareFiles:
    """Of containers that are not."""
    return World(short_dir).files


def launches(files: GpushareFiles) -> int:
    return sum(one.launches for one in read_paid(files.usage_head(KEY, MOST_GPUS)))


def test_a_prepared_container_finds_its_limits_and_an_empty_region_that_any_user_may_write(short_dir: Path) -> None:
    """Whatever the umask; no directory on the way has a sticky bit, behind which a second user would be refused."""
    world, before = World(short_dir), os.umask(0o077)
    try:
        world.files.prepare(KEY)
    finally:
        os.umask(before)
    assert world.config() == encode_config(UID, "cuda", [LIMITS], world.files.boot_id)
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.path.iterdir()}
    assert modes == {CONFIG_NAME: 0o644, USAGE_NAME: 0o666}
    assert not any(parent.stat().st_mode & stat.S_ISVTX for parent in world.usage().parents[:3])
    assert world.usage().stat().st_size == USAGE_BYTES
    assert (launches(world.files), world.files.held_bytes(KEY)) == (0, {UUID: 0})
    installed = world.library.directory
    assert (installed / "ld.so.preload").read_text() == f"{LIBRARY_PATH}\n"
    assert (installed / "libgpushare.so").read_bytes() == world.library.source.read_bytes()


IN_A_USER_NAMESPACE = """
import ctypes, os, sys
directory = os.open(sys.argv[1], os.O_PATH)  # mounted: what is above it is not asked
(told, tell), (mapped, go) = os.pipe(), os.pipe()
if not (child := os.fork()):
    failed = ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
    os.write(tell, b"x")
    if os.read(mapped, 1) and failed:
        os._exit(77)
    os.setgroups([]), os.setgid(0), os.setuid(0)
    for name, flags in (("gpushare.config", os.O_RDONLY), ("gpushare.config", os.O_RDWR), ("usage", os.O_RDWR)):
        try:
            os.open(name, flags, dir_fd=directory)
            print(name, flags)
        except PermissionError:
            pass
    sys.stdout.flush(), os._exit(0)
os.read(told, 1)
try:
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as mapping:  # else an error of the write is lost
            mapping.write("0 100000 65536")
except PermissionError:
    os.kill(child, 9), sys.exit(77)
os.write(go, b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Root of a pod with `hostUsers: false`, who is nobody on the host; 77 where no such namespace can be made."""


def test_root_of_a_user_namespace_reads_its_limits_and_writes_its_use_alone(world: World) -> None:
    """As in a pod with `hostUsers: false`, whose mounts of a device plugin no runtime maps."""
    command = [sys.executable, "-c", IN_A_USER_NAMESPACE, world.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("no user namespace with other users can be made here")
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [f"{CONFIG_NAME} {os.O_RDONLY}", f"{USAGE_NAME} {os.O_RDWR}"],
    )


def test_a_container_that_starts_again_finds_new_files_and_a_claims_the_same(world: World) -> None:
    world.launch(7)
    first = (world.path / CONFIG_NAME).stat().st_ino
    world.is_claims, world.limits = True, replace(LIMITS, cores=5000)
    world.files.prepare(KEY)
    assert (launches(world.files), (world.path / CONFIG_NAME).stat().st_ino) == (7, first)
    assert struct.unpack_from("I", world.config(), 512 + 64) == (5000,)
    os.utime(world.path / CONFIG_NAME, (1, 1))  # the clock was set since
    world.files.prepare(KEY)
    assert launches(world.files) == 7
    world.files.boot_id = "7e57ab1e-0000-4000-8000-000000000000"
    world.files.prepare(KEY)
    assert launches(world.files) == 0
    world.launch(7)
    world.is_claims = False
    world.files.prepare(KEY)
    assert launches(world.files) == 0


def test_a_claims_files_without_a_boot_are_of_this_one_by_their_time(world: World) -> None:
    """An agent that did not write it made them: containers that started before an upgrade go on."""
    world.is_claims = True
    for changed_at, kept in ((None, 7), (1, 0)):
        world.launch(7)
        with (world.path / CONFIG_NAME).open("r+b") as file:
            file.seek(16)
            file.write(bytes(len(world.files.boot_id)))
        if changed_at is not None:
            os.utime(world.path / CONFIG_NAME, (changed_at, changed_at))
        world.files.prepare(KEY)
        assert launches(world.files) == kept


def test_a_container_whose_limits_are_not_known_is_not_prepared(world: World) -> None:
    world.limits = None
    with pytest.raises(Unavailable, match="not in the inventory"):
        world.files.prepare(KEY)


def test_a_resize_is_written_into_the_file_that_programs_have_mapped(world: World) -> None:
    before = (world.path / CONFIG_NAME).stat().st_ino
    world.files.write_limits(KEY, [replace(LIMITS, memory_bytes=1024 * MIB, cores=5000)])
    flags, memory, cores = struct.unpack_from("=I48xQI", world.config(), 512 + 4)
    assert (flags, memory, cores, (world.path / CONFIG_NAME).stat().st_ino) == (3, 1024 * MIB, 5000, before)
    assert struct.unpack_from("I", world.config(), 512)[0] % 2 == 0


def test_threads_that_write_at_once_leave_the_sequence_even(world: World) -> None:
    """A resize and a round of usage: each write counts two, and none is lost."""
    [before] = struct.unpack_from("I", world.config(), 512)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for written in [pool.submit(world.files.write_limits, KEY, [LIMITS]) for _ in range(2000)]:
                written.result()
    finally:
        sys.setswitchinterval(interval)
    assert struct.unpack_from("I", world.config(), 512)[0] == before + 4000


def test_each_gpu_of_a_container_is_written_by_its_uuid(world: World) -> None:
    """In any order; what was prepared for other GPUs is not touched."""
    second = GpuLimits(uuid=GPUS[1].uuid, memory_bytes=1024 * MIB)
    files = GpushareFiles(world.library, world.files.containers, lambda _: [LIMITS, second])
    files.prepare(KEY)
    files.write_limits(KEY, [replace(second, memory_bytes=512 * MIB)])
    files.write_observed(KEY, {GpuUuid(second.uuid): Observed(at_ns=1, used_bytes=7), UUID: Observed()})
    assert [struct.unpack_from("Q", world.config(), 512 + 128 * n + 56)[0] // MIB for n in (0, 1)] == [2048, 512]
    assert [struct.unpack_from("Q", world.config(), 512 + 128 * n + 80)[0] for n in (0, 1)] == [0, 7]
    assert files.held_bytes(KEY) == {LIMITS.uuid: 0, second.uuid: 0}
    before = world.config()
    with pytest.raises(NotFound, match="prepared for other GPUs"):
        files.write_limits(KEY, [LIMITS, GpuLimits(uuid="GPU-9")])
    assert world.config() == before
    for gpu in (0, 1):
        world.write_usage(gpu=gpu, launches=5)
    assert launches(files) == 10


SIZES = {"short": 100, "long": 1 << 30}


@pytest.mark.parametrize(
    "attack",
    [
        *(*SIZES, "link", "fifo", "directory"),
        pytest.param("device", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_what_a_tenant_makes_of_its_region_harms_nobody(world: World, attack: str) -> None:
    """The device has /dev/zero's numbers; it is what it is without the right to make one."""
    path = world.usage()
    if attack in SIZES:
        os.truncate(path, SIZES[attack])
    else:
        path.unlink()
        if attack == "device":
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        else:
            plant(attack, path, Path("/etc/hostname"))
    with pytest.raises(Corrupt):
        launches(world.files)
    with pytest.raises(Corrupt):
        world.files.held_bytes(KEY)
    world.files.write_limits(KEY, [LIMITS])
    if attack not in SIZES:  # nobody waits for it, and nobody cuts it
        assert world.files.oversized([KEY]) == []
        with pytest.raises(Corrupt, match="no regular file"):
            world.files.cut(KEY)


@pytest.mark.parametrize("attack", ["lease", "mode"])
def test_a_region_that_cannot_be_opened_is_tried_again(world: World, attack: str) -> None:
    """A lease to write would keep an open waiting for 45 s; without permissions it is refused where the agent has no
    capability, as in its DaemonSet. Limits are written all the same, and the next start has a file of its own."""
    path = world.usage()
    with path.open("r+b") as file:
        if attack == "lease":
            signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel tells the holder
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        else:
            path.chmod(0)
        began = time.monotonic()
        with without_capabilities(), pytest.raises(Unavailable, match="tried again"):
            launches(world.files)
        assert time.monotonic() - began < 10
        world.files.write_limits(KEY, [LIMITS])
        world.files.prepare(KEY)
        assert launches(world.files) == 0


@contextmanager
def without_capabilities() -> Iterator[None]:
    """Root as it is in the agent's DaemonSet."""
    header = struct.pack("Ii", 0x20080522, 0)
    before = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, before) == 0
    _, permitted, inheritable, _, *rest = struct.unpack("6I", before.raw)
    assert libc.capset(header, struct.pack("6I", 0, permitted, inheritable, 0, *rest)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before.raw) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_region_of_random_bytes_is_read_as_numbers(world: World, seed: int) -> None:
    """By all that the agent reads of it; it believes none of it."""
    world.usage().write_bytes(random.Random(seed).randbytes(USAGE_BYTES))
    assert launches(world.files) >= 0
    held = world.files.held_bytes(KEY)
    assert list(held) == [UUID] and held[UUID] >= 0


@pytest.mark.parametrize("size", [0, 100, CONFIG_BYTES - 1])
def test_a_config_that_was_cut_on_the_host_is_not_written_and_said_once(world: World, size: int) -> None:
    """A write behind its end would end the agent by a signal."""
    world.files.write_observed(KEY, {UUID: Observed(at_ns=1)})
    os.truncate(world.path / CONFIG_NAME, size)
    for write in (
        lambda: world.files.write_observed(KEY, {UUID: Observed(at_ns=2)}),
        lambda: world.files.write_limits(KEY, [LIMITS]),
    ):
        with pytest.raises(Corrupt, match=CONFIG_NAME):
            write()
    assert (world.path / CONFIG_NAME).stat().st_size == size
    world.files.prepare(KEY)
    world.files.write_observed(KEY, {UUID: Observed(at_ns=3)})
    assert struct.unpack_from("Q", world.config(), 512 + 72) == (3,)


def test_the_agent_makes_no_config_shorter_that_a_program_may_have_mapped(world: World) -> None:
    """To read behind a file's end would end the program by a signal."""
    with (world.path / CONFIG_NAME).open("rb") as mapped:
        world.files.write_limits(KEY, [LIMITS])
        world.files.write_observed(KEY, {UUID: Observed(at_ns=1)})
        world.files.prepare(KEY)
        world.files.prepare_ahead(KEY)
        world.files.write_observed(KEY, {UUID: Observed(at_ns=2)})
        world.files.cut(KEY)
        world.files.release((), ())
        assert VDeviceFiles(world.files.containers).remove_pod(UID)
        assert os.fstat(mapped.fileno()).st_size == CONFIG_BYTES
        assert struct.unpack_from("Q", mapped.read(), 512 + 72) == (1,)


def test_a_start_and_the_end_of_a_pod_put_directories_with_a_tenants_file_aside(short_dir: Path) -> None:
    """What a tenant has written may take the kernel half a minute to free. The first start keeps the vDevice files."""
    world = World(short_dir)
    vdevice = VDeviceFiles(world.files.containers)
    vdevice.prepare(KEY, pids=[7])
    sock, identity = vdevice.bind_socket(KEY)
    sock.close()
    world.files.prepare(KEY)
    assert vdevice.has_socket(KEY, identity) and vdevice.list_aside() == ()
    assert sorted(path.name for path in world.path.iterdir()) == [CONFIG_NAME, "pids.config", USAGE_NAME, "vcuda.sock"]
    world.files.prepare(KEY)
    assert not vdevice.has_socket(KEY, identity) and len(vdevice.list_aside()) == 1
    vdevice.prepare(KEY, pids=[])
    assert sorted(path.name for path in world.path.iterdir()) == [CONFIG_NAME, "pids.config", USAGE_NAME]
    assert world.path.parent.stat().st_mode & 0o777 == 0o700
    assert vdevice.remove_pod(UID) and vdevice.pod_names() == () and len(vdevice.list_aside()) == 1
    for name in vdevice.list_aside():
        vdevice.remove_aside(name)
    assert vdevice.list_aside() == ()
    with pytest.raises(NotFound):
        world.files.write_limits(KEY, [LIMITS])


@pytest.mark.parametrize("place", [UID, f"{UID}/cuda", f"{UID}/cuda/{USAGE_NAME}"])
def test_a_link_on_the_way_is_replaced_and_not_followed(short_dir: Path, place: str) -> None:
    """What it leads to is as before."""
    world = World(short_dir)
    outside = short_dir / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    link = world.files.containers / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with capture_logs():
        world.files.prepare(KEY)
    assert not link.is_symlink() and world.usage().is_file()
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


def test_a_file_next_to_the_containers_hides_none_of_them(files: GpushareFiles) -> None:
    """Else the next start takes a node with running shares for one without: one of the host left a note, say."""
    files.prepare(KEY)
    (files.containers / UID / "NOTE").write_text("mine")
    assert files.list_pods() == (UID,)


# ---- a region that is read all the time ----


def test_files_at_rest_are_read_by_two_calls_for_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their sizes now and then."""
    files = world.files
    for key in (KEY, OTHER):
        files.prepare(key)
    before, others = {key: (1, files.usage_head(key, 1)) for key in (KEY, OTHER)}, {KEY: (1, b"")}
    for _ in range(2):
        assert files.changed_heads(before) == {}
    for _ in range(3):
        assert files.changed_heads(others).keys() == {KEY}
    for _ in range(3):
        assert files.changed_heads(before) == {}
    calls = list[str]()
    for name in ("fstat", "pread", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: calls.append(name) or call(*args))
    assert files.changed_heads(before) == {} and calls == ["pwritev", "pread"]
    monkeypatch.setattr(files_module, "_SIZE_PERIOD_S", 0.0)
    calls.clear()
    assert files.changed_heads(before) == {} and calls == ["fstat", "pread"] * 2


def test_files_that_were_slow_to_copy_are_read_one_by_one_from_then_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant can make the kernel wait for its file."""
    files, copies = world.files, list[int]()
    files.prepare(KEY)
    before, write = {KEY: (1, files.usage_head(KEY, 1))}, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: copies.append(1) or write(*args))
    monkeypatch.setattr(files_module, "_SIZE_PERIOD_S", 60.0)
    for slow_s, copied in ((60.0, 3), (0.0, 1), (60.0, 0)):
        monkeypatch.setattr(files_module, "_SLOW_S", slow_s)
        copies.clear()
        for _ in range(5 if copied == 3 else 3):
            assert files.changed_heads(before) == {}
        assert len(copies) == copied


def test_the_file_of_a_share_stays_open_until_it_has_another_one(world: World) -> None:
    files, usage = world.files, world.usage()
    files.prepare(KEY)
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


def test_a_file_that_cannot_be_read_any_more_is_opened_again(world: World) -> None:
    files, usage = world.files, world.usage()
    files.prepare(KEY)
    files.usage_head(KEY, 1)
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


@pytest.mark.parametrize("change", ["written", "shortened", "made again", "longer"])
def test_of_files_that_rest_nothing_is_looked_up_until_one_changes(
    world: World, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Nor does a signal come where a file is shortened."""
    files, usage = world.files, world.usage()
    for key in (KEY, OTHER):
        files.prepare(key)
    before = {key: (1, encode_usage()[: usage_head_bytes(1)]) for key in (KEY, OTHER)}
    monkeypatch.setattr(files_module, "_SIZE_PERIOD_S", 0.0 if change == "longer" else 60.0)
    for _ in range(3):
        assert files.changed_heads(before) == {}
    if change == "made again":
        files.prepare(KEY)
        for _ in range(3):
            assert files.changed_heads(before) == {}
    if change in ("written", "made again"):
        with usage.open("r+b") as file:
            file.write(b"a new head")
    else:
        os.truncate(usage, 0 if change == "shortened" else USAGE_BYTES + 1)
    for heads in (before, {KEY: (1, b"")}):
        for _ in range(2):
            assert files.changed_heads(heads).keys() == {KEY}


def test_heads_that_are_other_ones_are_found_also_after_all_have_rested(world: World) -> None:
    """Of a file that is written, shortened, or another one since the container started again."""
    files, missing = world.files, ContainerKey(PodUid(f"9{UID[1:]}"), "cuda")
    for key in (KEY, OTHER):
        files.prepare(key)
    before = {key: (1, files.usage_head(key, 1)) for key in (KEY, OTHER)} | {missing: (1, b"")}

    def changed() -> dict[ContainerKey, str]:
        return {key: type(found).__name__ for key, found in files.changed_heads(before).items()}

    for _ in range(3):
        assert changed() == {missing: "NotFound"}
    assert files.unseen(before) == [missing]
    os.truncate(world.usage(OTHER), USAGE_BYTES - 1)
    assert changed() == {missing: "NotFound", OTHER: "Corrupt"} and OTHER in files.unseen(before)
    os.truncate(world.usage(OTHER), USAGE_BYTES)
    for _ in range(2):
        assert changed() == {missing: "NotFound"}
    files.prepare(KEY)
    with world.usage().open("r+b") as file:
        file.write(b"a new head")
    for _ in range(2):
        assert changed() == {missing: "NotFound", KEY: "bytes"}
    before = before | {KEY: (1, files.usage_head(KEY, 1))}
    assert changed() == {missing: "NotFound"}
    assert files.changed_heads({OTHER: (1, b"")}).keys() == {OTHER}


def test_only_so_many_files_stay_open_and_none_when_nobody_reads_them_any_more(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_MOST_OPEN", 1)
    world = World(short_dir)
    for key in (KEY, OTHER):
        world.files.prepare(key)
        assert world.files.usage_head(key, 1)
    assert open_usages(world.files.containers) == [str(world.usage())]
    del world
    gc.collect()
    assert open_usages(short_dir) == []


# ---- files that a tenant made large ----


def test_a_file_larger_than_the_library_makes_it_is_cut(world: World) -> None:
    """What is mapped stays; the largest is named first."""
    for key, more in ((KEY, 1 << 20), (OTHER, 2 << 20)):
        world.files.prepare(key)
        os.truncate(world.usage(key), USAGE_BYTES + more)
    found = world.files.oversized([KEY, OTHER, ContainerKey(PodUid("never-prepared"), "cuda")])
    assert [key for key, _ in found] == [OTHER, KEY] and found[0][1] >= USAGE_BYTES + (2 << 20)
    for key, _ in found:
        world.files.cut(key)
        assert world.usage(key).read_bytes() == encode_usage()
    assert world.files.oversized([KEY, OTHER]) == []


def test_blocks_beyond_a_files_length_are_cut_too(world: World) -> None:
    """fallocate takes them without a change of the length; and the length is the new one while a file is being cut."""
    usage = world.usage()
    if shutil.which("fallocate") is None:
        pytest.skip("no fallocate(1)")
    command = ["fallocate", "-n", "-o", "0", "-l", str(32 << 20), str(usage)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this file system cannot: {done.stderr.decode()}")
    assert usage.stat().st_size == USAGE_BYTES and usage.stat().st_blocks * 512 > 16 << 20
    assert [key for key, _ in world.files.oversized([KEY])] == [KEY]
    world.files.cut(KEY)
    assert usage.stat().st_blocks * 512 < 8 << 20 and world.files.oversized([KEY]) == []


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


def test_a_tenant_with_a_lease_on_its_file_does_not_keep_it_large(world: World) -> None:
    """Root in a container owns the file, and may lease it: the kernel then refuses whoever opens it without waiting. It
    takes the lease again as soon as it is asked for it."""
    usage = world.usage()
    os.truncate(usage, USAGE_BYTES + (1 << 20))
    with subprocess.Popen([sys.executable, "-c", LEASING, str(usage)], stdout=subprocess.PIPE, text=True) as tenant:
        try:
            assert tenant.stdout is not None and tenant.stdout.readline() == "taken\n"
            with pytest.raises(Unavailable):
                world.files.usage_head(KEY, 1)
            world.files.cut(KEY)
        finally:
            tenant.kill()
    assert world.files.oversized([KEY]) == [] and usage.read_bytes() == encode_usage()


def test_a_file_that_another_container_of_the_pod_has_open_is_shortened_until_it_lets_go(world: World) -> None:
    """It got the descriptor by a socket: without a name the file could grow unseen until the disk is full."""
    vdevice = VDeviceFiles(world.files.containers)
    with world.usage().open("r+b") as passed_on:
        world.files.prepare(KEY)
        (aside,) = vdevice.list_aside()
        for _ in range(2):
            os.truncate(passed_on.fileno(), 1 << 30)
            vdevice.remove_aside(aside)
            assert os.fstat(passed_on.fileno()).st_size == USAGE_BYTES and vdevice.list_aside() == (aside,)
    vdevice.remove_aside(aside)
    assert vdevice.list_aside() == () and world.usage().is_file()


def test_a_tenant_that_opens_its_file_while_it_is_looked_at_ends_no_agent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of its place does not count as open. By SIGIO the kernel would end the agent, which handles none."""
    vdevice, place = VDeviceFiles(world.files.containers), os.open(world.usage(), os.O_PATH)
    world.files.prepare(KEY)
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


FULL_DISK = """
import subprocess, sys
from contextlib import suppress
from pathlib import Path
from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, Observed
from gpushare_agent.core.model.errors import Unavailable
from tests.isolation.support_gpushare import KEY, LIMITS, UUID, World

files = World(Path(sys.argv[1])).files
files.prepare(KEY)
files.write_observed(KEY, {UUID: Observed(at_ns=1)})
config = files.container_directory(KEY) / CONFIG_NAME
subprocess.run(["fallocate", "-p", "-l", str(config.stat().st_size), config], check=True)
with suppress(OSError), Path(sys.argv[1], "full").open("wb", buffering=0) as full:
    while full.write(bytes(4096)):
        pass
for write in (lambda: files.write_observed(KEY, {UUID: Observed(at_ns=2)}), lambda: files.write_limits(KEY, LIMITS)):
    try:
        write()
    except Unavailable as error:
        print(error)
"""
IN_A_SMALL_DISK = 'mount -t tmpfs -o size=4m none "$1" || exit 77; exec "$2" -c "$3" "$1"'


async def test_a_store_that_a_full_disk_refuses_is_unavailable_and_no_signal(short_dir: Path) -> None:
    """Some file systems write each change elsewhere; a hole in the file stands for that."""
    words = ("sh", "-c", IN_A_SMALL_DISK, "sh", short_dir, sys.executable, FULL_DISK)
    if not shutil.which("fallocate") or not shutil.which("unshare"):
        pytest.skip("no unshare or fallocate on this machine")
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (5, 14):
        pytest.skip("this kernel cannot be asked")
    code, out, err = await output_of("unshare", "-m", *words, env=clean_environment())
    if b"mount" in err or b"unshare" in err:
        pytest.skip(f"no mounts can be made here: {err.decode()}")
    refused = f"{CONFIG_NAME} cannot be written: Bad address; it is tried again"
    assert (code, out.decode().splitlines()) == (0, [refused, refused]), err
