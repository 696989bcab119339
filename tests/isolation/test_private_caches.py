"""Private caches over real files; pods and allocations are the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.isolation.hami_core.files import LIBRARY, HamiCoreFiles
from gpushare_agent.isolation.private_caches import PrivateCaches
from gpushare_agent.isolation.tenant_files import LibraryStamp
from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import RefusalReason, Refused, StartupError, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from tests.agent.support_agent import poll_until
from tests.isolation.support_hami_core import fake_library, region_file
from tests.support_core import allocation, container, ids, pod

UID = PodUid("11111111-2222-3333-4444-555555555555")
WHOLE = PodUid("22222222-2222-3333-4444-555555555555")
KEY = ContainerKey(UID, "cuda")


class World:
    """The pods of the node, changed by the test."""

    def __init__(self, directory: Path) -> None:
        self.files = HamiCoreFiles(fake_library(directory / "libvgpu.so"), directory / "hami")
        share = pod("share", container(name="cuda", cores=30, blocks=8), uid=UID)
        whole = pod("whole", container(name="cuda", cores=100), uid=WHOLE)
        self.pods: dict[str, Pod] = {UID: share, WHOLE: whole}
        own = allocation(share, "cuda", ids(0, range(30)), ids(0, range(8)))
        all_of_it = allocation(whole, "cuda", ids(1, range(100)), [])
        self.allocations: dict[ContainerKey, Allocation] = {own.key: own, all_of_it.key: all_of_it}
        self.is_synced = True

    def get(self, uid: PodUid) -> Pod | None:
        return self.pods.get(uid)

    def caches(self) -> PrivateCaches:
        return PrivateCaches(files=self.files, allocations=lambda: self.allocations, pods=self, cleanup_period_s=0.005)

    @property
    def cache(self) -> Path:
        return self.files.cache_file(KEY)


class Faulty:
    """Files that refuse with one text, or block until they are released."""

    kind = LIBRARY

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.listed = 0
        self.is_sound = False

    def check_library(self) -> LibraryStamp:
        return (1, 2, 3)

    def install(self) -> None:
        raise self.error

    def prepare(self, key: ContainerKey) -> None:
        raise self.error

    def list_pods(self) -> tuple[PodUid, ...]:
        self.listed += 1
        if not self.is_sound:
            raise self.error
        return ()

    def remove_pod(self, uid: PodUid) -> bool:
        raise self.error

    def list_aside(self) -> tuple[str, ...]:
        return ()

    def oversized(self, keys: Iterable[ContainerKey]) -> list[tuple[ContainerKey, int]]:
        return []


async def test_a_share_that_is_about_to_start_finds_its_cache(short_dir: Path) -> None:
    """A whole GPU gets none, and neither does what holds nothing."""
    world = World(short_dir)
    caches = world.caches()
    await caches.check()
    unknown = ContainerKey(PodUid("33333333-2222-3333-4444-555555555555"), "cuda")
    assert await caches.prepare([KEY, ContainerKey(WHOLE, "cuda"), unknown]) is None
    assert world.cache.is_file()
    assert world.files.list_pods() == (UID,)


async def test_a_library_that_was_replaced_is_installed_by_the_next_check(short_dir: Path) -> None:
    """And one that was not is not read again."""
    world = World(short_dir)
    caches = world.caches()
    await caches.check()
    installed = world.files.directory / "libvgpu.so"
    installed.unlink()
    await caches.check()
    assert not installed.exists()
    newer = world.files.library.with_name("newer.so")
    newer.write_bytes(world.files.library.read_bytes() + b"newer")
    newer.rename(world.files.library)
    await caches.check()
    assert installed.read_bytes() == world.files.library.read_bytes()


async def test_what_cannot_be_prepared_is_refused_with_the_reason(short_dir: Path) -> None:
    """The container does not start without its limits, and the kubelet tries again."""
    world = World(short_dir)
    caches = world.caches()
    world.files.library.unlink()
    with capture_logs() as lines:
        refused = await caches.prepare([KEY])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_READY
    assert str(world.files.library) in refused.detail and "tries again" in refused.detail
    assert [line["event"] for line in lines] == ["private_cache_not_prepared"]
    fake_library(world.files.library)
    assert await caches.prepare([KEY]) is None


async def test_the_directory_of_a_pod_that_is_gone_is_removed(short_dir: Path) -> None:
    """Not while the API server knows the pod, not while it holds anything, and not before the pods are listed."""
    world = World(short_dir)
    caches = world.caches()
    assert await caches.prepare([KEY]) is None
    await caches.remove_stale()
    assert world.cache.is_file()
    del world.pods[UID]
    await caches.remove_stale()
    assert world.cache.is_file(), "its devices are still allocated"
    del world.allocations[KEY]
    world.is_synced = False
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("private caches", caches.run), name="private caches")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert world.cache.is_file()
        world.is_synced = True
        await poll_until(lambda: not world.files.list_pods(), "the directory removed")
        await stop_task(task)
    assert not world.cache.parent.parent.exists()


async def test_a_round_that_fails_is_reported_once_and_when_it_is_over(short_dir: Path) -> None:
    """A full disk says the same every two seconds."""
    files = Faulty(Unavailable("disk is sick"))
    world = World(short_dir)
    caches = PrivateCaches(files=files, allocations=lambda: {}, pods=world, cleanup_period_s=0.001)
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("private caches", caches.run), name="private caches")
            await poll_until(lambda: files.listed > 5, "several rounds")
            files.is_sound = True
            await poll_until(lambda: "private_caches_removed_again" in {line["event"] for line in lines}, "reported")
            await stop_task(task)
    assert [line["event"] for line in lines] == ["private_caches_not_removed", "private_caches_removed_again"]


async def test_one_directory_that_cannot_be_removed_does_not_keep_the_others(short_dir: Path) -> None:
    """Its error is reported all the same."""
    world = World(short_dir)
    gone = [PodUid(f"{n}{n}{n}{n}{n}{n}{n}{n}-2222-3333-4444-555555555555") for n in (4, 5)]
    for uid in gone:
        world.files.prepare(ContainerKey(uid, "cuda"))

    class RefusesTheFirst(HamiCoreFiles):
        def remove_pod(self, uid: PodUid) -> bool:
            if uid == gone[0]:
                raise Unavailable(f"{uid} is busy")
            return super().remove_pod(uid)

    files = RefusesTheFirst(world.files.library, world.files.directory)
    caches = PrivateCaches(files=files, allocations=lambda: {}, pods=world)
    with pytest.raises(Unavailable, match="busy"):
        await caches.remove_stale()
    assert world.files.list_pods() == (gone[0],)


async def test_a_directory_that_cannot_be_made_is_the_reason(short_dir: Path) -> None:
    """As the adapter words it."""
    caches = PrivateCaches(files=Faulty(StartupError("no room")), allocations=lambda: {}, pods=World(short_dir))
    with pytest.raises(StartupError, match="no room"):
        await caches.check()


async def test_a_disk_that_hangs_is_a_refusal_in_time(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that hangs keeps nothing from ending."""
    monkeypatch.setattr("gpushare_agent.isolation.private_caches.FILES_TIMEOUT_S", 0.05)
    world, let_go = World(short_dir), threading.Event()

    class Hangs(HamiCoreFiles):
        def prepare(self, key: ContainerKey) -> None:
            let_go.wait(10)

    files = Hangs(world.files.library, world.files.directory)
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world)
    try:
        with capture_logs():
            refused = await caches.prepare([KEY])
        assert isinstance(refused, Refused) and "no answer" in refused.detail
    finally:
        let_go.set()


