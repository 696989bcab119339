"""The owner of the instances that are made on demand: what a claim gets, and when it is used again or destroyed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.core.model.errors import Conflict, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import GpuUuid
from tests.mig.support_mig import POINTS, SLOW, Owner, gpu_uuid, named, place
from tests.support_core import allocation, pod

SMALL, LARGE = place("1g.5gb", 6), place("3g.20gb", 4)


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    made = Owner(2)
    await made.start()
    yield made
    await made.stop()
    assert made.hardware.wrong == []


async def test_a_claim_gets_an_instance_and_the_next_one_uses_it_again(owner: Owner) -> None:
    assert await owner.hold("a", SMALL) == ""
    first = owner.mig.gpus[named(SMALL)]
    assert (first.uuid, owner.on(), owner.mig.made) == ("MIG-0001", [("1g.5gb", 6)], {"MIG-0001"})
    owner.mig.release("a")
    await owner.quiet()
    assert owner.counts()["idle"] == 1
    assert await owner.hold("b", SMALL) == ""
    assert owner.mig.gpus[named(SMALL)].uuid == first.uuid
    assert owner.driver.calls == [("create", SMALL)]


async def test_what_is_idle_goes_when_its_slices_are_wanted(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    await owner.hold("b", place("1g.5gb", 0))
    owner.mig.release("a")
    owner.mig.release("b")
    assert await owner.hold("c", LARGE) == ""
    assert owner.on() == [("1g.5gb", 0), ("3g.20gb", 4)]  # the one that is not in the way is kept


async def test_what_is_idle_goes_after_a_time_or_when_the_node_drains(owner: Owner) -> None:
    await owner.leave_idle(SMALL)
    await owner.later(599)
    assert owner.on() == [("1g.5gb", 6)]
    await owner.later(2)
    assert owner.on() == []
    await owner.hold("b", SMALL)
    await owner.hold("c", place("1g.5gb", 0))
    owner.mig.release("c")
    owner.mig.own_node.is_draining = True
    await owner.later()
    assert owner.on() == [("1g.5gb", 6)]


async def test_a_place_that_overlaps_another_claims_is_refused_by_its_name(owner: Owner) -> None:
    """The scheduler frees a device when its pod is deleted by force, before the claim is unprepared."""
    await owner.hold("first", SMALL)
    assert "cannot be next to that of claim first" in await owner.hold("second", LARGE)
    await owner.hold("media", place("1g.5gb+me", 0))
    assert "cannot be next to that of claim media" in await owner.hold("third", place("1g.5gb+me", 1))
    owner.mig.release("media")
    owner.mig.release("first")
    assert await owner.hold("second", LARGE) == ""


async def test_several_claims_may_share_one_place(owner: Owner) -> None:
    assert await owner.hold("a", SMALL) == await owner.hold("b", SMALL) == ""
    owner.mig.release("a")
    await owner.later(1000)
    assert owner.on() == [("1g.5gb", 6)]
    owner.mig.release("b")
    await owner.later()
    await owner.later(1000)
    assert owner.on() == []


async def test_gpus_work_at_the_same_time_and_each_makes_one_after_another(owner: Owner) -> None:
    owner.driver.hanging[gpu_uuid(0)] = asyncio.Event()
    places = [place("1g.5gb", start, gpu) for start in range(3) for gpu in range(2)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(owner.hold(f"{one}", one)) for one in places]
        await owner.quiet()
        assert [task.done() for task in tasks] == [False, True] * 3
        owner.driver.hanging[gpu_uuid(0)].set()
    assert [task.result() for task in tasks] == [""] * 6
    assert owner.driver.most_at_once == {gpu_uuid(0): 1, gpu_uuid(1): 1}


async def test_a_caller_that_is_cancelled_has_its_places_all_the_same(owner: Owner) -> None:
    hangs = owner.driver.hanging[gpu_uuid(0)] = asyncio.Event()
    task = owner.begin(owner.hold("a", SMALL))
    await owner.quiet()
    task.cancel()
    await asyncio.wait({task})
    hangs.set()
    await owner.quiet()
    assert (owner.on(), owner.counts()["held"]) == ([("1g.5gb", 6)], 1)
    assert await owner.hold("a", SMALL) == ""
    assert owner.driver.calls == [("create", SMALL)]


async def test_a_foreign_instance_is_left_and_named(owner: Owner) -> None:
    owner.hardware.by_hand(SMALL)
    await owner.later()
    why = await owner.hold("a", LARGE)
    assert "instance 1g.5gb at memory slice 6 (GPU instance 1) lies there and was not made by the agent" in why
    assert set(owner.mig.blocked) >= {LARGE, SMALL, place("7g.40gb", 0)}
    assert place("1g.5gb", 0) not in owner.mig.blocked and place("1g.5gb", 6, 1) not in owner.mig.blocked
    assert (owner.driver.calls, owner.mig.made) == ([], set())
    # Waiting for it is enough.
    owner.hardware.removed_by_hand(next(owner.hardware.all()))
    await owner.later()
    assert await owner.hold("a", LARGE) == ""


async def test_slices_do_not_tell_that_media_engines_are_there_once(owner: Owner) -> None:
    """An idle `+me` goes for another one that does not overlap it, and for another profile with them."""
    await owner.leave_idle(place("1g.5gb+me", 0))
    assert await owner.hold("b", place("1g.5gb+me", 5)) == ""
    assert owner.on() == [("1g.5gb+me", 5)]


async def test_what_the_driver_lacks_for_another_reason_idle_ones_give_way_to(owner: Owner) -> None:
    await owner.leave_idle(place("1g.5gb", 0))
    owner.raise_at("before create", Conflict("INSUFFICIENT_RESOURCES"))
    assert "INSUFFICIENT_RESOURCES" in await owner.hold("b", SMALL)
    await owner.later(2)
    assert await owner.hold("b", SMALL) == ""
    assert owner.on() == [("1g.5gb", 6)]


@pytest.mark.parametrize("user", ["pod", "monitor"])
async def test_what_is_in_use_is_tried_again_and_blocks_meanwhile(owner: Owner, user: str) -> None:
    """By a process in it, or, half destroyed, by another client of the driver. It is logged once."""
    await owner.hold("a", SMALL)
    one = next(owner.hardware.all())
    one.users.add(user)
    owner.mig.release("a")
    with capture_logs() as logs:
        assert "IN_USE" in await owner.hold("b", LARGE)
        for _ in range(5):
            await owner.later(70)
            assert "IN_USE" in await owner.hold("b", LARGE)
    assert [line["event"] for line in logs] == ["mig_instance_not_destroyed"]
    assert owner.mig.blocked[LARGE] == "IN_USE"
    one.users.clear()
    await owner.later(70)
    assert await owner.hold("b", LARGE) == ""
    assert owner.on() == [("3g.20gb", 4)]


@pytest.mark.parametrize("user", ["pod", "monitor"])
async def test_what_could_not_be_destroyed_is_used_again(owner: Owner, user: str) -> None:
    await owner.hold("a", SMALL)
    one = next(owner.hardware.all())
    one.users.add(user)
    owner.mig.release("a")
    await owner.hold("b", LARGE)
    owner.mig.release("b")
    assert (SMALL in owner.mig.blocked) is (user == "monitor")  # half of it is gone
    assert await owner.hold("c", SMALL) == ""
    assert (owner.on(), one.uuid) == ([("1g.5gb", 6)], "MIG-0001" if user == "pod" else "MIG-0002")


async def test_an_instance_that_a_claim_takes_in_the_last_moment_is_not_destroyed(owner: Owner) -> None:
    """While the intent to destroy it is written."""
    await owner.leave_idle(SMALL)
    taken: list[asyncio.Task[str]] = []

    def cut(where: str) -> None:
        if where == "before the records" and not taken:
            taken.append(owner.begin(owner.hold("b", SMALL)))

    await owner.quiet()
    owner.records.cut = cut
    await owner.later(601)
    assert [await one for one in taken] == [""]
    assert owner.mig.gpus[named(SMALL)].uuid == "MIG-0001"
    assert ("destroy", "left") in owner.outcomes


async def test_a_driver_that_does_not_answer_may_have_made_it(owner: Owner) -> None:
    owner.raise_at("the instance is whole", SLOW)
    assert await owner.hold("a", SMALL) == ""
    assert owner.driver.calls == [("create", SMALL)]
    assert owner.mig.made == {"MIG-0001"}


async def test_a_call_that_was_not_answered_may_make_it_later(owner: Owner) -> None:
    """Its claim has ended, and the first look finds nothing: it is ours all the same, and goes after its time."""
    owner.raise_at("before create", SLOW)
    assert "does not answer" in await owner.hold("a", SMALL)
    owner.mig.release("a")
    await owner.later(100)
    list(owner.hardware.create(SMALL))
    await owner.later()
    assert owner.mig.made == {"MIG-0001"}
    await owner.later(601)
    assert owner.on() == []


async def test_a_call_that_may_still_destroy_it_is_ended_before_it_is_used_again(owner: Owner) -> None:
    await owner.leave_idle(SMALL)
    await owner.quiet()
    owner.raise_at("before destroy", SLOW)
    await owner.later(601)
    assert owner.on() == [("1g.5gb", 6)]
    assert await owner.hold("b", SMALL) == ""
    assert owner.mig.gpus[named(SMALL)].uuid == "MIG-0002"


async def test_records_that_cannot_be_written_keep_the_driver_from_being_called(owner: Owner) -> None:
    owner.raise_at("before the records", Unavailable("mig.json cannot be written: No space left on device"))
    assert "No space left" in await owner.hold("a", SMALL)
    assert owner.driver.calls == []
    await owner.later(2)
    assert await owner.hold("a", SMALL) == ""


async def test_without_the_right_it_is_said_and_nothing_called(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    owner.hardware.problem = "the agent lacks the capability mig/config: add the component mig"
    await owner.later()
    assert "add the component mig" in await owner.hold("b", place("1g.5gb", 0))
    assert SMALL not in owner.mig.blocked and place("1g.5gb", 0) in owner.mig.blocked
    assert await owner.hold("a", SMALL) == ""
    owner.mig.release("a")
    assert await owner.hold("c", SMALL) == ""
    await owner.later()
    assert owner.driver.calls == [("create", SMALL)]


async def test_a_list_that_cannot_be_read_does_not_say_what_is_gone(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    there = owner.hardware.gpus[gpu_uuid(0)][:]
    owner.hardware.problem = "NVML: UNKNOWN"
    owner.hardware.reboot()
    await owner.later()
    owner.hardware.gpus[gpu_uuid(0)], owner.hardware.problem = there, ""
    await owner.later()
    assert owner.mig.made == {"MIG-0001"}


async def test_one_that_is_made_by_hand_since_the_last_look_is_left(owner: Owner) -> None:
    """At the place for which the driver is called."""
    owner.hardware.by_hand(SMALL)
    assert "was not made by the agent" in await owner.hold("a", SMALL)
    owner.mig.release("a")
    await owner.later(1000)
    assert (owner.mig.made, owner.on()) == (set(), [("1g.5gb", 6)])


async def test_nothing_is_made_on_a_gpu_that_is_out_of_service(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    owner.seen.cordoned = {gpu_uuid(0): "fan"}
    assert "is cordoned: fan" in await owner.hold("b", place("1g.5gb", 0))
    assert await owner.hold("a", SMALL) == ""


async def test_nothing_is_made_on_excluded_gpus() -> None:
    owner = Owner(excluded_gpus=["0"])
    await owner.start()
    assert "excluded_gpus" in await owner.hold("a", SMALL)
    await owner.stop()


async def test_mig_mode_off_and_on_again_is_followed(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    owner.hardware.reboot()
    owner.hardware.without_mig.add(gpu_uuid(0))
    await owner.later()
    assert (owner.mig.gpus, owner.mig.made) == ({}, set())
    owner.hardware.without_mig.clear()
    await owner.later()
    assert owner.driver.calls == [("create", SMALL)]  # nothing by itself
    owner.hardware.without_mig.add(gpu_uuid(0))
    await owner.later()
    assert "not in MIG mode" in await owner.hold("a", SMALL)
    owner.hardware.without_mig.clear()
    await owner.later()
    assert await owner.hold("a", SMALL) == ""
    assert owner.mig.made == {"MIG-0002"}


async def test_one_that_was_removed_and_made_again_by_hand_is_another(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    owner.hardware.reboot()
    owner.hardware.by_hand(SMALL)
    await owner.later()
    assert (owner.mig.made, SMALL in owner.mig.blocked, owner.counts()["foreign"]) == (set(), True, 1)
    owner.mig.release("a")
    await owner.later(1000)
    assert owner.on() == [("1g.5gb", 6)]


async def test_of_an_own_node_that_was_not_read_nothing_is_known(owner: Owner) -> None:
    """It may be mig-manager's: the claim waits, and no place is blocked, which could end pods."""
    owner.mig.own_node.is_known = False
    task = owner.begin(owner.hold("a", SMALL))
    await owner.quiet()
    assert (task.done(), owner.mig.blocked, owner.driver.calls) == (False, {}, [])
    owner.mig.own_node._know(is_draining=False, managed="mig-manager divides it")
    assert "mig-manager divides it" in await task
    assert (len(owner.mig.blocked), owner.driver.calls) == (len(owner.mig._places), [])


