"""SIGTERM to the agent as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from gpushare_agent.agent.kubelet.records import FILE_NAME
from tests.agent.support_agent import open_child, poll_until
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod


def _sockets(node: NodeUnderTest) -> list[str]:
    return sorted(path.name for path in node.paths.device_plugin_path.glob("v*.sock"))


async def _terminate(node: NodeUnderTest, child: asyncio.subprocess.Process) -> None:
    child.send_signal(signal.SIGTERM)
    assert await child.wait() == 0
    assert not _sockets(node), "the agent left its sockets behind"


async def test_sigterm_ends_the_agent_well_and_removes_its_sockets() -> None:
    """Exit code 0; the pods that run are left alone."""
    async with open_test_node() as node, open_child(node) as child:
        await node.start_pods(pod("runs", container(cores=30, blocks=10)))
        assert [name.partition("-")[0] for name in _sockets(node)] == ["vcore", "vmemory"]
        await _terminate(node, child)
        await node.wait_running("runs")


HUNG_UP_EARLY = """
import os, signal, sys

class HangUp:
    def find_spec(name, path, target=None):
        if name == "gpushare_agent.agent.program":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, HangUp)
from gpushare_agent.__main__ import main
sys.exit(main())
"""


async def test_a_sighup_while_the_agent_starts_reloads_it_and_does_not_end_it() -> None:
    """From what writes the settings next to it; it comes while the agent's program is imported."""
    async with open_test_node() as node, open_child(node, program=("-c", HUNG_UP_EARLY)) as child:
        await poll_until(lambda: node.log_lines("restarting_with_new_settings"), "the reload")
        await node.start_pods(pod("runs", container(cores=30, blocks=10)))
        await _terminate(node, child)


async def test_sigterm_ends_the_agent_while_kubelet_and_api_server_are_gone() -> None:
    """No server answers, and it still ends in time."""
    async with open_test_node() as node, open_child(node) as child:
        await node.kubelet.stop()
        node.api.running.clear()
        await _terminate(node, child)
        node.api.running.set()


async def test_sigterm_ends_the_agent_while_an_admission_waits() -> None:
    """A stalled API server keeps the admission open; the end does not wait for it."""
    async with open_test_node() as node, open_child(node) as child:
        await poll_until(lambda: node.log_lines("ready"), "the agent ready")
        node.api.running.clear()
        node.api.create_pod(pod("waits", container(cores=30, blocks=10)))
        await node.wait_until(lambda: node.calls.open_calls, "the admission")
        await _terminate(node, child)
        assert "error reading from server: EOF" in await node.wait_settled("waits")  # not the agent's own answer
        node.api.running.set()


async def test_a_pipe_in_place_of_the_kubelets_checkpoint_stops_neither_the_start_nor_the_end() -> None:
    """The agent registers and ends in time."""
    async with open_test_node() as node:
        checkpoint = node.paths.device_plugin_path / FILE_NAME
        checkpoint.unlink(missing_ok=True)
        os.mkfifo(checkpoint)
        async with open_child(node) as child:
            await _terminate(node, child)


async def test_a_log_that_nobody_reads_stops_neither_admissions_nor_the_end() -> None:
    """The agent's standard error is a pipe that is full from the start."""
    read_end, write_end = os.pipe()
    try:
        os.set_blocking(write_end, False)
        with suppress(BlockingIOError):
            while True:
                os.write(write_end, b"x")
        os.set_blocking(write_end, True)
        async with open_test_node() as node, open_child(node, stderr=write_end) as child:
            await node.start_pods(pod("runs", container(cores=30, blocks=10)))
            await _terminate(node, child)
    finally:
        os.close(read_end)
        os.close(write_end)