class Slow(HamiCoreFiles):
    """Real files, of which removing and shortening what a tenant has written ends when `go_on` is set."""

    def __init__(self, files: HamiCoreFiles) -> None:
        super().__init__(files.library, files.directory)
        self.begun: set[str] = set()
        self.go_on = threading.Event()

    def remove_aside(self, name: str) -> None:
        self.begun.add("remove")
        assert self.go_on.wait(60)
        super().remove_aside(name)

    def cut(self, key: ContainerKey) -> None:
        self.begun.add("cut")
        assert self.go_on.wait(60)
        super().cut(key)


async def test_no_start_waits_for_what_a_tenant_has_written(short_dir: Path) -> None:
    """The files of a pod that has ended, and those of a container that starts again, are removed while others start; a file
    that is too large is shortened meanwhile."""
    world = World(short_dir)
    files = Slow(world.files)
    ended, large = (ContainerKey(PodUid(f"{n * 8}-2222-3333-4444-555555555555"), "cuda") for n in "45")
    world.allocations[large] = replace(world.allocations[KEY], key=large)
    for key in (KEY, ended, large):
        files.prepare(key)
    files.cache_file(large).write_bytes(region_file() + bytes(1 << 20))
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world, cleanup_period_s=0.005)
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("private caches", caches.run), name="private caches")
            try:
                await poll_until(lambda: files.begun == {"remove", "cut"}, "a removal and a cut under way")
                before = world.cache.stat().st_ino
                for _ in range(3):
                    assert await caches.prepare([KEY]) is None
                assert world.cache.stat().st_ino != before and len(files.list_aside()) == 4
            finally:
                files.go_on.set()
            await poll_until(lambda: not files.list_aside() and not files.oversized([large]), "both done")
            await stop_task(task)
    assert sorted(line["event"] for line in lines) == ["private_cache_removed", "private_cache_too_large"]
    assert files.cache_file(large).read_bytes() == region_file()


