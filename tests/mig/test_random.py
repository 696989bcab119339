"""Whatever happens to the instances, in whatever order: no two claims have places that overlap, nothing that is foreign or
in use is destroyed, and in the end there is what claims hold, and nothing else of ours.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpushare_agent.core.model.errors import Conflict
from gpushare_agent.core.model.mig import MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from tests.mig.support_mig import POINTS, PROFILES, SLOW, Killed, Owner, gpu_uuid, named, slices_of

PLACES = [MigPlacement(gpu_uuid(gpu), one.id, start) for gpu in range(2) for one in PROFILES for start in one.starts]


class World:
    """Claims over an owner, as a scheduler, a kubelet and strangers make and end them."""

    def __init__(self) -> None:
        self.owner = Owner(2, idle_s=60.0)
        self.claims: dict[str, MigPlacement] = {}
        self.prepared: dict[str, GpuUuid] = {}
        self.number = 0

    async def claim(self, where: MigPlacement) -> None:
        self.number += 1
        uid = f"claim-{self.number}"
        self.claims[uid] = where
        await self.prepare(uid)

    async def prepare(self, uid: str) -> None:
        """As the kubelet does, which asks again until it has it."""
        owner, where = self.owner, self.claims[uid]
        async with asyncio.TaskGroup() as group:
            call = group.create_task(owner.hold(uid, where))
            killed = group.create_task(owner.driver.killed.wait())
            await asyncio.wait({call, killed}, return_when=asyncio.FIRST_COMPLETED)
            call.cancel()
            killed.cancel()
        if owner.driver.killed.is_set():
            await self.restart()
        elif not call.cancelled() and call.result() == "":
            one = owner.hardware.at(where)
            assert one is not None and one.uuid == owner.mig.gpus[named(where)].uuid
            self.prepared[uid] = GpuUuid(one.uuid)
            one.users.add(uid)
        self.check()

    async def end(self, uid: str) -> None:
        where = self.claims.pop(uid)
        self.prepared.pop(uid, None)
        if (one := self.owner.hardware.at(where)) is not None:
            one.users.discard(uid)
        self.owner.mig.release(uid)
        await self.quiet()

    async def restart(self) -> None:
        held = {uid: {named(self.claims[uid]): uuid} for uid, uuid in self.prepared.items()}
        await self.owner.restart(held)

    async def quiet(self, seconds: float = 0.0) -> None:
        await self.owner.later(seconds)
        if self.owner.driver.killed.is_set():
            await self.restart()
        self.check()

    def check(self) -> None:
        hardware = self.owner.hardware
        assert hardware.wrong == []
        for uid, uuid in self.prepared.items():
            one = hardware.at(self.claims[uid])
            if one is not None and one.uuid == uuid:
                assert one.maker == "agent"
        spans = [(where, self.prepared[uid]) for uid, where in self.claims.items() if uid in self.prepared]
        for where, uuid in spans:
            for other, another in spans:
                if where.parent == other.parent and slices_of(where) & slices_of(other) and uuid != another:
                    # Only where a stranger or a reboot took the instance of one of them.
                    lives = {one.uuid for one in hardware.all()}
                    assert not {uuid, another} <= lives


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.sampled_from(PLACES)),
        st.tuples(st.just("claim"), st.sampled_from(PLACES)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("prepare"), st.integers(0, 9)),
        st.tuples(st.just("cut"), st.tuples(st.sampled_from(POINTS), st.just(Killed()))),
        st.tuples(st.just("cut"), st.tuples(st.sampled_from(POINTS[2:]), st.just(SLOW))),
        st.tuples(st.just("cut"), st.tuples(st.just("before create"), st.just(Conflict("INSUFFICIENT_RESOURCES")))),
        st.tuples(st.just("time"), st.sampled_from((1, 61))),
        st.tuples(st.just("by hand"), st.sampled_from(PLACES)),
        st.tuples(st.just("removed"), st.integers(0, 9)),
        st.tuples(st.just("monitor"), st.integers(0, 9)),
        st.tuples(st.just("drain"), st.booleans()),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=25,
)


@given(ACTIONS)
@settings(max_examples=150, deadline=None)
def test_in_whatever_order(actions: list[tuple[str, object]]) -> None:
    with capture_logs():
        asyncio.run(run(actions))


async def act(world: World, action: str, value: Any) -> None:
    owner, hardware = world.owner, world.owner.hardware
    claims, instances = sorted(world.claims), list(hardware.all())
    match action, value:
        case "claim", where:
            await world.claim(where)
        case "end", number if claims:
            await world.end(claims[number % len(claims)])
        case "prepare", number if claims:
            await world.prepare(claims[number % len(claims)])
        case "cut", (point, error):
            owner.raise_at(point, error)
        case "time", seconds:
            await world.quiet(seconds)
        # While a call for it may still be carried out nobody can say whose an instance there is.
        case "by hand", where if where not in owner.mig._in_doubt:
            hardware.by_hand(where)
            await world.quiet()
        case "removed", number if instances:
            hardware.removed_by_hand(instances[number % len(instances)])
            await world.quiet()
        case "monitor", number if instances:
            instances[number % len(instances)].users.symmetric_difference_update({"monitor"})
        case "restart", is_reboot:
            if is_reboot:
                hardware.reboot()
                owner.records.content = []
            await world.restart()
        case "drain", is_draining:
            owner.mig.own_node.is_draining = is_draining
            await world.quiet()


async def run(actions: list[tuple[str, object]]) -> None:
    world = World()
    owner, hardware = world.owner, world.owner.hardware
    await owner.start()
    for action, value in actions:
        await act(world, action, value)
    # All that hinders ends; then a claim has its instance, or is refused because of a stranger's.
    owner.raise_at("nowhere")
    for one in hardware.all():
        one.users.discard("monitor")
    for _ in range(3):
        await world.quiet(120)
    by_hand = [one for one in hardware.all() if one.maker == "hand"]
    wanted = list(world.claims.values())
    for uid in sorted(world.claims):
        await world.end(uid)
    for where in wanted:
        await world.claim(where)
        [uid] = world.claims
        assert uid in world.prepared or owner.mig.blocked[where]
        await world.end(uid)
    for _ in range(3):
        await world.quiet(120)
    assert [one for one in hardware.all() if one.maker != "hand"] == []
    if owner.mig._in_doubt:  # until the driver answers another call for the GPU, or the process ends
        await world.restart()
        await world.quiet()
    assert [one for one in hardware.all() if one.maker == "hand"] == by_hand
    assert (owner.records.content, owner.mig.made, owner.mig._failures, owner.mig._wanted) == ([], set(), {}, {})
    counts = owner.counts()
    assert counts.pop("foreign") == len(by_hand) and not any(counts.values())
    calls = len(owner.driver.calls)
    await world.quiet(10_000)
    assert len(owner.driver.calls) == calls
    await owner.stop()
