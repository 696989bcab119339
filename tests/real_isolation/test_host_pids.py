"""A process whose host PID the real HAMi-core does not find: the agent writes it, and its compute is limited."""

from __future__ import annotations

import pytest

from tests.real_isolation.conftest import NodeOf

PROGRAM = "/opt/programs/gpu_program dlsym 12080"
ONE_ENDS_WHILE_ANOTHER_STARTS = f"""
exec 3<&0
{PROGRAM} launch:kernel:999 & first=$!
read line
FAKE_GPU_STOPS_IN=cuDevicePrimaryCtxRetain {PROGRAM} wait launch:kernel:6 <&3 & second=$!
until grep -q "^State:.T" /proc/$second/status; do sleep 0.05; done
kill -9 $first; wait $first
kill -CONT $second; wait $second
"""
"""The library compares the driver's process lists before and after it has made a context: here as many are in both."""


@pytest.mark.isolation
@pytest.mark.parametrize("pids", ["host", "open570"])
def test_a_process_that_starts_while_another_ends_is_throttled(node_of: NodeOf, pids: str) -> None:
    """Once the agent has written its host PID, some seconds after its start."""
    node = node_of("hami-core", pids)
    node.apply("web", cores=30, blocks=10)
    try:
        before = node.log_lines("hami_core_host_pid_written")
        program = node.start_command("web", ["/bin/sh", "-c", ONE_ENDS_WHILE_ANOTHER_STARTS])
        assert program.wait_for("gpu"), program.error
        program.go_on()
        assert program.wait_for("wait"), program.error
        node.wait_until(lambda: node.log_lines("hami_core_host_pid_written") > before, "the host PID written")
        program.go_on()
        found = program.outcome()
        node.end(program)
    finally:
        node.delete("web")
    assert "host pid is error!" in found.error
    assert found.step("launch")["rate"] < 500, found.error
