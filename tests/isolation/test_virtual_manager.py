"""The virtual manager over real files and sockets and trees of files for cgroups and /proc; store and IDs are the test's."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpclib import GRPCError, Status
from msgspec.structs import replace

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.isolation.ahead import NOT_STARTED_FOR_S
from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.tenant_files import ASIDE_PREFIX
from gpushare_agent.agent.isolation.vdevice import virtual_manager
from gpushare_agent.agent.isolation.vdevice.container_processes import ContainerProcesses, Processes
from gpushare_agent.agent.isolation.vdevice.files import BoundSocket, VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.reconcile import DesiredDirectory, Directories, VDeviceConfigs
from gpushare_agent.agent.isolation.vdevice.virtual_manager import Intervals, VirtualManager, build_virtual_manager
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.formats.vdevice import decode_config, decode_pids
from gpushare_agent.core.kit.sockets import FileIdentity, is_served
from gpushare_agent.core.kit.supervision import stop_task
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.settings.settings import Settings
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.isolation.support_host import host_of
from tests.isolation.support_vdevice import ID, KEY, OTHER_ID, POD, register, share_config
from tests.support_core import NAMES, allocation, container, ids, inventory, pod
from tests.support_deadline import DEADLINE_S
from tests.support_node import node_of


class HookedFiles(VDeviceFiles):
    """Calls `before_removal` or `before_binding` in the thread that is about to do that to a socket; `step_held` keeps the
    disk busy."""

    before_removal: Callable[[ContainerKey], None] | None = None
    before_binding: Callable[[ContainerKey], None] | None = None
    bound: list[BoundSocket]
    listings_of_pods = 0
    listings_of_aside = 0
    aside_error: Unavailable | None = None
    has_config: bool | None = None
    """Whether the last `write` had one."""

    def write(self, key: ContainerKey, *, pids: Collection[int] | None = None, config: bytes | None = None) -> None:
        self.has_config = config is not None
        super().write(key, pids=pids, config=config)

    def pod_names(self) -> tuple[PodUid, ...]:
        self.listings_of_pods += 1
        return super().pod_names()

    def list_aside(self) -> tuple[str, ...]:
        self.listings_of_aside += 1
        error, self.aside_error = self.aside_error, None
        if error is not None:
            raise error
        return super().list_aside()

    def step_held(self) -> AbstractContextManager[None]:
        """No file is touched meanwhile: whoever tries waits for the end of the block."""
        return self._step("holding", self.root)

    def remove_socket(self, key: ContainerKey, identity: FileIdentity) -> None:
        if self.before_removal is not None:
            self.before_removal(key)
        super().remove_socket(key, identity)

    def bind_socket(self, key: ContainerKey) -> BoundSocket:
        if self.before_binding is not None:
            self.before_binding(key)
        self.bound.append(made := super().bind_socket(key))
        return made


class HookedProcesses(ContainerProcesses):
    """Awaits `after_read` before a list that was read is returned; `on_read_ids` is called when IDs are asked for;
    `compared` is what `changed` was last asked for."""

    after_read: Callable[[], Awaitable[None]] | None = None
    compared: Iterable[ContainerKey] | None = None
    on_read_ids: Callable[[], None] = lambda: None

    async def read_ids(self, keys: Iterable[ContainerKey] = ()) -> None:
        self.on_read_ids()
        await super().read_ids(keys)

    async def changed(self, keys: Iterable[ContainerKey] | None = None) -> set[ContainerKey]:
        self.compared = keys
        return await super().changed(keys)

    async def read(self, wanted: Collection[ContainerKey]) -> dict[ContainerKey, Processes]:
        found = await super().read(wanted)
        if self.after_read is not None:
            await self.after_read()
        return found


class World:
    """What the manager sees: pods, allocations, IDs and cgroups, all changed by the test."""

    def __init__(self, directory: Path) -> None:
        self.files = HookedFiles(directory / "vm")
        self.files.bound = []
        self.pod = pod("share", container(name="cuda", cores=30, blocks=8), uid=POD)
        self.pods: dict[str, Pod] = {POD: self.pod}
        share = allocation(self.pod, "cuda", ids(0, range(30)), ids(0, range(8)))
        self.allocations: dict[ContainerKey, Allocation] = {share.key: share}
        self.known: dict[ContainerKey, str] | None = {KEY: ID}
        self.claims: dict[ContainerKey, dict[ContainerKey, str]] = {}
        self.module: KernelModule | None = None
        self.is_synced = True
        self.cgroup_root, self.proc = directory / "cgroup", directory / "proc"
        me = self.proc / str(os.getpid())  # the test itself registers: it is the container's process
        me.mkdir(parents=True)
        (me / "cgroup").write_text(f"0::/kubepods/burstable/pod{POD}/{ID}\n")
        self.now = 0.0
        self.set_pids(ID, 11, 7)
        self.cgroups = Cgroups(self.cgroup_root, self.proc)
        self.processes = self._new_processes()

    def _new_processes(self) -> HookedProcesses:
        return HookedProcesses(self, self.cgroups, clock=lambda: self.now, module=self.module, sharers=self.sharers)

    def set_namespace_pids(self, host_pid: int, *pids: int) -> None:
        directory = self.proc / str(host_pid)
        directory.mkdir(exist_ok=True)
        (directory / "status").write_text(
            f"Name:\tx\nVmSize:\t1 kB\nNSpid:\t{host_pid}\t" + "\t".join(map(str, pids)) + "\n"
        )

    def set_pids(self, container_id: str, *pids: int) -> None:
        place = self.cgroup_root / "kubepods" / "burstable" / f"pod{POD}" / container_id
        place.mkdir(parents=True, exist_ok=True)
        (self.cgroup_root / "cgroup.controllers").touch()
        (place / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def get(self, uid: PodUid) -> Pod | None:
        return self.pods.get(uid)

    def shares_of(self, uid: PodUid) -> Mapping[ContainerKey, Allocation]:
        return {key: one for key, one in self.allocations.items() if key.pod_uid == uid}

    def sharers(self, key: ContainerKey) -> Mapping[ContainerKey, str] | None:
        return self.claims.get(key)

    async def running(self, uids: Collection[PodUid] | None = None) -> Mapping[ContainerKey, str]:
        if self.known is None:
            raise Unavailable("nobody knows")
        return self.known

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        return next((key for key, known in (await self.running()).items() if known == container_id), None)

    def manager(self, intervals: Intervals | None = None, clock: Callable[[], float] | None = None) -> VirtualManager:
        self.processes = self._new_processes()
        return VirtualManager(
            files=self.files,
            allocations=lambda: self.allocations,
            pods=self,
            configs=VDeviceConfigs(
                inventory=inventory,
                driver_version=lambda: "535.104.05",
                names=NAMES,
                on_problem=lambda *_: None,
            ),
            processes=self.processes,
            registered=lambda _: None,
            clock=clock or (lambda: self.now),
            intervals=intervals,
        )

    async def poll(self, manager: VirtualManager) -> None:
        """With the containers' IDs of now."""
        await self.processes.read_ids(self.allocations)
        await manager.poll()

    @property
    def directory(self) -> Path:
        return self.files.path(KEY)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(decode_pids((self.directory / "pids.config").read_bytes()))

    @property
    def limit(self) -> int:
        return decode_config((self.directory / "vcuda.config").read_bytes()).limit


