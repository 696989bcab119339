"""Keeping the driver's memory limits: on which cgroups, when again, and what is said of a container without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.driver.edits import MemoryShare, memory_shares, pod_memory
from gpushare_agent.agent.isolation.driver.limits import DriverLimits
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.kit.supervision import forever
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import Refused, Rejected, Unavailable
from gpushare_agent.core.model.isolation import LimitOutcome, MemoryLimit
from gpushare_agent.core.model.names import GIB, GpuUuid, PodUid, unit_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.support_core import inventory

UID = PodUid("11111111-2222-3333-4444-555555555555")
GPU, OTHER_GPU = GpuUuid("GPU-a"), GpuUuid("GPU-b")
MAIN, SECOND = ContainerKey(UID, "main"), ContainerKey(UID, "second")
IDS = {MAIN: "a" * 64, SECOND: "b" * 64}


def share(
    gib: int, *, gpu: GpuUuid = GPU, kind: ContainerKind = ContainerKind.MAIN, key: ContainerKey = MAIN
) -> MemoryShare:
    return MemoryShare(key=key, gpu=gpu, limit_bytes=gib * GIB, kind=kind)


class World:
    """A cgroup tree as the kubelet makes it, a driver that remembers limits, and a runtime that knows IDs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "cgroup.controllers").touch()
        self.pod = root / "kubepods" / f"pod{UID}"
        self.shares: dict[ContainerKey, list[MemoryShare]] = {MAIN: [share(4)]}
        self.ids: dict[ContainerKey, str] = {}
        self.limits: dict[tuple[GpuUuid, Path], int] = {}
        self.problem = LimitOutcome()
        self.error: Exception | None = None
        self.missing: list[tuple[ContainerKey, str]] = []
        self.asked_for_ids = 0
        self.used_bytes = 0

    def limiter(self, *, may_set: bool = True) -> DriverLimits:
        return DriverLimits(
            driver=self,
            cgroups=Cgroups(self.root, self.root),
            containers=self,
            shares=lambda: self.shares,
            may_set=may_set,
            on_missing=lambda key, why: self.missing.append((key, why)),
        )

    def start(self, key: ContainerKey) -> Path:
        (self.pod / IDS[key]).mkdir(parents=True, exist_ok=True)
        self.ids[key] = IDS[key]
        return self.pod / IDS[key]

    async def running(self) -> Mapping[ContainerKey, str]:
        self.asked_for_ids += 1
        return dict(self.ids)

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        if self.error is not None:
            raise self.error

    async def keep_memory_limits(self, wanted: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        if self.error is not None:
            raise self.error
        if self.problem.problem:
            return [self.problem] * len(wanted)
        if may_set:
            self.limits |= {(one.gpu, one.cgroup): one.limit_bytes for one in wanted}
        return [
            LimitOutcome(used_bytes=self.used_bytes)
            if self.limits.get((one.gpu, one.cgroup)) == one.limit_bytes
            else LimitOutcome(problem="none")
            for one in wanted
        ]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_the_pods_cgroup_is_limited_before_the_container_starts(world: World) -> None:
    """To the sum of its shares: the container's own cgroup is not there yet."""
    world.shares[SECOND] = [share(2, key=SECOND)]
    world.pod.mkdir(parents=True)
    assert await world.limiter().prepare([MAIN]) is None
    assert world.limits == {(GPU, world.pod): 6 * GIB}


async def test_the_containers_of_a_claim_are_limited_each_and_together(world: World) -> None:
    """The pod's cgroup has the claim's memory once, from before they start; one of them has also a claim of its own."""
    claim, other, third = (ContainerKey(PodUid("99999999-2222-3333-4444-555555555555"), name) for name in "abc")
    shared = share(4, key=claim)
    world.shares = {MAIN: [shared], SECOND: [shared, share(1, key=other), share(2, gpu=OTHER_GPU, key=third)]}
    world.pod.mkdir(parents=True)
    limiter = world.limiter()
    assert await limiter.prepare([claim]) is None
    assert world.limits == {(GPU, world.pod): 5 * GIB, (OTHER_GPU, world.pod): 2 * GIB}
    main, second = world.start(MAIN), world.start(SECOND)
    await limiter.reconcile()
    of_gpu = {place: limit for (gpu, place), limit in world.limits.items() if gpu == GPU}
    assert of_gpu == {world.pod: 5 * GIB, main: 4 * GIB, second: 5 * GIB}
    assert world.limits[OTHER_GPU, second] == 2 * GIB


async def test_a_claim_is_without_its_limit_where_one_of_its_containers_is(world: World) -> None:
    """The Event is on that container's pod."""
    claim = ContainerKey(PodUid("99999999-2222-3333-4444-555555555555"), "a")
    world.shares = {MAIN: [share(4, key=claim)]}
    world.start(MAIN)
    limiter = world.limiter()
    assert limiter.problem(claim) == ""
    world.problem = LimitOutcome(problem="no right")
    await limiter.reconcile()
    assert limiter.problem(claim) == "no right"
    assert world.missing == [(MAIN, "no right")]


async def test_a_pod_without_a_cgroup_or_an_agent_without_the_right_starts_all_the_same(world: World) -> None:
    """A kubelet without cgroups per QoS makes none; the container's is limited when it is there. Who may not set limits
    prepares nothing."""
    assert await world.limiter().prepare([MAIN]) is None
    assert world.limits == {}
    world.pod.mkdir(parents=True)
    world.error = Unavailable("is not asked")
    assert await world.limiter(may_set=False).prepare([MAIN]) is None


async def test_a_limit_that_cannot_be_set_keeps_the_container_from_starting(world: World) -> None:
    """With the driver's reason. A pod's cgroup that the kernel's controller leaves out does not."""
    world.pod.mkdir(parents=True)
    world.problem = LimitOutcome(problem="no right")
    refused = await world.limiter().prepare([MAIN])
    assert isinstance(refused, Refused) and "no right" in refused.detail
    world.problem = LimitOutcome(problem="no dmem files", has_no_controller=True)
    assert await world.limiter().prepare([MAIN]) is None
    world.error = Unavailable("hangs")
    refused = await world.limiter().prepare([MAIN])
    assert isinstance(refused, Refused) and "hangs" in refused.detail


async def test_a_container_that_runs_gets_its_limit_and_its_pod_too(world: World) -> None:
    """Also what another agent, or nobody, left: each round compares."""
    limiter = world.limiter()
    await limiter.reconcile()
    assert world.limits == {}
    own = world.start(MAIN)
    await limiter.reconcile()
    assert world.limits == {(GPU, world.pod): 4 * GIB, (GPU, own): 4 * GIB}
    world.shares[MAIN] = [share(8)]
    await limiter.reconcile()
    assert world.limits == {(GPU, world.pod): 8 * GIB, (GPU, own): 8 * GIB}
    world.limits.clear()
    await world.limiter().reconcile()
    assert world.limits == {(GPU, world.pod): 8 * GIB, (GPU, own): 8 * GIB}


async def test_the_runtime_is_asked_only_while_a_container_is_not_known(world: World) -> None:
    """One that ended is asked for again: it may come back with another ID."""
    limiter = world.limiter()
    own = world.start(MAIN)
    for _ in range(3):
        await limiter.reconcile()
    assert world.asked_for_ids == 1
    own.rmdir()
    world.ids.clear()
    await limiter.reconcile()
    await limiter.reconcile()
    assert world.asked_for_ids == 2


async def test_a_container_without_its_limit_is_named_once(world: World) -> None:
    """To whoever tells the pod, and as long as it runs to whoever asks."""
    limiter = world.limiter(may_set=False)
    own = world.start(MAIN)
    await limiter.reconcile()
    await limiter.reconcile()
    assert limiter.problem(MAIN) == "none" and world.missing == [(MAIN, "none")]
    world.limits[GPU, own] = 4 * GIB  # as NVIDIA's toolkit would
    await limiter.reconcile()
    assert limiter.problem(MAIN) == "" and world.missing == [(MAIN, "none")]


async def test_a_container_that_has_ended_is_no_container_without_a_limit(world: World) -> None:
    """Nor is one whose cgroup goes between two steps."""
    limiter = world.limiter(may_set=False)
    own = world.start(MAIN)
    await limiter.reconcile()
    own.rmdir()
    await limiter.reconcile()
    assert limiter.problem(MAIN) == ""
    world.start(MAIN)
    world.problem = LimitOutcome(problem="gone", is_gone=True)
    await limiter.reconcile()
    assert limiter.problem(MAIN) == ""


async def test_what_runs_is_kept_by_itself_and_a_round_that_fails_is_reported_once(world: World) -> None:
    """The next one tries again."""
    world.error = Unavailable("hangs")
    own = world.start(MAIN)
    limiter = world.limiter()
    with capture_logs() as lines:
        async with running(lambda: forever("driver limits", limiter.run)):
            await poll_until(lambda: bool(lines), "a round that failed")
            world.error = None
            await limiter.prepare([MAIN])
            await poll_until(lambda: (GPU, own) in world.limits, "the limit")
    assert [line["event"] for line in lines] == ["memory_limits_not_read", "memory_limits_read_again"]


async def test_the_check_names_what_the_node_lacks(world: World) -> None:
    """Cgroup v2, and a driver that has such limits."""
    await world.limiter().check()
    world.error = Rejected("the driver 580 has none")
    with pytest.raises(Rejected, match="580"):
        await world.limiter().check()
    (world.root / "cgroup.controllers").unlink()
    (world.root / "pids").mkdir()
    (world.root / "pids" / "cgroup.procs").touch()
    with pytest.raises(Unavailable, match="cgroup v1"):
        await world.limiter().check()


async def test_a_resize_is_enforced_once_its_processes_have_no_more(world: World) -> None:
    """What a process has stays its own; a container that does not run yet has no limit to change."""
    resized = Allocation(key=MAIN, namespace="", pod_name="", kind=ContainerKind.MAIN, gpus=())
    limiter = world.limiter()
    assert "not known to run yet" in await limiter.enforce(resized)
    own = world.start(MAIN)
    world.used_bytes = 4 * GIB
    assert await limiter.enforce(resized) == ""
    world.shares[MAIN] = [share(1)]
    assert await limiter.enforce(resized) == "its processes still have 3072 MiB more"
    assert world.limits[GPU, own] == GIB
    world.used_bytes = GIB
    assert await limiter.enforce(resized) == ""


def test_init_containers_do_not_add_up() -> None:
    """The largest of them runs alone; the others, sidecars too, run together; each GPU by itself."""
    init, sidecar = ContainerKind.INIT, ContainerKind.SIDECAR
    keys = [ContainerKey(UID, f"c{number}") for number in range(5)]
    found = pod_memory(
        [
            share(6, kind=init, key=keys[0]),
            share(5, kind=init, key=keys[1]),
            share(2, key=keys[2]),
            share(3, kind=sidecar, key=keys[3]),
            share(1, gpu=OTHER_GPU, key=keys[4]),
        ]
    )
    assert found == {GPU: 6 * GIB, OTHER_GPU: GIB}
    assert pod_memory([share(6), share(6, kind=init, key=SECOND)]) == {GPU: 6 * GIB}


def test_replicas_on_several_gpus_have_a_limit_on_each() -> None:
    """Each its part of that GPU, but for one that the driver does not find now; together they are the pod's."""
    replicas = Allocation(
        key=MAIN,
        namespace="default",
        pod_name="p",
        kind=ContainerKind.MAIN,
        gpus=(GpuUuid("GPU-0"), GpuUuid("GPU-1"), GpuUuid("GPU-lost")),
        ids={ResourceKind.GPU: frozenset(unit_id(GpuUuid(f"GPU-{name}"), 0, "4s") for name in (0, 1, "lost"))},
    )
    found = memory_shares(replicas, inventory(2, 16 * 1024).by_uuid(), ResourceNames(), [MAIN])
    assert pod_memory(found) == {"GPU-0": 4 * GIB, "GPU-1": 4 * GIB}
