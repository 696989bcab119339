"""The pods that usually come, learnt from those that were bound: bounded, decaying, the same for the same pods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.placement.fragmentation import MOST_KINDS, PodKind, TypicalPods
from gpushare_agent.extender.debug import typical_documents
from gpushare_agent.extender.learnt_pods import LEAST_CHANGES, LEAST_ENDED, LearntPods

HALF, WHOLE = PodKind(1024, 64, 1, 50), PodKind(8192, 64, 1, 100)


def supply() -> dict[str, int]:
    return {"": 8}


def put(learnt: LearntPods, kind: PodKind, count: int, prefix: str) -> None:
    for number in range(count):
        learnt.put(PodUid(f"{prefix}-{number}"), kind)


def frequencies(learnt: LearntPods) -> dict[PodKind, float]:
    typical = learnt.typical(supply)
    return {} if typical is None else dict(typical.kinds)


def test_nothing_is_typical_until_some_pods_were_bound() -> None:
    """A pod that the watch delivers again is no new one."""
    learnt = LearntPods()
    for _ in range(10):
        put(learnt, HALF, LEAST_CHANGES - 1, "a")
    assert learnt.typical(supply) is None
    put(learnt, WHOLE, 5, "b")
    assert frequencies(learnt) == {HALF: 0.75, WHOLE: 0.25}


def test_pods_that_have_ended_count_on() -> None:
    """A cluster that is empty for a night knows what came by day."""
    learnt = LearntPods()
    put(learnt, HALF, 40, "a")
    for number in range(40):
        learnt.end(PodUid(f"a-{number}"))
        learnt.end(PodUid(f"a-{number}"))  # nothing more
    assert frequencies(learnt) == {HALF: 1.0}


def test_what_a_tenant_makes_come_and_go_is_half_of_all_at_most() -> None:
    """However often; and when he stops what the others do replaces it."""
    learnt = LearntPods()
    put(learnt, WHOLE, 2 * LEAST_ENDED, "others")
    for number in range(20 * LEAST_ENDED):
        learnt.put(PodUid(f"churn-{number}"), HALF)
        learnt.end(PodUid(f"churn-{number}"))
    assert 0.2 < frequencies(learnt)[HALF] <= 0.5
    for number in range(20 * LEAST_ENDED):
        learnt.put(PodUid(f"later-{number}"), WHOLE)
        learnt.end(PodUid(f"later-{number}"))
    assert frequencies(learnt).get(HALF, 0.0) < 0.01


def test_typical_pods_that_have_hardly_moved_stay_the_same_object() -> None:
    """So that the costs that were worked out with them stay."""
    learnt = LearntPods()
    put(learnt, HALF, 1000, "a")
    first = learnt.typical(supply)
    put(learnt, WHOLE, 40, "b")
    assert learnt.typical(supply) is first
    put(learnt, WHOLE, 200, "c")
    assert learnt.typical(supply) is not first


kinds = st.builds(PodKind, st.integers(0, 3000), st.just(64), st.just(1), st.integers(1, 100))


@given(st.lists(st.tuples(st.integers(0, 400), kinds, st.booleans()), max_size=400))
def test_whatever_comes_they_are_few_and_the_same_for_the_same_pods(pods: list[tuple[int, PodKind, bool]]) -> None:
    """At most sixty kinds, whose frequencies are a whole."""

    def learn() -> list[TypicalPods | None]:
        learnt, seen = LearntPods(), []
        for number, kind, is_put in pods:
            learnt.put(PodUid(str(number)), kind) if is_put else learnt.end(PodUid(str(number)))
            seen.append(learnt.typical(supply))
        return seen

    first, second = learn(), learn()
    assert [one and one.kinds for one in first] == [one and one.kinds for one in second]
    for one in first:
        if one is not None:
            assert len(one.kinds) <= MOST_KINDS
            assert abs(sum(frequency for _, frequency in one.kinds) - 1) < 1e-9


def test_the_debug_page_shows_them() -> None:
    """The most frequent first; nothing where there are none."""
    learnt = LearntPods()
    assert typical_documents(learnt.typical(supply)) == []
    put(learnt, HALF, 5, "a")
    put(learnt, WHOLE._replace(models=("T4",)), 15, "b")
    first, second = to_builtins(typical_documents(learnt.typical(supply)))
    amounts = {"gpus": 1, "gpu_memory_mib": 0, "memory_mib": 64}
    assert first == {"percent": 75.0, "parts": 100, "cpu_milli": 8192, "models": ("T4",), **amounts}
    assert second == {"percent": 25.0, "parts": 50, "cpu_milli": 1024, "models": (), **amounts}
