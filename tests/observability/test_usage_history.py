"""The rings of the last minutes: means, gaps, turning, what is dropped."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gpushare_agent.agent.observability.usage_history import MAX_CONTAINERS, MAX_GPUS, RATIO_DIGITS, UsageHistory
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, UsageRound
from tests.fakes.clock import FakeClock
from tests.support_core import allocation, container, ids, pod
from tests.support_steps import counted

POINTS = 10
STEP_S = 5.0
A = ContainerKey(PodUid("pod-a"), "main")
B = ContainerKey(PodUid("pod-b"), "main")
GPU = GpuUuid("GPU-0")
PAUSES = st.sampled_from([0, 1, 1, 1, 3, POINTS - 1, POINTS, 3 * POINTS])
NO_ROUND, NO_NUMBERS = -1.0, (None, math.nan, math.inf, -math.inf)
"""The driver was away, and what it does not tell or what JSON has no word for."""


def history() -> tuple[UsageHistory, FakeClock]:
    clock = FakeClock(1000.0)
    return UsageHistory(POINTS * STEP_S, POINTS, clock=clock), clock


def usage(
    sm: float | None = 0.5,
    *,
    at: float = 1.0,
    gpus: int = 1,
    keys: tuple[ContainerKey, ...] = (A,),
    covered_s: float = 0.0,
) -> UsageRound:
    uuids = [GpuUuid(f"GPU-{index}") for index in range(gpus)]
    return UsageRound(
        sampled_at=at,
        covered_s=covered_s,
        gpus={uuid: GpuSample(uuid=uuid, sm_ratio=sm, memory_used_bytes=4096) for uuid in uuids},
        containers={
            (key, uuid): ContainerUse(key=key, uuid=uuid, pids=(), memory_bytes=1024, sm_ratio=sm)
            for key in keys
            for uuid in uuids
        },
    )


def document(kept: UsageHistory) -> dict[str, Any]:
    """As a client reads it."""
    found: dict[str, Any] = json.loads(b"".join(kept.pieces()))
    return found


def gpu_ratios(kept: UsageHistory) -> list[Any]:
    values: list[Any] = document(kept)["gpus"]["GPU-0"]["sm_ratio"]
    return values


def test_a_new_curve_costs_the_same_however_long_the_window_is() -> None:
    """A node that starts has hundreds of them in its first round."""
    costs = []
    for points in (POINTS, 100 * POINTS):
        kept = UsageHistory(points * STEP_S, points, clock=FakeClock(1000.0 * points))
        with counted() as steps:
            kept.add(usage(0.2))
        assert gpu_ratios(kept) == [None] * (points - 1) + [0.2]
        costs.append(steps.count)
    assert costs[0] == costs[1]


def test_a_container_is_the_sum_over_its_gpus() -> None:
    """By pod UID and container name."""
    kept, _ = history()
    kept.add(usage(0.25, gpus=2))
    container = document(kept)["containers"]["pod-a/main"]
    assert (container["sm_ratio"][-1], container["memory_bytes"][-1]) == (0.5, 2048)


def test_a_container_that_is_gone_keeps_its_curve_until_it_has_left_the_window() -> None:
    """Its last points move to the left; then it is dropped."""
    kept, clock = history()
    kept.add(usage(0.5, keys=(A, B)))
    clock.now += (POINTS - 1) * STEP_S
    kept.add(usage(0.5, keys=(B,)))
    assert document(kept)["containers"]["pod-a/main"]["sm_ratio"] == [0.5] + [None] * (POINTS - 1)
    for _ in range(2 * POINTS):
        clock.now += STEP_S
        kept.add(usage(0.25, keys=(B,)))
    assert document(kept)["containers"]["pod-b/main"]["sm_ratio"] == [0.25] * POINTS
    clock.now += 3 * STEP_S
    kept.add(usage(0.5, keys=(A,)))
    assert document(kept)["containers"]["pod-b/main"]["sm_ratio"] == [0.25] * (POINTS - 3) + [None] * 3
    clock.now += POINTS * STEP_S
    kept.add(usage(0.5, keys=(B,)))
    assert list(document(kept)["containers"]) == ["pod-b/main"]


@example([(0, 0.2), (0, 0.4), (0, 0.9), (1, 0.1)])
@example([(1, number / 100) for number in range(3 * POINTS)])
@example([*[(1, 0.9)] * POINTS, (POINTS - 2, 0.1)])
@example([*[(1, 0.9)] * POINTS, (8 * POINTS, 0.1)])
@example([(1, 0.2), (1, NO_ROUND), (1, 0.4)])
@example([(1, sm) for sm in (0.2, *NO_NUMBERS, 0.4)])
@given(st.lists(st.tuples(PAUSES, st.sampled_from([NO_ROUND, *NO_NUMBERS]) | st.floats(0, 1)), min_size=1, max_size=40))
def test_every_point_is_the_mean_of_what_was_added_in_its_time(steps: list[tuple[int, float | None]]) -> None:
    """Whatever the pauses between rounds: each of the last points, the oldest first, and nothing else, compared with a plain
    list. A ring whose places all are of the past has none of them left; what is no number is a gap of that curve alone."""
    kept, clock = history()
    slots: dict[int, list[float]] = {}
    rounds = set[int]()
    slot = int(clock.now / STEP_S)
    for pause, sm in steps:
        slot += pause
        clock.now = slot * STEP_S + 1.0
        kept.add(None if sm == NO_ROUND else usage(sm))
        if sm != NO_ROUND:
            rounds.add(slot)
        if sm is not None and sm != NO_ROUND and math.isfinite(sm):
            slots.setdefault(slot, []).append(sm)
    if not rounds:
        return
    window = range(max(rounds) - POINTS + 1, max(rounds) + 1)
    sizes = document(kept)["gpus"]["GPU-0"]["memory_used_bytes"]
    assert [size is not None for size in sizes] == [number in rounds for number in window]
    expected = [slots.get(number) for number in window]
    shown = gpu_ratios(kept)
    assert [value is None for value in shown] == [values is None for values in expected]
    for value, values in zip(shown, expected, strict=True):
        assert values is None or abs(value - sum(values) / len(values)) <= 0.5001 * 10**-RATIO_DIGITS


def test_the_number_of_curves_is_bounded() -> None:
    """A node that makes and ends containers all the time does not fill the memory."""
    kept, _ = history()
    keys = tuple(ContainerKey(PodUid(f"pod-{number:04d}"), "main") for number in range(MAX_CONTAINERS + 5))
    kept.add(usage(keys=keys))
    kept.add(usage(gpus=MAX_GPUS + 3))
    shown = document(kept)
    assert len(shown["containers"]) == MAX_CONTAINERS
    assert len(shown["gpus"]) == MAX_GPUS


def test_instances_that_are_gone_keep_no_curve_from_those_that_are_there() -> None:
    """Each life of a MIG instance has another UUID, and a curve lives for the whole window."""
    kept, _ = history()
    for life in range(3 * MAX_GPUS):
        uuids = (GPU, GpuUuid(f"MIG-{life}"))
        gpus = {uuid: GpuSample(uuid=uuid, sm_ratio=0.5, memory_used_bytes=4096) for uuid in uuids}
        kept.add(UsageRound(sampled_at=1.0, gpus=gpus, containers={}))
        assert document(kept)["gpus"].keys() >= {*uuids}
    assert len(document(kept)["gpus"]) <= MAX_GPUS


def test_the_document_is_plain_json_and_says_when_and_how_far_apart() -> None:
    """Without a round there is no time either."""
    kept, _ = history()
    assert document(kept) == {"at": None, "step_seconds": STEP_S, "gpus": {}, "containers": {}}
    kept.add(usage(at=123.5))
    text = b"".join(kept.pieces())
    assert json.loads(text)["at"] == 123.5


def test_a_curve_says_whose_it_is_also_when_the_container_is_gone() -> None:
    """For as long as it is shown; nothing else remembers the name of a pod that was deleted."""
    owner = pod("train", container(cores=30))
    allocated = allocation(owner, "main", ids(0, range(30)), [])
    allocations = {allocated.key: allocated}
    clock = FakeClock(1000.0)
    kept = UsageHistory(POINTS * STEP_S, POINTS, allocations=lambda: allocations, clock=clock)
    kept.add(usage(0.2, keys=(allocated.key,)))
    allocations.clear()
    clock.now += STEP_S
    kept.add(usage(0.2, keys=()))
    (shown,) = document(kept)["containers"].values()
    assert (shown["namespace"], shown["pod"], shown["container"], shown["gpus"]) == (
        "default",
        "train",
        "main",
        ["GPU-0"],
    )
    clock.now += POINTS * STEP_S
    kept.add(usage(0.2, keys=()))
    assert document(kept)["containers"] == {}


def test_a_reload_keeps_the_curves_unless_their_steps_change() -> None:
    """Points of another length mean something else."""
    old, clock = history()
    old.add(usage(0.5, keys=(A,)))
    same = UsageHistory(POINTS * STEP_S, POINTS, clock=clock)
    other = UsageHistory(POINTS * STEP_S, POINTS + 1, clock=clock)
    before = document(old)
    for new in (same, other):
        new.take_over(old)
    assert document(same) == before
    assert document(other)["gpus"] == {}
    clock.now += STEP_S
    same.add(usage(0.25, keys=(A,)))
    assert document(same)["containers"]["pod-a/main"]["sm_ratio"][-2:] == [0.5, 0.25]


def test_a_document_under_way_is_of_one_moment() -> None:
    """What is added while its pieces are taken changes none of them."""
    kept, clock = history()
    kept.add(usage(0.5, keys=(A, B)))
    wanted = b"".join(kept.pieces())
    pieces = kept.pieces()
    taken = [next(pieces)]
    clock.now += 2 * STEP_S
    kept.add(usage(0.75, keys=(A,)))
    assert b"".join([*taken, *pieces]) == wanted
    assert kept.version == 2


def test_a_rare_round_is_drawn_for_all_the_time_for_which_it_stands() -> None:
    """But not for the time before its container began."""
    kept, clock = history()
    kept.add(usage(0.2))
    clock.now += 3 * STEP_S
    kept.add(usage(0.4, keys=(A, B), covered_s=3 * STEP_S))
    assert gpu_ratios(kept)[-4:] == [0.2, 0.4, 0.4, 0.4]
    assert document(kept)["containers"]["pod-b/main"]["sm_ratio"][-2:] == [None, 0.4]
    clock.now += 2 * STEP_S
    kept.add(usage(0.6, covered_s=1.0))
    assert gpu_ratios(kept)[-3:] == [0.4, None, 0.6]