@pytest.fixture
def world(short_dir: Path) -> World:
    return World(short_dir)


@asynccontextmanager
async def serving(world: World, manager: VirtualManager | None = None) -> AsyncIterator[VirtualManager]:
    """A manager whose servers are stopped at the end, as its `run` does when it is cancelled."""
    manager = manager or world.manager()
    try:
        yield manager
    finally:
        async with running(manager.run):
            await asyncio.sleep(0)


async def test_a_container_about_to_start_finds_no_process_of_its_earlier_instance(world: World) -> None:
    """prepare writes an empty list, also where the poll under way has read the old one."""
    async with serving(world) as manager:
        await world.poll(manager)
        assert world.pids == (7, 11)
        assert await manager.prepare([KEY]) is None
        assert world.pids == ()
        await world.poll(manager)  # the ID that is reported is still the old one
        assert world.pids == ()
        world.known = {KEY: OTHER_ID}
        world.set_pids(OTHER_ID, 99)
        await world.poll(manager)
        assert world.pids == (99,)


async def test_a_list_read_before_a_restart_is_not_written_after_it(world: World) -> None:
    """The container is prepared again while a round reads the cgroup of its last instance."""
    async with serving(world) as manager:
        await world.processes.read_ids()

        async def prepare_again() -> None:
            assert await manager.prepare([KEY]) is None

        world.processes.after_read = prepare_again
        await manager.poll()
        assert world.pids == ()


async def test_until_its_id_is_known_a_container_has_the_processes_of_its_pod(world: World) -> None:
    """Less those of another container that is known: too many rather than too few limit a share."""
    other = ContainerKey(POD, "other")
    world.allocations[other] = replace(world.allocations[KEY], key=other)
    world.set_pids(OTHER_ID, 21)
    world.known = {other: OTHER_ID}
    world.set_pids("ef" * 32, 3)  # the pod's sandbox
    async with serving(world) as manager:
        assert await manager.prepare([KEY]) is None
        await world.poll(manager)
        assert world.pids == (3, 7, 11)
        world.known[KEY] = ID
        await world.poll(manager)
        assert world.pids == (7, 11)


async def test_an_id_that_stays_unknown_is_not_needed(world: World) -> None:
    """A new agent leaves the list of before for five seconds; then the pod's processes are nearer to the truth."""
    world.known = None
    world.files.prepare(KEY)
    world.files.write(KEY, pids=[1, 2])
    async with serving(world) as manager:
        await manager.poll()
        world.now = 4.9
        await manager.poll()
        assert world.pids == (1, 2)
        world.now = 5.0
        await manager.poll()
        assert world.pids == (7, 11)


