"""The agent ends in the middle of an admission, at each moment of it in turn, and comes back.

Ended in this process at every moment that the kubelet's conversation has, and by SIGKILL as a process of its own at one
moment of each kind. What it was doing for the pod under admission may fail; nothing else may be lost or given twice.
"""

from __future__ import annotations

import pytest

from tests.agent.support_agent import InnerAgent, Moments, open_agent, open_child
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod

ADMISSION = 4 * 5
"""Two containers with two resources: preference asked, List, preference answered, Allocate asked, Allocate answered."""
STARTS = 2 * 2
"""PreStartContainer asked and answered, for each container."""


def _two_containers(name: str) -> dict[str, object]:
    return pod(name, container("a", cores=30, blocks=10), container("b", cores=20, blocks=5))


async def _assert_sound(node: NodeUnderTest, agent: InnerAgent) -> None:
    """Who was there runs on, who comes gets its GPUs, the ledger is the kubelet's."""
    node.api.create_pod(pod("after", container(cores=50, blocks=20)))
    await node.wait_running("before", "after")
    await node.wait_sound(agent)


@pytest.mark.parametrize("number", range(ADMISSION + STARTS))
async def test_an_agent_ended_at_any_moment_of_an_admission_comes_back_with_the_kubelets_ledger(number: int) -> None:
    """At each moment of a pod's admission: the next agent knows every allocation, and admits the next pod."""
    async with open_test_node(seed=number) as node:
        async with open_agent(node) as agent:
            await node.start_pods(pod("before", container(cores=40, blocks=16)))
            moments = Moments(node, "during")
            moments.at(number, agent.task.cancel)
            node.api.create_pod(_two_containers("during"))
            await node.wait_until(lambda: len(moments.seen) > number, "the moment to end the agent")
        async with open_agent(node) as agent:
            message = await node.wait_settled("during")
            phase = node.api.pod("default", "during")["status"]["phase"]
            assert phase == "Running" or "rpc error" in message or "stopped" in message, message
            await _assert_sound(node, agent)


KILLED_AT = [
    "GetPreferredAllocation asked",
    "List",
    "GetPreferredAllocation answered",
    "Allocate asked",
    "Allocate answered",
    "PreStartContainer asked",
]


@pytest.mark.parametrize("moment", KILLED_AT)
async def test_an_agent_killed_in_an_admission_leaves_nothing_that_its_successor_does_not_mend(moment: str) -> None:
    """SIGKILL to the process: sockets stay behind, without notice; the next agent takes over all the same."""
    async with open_test_node() as node:
        async with open_child(node) as child:
            await node.start_pods(pod("before", container(cores=40, blocks=16)))
            moments = Moments(node, "during")
            moments.at_next(moment, child.kill)
            node.api.create_pod(_two_containers("during"))
            await child.wait()
        async with open_agent(node) as agent:
            await node.wait_settled("during")
            await _assert_sound(node, agent)
