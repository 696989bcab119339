"""vcuda-control registers each CUDA program at its start and ends it where that fails: bursts, and agents that restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.real_isolation.conftest import NodeOf
from tests.real_isolation.support_isolation import IsolationNode

pytestmark = pytest.mark.isolation

PROGRAMS = 150


@pytest.fixture
def node(node_of: NodeOf) -> Iterator[IsolationNode]:
    node = node_of("vcuda", "host")
    node.apply("burst", cores=30, blocks=10)
    yield node
    node.delete_all()


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("kill", ["", "among", "before"])
def test_of_150_programs_that_start_at_once_none_ends(node: IsolationNode, uid: int, kill: str) -> None:
    """Also where the agent is killed: by SIGKILL, when the first of them has registered, or just before any has."""
    outcome = node.start_at_once("burst", PROGRAMS, "dlsym", "11080", kill=kill, uid=uid)
    ended = Counter(step["result"] for step in outcome.steps if step["action"] == "ended")
    assert (dict(ended), outcome.error) == ({0: PROGRAMS}, "")
    node.wait_until(node.is_ready, "the agent")
