"""PodResources refuses, stalls, is absent or empty; and other programs call it at the worst moment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError
from grpclib.const import Cardinality, Handler

from tests.agent.support_agent import DEADLINE_S, Moments, open_agent, open_child, page_of_child, poll_until
from tests.agent.support_reconcile import collection_of
from tests.cluster.support_kube import running
from tests.kit.support_grpc import called, served_at
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod

LIST = "/v1.PodResourcesLister/List"
GET = "/v1.PodResourcesLister/Get"


@dataclass
class StandsBetween:
    """A PodResources server that passes calls on to the kubelet's, unless its fields name other answers."""

    target: Path
    answers: list[bytes] = field(default_factory=list)
    """When not empty, every List is answered with the first entry."""

    def __post_init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def __mapping__(self) -> dict[str, Handler]:
        return {name: Handler(self._handler(name), Cardinality.UNARY_UNARY, bytes, bytes) for name in (LIST, GET)}

    def _handler(self, name: str) -> Any:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message() or b""
            await self.may_answer.wait()
            is_replaced = self.answers and name == LIST
            await stream.send_message(self.answers[0] if is_replaced else await called(self.target, name, request))

        return handle


@asynccontextmanager
async def _between(node: NodeUnderTest) -> AsyncIterator[tuple[StandsBetween, str]]:
    """The server, and the flag that makes an agent ask it."""
    service = StandsBetween(node.paths.pod_resources_socket)
    async with served_at(node.paths.state / "between.sock", service) as path:
        yield service, f"--kubelet.pod-resources-socket={path}"
        service.may_answer.set()


def _share(name: str, cores: int = 30, blocks: int = 10, **extra: Any) -> dict[str, Any]:
    return pod(name, container(cores=cores, blocks=blocks), **extra)


async def test_forty_pods_at_once_are_all_served_within_the_kubelets_rate_limit() -> None:
    """More Lists than the kubelet's burst of ten: none of the pods is refused for it."""
    async with open_test_node() as node, open_agent(node) as agent:
        names = [f"p{n}" for n in range(40)]
        await node.start_pods(*(_share(name, cores=20, blocks=15) for name in names))
        await node.wait_sound(agent)


async def test_a_pod_resources_api_that_stalls_refuses_the_pod_in_time_with_the_reason() -> None:
    """The whole node waits for the answer, so it comes, with the reason; afterwards pods run again."""
    async with (
        open_test_node() as node,
        _between(node) as (between, flag),
        open_agent(node, flag, list_timeout_s=1.0) as agent,
    ):
        between.may_answer.clear()
        message = await node.settle_pod(_share("stuck"))
        assert "code = Unavailable" in message and "did not answer within 1 s" in message
        assert "gpushare-agent check" in message
        between.may_answer.set()
        agent.parts.kubelet.gate.list_timeout_s = DEADLINE_S
        await node.start_pods(_share("after"))
        await node.wait_ledger_equal(agent)


async def test_without_a_pod_resources_socket_the_error_names_the_path() -> None:
    """A wrong setting shows in the first refused pod."""
    async with open_test_node() as node:
        missing = node.paths.state / "nowhere.sock"
        async with open_agent(node, f"--kubelet.pod-resources-socket={missing}") as agent:
            message = await node.settle_pod(_share("lost"))
            assert str(missing) in message and "code = Unavailable" in message
            assert agent.holders_of() == 0


async def test_without_pod_resources_pods_are_identified_by_the_api_server_and_known_to_the_next_agent() -> None:
    """gpu-manager's DaemonSet does not mount it. The next agent has the ledger from the checkpoint."""
    async with open_test_node() as node:
        flag = "--kubelet.pod-resources-socket="
        async with open_agent(node, flag) as agent:
            for name in ("first", "second"):
                await node.start_pods(_share(name))
            await node.wait_ledger_equal(agent)
        async with open_agent(node, flag) as agent:
            await node.wait_ledger_equal(agent)
            # The checkpoint has UIDs alone: the names come with the list of pods.
            names = {"first", "second"}
            await poll_until(lambda: {a.pod_name for a in agent.parts.node.cache} == names, "the pods' names")
            await node.remove_pod("first")
            await node.wait_ledger_equal(agent)


@pytest.mark.parametrize("garbage", [b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 64], ids=["too-long", "no-tag"])
async def test_a_pod_resources_answer_that_is_no_message_is_an_error_and_no_crash(garbage: bytes) -> None:
    """The pod is refused with the reason; the agent stays, and serves when answers can be read again."""
    async with open_test_node() as node, _between(node) as (between, flag), open_agent(node, flag):
        between.answers = [garbage]
        assert "no valid message" in await node.settle_pod(_share("unread"))
        between.answers = []
        await node.start_pods(_share("after"))