async def test_a_container_prepared_ahead_starts_without_waiting_for_the_files(world: World) -> None:
    """Everything is there from its allocation on, and its pod's other processes are not taken for its own until it starts.
    Each later start is prepared again."""
    world.known = {}
    manager = world.manager(clock=time.monotonic)
    async with running(manager.run):
        manager.ahead.add(KEY)
        await poll_until(lambda: manager.ahead.prepared == {KEY}, "the container prepared ahead")
        await manager.poll()
        assert world.pids == ()
        with world.files.step_held():
            assert await manager.prepare([KEY]) is None
        assert manager.ahead.prepared == frozenset()
        await poll_until(lambda: world.pids == (7, 11), "the processes of the pod")
        shutil.rmtree(world.directory)
        assert await manager.prepare([KEY]) is None
        assert world.pids == ()


async def test_a_container_prepared_ahead_that_was_changed_since_is_prepared_again(world: World) -> None:
    """As one whose share got another size before it started."""
    manager = world.manager(clock=time.monotonic)
    async with running(manager.run):
        manager.ahead.add(KEY)
        await poll_until(lambda: manager.ahead.prepared == {KEY}, "the container prepared ahead")
        world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
        assert await manager.prepare([KEY]) is None
        assert (world.limit, world.pids) == (60, ())


async def test_a_container_just_prepared_is_polled_more_often(world: World) -> None:
    """Its first processes are in its list, and its new limit is, long before the next period ends, which here it never
    does."""
    world.set_pids(ID)
    intervals = Intervals(poll_s=3600.0, recent_poll_s=0.001, recent_for_s=3600.0, ids_s=0.001)
    manager = world.manager(intervals=intervals, clock=time.monotonic)
    async with running(manager.run):
        assert await manager.prepare([KEY]) is None
        world.set_pids(ID, 77)
        await poll_until(lambda: world.pids == (77,) and world.processes.is_known(KEY), "the new process in the list")
        world.set_pids(ID, 78)
        await poll_until(lambda: world.pids == (78,), "a process that was found by the container's ID")
        world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
        manager.changed(POD)
        await poll_until(lambda: world.limit == 60, "the new limit")


@pytest.mark.parametrize(
    ("age_s", "took_s", "pause_s"), [(0.0, 0.0, 0.2), (0.8, 0.0, 0.4), (4.0, 0.0, 0.5), (4.0, 0.3, 1.2)]
)
def test_polls_of_recent_containers_become_rarer_and_have_a_fifth_of_the_time(
    age_s: float, took_s: float, pause_s: float
) -> None:
    assert Intervals().recent_pause_s(age_s, took_s) == pytest.approx(pause_s)


async def test_a_container_that_ended_soon_is_not_polled_as_a_recent_one(world: World) -> None:
    intervals = Intervals(poll_s=3600.0, recent_poll_s=0.001, recent_poll_max_s=0.001, recent_for_s=3600.0)
    manager = world.manager(intervals=intervals, clock=time.monotonic)
    async with running(manager.run):
        assert await manager.prepare([KEY]) is None
        await poll_until(lambda: world.pids == (7, 11), "a poll of it")
        world.allocations.clear()
        await poll_until(lambda: not manager._prepared_at, "the end of its polls")


@pytest.mark.parametrize(("allowed", "listed"), [((), ()), (("vcuda",), (7, 11))])
async def test_processes_of_recent_containers_are_followed_where_an_isolation_in_use_reads_them(
    world: World, allowed: tuple[str, ...], listed: tuple[int, ...]
) -> None:
    """Else the next poll of all lists them, which here never comes."""
    node = node_of(settings=Settings(node_name="node", isolation="gpushare", isolations_allowed=allowed))
    chosen = build_virtual_manager(host_of(node, cgroups=Cgroups()), None)._intervals
    manager = world.manager(replace(chosen, poll_s=3600.0, ids_s=3600.0, recent_poll_s=0.001), clock=time.monotonic)
    async with running(manager.run):
        await poll_until((world.directory / "vcuda.sock").exists, "the first poll")
        assert await manager.prepare([KEY]) is None
        await poll_until(lambda: world.pids or not manager._prepared_at, "the end of its polls")
        assert world.pids == listed


async def test_the_id_of_a_container_is_not_asked_for_before_it_can_have_started(world: World) -> None:
    intervals = Intervals(recent_poll_s=0.001, recent_poll_max_s=0.001, ids_s=3600.0)
    manager = world.manager(intervals=intervals, clock=time.monotonic)
    asked = list[object]()
    world.processes.on_read_ids = lambda: asked.append(None)
    async with running(manager.run):
        assert await manager.prepare([KEY]) is None
        await poll_until(lambda: world.pids == (7, 11), "a poll of the container")
    assert not asked


