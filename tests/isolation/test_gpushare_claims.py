"""What containers on a GPU pay by their `usage`, and what others are told of it, whatever the files say."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.isolation.gpushare.claims import Claim, Claims
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits, Observed, Paid
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import PodUid

MS = 1_000_000
BEGAN = 1000_000 * MS
A, B, C = (ContainerKey(PodUid(f"{n}1111111-2222-3333-4444-555555555555"), "main") for n in (1, 2, 3))
ANY = st.integers(0, (1 << 64) - 1)


def paid(ms: float, launches: int = 0, long_ms: float = 0.0) -> Paid:
    """The counters as they are in the file."""
    return Paid(paid_ns=int(ms * MS) % (1 << 64), launches=launches, paid_long_ns=int(long_ms * MS) % (1 << 64))


def claim(readings: Iterable[Paid], most: float = 0.3, *, period_ms: int = 100) -> tuple[Claim, int]:
    """After these readings, and when the last was."""
    found, at_ns = Claim(), BEGAN
    for at_ns, reading in enumerate(readings):
        found.note(BEGAN + at_ns * period_ms * MS, most, reading)
    return found, BEGAN + at_ns * period_ms * MS


def limits(cores: int | None, ceiling: int | None = None) -> GpuLimits:
    return GpuLimits(uuid="GPU-1", cores=cores, ceiling=ceiling)


@pytest.mark.parametrize("begin_ms", [0.0, -1.0, -2000.0])
def test_what_is_paid_in_a_second_is_claimed_also_where_the_counter_wraps(begin_ms: float) -> None:
    """It begins below zero where a first launch is given back more than was counted."""
    found, at_ns = claim(paid(begin_ms + 25 * n, n, 10 * n) for n in range(30))
    assert found.ratio == pytest.approx(0.25, abs=0.001)
    assert found.use(1).long == pytest.approx(0.1, abs=0.001)
    assert found.is_active(at_ns)


def test_a_program_that_begins_is_claimed_from_its_first_reading_on() -> None:
    """The second before it counts as much as the pause that it was."""
    found, _ = claim([*[paid(0)] * 30, paid(20, 5)])
    assert found.ratio == pytest.approx(0.2)


def test_a_long_kernel_pays_at_once_and_is_claimed_until_the_share_has_earned_it() -> None:
    """300 ms in a share of 30, once a second: the mean, without what a bound on each reading would take."""
    ratios = []
    found = Claim()
    for n in range(100):
        found.note(BEGAN + n * 100 * MS, 0.3, paid(300 * (n // 10), n // 10, 300 * (n // 10)))
        ratios.append(found.ratio)
    assert sum(ratios[-30:]) / 30 == pytest.approx(0.3, abs=0.01)
    assert found.use(1).long == found.ratio


def test_what_was_paid_too_much_and_is_given_back_counts_less() -> None:
    """Launches pay 40 ms in a reading, and in the next one half of it was too much."""
    found, _ = claim(paid(20 * n + 20 * (n % 2), n) for n in range(40))
    assert found.ratio == pytest.approx(0.2, abs=0.03)


def test_who_launches_nothing_for_a_second_computes_no_more() -> None:
    readings = [*(paid(20 * n, n) for n in range(10)), *[paid(180, 9)] * 9]
    found, at_ns = claim(readings)
    assert found.is_active(at_ns) and not found.is_active(at_ns + 200 * MS)


def test_a_launch_that_waits_is_one_that_computes() -> None:
    """It has paid for a kernel of 400 ms, or is about to run: its count grows afterwards."""
    found, at_ns = claim([paid(0, 1), paid(400, 1), *[paid(400, 1)] * 5])
    assert found.is_active(at_ns)
    found, at_ns = claim([paid(0, 1), paid(400, 1), *[paid(400, 1)] * 25])
    assert not found.is_active(at_ns)


def test_readings_at_the_same_moment_and_after_a_pause_change_nothing() -> None:
    found, at_ns = claim(paid(25 * n, n) for n in range(20))
    before = found.ratio
    found.note(at_ns, 0.3, paid(99_999, 99))
    found.note(at_ns - MS, 0.3, paid(99_999, 99))
    assert found.ratio == before
    found.note(at_ns + 60_000 * MS, 0.3, paid(25 * 19 + 15_000, 99))
    assert found.ratio == pytest.approx(0.25, abs=0.001)


def test_a_resize_counts_at_once() -> None:
    found, at_ns = claim(paid(30 * n, n) for n in range(20))
    found.note(at_ns + 100 * MS, 0.1, paid(30 * 20, 20))
    assert found.ratio == 0.1


# ---- what others are told ----


def claims(**shares: tuple[GpuLimits, float]) -> tuple[Claims, int]:
    """A, B, C with their limits pay so many ms in each of 30 readings."""
    found = Claims()
    keys = {"a": A, "b": B, "c": C}
    for n in range(30):
        for name, (own, ms) in shares.items():
            found.note(keys[name], own, BEGAN + n * 100 * MS, paid(ms * n, n if ms else 0))
    return found, BEGAN + 2900 * MS


def published(found: Claims, at_ns: int) -> dict[ContainerKey, int]:
    """How many others compute, as each is told."""
    seen = found.publish(dict.fromkeys((A, B, C), Observed(used_bytes=7)), at_ns, None)
    assert {one.used_bytes for one in seen.values()} == {7} and {one.published_at_ms for one in seen.values()} == {
        1002900
    }
    return {key: one.companions for key, one in seen.items()}


def ratios(found: Claims, at_ns: int) -> list[float | None]:
    return [None if (ratio := found.ratio(key, at_ns)) is None else round(ratio, 3) for key in (A, B, C)]


def test_each_is_told_of_the_others_that_compute() -> None:
    found, at_ns = claims(a=(limits(3000), 20), b=(limits(5000), 40), c=(limits(1000), 0))
    assert published(found, at_ns) == {A: 1, B: 1, C: 2}
    assert ratios(found, at_ns) == [0.2, 0.4, None]


def test_a_boast_is_worth_the_share_or_the_ceiling_or_the_gpu() -> None:
    found, at_ns = claims(a=(limits(3000), 9000), b=(limits(2000, 5000), 9000), c=(limits(None), 9000))
    assert ratios(found, at_ns) == [0.3, 0.5, 1.0]
    found.keep({B})
    assert published(found, at_ns) == {A: 1, B: 0, C: 1} and ratios(found, at_ns) == [None, 0.5, None]


def test_nobody_is_told_of_who_is_alone() -> None:
    found, at_ns = claims(a=(limits(3000), 20))
    [seen] = found.publish({A: Observed()}, at_ns, 0.99).values()
    assert (seen.companions, seen.full, seen.between_us) == (0, 0, 0)
    assert Claims().publish({}, at_ns, None) == {}
    assert Claims().publish({A: Observed()}, 1 << 32, None)[A].published_at_ms > 0


def test_kernels_of_a_small_share_are_not_there_all_the_time() -> None:
    """Whatever it says: its neighbour would be charged less for its own."""
    found = Claims()
    for n in range(30):
        at_ns = BEGAN + n * 100 * MS
        found.note(
            A,
            limits(500),
            at_ns,
            Paid(paid_ns=99 * n * MS, launches=n, paid_long_ns=99 * n * MS, present_long_ns=100 * n * MS),
        )
        found.note(
            B,
            limits(9500),
            at_ns,
            Paid(paid_ns=90 * n * MS, launches=n, paid_long_ns=90 * n * MS, present_long_ns=95 * n * MS),
        )
    seen = found.publish({A: Observed(), B: Observed()}, at_ns, 0.95)
    assert seen[B].between_us <= 250 and 1500 <= seen[A].between_us <= 2000


def test_a_hundred_shares_of_a_gpu_are_each_told_of_the_others() -> None:
    found, keys = Claims(), [ContainerKey(PodUid(str(n)), "main") for n in range(100)]
    for n in range(20):
        for key in keys:
            found.note(key, limits(100), BEGAN + n * 100 * MS, paid(n, n, n))
    seen = found.publish(dict.fromkeys(keys, Observed()), BEGAN + 1900 * MS, 0.99)
    assert {one.companions for one in seen.values()} == {99} and len({one.between_us for one in seen.values()}) == 1


@given(
    st.lists(st.tuples(ANY, ANY, ANY, ANY, ANY), min_size=1, max_size=60),
    st.sampled_from([1, 3000, 10_000]),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_whatever_the_counters_say_no_more_than_the_share_is_believed_and_told(
    readings: list[tuple[int, int, int, int, int]], cores: int, busy: float | None
) -> None:
    """Jumps, wraps, steps back; and two seconds after the last of it nothing is left."""
    found, most, at_ns = Claims(), cores / 10_000, BEGAN
    for n, (ns, launches, long_ns, turns, present_ns) in enumerate(readings + readings[-1:] * 50):
        at_ns = BEGAN + n * 100 * MS
        said = Paid(paid_ns=ns, launches=launches, paid_long_ns=long_ns, turns=turns, present_long_ns=present_ns)
        found.note(A, limits(cores), at_ns, said)
        found.note(B, limits(3000), at_ns, paid(20 * n, n, 20 * n))
        use = found.of[A].use(1)
        assert 0 <= use.long <= use.paid == found.of[A].ratio <= most
        for one in found.publish({A: Observed(), B: Observed()}, at_ns, busy).values():
            assert 0 <= one.companions <= 1 and 0 <= one.full <= 10_000 and 0 <= one.between_us <= 8000
    assert not found.of[A].is_active(at_ns) and found.of[A].ratio < 0.1 * most


def told_of_others(others_ms: Iterable[int], busy: float, own: float = 0.3, other: float | None = None) -> Observed:
    """What a container is told that pays `own` of the time, next to another one that says `other`."""
    claims, seen, at_ns = Claims(), Observed(), BEGAN
    for n, others in enumerate(others_ms):
        at_ns = BEGAN + n * 100 * MS
        claims.note(A, limits(3000), at_ns, paid(100 * own * n, n, 100 * own * n))
        if other is not None:
            claims.note(B, limits(6000), at_ns, paid(100 * other * n, n))
        seen = claims.publish({A: Observed(others_ns=others * MS)}, at_ns, busy)[A]
    return seen


def test_one_that_hides_what_it_computes_is_a_companion() -> None:
    """The GPU is busy for more than is paid, and the driver names somebody else; but not where it names nobody."""
    assert told_of_others(range(0, 4000, 100), 0.99).companions == 1
    assert told_of_others(range(0, 4000, 100), 0.99).between_us > 1000
    assert told_of_others([0] * 40, 0.99).companions == 0
    assert told_of_others(range(0, 4000, 100), 0.35).companions == 0


def test_what_another_says_is_not_believed_beyond_what_the_gpu_was_busy() -> None:
    """It says 60 and computes nothing: from a second and a half on."""
    honest, boasting = (told_of_others([0] * 40, busy, other=0.6) for busy in (0.9, 0.3))
    assert honest.between_us > 500 and boasting.between_us == 0
