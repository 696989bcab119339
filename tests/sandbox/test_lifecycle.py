"""Pods ending, deletions, the kubelet's restart, pretended containers: against what was measured on a real kubelet."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox import (
    FOO,
    HELD_ADMISSIONS,
    NodeUnderTest,
    SmallPlugin,
    bound,
    foo,
    foo_plugin,
    open_test_node,
    pod,
)
from tests.support_deadline import DEADLINE_S


async def test_a_deletion_keeps_the_devices_until_the_processes_have_gone() -> None:
    """TERM ignored: the pod is listed with its devices, and "Available: 0", until its process dies."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(2)):
        slow = {"sandbox.gpushare/ignore-term-seconds": "60"}
        await node.start_pods(pod("slow", foo(count=2), annotations=slow, terminationGracePeriodSeconds=60))
        process = node.container_of("slow")
        node.api.delete_pod("default", "slow")
        node.api.create_pod(bound(pod("early", foo())))
        await node.wait_phase("early", "Failed")
        assert "Available: 0" in node.api.pod("default", "early")["status"]["message"]
        assert await node.list_pods() == {"slow/main": {FOO: {"foo-0", "foo-1"}}}
        node.kubelet.runtime.kill(process)
        await node.wait_gone("slow")
        await node.start_pods(bound(pod("later", foo(count=2))))


@needs_processes
async def test_a_forced_deletion_gives_the_devices_away_while_the_process_lives() -> None:
    """Two pods on the same devices, as measured; the cgroup tells that the first one's process is still there."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(2)):
        slow = {"sandbox.gpushare/ignore-term-seconds": "60"}
        await node.start_pods(pod("slow", foo(count=2), annotations=slow))
        process = node.container_of("slow")
        node.api.delete_pod("default", "slow", grace_period_s=0)
        await node.start_pods(bound(pod("next", foo(count=2))))
        assert process.is_running
        assert (process.cgroup / "cgroup.events").read_text().startswith("populated 1\n")
        assert set(await node.list_pods()) == {"next/main"}
        await node.kubelet.wait_for(lambda: not process.is_running, what="the kill after the kubelet's two seconds")
        assert not process.cgroup.exists()


async def test_a_succeeded_pods_devices_are_free_while_its_object_stands() -> None:
    """The checkpoint keeps it until the next allocation: whoever reads it as truth believes in devices that are free."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(2)):
        checkpoint = node.paths.device_plugin_path / "kubelet_internal_checkpoint"
        raw = node.api.create_pod(pod("done", foo(count=2), annotations={"sandbox.gpushare/run-seconds": "0"}))
        await node.wait_phase("done", "Succeeded")
        assert await node.list_pods() == {}
        assert raw["metadata"]["uid"] in checkpoint.read_text()
        await node.start_pods(pod("next", foo(count=2)))
        assert raw["metadata"]["uid"] not in checkpoint.read_text()
        assert node.api.find_pod("default", "done") is not None


# --- restart of the kubelet ---


def _leftovers(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory / "stale.sock"))
    (directory / "file").write_text("")
    (directory / "folder").mkdir()
    (directory / "link").symlink_to("file")


@pytest.mark.parametrize(("version", "kept"), [("1.31", {"folder"}), ("1.36", {"file", "folder", "link"})])
async def test_a_kubelet_start_removes_sockets(version: str, kept: set[str]) -> None:
    """All sockets, live plugins' too; before 1.34 also files and links; never directories and the checkpoint. Until then the
    files of a stopped kubelet stay, and nobody listens."""
    async with open_test_node(kubelet_version=version) as node, node.open_plugin(foo_plugin(2), "foo.sock") as plugin:
        before = (node.paths.device_plugin_path / "kubelet.sock").stat().st_ctime_ns
        await node.kubelet.stop()
        await plugin.streams_ended.wait()
        left = (node.paths.device_plugin_path / name for name in ("foo.sock", "kubelet.sock"))
        for path in (*left, node.paths.pod_resources_socket):
            assert path.is_socket(), path
        async with node.pod_resources() as stub:
            with pytest.raises(ConnectionRefusedError):
                await stub.list()
        _leftovers(node.paths.device_plugin_path)
        await node.kubelet.start()
        names = {p.name for p in node.paths.device_plugin_path.iterdir()}
        assert names == {"kubelet.sock", "kubelet_internal_checkpoint", *kept}
        assert (node.paths.device_plugin_path / "kubelet.sock").stat().st_ctime_ns != before


async def test_running_pods_are_taken_up_again_without_a_call() -> None:
    """Same container, same devices in List, which is empty until the first admission; no RPC to the plugin."""
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        node.kubelet.begin_admissions()
        async with node.open_plugin(foo_plugin(4)):
            await node.start_pods(pod("a", foo(count=2)), pod("b", foo(count=2)))
            before, calls = await node.list_pods(), len(node.calls.calls)
            process = node.container_of("a")
        await node.kubelet.restart()
        assert await node.list_pods() == {}
        node.kubelet.begin_admissions()
        await node.kubelet.wait_for(lambda: len(node.kubelet.listed_pods()) == 2)
        assert await node.list_pods() == before
        assert len(node.calls.calls) == calls
        assert node.container_of("a") is process
        assert process.is_running
        node.kubelet.push_node_status()
        assert node.api.node("node-a")["status"]["allocatable"][FOO] == "0"


async def _again(node: NodeUnderTest, is_reboot: bool) -> None:
    """Another kubelet; a reboot has killed pod p's main container too."""
    process = node.container_of("p")
    await node.kubelet.stop()
    if is_reboot:
        node.kubelet.runtime.kill(process)
    await node.kubelet.start()


WITH_INIT = pod("p", foo(), init=(foo("i"),))
"""An init container that has used a device and completed."""


