"""Two agents on one node, as during an upgrade: the newcomer takes over, nothing is refused, and either may end or die."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gpushare_agent.sandbox.node import EmbeddedNode
from tests.support_agent import (
    assert_nothing_shared,
    log_lines,
    open_agent,
    open_child,
    plugin_socket,
    poll_until,
    wait_ledger_equal,
    wait_registered,
    wait_running,
)
from tests.support_deadline import DEADLINE_S
from tests.support_sandbox import container, open_test_node, pod


async def _wait_serving(node: EmbeddedNode, times: int) -> None:
    """An agent has rebuilt its ledger, for the so-manieth time, and the kubelet has devices."""
    await poll_until(lambda: len(log_lines(node, "allocations_recovered")) == times, f"agent {times} serves")
    await wait_registered(node)


async def _end(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    child.send_signal(number)
    async with asyncio.timeout(DEADLINE_S):
        await child.wait()


async def test_a_newcomer_takes_over_during_a_burst_and_no_pod_is_refused() -> None:
    """The first agent waits for a pause, hands over, and stands by until it is ended. The ledger is whole."""
    names = [f"burst-{number}" for number in range(12)]
    async with open_test_node() as node, open_child(node) as old:
        for name in names[:6]:
            node.api.create_pod(pod(name, container(cores=10, blocks=4)))
        async with open_child(node, wait=False) as new:
            for name in names[6:]:
                node.api.create_pod(pod(name, container(cores=10, blocks=4)))
            await _wait_serving(node, times=2)
            await wait_running(node, *names)
            await poll_until(
                lambda: len(list(node.paths.device_plugin_path.glob("v*-*.sock"))) == 4, "the first stands by"
            )
            await _end(old, signal.SIGTERM)
            assert old.returncode == 0
            node.api.create_pod(pod("after", container(cores=10, blocks=4)))
            await wait_running(node, *names, "after")
            assert plugin_socket(node, "vcore").is_socket()
            await _end(new, signal.SIGTERM)
        async with open_agent(node) as agent:
            await wait_ledger_equal(node, agent)
            assert_nothing_shared(node)
            assert len(agent.held()) == len(names) + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_one_that_stands_by_serves_again_when_the_newcomer_ends(number: signal.Signals) -> None:
    """An upgrade that fails, or is taken back: no third agent is needed, also where the newcomer was killed."""
    async with open_test_node() as node, open_child(node):
        node.api.create_pod(pod("before", container(cores=60, blocks=40)))
        await wait_running(node, "before")
        async with open_child(node, wait=False) as new:
            await _wait_serving(node, times=2)
            await poll_until(lambda: len(log_lines(node, "another_agent_serves")) == 2, "the first stands by")
            await _end(new, number)
            await _wait_serving(node, times=3)
            node.api.create_pod(pod("after", container(cores=60, blocks=40)))
            await wait_running(node, "before", "after")
            assert_nothing_shared(node)


async def test_a_newcomer_serves_when_the_agent_that_served_was_killed() -> None:
    """While it asks: the kernel frees the lock."""
    async with open_test_node() as node, open_child(node) as old:
        old.send_signal(signal.SIGSTOP)
        async with open_child(node, wait=False):
            await poll_until(lambda: log_lines(node, "another_agent_serves"), "the newcomer asks")
            await _end(old, signal.SIGKILL)
            await _wait_serving(node, times=2)
            node.api.create_pod(pod("after", container(cores=60, blocks=40)))
            await wait_running(node, "after")


async def test_an_agent_that_stands_by_is_ready_and_one_that_asks_is_not() -> None:
    """A rollout goes on only when the newcomer serves; a rollback finds the old one ready."""
    async with open_test_node() as node, open_agent(node) as old:
        assert not old.parts.kubelet.not_ready()
        async with open_agent(node, wait=False) as new:
            await poll_until(lambda: old.parts.kubelet.handover.successors > 0, "the newcomer asks")
            assert new.parts.kubelet.not_ready()
            assert not old.parts.kubelet.not_ready()
