"""What the inventory offers, what it keeps, and when it reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.core.model.gpu_health import (
    NOTHING_SAVED,
    EventMeaning,
    GpuHealth,
    HealthPolicy,
    HealthState,
    SavedHealth,
)
from gpushare_agent.core.model.gpus import GpuInventory, Health
from gpushare_agent.core.model.names import GpuUuid
from tests.gpus.support_health import IMMEDIATE, unhealthy, xid
from tests.support_core import inventory, mig_instance

FIRST, SECOND = GpuUuid("GPU-0"), GpuUuid("GPU-1")


def _state() -> tuple[GpuInventoryState, list[GpuInventory]]:
    state, reported = GpuInventoryState(IMMEDIATE), []
    state.read(inventory())
    state.subscribe(reported.append)
    return state, reported


def reasons(state: GpuInventoryState) -> list[str]:
    return [gpu.unhealthy_reason for gpu in state.current.gpus]


def test_a_cordon_is_reported_once_and_lifted_once() -> None:
    """The same again changes nothing; another reason does."""
    state, reported = _state()
    assert [state.cordon(SECOND, reason) for reason in ("fan", "fan", "smoke")] == [True, False, True]
    assert reasons(state) == ["", "cordoned: smoke"] and state.cordoned == {SECOND: "smoke"}
    assert [state.uncordon(uuid) for uuid in (SECOND, SECOND, FIRST)] == [True, False, False]
    assert reasons(state) == ["", ""] and len(reported) == 3


def test_an_unhealthy_reason_is_reported_apart_from_a_cordon() -> None:
    """A GPU that is only cordoned has none; the other one's stands without the operator's words."""
    state, _ = _state()
    state.note_events([xid(79, 1)])
    alone = reasons(state)[1]
    state.cordon(FIRST, "fan")
    state.cordon(SECOND, "smoke")
    assert alone and state.unhealthy_reasons == {SECOND: alone}


def test_events_of_many_gpus_are_one_change_and_their_meanings_are_counted() -> None:
    """What each was taken for is for the log and the counters."""
    state, reported = _state()
    noted = state.note_events([xid(79, 0), xid(79, 1), xid(79, 0), xid(13, 0), xid(79, 8), xid(79, None)])
    assert len(reported) == 1 and all(reasons(state))
    assert sorted((meaning.value, count) for (_, meaning), count in noted.items()) == [
        (EventMeaning.FOREIGN.value, 1),
        (EventMeaning.IGNORED.value, 1),
        (EventMeaning.NEEDS_RESET.value, 1),
        (EventMeaning.NEEDS_RESET.value, 2),
        (EventMeaning.UNATTRIBUTED.value, 1),
    ]


def test_what_is_saved_is_taken_over_by_the_next_agent_before_the_gpus_are_read() -> None:
    """A cordoned GPU is never offered, not even for a moment; what is kept of absent GPUs stays."""
    state, _ = _state()
    state.cordon(FIRST, "fan")
    state.note_events([xid(79, 1)])
    assert state.saved == SavedHealth(cordons={FIRST: "fan"}, waits={SECOND: "Xid 79 (GPU has fallen off the bus)"})
    absent = GpuUuid("GPU-absent")
    again, offered = GpuInventoryState(IMMEDIATE), []
    again.subscribe(lambda found: offered.extend(gpu.is_healthy for gpu in found.gpus))
    again.restore(SavedHealth(cordons={**state.saved.cordons, absent: "away"}, waits=state.saved.waits))
    again.read(inventory())
    assert offered == [False, False]
    assert again.healths[SECOND].state is HealthState.NEEDS_RESET
    assert again.cordoned == {FIRST: "fan", absent: "away"}


def test_a_poll_that_sees_the_reset_ends_the_saved_wait() -> None:
    """The next agent does not wait for it again."""
    state, _ = _state()
    state.note_events([xid(79, 1)])
    state.read(unhealthy(inventory(), 1))
    assert state.saved.waits == {} and not state.current.gpus[1].is_healthy
    state.read(inventory())
    assert reasons(state) == ["", ""]


def test_of_an_agent_that_served_until_now_all_that_is_saved_is_newer() -> None:
    """Also what it ended since: the wait for a reset and the cordon of the GPU that is offered again."""
    state = GpuInventoryState(IMMEDIATE)
    state.restore(SavedHealth(cordons={FIRST: "fan"}, waits={FIRST: "Xid 79"}))
    state.read(inventory())
    saved = SavedHealth(cordons={SECOND: "dust"}, waits={SECOND: "Xid 79"})
    state.restore(saved, is_newest=True)
    state.read(inventory())
    assert state.saved == saved and [gpu.is_healthy for gpu in state.current.gpus] == [True, False]


def test_an_inventory_without_gpus_has_no_probe_due() -> None:
    """And neither has one whose remembered GPUs were never seen."""
    state = GpuInventoryState(IMMEDIATE)
    state.restore(SavedHealth(cordons={FIRST: ""}, waits={SECOND: "Xid 79"}))
    assert state.next_probe_at() is None
    assert not state.lost("no driver") and state.current.gpus == ()


PROBES = HealthPolicy(
    reset_xids=frozenset({79}), recovery_probes=2, recovery_period_s=10.0, recovery_period_max_s=600.0
)


def _clocked() -> tuple[GpuInventoryState, list[float]]:
    """An inventory that wants two polls, and its clock."""
    now = [0.0]
    state = GpuInventoryState(PROBES, clock=lambda: now[0])
    state.read(inventory())
    return state, now


def _offered(state: GpuInventoryState) -> list[bool]:
    return [gpu.is_healthy for gpu in state.current.gpus]


def test_one_poll_that_the_driver_leaves_unanswered_is_over_with_the_next() -> None:
    """No GPU failed: none has to pass probes, none has a relapse. A cordon of that time holds."""
    state, now = _clocked()
    state.lost("no answer")
    assert _offered(state) == [False, False]
    state.cordon(SECOND, "fan")
    now[0] = 5.0
    state.read(inventory())
    assert _offered(state) == [True, False] and reasons(state)[1] == "cordoned: fan"
    assert state.healths[FIRST] == GpuHealth()


def test_a_second_unanswered_poll_and_a_second_loss_within_the_hour_call_for_probes() -> None:
    """A driver that fails again and again must not have its GPUs come and go with every poll."""
    state, now = _clocked()
    for at in (0.0, 5.0):
        now[0] = at
        state.lost("no answer")
    now[0] = 9.0
    state.read(inventory())
    assert _offered(state) == [False, False]
    for at in (10.0, 20.0):
        now[0] = at
        state.read(inventory())
    assert _offered(state) == [True, True]
    for at, is_back in ((5000.0, True), (5100.0, False)):
        now[0] = at
        state.lost("no answer")
        state.read(inventory())
        assert _offered(state) == [is_back] * 2


def test_after_an_unanswered_poll_that_a_gpu_did_not_survive_all_are_probed() -> None:
    """What was healthy and is not any more shows that something happened; a GPU that was unhealthy before shows nothing."""
    state, _ = _clocked()
    state.lost("no answer")
    state.read(unhealthy(inventory(), 1))
    assert _offered(state) == [False, False]
    state, _ = _clocked()
    state.read(unhealthy(inventory(), 1))
    state.lost("no answer")
    state.read(unhealthy(inventory(), 1))
    assert _offered(state) == [True, False]


def test_an_error_of_a_gpu_beside_an_unanswered_poll_is_not_forgiven() -> None:
    """Before or after that poll; the other GPU comes back at once."""
    for is_before in (True, False):
        state, now = _clocked()
        if is_before:
            state.note_events([xid(94, 1)])
        state.lost("no answer")
        if not is_before:
            state.note_events([xid(94, 1)])
        now[0] = 5.0
        state.read(inventory())
        assert _offered(state) == [True, False]


def test_a_reload_of_the_same_process_goes_on_with_all_that_was_known() -> None:
    """Cordons and waits that no file keeps, probes that have begun, relapses; what a file says of known GPUs is older."""
    state, now = _clocked()
    state.restore(NOTHING_SAVED)
    state.note_events([xid(94, 0), xid(79, 1)])
    state.cordon(SECOND, "fan")
    now[0] = 10.0
    state.read(inventory())
    absent = GpuUuid("GPU-absent")
    later = GpuInventoryState(PROBES, clock=lambda: now[0])
    later.take_over(state)
    later.restore(SavedHealth(cordons={FIRST: "of long ago", absent: "away"}, waits={}))
    assert not later.is_read
    later.read(inventory())
    assert later.is_read and _offered(later) == [False, False]
    assert (later.healths[FIRST].state, later.healths[FIRST].passes) == (HealthState.PROBING, 1)
    assert later.saved == SavedHealth(
        cordons={SECOND: "fan", absent: "away"}, waits={SECOND: "Xid 79 (GPU has fallen off the bus)"}
    )
    now[0] = 20.0
    later.read(inventory())
    assert _offered(later) == [True, False]
    again = GpuInventoryState(PROBES, clock=lambda: now[0])
    again.take_over(later)
    again.read(inventory())
    again.read(unhealthy(inventory(), 0))
    assert again.healths[FIRST].relapses == 1


def test_an_unanswered_poll_is_over_with_the_next_after_a_reload_too() -> None:
    """And a second one within the hour is not."""
    state, now = _clocked()
    state.lost("no answer")
    later = GpuInventoryState(PROBES, clock=lambda: now[0])
    later.take_over(state)
    later.read(inventory())
    assert _offered(later) == [True, True]
    again = GpuInventoryState(PROBES, clock=lambda: now[0])
    again.take_over(later)
    again.read(inventory())
    again.lost("no answer")
    again.read(inventory())
    assert _offered(again) == [False, False]


def test_gpus_of_which_none_could_be_named_are_not_read_yet() -> None:
    """The driver reported that there are some: nothing may be taken for their absence."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(replace(inventory(0), unreadable=((0, "NVML: GPU is lost"),)))
    assert not state.is_read
    state.read(inventory(0))
    assert state.is_read


