"""A GPU's way from healthy to unhealthy and back: events, polls, probes, resets, cordons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.gpus.part import health_policy
from gpushare_agent.core.model.gpu_health import (
    RELAPSE_WITHIN_S,
    XID_NAMES,
    EventMeaning,
    GpuEvent,
    GpuEventKind,
    GpuHealth,
    HealthPolicy,
    HealthState,
    after_driver_lost,
    after_event,
    after_poll,
    meaning_of,
    next_probe_at,
    offered,
    probe_period_s,
    uncordoned,
    why_not_offered,
)
from gpushare_agent.core.model.gpus import Gpu, Health
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.settings.sections import HealthSettings
from gpushare_agent.core.settings.settings import load_settings
from tests.gpus.support_health import xid
from tests.support_core import inventory

WELL = inventory(1).gpus[0]
POLICY = HealthPolicy(
    ignored_xids=frozenset({13}),
    reset_xids=frozenset({79}),
    recovery_probes=3,
    recovery_period_s=10.0,
    recovery_period_max_s=600.0,
)


def bad(reason: str = "fell off the bus") -> Gpu:
    return replace(WELL, health=Health.UNHEALTHY, unhealthy_reason=reason)


def hit(health: GpuHealth, number: int, now: float) -> GpuHealth:
    """The health after an Xid error that counts."""
    return after_event(health, xid(number), needs_reset=number in POLICY.reset_xids, policy=POLICY, now=now)


def polled(health: GpuHealth, *polls: tuple[float, Gpu]) -> GpuHealth:
    for now, seen in polls:
        health = after_poll(health, seen, POLICY, now)
    return health


def is_offered(health: GpuHealth) -> bool:
    return offered(WELL, health, POLICY).is_healthy


@pytest.mark.parametrize(
    ("event", "meaning"),
    [
        (xid(13), EventMeaning.IGNORED),
        (xid(13, None), EventMeaning.IGNORED),
        (xid(79), EventMeaning.NEEDS_RESET),
        (xid(94), EventMeaning.UNHEALTHY),
        (xid(79, None), EventMeaning.UNATTRIBUTED),
        (xid(79, 9), EventMeaning.FOREIGN),
        (GpuEvent(kind=GpuEventKind.DOUBLE_BIT_ECC, uuid=GpuUuid("GPU-0")), EventMeaning.NEEDS_RESET),
    ],
)
def test_an_event_is_ignored_or_counts_for_its_gpu_or_for_none(event: GpuEvent, meaning: EventMeaning) -> None:
    """The lists of the settings decide, and whether the driver named a GPU that is ours."""
    assert meaning_of(event, {GpuUuid("GPU-0")}, POLICY) is meaning


def test_a_lost_gpu_comes_back_after_three_polls_each_a_period_after_the_one_before() -> None:
    """Polls in between do not count."""
    lost = polled(GpuHealth(), (100, bad()))
    assert (lost.state, lost.cause) == (HealthState.LOST, "fell off the bus")
    early = polled(lost, (105, WELL))
    assert (early.state, early.passes) == (HealthState.PROBING, 0)
    two = polled(early, (110, WELL), (115, WELL), (120, WELL), (125, WELL))
    assert (two.passes, two.probe_at, is_offered(two)) == (2, 130, False)
    assert is_offered(polled(two, (130, WELL)))


def test_a_gpu_that_stays_lost_does_not_put_off_its_first_probe() -> None:
    """A GPU that was away for an hour is back after two more polls, not after a longer wait."""
    lost = polled(GpuHealth(), *((at, bad()) for at in range(0, 3600, 5)))
    assert polled(lost, (3600, WELL)).passes == 1


def test_an_event_takes_a_well_gpu_away_until_the_probes_are_passed() -> None:
    """The poll right after the event, which finds it usable, is none of them."""
    failed = hit(GpuHealth(), 94, now=0)
    assert (failed.state, failed.cause) == (HealthState.PROBING, "Xid 94 (contained memory error)")
    assert not is_offered(polled(failed, (0.1, WELL), (10, WELL), (20, WELL)))
    assert is_offered(polled(failed, (0.1, WELL), (10, WELL), (20, WELL), (30, WELL)))


def test_a_gpu_that_needs_a_reset_stays_out_of_service_while_it_answers() -> None:
    """Only a poll that finds it missing, and later ones that find it usable, are a reset."""
    failed = hit(GpuHealth(), 79, now=0)
    assert failed.state is HealthState.NEEDS_RESET
    waited = polled(failed, *((at, WELL) for at in range(0, 100_000, 1000)))
    assert waited == failed and not is_offered(waited)
    reset = polled(waited, (100_000, bad("being reset")))
    assert reset.state is HealthState.LOST
    assert is_offered(polled(reset, (100_010, WELL), (100_020, WELL), (100_030, WELL)))


def _recovered(health: GpuHealth, at: float) -> GpuHealth:
    while not is_offered(health):
        health = polled(health, (at, WELL))
        at += 1
    return replace(health, recovered_at=at)


def test_each_relapse_doubles_the_time_between_probes_up_to_the_most() -> None:
    """A GPU that flaps is probed ever longer before it is trusted."""
    health, periods, at = GpuHealth(), [], 0.0
    for _ in range(9):
        health = polled(health, (at, bad()))
        periods.append(probe_period_s(health, POLICY))
        health = _recovered(health, at)
        at = (health.recovered_at or 0) + 1
    assert periods == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_a_gpu_that_was_well_for_an_hour_begins_with_the_first_period_again() -> None:
    """A relapse is a failure soon after the recovery."""
    health = replace(GpuHealth(), relapses=5, recovered_at=0.0)
    assert polled(health, (RELAPSE_WITHIN_S - 1, bad())).relapses == 6
    assert polled(health, (RELAPSE_WITHIN_S, bad())).relapses == 0


def test_a_cordoned_gpu_is_away_with_the_operators_reason_however_well_it_is() -> None:
    """The cordon outlasts a failure and its end."""
    health = GpuHealth(cordon="new fan")
    assert offered(WELL, health, POLICY).unhealthy_reason == "cordoned: new fan"
    failed = polled(health, (0, bad()))
    assert why_not_offered(failed, POLICY).startswith("cordoned: new fan; also, fell off the bus")
    back = polled(failed, (10, WELL), (20, WELL), (30, WELL))
    assert (back.state, back.cordon) == (HealthState.HEALTHY, "new fan")
    assert is_offered(uncordoned(back, POLICY, 31))


def test_uncordon_ends_a_wait_for_a_reset_and_leaves_the_rest_to_the_probes() -> None:
    """An operator's request does not count as a poll."""
    put_back = uncordoned(replace(hit(GpuHealth(), 79, now=0), cordon="x"), POLICY, 50)
    assert (put_back.state, put_back.cordon, put_back.probe_at) == (HealthState.PROBING, None, 60)
    assert is_offered(polled(put_back, (60, WELL), (70, WELL), (80, WELL)))
    lost = polled(GpuHealth(), (0, bad()))
    assert uncordoned(lost, POLICY, 1) == lost


