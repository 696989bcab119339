"""kit/fair_queue.py: nobody's items wait for another tenant's flood, and nothing is lost but what `put` returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.kit.fair_queue import FairQueue


def test_tenants_take_turns_and_their_subjects_too() -> None:
    """A subject's own items stay in order."""
    queue: FairQueue[str] = FairQueue(10)
    for tenant, subject, item in ("a1x", "a1y", "a2z", "b1u", "b1v"):
        assert queue.put(tenant, subject, item) is None
    assert [queue.pop() for _ in range(5)] == ["x", "u", "z", "v", "y"]
    with pytest.raises(KeyError):
        queue.pop()


def test_of_a_full_queue_whoever_has_most_loses_the_newest() -> None:
    """The one that puts, where others have as many."""
    queue: FairQueue[int] = FairQueue(4)
    assert [queue.put("a", "1", number) for number in range(5)] == [None, None, None, None, 4]
    assert queue.put("a", "2", 5) == 3
    assert queue.put("b", "1", 6) == 2
    assert queue.put("b", "2", 7) == 1
    assert queue.put("b", "3", 8) == 8
    assert [queue.pop() for _ in range(4)] == [0, 6, 5, 7]


def test_more_tenants_than_places_keep_no_new_one_out() -> None:
    """Those that had a turn lately make room, though each has one item only."""
    queue: FairQueue[str] = FairQueue(4)
    flood = [f"flood-{number}" for number in range(6)]
    for name in flood[:4]:
        assert queue.put(name, "pod", name) is None
    assert queue.pop() == "flood-0"
    assert queue.put("flood-0", "pod", "again") is None
    assert queue.put("new", "pod", "item") == "again"
    assert queue.put("flood-0", "pod", "again") == "again"
    assert [queue.pop() for _ in range(4)] == ["flood-1", "flood-2", "flood-3", "item"]


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.sampled_from("123")))))
def test_each_item_comes_out_once_and_no_more_than_the_limit_wait(steps: list[tuple[str, str] | None]) -> None:
    """Taken, dropped or still waiting; of a tenant with no more than its part of the places none is dropped."""
    queue: FairQueue[tuple[int, str]] = FairQueue(6)
    put: list[int] = []
    out: list[int] = []
    waiting: dict[str, int] = dict.fromkeys("abc", 0)
    for step in steps:
        if step is None:
            taken = queue.pop() if len(queue) else None
        else:
            waiting[step[0]] += 1
            put.append(len(put))
            taken = queue.put(*step, (put[-1], step[0]))
            assert taken is None or waiting[taken[1]] > 2
        if taken is not None:
            out.append(taken[0])
            waiting[taken[1]] -= 1
        assert len(queue) == sum(waiting.values()) <= 6
    assert sorted([*out, *(queue.pop()[0] for _ in range(len(queue)))]) == put
