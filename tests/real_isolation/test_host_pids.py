"""A process whose host PID the real HAMi-core does not find: the agent writes it, and its compute is limited."""

from __future__ import annotations

import pytest

from tests.real_isolation.conftest import NodeOf

PROGRAM = "/opt/programs/gpu_program dlsym 12080"
ONE_ENDS_WHILE_ANOTHER_STARTS = f"""
{PROGRAM} launch:kernel:999 & first=$!
read line
FAKE_GPU_STOPS_IN=cuDevicePrimaryCtxRetain {PROGRAM} launch:kernel:6 launch:kernel:6 & second=$!
until grep -q "^State:.T" /proc/$second/status; do sleep 0.05; done
kill -9 $first; wait $first
kill -CONT $second; wait $second
"""
"""The library compares the driver's process lists before and after it has made a context: here as many are in both."""


@pytest.mark.isolation
@pytest.mark.smoke
@pytest.mark.parametrize("pids", ["host", "open570"])
def test_a_process_that_starts_while_another_ends_is_throttled(node_of: NodeOf, pids: str) -> None:
    """After a few seconds, in which the agent finds its host PID."""
    node = node_of("hami-core", pids)
    node.apply("web", cores=30, blocks=10)
    try:
        program = node.start_command("web", ["/bin/sh", "-c", ONE_ENDS_WHILE_ANOTHER_STARTS])
        assert program.wait_for("gpu"), program.error
        program.go_on()
        found = program.outcome()
        node.end(program)
    finally:
        node.delete("web")
    assert "host pid is error!" in found.error
    rates = [step["rate"] for step in found.steps if step["action"] == "launch"]
    assert rates[1] < 500, f"{rates}; {found.error}"
