"""Isolation gpushare: a container's edits, its files while it is prepared, resized and removed, and what it is told."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation import GpuShare, IsolationRequest
from gpushare_agent.agent.isolation.gpushare.check import check_gpushare
from gpushare_agent.agent.isolation.gpushare.edits import ISOLATION, LIBRARY_PATH, edit_gpushare, live_limits
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
    read_paid,
)
from gpushare_agent.agent.isolation.gpushare.library import MARK, Library
from gpushare_agent.agent.isolation.gpushare.observed import (
    BusyCount,
    ObservedContainers,
    owners_of,
    pause_s,
    used_bytes,
)
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation, ClaimRef, ClaimShare, ContainerEdits, ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NotFound, Refused, StartupError, Unavailable
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, MIB, GpuUuid, PodUid, unit_id
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.usage import BusyProcess, ContainerUse, GpuBusy, ProcessSample, UsageRound
from gpushare_agent.core.settings.sections import LibgpushareSettings
from gpushare_agent.core.settings.settings import Settings
from tests.isolation.support_library import fake_library
from tests.isolation.support_tenant import open_usages
from tests.support_core import NAMES, allocation, container, ids, inventory, isolation_config, mig_instance, pod

UID = PodUid("11111111-2222-3333-4444-555555555555")
KEY = ContainerKey(UID, "cuda")
OTHER = ContainerKey(PodUid("22222222-2222-3333-4444-555555555555"), "cuda")
GPUS = inventory(3, memory_mib=24 * 1024).gpus
UUID = GPUS[0].uuid
LIMITS = GpuLimits(uuid=UUID, memory_bytes=2048 * MIB, cores=3000)


def request(cores: int = 30, memory_mib: int = 6144, gpus: int = 1, **env: str) -> IsolationRequest:
    return IsolationRequest(
        pod_uid=UID,
        container=replace(container("cuda"), env=env),
        shares=tuple(
            GpuShare(gpu=gpu, cores=cores, memory_mib=memory_mib, is_whole=cores >= 100) for gpu in GPUS[:gpus]
        ),
        config=isolation_config(libgpushare=LibgpushareSettings(directory=Path("/own"))),
    )


def test_whole_gpus_get_nothing() -> None:
    assert edit_gpushare(request(cores=100, gpus=2)) == ContainerEdits()


def test_a_share_gets_the_library_and_its_own_directory_of_which_one_file_is_writable() -> None:
    edits = edit_gpushare(request())
    assert isinstance(edits, ContainerEdits) and edits.env == ()
    own = f"/vm/{UID}/cuda"
    assert [(mount.host_path, mount.container_path, mount.read_only) for mount in edits.mounts] == [
        ("/own/libgpushare.so", LIBRARY_PATH, True),
        ("/own/ld.so.preload", "/etc/ld.so.preload", True),
        ("/own/ld.so.preload", "/etc/ld-nix.so.preload", True),
        (own, "/etc/vcuda", True),
        (f"{own}/usage", "/etc/vcuda/usage", False),
    ]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (request(NVIDIA_VISIBLE_DEVICES="all"), "sets NVIDIA_VISIBLE_DEVICES in its spec"),
        (request(cores=0), "which makes a limit of 0 under isolation gpushare. "),
        (request(memory_mib=0), "which makes a limit of 0 under isolation gpushare. "),
    ],
)
def test_a_share_that_could_not_be_kept_is_refused(wanted: IsolationRequest, text: str) -> None:
    refused = edit_gpushare(wanted)
    assert isinstance(refused, Refused) and text in refused.detail


@pytest.mark.parametrize(
    "value",
    [
        "libcuda.so.1",
        "libcuda.so",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
        "/usr/lib/libjemalloc.so.2:libcuda.so.1",
        "libjemalloc.so.2 /lib/$LIB/libcuda.so.1",
        "a.so:" * 500 + "libcuda.so.1",
    ],
)
def test_the_driver_s_library_may_not_be_preloaded_before_the_isolation_s(value: str) -> None:
    """Which would be first, for programs that are linked to it. One is named behind what is read of a variable."""
    raw = {"name": "cuda", "env": [{"name": "LD_PRELOAD", "value": value}]}
    meta = {"uid": UID, "name": "web", "namespace": "default"}
    read = parse_pod(read_pod_json(json.dumps({"metadata": meta, "spec": {"containers": [raw]}}).encode()))
    refused = edit_gpushare(replace(request(), container=read.containers[0]))
    assert isinstance(refused, Refused) and "sets LD_PRELOAD (" in refused.detail and len(refused.detail) < 600


@pytest.mark.parametrize(
    "value", ["", "libjemalloc.so.2", "/opt/libcuda-tools.so", "/usr/local/libcuda.so.d/libtrace.so"]
)
def test_another_library_may_be_preloaded(value: str) -> None:
    assert isinstance(edit_gpushare(request(LD_PRELOAD=value)), ContainerEdits)


PRELOADS = ["/etc/ld.so.preload", "/etc/ld-nix.so.preload"]
PATHS = ["/etc/vcuda", "/etc/vcuda/vcuda.sock", *PRELOADS, "/usr/local/gpushare", "/usr/local", "/etc", "/"]


@pytest.mark.parametrize("path", PATHS)
def test_a_volume_over_the_files_of_the_limit_is_refused(path: str) -> None:
    """Above them too: whoever may write in the volume could lead their directory elsewhere."""
    own = replace(container("cuda"), mounts=("/data", path))
    refused = edit_gpushare(replace(request(), container=own))
    assert isinstance(refused, Refused) and f"mounts a volume at {path}, by which" in refused.detail
    assert edit_gpushare(replace(request(cores=100), container=own)) == ContainerEdits()


@pytest.mark.parametrize("path", ["/data", "/etc/ssl", "/usr/local/gpushare2", "/usr/local/vgpu"])
def test_a_volume_elsewhere_is_not(path: str) -> None:
    own = replace(container("cuda"), mounts=(path,))
    assert isinstance(edit_gpushare(replace(request(), container=own)), ContainerEdits)


def test_a_share_of_a_mig_instance_is_limited_unless_the_driver_names_it_in_the_old_way() -> None:
    """Before driver 470: by GPU, GPU instance and compute instance, which gpushare.config has no room for."""
    instance = GpuShare(gpu=mig_instance(1, 0, 0), cores=30, memory_mib=1024)
    assert ISOLATION.edits(replace(request(), shares=(instance,))) == ISOLATION.edits(request())
    old = replace(instance, gpu=replace(instance.gpu, uuid=GpuUuid(f"MIG-GPU-{UID}/7/0")))
    refused = ISOLATION.edits(replace(request(), shares=(old,)))
    assert isinstance(refused, Refused) and "Update the driver" in refused.detail


def test_gpus_that_come_by_cdi_may_be_hidden_from_nvidias_runtime() -> None:
    assert isinstance(edit_gpushare(request(NVIDIA_VISIBLE_DEVICES="void")), ContainerEdits)


@pytest.mark.parametrize(("ceiling", "expected"), [("60", 6000), ("30", None), ("0", None), ("10", None)])
def test_the_limits_are_those_of_the_share_and_its_elastic_ceiling(ceiling: str, expected: int | None) -> None:
    owner = pod("share", container("cuda", cores=30, blocks=8), uid=UID, annotations={CORE_LIMIT_ANNOTATION: ceiling})
    own = allocation(owner, "cuda", ids(0, range(30)), ids(0, range(8)))
    gpus = {gpu.uuid: gpu for gpu in GPUS}
    assert live_limits([own], owner, gpus, NAMES) == (replace(LIMITS, ceiling=expected),)
    assert live_limits([own], owner, {}, NAMES) is None


def test_shares_of_several_gpus_and_whole_ones_beside_them_get_the_library() -> None:
    whole = GpuShare(gpu=GPUS[1], cores=100, memory_mib=0, is_whole=True)
    mixed = replace(request(), shares=(*request().shares, whole))
    assert edit_gpushare(request(gpus=2)) == edit_gpushare(mixed) == edit_gpushare(request())
    many = replace(request(), shares=request().shares * (MOST_GPUS + 1))
    refused = edit_gpushare(many)
    assert isinstance(refused, Refused) and "shares on 17 GPUs" in refused.detail


def gpu_memory(memory_mib: int) -> dict[GpuUuid, Gpu]:
    return {gpu.uuid: replace(gpu, memory_mib=memory_mib) for gpu in GPUS}


def replicas(*units: tuple[int, str]) -> Allocation:
    """Of `(index, terms)`, such as (0, "4s"): one of four replicas of GPU 0."""
    owner = pod("replicas", container("cuda"), uid=UID)
    found = frozenset(unit_id(GPUS[index].uuid, number, terms) for number, (index, terms) in enumerate(units))
    gpus = tuple(dict.fromkeys(GPUS[index].uuid for index, _ in units))
    return replace(allocation(owner, "cuda", [], []), ids={ResourceKind.GPU: found}, gpus=gpus)


def test_replicas_of_several_gpus_have_the_limits_of_each() -> None:
    """Two of four of one and one of three of another; who has all of a GPU is not limited there."""
    found = live_limits([replicas((0, "4s"), (0, "4s"), (1, "3s"))], None, gpu_memory(9000), NAMES)
    assert found == (
        GpuLimits(uuid=GPUS[0].uuid, memory_bytes=4500 * MIB, cores=5000),
        GpuLimits(uuid=GPUS[1].uuid, memory_bytes=3000 * MIB, cores=3300),
    )
    found = live_limits([replicas((0, "2s"), (0, "2s"), (1, "3s"))], None, gpu_memory(9000), NAMES)
    assert found is not None and found[0] == GpuLimits(uuid=GPUS[0].uuid)


def claimed(index: int, cores: int, blocks: int, name: str) -> Allocation:
    owner = pod("claim", container(name), uid=UID)
    own = allocation(owner, name, ids(index, range(cores)), ids(index, range(blocks)))
    share = ClaimShare(
        ref=ClaimRef("default", "gpus", UID), shown_as="gpus", request=name, isolation="gpushare", view="a"
    )
    return replace(own, gpus=(GPUS[index].uuid,), claim=share, is_whole=cores >= 100)


def test_a_claims_results_have_a_limit_on_each_gpu_and_together_where_it_is_one() -> None:
    """Memory alone gets compute in proportion; a whole GPU next to shares is not limited."""
    parts = [claimed(0, 30, 8, "a"), claimed(0, 10, 4, "b"), claimed(1, 0, 16, "c"), claimed(2, 100, 32, "d")]
    gpus = gpu_memory(8192)
    assert live_limits(parts, None, gpus, NAMES) == (
        GpuLimits(uuid=GPUS[0].uuid, memory_bytes=3072 * MIB, cores=4000),
        GpuLimits(uuid=GPUS[1].uuid, memory_bytes=4096 * MIB, cores=5000),
        GpuLimits(uuid=GPUS[2].uuid),
    )
    assert live_limits(parts[3:], None, gpus, NAMES) is None


# ---- files ----


def launches(files: GpushareFiles) -> int:
    return sum(one.launches for one in read_paid(files.usage_head(KEY, MOST_GPUS)))


class World:
    """One share of which the test changes the limits."""

    def __init__(self, directory: Path) -> None:
        self.limits: GpuLimits | None = LIMITS
        self.is_claims = False
        self.library = Library(fake_library(directory / "libgpushare.so"), directory / "own")
        self.files = GpushareFiles(
            self.library,
            directory / "vm",
            lambda _: [self.limits] if self.limits is not None else None,
            lambda _: self.is_claims,
        )
        self.path = self.files.container_directory(KEY)
        share = pod("share", container("cuda", cores=30, blocks=8), uid=UID)
        self.pods: dict[PodUid, Pod] = {UID: share}
        own = allocation(share, "cuda", ids(0, range(30)), ids(0, range(8)))
        self.allocations: dict[ContainerKey, Allocation] = {KEY: own}
        self.is_synced = True

    def get(self, uid: PodUid) -> Pod | None:
        return self.pods.get(uid)

    def config(self) -> bytes:
        return (self.path / CONFIG_NAME).read_bytes()

    def launch(self, count: int) -> None:
        with (self.path / USAGE_NAME).open("r+b") as file:
            file.seek(512 + 56)
            file.write(struct.pack("Q", count))


@pytest.fixture
def world(short_dir: Path) -> World:
    made = World(short_dir)
    made.library.install()
    return made


def test_a_prepared_container_finds_its_limits_and_an_empty_region(world: World) -> None:
    world.files.prepare(KEY)
    assert world.config() == encode_config(UID, "cuda", [LIMITS])
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.path.iterdir()}
    assert modes == {CONFIG_NAME: 0o644, USAGE_NAME: 0o666}
    assert (world.path / USAGE_NAME).stat().st_size == USAGE_BYTES
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
    world.files.prepare(KEY)
    command = [sys.executable, "-c", IN_A_USER_NAMESPACE, world.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("no user namespace with other users can be made here")
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [f"{CONFIG_NAME} {os.O_RDONLY}", f"{USAGE_NAME} {os.O_RDWR}"],
    )


def test_a_container_that_starts_again_finds_new_files_and_a_claims_the_same(world: World) -> None:
    world.files.prepare(KEY)
    world.launch(7)
    first = (world.path / CONFIG_NAME).stat().st_ino
    world.is_claims, world.limits = True, replace(LIMITS, cores=5000)
    world.files.prepare(KEY)
    assert (launches(world.files), (world.path / CONFIG_NAME).stat().st_ino) == (7, first)
    assert struct.unpack_from("I", world.config(), 512 + 64) == (5000,)
    os.utime(world.path / CONFIG_NAME, (1, 1))  # the node was restarted since
    world.files.prepare(KEY)
    assert launches(world.files) == 0
    world.launch(7)
    world.is_claims = False
    world.files.prepare(KEY)
    assert launches(world.files) == 0


def test_a_container_whose_limits_are_not_known_is_not_prepared(world: World) -> None:
    world.limits = None
    with pytest.raises(Unavailable, match="not in the inventory"):
        world.files.prepare(KEY)


def test_a_resize_is_written_into_the_file_that_programs_have_mapped(world: World) -> None:
    world.files.prepare(KEY)
    before = (world.path / CONFIG_NAME).stat().st_ino
    world.files.write_limits(KEY, [replace(LIMITS, memory_bytes=1024 * MIB, cores=5000)])
    flags, memory, cores = struct.unpack_from("=I48xQI", world.config(), 512 + 4)
    assert (flags, memory, cores, (world.path / CONFIG_NAME).stat().st_ino) == (3, 1024 * MIB, 5000, before)
    assert struct.unpack_from("I", world.config(), 512)[0] % 2 == 0


def test_threads_that_write_at_once_leave_the_sequence_even(world: World) -> None:
    """A resize and a round of usage: each write counts two, and none is lost."""
    world.files.prepare(KEY)
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
    with (world.path / USAGE_NAME).open("r+b") as file:
        for gpu in (0, 1):
            file.seek(512 + 256 * gpu + 56)
            file.write(struct.pack("Q", 5))
    assert launches(files) == 10


def shorten(path: Path) -> None:
    os.truncate(path, 100)


def grow(path: Path) -> None:
    os.truncate(path, 1 << 30)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


def device(path: Path) -> None:
    """/dev/zero's numbers. Also what it is without the right to make one."""
    path.unlink()
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))


