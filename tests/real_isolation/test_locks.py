"""A process that is killed in cuInit, under the real HAMi-core: the next one of its container does not wait for long."""

from __future__ import annotations

import pytest

from tests.real_isolation.conftest import NodeOf

FREED_S = 30.0
"""A few polls of the agent, the waiting process's own second, and a loaded machine; the library alone takes 330 s."""
PROGRAM = "/opt/programs/gpu_program dlsym 12080"


@pytest.mark.isolation
@pytest.mark.smoke
def test_the_lock_of_a_process_killed_in_cuinit_is_freed(node_of: NodeOf) -> None:
    """It dies while it makes the context by which the library finds its host PID, with the lock of that step taken."""
    node = node_of("hami-core", "host")
    node.apply("killed", cores=30, blocks=10)
    try:
        words = f"FAKE_GPU_DIES_IN=cuDevicePrimaryCtxRetain {PROGRAM}; {PROGRAM} alloc:alloc:256:20; {PROGRAM} info"
        program = node.start_command("killed", ["/bin/sh", "-c", words])
        found = program.outcome(FREED_S)
        node.end(program)
        assert [step["action"] for step in found.steps].count("init") == 2, found
        assert found.step("alloc")["blocks"] == 8
        assert node.log_lines("hami_core_lock_freed") == 1
    finally:
        node.delete("killed")
