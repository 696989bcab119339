"""Live resize on the embedded node: a running pod's annotation, the ledger, what the isolation is told, and who hears."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME
from gpushare_agent.agent.isolation.gpushare.library import MARK
from gpushare_agent.core.formats.vdevice import VDeviceConfig, decode_config
from gpushare_agent.core.model.allocations import ContainerKey
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod
from tests.support_core import used_blocks, used_cores

RESIZE, STATUS = "gpushare-agent/resize", "gpushare-agent/resize-status"
MIB = 1024 * 1024
FLAGS = ("--gpus=1", "--isolation=vcuda", "--resize.mode=free-capacity")
"""One GPU of 100 cores and 96 blocks."""


def share(name: str, cores: int = 30, blocks: int = 8, **extra: Any) -> dict[str, Any]:
    return pod(name, container("main", cores=cores, blocks=blocks), **extra)


def annotate(node: NodeUnderTest, name: str, text: str | None) -> None:
    node.annotate(name, {RESIZE: text})


async def resize(node: NodeUnderTest, name: str, text: str, size: tuple[int, int]) -> None:
    """Until the library is told of these cores and memory blocks."""
    annotate(node, name, text)
    await poll_until(lambda: size_of(node, name) == size, f"{size} for {text}")


def config_of(node: NodeUnderTest, name: str) -> VDeviceConfig:
    uid = node.uid_of(name)
    return decode_config((node.paths.virtual_manager / uid / "main" / "vcuda.config").read_bytes())


def size_of(node: NodeUnderTest, name: str) -> tuple[int, int]:
    """Cores and memory blocks that the library is told."""
    config = config_of(node, name)
    return config.utilization, config.memory_bytes // (256 * MIB)


def status_of(node: NodeUnderTest, name: str) -> str:
    return str(node.api.pod("default", name)["metadata"].get("annotations", {}).get(STATUS, ""))


def events_of(node: NodeUnderTest, name: str) -> list[tuple[str, str]]:
    return [(reason, message) for reason, message in node.events_of(name) if reason.startswith("ShareResize")]


def held_of(node: NodeUnderTest, name: str) -> list[int]:
    """Of GPU 0, as the node's object says."""
    text = node.api.node(node.name)["metadata"].get("annotations", {}).get("gpushare-agent/allocations", "{}")
    return list(json.loads(text).get("allocations", {}).get(node.uid_of(name), {}).get("0", []))


@asynccontextmanager
async def open_world(*flags: str) -> AsyncIterator[tuple[NodeUnderTest, InnerAgent]]:
    async with open_test_node() as node, open_agent(node, *(flags or FLAGS)) as agent:
        yield node, agent


async def test_a_running_share_grows_and_the_kubelet_offers_no_more_than_is_left() -> None:
    """Ledger, library, the node's object, the device list and the pod's own status say the same; new pods get the rest."""
    async with open_world() as (node, agent):
        await node.start_pods(share("web"))
        await resize(node, "web", "main:cores=50,memory=24", (50, 24))
        await node.wait_until(lambda: status_of(node, "web") == "main:cores=50,memory=24,in-force", "status")
        await node.wait_until(lambda: (node.healthy(CORE), node.healthy(MEMORY)) == (80, 80), "IDs withheld")
        await node.wait_until(lambda: held_of(node, "web") == [50, 24], "the node's object")
        await node.wait_until(lambda: [reason for reason, _ in events_of(node, "web")] == ["ShareResized"], "Event")
        assert used_cores(agent.parts.node.cache) == {agent.parts.node.gpus().gpus[0].uuid: 50}
        await node.start_pods(share("rest", 50, 72))
        node.api.create_pod(share("late", 1, 1))
        await node.wait_until(lambda: node.api.pod("default", "late")["status"].get("conditions"), "no room for it")
        assert node.api.pod("default", "late")["status"]["phase"] == "Pending"


async def test_under_gpushare_a_running_program_finds_the_new_size_in_its_file(short_dir: Path) -> None:
    """Made before the container starts, changed in place, and gone with the pod; what the tenant has more is waited for."""
    library = fake_library(short_dir / "libgpushare.so")
    library.write_bytes(library.read_bytes() + MARK)
    flags = ("--gpus=1", "--isolation=gpushare", f"--libgpushare.library={library}", "--resize.mode=free-capacity")
    async with open_world(*flags) as (node, agent):
        await node.start_pods(share("web"))
        uid = node.uid_of("web")
        directory = node.paths.virtual_manager / uid / "main"
        config = directory / CONFIG_NAME

        def told() -> tuple[int, int]:
            """Cores and memory blocks."""
            memory, cores = struct.unpack_from("=QI", config.read_bytes(), 512 + 56)
            return cores // 100, memory // (256 * MIB)

        assert told() == (30, 8)
        inode = config.stat().st_ino
        annotate(node, "web", "main:cores=50,memory=24")
        await poll_until(lambda: told() == (50, 24), "the library is told")
        await node.wait_until(lambda: status_of(node, "web") == "main:cores=50,memory=24,in-force", "status")
        assert config.stat().st_ino == inode
        (kept,) = (agent.parts.isolation.kept(one) for one in agent.parts.node.cache)
        assert kept is not None and (kept.memory_by, kept.compute_by) == ("gpushare", "gpushare")
        node.api.delete_pod("default", "web")
        await poll_until(lambda: not directory.exists(), "its files are removed")


