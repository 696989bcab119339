"""PodResources of the embedded kubelet: what it lists, its limits and versions, and the fault it shares with real ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from grpclib import GRPCError, Status

from gpushare_agent.core.wire import v1
from tests.fakes.clock import FakeClock
from tests.sandbox.support_sandbox import (
    CORE,
    FOO,
    MEMORY,
    NodeUnderTest,
    SmallPlugin,
    container,
    device_ids,
    foo_plugin,
    limits_of,
    open_test_node,
    pod,
)

VERSIONS = ("1.31", "1.34", "1.36")


async def test_each_id_has_an_entry_of_its_own_with_its_topology() -> None:
    """Three devices are three ContainerDevices of one ID; a device without a NUMA node has no topology."""
    async with open_test_node() as node:
        near = SmallPlugin(CORE, device_ids("a", count=3, numa=1))
        nowhere = SmallPlugin(MEMORY, device_ids("a", count=2, numa=None))
        async with node.open_plugin(near), node.open_plugin(nowhere), node.pod_resources() as stub:
            await node.start_pods(pod("p", container("main", cores=3, blocks=2)))
            entries = (await stub.list()).pod_resources[0].containers[0].devices
    assert sorted((e.resource_name, e.device_ids) for e in entries) == [
        *((CORE, [f"a-{n}"]) for n in range(3)),
        *((MEMORY, [f"a-{n}"]) for n in range(2)),
    ]
    nodes = {e.resource_name: e.topology for e in entries}
    assert nodes == {CORE: v1.TopologyInfo(nodes=[v1.NumaNode(id=1)]), MEMORY: None}


async def test_plain_pods_are_listed_without_devices_and_init_containers_not_at_all() -> None:
    """A reader must look at the spec to notify a plain pod from one under admission."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(node=0)):
        init = limits_of("i", {FOO: 1})
        sidecar = limits_of("s", {FOO: 1}, restartPolicy="Always")
        await node.start_pods(pod("p", container("m"), init=(init, sidecar)))
        assert await node.list_pods() == {"p/s": {FOO: {"foo-0"}}, "p/m": {}}


