"""The deployer's flow on the embedded node: MPS is started once, its directory is named once, and every share finds it.

As in the two documents of GPUShare on the device plugin with MPS: the agent is given `--mps-pipe`, containers get the volume
and the environment, and nothing that happens to daemon or agent disturbs a container that runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse
from gpushare_agent.sandbox.fake_mps import open_fake_mps
from gpushare_agent.sandbox.state_directory import NodePaths
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.isolation.support_mps import MpsPlace, mps_place
from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, limits_of, open_test_node, pod
from tests.sandbox.support_sandbox_cli import document_of, ended, live, read_until, registered, start

GPU_MIB = 24576
WAITS = ["sh", "-c", "while :; do sleep 600; done"]


def flags(place: MpsPlace) -> list[str]:
    return ["--isolation=mps", *place.flags(), "--mps.probe-period-s=0.1", "--gpus=2"]


def share(name: str, *, command: list[str] = WAITS, **limits: int) -> dict[str, Any]:
    """A pod whose container is a process of this machine; 30 cores and a quarter of a GPU's memory, unless said."""
    wanted = {"cores": 30, "blocks": GPU_MIB // 4 // 256} | limits
    named = {{"cores": CORE, "blocks": MEMORY}[key]: count for key, count in wanted.items() if count}
    return pod(name, limits_of("main", named) | {"image": "sandbox/host", "command": command})


def process_of(node: NodeUnderTest, name: str) -> int:
    found = node.container_of(name)
    assert found is not None and found.is_running
    return found.pid


def environment_inside(pid: int) -> dict[str, str]:
    """What the running process itself has."""
    # Its gate execs the program, and while a process does the kernel shows an empty file for a moment.
    while not (content := Path(f"/proc/{pid}/environ").read_bytes()):
        continue
    entries = content.rstrip(b"\0").split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries)


def mounts_of(node: NodeUnderTest, name: str) -> list[tuple[str, str, bool]]:
    """Of all Allocate answers for it."""
    answers = [ContainerAllocateResponse.parse(call.response) for call in node.calls_of(name)]
    return [(m.container_path, m.host_path, m.read_only) for answer in answers for m in answer.mounts]


async def wait_shares(node: NodeUnderTest, agent: InnerAgent, *, served: bool) -> None:
    """The kubelet has heard whether memory, and with it shares, can be had."""
    reason = agent.parts.isolation.unavailable_reason
    # Both: of an agent that has just registered, the first list may be of before the first check.
    await node.wait_until(
        lambda: bool(node.healthy(MEMORY)) is served and bool(reason("mps")) is not served, f"memory healthy: {served}"
    )


@pytest.fixture
def place(short_dir: Path) -> MpsPlace:
    return mps_place(short_dir)


async def test_a_share_finds_the_deployers_daemon_and_its_own_limits_inside_its_process(place: MpsPlace) -> None:
    """The variables and mounts of the seed, with the numbers of 30 cores and a quarter of the memory."""
    asks = f"echo get_server_list | {place.program} && echo connected; while :; do sleep 600; done"
    async with (
        open_fake_mps(place.pipe, place.logs, place.program) as daemon,
        open_test_node() as node,
        open_agent(node, *flags(place)) as agent,
    ):
        await node.start_pods(
            share("first"), share("seed", command=["sh", "-c", asks]), share("whole", cores=100, blocks=0)
        )
        gpu = agent.parts.node.inventory.current.gpus[0]
        inside = environment_inside(process_of(node, "seed"))
        names = ("CUDA_", "ALIYUN_", "NVIDIA_")
        assert {name: value for name, value in inside.items() if name.startswith(names)} == {
            "NVIDIA_VISIBLE_DEVICES": gpu.uuid,
            "CUDA_VISIBLE_DEVICES": gpu.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(place.pipe),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M",
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "ALIYUN_COM_GPU_MEM_POD": "6",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "6",
            "ALIYUN_COM_GPU_MEM_DEV": "24",
        }
        assert sorted(mounts_of(node, "seed")) == [
            ("/dev/shm", "/dev/shm", False),
            (str(place.pipe), str(place.pipe), False),
        ]
        # The process goes to the daemon by its own variable, as CUDA does.
        await poll_until(lambda: "connected" in node.printed("seed"), "the container at the daemon")
        assert "get_server_list" in daemon.commands
        whole = environment_inside(process_of(node, "whole"))
        assert not [name for name in whole if name.startswith(("CUDA_", "ALIYUN_"))]
        assert mounts_of(node, "whole") == []