async def test_a_driver_that_cannot_be_read_leaves_its_gpus_alone(owner: Owner) -> None:
    """What it showed before the call says nothing of what there is now."""
    await owner.hold("a", SMALL)
    owner.is_answering = False
    owner.mig.release("a")
    task = owner.begin(owner.hold("b", LARGE))
    for _ in range(5):
        await owner.quiet()
    assert owner.driver.calls == [("create", SMALL), ("destroy", 1)]
    owner.is_answering = True
    owner.mig._polls.request()
    assert await task == ""


@pytest.mark.parametrize("where", POINTS)
async def test_killed_at_each_point_and_started_again(owner: Owner, where: str) -> None:
    """A claim that takes another's place: whatever was done of it, in the end it has one instance and nothing is left."""
    await owner.leave_idle(SMALL)
    await owner.quiet()
    owner.raise_at(where)
    await owner.killed_while_holding("b", LARGE)
    assert await owner.hold("b", LARGE) == ""
    assert len([one for one in owner.hardware.all() if one.place == LARGE]) == 1
    owner.mig.release("b")
    await owner.later()
    await owner.later(1000)
    assert (owner.on(), owner.records.content) == ([], [])


async def test_after_a_kill_before_the_call_one_made_by_hand_is_foreign(owner: Owner) -> None:
    """The intent of a process that ended is forgotten once nothing is there."""
    owner.raise_at("before create")
    await owner.killed_while_holding("a", SMALL)
    owner.hardware.by_hand(SMALL)
    await owner.later()
    assert (owner.mig.made, owner.counts()["foreign"]) == (set(), 1)


