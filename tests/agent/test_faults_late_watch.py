"""The agent's watch lags behind the kubelet's: the pod store's entry of a name may be an earlier pod's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.agent.support_agent import InnerAgent, open_agent
from tests.sandbox.support_sandbox import container, open_test_node, pod

SHARE = (container(cores=60, blocks=80),)


@contextmanager
def late_watch(agent: InnerAgent) -> Iterator[None]:
    """Watch events are kept back, in order, until the block ends: the connection is slow, not broken."""
    informers: Any = type(agent.parts.cluster.informer)
    reported, kept = informers._apply, []
    informers._apply = lambda *event: kept.append(event)
    try:
        yield
    finally:
        informers._apply = reported
        for event in kept:
            reported(*event)


@pytest.mark.parametrize("grace_s", [0, None])
async def test_a_pod_recreated_under_its_name_is_the_new_one(grace_s: int | None) -> None:
    """Same name, same size, and the store still shows the former bearer running: the API server is asked first."""
    flags = ("--gpus=2", "--allocation.check-period-s=60")
    async with open_test_node(seed=1) as node, open_agent(node, *flags) as agent:
        await node.start_pods(pod("web-0", *SHARE))
        former = node.uid_of("web-0")
        await node.wait_until(lambda: agent.parts.node.pods.get(former).has_started, "the store sees it running")
        with late_watch(agent):
            node.api.delete_pod("default", "web-0", grace_period_s=grace_s)
            await node.wait_until(lambda: node.api.find_pod("default", "web-0") is None, "the name free")
            await node.start_pods(pod("web-0", *SHARE))
        await node.wait_ledger_equal(agent)
        assert former not in {a.key.pod_uid for a in agent.parts.node.cache}
        node.api.create_pod(pod("next", container(cores=30, blocks=80)))
        await node.wait_running("web-0", "next")
        assert node.gpus_of("web-0") != node.gpus_of("next")
        node.assert_nothing_shared()


async def test_a_pod_that_runs_without_devices_stands_in_nobodys_way() -> None:
    """Admitted while the resource was unknown, it is listed without devices for ever; others of its size are served."""
    async with open_test_node() as node:
        await node.start_pods(pod("bare", *SHARE, nodeName=node.name))
        async with open_agent(node) as agent:
            for name in ("one", "two"):
                await node.start_pods(pod(name, *SHARE))
            await node.wait_ledger_equal(agent)
            assert {a.pod_name for a in agent.parts.node.cache} == {"one", "two"}


async def test_a_storm_of_refusals_keeps_nothing_from_being_freed() -> None:
    """On a kubelet without Get a reconcile waits for a pause that never comes; deleted pods are released all the same."""
    flags = ("--gpus=1", "--allocation.cleanup-rejected-pods=false", "--allocation.check-period-s=0.05")
    async with open_test_node(kubelet_version="1.31") as node, open_agent(node, *flags) as agent:
        await node.start_pods(pod("old", *SHARE))
        stop = asyncio.Event()

        async def storm(name: str) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                await node.settle_pod(pod(f"{name}-{number}", container(cores=150, blocks=1), nodeName=node.name))

        async with asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                group.create_task(storm(name))
            node.api.delete_pod("default", "old", grace_period_s=0)
            await node.wait_until(lambda: not list(agent.parts.node.cache), "the share freed amid the storm")
            stop.set()
