"""What the inventory offers, what it keeps, and when it tells."""

from __future__ import annotations

from gpushare_agent.decisions.health import EventMeaning
from gpushare_agent.model.card_health import HealthState, KeptHealth
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.state.gpu_inventory import GpuInventoryState
from tests.support_core import inventory
from tests.support_health import IMMEDIATE, sick, xid

FIRST, SECOND = GpuUuid("GPU-0"), GpuUuid("GPU-1")


def _state() -> tuple[GpuInventoryState, list[GpuInventory]]:
    state, told = GpuInventoryState(IMMEDIATE), []
    state.read(inventory())
    state.subscribe(told.append)
    return state, told


def reasons(state: GpuInventoryState) -> list[str]:
    return [card.unhealthy_reason for card in state.current.cards]


def test_a_cordon_is_told_once_and_lifted_once() -> None:
    """The same again changes nothing; another reason does."""
    state, told = _state()
    assert [state.cordon(SECOND, "fan"), state.cordon(SECOND, "fan"), state.cordon(SECOND, "smoke")] == [
        True,
        False,
        True,
    ]
    assert reasons(state) == ["", "cordoned: smoke"] and state.cordoned == {SECOND: "smoke"}
    assert [state.uncordon(SECOND), state.uncordon(SECOND), state.uncordon(FIRST)] == [True, False, False]
    assert reasons(state) == ["", ""] and len(told) == 3


def test_an_illness_is_told_apart_from_a_cordon() -> None:
    """A card that is only cordoned has none; the other one's stands without the operator's words."""
    state, _ = _state()
    state.note_events([xid(79, 1)])
    alone = reasons(state)[1]
    state.cordon(FIRST, "fan")
    state.cordon(SECOND, "smoke")
    assert alone and state.illnesses == {SECOND: alone}
    assert reasons(state) == ["cordoned: fan", f"cordoned: smoke; besides, {alone}"]


def test_events_of_many_cards_are_one_change_and_their_meanings_are_counted() -> None:
    """What each was taken for is for the log and the counters."""
    state, told = _state()
    noted = state.note_events([xid(79, 0), xid(79, 1), xid(79, 0), xid(13, 0), xid(79, 8), xid(79, None)])
    assert len(told) == 1 and all(reasons(state))
    assert sorted((meaning.value, count) for (_, meaning), count in noted.items()) == [
        (EventMeaning.FOREIGN.value, 1),
        (EventMeaning.IGNORED.value, 1),
        (EventMeaning.NEEDS_RESET.value, 1),
        (EventMeaning.NEEDS_RESET.value, 2),
        (EventMeaning.UNATTRIBUTED.value, 1),
    ]


def test_what_is_kept_is_taken_over_by_the_next_agent_before_the_cards_are_read() -> None:
    """A cordoned card is never offered, not even for a moment; what is kept of absent cards stays."""
    state, _ = _state()
    state.cordon(FIRST, "fan")
    state.note_events([xid(79, 1)])
    assert state.kept == KeptHealth(cordons={FIRST: "fan"}, waits={SECOND: "Xid 79 (GPU has fallen off the bus)"})
    absent = GpuUuid("GPU-absent")
    again, offered = GpuInventoryState(IMMEDIATE), []
    again.subscribe(lambda found: offered.extend(card.is_healthy for card in found.cards))
    again.restore(KeptHealth(cordons={**state.kept.cordons, absent: "away"}, waits=state.kept.waits))
    again.read(inventory())
    assert offered == [False, False]
    assert again.healths[SECOND].state is HealthState.NEEDS_RESET
    assert again.cordoned == {FIRST: "fan", absent: "away"}


def test_a_look_that_sees_the_reset_ends_what_is_kept_of_the_wait() -> None:
    """The next agent does not wait for it again."""
    state, _ = _state()
    state.note_events([xid(79, 1)])
    state.read(sick(inventory(), 1))
    assert state.kept.waits == {} and not state.current.cards[1].is_healthy
    state.read(inventory())
    assert reasons(state) == ["", ""]


def test_an_inventory_without_cards_has_no_probe_due() -> None:
    """And neither has one whose remembered cards were never seen."""
    state = GpuInventoryState(IMMEDIATE)
    state.restore(KeptHealth(cordons={FIRST: ""}, waits={SECOND: "Xid 79"}))
    assert state.next_probe_at() is None
    assert not state.lost("no driver") and state.current.cards == ()
