"""Which containers libgpushare does not limit: by the driver's processes, the slots that live, and the memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.isolation.gpushare import unlimited
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import (
    _FIRST_SLOT,
    _SLOT_BYTES,
    FIRST_LOCKED_BYTE,
    MOST_SLOTS,
    USAGE_NAME,
    GpuLimits,
    Slot,
    encode_usage,
)
from gpushare_agent.agent.isolation.gpushare.unlimited import (
    ABOVE,
    CODE_BYTES,
    ENDED_BYTES,
    NO_LIBRARY,
    PROCESS_BYTES,
    UNKNOWN,
    Seen,
    UnlimitedContainers,
    problems_in,
    seen_in,
)
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.isolation.part import IsolationPart
from gpushare_agent.agent.runtime import cgroups
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.allocations import ContainerKey, ResizedShare, ShareSize
from gpushare_agent.core.model.names import MIB, GpuUuid, PodUid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, ProcessKind, ProcessSample, UsageRound
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.isolation.support_gpushare import LIMITS, World
from tests.isolation.support_host import add_share, host_of
from tests.isolation.support_requests import UID
from tests.support_node import node_of

KEY = ContainerKey(UID, "main")
GPU = GpuUuid("GPU-0")
LIMIT = LIMITS.memory_bytes or 0
SHARES = {KEY: (LIMITS,)}
NEEDS_HOST = pytest.mark.skipif(
    Path("/proc/self/ns/pid").stat().st_ino != 0xEFFFFFFC, reason="processes are ended from the host's PID namespace"
)


def process(pid: int, mib: int | None = 300, kind: ProcessKind = ProcessKind.COMPUTE) -> ProcessSample:
    return ProcessSample(pid=pid, kind=kind, memory_bytes=None if mib is None else mib * MIB)


def round_of(*processes: ProcessSample, key: ContainerKey = KEY, uuid: GpuUuid = GPU) -> UsageRound:
    use = ContainerUse(key=key, uuid=uuid, pids=tuple(one.pid for one in processes))
    gpu = GpuSample(uuid=uuid, processes=processes)
    return UsageRound(sampled_at=1.0, gpus={uuid: gpu}, containers={(key, uuid): use})


# ---- decisions ----


def test_processes_that_need_a_slot_are_those_that_compute_on_a_gpu_with_a_limit() -> None:
    """Not one that draws, one that is in no list of the driver's, one of a whole GPU or of another isolation."""
    usage = round_of(
        process(1), process(2, kind=ProcessKind.GRAPHICS), process(3, None), process(4, kind=ProcessKind.MPS)
    )
    found = seen_in(usage, SHARES)[KEY]
    assert (found.pids, found.computing, found.excess_bytes) == ({1, 2, 4}, {1, 4}, 0)
    assert seen_in(usage, {}) == {}
    assert seen_in(usage, {KEY: (GpuLimits(uuid=GPU),)}) == {}
    assert seen_in(round_of(process(3, None)), SHARES) == {}


def test_the_processes_of_a_claim_count_together() -> None:
    """By its share, whichever container or result of it they use."""
    other = ContainerKey(UID, "second")
    first, second = round_of(process(1, 2000)), round_of(process(2, 2000), key=other)
    gpu = GpuSample(uuid=GPU, processes=(process(1, 2000), process(2, 2000)))
    both = UsageRound(sampled_at=1.0, gpus={GPU: gpu}, containers={**first.containers, **second.containers})
    found = seen_in(both, SHARES, lambda _: KEY)
    assert found[KEY].excess_bytes == 4000 * MIB - LIMIT - CODE_BYTES - 2 * PROCESS_BYTES


