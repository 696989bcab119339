"""The vDevice directory of a ResourceClaim: one for all containers that use it, wherever they are."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from grpclib import GRPCError, Status
from msgspec.structs import replace

from gpushare_agent.core.formats.vdevice import VDeviceConfig, decode_config, decode_pids
from gpushare_agent.core.model.allocations import ClaimShare, ContainerKey
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.resources import ResourceKind
from tests.dra.support_claims import ref_of, uid_of
from tests.isolation.support_vdevice import ID, KEY, OTHER_ID, POD, register
from tests.isolation.test_virtual_manager import World, serving
from tests.support_core import ids

CLAIM = ContainerKey(PodUid(uid_of(1)), "gpu")
BESIDE = ContainerKey(POD, "beside")


class ClaimWorld(World):
    """Its only allocation is a claim's, which the container KEY uses; by the pods' statuses KEY runs as ID."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        share = replace(
            self.allocations.pop(KEY),
            key=CLAIM,
            claim=ClaimShare(ref=ref_of(), shown_as="g", request="gpu", isolation="vcuda", core_limit=70, view="gpu"),
        )
        self.allocations[CLAIM] = share
        self.claims[CLAIM] = {KEY: ID}

    @property
    def claims_pids(self) -> tuple[int, ...]:
        return tuple(decode_pids((self.files.path(CLAIM) / "pids.config").read_bytes()))

    @property
    def config(self) -> VDeviceConfig:
        return decode_config((self.files.path(CLAIM) / "vcuda.config").read_bytes())

    async def register(self, *, pod_uid: str = CLAIM.pod_uid, name: str = CLAIM.container) -> None:
        """From this process, which is in the container that its cgroup names."""
        await register(self.files.path(CLAIM) / "vcuda.sock", pod_uid=pod_uid, name=name)

    def we_are_in(self, container_id: str, pod: str = POD) -> None:
        (self.proc / str(os.getpid()) / "cgroup").write_text(f"0::/kubepods/burstable/pod{pod}/{container_id}\n")


@pytest.fixture
def world(short_dir: Path) -> ClaimWorld:
    return ClaimWorld(short_dir)


async def test_everything_is_there_before_a_container_starts(world: ClaimWorld) -> None:
    """With the claim's own names, by which the library registers, and its limits."""
    async with serving(world) as manager:
        assert await manager.prepare([CLAIM]) is None
        assert world.claims_pids == () and (world.files.path(CLAIM) / "vcuda.sock").exists()
        config = world.config
        assert (config.pod_uid, config.container) == CLAIM
        assert (config.utilization, config.limit, config.memory_bytes) == (30, 70, 2 << 30)


async def test_the_list_has_the_processes_of_all_containers_that_use_the_claim(world: ClaimWorld) -> None:
    """And loses those of one that has ended, also where it is the last."""
    world.set_pids(OTHER_ID, 30)
    world.set_pids("ef" * 32, 3)  # the pod's sandbox
    async with serving(world) as manager:
        await manager.prepare([CLAIM])
        await manager.poll()
        assert world.claims_pids == (7, 11)
        world.claims[CLAIM] = {KEY: ID, BESIDE: OTHER_ID}
        await manager.poll()
        assert world.claims_pids == (7, 11, 30)
        world.claims[CLAIM] = {KEY: "", BESIDE: ""}
        await manager.poll()
        assert world.claims_pids == ()


async def test_a_container_registers_before_its_pods_status_has_its_id(world: ClaimWorld) -> None:
    """By the names of the file, or by its own; its list is that of the kernel's container."""
    world.claims[CLAIM] = {KEY: "", BESIDE: ""}
    assert world.known is not None
    world.known[BESIDE] = OTHER_ID
    world.set_pids(OTHER_ID, 30)
    async with serving(world, world.manager(clock=time.monotonic)) as manager:
        await manager.prepare([CLAIM])
        await world.register()
        assert world.claims_pids == (7, 11)
        world.we_are_in(OTHER_ID)
        await world.register(pod_uid=POD, name="beside")
        assert world.claims_pids == (7, 11, 30)
        shutil.rmtree(world.cgroup_root / "kubepods" / "burstable" / f"pod{POD}" / ID)
        await manager.poll()
        assert world.claims_pids == (30,)


async def test_who_does_not_use_the_claim_is_refused(world: ClaimWorld) -> None:
    """Another container of the pod, the pod itself, another's name; a pod that is not known yet is asked to call again."""
    assert world.known is not None
    world.known[BESIDE] = OTHER_ID
    async with serving(world) as manager:
        await manager.prepare([CLAIM])

        async def refused(**names: str) -> tuple[Status, str]:
            with pytest.raises(GRPCError) as error:
                await world.register(**names)
            return error.value.status, error.value.message or ""

        assert await refused(name="beside") == (
            Status.PERMISSION_DENIED,
            "the message names container 'beside', but this socket belongs to container gpu of ResourceClaim"
            f" {CLAIM.pod_uid}: nothing is registered; use the socket that is mounted in your own container, and your own"
            " names",
        )
        world.we_are_in(OTHER_ID)
        code, text = await refused()
        assert code is Status.PERMISSION_DENIED and text.startswith(f"the calling process is in container {OTHER_ID}")
        world.we_are_in("")
        assert (await refused())[0] is Status.PERMISSION_DENIED
        world.we_are_in("12" * 32)
        world.known[ContainerKey(PodUid(uid_of(7)), "x")] = "12" * 32
        assert (await refused())[0] is Status.UNAVAILABLE
        assert world.claims_pids == ()


async def test_a_new_agent_serves_the_claim_and_keeps_its_list_until_it_knows_the_pods(world: ClaimWorld) -> None:
    async with serving(world) as manager:
        await manager.prepare([CLAIM])
        await manager.poll()
    users, world.claims[CLAIM] = world.claims[CLAIM], {}
    async with serving(world) as manager:
        await manager.poll()
        assert world.claims_pids == (7, 11) and (world.files.path(CLAIM) / "vcuda.sock").exists()
        world.claims[CLAIM] = users
        world.set_pids(ID, 5)
        await manager.poll()
        assert world.claims_pids == (5,)


async def test_the_directory_goes_with_the_claim_alone(world: ClaimWorld) -> None:
    """Also one that an agent has left which was killed; the names of another isolation's claims have none."""
    left = ContainerKey(PodUid(uid_of(9)), "gpu")
    world.files.prepare(left)
    async with serving(world) as manager:
        await manager.poll()
        await manager.remove_stale()
        assert world.files.pod_names() == (CLAIM.pod_uid,)
        share = world.allocations[CLAIM]
        assert share.claim is not None
        world.allocations = {CLAIM: replace(share, claim=replace(share.claim, isolation="none"))}
        await manager.poll()
        assert not (world.files.path(CLAIM) / "vcuda.sock").exists()
        world.allocations.clear()
        await manager.poll()
        await manager.remove_stale()
        assert world.files.pod_names() == ()


async def test_memory_alone_is_compute_in_proportion(world: ClaimWorld) -> None:
    """As the other isolations have it: 0 percent would be no share."""
    share = world.allocations[CLAIM]
    world.allocations[CLAIM] = replace(share, ids={ResourceKind.VMEMORY: frozenset(ids(0, range(24)))})
    async with serving(world) as manager:
        await manager.prepare([CLAIM])
        assert (world.config.utilization, world.config.memory_bytes) == (25, 6 << 30)