def with_instances(*numbers: int) -> GpuInventory:
    """GPU-1, and these instances of GPU-0, with the rows of four GPUs."""
    found = inventory(4)
    return replace(
        found, gpus=(found.gpus[1], *(mig_instance(2 + n, 0, n) for n in numbers)), mig_partitioned=(found.gpus[0],)
    )


def test_the_cordon_of_an_instance_outlives_it() -> None:
    """Until one with its UUID is made again."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(with_instances(0, 1))
    state.cordon(GpuUuid("MIG-3"), "fan")
    for left in (0, 1):
        state.read(with_instances(left))
    assert reasons(state) == ["", "cordoned: fan"]


def test_an_event_is_of_the_instance_that_the_driver_names() -> None:
    """Without an instance it is of all of the GPU; others are not touched."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(with_instances(0, 1))
    noted = state.note_events([replace(xid(94, 0), gi=1, ci=0)])
    assert [bool(reason) for reason in reasons(state)] == [False, False, True]
    assert [event.uuid for event, _ in noted] == ["MIG-3"]
    state.note_events([xid(79, 0)])
    assert [bool(reason) for reason in reasons(state)] == [False, True, True]


MIG_OFF, MIG_ON, MIG_OTHER = inventory(), with_instances(0), with_instances(1)