@pytest.mark.parametrize(
    ("made", "is_reboot", "why"),
    [
        pytest.param(WITH_INIT, False, "cannot allocate unhealthy devices", id="a completed init container"),
        pytest.param(pod("p", foo()), True, "no healthy devices present", id="a reboot"),
    ],
)
async def test_a_pod_is_rejected_where_the_plugin_is_late(made: dict[str, Any], is_reboot: bool, why: str) -> None:
    """It has not come back when the pod is admitted again: the container is killed, and stays so when it comes later."""
    async with open_test_node() as node:
        async with node.open_plugin(foo_plugin(2)):
            await node.start_pods(made)
            process = node.container_of("p")
        await _again(node, is_reboot)
        status = (await node.wait_phase("p", "Failed"))["status"]
        assert why in status["message"]
        await node.kubelet.wait_for(lambda: not process.is_running)
        async with node.open_plugin(foo_plugin(2)):
            assert node.api.pod("default", "p")["status"]["phase"] == "Failed"


@pytest.mark.parametrize(
    ("made", "is_reboot"),
    [
        pytest.param(WITH_INIT, False, id="a completed init container"),
        pytest.param(pod("p", foo()), True, id="a reboot"),
    ],
)
async def test_a_pod_goes_on_where_the_plugin_is_in_time(made: dict[str, Any], is_reboot: bool) -> None:
    """Registered again before the first admission: the old IDs, without an Allocate; after a reboot in a new container."""
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        node.kubelet.begin_admissions()
        plugin = foo_plugin(2)
        async with node.open_plugin(plugin, "foo.sock"):
            await node.start_pods(made)
            before, calls = await node.list_pods(), len(node.calls.of("Allocate"))
        await _again(node, is_reboot)
        async with _serving_again(node, plugin):
            await node.kubelet.wait_for(node.kubelet.listed_pods)

            await node.kubelet.wait_for(
                lambda: node.restarts("p") == is_reboot and node.container_status("p").get("ready")
            )
            assert node.api.pod("default", "p")["status"]["phase"] == "Running"
            assert await node.list_pods() == before
            assert len(node.calls.of("Allocate")) == calls


@asynccontextmanager
async def _serving_again(node: NodeUnderTest, plugin: SmallPlugin) -> AsyncIterator[None]:
    """Known to the kubelet before its first admission, which then begins."""
    async with node.serving(plugin, "foo.sock"):
        await node.register(plugin, "foo.sock")
        await node.wait_allocatable(FOO, len(plugin.devices))
        node.kubelet.begin_admissions()
        yield


async def test_a_failed_pod_is_not_admitted_again() -> None:
    """After a kubelet restart: no call for it, and it is not listed."""
    async with open_test_node() as node:
        plugin = foo_plugin(1)
        async with node.open_plugin(plugin, "foo.sock"):
            node.api.create_pod(bound(pod("bad", foo(count=2))))
            await node.wait_phase("bad", "Failed")
        await node.kubelet.restart()
        await node.start_pods(pod("plain"))
        assert set(await node.list_pods()) == {"plain/main"}
        assert node.calls.calls == []


async def test_a_pod_deleted_while_the_kubelet_was_down_is_ended_at_its_start() -> None:
    """Gracefully deleted: confirmed then. Force-deleted: its orphaned container is stopped."""
    async with open_test_node() as node:
        for name in ("soft", "hard"):
            await node.start_pods(pod(name))
        orphan = node.container_of("hard")
        await node.kubelet.stop()
        node.api.delete_pod("default", "soft")
        node.api.delete_pod("default", "hard", grace_period_s=0)
        assert node.api.find_pod("default", "soft") is not None
        assert orphan.is_running
        await node.kubelet.start()
        await node.wait_gone("soft")
        await node.kubelet.wait_for(lambda: not orphan.is_running)


async def test_a_kubelet_stop_during_an_open_allocate_ends_the_call() -> None:
    """The call is noted as broken off, nothing is recorded, and the pod is admitted again after the start."""
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        node.kubelet.begin_admissions()
        plugin = foo_plugin(2)

        async def hang(_ids: list[str]) -> None:
            await node.kubelet.wait_for(lambda: False, 60)

        plugin.on_allocate = hang
        async with node.open_plugin(plugin, "foo.sock"):
            node.api.create_pod(pod("p", foo()))
            await node.kubelet.wait_for(lambda: any(c.method == "Allocate" for c in node.calls.open_calls))
            await node.kubelet.stop()
        assert node.calls.open_calls == []
        assert node.calls.calls[-1].error
        plugin.on_allocate = None
        await node.kubelet.start()
        async with _serving_again(node, plugin):
            await node.wait_phase("p", "Running")


async def test_a_same_named_pod_made_anew_is_another_pod() -> None:
    """StatefulSet-like recreation: the old one's devices go with it, the new one is admitted for itself."""
    async with open_test_node() as node, node.open_plugin(foo_plugin(2)):
        old = node.api.create_pod(pod("p", foo(count=2)))["metadata"]["uid"]
        await node.wait_phase("p", "Running")
        node.api.delete_pod("default", "p", grace_period_s=0)
        new = node.api.create_pod(pod("p", foo(count=2)))["metadata"]["uid"]
        await node.wait_phase("p", "Running")
        assert [c.pod_uid for c in node.calls.of("Allocate")] == [old, new]
        burstable = node.kubelet.runtime.cgroup_root / "kubepods" / "burstable"

        def is_alone() -> bool:
            return [path.name for path in burstable.iterdir() if path.is_dir()] == [f"pod{new}"]

        # A forced deletion does not wait for the processes, so the new pod may run before the old one's have ended.
        await node.kubelet.wait_for(is_alone, DEADLINE_S, "the new pod's cgroup alone")