def test_the_reason_has_the_cause_and_the_way_to_recovery() -> None:
    """And does not change with each poll, for each change is reported to the API server."""
    failed = hit(GpuHealth(), 94, now=0)
    text = "after Xid 94 (contained memory error): recovers after 3 polls that find it usable, 10 s apart"
    assert {
        why_not_offered(h, POLICY) for h in (failed, polled(failed, (10, WELL)), polled(failed, (10, WELL), (20, WELL)))
    } == {text}
    waiting = hit(GpuHealth(), 79, now=0)
    assert offered(WELL, waiting, POLICY).unhealthy_reason.endswith("or for `gpushare-agent uncordon 0`")
    assert why_not_offered(GpuHealth(), POLICY) == ""


def test_the_way_to_recovery_can_be_typed_where_the_agent_has_another_socket() -> None:
    """As in the sandbox."""
    policy = health_policy(load_settings(["--root=/tmp/a b"], {}).settings)
    assert why_not_offered(hit(GpuHealth(), 79, now=0), policy, "0:1").endswith(
        "or for `gpushare-agent uncordon 0:1 --socket '/tmp/a b/run/gpushare-agent/control.sock'`"
    )
    assert health_policy(load_settings([], {}).settings).control == ""


def test_the_next_probe_is_the_earliest_that_is_due() -> None:
    """A lost GPU whose first probe is overdue waits for the usual poll; so nobody polls without a pause. One that is probed
    does not, although its time was over before anybody asked."""
    lost, probed = polled(GpuHealth(), (0, bad())), hit(GpuHealth(), 94, now=4)
    assert next_probe_at([lost, probed, GpuHealth()], 5) == 10
    assert next_probe_at([lost, probed], 12) == 14
    assert next_probe_at([lost, probed], 20) == 14
    assert next_probe_at([lost, polled(probed, (20, WELL))], 21) == 30
    assert next_probe_at([lost, polled(probed, (20, bad()))], 31) is None