async def test_a_file_that_grows_again_and_again_is_logged_once(short_dir: Path) -> None:
    """Its tenant decides how often."""
    world = World(short_dir)
    caches = world.caches()
    assert await caches.prepare([KEY]) is None
    with capture_logs() as lines:
        for _ in range(3):
            world.cache.write_bytes(region_file() + bytes(1 << 20))
            await caches.cut_oversized()
            assert world.cache.read_bytes() == region_file()
    assert [(line["event"], line["container"]) for line in lines] == [("private_cache_too_large", "cuda")]


class Executed(HamiCoreFiles):
    """Real files, which the kernel lets nobody write to."""

    def cut(self, key: ContainerKey) -> None:
        raise Unavailable(f"{key.container}.cache cannot be used: Text file busy")


async def test_a_file_that_cannot_be_shortened_is_warned_of_once(short_dir: Path) -> None:
    """Its tenant keeps it so, and nothing else bounds what it takes of the disk."""
    world = World(short_dir)
    files = Executed(world.files.library, world.files.directory)
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world)
    assert await caches.prepare([KEY]) is None
    world.cache.write_bytes(region_file() + bytes(1 << 20))
    with capture_logs() as lines:
        for _ in range(3):
            await caches.cut_oversized()
    assert [line["event"] for line in lines] == ["private_cache_too_large", "private_cache_not_cut"]
    assert lines[1]["log_level"] == "warning" and "Text file busy" in lines[1]["error"]


async def test_what_cannot_be_removed_does_not_keep_the_rest(short_dir: Path) -> None:
    """Its error is reported all the same, and it is tried again."""
    world = World(short_dir)
    for _ in range(3):
        world.files.prepare(KEY)
    first, second = world.files.list_aside()

    class RefusesTheFirst(HamiCoreFiles):
        def remove_aside(self, name: str) -> None:
            if name == first:
                raise Unavailable(f"{name} is busy")
            super().remove_aside(name)

    files = RefusesTheFirst(world.files.library, world.files.directory)
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world)
    with pytest.raises(Unavailable, match="busy"):
        await caches.remove_aside()
    assert world.files.list_aside() == (first,) and second != first