async def test_a_share_shrinks_and_what_a_running_process_may_use_stays_booked() -> None:
    """Under vcuda nobody can tell whether a process reads its limits again: others may grow with the next container."""
    async with open_world() as (node, agent):
        for name, cores, blocks in (("first", 60, 60), ("second", 30, 30)):
            await node.start_pods(share(name, cores, blocks))
        annotate(node, "first", "main:cores=20,memory=10")
        await poll_until(lambda: size_of(node, "first") == (20, 10), "the library is told")
        await node.wait_until(lambda: status_of(node, "first") == "main:cores=20,memory=10,shrinking", "status")
        annotate(node, "second", "main:cores=70")
        await node.wait_until(lambda: "refused=NotEnoughCores" in status_of(node, "second"), "refused")
        key = ContainerKey(node.uid_of("first"), "main")
        node.kill_container("first")
        await poll_until(lambda: size_of(node, "second") == (70, 30), "granted once every process is new")
        await node.wait_until(lambda: held_of(node, "second") == [70, 30], "the node's object")
        annotate(node, "first", None)
        await node.wait_until(lambda: "refused=NotEnoughCores" in status_of(node, "first"), "no room for its own")
        annotate(node, "second", None)
        await poll_until(lambda: size_of(node, "second") == (30, 30), "as allocated")
        assert agent.parts.node.cache.get(key) is not None


async def test_what_does_not_fit_is_refused_once_and_granted_when_it_does() -> None:
    """The Event has reason and cure; the same annotation brings no second one."""
    async with open_world() as (node, agent):
        for name, cores, blocks in (("first", 60, 60), ("second", 30, 30)):
            await node.start_pods(share(name, cores, blocks))
        annotate(node, "second", "main:memory=40")
        await node.wait_until(lambda: "refused=NotEnoughMemory" in status_of(node, "second"), "refused")
        await node.wait_until(lambda: events_of(node, "second"), "Event")
        assert size_of(node, "second") == (30, 30)
        await node.wait_until(lambda: held_of(node, "second") == [30, 30], "the node's object")
        for _ in range(3):
            await agent.parts.kubelet.resizing.reconcile()
        ((reason, message),) = events_of(node, "second")
        assert reason == "ShareResizeRefused"
        assert "with 36 memory blocks (9 GiB) free" in message and "ask for less" in message
        node.api.delete_pod("default", "first")
        await poll_until(lambda: size_of(node, "second") == (30, 40), "granted once there is room")
        await node.wait_until(lambda: status_of(node, "second") == "main:cores=30,memory=40,in-force", "status")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("main:cores=100", "no share of one GPU"),
        ("main: cores=50", "cannot be read"),
        ("mian:cores=50", "which the pod does not have"),
        ("x" * 5000, "cannot be read"),
    ],
)
async def test_a_wrong_annotation_changes_nothing_and_is_reported(text: str, said: str) -> None:
    """As an Event, in words."""
    async with open_world() as (node, _):
        await node.start_pods(share("web"))
        annotate(node, "web", text)
        await node.wait_until(lambda: any(said in message for _, message in events_of(node, "web")), "Event")
        assert size_of(node, "web") == (30, 8)


async def test_by_default_the_annotation_is_refused() -> None:
    """Who may edit his pods would otherwise escape the ResourceQuota."""
    async with open_world("--gpus=1", "--isolation=vcuda") as (node, _):
        await node.start_pods(share("web", annotations={RESIZE: "main:cores=50"}))
        await node.wait_until(lambda: "refused=ResizeDisabled" in status_of(node, "web"), "refused")
        assert size_of(node, "web") == (30, 8)


async def test_within_its_request_a_share_may_shrink_and_grow_back() -> None:
    """No quota is exceeded so, whoever writes the annotation."""
    async with open_world("--gpus=1", "--isolation=vcuda", "--resize.mode=within-request") as (node, _):
        await node.start_pods(share("web"))
        await resize(node, "web", "main:cores=10", (10, 8))
        await resize(node, "web", "main:cores=30,memory=8", (30, 8))
        annotate(node, "web", "main:cores=31")
        await node.wait_until(lambda: "refused=ResizeDisabled" in status_of(node, "web"), "refused")
        assert size_of(node, "web") == (30, 8)
        await resize(node, "web", "main:cores=10", (10, 8))
        annotate(node, "web", "main:cores=31")
        await node.wait_until(lambda: "main:cores=10,memory=8,refused" in status_of(node, "web"), "refused as it is")
        assert size_of(node, "web") == (10, 8)