async def test_a_new_agent_leaves_what_it_does_not_know_yet_as_it_is(world: World) -> None:
    """The processes and the elastic limit of a running container outlive an agent whose pods and IDs come later."""
    world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
    async with serving(world) as manager:
        await world.poll(manager)
    assert (world.pids, world.limit) == ((7, 11), 60)
    known, world.known = world.known, None
    kept = world.pods.pop(POD)
    async with serving(world) as manager:
        await world.poll(manager)
        assert (world.pids, world.limit) == ((7, 11), 60)
        with pytest.raises(GRPCError, match="are not known yet") as refused:
            await register(world.directory / "vcuda.sock", name="cuda")
        assert refused.value.status is Status.UNAVAILABLE
        world.known, world.pods[POD] = known, replace(kept, annotations={})
        world.set_pids(ID, 5)
        await world.poll(manager)
        assert (world.pids, world.limit) == ((5,), 0)


@pytest.mark.parametrize(
    ("name", "content"), [("pids.config", b"\1\0\0"), ("vcuda.config", b"short"), ("vcuda.config", b"\377" * 8240)]
)
async def test_a_torn_file_of_an_earlier_agent_is_written_anew(world: World, name: str, content: bytes) -> None:
    """Nothing known yet, but what lies there cannot be right."""
    world.known = None
    world.pods.clear()
    world.files.prepare(KEY)
    (world.directory / name).write_bytes(content)
    async with serving(world) as manager:
        await manager.poll()
        assert world.pids == ()
        assert decode_config((world.directory / "vcuda.config").read_bytes()).utilization == 30


@pytest.mark.parametrize("name", ["vcuda.config", "pids.config", "vcuda.sock", ""])
async def test_what_others_removed_is_back_after_a_round(world: World, name: str) -> None:
    """Each of the three, and the directory as a whole: that is for the next container of this name."""
    async with serving(world) as manager:
        await world.poll(manager)
        if name:
            (world.directory / name).unlink()
        else:
            world.files.remove_pod(POD)
        await manager.poll()
        assert (world.directory / name).exists()
        assert world.pids == (7, 11)
        await register(world.directory / "vcuda.sock", name="cuda")


async def test_unchanged_files_are_not_written_again(world: World) -> None:
    """Neither at a second poll nor at a registration: their inodes stay. Other processes make one file again, and the other
    is not even compared, which takes a tenth of a round."""
    async with serving(world) as manager:
        await world.poll(manager)
        before = world.files.stamps(KEY)
        await manager.poll()
        await register(world.directory / "vcuda.sock", name="cuda")
        assert world.files.stamps(KEY) == before
        world.set_pids(ID, 11, 7, 12)
        await manager.poll()
        assert (world.pids, world.files.has_config) == ((7, 11, 12), False)
        world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
        await manager.poll()
        assert (world.limit, world.files.has_config) == (60, True)