JUDGED: dict[str, tuple[Seen, Mapping[int, int], Sequence[Slot] | None, dict[str, list[int]]]] = {
    "its slot lives": (Seen(pids={90}, computing={90}), {90: 7}, [(7, 0)], {}),
    "no slot": (Seen(pids={90}, computing={90}), {90: 7}, [], {NO_LIBRARY: [90]}),
    "another one's slot": (Seen(pids={90}, computing={90}), {90: 7}, [(8, 0)], {NO_LIBRARY: [90]}),
    "it has ended since, or is about to": (Seen(pids={90}, computing={90}), {}, [], {}),
    "only draws": (Seen(pids={90}), {90: 7}, [], {}),
    "its file cannot be read": (Seen(pids={90}, computing={90}), {90: 7}, None, {}),
    "two PID namespaces, one slot: not known whose": (
        *(Seen(pids={90, 91}, computing={90, 91}), {90: 7, 91: 7}, [(7, 0)], {NO_LIBRARY: []}),
    ),
    "two PID namespaces, both limited": (
        *(Seen(pids={90, 91}, computing={90, 91}), {90: 7, 91: 7}, [(7, 0), (7, 0)], {}),
    ),
    "all slots are taken": (Seen(pids={90}, computing={90}), {90: 999}, [(1, 0)] * MOST_SLOTS, {}),
    "above, whatever its slots say": (Seen(pids={90}, computing={90}, excess_bytes=1), {90: 7}, [(7, 0)], {ABOVE: []}),
    "above by drawing": (Seen(pids={90}, excess_bytes=1), {90: 7}, [], {ABOVE: []}),
    "above by a lot": (
        *(Seen(pids={90}, computing={90}, excess_bytes=ENDED_BYTES + 1), {90: 7}, [(7, 0)], {ABOVE: [90]}),
    ),
    "above, and nothing can be read": (Seen(pids={90}, computing={90}, excess_bytes=1), {90: 7}, None, {ABOVE: []}),
    "functions that the library does not know": (*(Seen(pids={90}, computing={90}), {90: 7}, [(7, 2)], {UNKNOWN: []}),),
}


@pytest.mark.parametrize("case", JUDGED)
def test_a_container_is_judged(case: str) -> None:
    seen, own_pids, slots, expected = JUDGED[case]
    assert {why: sorted(pids) for why, pids in problems_in(seen, own_pids, slots).items()} == expected


class Failing(IsolationPart):
    def problem(self, key: ContainerKey) -> str:
        return NO_LIBRARY if key == KEY else ""


@pytest.mark.parametrize(
    ("isolation", "memory_by", "compute_by"),
    [("gpushare", "nobody", "nobody"), ("gpushare+driver", "driver", "nobody")],
)
def test_nobody_claims_to_limit_such_a_container(isolation: str, memory_by: str, compute_by: str) -> None:
    """But the driver, where that limits its memory too; its neighbours are limited as before."""
    node = node_of(settings=load_settings([f"--isolation={isolation}"], {}).settings)
    own, other = add_share(node, UID), add_share(node, PodUid("2" + UID[1:]))
    parts = {"gpushare": Failing(), "driver": IsolationPart()}
    isolations = Isolations(
        host=host_of(node), kernel_module=None, parts=parts, watches={}, vdevices=None, cdi_watch=None
    )
    kept, neighbours = isolations.kept(own), isolations.kept(other)
    assert kept is not None and (kept.memory_by, kept.compute_by) == (memory_by, compute_by)
    assert neighbours is not None and neighbours.compute_by == "gpushare"
    assert (isolations.problem(own.key), isolations.problem(other.key)) == (NO_LIBRARY, "")


# ---- slots on real files ----


@pytest.fixture
def files(short_dir: Path) -> GpushareFiles:
    made = World(short_dir).files
    made.prepare(KEY)
    return made


@pytest.fixture
def open_files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def take_slot(files: GpushareFiles, stack: ExitStack, index: int, pid: int, unhooked: int = 0) -> int:
    """As the library does: the lock is the open file's, so its end is that of the slot."""
    file = os.open(files.container_directory(KEY) / USAGE_NAME, os.O_RDWR)
    stack.callback(lambda: [os.close(one) for one in (file,) if os.path.exists(f"/proc/self/fd/{one}")])
    lock = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, FIRST_LOCKED_BYTE + index, 1, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    os.pwrite(file, struct.pack("@i324xQ", pid, unhooked), _FIRST_SLOT + index * _SLOT_BYTES)
    return file


def test_a_slot_counts_while_its_process_holds_the_lock(files: GpushareFiles, open_files: ExitStack) -> None:
    """A dead process's PID is in the file until another one clears it, and may be a living one's."""
    held, dead = take_slot(files, open_files, 0, 7), take_slot(files, open_files, 255, 8, 3)
    assert files.slots(KEY) == [(7, 0), (8, 3)]
    os.close(dead)
    assert files.slots(KEY) == [(7, 0)]
    os.pwrite(held, bytes(4), _FIRST_SLOT)
    assert files.slots(KEY) == []


def test_what_a_tenant_has_made_of_the_file_is_no_slot(files: GpushareFiles) -> None:
    """Random bytes name PIDs, and nobody holds their locks. Another layout says nothing; no file, nothing either."""
    path = files.container_directory(KEY) / USAGE_NAME
    path.write_bytes(encode_usage()[:512] + os.urandom(len(encode_usage()) - 512))
    assert files.slots(KEY) == []
    path.write_bytes(b"GPSU" + struct.pack("I", 2) + encode_usage()[8:])
    assert files.slots(KEY) is None
    path.write_bytes(b"")
    assert files.slots(KEY) is None
    path.unlink()
    assert files.slots(KEY) == []