@pytest.mark.parametrize("first", [MIG_OFF, MIG_ON])
@pytest.mark.parametrize("later", [MIG_ON, MIG_OTHER, MIG_OFF])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_holds_for_a_gpu_outlives_its_partitioning(
    first: GpuInventory, later: GpuInventory, is_restarted: bool
) -> None:
    """A wait for a reset and a cordon are of the physical GPU: of its instances, whatever becomes of them, and of the GPU
    when MIG is off, over a restart of the agent too. The other GPU is not touched."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(first)
    state.note_events([xid(79, 0)])
    state.cordon(FIRST, "fan")
    if is_restarted:
        state, saved = GpuInventoryState(IMMEDIATE), state.saved
        state.restore(saved)
    state.read(later)
    healthy = {gpu.uuid: gpu.is_healthy for gpu in state.current.gpus}
    assert healthy == {gpu.uuid: gpu.uuid == "GPU-1" for gpu in later.gpus}
    [reason] = [gpu.unhealthy_reason for gpu in state.current.gpus if not gpu.is_healthy]
    assert "cordoned: fan; also, Xid 79" in reason
    [of_gpu] = [gpu for gpu in state.current.gpus if not gpu.is_healthy]
    assert state.cordoned[of_gpu.uuid] == "fan" and "Xid 79" in state.unhealthy_reasons[of_gpu.uuid]
    assert state.saved.waits.keys() == state.saved.cordons.keys() == {FIRST}
    state.uncordon(FIRST)
    state.read(later)
    assert {gpu.is_healthy for gpu in state.current.gpus} == {True}


def test_a_gpu_in_mig_mode_without_instances_was_not_reset() -> None:
    """It is out of service, and answers: neither that nor a fabric that it has not joined ends a wait for a reset."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(MIG_OFF)
    state.note_events([xid(79, 0)])
    empty = unhealthy(MIG_OFF, 0)
    state.read(replace(empty, gpus=(replace(empty.gpus[0], is_withheld=True), *empty.gpus[1:])))
    for found in (MIG_ON, MIG_OFF):
        state.read(found)
        assert [gpu.is_healthy for gpu in state.current.gpus if gpu.uuid != "GPU-1"] == [False]
    state.read(empty)
    state.read(MIG_OFF)
    assert reasons(state) == ["", ""]