async def test_an_empty_list_frees_nothing() -> None:
    """An old kubelet that lists nothing, though it has been up for long: what runs keeps its share, poll after poll."""
    async with (
        open_test_node(kubelet_version="1.31") as node,
        _between(node) as (between, flag),
        open_agent(node, flag) as agent,
    ):
        collection = collection_of(node, agent, kubelet_age_s=lambda: 60.0)
        await node.start_pods(_share("one"), _share("two", cores=100))
        before = agent.held()
        between.answers = [b"\x12\x00"]  # an unknown field and no pod
        for _ in range(3):
            await collection.reconcile()
        assert agent.held() == before


# --- another program's List ---


async def test_pods_come_and_go_while_another_program_lists_all_the_time() -> None:
    """Whatever the kubelet forgets by it, no container gets an ID that a living one holds."""
    async with open_test_node(seed=3) as node, open_agent(node) as agent, running(lambda: _list_for_ever(node)):
        for number in range(30):
            node.api.create_pod(_share(f"p{number}", cores=25, blocks=20, restartPolicy="Never"))
            if number >= 6:
                node.api.delete_pod("default", f"p{number - 6}", grace_period_s=number % 2)
            await node.wait_settled(f"p{number}")
            node.assert_nothing_shared()
        await node.wait_running(*(f"p{number}" for number in range(24, 30)))
        await node.wait_ledger_equal(agent)


async def _list_for_ever(node: NodeUnderTest) -> None:
    """As fast as the kubelet lets it while leaving the agent some of its rate."""
    async with node.pod_resources() as stub:
        while True:
            with suppress(GRPCError):
                await stub.list()
            await asyncio.sleep(0.015)  # the pace of the load, not a wait for anything


@pytest.mark.parametrize("seed", [0, 1])
async def test_ids_that_the_kubelet_forgot_by_another_programs_list_are_not_given_twice(seed: int) -> None:
    """A List while our Allocate is open, after another pod's end: the next pod is offered what this one got, and the agent
    counts the offer and gives it other IDs."""
    async with open_test_node(seed=seed) as node, open_child(node) as child:
        await node.start_pods(_share("ended", restartPolicy="Never"))
        moments = Moments(node, "victim")
        moments.at_next("Allocate asked", lambda: os.kill(child.pid, signal.SIGSTOP))
        node.api.create_pod(_share("victim", cores=40, blocks=20))
        await node.wait_until(lambda: "Allocate asked" in moments.seen, "the victim's Allocate")
        try:
            node.kill_container("ended")
            await node.wait_until(
                lambda: node.api.pod("default", "ended")["status"]["phase"] == "Failed", "the first pod's end"
            )
            async with node.pod_resources() as stub:
                await stub.list()
        finally:
            os.kill(child.pid, signal.SIGCONT)
        await node.wait_running("victim")
        resource = node.calls_of("victim")[0].resource
        forgotten = set(node.calls_of("victim")[0].device_ids)
        assert not forgotten & node.kubelet.devices.allocated(resource), "the kubelet has not forgotten anything"
        node.api.create_pod(_share("next", cores=40, blocks=20))
        await node.wait_running("victim", "next")
        asked = next(c for c in node.calls_of("next", "GetPreferredAllocation") if c.resource == resource)
        assert forgotten <= set(asked.device_ids), "the kubelet did not offer what it forgot"
        assert len(node.given()) == 2
        node.assert_nothing_shared()
        assert await _metric(node, f'gpushare_taken_ids_offered_total{{resource="{resource}"}}') == len(forgotten)


async def _metric(node: NodeUnderTest, series: str) -> float:
    _, text = await page_of_child(node, "/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)), 0.0)


async def test_a_pod_that_only_fits_on_forgotten_ids_is_refused_with_advice() -> None:
    """One GPU, allocated to a container that the kubelet has forgotten: no other gets it."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=1") as agent:
        await node.start_pods(_share("holder", cores=80, blocks=50))
        for taken in node.kubelet.devices._allocated.values():  # as after a List at the wrong moment
            taken.clear()
        message = await node.settle_pod(_share("second", cores=60, blocks=50, nodeName=node.name))
        assert node.api.pod("default", "second")["status"]["phase"] == "Failed"
        assert "default/second" in message and ("free" in message)
        node.assert_nothing_shared()
        await node.remove_pod("holder")
        await node.start_pods(_share("third", cores=100))
        await node.wait_ledger_equal(agent)