# ---- from look to look ----


class Host:
    """Real processes, a /proc that says whose they are, and the Events that are written. A resize may change the share."""

    def __init__(self, files: GpushareFiles, proc: Path) -> None:
        self.files, self.proc, self.cgroups = files, proc, Cgroups(proc, proc)
        self.events: list[tuple[str, str]] = []
        self.requests: list[None] = []
        self.now = 0.0
        self.shares: Mapping[ContainerKey, Sequence[GpuLimits]] = SHARES
        self.cache = AllocationCache()

    def watch(self, unlimited: str = "warn") -> UnlimitedContainers:
        settings = load_settings([f"--libgpushare.unlimited={unlimited}"], {}).settings
        node = node_of(settings=settings, cache=self.cache)
        add_share(node, UID)
        return UnlimitedContainers(
            files=self.files,
            host=host_of(node, warn=lambda _, *said: self.events.append(said), cgroups=self.cgroups),
            shares=lambda: self.shares,
            request_usage=lambda: self.requests.append(None),
            thread=DaemonThread("slots", advice=""),
            clock=lambda: self.now,
        )

    def show(self, pid: int, *, uid: str = UID) -> None:
        """The process of now, in the first container of that pod."""
        place = self.proc / str(pid)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name in ("stat", "status"):
            text = Path(f"/proc/{pid}/{name}").read_text()
            (place / name).write_text("".join(line for line in text.splitlines(True) if not line.startswith("NSpid")))
        (place / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'a' * 64}\n")

    async def look(self, watch: UnlimitedContainers, *processes: ProcessSample, after_s: float = 0.0) -> None:
        self.now += after_s
        watch.usage_sampled(round_of(*processes))
        await watch.look()

    async def look_twice(self, watch: UnlimitedContainers, *processes: ProcessSample) -> None:
        """Once more when it is settled who has a slot."""
        await self.look(watch, *processes)
        await self.look(watch, *processes, after_s=60)


@pytest.fixture
def host(files: GpushareFiles, short_dir: Path) -> Host:
    return Host(files, short_dir / "proc")


@pytest.fixture
def program(host: Host) -> Iterator[Callable[[], int]]:
    """Starts one that waits, and shows it; its PID."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        command = [sys.executable, "-c", "print(flush=True); input()"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == b"\n"
        host.show(started[-1].pid)
        return started[-1].pid

    yield start
    for one in started:
        one.kill()
        one.communicate()


async def test_a_process_without_a_slot_is_warned_once_and_only_after_a_while(
    host: Host, program: Callable[[], int], open_files: ExitStack
) -> None:
    """One that has just started is not guilty; more rounds are asked for until that is known, and no longer."""
    pid, watch = program(), host.watch()
    await host.look(watch, process(pid))
    assert (host.events, watch.problem(KEY), len(host.requests)) == ([], "", 1)
    await host.look(watch, process(pid), after_s=unlimited.SETTLED_S)
    assert host.events == [("ShareNotLimited", f"container main is not limited: {NO_LIBRARY}")]
    assert (watch.problem(KEY), len(host.requests)) == (NO_LIBRARY, 1)
    await host.look(watch, process(pid), after_s=60)
    assert watch.problem(KEY) is watch.problem(KEY) == NO_LIBRARY
    slot = take_slot(host.files, open_files, 3, pid)
    await host.look(watch, process(pid))
    assert watch.problem(KEY) == ""
    os.close(slot)
    await host.look_twice(watch, process(pid))
    assert (len(host.events), watch.problem(KEY)) == (1, NO_LIBRARY)
    await host.look(watch)
    assert (watch.problem(KEY), watch._since) == ("", {})


async def test_without_a_round_nothing_is_judged(host: Host, program: Callable[[], int]) -> None:
    """The driver may not answer for a while: what was found stays, and one round does not become two."""
    pid, watch = program(), host.watch()
    async with running(watch.run):
        watch.usage_sampled(round_of(process(pid)))
        await poll_until(lambda: bool(watch._since), "the first look")
        host.now += 60
        watch.usage_sampled(None)
        await asyncio.sleep(0)
        assert not watch._reconciler._is_requested.is_set() and watch.problem(KEY) == ""


async def test_a_slot_has_the_pid_in_the_containers_own_namespace(
    host: Host, program: Callable[[], int], open_files: ExitStack
) -> None:
    """Which is the innermost of the process's: the library knows no other."""
    pid, watch = program(), host.watch()
    with (host.proc / str(pid) / "status").open("a") as status:
        status.write(f"NSpid:\t{pid}\t12\t1\n")
    for own, found in ((12, NO_LIBRARY), (1, "")):
        slot = take_slot(host.files, open_files, 0, own)
        await host.look_twice(watch, process(pid))
        assert watch.problem(KEY) == found
        os.close(slot)