async def test_more_than_a_hundred_calls_a_second_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket holds ten, and fills with time alone: the rest is RESOURCE_EXHAUSTED, with the measured text."""
    clock = FakeClock(0.0)
    monkeypatch.setattr("gpushare_agent.sandbox.kubelet.kubelet.time", SimpleNamespace(monotonic=clock))
    async with open_test_node() as node, node.pod_resources() as stub:
        results: list[str] = []

        async def call() -> None:
            try:
                await stub.list()
                results.append("ok")
            except GRPCError as error:
                assert error.status is Status.RESOURCE_EXHAUSTED
                results.append(str(error.message))

        for expected in (10, 5):
            results.clear()
            async with asyncio.TaskGroup() as group:
                for _ in range(60):
                    group.create_task(call())
            assert Counter(results) == {"ok": expected, "rejected by rate limit": 60 - expected}
            clock.now += 0.05


@pytest.mark.parametrize("version", VERSIONS)
async def test_get_exists_from_1_34_on(version: str) -> None:
    """Before it is switched off; an unknown pod is an error."""
    async with (
        open_test_node(kubelet_version=version) as node,
        node.open_plugin(foo_plugin(node=0)),
        node.pod_resources() as stub,
    ):
        await node.start_pods(pod("p", limits_of("main", {FOO: 2})))
        request = v1.GetPodResourcesRequest(pod_name="p", pod_namespace="default")
        if version == "1.31":
            with pytest.raises(GRPCError, match="Get method disabled"):
                await stub.get(request)
            return
        answer = await stub.get(request)
        assert answer.pod_resources is not None
        assert sorted(i for e in answer.pod_resources.containers[0].devices for i in e.device_ids) == ["foo-0", "foo-1"]
        with pytest.raises(GRPCError, match="pod q in namespace default not found"):
            await stub.get(v1.GetPodResourcesRequest(pod_name="q", pod_namespace="default"))


@pytest.mark.parametrize("version", VERSIONS)
async def test_ended_pods_are_listed_up_to_1_33_only(version: str) -> None:
    """Succeeded and rejected pods stay in the list of an old kubelet until their object is deleted."""
    async with open_test_node(kubelet_version=version) as node, node.open_plugin(foo_plugin(2, node=0)):
        done = {"sandbox.gpushare/run-seconds": "0"}
        node.api.create_pod(pod("done", limits_of("main", {FOO: 1}), annotations=done))
        await node.wait_phase("done", "Succeeded")
        node.api.create_pod(pod("bad", limits_of("main", {FOO: 3}), nodeName="node-a"))
        await node.wait_phase("bad", "Failed")
        expected = {"done/main", "bad/main"} if version == "1.31" else set()
        assert set(await node.list_pods()) == expected
        for name in ("done", "bad"):
            await node.remove_pod(name)
        await node.kubelet.wait_for(lambda: not node.kubelet.listed_pods())


async def test_a_partly_allocated_rejected_pod_keeps_its_devices_in_an_old_list() -> None:
    """On 1.31 it is listed with them until the next device admission, which gives them away."""
    async with open_test_node(kubelet_version="1.31") as node, node.open_plugin(foo_plugin(2, node=0)):
        node.api.create_pod(pod("bad", limits_of("a", {FOO: 1}), limits_of("b", {FOO: 2}), nodeName="node-a"))
        await node.wait_phase("bad", "Failed")
        assert await node.list_pods() == {"bad/a": {FOO: {"foo-0"}}, "bad/b": {}}
        await node.start_pods(pod("next", limits_of("main", {FOO: 2})))
        assert await node.list_pods() == {"bad/a": {}, "bad/b": {}, "next/main": {FOO: {"foo-0", "foo-1"}}}


async def _admit_two_around(
    node: NodeUnderTest, plugin: SmallPlugin, *, during: str, asked: str = "List"
) -> tuple[set[str], set[str]]:
    """Admits two pods; while the first's `during` call is open a device pod ends and somebody asks. The pods' IDs."""
    is_open = asyncio.Event()
    is_open.set()

    async def hold(*_ids: object) -> None:
        await is_open.wait()

    if during == "Allocate":
        plugin.on_allocate = hold
    else:
        plugin.on_preferred = hold
    await node.start_pods(pod("old", limits_of("main", {FOO: 1}), restartPolicy="Never"))
    is_open.clear()
    node.api.create_pod(pod("first", limits_of("main", {FOO: 2})))
    await node.kubelet.wait_for(lambda: any(c.method == during for c in node.calls.open_calls))
    node.kill_container("old")
    await node.wait_phase("old", "Failed")
    async with node.pod_resources() as stub:
        if asked == "List":
            await stub.list()
        else:
            await stub.get(v1.GetPodResourcesRequest(pod_name="first", pod_namespace="default"))
    assert node.calls.pod_resources_calls[-1].inside[-1].method == during
    is_open.set()
    await node.wait_phase("first", "Running")
    await node.start_pods(pod("second", limits_of("main", {FOO: 2})))
    calls = {c.pod_name: set(c.device_ids) for c in node.calls.of("Allocate")}
    return calls["first"], calls["second"]


async def test_a_list_during_an_open_allocate_gives_the_same_ids_out_twice() -> None:
    """A device pod has ended since: List forgets the IDs in flight, and the next admission is offered and takes them."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(4, node=0)) as plugin:
        plugin.preferred = lambda available, must, size: sorted(available)[-size:]
        first, second = await _admit_two_around(node, plugin, during="Allocate")
        assert first & second
        assert (await node.list_pods())["first/main"] == {FOO: first}


@pytest.mark.parametrize(("during", "asked"), [("GetPreferredAllocation", "List"), ("Allocate", "Get")])
async def test_at_another_moment_and_by_get_no_id_goes_out_twice(during: str, asked: str) -> None:
    """The same play with the List in a preference; Get does not rebuild anything."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(5, node=0)) as plugin:
        first, second = await _admit_two_around(node, plugin, during=during, asked=asked)
        assert not first & second
