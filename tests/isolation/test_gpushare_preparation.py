"""The files of isolation gpushare, made before a start and shortened meanwhile; allocations are the test's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.gpushare import files as files_module
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import USAGE_BYTES, USAGE_NAME, read_paid
from gpushare_agent.agent.isolation.gpushare.preparation import Preparation
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.names import PodUid
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.isolation.support_gpushare import KEY, OTHER, UID
from tests.isolation.support_gpushare import World as FilesWorld
from tests.isolation.support_library import fake_library
from tests.isolation.support_tenant import SlowFiles
from tests.support_core import allocation, container, ids, pod

WHOLE = PodUid("44444444-2222-3333-4444-555555555555")


class Files(GpushareFiles):
    """Real files that count how often they were prepared; `prepare` and `cut` wait until `go_on` is set."""

    prepared = 0
    cut_error: Unavailable | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begun: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()

    def prepare(self, key: ContainerKey) -> None:
        self.begun.add("prepare")
        assert self.go_on.wait(60)
        super().prepare(key)
        self.prepared += 1

    def cut(self, key: ContainerKey) -> None:
        self.begun.add("cut")
        assert self.go_on.wait(60)
        if self.cut_error is not None:
            raise self.cut_error
        super().cut(key)


class World(FilesWorld):
    """A share, and a whole GPU."""

    files: Files

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Files)
        share = pod("share", container(name="cuda", cores=30, blocks=8), uid=UID)
        whole = pod("whole", container(name="cuda", cores=100), uid=WHOLE)
        own = allocation(share, "cuda", ids(0, range(30)), ids(0, range(8)))
        all_of_it = allocation(whole, "cuda", ids(1, range(100)), [])
        self.allocations: dict[ContainerKey, Allocation] = {own.key: own, all_of_it.key: all_of_it}
        self.preparation = Preparation(self.files, lambda: self.allocations, cut_period_s=0.005)

    def grow(self, key: ContainerKey = KEY) -> None:
        """As the tenant does."""
        with self.usage(key).open("ab") as file:
            file.write(bytes(1 << 20))

    def running(self) -> AbstractAsyncContextManager[None]:
        """The service runs in the block."""
        return running(self.preparation.run)


@pytest.fixture
def world(short_dir: Path) -> Iterator[World]:
    made = World(short_dir)
    yield made
    made.files.go_on.set()


async def test_a_share_that_is_about_to_start_finds_its_files(world: World) -> None:
    """A whole GPU gets none, and neither does what holds nothing. Whatever else lies there hides it from no later agent."""
    await world.preparation.check()
    unknown = ContainerKey(PodUid("33333333-2222-3333-4444-555555555555"), "cuda")
    assert await world.preparation.prepare([KEY, ContainerKey(WHOLE, "cuda"), unknown]) is None
    assert world.usage().is_file()
    (world.files.containers / UID / "a-file").touch()
    assert world.files.list_pods() == (UID,)


async def test_a_library_that_was_replaced_is_installed_by_the_next_check(world: World) -> None:
    """And one that was not is not read again."""
    library = world.files.library
    await world.preparation.check()
    installed = library.directory / "libgpushare.so"
    installed.unlink()
    await world.preparation.check()
    assert not installed.exists()
    newer = library.source.with_name("newer.so")
    newer.write_bytes(library.source.read_bytes() + b"newer")
    newer.rename(library.source)
    await world.preparation.check()
    assert installed.read_bytes() == library.source.read_bytes()


async def test_what_cannot_be_prepared_is_refused_with_the_reason(world: World) -> None:
    """The container does not start without its limits, and the kubelet tries again."""
    source = world.files.library.source
    source.unlink()
    with capture_logs() as lines:
        refused = await world.preparation.prepare([KEY])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_READY
    assert str(source) in refused.detail and "tries again" in refused.detail
    assert [line["event"] for line in lines] == ["private_cache_not_prepared"]
    fake_library(source)
    assert await world.preparation.prepare([KEY]) is None


async def test_a_disk_that_hangs_is_a_refusal_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that hangs keeps nothing from ending."""
    monkeypatch.setattr("gpushare_agent.agent.isolation.gpushare.preparation.FILES_TIMEOUT_S", 0.05)
    world.files.go_on.clear()
    try:
        with capture_logs():
            refused = await world.preparation.prepare([KEY])
        assert isinstance(refused, Refused) and "no answer" in refused.detail
    finally:
        world.files.go_on.set()
        await poll_until(lambda: world.files.prepared == 1, "the thread's end")


async def test_no_start_waits_for_a_file_that_is_shortened(world: World) -> None:
    world.allocations[OTHER] = replace(world.allocations[KEY], key=OTHER)
    assert await world.preparation.prepare([OTHER]) is None
    world.grow(OTHER)
    world.files.go_on.clear()
    async with world.running():
        await poll_until(lambda: "cut" in world.files.begun, "a cut under way")
        async with asyncio.TaskGroup() as group:
            start = group.create_task(world.preparation.prepare([KEY]), name="start")
            await asyncio.sleep(0)
            world.files.go_on.set()
        assert start.result() is None
        await poll_until(lambda: not world.files.oversized([OTHER]), "it is short")
    assert {one.launches for one in read_paid(world.files.usage_head(OTHER, 1))} == {0}


