"""What isolations do on a node, as the agent joins it: the services of a live resize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.isolation.isolations import ShareEnforcement
from gpushare_agent.isolation.part import IsolationPart
from gpushare_agent.isolation.request import Follows
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.pods import Pod
from tests.support_core import allocation, container, ids, pod

BOTH = "hami-core+driver"
POD = pod("share", container(cores=30))
SHARE = allocation(POD, "main", ids(0, range(30)), [])


def answers(text: str, asked: list[str]) -> Callable[[Allocation, Pod], Awaitable[str]]:
    async def enforce(allocation: Allocation, pod: Pod) -> str:
        asked.append(text)
        return text

    return enforce


async def test_a_combination_enforces_its_parts_until_one_has_a_problem() -> None:
    """The text is that part's; the ones after it are asked at the next time."""
    asked: list[str] = []
    parts = {
        "hami-core": IsolationPart(enforce=answers("", asked)),
        "driver": IsolationPart(enforce=answers("its cgroup is not known", asked)),
    }
    enforcement = ShareEnforcement(chosen=lambda _: BOTH, parts=parts)
    assert await enforcement.enforce(SHARE, POD) == "its cgroup is not known"
    assert asked == ["", "its cgroup is not known"]


async def test_a_part_that_needs_nothing_enforces_nothing() -> None:
    """Isolation none, and mps, whose limits are fixed when a process starts."""
    enforcement = ShareEnforcement(chosen=lambda _: "none", parts={"none": IsolationPart()})
    assert await enforcement.enforce(SHARE, POD) == ""


async def test_an_isolation_that_the_node_does_not_allow_enforces_nothing_and_says_so() -> None:
    """The pod's annotation names it."""
    enforcement = ShareEnforcement(chosen=lambda _: None, parts={})
    assert "not in use on this node" in await enforcement.enforce(SHARE, POD)
    assert enforcement.isolation_of(POD) is None


def test_memory_that_one_part_fixes_is_fixed_for_the_combination() -> None:
    """Where NVIDIA's toolkit sets the driver's limit; compute follows as before."""
    parts = {"hami-core": IsolationPart(), "driver": IsolationPart(is_memory_fixed=True)}
    found = ShareEnforcement(chosen=lambda _: BOTH, parts=parts).isolation_of(POD)
    assert found is not None and found.memory_follows is Follows.NOBODY
    assert found.cores_follow is ISOLATIONS[BOTH].cores_follow