async def test_a_process_that_ends_has_no_slot_any_more_and_is_not_guilty(
    host: Host, program: Callable[[], int]
) -> None:
    """It has given its memory back and its lock with it, while the driver still counts what it had on the GPU."""
    pid, watch = program(), host.watch()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    host.show(pid)
    await host.look_twice(watch, process(pid))
    assert (host.events, watch.problem(KEY)) == ([], "")


async def test_memory_above_the_limit_is_warned_whatever_the_slots_say(
    host: Host, program: Callable[[], int], open_files: ExitStack
) -> None:
    """Not what each process and its code may have more, nor what a share is charged while it becomes smaller: no more."""
    pid, watch = program(), host.watch()
    take_slot(host.files, open_files, 0, pid)
    may_have = (LIMIT + CODE_BYTES + PROCESS_BYTES) // MIB
    smaller = ShareSize(cores=30, memory=8)
    shrinking = ResizedShare(
        key=KEY, gpu=GPU, kind=ResourceKind.VCORE, allocated=smaller, target=smaller,
        charged=ShareSize(cores=30, memory=80),
    )  # fmt: skip
    enforced = replace(shrinking, charged=smaller)
    as_before = may_have + 9 * LIMIT // MIB
    for mib, resized, found in (
        (may_have, None, ""),
        (as_before, shrinking, ""),
        (may_have + 1, enforced, ABOVE),
        (as_before + 1, shrinking, ABOVE),
    ):
        host.cache.forget_resized(KEY)
        if resized is not None:
            host.cache.charge(resized)
        await host.look_twice(watch, process(pid, mib))
        assert watch.problem(KEY) == found
    assert host.events == [("ShareNotLimited", f"container main is not limited: {ABOVE}")]


@NEEDS_HOST
async def test_only_where_it_is_wanted_the_process_is_ended(
    host: Host, program: Callable[[], int], open_files: ExitStack
) -> None:
    """After both looks, and not the one next to it that has a slot."""
    bare, limited, watch = program(), program(), host.watch("end")
    take_slot(host.files, open_files, 0, limited)
    await host.look(watch, process(bare), process(limited))
    assert not os.waitid(os.P_PID, bare, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    await host.look(watch, process(bare), process(limited), after_s=unlimited.SETTLED_S)
    ended = os.waitid(os.P_PID, bare, os.WEXITED | os.WNOWAIT)
    assert ended is not None and ended.si_status == signal.SIGKILL
    assert not os.waitid(os.P_PID, limited, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    assert [reason for reason, _ in host.events] == ["ShareNotLimited", "UnlimitedProcessEnded"]


@NEEDS_HOST
def test_a_pid_alone_ends_nothing(host: Host, program: Callable[[], int]) -> None:
    """The process must be one of the pods', and the one that was seen: not another that has its PID since."""
    pid, own = program(), host.cgroups
    started = own.started([pid])[pid]
    assert not own.end(pid, started - 1, {UID})
    assert not own.end(pid, started, {PodUid("99999999-2222-3333-4444-555555555555")})
    assert not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    assert own.end(pid, started, {UID})
    os.waitid(os.P_PID, pid, os.WEXITED)
    assert not own.end(pid, started, {UID})


async def test_a_process_that_may_not_be_ended_is_an_event_too(
    host: Host, program: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because the PIDs would be those of another namespace."""
    monkeypatch.setattr(cgroups, "_HOSTS_PID_NAMESPACE", 1)
    pid, watch = program(), host.watch("end")
    await host.look_twice(watch, process(pid))
    assert [text for _, text in host.events][1:] == [
        f"container main is not limited, and process {pid} cannot be ended: the agent is not in the host's PID namespace"
    ]
    assert not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def test_what_is_kept_does_not_grow(host: Host, program: Callable[[], int]) -> None:
    """A tenant starts process after process: what was found of those before is forgotten, and the Event is one."""
    watch = host.watch()
    for _ in range(5):
        await host.look(watch, process(program()), after_s=unlimited.SETTLED_S)
    assert len(watch._since) == len(host.events) == len(watch._warned) == 1
    host.shares = {}
    await host.look(watch)
    assert not watch._since and not watch._warned and not watch._problems