class Counted(HamiCoreFiles):
    """Real files that count how often a cache was prepared; `prepare` waits until `go_on` is set."""

    def __init__(self, files: HamiCoreFiles) -> None:
        super().__init__(files.library, files.directory)
        self.prepared = 0
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def prepare(self, key: ContainerKey) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        super().prepare(key)
        self.prepared += 1


async def test_a_cache_made_ahead_serves_one_start(short_dir: Path) -> None:
    """The first start finds the file that was made when the container was allocated, each later one gets another."""
    world = World(short_dir)
    files = Counted(world.files)
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("private caches", caches.run), name="private caches")
        caches.ahead.add(ContainerKey(WHOLE, "cuda"))
        caches.ahead.add(KEY)
        await poll_until(lambda: caches.ahead.prepared == {KEY}, "the share's file made ahead")
        assert await caches.prepare([KEY]) is None
        assert (files.prepared, world.cache.is_file()) == (1, True)
        world.cache.write_bytes(b"of the first instance")
        assert await caches.prepare([KEY]) is None
        assert (files.prepared, world.cache.read_bytes()) == (2, b"")
        await stop_task(task)


async def test_a_start_that_overtakes_the_file_made_ahead_leaves_none_behind(short_dir: Path) -> None:
    """It waits for its own file, and the one that was being made serves no later start."""
    world = World(short_dir)
    files = Counted(world.files)
    files.go_on.clear()
    caches = PrivateCaches(files=files, allocations=lambda: world.allocations, pods=world)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(forever("private caches", caches.run), name="private caches")
        caches.ahead.add(KEY)
        await poll_until(files.begun.is_set, "the file being made")
        start = group.create_task(caches.prepare([KEY]), name="start")
        await asyncio.sleep(0)  # it has begun to wait
        files.go_on.set()
        assert await start is None
        assert (files.prepared, caches.ahead.prepared) == (2, frozenset())
        assert await caches.prepare([KEY]) is None
        assert files.prepared == 3
        await stop_task(task)


async def test_a_claims_container_that_starts_again_finds_an_empty_file(tmp_path: Path) -> None:
    """The one that runs keeps its own, which the agent goes on reading; also over a restart of the agent."""
    world = World(tmp_path)
    running: dict[ContainerKey, str] = {}
    cycles = 0

    def running_claims() -> dict[ContainerKey, str]:
        nonlocal cycles
        cycles += 1
        return running

    async def agent_lives() -> None:
        nonlocal cycles
        cycles = 0
        caches = PrivateCaches(
            files=world.files,
            allocations=lambda: world.allocations,
            pods=world,
            running_claims=running_claims,
            cleanup_period_s=0.005,
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forever("private caches", caches.run), name="private caches")
            await poll_until(lambda: cycles >= 3, "two whole cycles")
            await stop_task(task)

    world.files.prepare(KEY)
    first = world.cache.stat().st_ino
    world.cache.write_bytes(region_file(slots=((41, 0, 7),)))
    running[KEY] = "a" * 64
    for _ in range(2):
        await agent_lives()
        with world.files.opened_region(KEY) as region:
            assert region is not None and world.cache.stat().st_size == 0
        kept = world.cache.with_name(f"cuda.cache.{running[KEY]}")
        assert sorted(world.cache.parent.iterdir()) == [world.cache, kept] and kept.stat().st_ino == first
    second = world.cache.stat().st_ino
    running[KEY] = "b" * 64
    await agent_lives()
    kept = world.cache.with_name(f"cuda.cache.{running[KEY]}")
    assert sorted(world.cache.parent.iterdir()) == [world.cache, kept] and kept.stat().st_ino == second
    with world.files.opened_region(KEY) as region:
        assert region is None, "that of the second start, in which no process has called cuInit"