async def test_a_restart_keeps_what_claims_have_and_what_is_idle(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    await owner.hold("b", place("1g.5gb", 0))
    owner.mig.release("b")
    await owner.quiet()
    await owner.restart({"a": {named(SMALL): GpuUuid("MIG-0001")}})
    assert owner.counts() == {"creating": 0, "held": 1, "idle": 1, "destroying": 0, "foreign": 0}
    await owner.later(1000)
    assert owner.on() == [("1g.5gb", 6)]


async def test_without_records_the_claims_say_what_is_theirs(owner: Owner) -> None:
    """And only by the UUID: one that lies at the place may be another's."""
    await owner.hold("a", SMALL)
    owner.records.content = []
    await owner.restart({"a": {named(SMALL): GpuUuid("MIG-0001")}})
    assert owner.mig.made == {"MIG-0001"}
    owner.records.content = []
    await owner.restart({"a": {named(SMALL): GpuUuid("MIG-0000")}})
    assert (owner.mig.made, SMALL in owner.mig.blocked) == (set(), True)


async def test_a_reload_goes_on_from_the_file_and_what_may_still_be_carried_out(owner: Owner) -> None:
    hangs = owner.driver.hanging[gpu_uuid(0)] = asyncio.Event()
    owner.begin(owner.hold("a", SMALL))
    await owner.quiet()
    assert owner.mig.is_calling
    await owner.reload()
    await owner.quiet()
    list(owner.hardware.create(SMALL))  # the call in the driver's thread went on
    await owner.later()
    assert owner.mig.made == {"MIG-0001"}
    assert not hangs.is_set()


async def test_an_agent_that_leaves_begins_no_call_and_waits_for_the_last(owner: Owner) -> None:
    """What a call makes after the next agent's first look would be another's to it, for good."""
    await owner.leave_idle(LARGE)
    hangs = owner.driver.hanging[gpu_uuid(0)] = asyncio.Event()
    call = owner.begin(owner.hold("b", place("1g.5gb", 0)))
    await owner.quiet()
    leaving = owner.begin(owner.mig.leave())
    await owner.quiet()
    assert owner.mig.is_calling and not leaving.done()
    hangs.set()
    await leaving
    assert await call == ""
    owner.begin(owner.hold("c", place("1g.5gb", 0, 1)))
    await owner.later(601)
    assert owner.driver.calls == [("create", LARGE), ("create", place("1g.5gb", 0))] and not owner.mig.is_calling


async def test_a_reload_knows_what_the_driver_refused_to_make(owner: Owner) -> None:
    """Its record says that it may have been made here, until the GPU was read again."""
    owner.hardware.by_hand(SMALL)
    owner.is_answering = False
    owner.begin(owner.hold("a", SMALL))
    await owner.quiet()
    owner.is_answering = True
    await owner.reload()
    await owner.later(10_000)
    assert owner.driver.calls == [("create", SMALL)]
    assert (owner.on(), owner.mig.made, owner.records.content) == ([("1g.5gb", 6)], set(), [])


async def test_a_gpu_that_the_setting_no_longer_names_is_left_to_the_administrator(owner: Owner) -> None:
    await owner.hold("a", SMALL)
    await owner.hold("b", place("1g.5gb", 0))
    owner.mig.release("b")
    await owner.quiet()
    owner.settings = owner.settings.model_copy(
        update={"mig": owner.settings.mig.model_copy(update={"on_demand": ("1",)})}
    )
    owner.hardware.inventory = _without_first_layout(owner)  # type: ignore[method-assign]
    await owner.restart({"a": {named(SMALL): GpuUuid("MIG-0001")}})
    assert owner.mig.made == {"MIG-0001"}
    assert owner.mig.gpus[named(SMALL)].uuid == "MIG-0001"
    assert (await owner.hold("a", SMALL), owner.on()) == ("", [("1g.5gb", 0), ("1g.5gb", 6)])


def _without_first_layout(owner: Owner) -> Callable[[], GpuInventory]:
    whole = owner.hardware.inventory
    return lambda: replace(whole(), mig_layouts=whole().mig_layouts[1:])


async def test_a_place_stays_tainted_while_what_lies_there_is_tried_again(owner: Owner) -> None:
    """A taint that ends for the moment of each try would have pods placed where nothing can be made."""
    await owner.hold("a", SMALL)
    one = owner.hardware.at(SMALL)
    assert one is not None
    one.users = {"monitor"}
    owner.mig.release("a")
    await owner.later(601)  # the compute instance alone is destroyed
    shown: list[str] = []
    owner.mig.on_change = lambda: shown.append(owner.mig.blocked.get(LARGE, ""))
    for _ in range(5):
        await owner.later(61)
    assert owner.driver.calls.count(("destroy", 1)) == 6
    assert "" not in [*shown, owner.mig.blocked.get(LARGE, "")]
    one.users = set()
    await owner.later(61)
    assert (owner.on(), owner.mig.blocked) == ([], {})


async def test_what_becomes_due_while_the_records_are_written_is_not_forgotten(owner: Owner) -> None:
    """Nothing else would wake the owner: a poll that finds the same changes nothing."""
    other = place("1g.5gb", 0)
    await owner.hold("a", SMALL)
    await owner.hold("b", other)
    owner.mig.release("a")
    await owner.quiet()

    def slow_disk(where: str) -> None:
        if where == "after the records":
            owner.records.cut = lambda _: None
            owner.now += 2.0

    owner.now += 599.0
    owner.hardware.removed_by_hand(owner.hardware.at(other))  # type: ignore[arg-type]
    owner.records.cut = slow_disk
    await owner.later()
    await owner.quiet()
    assert owner.on() == []


async def test_what_the_ledger_has_is_not_destroyed_though_no_claim_holds_its_place(owner: Owner) -> None:
    """An older agent knows no places: while it served, it gave the instance as a device of its own."""
    await owner.hold("a", SMALL)
    given = allocation(pod("p"), "main", ["MIG-0001::1"], [])
    owner.mig._node.cache.put(given)
    await owner.restart()
    owner.mig._node.cache.put(given)
    owner.mig.own_node.is_draining = True
    waiting = owner.begin(owner.hold("b", LARGE))
    await owner.later()
    assert (owner.on(), owner.counts()["held"]) == ([("1g.5gb", 6)], 1.0)
    owner.mig._node.cache.release_pod(given.key.pod_uid)
    await owner.later()
    assert (owner.on(), await waiting) == ([("3g.20gb", 4)], "")