async def test_neither_daemon_nor_agent_disturbs_a_share_that_runs(place: MpsPlace) -> None:
    """The daemon dies and comes back, the agent restarts: the same processes run on, and the ledger is the same."""
    async with open_test_node() as node:
        async with open_fake_mps(place.pipe, place.logs, place.program) as daemon:
            async with open_agent(node, *flags(place)) as agent:
                await node.start_pods(share("seed"))
                pid = process_of(node, "seed")
            async with open_agent(node, *flags(place)) as agent:
                await node.wait_ledger_equal(agent)
                assert process_of(node, "seed") == pid
            said = {command.split()[0] for command in daemon.commands}
        assert said == {"get_default_active_thread_percentage"}, "the agent only asks"
        await node.wait_allocatable(CORE, 0)
        node.api.create_pod(share("waits"))
        async with open_agent(node, *flags(place), wait=False) as agent:  # started while the daemon is down
            offered = set[int]()

            def is_served() -> bool:
                offered.add(node.healthy(MEMORY))
                return bool(node.healthy(CORE)) and agent.parts.kubelet.has_recovered

            await node.wait_until(is_served, "the cores healthy, the ledger there")
            await wait_shares(node, agent, served=False)
            await node.wait_ledger_equal(agent)
            # Not rejected: the first list has no shares either.
            assert offered == {0}
            assert node.api.pod("default", "waits")["status"]["phase"] == "Pending"
            async with open_fake_mps(place.pipe, place.logs, place.program):
                await wait_shares(node, agent, served=True)
                await node.start_pods(share("second"))
                await node.wait_running("waits")
            await wait_shares(node, agent, served=False)
            assert process_of(node, "seed") == pid and process_of(node, "second")
            await node.wait_ledger_equal(agent)


async def test_while_the_daemon_is_down_shares_are_refused_and_whole_gpus_go(place: MpsPlace) -> None:
    """Shares come again by themselves once the daemon does."""
    async with (
        open_fake_mps(place.pipe, place.logs, place.program),
        open_test_node() as node,
        open_agent(node, *flags(place)) as agent,
    ):
        away, program_away = place.pipe / "away", place.root / "away"
        (place.pipe / "control").rename(away)
        place.program.rename(program_away)
        await wait_shares(node, agent, served=False)
        watch = agent.parts.isolation.watches["mps"]
        # A poll between the two renames says what the program says; the next one finds both away.
        await poll_until(lambda: "there is no MPS control socket" in watch.unavailable_reason, "missing socket seen")
        node.api.create_pod(share("whole", cores=100, blocks=0))
        early = share("early")
        early["spec"]["nodeName"] = node.name  # as a scheduler would that has not heard of it
        node.api.create_pod(early)
        await node.wait_running("whole")
        await node.wait_phase("early", "Failed")
        away.rename(place.pipe / "control")
        program_away.rename(place.program)
        await wait_shares(node, agent, served=True)
        await node.start_pods(share("late"))
        assert environment_inside(process_of(node, "late"))["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6144M"


async def test_a_share_without_a_daemon_is_refused_with_the_reason(place: MpsPlace) -> None:
    """The text is on the pod: what is wrong with the daemon, and that nothing was allocated."""
    async with (
        open_fake_mps(place.pipe, place.logs, place.program),
        open_test_node() as node,
        open_agent(node, *flags(place), "--isolation=none", "--isolations-allowed=mps") as agent,
    ):
        # Where mps is only one of those that a pod may choose, the memory stays healthy: others need no daemon.
        watch = agent.parts.isolation.watches["mps"]
        place.program.write_text("#!/bin/sh\necho the daemon is gone; exit 1\n")
        await poll_until(lambda: watch.unavailable_reason, "failure seen")
        chooses = share("chooses")
        chooses["metadata"]["annotations"] = {"tencent.com/gpu-isolation": "mps"}
        node.api.create_pod(chooses)
        node.api.create_pod(share("other"))
        words = await node.wait_settled("chooses")
        assert "the daemon is gone" in words and "under isolation mps" in words and "Nothing was allocated" in words
        await node.wait_running("other")


@needs_processes
async def test_the_sandbox_runs_a_stand_in_for_the_daemon(short_dir: Path) -> None:
    """Out of the box: no daemon and no directory has to be named, and what it was asked is on record."""
    state, paths = short_dir / "s", NodePaths(state=short_dir / "s")
    async with live(state, "--samples", "fitting", "--isolation", "mps") as process:
        await read_until(process, "default/share")
        await registered(state)
        while (found := (await document_of(state))["pods"]) and {raw["phase"] for raw in found} != {"Running"}:
            await asyncio.sleep(0.05)
        asks = "echo $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; echo get_server_list | $0 && echo connected"
        inside = await ended(
            await start("exec", "--state-dir", state, "share", "--", "sh", "-c", asks, paths.mps_control)
        )
        assert (inside.code, inside.out) == (0, "0=4096M\nconnected\n"), inside.err
        heard = (paths.mps_logs / "control.log").read_text().splitlines()
        assert set(heard) == {"get_default_active_thread_percentage", "get_server_list"}