async def test_many_containers_are_written_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is bounded in time of its own: at a restarted agent 1,500 together took longer than the bound."""
    monkeypatch.setattr(virtual_manager, "WRITTEN_AT_ONCE", 2)
    keys = [KEY, *more_containers(world, 4)]
    bound, written = list[ContainerKey](), list[int]()
    world.files.before_binding = bound.append
    async with serving(world) as manager:
        in_thread = manager.in_thread

        async def noted(blocking: Callable[[], object], what: str) -> object:
            answer = await in_thread(blocking, what)
            if what.startswith("writing "):
                written.append(len(bound))
            return answer

        monkeypatch.setattr(manager, "in_thread", noted)
        await world.poll(manager)
        assert written == [2, 4, 5], "the sockets of a part are bound with its files"
        assert sorted(bound) == sorted(keys)


async def test_a_share_that_is_released_is_no_longer_served(world: World) -> None:
    """The socket goes with the allocation, the directory with the pod; one with something that is not ours stays."""
    foreign = world.files.root / ("0" * 32) / "volumes" / "data"
    async with serving(world) as manager:
        await manager.poll()
        foreign.parent.mkdir(parents=True)
        foreign.write_text("precious")
        world.allocations.clear()
        await manager.poll()
        assert not (world.directory / "vcuda.sock").exists()
        await manager.remove_stale()
        assert world.directory.exists()
        world.pods.clear()
        await manager.remove_stale()
        assert not world.directory.parent.exists() and foreign.exists()


async def test_the_socket_of_a_pod_that_is_gone_goes_with_its_directory(world: World) -> None:
    """It is served no more at once; no thread is asked to remove what is removed as a whole soon."""
    removed = list[ContainerKey]()
    world.files.before_removal = removed.append
    async with serving(world) as manager:
        await manager.poll()
        world.allocations.clear()
        world.pods.clear()
        world.is_synced = False  # so far it may be a pod that is still to be listed
        assert not manager._is_stale(POD)
        world.is_synced = True
        await manager.poll()
        assert not is_served(world.directory / "vcuda.sock") and not removed
        await manager.remove_stale()
        assert not world.directory.parent.exists()


async def test_one_container_that_cannot_be_kept_does_not_keep_others_from_theirs(world: World) -> None:
    """What lies in its place is deeper than the agent ever builds and stays; its start is refused with the reason."""
    other = pod("other", container(name="cuda", cores=30, blocks=8), uid="0" * 32)
    share = allocation(other, "cuda", ids(1, range(30)), ids(1, range(8)))
    world.allocations[share.key] = share
    (world.files.root / other.uid / "cuda" / "vcuda.config" / "/".join("d" * 12)).mkdir(parents=True)
    async with serving(world) as manager:
        await manager.poll()
        assert (world.directory / "vcuda.sock").is_socket()
        refused = await manager.prepare([share.key])
        assert refused is not None and "nested deeper" in refused.detail


async def test_a_whole_tree_that_cannot_be_written_refuses_the_start_with_the_reason(world: World) -> None:
    """A plain file lies where the root of all directories should be."""
    world.files.root.write_text("")
    async with serving(world) as manager:
        refused = await manager.prepare([KEY])
        assert refused is not None
        assert str(world.files.root) in refused.detail and "tries again" in refused.detail
        await manager.poll()  # the round reports it and goes on
        world.files.root.unlink()
        await manager.poll()
        assert (world.directory / "vcuda.sock").is_socket()


class Reported:
    """A runtime, with the container of each ID that it knows; the first of a container is the one that runs."""

    def __init__(self, owners: Mapping[str, ContainerKey] | None = None, error: Unavailable | None = None) -> None:
        self.owners, self.error = owners or {}, error

    async def running(self, of_pod: PodUid | None = None) -> dict[ContainerKey, str]:
        if self.error is not None:
            raise self.error
        return {key: container_id for container_id, key in reversed(self.owners.items())}

    async def owner_of(self, container_id: str) -> ContainerKey:
        if self.error is not None:
            raise self.error
        if container_id not in self.owners:
            raise NotFound("no such container")
        return self.owners[container_id]


@pytest.fixture
def store() -> PodStore:
    """With a pod whose status has the ID of its container."""
    made = PodStore()
    made.upsert(pod("share", uid=POD, container_ids={"cuda": ID}))
    return made


async def test_the_runtime_is_believed_before_the_statuses(store: PodStore) -> None:
    """A restarted container's new ID is there before the kubelet has written it; ended ones do not count."""
    found = ContainerIds(Reported({OTHER_ID: KEY, ID: KEY}), store)
    assert await found.running() == {KEY: OTHER_ID}
    assert await found.owner_of(ID) == KEY
    assert await found.owner_of("00" * 32) is None


async def test_without_a_runtime_the_pods_statuses_have_the_ids(store: PodStore) -> None:
    """An ID in no status is not refused for ever but asked for again: the kubelet writes it soon."""
    found = ContainerIds(Reported(error=Unavailable("no socket there")), store)
    assert await found.running() == {KEY: ID}
    assert await found.owner_of(ID) == KEY
    with pytest.raises(Unavailable, match="not known yet"):
        await found.owner_of(OTHER_ID)


def more_containers(world: World, count: int) -> list[ContainerKey]:
    """Shares of pods of their own, next to the first."""
    keys = []
    for number in range(count):
        owner = pod(f"p{number}", container(name="cuda", cores=1, blocks=1), uid=f"{number:08x}" + POD[8:])
        share = allocation(owner, "cuda", ids(1, range(number, number + 1)), ids(1, range(number, number + 1)))
        world.pods[owner.uid], world.allocations[share.key] = owner, share
        keys.append(share.key)
    return keys


@pytest.mark.parametrize(("version", "pids"), [("570.86.15", (1, 8, 9)), ("535.104.05", (1, 7, 8, 9, 11))])
async def test_under_the_open_kernel_module_the_list_has_the_containers_own_pids(
    world: World, version: str, pids: tuple[int, ...]
) -> None:
    """Those of nested namespaces too; the host's next to them before 570. One that is gone has its host PID."""
    world.module = KernelModule(version=version, is_open=True)
    world.set_namespace_pids(7, 1)
    world.set_namespace_pids(11, 8, 9)
    async with serving(world) as manager:
        await world.poll(manager)
        assert world.pids == pids
        world.set_namespace_pids(7, 99)
        world.set_pids(ID, 7, 12)
        await manager.poll()
        assert world.pids == ((1, 12) if version == "570.86.15" else (1, 7, 12)), "a process keeps its PIDs"


