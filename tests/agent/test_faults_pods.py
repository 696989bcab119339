"""Pods that go at the wrong moment: during their admission, under a name that is used again, before their processes."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.sandbox.pod_manifest import IGNORE_TERM_ANNOTATION
from tests.agent.support_agent import Moments, open_agent
from tests.sandbox.support_sandbox import container, open_test_node, pod

ADMISSION = 10
"""Moments of the admission of one container with two resources: see test_faults_agent_killed.py."""


def _share(name: str, cores: int = 60, blocks: int = 40, **extra: Any) -> dict[str, Any]:
    return pod(name, container(cores=cores, blocks=blocks), **extra)


@pytest.mark.parametrize("grace_s", [0, 5], ids=["force", "grace"])
@pytest.mark.parametrize("number", range(ADMISSION))
async def test_a_pod_deleted_at_any_moment_of_its_admission_leaves_nothing_behind(number: int, grace_s: int) -> None:
    """Whether the admission then succeeds or fails: its share is free in the end, and the next pod gets the GPU."""
    async with open_test_node(seed=number) as node, open_agent(node, "--simulated.gpus=1") as agent:
        moments = Moments(node, "brief")
        moments.at(number, lambda: node.api.delete_pod("default", "brief", grace_period_s=grace_s))
        node.api.create_pod(_share("brief"))
        await node.wait_until(lambda: len(moments.seen) > number, "the moment of the deletion")
        await node.wait_gone("brief")
        await node.wait_until(lambda: not node.kubelet.listed_pods(), "the kubelet to forget the pod")
        await node.start_pods(_share("next", cores=100, blocks=0))
        await node.wait_ledger_equal(agent)


async def test_pods_recreated_under_one_name_at_once_never_inherit_and_never_lose() -> None:
    """As a StatefulSet's pod that is deleted by force: each bearer of the name has its own ledger."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2") as agent:
        await node.start_pods(_share("other", cores=30, blocks=20))
        for turn in range(8):
            cores = 40 + turn
            node.api.create_pod(_share("web-0", cores=cores, blocks=20 + turn))
            if turn % 2:  # every second one does not live to be admitted
                await node.wait_running("web-0")
            node.api.delete_pod("default", "web-0", grace_period_s=0)
        node.api.create_pod(_share("web-0", cores=66, blocks=33))
        await node.wait_running("other", "web-0")
        await node.wait_ledger_equal(agent)
        assert agent.holders_of() == 96
        node.assert_nothing_shared()


async def test_a_pod_recreated_when_its_name_is_free_waits_for_nobody() -> None:
    """As a StatefulSet's pod that is deleted in peace, on a GPU that holds only one of them."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=1") as agent:
        for _ in range(4):
            await node.start_pods(_share("web-0"))
            await node.remove_pod("web-0")
        await node.start_pods(_share("web-0"))
        await node.wait_ledger_equal(agent)
        assert agent.holders_of() == 60


async def test_a_force_deleted_pods_share_is_kept_until_its_processes_are_gone() -> None:
    """The kubelet gives its devices away at once; the agent does not, and frees them when the process has ended."""
    async with open_test_node() as node, open_agent(node, "--simulated.gpus=2") as agent:
        await node.start_pods(_share("stays", cores=80, annotations={IGNORE_TERM_ANNOTATION: "30"}))
        uid = node.uid_of("stays")
        assert node.gpus_of("stays") == {agent.uuid_of(0)}
        node.api.delete_pod("default", "stays", grace_period_s=0)
        await node.wait_until(lambda: uid not in node.kubelet.runtime.pods() or not node.active_records(), "gone")
        await node.start_pods(_share("next"))
        assert node.kubelet.runtime.is_running(uid, "main"), "the lingering process ended too early for this test"
        assert node.gpus_of("next") == {agent.uuid_of(1)}
        node.assert_nothing_shared()
        assert "free" in await node.settle_pod(_share("refused"))
        await node.wait_until(lambda: agent.holders_of() == 60, "the lingering share freed")
        assert not node.kubelet.runtime.is_running(uid, "main")
        node.api.create_pod(_share("last", cores=80))
        await node.wait_running("next", "last")
        assert node.gpus_of("last") == {agent.uuid_of(0)}
        await node.wait_ledger_equal(agent)


async def test_a_container_that_crashes_again_and_again_keeps_its_devices() -> None:
    """Each start is checked by PreStartContainer; nothing is allocated again."""
    async with open_test_node() as node, open_agent(node) as agent:
        await node.start_pods(_share("crashes"))
        before = agent.held()
        for starts in range(2, 6):
            node.kill_container("crashes")
            await node.wait_until(
                lambda: (
                    len(node.calls_of("crashes", "PreStartContainer")) == starts  # noqa: B023 - asked in this turn
                    and node.kubelet.runtime.is_running(next(iter(before))[0], "main")
                ),
                "the next start",
            )
        assert len(node.calls_of("crashes")) == 2 and agent.held() == before
