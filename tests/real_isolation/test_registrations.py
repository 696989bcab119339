"""vcuda-control registers each CUDA program at its start and ends it where that fails: bursts, and agents that restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.real_isolation.conftest import NodeOf
from tests.real_isolation.support_isolation import IsolationNode

pytestmark = pytest.mark.isolation

PROGRAMS = 150
START_THEM = f"""
echo '{{"action": "wait"}}'
read line
for i in $(seq {PROGRAMS}); do
    (/opt/programs/gpu_program dlsym 11080 > /dev/null; echo '{{"action": "ended", "result": '$?'}}') &
done
wait
"""


@pytest.fixture
def node(node_of: NodeOf) -> Iterator[IsolationNode]:
    node = node_of("vcuda", "host")
    node.apply("burst", cores=30, blocks=10)
    yield node
    node.delete_all()


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("restarts", ["not", "among the calls", "before the calls"])
def test_of_150_programs_that_start_at_once_none_ends(node: IsolationNode, uid: int, restarts: str) -> None:
    """Also where the agent is killed: by SIGKILL, when the first of them has registered, or just before any has."""
    command = ["sh", "-c", START_THEM]
    program = node.start_command("burst", command, uid=uid, env={"FAKE_GPU_CONTEXT_MIB": "1"})
    try:
        assert program.wait_for("wait")
        if restarts == "before the calls":
            node.ask("kill-agent")
        program.go_on()
        if restarts == "among the calls":
            assert program.wait_for("ended")
            node.ask("kill-agent")
        outcome = program.outcome()
    finally:
        node.end(program)
    ended = Counter(step["result"] for step in outcome.steps if step["action"] == "ended")
    assert (dict(ended), outcome.error) == ({0: PROGRAMS}, "")
    node.wait_until(node.is_ready, "the agent")