async def test_a_process_whose_cgroup_names_no_container_is_listed_once_it_registered(world: World) -> None:
    """Its PID is the kernel's. Another process that has it later is not taken for it."""
    world.known = None
    own = world.proc / str(os.getpid())
    (own / "cgroup").write_text(f"0::/kubepods/burstable/pod{POD}/nobody-knows-this-name\n")
    (own / "stat").write_text(f"{os.getpid()} (a) b) R {' '.join('0' * 18)} 4711 0\n")
    async with serving(world) as manager:
        assert await manager.prepare([KEY]) is None
        await register(world.directory / "vcuda.sock", name="cuda")
        assert world.pids == (7, 11, os.getpid())  # those of its pod, until its ID is known
        (own / "stat").write_text(f"{os.getpid()} (other) R {' '.join('0' * 18)} 4712 0\n")
        await manager.poll()
        assert world.pids == (7, 11)


async def test_of_many_registrations_at_once_two_are_carried_out(world: World) -> None:
    """The one under way, and one that begins after the last of them came: hostile containers delay nobody."""
    async with serving(world) as manager:
        await world.poll(manager)
        carried_out = 0

        async def count() -> None:
            nonlocal carried_out
            carried_out += 1
            world.now += 1.0

        world.processes.after_read = count
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(manager.refresh(KEY, None))
        assert 1 <= carried_out <= 2
        world.set_pids(ID, 123)
        await manager.refresh(KEY, None)
        assert world.pids == (123,)


