"""The kubelet restarts, at the worst moments and in peace; its directory and our sockets in it are lost."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from gpushare_agent.agent.admission import garbage_collection
from gpushare_agent.core.model.allocations import Allocation
from tests.agent.support_agent import InnerAgent, Moments, open_agent, poll_until
from tests.agent.support_reconcile import collection_of
from tests.sandbox.support_sandbox import (
    CORE,
    CORES,
    HELD_ADMISSIONS,
    NodeUnderTest,
    SmallPlugin,
    container,
    device_ids,
    open_test_node,
    pod,
)
from tests.support_deadline import DEADLINE_S

ADMISSION = 20
"""Moments of the admission of two containers: see test_faults_agent_killed.py."""


def _container_ids(node: NodeUnderTest, name: str) -> list[str]:
    uid = node.uid_of(name)
    return [c.id for c in node.kubelet.runtime.living(uid)]


def _note_releases(agent: InnerAgent) -> list[Allocation]:
    freed: list[Allocation] = []

    def note(old: Allocation | None, new: Allocation | None) -> None:
        if old is not None and new is None:
            freed.append(old)

    agent.parts.node.cache.subscribe(note)
    return freed


async def _wait_kubelet_knows(node: NodeUnderTest, *names: str) -> None:
    """The kubelet has taken these pods up again."""
    uids = {node.uid_of(name) for name in names}
    await node.wait_until(lambda: uids <= {uid for uid, _ in node.kubelet_held()}, f"{names} admitted again")


@pytest.mark.parametrize("number", range(ADMISSION))
async def test_a_kubelet_restarted_at_any_moment_of_an_admission_admits_again_what_it_had_begun(number: int) -> None:
    """The pod under admission comes back to a kubelet that has forgotten half of it; nothing is given twice."""
    async with open_test_node(seed=number, times=HELD_ADMISSIONS) as node, open_agent(node) as agent:
        node.kubelet.begin_admissions()
        await node.start_pods(pod("before", container(cores=40, blocks=16)))
        ids = _container_ids(node, "before")
        moments = Moments(node, "during")
        async with asyncio.TaskGroup() as group:
            moments.at(number, lambda: group.create_task(node.kubelet.restart()))
            node.api.create_pod(pod("during", container("a", cores=30, blocks=10), container("b", cores=20, blocks=5)))
            await node.wait_until(lambda: len(moments.seen) > number, "the moment of the restart")
        await node.wait_registered()
        node.kubelet.begin_admissions()
        message = await node.wait_settled("during")
        assert node.api.pod("default", "during")["status"]["phase"] == "Running", message
        node.api.create_pod(pod("after", container(cores=50, blocks=20)))
        await node.wait_running("before", "during", "after")
        assert _container_ids(node, "before") == ids
        await node.wait_sound(agent)


@pytest.mark.parametrize("version", ["1.31", "1.36"])
async def test_running_pods_survive_a_kubelet_restart_and_nothing_of_theirs_is_freed(version: str) -> None:
    """While the new kubelet lists nothing, the ledger stays; the plugins are back in time, and no container restarts."""
    async with open_test_node(kubelet_version=version, times=HELD_ADMISSIONS) as node, open_agent(node) as agent:
        node.kubelet.begin_admissions()
        await node.start_pods(pod("share", container(cores=30, blocks=10)), pod("whole", container(cores=200)))
        before, ids = agent.held(), _container_ids(node, "share") + _container_ids(node, "whole")
        freed = _note_releases(agent)
        collection = collection_of(node, agent)
        for _ in range(2):
            await node.kubelet.restart()
            asked = len(node.calls.pod_resources_calls)
            for _ in range(2):
                await collection.reconcile()
            assert len(node.calls.pod_resources_calls) > asked and not node.kubelet_held()
            await node.wait_registered()
            node.kubelet.begin_admissions()
            await _wait_kubelet_knows(node, "share", "whole")
        assert agent.held() == before and not freed
        assert _container_ids(node, "share") + _container_ids(node, "whole") == ids
        assert len(node.calls_of("share")) == 2
        node.api.create_pod(pod("next", container(cores=70, blocks=80)))
        await node.wait_running("share", "whole", "next")
        await node.wait_sound(agent)


async def test_an_agent_started_while_the_kubelet_lists_nothing_yet_knows_its_pods_all_the_same() -> None:
    """Both restart at once: the kubelet's checkpoint has what its List has not."""
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        async with open_agent(node) as agent:
            node.kubelet.begin_admissions()
            await node.start_pods(
                pod("share", container(cores=30, blocks=10)),
                pod("init", container(cores=60, blocks=10), init=(container("prepare", cores=20, blocks=20),)),
            )
            before = agent.held()
        await node.kubelet.restart()
        async with open_agent(node) as agent:
            assert agent.held() == before and not node.kubelet_held()
            node.kubelet.begin_admissions()
            await _wait_kubelet_knows(node, "share", "init")
        async with open_agent(node) as agent:
            node.api.create_pod(pod("next", container(cores=100)))
            await node.wait_running("share", "init", "next")
            await node.wait_sound(agent)


