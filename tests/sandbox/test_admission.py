"""Admission on the embedded kubelet, against what was measured on a real one."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpclib import GRPCError, Status

from tests.sandbox.support_sandbox import (
    CORE,
    FOO,
    MEMORY,
    NodeUnderTest,
    SmallPlugin,
    bound,
    container,
    device_ids,
    foo,
    foo_plugin,
    open_test_node,
    pod,
)


async def rejected(node: NodeUnderTest, manifest: dict[str, Any]) -> str:
    node.api.create_pod(bound(manifest))
    raw = await node.wait_phase(manifest["metadata"]["name"], "Failed")
    assert raw["status"]["reason"] == "UnexpectedAdmissionError"
    assert "containerStatuses" not in raw["status"]
    return str(raw["status"]["message"])


async def test_containers_come_in_spec_order_and_their_resources_in_random_order() -> None:
    """Ten pods of two containers with two resources: always c1 before c2, both resource orders seen, all serial."""
    async with open_test_node(seed=1) as node:
        core, memory = (SmallPlugin(name, device_ids("a", count=100)) for name in (CORE, MEMORY))
        async with node.open_plugin(core), node.open_plugin(memory):
            both = (container("c1", cores=1, blocks=1), container("c2", cores=1, blocks=1))
            await node.start_pods(*(pod(f"p{n}", *both) for n in range(10)))
        calls = [c for c in node.calls.calls if c.method == "Allocate"]
        expected = [(f"p{n}", c) for n in range(10) for c in ("c1", "c2")]
        assert [(c.pod_name, c.container) for c in calls[::2]] == expected
        assert {c.resource for c in calls[::2]} == {CORE, MEMORY}
        ordered = sorted(node.calls.calls, key=lambda c: c.started_at)
        assert all(a.finished_at <= b.started_at for a, b in itertools.pairwise(ordered))


async def test_an_init_containers_ids_are_used_again_and_a_sidecars_are_not() -> None:
    """init 2, sidecar 1 (from init's, without a GetPreferredAllocation), main 3 (must-include the one left): as measured.
    Init containers of one pod use each other's devices."""
    async with open_test_node() as node:
        async with node.open_plugin(foo_plugin()):
            sidecar = foo("s", 1, restartPolicy="Always")
            await node.start_pods(pod("chain", foo("m", 3), init=(foo("i", 2), sidecar)))
        calls = {(c.method[0], c.container): c for c in node.calls.calls}
        assert [(c.method[0], c.container) for c in node.calls.calls] == [
            ("G", "i"), ("A", "i"), ("A", "s"), ("G", "m"), ("A", "m"),
        ]  # fmt: skip
        init, side, main = (set(calls["A", name].device_ids) for name in ("i", "s", "m"))
        assert side < init
        assert set(calls["G", "m"].must_include) == init - side
        assert calls["G", "m"].size == 3
        assert set(calls["G", "m"].device_ids) == {f"foo-{n}" for n in range(10)} - side
        assert main > init - side
        assert not main & side
        seen = len(node.calls.calls)
        async with node.open_plugin(foo_plugin()):
            await node.start_pods(pod("p", foo("m", 2), init=(foo("i1", 2), foo("i2", 2))))
        later = node.calls.calls[seen:]
        assert [c.method for c in later] == ["GetPreferredAllocation", *["Allocate"] * 3]
        assert len({frozenset(c.device_ids) for c in later[1:]}) == 1


@pytest.mark.parametrize(
    ("preferred", "wanted"),
    [(["foo-3"], {"foo-3"}), (["nope", "none"], set()), ([], set())],
    ids=["short", "unknown", "empty"],
)
async def test_a_preference_is_advice(preferred: list[str], wanted: set[str]) -> None:
    """A short answer is filled up from anything free, unknown IDs are ignored; the pod runs."""
    async with open_test_node() as node:
        async with node.open_plugin(foo_plugin(preferred=lambda *_: preferred)):
            await node.start_pods(pod("p", foo(count=3)))
        ids = set(node.calls.of("Allocate")[0].device_ids)
        assert len(ids) == 3
        assert wanted <= ids <= {f"foo-{n}" for n in range(10)}


@pytest.mark.parametrize(
    ("prefers", "calls"),
    [
        pytest.param(True, ["GetPreferredAllocation", "Allocate"], id="also for all that is left"),
        pytest.param(False, ["Allocate"], id="not a plugin that does not offer it"),
    ],
)
async def test_a_plugin_is_asked_what_it_prefers(prefers: bool, calls: list[str]) -> None:
    async with open_test_node() as node:
        async with node.open_plugin(foo_plugin(prefers=prefers)):
            await node.start_pods(pod("p", foo(count=10)))
        assert [c.method for c in node.calls.calls] == calls


async def refuse(*_ids: Any) -> None:
    raise GRPCError(Status.INTERNAL, "no é / 50% of it")


async def test_a_failed_allocate_rejects_the_pod_with_the_plugins_text() -> None:
    """Failed, UnexpectedAdmissionError, the measured message, an Event; its devices and an earlier container's are free."""
    async with open_test_node() as node:
        core = SmallPlugin(CORE, device_ids("a", count=10))
        async with node.open_plugin(core), node.open_plugin(foo_plugin(on_allocate=refuse)) as plugin:
            message = await rejected(node, pod("bad", container("c1", cores=10), foo("c2", 10)))
            expected = "Allocate failed due to rpc error: code = Internal desc = no é / 50% of it, which is unexpected"
            assert message == f"Pod was rejected: {expected}"
            event = next(e for e in node.api.events() if e["reason"] == "UnexpectedAdmissionError")
            assert (event["message"], event["involvedObject"]["name"]) == (expected, "bad")
            assert len(node.calls.of("Allocate")) == 2  # not retried
            plugin.on_allocate = None
            await node.start_pods(pod("next", container("main", cores=10), foo("other", 10)))


async def test_a_failed_preference_rejects_the_pod_without_an_allocate() -> None:
    """The message names GetPreferredAllocation, as measured."""

    async def fail() -> None:
        await refuse()

    async with open_test_node() as node, node.open_plugin(foo_plugin(on_preferred=fail)):
        message = await rejected(node, pod("bad", foo()))
        assert "device plugin GetPreferredAllocation rpc failed with err: rpc error: code = Internal" in message
        assert node.calls.of("Allocate") == []


async def test_a_resource_that_became_known_later_is_allocated_at_the_containers_restart() -> None:
    """A pod that the scheduler has not seen runs without any device of a resource that the node never heard of; the pod
    worker asks when the container starts again, so not every call belongs to an admission."""
    async with open_test_node() as node:
        await node.start_pods(bound(pod("p", foo())))
        assert node.calls.calls == []
        async with node.open_plugin(foo_plugin()):
            node.kill_container("p")
            await node.kubelet.wait_for(lambda: node.calls.of("Allocate"), what="the late Allocate")
            await node.kubelet.wait_for(lambda: node.restarts("p") == 1, what="the restart in the status")


async def test_a_hanging_allocate_holds_up_every_pod_and_deletion() -> None:
    """A plain pod, a foo pod and a deletion all wait for the open Allocate; PodResources goes on answering."""
    release = asyncio.Event()

    async def hang(_ids: list[str]) -> None:
        await release.wait()

    async with open_test_node() as node:
        plugin = foo_plugin()
        async with node.open_plugin(plugin):
            await node.start_pods(pod("runs", foo()))
            plugin.on_allocate = hang
            node.api.create_pod(pod("hangs", foo()))
            await node.kubelet.wait_for(lambda: any(c.method == "Allocate" for c in node.calls.open_calls))
            node.api.create_pod(pod("plain"))
            node.api.delete_pod("default", "runs")
            await node.kubelet.wait_for(lambda: node.api.pod("default", "plain")["spec"].get("nodeName"))
            assert set(await node.list_pods()) == {"runs/main", "hangs/main"}
            assert node.api.pod("default", "plain")["status"]["phase"] == "Pending"
            assert node.api.find_pod("default", "runs") is not None
            release.set()
            await node.wait_gone("runs")
            await node.wait_phase("plain", "Running")


async def test_prestart_comes_at_every_start_of_a_container_and_allocate_only_once() -> None:
    """A container that dies is started again with its devices: PreStartContainer yes, Allocate no."""
    async with open_test_node() as node:
        plugin = foo_plugin(wants_pre_start=True)
        async with node.open_plugin(plugin):
            await node.start_pods(pod("p", foo(count=2)))
            node.kill_container("p")
            await node.kubelet.wait_for(lambda: node.restarts("p") == 1)
        methods = [m for m, _ in plugin.seen if m in ("Allocate", "PreStartContainer")]
        assert methods == ["Allocate", "PreStartContainer", "PreStartContainer"]


async def test_a_failed_prestart_keeps_the_container_waiting_and_is_tried_again() -> None:
    """The pod stays Pending with CreateContainerConfigError, and runs when the plugin agrees."""
    plugin = foo_plugin(wants_pre_start=True, on_pre_start=refuse)
    async with open_test_node() as node, node.open_plugin(plugin):
        node.api.create_pod(pod("p", foo()))

        await node.kubelet.wait_for(lambda: node.waiting("p").get("message"))
        shown = node.waiting("p")
        assert shown["reason"] == "CreateContainerConfigError"
        assert "PreStartContainer rpc failed with err: rpc error: code = Internal" in shown["message"]
        plugin.on_pre_start = None
        await node.wait_phase("p", "Running")


async def test_a_registration_that_cannot_be_is_refused() -> None:
    """Of another version, with the kubelet's own text and code UNKNOWN; of a socket that nobody serves, as the kubelet dials
    back inside Register."""
    async with open_test_node() as node, node.serving(foo_plugin(), "foo.sock") as plugin:
        with pytest.raises(GRPCError, match="not supported by kubelet") as refusal:
            await node.register(plugin, "foo.sock", version="v2")
        assert refusal.value.status is Status.UNKNOWN
        assert plugin.seen == []
        with pytest.raises(GRPCError, match="failed to get device plugin options"):
            await node.register(plugin, "absent.sock")


async def test_a_plugin_that_ends_leaves_capacity_without_allocatable() -> None:
    """Its devices are unhealthy, running pods are not touched. A pod past the scheduler is rejected with the measured text,
    also before: what was asked and what is there."""
    async with open_test_node() as node:
        async with node.open_plugin(foo_plugin()):
            await node.start_pods(pod("runs", foo()))
            message = await rejected(node, pod("big", foo(count=11)))
            assert f"requested number of devices unavailable for {FOO}. Requested: 11, Available: 9" in message
        await node.wait_allocatable(FOO, 0)
        assert node.api.node("node-a")["status"]["capacity"][FOO] == "10"
        message = await rejected(node, pod("late", foo()))
        assert f"no healthy devices present; cannot allocate unhealthy devices {FOO}" in message
        assert node.api.pod("default", "runs")["status"]["phase"] == "Running"
        assert set(await node.list_pods()) == {"runs/main"}


async def test_a_second_registration_takes_over_and_the_first_is_not_used_again() -> None:
    """The newest plugin's devices count; when it ends nothing is allocatable, though the first stream stayed open."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(10), "one.sock") as first:
        async with node.open_plugin(foo_plugin(4), "two.sock"):
            assert node.api.node("node-a")["status"]["capacity"][FOO] == "4"
        await node.wait_allocatable(FOO, 0)
        assert not first.streams_ended.is_set()
        await node.register(first, "one.sock")
        await node.wait_allocatable(FOO, 10)


async def test_the_end_of_a_replaced_plugin_disconnects_the_one_that_serves() -> None:
    """The kubelet finds the stream's client by the resource's name: the newest. It serves once it has registered again."""
    async with open_test_node() as node, AsyncExitStack() as until_replaced:
        await until_replaced.enter_async_context(node.open_plugin(foo_plugin(10), "one.sock"))
        async with node.open_plugin(foo_plugin(4), "two.sock") as second:
            await until_replaced.aclose()
            await second.streams_ended.wait()
            await node.wait_allocatable(FOO, 0)
            await node.register(second, "two.sock")
            await node.wait_allocatable(FOO, 4)
            await node.start_pods(pod("p", foo(count=4)))


async def test_an_unhealthy_device_leaves_allocatable_and_its_pod_goes_on() -> None:
    """9 of 10 allocatable; the unhealthy ID is not offered any more."""
    async with open_test_node() as node, node.open_plugin(foo_plugin()) as plugin:
        await node.start_pods(pod("runs", foo()))
        await plugin.set_devices({**plugin.devices, "foo-0": ("Unhealthy", None)})
        await node.wait_allocatable(FOO, 9)
        assert node.api.pod("default", "runs")["status"]["phase"] == "Running"
        await node.start_pods(pod("next", foo(count=2)))
        assert "foo-0" not in node.calls.of("GetPreferredAllocation")[-1].device_ids


async def test_a_device_list_beyond_four_mebibytes_ends_the_stream() -> None:
    """grpc-go's limit on what the kubelet receives: the plugin's devices never come to the node."""
    async with open_test_node() as node:
        plugin = SmallPlugin(FOO, {f"{'x' * 200}-{n}": ("Healthy", None) for n in range(20_000)})
        async with node.serving(plugin, "foo.sock"):
            await node.register(plugin, "foo.sock")
            await node.wait_allocatable(FOO, 0)
            await plugin.streams_ended.wait()
        assert node.kubelet.devices.capacity() == {FOO: (0, 0)}


async def test_a_resource_may_have_more_ids_than_a_message_has_other_fields() -> None:
    """As on 64 GPUs of 80 GiB: a kubelet takes a list of 4 MiB, however many IDs are in it."""
    plugin = SmallPlugin(FOO, device_ids("a", count=20_480), prefers=False)
    async with open_test_node() as node, node.open_plugin(plugin):
        await node.start_pods(pod("p", foo(count=2)))
        assert node.api.node("node-a")["status"]["capacity"][FOO] == "20480"