async def test_registrations_one_after_the_other_share_refreshes_too(world: World) -> None:
    """At most one begins in each interval, however fast the calls come; also where it fails."""
    manager = world.manager(Intervals(refresh_s=0.05), clock=time.monotonic)
    async with serving(world, manager):
        await world.poll(manager)
        begun, started_at = 0, time.monotonic()

        async def count() -> None:
            nonlocal begun
            begun += 1
            if begun == 3:
                raise Unavailable("the disk does not answer")

        world.processes.after_read = count

        async def call_again_and_again() -> None:
            while begun < 6:
                with suppress(Unavailable):
                    await manager.refresh(KEY, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(call_again_and_again())
        assert time.monotonic() - started_at >= 5 * 0.05


async def test_a_registration_of_the_instance_before_is_refused_for_now(world: World) -> None:
    """It was on its way when the container was prepared again: its processes are not the new one's, nor its ID."""
    async with serving(world) as manager:
        await world.poll(manager)
        assert await manager.prepare([KEY]) is None
        with pytest.raises(Unavailable, match="being restarted"):
            await manager.refresh(KEY, ID)
        assert world.pids == () and not (world.directory / ID).exists()
        world.set_pids(OTHER_ID, 5)
        await manager.refresh(KEY, OTHER_ID)
        assert world.pids == (5,) and (world.directory / OTHER_ID).is_dir()


async def test_what_is_prepared_while_others_are_stopped_is_not_forgotten(world: World) -> None:
    """A round that waits for a stuck peer's connection must not take back what prepare has noted meanwhile."""
    world.known = None
    (gone,) = more_containers(world, 1)
    new = world.allocations.pop(KEY)
    async with serving(world) as manager:
        await manager.poll()
        del world.allocations[gone]

        def allocate_meanwhile(_: ContainerKey) -> None:
            world.allocations[KEY] = new
            world.processes.begin_instance(KEY)

        world.files.before_removal = allocate_meanwhile
        await manager.poll()
        assert world.pids == (7, 11)  # its pod's processes, at once


async def test_after_a_change_only_the_containers_of_that_pod_are_compared(world: World) -> None:
    """The others are compared in the poll of all, as is what nobody told of, and files that another program changed."""
    (other,) = more_containers(world, 1)
    async with serving(world) as manager:
        await manager.poll()
        manager._unsettled.clear()  # whose IDs are not known
        for key in (KEY, other):
            (world.files.path(key) / "vcuda.config").unlink()
        manager.changed(PodUid("ffffffff" + POD[8:]))
        manager.changed(POD)
        await manager._poll_changed(is_of_all=False)
        assert not (world.directory / "vcuda.config").exists()
        world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
        manager.changed(POD)
        await manager._poll_changed(is_of_all=False)
        assert world.limit == 60 and not (world.files.path(other) / "vcuda.config").exists()
        share = world.allocations.pop(KEY)
        manager.changed(POD)
        await manager._poll_changed(is_of_all=False)
        assert not (world.directory / "vcuda.sock").exists()
        assert world.processes.compared == set()  # though it was to be compared again: it has changed in any case
        world.allocations[KEY] = share  # as a pod that is created again under its UID
        manager.changed(POD)
        await manager._poll_changed(is_of_all=False)
        assert is_served(world.directory / "vcuda.sock")
        del world.allocations[KEY], world.allocations[other]
        await manager.poll()
        assert not (world.directory / "vcuda.sock").exists()


async def test_a_container_that_does_not_start_for_long_is_prepared_again_when_it_does(world: World) -> None:
    manager = world.manager()
    async with running(manager.run):
        manager.ahead.add(KEY)
        await poll_until(lambda: manager.ahead.prepared == {KEY}, "the container prepared ahead")
        world.now = NOT_STARTED_FOR_S
        await manager.poll()
        assert manager.ahead.prepared == frozenset()


async def test_servers_whose_sockets_vanished_are_restarted_together(world: World) -> None:
    """Each may have peers that never read, and take half a second to stop."""
    keys = more_containers(world, 12)
    async with serving(world) as manager:
        await manager.poll()
        for key in keys:
            (world.files.path(key) / "vcuda.sock").unlink()
        at_once, loop = [], asyncio.get_running_loop()

        def count(_: ContainerKey) -> None:
            at_once.append(sum(task.get_name().startswith("stop ") for task in asyncio.all_tasks(loop)))

        world.files.before_removal = count
        await manager.poll()
        assert at_once[0] == len(keys)
        world.files.before_removal = None
        assert all((world.files.path(key) / "vcuda.sock").is_socket() for key in keys)


async def test_a_disk_that_hangs_does_not_delay_the_end(world: World) -> None:
    """The sockets' files stay; the next start replaces them."""
    more_containers(world, 20)
    manager = world.manager()
    is_over, loop_thread = threading.Event(), threading.current_thread()

    def hang(_: ContainerKey) -> None:
        if threading.current_thread() is not loop_thread:  # there a server that was still starting removes its socket
            is_over.wait()

    world.files.before_removal = hang
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(manager.run(), name="virtual manager")
            await poll_until((world.directory / "vcuda.sock").exists, "the sockets")
            async with asyncio.timeout(4):  # one call to a disk that hangs alone may take five
                await stop_task(task)
    finally:
        is_over.set()


async def test_processes_are_followed_between_two_polls_of_everything(world: World) -> None:
    """A new process is listed, and a container that ends and starts again is, without a poll of everything."""
    intervals = Intervals(poll_s=0.01, settled_poll_s=0.01, ids_s=0.01, polls_of_all=1_000_000)
    manager = world.manager(intervals, clock=time.monotonic)
    async with running(manager.run):
        listed = world.directory / "pids.config"
        await poll_until(lambda: listed.exists() and world.pids == (7, 11), "the first list")
        world.set_pids(ID, 11, 7, 12)
        await poll_until(lambda: world.pids == (7, 11, 12), "the new process")
        world.known = {KEY: OTHER_ID}
        world.set_pids(OTHER_ID, 30)
        shutil.rmtree(world.cgroup_root / "kubepods" / "burstable" / f"pod{POD}" / ID)
        await poll_until(lambda: world.pids == (30,), "the container's next instance")


@pytest.mark.parametrize(
    ("is_told", "intervals"),
    [
        (True, Intervals(poll_s=0.01, settled_poll_s=3600.0, polls_of_all=1_000_000)),
        (False, Intervals(poll_s=0.001, settled_poll_s=0.001)),
    ],
)
async def test_a_change_is_polled_at_once_or_found_by_a_poll_of_all(
    world: World, is_told: bool, intervals: Intervals
) -> None:
    """A new limit of the pod is written, and a container without an allocation loses its socket."""
    manager = world.manager(intervals, clock=time.monotonic)
    socket = world.directory / "vcuda.sock"
    async with running(manager.run):
        await poll_until(socket.exists, "the socket")
        world.pods[POD] = replace(world.pod, annotations={CORE_LIMIT_ANNOTATION: "60"})
        if is_told:
            manager.changed()
        await poll_until(lambda: world.limit == 60, "the new limit")
        world.allocations.clear()
        if is_told:
            manager.changed()
        await poll_until(lambda: not socket.exists(), "the end of the server")


async def test_what_was_put_aside_is_removed_and_looked_for_after_that_alone(world: World) -> None:
    """At the agent's start, even where the first listing fails, after a start of a container and after a pod's end."""
    files, aside = world.files, world.files.root / POD / f"{ASIDE_PREFIX}0"
    aside.mkdir(parents=True)
    files.aside_error = Unavailable("the disk")
    intervals = Intervals(poll_s=0.001, settled_poll_s=0.001, cleanup_s=0.001, settled_cleanup_s=3600.0)
    manager = world.manager(intervals, clock=time.monotonic)

    async def rest() -> None:
        first = files.listings_of_pods
        await poll_until(lambda: files.listings_of_pods > first + 20, "further polls")

    async with running(manager.run):
        await poll_until(lambda: not aside.exists() and (world.directory / "vcuda.sock").exists(), "the removal")
        await rest()
        assert files.listings_of_aside <= 3
        aside.mkdir()
        assert await manager.prepare([KEY]) is None
        await poll_until(lambda: not aside.exists(), "the removal after a start")
        await rest()
        world.allocations.clear()
        world.pods.clear()
        manager.changed()
        await poll_until(lambda: not any(files.root.iterdir()), "the removal of the pod's")


class HeldBinding:
    """The thread that binds a socket waits for `go`."""

    def __init__(self, world: World) -> None:
        self.go = threading.Event()
        self._has_come = threading.Event()
        world.files.before_binding = self._hold

    def _hold(self, key: ContainerKey) -> None:
        self._has_come.set()
        assert self.go.wait(DEADLINE_S)

    async def come(self) -> None:
        await poll_until(self._has_come.is_set, "the binding of the socket")


async def test_a_share_that_ends_while_its_socket_is_made_leaves_no_server(world: World) -> None:
    """As of a pod that is deleted by force during its admission."""
    async with serving(world) as manager, asyncio.TaskGroup() as group:
        binding = HeldBinding(world)
        group.create_task(manager.prepare([KEY]))
        await binding.come()
        world.allocations.clear()
        polling = group.create_task(manager.poll())
        for _ in range(20):
            await asyncio.sleep(0)
        binding.go.set()
        await polling
        await poll_until(lambda: not is_served(world.directory / "vcuda.sock"), "the end of its server")


async def test_a_start_that_is_given_up_while_its_socket_is_bound_leaves_it_closed(world: World) -> None:
    """The end waits for it: else it would replace a socket of the agent that follows in this process."""
    async with serving(world) as manager, asyncio.TaskGroup() as group:
        binding = HeldBinding(world)
        start = group.create_task(manager.prepare([KEY]))
        await binding.come()
        await stop_task(start)
        end = group.create_task(manager._close(DEADLINE_S))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not end.done()
        binding.go.set()
        await end
        assert [sock.fileno() for sock, _ in world.files.bound] == [-1]


async def test_what_a_registration_that_is_given_up_has_written_is_not_taken_for_what_was_before(world: World) -> None:
    """Its thread goes on, and the process that registered may have ended by then."""
    async with serving(world) as manager, asyncio.TaskGroup() as group:
        await world.poll(manager)
        (world.directory / "vcuda.sock").unlink()
        world.set_pids(ID, 11, 7, 12)
        binding = HeldBinding(world)
        registration = group.create_task(manager.refresh(KEY, None))
        await binding.come()
        assert world.pids == (7, 11, 12)
        await stop_task(registration)
        binding.go.set()
        world.set_pids(ID, 11, 7)
        manager.changed(POD)
        await manager._poll_changed(is_of_all=False)
        assert world.pids == (7, 11) and is_served(world.directory / "vcuda.sock")


@pytest.mark.parametrize(("is_bound_first", "bound"), [(True, 2), (False, 1)])
def test_sockets_that_are_bound_for_nobody_are_closed(world: World, is_bound_first: bool, bound: int) -> None:
    """The binding runs in a thread and may end before or after the one who waits has gone; then no other one is bound."""
    config = decode_config(share_config())
    wanted = [
        DesiredDirectory(key=key, config=config, is_config_known=True, pids=(), before=None, socket=None)
        for key in (KEY, ContainerKey(POD, "other"))
    ]
    directories = Directories(world.files, wanted)
    if not is_bound_first:
        world.files.before_binding = lambda _: directories.close()
    directories.write()
    directories.close()
    assert [sock.fileno() for sock, _ in world.files.bound] == [-1] * bound


async def test_a_share_that_ends_while_its_program_registers_leaves_nothing(world: World) -> None:
    """Its release was polled before the registration wrote: the next poll of all finds what that left."""
    async with serving(world) as manager:
        await world.poll(manager)

        async def release() -> None:
            world.processes.after_read = None
            del world.allocations[KEY]
            manager.changed(POD)
            await manager._poll_changed(is_of_all=False)
            assert not is_served(world.directory / "vcuda.sock")

        world.processes.after_read = release
        await manager.refresh(KEY, ID)
        assert is_served(world.directory / "vcuda.sock")
        with pytest.raises(Unavailable, match="no allocation"):  # once more, by its socket
            await manager.refresh(KEY, ID)
        await manager.poll()
        assert not is_served(world.directory / "vcuda.sock")
        kept = manager._servers, manager._written, manager._refreshes, manager._configs._known
        assert not any(kept) and not world.processes.keys()


@pytest.mark.parametrize("is_started_before", [True, False])
async def test_where_the_disk_hangs_no_server_outlives_the_manager(world: World, is_started_before: bool) -> None:
    """The process may go on: it reads its settings again."""
    async with serving(world) as manager:
        async with asyncio.TaskGroup() as group:
            if is_started_before:
                await manager.poll()
                assert is_served(world.directory / "vcuda.sock")
                other = ContainerKey(POD, "other")
                world.allocations[other] = replace(world.allocations[KEY], key=other)
            binding = HeldBinding(world)
            group.create_task(manager.prepare(list(world.allocations)))
            await binding.come()
            await manager._close(0.0)
            assert not is_served(world.directory / "vcuda.sock")
            binding.go.set()
        assert not [path for path in world.files.root.rglob("vcuda.sock") if is_served(path)]