async def test_the_agent_serves_again_in_a_directory_that_was_removed_and_made_anew() -> None:
    """Everything in it is lost, the kubelet's checkpoint too: what runs keeps its GPUs by our ledger."""
    async with open_test_node(times=HELD_ADMISSIONS) as node, open_agent(node, "--simulated.gpus=1") as agent:
        node.kubelet.begin_admissions()
        await node.start_pods(pod("before", container(cores=60, blocks=40)))
        before = agent.held()
        await node.kubelet.stop()
        shutil.rmtree(node.paths.device_plugin_path)
        registrar, names = agent.parts.kubelet.registrar, agent.parts.node.names.names
        await poll_until(lambda: not any(map(registrar.is_registered, names)), "nothing registered")
        node.paths.device_plugin_path.mkdir()
        await node.kubelet.start()
        await node.wait_registered()
        node.kubelet.begin_admissions()
        await node.wait_until(
            lambda: any(p.identity.name == "before" for p in node.kubelet.listed_pods()), "pods taken up again"
        )
        collection = collection_of(node, agent, kubelet_age_s=lambda: 60.0)
        for _ in range(2):
            await collection.reconcile()
        assert agent.held() == before
        node.api.create_pod(pod("fits", container(cores=40, blocks=50)))
        await node.wait_running("before", "fits")
        assert before.items() <= agent.held().items()
        node.assert_nothing_shared()


async def test_a_start_reads_the_records_only_when_its_plugins_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for before, for no List may meet an Allocate; but a full node's hold the loop."""
    monkeypatch.setattr(garbage_collection, "REGISTERED_S", DEADLINE_S)
    async with open_test_node() as node, open_agent(node) as agent:
        await node.start_pods(pod("share", container(cores=30, blocks=10)))
        asked, registered = len(node.calls.pod_resources_calls), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            recovering = group.create_task(collection_of(node, agent).recover(registered))
            await poll_until(lambda: len(node.calls.pod_resources_calls) > asked, "the records are asked for")
            await agent.parts.kubelet.gate.wait_quiet()  # their answer is there
            for _ in range(5):
                await asyncio.sleep(0)
            assert not recovering.done()
            registered.set()
        assert recovering.result() == 1


async def test_the_agent_takes_its_socket_back_from_another_process() -> None:
    """A second program that replaces our socket and registers our resource does not keep it."""
    async with open_test_node() as node, open_agent(node) as agent:
        await node.start_pods(pod("before", container(cores=60, blocks=40)))
        registered = agent.count("gpushare_registrations_total", resource=CORE)
        rival = SmallPlugin(CORE, device_ids("GPU-rival", count=4))
        name = node.plugin_socket("vcore").name
        async with node.serving(rival, name):
            await node.register(rival, name)
            await poll_until(
                lambda: agent.count("gpushare_registrations_total", resource=CORE) > registered, "registered again"
            )
            await node.wait_devices(CORE, 8 * CORES, 8 * CORES)
            await node.wait_registered()
            node.api.create_pod(pod("after", container(cores=60, blocks=40)))
            await node.wait_running("before", "after")
        await node.wait_sound(agent)
        assert not [ids for method, ids in rival.seen if method == "Allocate"]