async def test_nothing_that_others_wait_for_waits_for_a_file_that_is_shortened(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five other containers start, its own starts again, its pod's directory is removed: a new file has its name each time.
    What a thread of its own removes goes on when the kernel has done its work."""
    others = [ContainerKey(PodUid(f"{number}" * 8 + UID[8:]), "cuda") for number in range(5, 10)]
    for key in (OTHER, *others):
        world.allocations[key] = replace(world.allocations[KEY], key=key)
    vdevice = VDeviceFiles(world.files.containers)
    assert await world.preparation.prepare([OTHER]) is None
    world.grow(OTHER)
    usage = world.usage(OTHER)
    former = usage.stat().st_ino
    with SlowFiles(monkeypatch) as slow:
        async with world.running():
            await poll_until(lambda: bool(slow.slow), "a file being shortened")
            for key in others:
                assert await world.preparation.prepare([key]) is None
            assert await world.preparation.prepare([OTHER]) is None
            assert usage.stat().st_ino != former and world.files.usage_head(OTHER, 1)
            assert vdevice.remove_pod(OTHER.pod_uid)
            assert await world.preparation.prepare([OTHER]) is None
            assert slow.waited == []
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(remove_all, vdevice), name="removal")
                await poll_until(lambda: slow.waited == [f"unlink {USAGE_NAME}"], "the removal of the file")
                slow.release()
    assert vdevice.list_aside() == () and not slow.waited[1:]


async def test_a_file_that_takes_long_to_shorten_delays_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tenant could else keep the agent busy while another fills the disk."""
    for key in (KEY, OTHER):
        world.allocations[key] = replace(world.allocations[KEY], key=key)
        assert await world.preparation.prepare([key]) is None
    with SlowFiles(monkeypatch, most=1) as slow:
        async with world.running():
            os.truncate(world.usage(OTHER), USAGE_BYTES + 2)
            await poll_until(lambda: bool(slow.slow), "a file being shortened")
            for more in (1 << 20, 1 << 21):
                os.truncate(world.usage(), USAGE_BYTES + more)
                await poll_until(lambda: not world.files.oversized([KEY]), "the other is short")
            assert world.files.oversized([OTHER])
            slow.release()
            await poll_until(lambda: not world.files.oversized([OTHER]), "it is short")


def remove_all(vdevice: VDeviceFiles) -> None:
    for name in vdevice.list_aside():
        vdevice.remove_aside(name)


async def test_a_file_whose_size_is_seen_by_who_reads_it_is_not_looked_at_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that grew is, once it cannot be read any more; and so is one that nobody reads."""
    for key in (KEY, OTHER):
        world.allocations[key] = replace(world.allocations[KEY], key=key)
        assert await world.preparation.prepare([key]) is None
    before = {KEY: (1, world.files.usage_head(KEY, 1))}
    for _ in range(2):
        assert world.files.changed_heads(before) == {}
    assert world.files.unseen(world.allocations) == [ContainerKey(WHOLE, "cuda"), OTHER]
    with monkeypatch.context() as later:
        later.setattr(files_module, "SEEN_FOR_S", 0.0)
        assert world.files.unseen([KEY]) == [KEY]  # the reading of one may hang since
    os.truncate(world.usage(), USAGE_BYTES + 1)
    monkeypatch.setattr(files_module, "_SIZE_PERIOD_S", 0.0)
    assert world.files.changed_heads(before).keys() == {KEY}
    await world.preparation.cut_oversized()
    assert world.usage().stat().st_size == USAGE_BYTES and world.files.changed_heads(before) == {}


async def test_a_file_that_grows_again_and_again_is_logged_once(world: World) -> None:
    """Its tenant decides how often."""
    assert await world.preparation.prepare([KEY]) is None
    with capture_logs() as lines:
        for _ in range(3):
            world.grow()
            await world.preparation.cut_oversized()
            assert world.usage().stat().st_size == USAGE_BYTES
    assert [(line["event"], line["container"]) for line in lines] == [("private_cache_too_large", "cuda")]


async def test_a_file_that_cannot_be_shortened_is_warned_of_once(world: World) -> None:
    """Its tenant keeps it so, and nothing else bounds what it takes of the disk."""
    assert await world.preparation.prepare([KEY]) is None
    world.grow()
    world.files.cut_error = Unavailable("usage cannot be used: Text file busy")
    with capture_logs() as lines:
        for _ in range(3):
            await world.preparation.cut_oversized()
    assert [line["event"] for line in lines] == ["private_cache_too_large", "private_cache_not_cut"]
    assert lines[1]["log_level"] == "warning" and "Text file busy" in lines[1]["error"]


async def test_files_made_ahead_serve_one_start(world: World) -> None:
    """The first start finds those that were made when the container was allocated, each later one gets others."""
    ahead = world.preparation.ahead
    async with world.running():
        ahead.add(ContainerKey(WHOLE, "cuda"))
        ahead.add(KEY)
        await poll_until(lambda: ahead.prepared == {KEY}, "the share's files made ahead")
        first = world.usage().stat().st_ino
        assert await world.preparation.prepare([KEY]) is None
        assert (world.files.prepared, world.usage().stat().st_ino) == (1, first)
        assert await world.preparation.prepare([KEY]) is None
        assert world.files.prepared == 2 and world.usage().stat().st_ino != first