@pytest.mark.parametrize(
    "attack",
    [
        shorten,
        grow,
        link,
        pipe,
        directory,
        pytest.param(device, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_what_a_tenant_makes_of_its_region_harms_nobody(world: World, attack: Callable[[Path], None]) -> None:
    world.files.prepare(KEY)
    attack(world.path / USAGE_NAME)
    with pytest.raises(Corrupt):
        launches(world.files)
    with pytest.raises(Corrupt):
        world.files.held_bytes(KEY)
    world.files.write_limits(KEY, [LIMITS])


@pytest.mark.parametrize("attack", ["lease", "mode"])
def test_a_region_that_cannot_be_opened_is_tried_again(world: World, attack: str) -> None:
    """A lease to write would keep an open waiting for 45 s; without permissions it is refused where the agent has no
    capability, as in its DaemonSet. Limits are written all the same, and the next start has a file of its own."""
    world.files.prepare(KEY)
    path = world.path / USAGE_NAME
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
    world.files.prepare(KEY)
    (world.path / USAGE_NAME).write_bytes(random.Random(seed).randbytes(USAGE_BYTES))
    assert launches(world.files) >= 0
    held = world.files.held_bytes(KEY)
    assert list(held) == [UUID] and held[UUID] >= 0


@pytest.mark.parametrize("size", [0, 100, CONFIG_BYTES - 1])
def test_a_config_that_was_cut_on_the_host_is_not_written_and_said_once(world: World, size: int) -> None:
    """A write behind its end would end the agent by a signal."""
    world.files.prepare(KEY)
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
    world.files.prepare(KEY)
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


def test_a_start_and_the_end_of_a_pod_put_directories_with_a_tenants_file_aside(world: World) -> None:
    """What a tenant has written may take the kernel half a minute to free. The first start keeps the vDevice files."""
    vdevice = VDeviceFiles(world.files.containers)
    vdevice.prepare(KEY)
    sock, identity = vdevice.bind_socket(KEY)
    sock.close()
    vdevice.write(KEY, pids=[7])
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


async def test_check_says_what_is_missing(short_dir: Path) -> None:
    own = LibgpushareSettings(library=short_dir / "none.so", directory=short_dir / "own")
    (found,) = await check_gpushare(Settings(libgpushare=own))
    assert found.level is Level.ERROR and "none.so cannot be used" in found.detail
    own = LibgpushareSettings(library=fake_library(short_dir / "fake.so"), directory=short_dir / "own")
    first, second = await check_gpushare(Settings(libgpushare=own))
    assert (first.level, second.level) == (Level.OK, Level.ERROR)
    assert "is not libgpushare's" in second.detail  # it has no symbols


# ---- what the driver shows ----

SECOND = 1_000_000_000
READING = GpuBusy(
    at_ns=20 * SECOND,
    busy_until_ns=19 * SECOND,
    is_continued=True,
    processes=(
        BusyProcess(pid=7, memory_bytes=700 * MIB, busy_ns=200),
        BusyProcess(pid=8, memory_bytes=900 * MIB, busy_ns=500),
        BusyProcess(pid=9, memory_bytes=1, busy_ns=100),
    ),
)
OWNERS = {7: KEY, 8: OTHER, 9: None}


def usage(pids: tuple[int, ...] = (7,), age_s: float = 0.0) -> UsageRound:
    uses = [
        ContainerUse(key=KEY, uuid=UUID, pids=pids, memory_bytes=600 * MIB if pids else 0),
        ContainerUse(key=OTHER, uuid=UUID, pids=(8,), memory_bytes=900 * MIB),
        ContainerUse(key=OTHER, uuid=GPUS[1].uuid, pids=(8,), memory_bytes=1),
    ]
    return UsageRound(
        sampled_at=time.time() - age_s,
        gpus={},
        containers={(one.key, one.uuid): one for one in uses},
        unattributed={UUID: (ProcessSample(pid=9),)},
    )


def counted(*reads: GpuBusy, owners: Mapping[int, ContainerKey | None] = OWNERS) -> BusyCount:
    count = BusyCount()
    for read in reads:
        count.add(read, owners)
    return count


def test_a_round_says_whose_each_process_is() -> None:
    round_ = usage()
    assert owners_of(round_.containers.values(), round_.unattributed) == {UUID: OWNERS, GPUS[1].uuid: {8: OTHER}}


def test_a_container_is_told_of_itself_and_one_number_of_all_others() -> None:
    """Added up from the first reading on, which itself counts nothing."""
    first = replace(READING, is_continued=False, busy_until_ns=18 * SECOND, processes=())
    count = counted(first, READING, READING)
    seen = count.observed(KEY, Observed(), READING.at_ns, 5)
    assert seen == Observed(
        at_ns=20 * SECOND,
        used_bytes=5,
        busy_since_ns=18 * SECOND,
        busy_until_ns=19 * SECOND,
        busy_ns=400,
        others_ns=1200,
    )
    assert count.observed(KEY, seen, 21 * SECOND, None).at_ns == 20 * SECOND


@pytest.mark.parametrize("broken", [replace(READING, is_continued=False), replace(READING, busy_until_ns=0)])
def test_what_is_not_known_makes_the_count_begin_anew(broken: GpuBusy) -> None:
    """A pause of the readings; a driver that does not say: libgpushare takes neither for idleness."""
    count = counted(READING, READING, broken)
    seen = count.observed(KEY, Observed(), 0, None)
    assert (seen.busy_since_ns, seen.busy_until_ns, seen.busy_ns, seen.others_ns) == (
        broken.busy_until_ns, broken.busy_until_ns, 0, 0
    )  # fmt: skip
    count.add(READING, OWNERS)
    assert count.since_ns == READING.busy_until_ns


def test_of_a_container_without_a_known_process_nothing_is_said() -> None:
    """As without the host's PID namespace: its processes are nobody's, and it must not be taken for an idle one."""
    first = replace(READING, is_continued=False, busy_until_ns=18 * SECOND)
    count = counted(first, READING, owners={7: None, 8: OTHER, 9: None})
    assert count.observed(KEY, Observed(), READING.at_ns, None).busy_until_ns == 0
    assert count.observed(OTHER, Observed(), READING.at_ns, None).busy_until_ns == READING.busy_until_ns
    count.add(READING, OWNERS)
    assert count.observed(KEY, Observed(), READING.at_ns, None).busy_until_ns == READING.busy_until_ns


def test_a_process_that_no_round_has_shown_keeps_what_it_was_busy_until_one_does() -> None:
    first = replace(READING, is_continued=False, processes=())
    count = counted(first, READING, READING, owners={8: OTHER})
    assert (count.total_ns, count.observed(OTHER, Observed(), 0, None).others_ns) == (1000, 0)
    gone = replace(READING, processes=READING.processes[:1])
    count.add(gone, OWNERS)  # 7 is known now, with what it had before; 9 has ended, so it was somebody else's
    assert (count.by_container, count.total_ns) == ({KEY: 600, OTHER: 1000}, 1800)


def test_memory_is_not_told_while_a_process_is_anybodys() -> None:
    """Its container would seem to have less than it has, and its library would let it take more."""
    assert used_bytes(READING, OWNERS) == {KEY: 700 * MIB, OTHER: 900 * MIB}
    assert used_bytes(READING, {7: KEY, 8: OTHER}) == {}
    unknown = (*READING.processes, BusyProcess(pid=10, memory_bytes=None, busy_ns=0))
    assert used_bytes(replace(READING, processes=unknown), {**OWNERS, 10: KEY}) == {OTHER: 900 * MIB}


def test_readings_have_a_twentieth_of_a_processor_and_half_of_the_time() -> None:
    """Ten a second while they use 5 ms and take 50, and one a second at least."""
    for took_s, used_s in ((0.0, 0.0), (0.001, 0.001), (0.05, 0.005)):
        assert took_s + pause_s(took_s, used_s) == pytest.approx(0.1)
    assert 0.02 + pause_s(0.02, 0.02) == pytest.approx(0.4)
    assert pause_s(0.2, 0.001) == 0.2
    assert pause_s(0.5, 0.5) == pause_s(10, 0.001) == 1.0


class ReadDriver:
    """Answers `reading` for each GPU, and notes which it was asked for."""

    def __init__(self, reading: GpuBusy | None = READING) -> None:
        self.reading = reading
        self.asked: list[frozenset[GpuUuid]] = []

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        self.asked.append(frozenset(gpus))
        if self.reading is None:
            raise Unavailable("NVML is away")
        return dict.fromkeys(gpus, self.reading)


def published(world: World) -> Observed:
    """Without what others pay."""
    values = struct.unpack_from("6Q", world.config(), 512 + 72)
    return Observed(**dict(zip(Observed.__struct_fields__, values, strict=False)))


def observing(world: World, **others: Any) -> ObservedContainers:
    given: dict[str, Any] = {"files": world.files, "shares": lambda: {KEY: (LIMITS,)}, "driver": ReadDriver()}
    return ObservedContainers(**given | others)


async def test_only_who_computes_is_told_and_only_then_the_driver_is_asked(world: World) -> None:
    now, requests, driver = [0.0], [0], ReadDriver()

    def ask() -> None:
        requests[0] += 1

    world.files.prepare(KEY)
    service = observing(world, driver=driver, clock=lambda: now[0], request_usage=ask)
    await service.look()
    service.usage_sampled(usage())
    await service.read()
    assert (requests[0], driver.asked, published(world)) == (0, [], Observed())
    world.launch(3)
    await service.look()
    service.usage_sampled(usage())
    service.usage_sampled(None)
    await service.read()
    await service.read()
    assert (requests[0], driver.asked) == (1, [{UUID}, {UUID}])
    assert published(world) == Observed(
        at_ns=READING.at_ns, used_bytes=700 * MIB, busy_since_ns=READING.busy_until_ns,
        busy_until_ns=READING.busy_until_ns, busy_ns=200, others_ns=600,
    )  # fmt: skip
    now[0] = 6.0
    await service.look()
    await service.read()
    assert (requests[0], len(driver.asked)) == (1, 2)


async def test_who_takes_memory_or_gives_it_back_is_told_too(world: World) -> None:
    """Without a launch: what its programs have beyond what they asked for is found in what the driver shows."""
    now = [0.0]
    world.files.prepare(KEY)
    service = observing(world, clock=lambda: now[0])
    service.usage_sampled(usage())
    for changed_at in (7, 3):
        with (world.path / USAGE_NAME).open("r+b") as file:
            file.seek(512)
            file.write(struct.pack("Q", changed_at))
        world.files.write_observed(KEY, {UUID: Observed()})
        await service.look()
        await service.read()
        assert published(world).used_bytes == 700 * MIB
        now[0] += 6.0
        world.files.write_observed(KEY, {UUID: Observed()})
        await service.look()
        await service.read()
        assert published(world).used_bytes == 0


async def test_rounds_are_requested_only_while_a_process_is_unknown_and_now_and_then(world: World) -> None:
    now, requests, driver = [0.0], [0], ReadDriver(replace(READING, processes=READING.processes[:2]))

    def ask() -> None:
        requests[0] += 1

    async def second() -> int:
        """How many requests it brought."""
        before, now[0] = requests[0], now[0] + 1.0
        world.launch(int(now[0]))
        await service.look()
        await service.read()
        return requests[0] - before

    world.files.prepare(KEY)
    service = observing(world, driver=driver, clock=lambda: now[0], request_usage=ask)
    assert [await second(), await second()] == [1, 1]
    service.usage_sampled(usage())
    assert await second() == 1  # the reading before had unknown ones
    assert [await second() for _ in range(60)].count(1) == 2
    driver.reading = READING  # with one that is in no container with a share, as it seems
    assert [await second(), await second(), await second()] == [0, 1, 1]
    driver.reading = replace(READING, processes=READING.processes[1:2])
    assert [await second(), await second()] == [1, 0]
    driver.reading = replace(READING, processes=READING.processes[:2])  # the PID of one that had ended
    assert [await second(), await second()] == [0, 1]
    driver.reading = None
    service.usage_sampled(usage())
    assert [await second(), await second(), await second()] == [1, 1, 1]


async def test_of_a_mig_instance_the_memory_is_told_and_no_busy_time(world: World) -> None:
    """Of which NVML has no utilisation: the container learns who else computes, and no further round is asked for."""
    processes = tuple(replace(one, busy_ns=0) for one in READING.processes[:2])
    requests, driver = [0], ReadDriver(replace(READING, processes=processes, busy_until_ns=0))

    def ask() -> None:
        requests[0] += 1

    world.files.prepare(KEY)
    service = observing(world, driver=driver, request_usage=ask)
    world.launch(1)
    await service.look()
    service.usage_sampled(usage())
    await service.read()
    before = requests[0]
    for _ in range(5):
        await service.read()
        await service.look()
    assert published(world) == Observed(at_ns=READING.at_ns, used_bytes=700 * MIB) and requests[0] == before
    published_at_ms, companions, _ = struct.unpack_from("I2H", world.config(), 512 + 120)
    assert published_at_ms > 0 and companions == 0


async def test_a_container_without_a_known_process_is_told_no_memory(world: World) -> None:
    world.files.prepare(KEY)
    service = observing(world)
    world.launch(3)
    await service.look()
    service.usage_sampled(usage(pids=()))
    await service.read()
    assert (published(world).at_ns, published(world).used_bytes) == (0, 0)


async def test_a_driver_that_cannot_be_read_leaves_what_a_round_shows(world: World) -> None:
    """The memory, as old as the round is; nothing of who was busy."""
    world.files.prepare(KEY)
    service = observing(world, driver=ReadDriver(None))
    world.launch(3)
    await service.look()
    service.usage_sampled(usage(age_s=2.0))
    await service.read()
    seen = published(world)
    assert seen == Observed(at_ns=seen.at_ns, used_bytes=600 * MIB)
    assert time.monotonic_ns() - seen.at_ns >= 2 * SECOND


async def test_files_that_are_made_anew_are_told_all_again(world: World) -> None:
    """A container that starts again: what is written does not go into the file that its last instance had mapped."""
    world.files.prepare(KEY)
    service = observing(world)
    world.launch(3)
    await service.look()
    service.usage_sampled(usage())
    await service.read()
    world.files.prepare(KEY)
    assert published(world) == Observed()
    await service.look()
    world.launch(1)
    await service.read()
    await service.look()
    await service.read()
    assert published(world).used_bytes == 700 * MIB


async def test_a_reading_of_100_containers_opens_no_file_twice(world: World) -> None:
    """Ten times a second, so the maps stay; they go with the last launch."""
    now = [0.0]
    world.files.prepare(KEY)
    service = observing(world, clock=lambda: now[0])
    world.launch(3)
    await service.look()
    # Not all descriptors: those that earlier tests left are closed when they are collected.
    before = open_in(world.path)
    for _ in range(5):
        await service.read()
    assert open_in(world.path) == before + 1
    now[0] = 60.0
    await service.look()
    assert open_in(world.path) == before


def open_in(directory: Path) -> int:
    """This process's descriptors of files in it."""
    found = 0
    for one in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found += os.readlink(f"/proc/self/fd/{one}").startswith(f"{directory}/")
    return found


async def test_limits_that_changed_without_a_resize_are_put_right_and_trouble_is_logged_once(world: World) -> None:
    """An elastic ceiling; a region that a tenant has broken; files that are about to be made."""
    world.files.prepare(KEY)
    wanted = [LIMITS]
    service = observing(world, shares=lambda: {KEY: (wanted[0],)})
    await service.look()
    wanted[0] = replace(LIMITS, ceiling=6000)
    await service.look()
    assert struct.unpack_from("I", world.config(), 512 + 68) == (6000,)
    shorten(world.path / USAGE_NAME)
    with capture_logs() as logs:
        await service.look()
        await service.look()
        shutil.rmtree(world.path)
        await service.look()
    assert [entry["event"] for entry in logs] == ["gpushare_files_not_used"]


# ---- what others pay ----


def pay(world: World, key: ContainerKey, launched: int, ms: float, *, gpu: int = 0, long_ms: float = 0.0) -> None:
    """As its processes would write it."""
    with (world.files.container_directory(key) / USAGE_NAME).open("r+b") as file:
        for offset, number in ((48, ms * 1e6), (56, launched), (192, long_ms * 1e6)):
            file.seek(512 + 256 * gpu + offset)
            file.write(struct.pack("Q", int(number)))


def told_of_others(world: World, key: ContainerKey, gpu: int = 0) -> tuple[int, int, int]:
    """Companions, how full the GPU is, and how long they compute between two turns."""
    config = (world.files.container_directory(key) / CONFIG_NAME).read_bytes()
    assert struct.unpack_from("I", config, 512 + 128 * gpu)[0] % 2 == 0
    return (*struct.unpack_from("HH", config, 512 + 128 * gpu + 124), *struct.unpack_from("H", config, 240 + 2 * gpu))


def companions(world: World, key: ContainerKey, gpu: int = 0) -> int:
    return told_of_others(world, key, gpu)[0]


class Clock:
    """Seconds, by the hand of the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def observed_for(service: ObservedContainers, clock: Clock, seconds: float, work: Callable[[int], None]) -> None:
    """Ten readings a second, and a look before every third; `work` is what containers do before each."""
    for n in range(round(10 * seconds)):
        clock.now += 0.1
        work(n)
        if n % 3 == 0:
            await service.look()
        await service.read()


def two_shares(world: World, **others: Any) -> tuple[ObservedContainers, Clock]:
    clock = Clock()
    for key in (KEY, OTHER):
        world.files.prepare(key)
    shares = {KEY: (LIMITS,), OTHER: (replace(LIMITS, cores=6000),)}
    return observing(world, **({"clock": clock, "shares": lambda: shares} | others)), clock


async def test_containers_are_told_what_the_others_pay(world: World) -> None:
    """And who asks what one pays gets the same number, under the key of any allocation of the share."""
    part_of_other = ContainerKey(OTHER.pod_uid, "part")
    service, clock = two_shares(world, share_of=lambda key: OTHER if key == part_of_other else key)
    await service.look()

    def work(n: int) -> None:
        pay(world, KEY, n, 20 * n)
        pay(world, OTHER, n, 60 * n, long_ms=30 * n)

    await observed_for(service, clock, 3, work)
    assert companions(world, KEY) == companions(world, OTHER) == 1
    assert told_of_others(world, KEY)[2] > told_of_others(world, OTHER)[2] > 0
    assert [service.paid(key, UUID) for key in (KEY, OTHER, part_of_other)] == pytest.approx([0.2, 0.6, 0.6])
    assert service.paid(KEY, GPUS[1].uuid) is None
    await observed_for(service, clock, 1.5, lambda n: pay(world, KEY, 100 + n, 600 + 20 * n))
    assert told_of_others(world, KEY) == (0, 0, 0) and service.paid(OTHER, UUID) is None


async def test_a_neighbour_that_begins_is_told_of_at_the_next_look(world: World) -> None:
    """It was idle for long; its launches are known before its first reading."""
    service, clock = two_shares(world)
    await service.look()
    await observed_for(service, clock, 3, lambda n: pay(world, KEY, n, 30 * n))
    assert told_of_others(world, KEY) == (0, 0, 0)
    pay(world, OTHER, 1, 50)
    clock.now += 0.1
    await service.look()
    await service.read()
    assert companions(world, KEY) == 1


async def test_the_file_of_a_share_is_opened_by_its_first_look_alone_and_closed_after_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {KEY: (LIMITS,), OTHER: (LIMITS,)}
    service, clock = two_shares(world, shares=lambda: shares)
    paths = [str(world.files.container_directory(key) / USAGE_NAME) for key in shares]
    await service.look()
    assert sorted(open_usages(world.files.containers)) == sorted(paths)
    with monkeypatch.context() as patch:
        patch.delattr(os, "open")
        await service.look()
    shares = {KEY: (LIMITS,)}
    clock.now += 1
    await service.look()
    assert open_usages(world.files.containers) == paths[:1]


async def test_of_containers_that_rest_nothing_is_noted_and_their_next_payment_counts_from_the_look_before(
    world: World,
) -> None:
    """One call of the thread a look. The tenant of one may shorten its file meanwhile, and put it right."""
    service, clock = two_shares(world)
    await service.look()
    claim, calls, call = service._claims[UUID].of[KEY], list[str](), service._thread.call

    async def counted_call(blocking: Callable[[], Any], what: str, timeout_s: float) -> Any:
        calls.append(what)
        return await call(blocking, what, timeout_s)

    service._thread.call = counted_call  # type: ignore[method-assign]
    noted_at_ns = claim.at_ns
    for look in range(4):
        clock.now += 1
        usage_of_other = world.files.container_directory(OTHER) / USAGE_NAME
        if look in (1, 2):
            os.truncate(usage_of_other, USAGE_BYTES - (look == 1))
        await service.look()
    assert (claim.at_ns, calls) == (noted_at_ns, ["reading the use of containers"] * 4)
    assert service._containers[OTHER].has_files
    pay(world, KEY, 1, 100)
    clock.now += 1
    await service.look()
    assert service.paid(KEY, UUID) == pytest.approx(0.1)


async def test_what_a_round_shows_while_files_are_read_is_not_lost(world: World) -> None:
    """The round comes in the event loop, between a reading and what is written by it."""
    service, clock = two_shares(world, driver=ReadDriver(replace(READING, at_ns=1)))
    await observed_for(service, clock, 1, lambda n: pay(world, KEY, n, n))
    read = world.files.usage_head

    def read_meanwhile(key: ContainerKey, gpus: int) -> Any:
        loop.call_soon_threadsafe(service.usage_sampled, usage())
        return read(key, gpus)

    loop = asyncio.get_running_loop()
    world.files.usage_head = read_meanwhile  # type: ignore[method-assign]
    await service.read()
    await service.read()
    assert published(world).used_bytes == 600 * MIB


async def test_files_that_are_made_anew_during_a_reading_are_not_told_of_the_last_instance(world: World) -> None:
    service, clock = two_shares(world)
    service.usage_sampled(usage())
    await observed_for(service, clock, 1, lambda n: pay(world, KEY, 5 + n, n))
    service.usage_sampled(usage())
    await service.read()
    assert published(world).used_bytes == 700 * MIB
    world.files.prepare(KEY)
    pay(world, KEY, 1, 1)
    await service.read()
    assert published(world) == Observed()


async def test_what_has_ended_leaves_nothing_behind(world: World) -> None:
    """Containers, and GPUs of which nobody has a share any more."""
    service, clock = two_shares(world)

    def work(n: int) -> None:
        pay(world, KEY, n, n)
        pay(world, OTHER, n, n)

    await observed_for(service, clock, 1, work)
    assert companions(world, KEY) == 1
    service.shares = lambda: {KEY: (LIMITS,)}
    await observed_for(service, clock, 0.4, lambda n: pay(world, KEY, 100 + n, n))
    assert companions(world, KEY) == 0
    service.shares = dict
    await service.look()
    assert (service._containers, service._counts, service._claims, service._listed) == ({}, {}, {}, {})


async def test_a_container_of_two_gpus_pays_on_each(world: World) -> None:
    """In the order of its files, in whichever order its limits come later: those of a claim may."""
    second = replace(LIMITS, uuid=GPUS[1].uuid)
    world.files._limits = lambda key: (LIMITS, second)
    service, clock = two_shares(world, shares=lambda: {KEY: (second, LIMITS), OTHER: (LIMITS, second)})
    await service.look()

    def work(n: int) -> None:
        pay(world, KEY, n, 10 * n)
        pay(world, KEY, n, 20 * n, gpu=1)
        pay(world, OTHER, n, 0)

    await observed_for(service, clock, 2, work)
    assert [service.paid(KEY, gpu.uuid) for gpu in GPUS[:2]] == pytest.approx([0.1, 0.2])
    assert [companions(world, key, gpu) for key in (KEY, OTHER) for gpu in (0, 1)] == [1, 0, 1, 1]


async def test_a_ceiling_that_comes_counts_for_what_is_believed(world: World) -> None:
    """And one that goes, at once."""
    limits = [LIMITS]
    service, clock = two_shares(world, shares=lambda: {KEY: (limits[0],), OTHER: (LIMITS,)})
    await service.look()
    begun = [0]

    def work(n: int) -> None:
        begun[0] += 1
        pay(world, KEY, begun[0], 90 * begun[0])
        pay(world, OTHER, begun[0], 0)

    await observed_for(service, clock, 2, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.3)
    limits[0] = replace(LIMITS, ceiling=8000)
    await observed_for(service, clock, 7, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.8, abs=0.002)
    limits[0] = LIMITS
    await observed_for(service, clock, 0.5, work)
    assert service.paid(KEY, UUID) == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_in_a_region_cost_its_own_container_alone(world: World, seed: int) -> None:
    """All of it, twice in each reading; others are never told of more than the liar's share."""
    service, clock = two_shares(world)
    service.usage_sampled(usage())
    await service.look()
    found, numbers = [], random.Random(seed)

    def work(n: int) -> None:
        (world.files.container_directory(OTHER) / USAGE_NAME).write_bytes(numbers.randbytes(USAGE_BYTES))
        pay(world, KEY, n, 30 * n)
        found.append((*told_of_others(world, KEY), service.paid(OTHER, UUID) or 0.0))

    with capture_logs() as logs:
        await observed_for(service, clock, 5, work)
    assert logs == [] and service.paid(KEY, UUID) == pytest.approx(0.3)
    assert [max(each) <= most for each, most in zip(zip(*found, strict=True), (1, 10_000, 8000, 0.6), strict=True)] == [
        True
    ] * 4
    assert published(world).used_bytes == 700 * MIB