PAUSES_S = st.sampled_from([10.0, 20.0]) | st.floats(0, 50)
STEPS = st.lists(
    st.tuples(st.sampled_from(["well", "bad", "failed", "reset", "lost", "cordon", "uncordon"]), PAUSES_S),
    max_size=40,
)


@given(STEPS)
def test_whatever_happens_an_offered_gpu_passed_enough_polls_since_it_last_failed(
    steps: list[tuple[str, float]],
) -> None:
    """Never after fewer passes, never while cordoned, never with a wait for a reset; and three good polls a long time apart
    bring back every GPU that waits for nothing else. Whatever fails starts the probes again, and has its own cause; a lesser
    event neither shortens the wait for a reset nor hides its cause."""
    health, now, good_polls, was_unhealthy, needs_reset = GpuHealth(), 0.0, 0, False, False
    for step, pause_s in steps:
        now += pause_s
        before = health
        if step == "well":
            health, good_polls = polled(health, (now, WELL)), good_polls + 1
        elif step == "bad":
            found = bad(f"not answering at {now}")
            health, good_polls, was_unhealthy, needs_reset = polled(health, (now, found)), 0, True, False
            assert health.cause == found.unhealthy_reason  # the newest, also of one that was lost before
        elif step in ("failed", "reset"):
            health = hit(health, 79 if step == "reset" else 94, now)
            good_polls, was_unhealthy, needs_reset = 0, True, needs_reset or step == "reset"
        elif step == "lost":
            health, good_polls, was_unhealthy = after_driver_lost(health, "gone", POLICY, now), 0, True
        elif step == "cordon":
            health = replace(health, cordon="")
        else:
            health, needs_reset = uncordoned(health, POLICY, now), False
        if step in ("bad", "failed") and before.state in (HealthState.HEALTHY, HealthState.PROBING):
            cause = f"not answering at {now}" if step == "bad" else "Xid 94 (contained memory error)"
            state = HealthState.LOST if step == "bad" else HealthState.PROBING
            expected = state, cause, 0, now + probe_period_s(health, POLICY)
            assert (health.state, health.cause, health.passes, health.probe_at) == expected
        assert step != "failed" or before.state is not HealthState.NEEDS_RESET or health == before
        if is_offered(health):
            assert health.cordon is None and not needs_reset
            assert not was_unhealthy or good_polls >= POLICY.recovery_probes
        assert bool(why_not_offered(health, POLICY)) is not is_offered(health)
        assert (health.state is HealthState.NEEDS_RESET) is needs_reset
    if health.cordon is None and not needs_reset:
        later = [(now + 1000 * number, WELL) for number in range(1, POLICY.recovery_probes + 1)]
        assert is_offered(polled(health, *later))


def test_every_xid_of_the_default_lists_has_a_name() -> None:
    """docs/explanation/health.md's table is made from them."""
    health = HealthSettings()
    assert {*health.ignored_xids, *health.reset_xids} <= set(XID_NAMES)