async def test_an_unreadable_annotation_keeps_no_size_that_the_setting_takes_back() -> None:
    """Under the setting that granted the size it does."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.start_pods(share("web"))
            await resize(node, "web", "main:cores=50,memory=24", (50, 24))
            annotate(node, "web", "as much as there is")
            await node.wait_until(lambda: "refused=InvalidRequest" in status_of(node, "web"), "refused")
            assert size_of(node, "web") == (50, 24)
        async with open_agent(node, "--gpus=1", "--isolation=vcuda", "--resize.mode=within-request"):
            await poll_until(lambda: size_of(node, "web") == (30, 8), "taken back")


async def test_a_restarted_agent_lends_nothing_twice_before_the_api_server_answers() -> None:
    """The file has what was granted: device list and account know it before any pod is listed."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.start_pods(share("web"))
            await resize(node, "web", "main:cores=90,memory=90", (90, 90))
        await node.api.stop_listening()
        async with open_agent(node, *FLAGS, wait=False) as agent:
            cache = agent.parts.node.cache
            await poll_until(lambda: len(cache), "recovered")
            (allocation,) = cache
            assert used_cores(cache)[allocation.gpus[0]] == 90 and used_blocks(cache)[allocation.gpus[0]] == 90
            await node.wait_until(lambda: (node.healthy(CORE), node.healthy(MEMORY)) == (40, 14), "IDs withheld")
            assert not agent.parts.node.pods.is_synced


async def test_a_corrupt_file_is_set_aside_and_shares_are_resized_anew() -> None:
    """Nothing counts as lent, each isolation is told what was allocated, and the annotations say the rest."""
    async with open_test_node() as node:
        async with open_agent(node, *FLAGS):
            await node.start_pods(share("web"))
            await resize(node, "web", "main:cores=90,memory=90", (90, 90))
        node.paths.resize_state.write_text('{"version": 1, "shares": [{"pod_uid": "../x"}]}')
        node.paths.resize_state.with_name("resize.json.last").unlink()
        async with open_agent(node, *FLAGS) as agent:
            await poll_until(lambda: agent.parts.node.cache.resized, "another size")
            await poll_until(lambda: size_of(node, "web") == (90, 90), "the library is told")
        assert node.paths.resize_state.with_name("resize.json.corrupt").exists()


async def test_where_the_file_cannot_be_written_nothing_is_granted() -> None:
    """A restart would otherwise give the same capacity to another."""
    async with open_world(*FLAGS, "--state-directory=/proc/nowhere") as (node, agent):
        await node.start_pods(share("web"))
        annotate(node, "web", "main:cores=50")
        await node.wait_until(lambda: status_of(node, "web") == "main:cores=30,memory=8,pending", "pending")
        await agent.parts.kubelet.resizing.reconcile()
        assert size_of(node, "web") == (30, 8)


async def test_an_isolation_that_limits_nothing_is_not_resized() -> None:
    """The ledger would say what nobody enforces."""
    flags = ("--gpus=1", "--isolation=none", "--resize.mode=free-capacity")
    async with open_world(*flags) as (node, agent):
        await node.start_pods(share("web"))
        annotate(node, "web", "main:cores=50")
        await node.wait_until(lambda: "refused=ResizeUnsupported" in status_of(node, "web"), "refused")
        assert not agent.parts.node.cache.resized


async def test_whoever_flips_the_annotation_writes_few_events_and_files() -> None:
    """A round takes what is there by then, and an Event of a pod waits for the one before."""
    async with open_world() as (node, agent):
        await node.start_pods(share("web"))

        def seen() -> str | None:
            (pod,) = agent.parts.node.pods.pods()
            return pod.annotations.get(RESIZE)

        for number in range(101, 141):
            annotate(node, "web", f"main:cores={number}")
            await poll_until(lambda: seen() == f"main:cores={number}", "the agent sees it")  # noqa: B023
        await agent.parts.kubelet.resizing.reconcile()
        assert len(events_of(node, "web")) <= 2
        await resize(node, "web", "main:cores=40", (40, 8))


async def test_a_refused_pod_does_not_start_on_lent_capacity() -> None:
    """A pod bound past the scheduler meets the account, not the kubelet's count of IDs."""
    async with open_world() as (node, _):
        await node.start_pods(share("web", 30, 8))
        await resize(node, "web", "main:cores=95", (95, 8))
        message = await node.settle_pod(share("bound", 10, 8, nodeName=node.name))
        assert node.api.pod("default", "bound")["status"]["phase"] == "Failed", message