def test_a_reset_of_a_divided_gpu_is_observed() -> None:
    """The driver does not find it for a moment; its instances, made again, are healthy with it."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(MIG_ON)
    state.note_events([xid(79, 0)])
    gpus, [divided] = unhealthy(MIG_ON, 1), MIG_ON.mig_partitioned
    lost = replace(divided, health=Health.UNHEALTHY, unhealthy_reason="NVML: GPU is lost")
    state.read(replace(gpus, mig_partitioned=(lost,)))
    assert [gpu.is_healthy for gpu in state.current.gpus] == [True, False]
    state.read(MIG_OTHER)
    assert [gpu.is_healthy for gpu in state.current.gpus] == [True, True]


@pytest.mark.parametrize("is_held", [False, True])
def test_an_instance_that_needs_a_reset_leaves_that_to_its_gpu(is_held: bool) -> None:
    """It is removed, also while a container has it; another may be made in its place. The GPU then waits, and the
    instances that are left wait with it."""
    state = GpuInventoryState(IMMEDIATE)
    state.read(with_instances(0, 1))
    state.note_events([replace(xid(79, 0), gi=1, ci=0)])
    assert [gpu.is_healthy for gpu in state.current.gpus] == [True, True, False]
    removed = with_instances(0, 1) if is_held else with_instances(0)
    gone = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason="gone", mig=replace(gpu.mig, is_gone=True))
        if gpu.mig is not None and gpu.mig.gi == 1
        else gpu
        for gpu in removed.gpus
    )
    state.read(replace(removed, gpus=gone))
    # No poll finds it again.
    assert {gpu.unhealthy_reason for gpu in state.current.gpus if gpu.is_gone} == ({"gone"} if is_held else set())
    assert [gpu.is_healthy for gpu in state.current.gpus][:2] == [True, False]
    assert state.saved.waits.keys() == {FIRST}


def test_an_instance_that_is_removed_while_the_driver_misses_a_poll() -> None:
    """The others are offered again at once."""
    state = GpuInventoryState(PROBES)
    state.read(with_instances(0, 1))
    state.lost("no answer")
    state.read(MIG_ON)
    assert _offered(state) == [True, True]


def test_a_driver_that_refuses_a_process_which_had_gpus() -> None:
    """From the first refusal on, whether of NVML or of every GPU, over a reload too; an answer, or a driver that hangs
    instead, ends it. A process that had no usable GPU waits for one without a restart: that is what the next one does."""
    state, now = _clocked()
    state.lost("no answer")
    now[0] += 100
    assert state.refused_for_s == 0
    state.lost("mismatch", is_refused=True)
    now[0] += 10
    state.read(replace(unhealthy(unhealthy(inventory(), 0), 1), is_refused=True))
    later = GpuInventoryState(PROBES, clock=lambda: now[0])
    later.take_over(state)
    assert (state.refused_for_s, later.refused_for_s) == (10, 10)
    later.lost("no answer")
    assert later.refused_for_s == 0
    state.read(inventory())
    assert state.refused_for_s == 0
    never = GpuInventoryState(PROBES, clock=lambda: now[0])
    never.lost("mismatch", is_refused=True)
    never.read(replace(unhealthy(unhealthy(inventory(), 0), 1), is_refused=True))
    never.lost("mismatch", is_refused=True)
    now[0] += 1000
    assert never.refused_for_s == 0
