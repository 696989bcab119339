"""Usage on the embedded node: real processes in cgroups or in files that stand for them, the simulated driver's word on
what they use, real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.composition import build
from gpushare_agent.agent.observability import part
from gpushare_agent.agent.observability.usage_sampling import UsageSampling
from gpushare_agent.core.kit.sockets import is_served
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.usage import UsageRound
from gpushare_agent.core.settings.settings import load_settings
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.isolation.support_tenant import SlowFiles
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod

MIB = 1024 * 1024
FAST = ("--sample-period-s=0.05", "--usage.idle-period-s=0")


def pids_of(node: NodeUnderTest, name: str) -> list[int]:
    """The container's processes on this machine."""
    return node.kubelet.runtime.pids(node.container_of(name))


def put_usage(node: NodeUnderTest, *processes: Mapping[str, Any]) -> None:
    """What the simulated driver sees from now on."""
    new = node.paths.usage.with_suffix(".new")
    new.write_text(json.dumps({"processes": list(processes)}))
    new.replace(node.paths.usage)


def key_of(node: NodeUnderTest, name: str) -> ContainerKey:
    return ContainerKey(node.uid_of(name), "main")


def index_of(node: NodeUnderTest, agent: InnerAgent, name: str) -> int:
    """Of the one GPU that the pod's container has."""
    (uuid,) = node.gpus_of(name)
    return next(gpu.index for gpu in agent.parts.node.inventory.current.gpus if gpu.uuid == uuid)


async def scrape(agent: InnerAgent) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All series by name."""
    _, text = await agent.page("/metric")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def of_pod(rows: list[tuple[dict[str, str], float]], name: str) -> list[float]:
    return [value for labels, value in rows if name in (labels.get("pod"), labels.get("pod_name"))]


async def next_round(agent: InnerAgent, since: UsageRound | None) -> UsageRound:
    """One that began after `since` was looked at."""
    usage = agent.parts.observability.usage
    await poll_until(lambda: usage.current is not None and usage.current is not since, "another round")
    assert usage.current is not None
    return usage.current


@asynccontextmanager
async def sampled_node(*flags: str, cgroups: str | None = None) -> AsyncIterator[tuple[NodeUnderTest, InnerAgent]]:
    """Two GPUs, and two pods with shares that run."""
    async with open_test_node(cgroups=cgroups) as node, open_agent(node, *FAST, "--simulated.gpus=2", *flags) as agent:
        await node.start_pods(*(pod(name, container(cores=30, blocks=8)) for name in ("a", "b")))
        yield node, agent


@pytest.mark.parametrize(
    ("cgroups", "flags"),
    [
        pytest.param(None, ("--isolation=none",), id="cgroups, without an isolation"),
        pytest.param("none", (), id="files in place of cgroups"),
    ],
)
async def test_use_is_shown_for_the_container_in_which_the_process_runs(
    cgroups: str | None, flags: tuple[str, ...]
) -> None:
    """Each pod has what its own process uses, in gpu-manager's series and in ours; a program of the node is a stranger."""
    async with sampled_node(*flags, cgroups=cgroups) as (node, agent):
        (a, *_), (b, *_) = pids_of(node, "a"), pids_of(node, "b")
        gpu_a, gpu_b = index_of(node, agent, "a"), index_of(node, agent, "b")
        put_usage(
            node,
            {"pid": a, "gpu": gpu_a, "sm": 0.25, "memory_bytes": 512 * MIB},
            {"pid": b, "gpu": gpu_b, "sm": 0.125, "memory_bytes": 256 * MIB},
            {"pid": 1, "gpu": 1, "sm": 0.0, "memory_bytes": 64 * MIB},
        )
        usage = agent.parts.observability.usage

        def is_seen() -> bool:
            now = usage.current
            return now is not None and all(
                (use := now.containers.get((key_of(node, name), uuid))) is not None and use.pids == (pid,)
                for name, pid in (("a", a), ("b", b))
                for uuid in node.gpus_of(name)
            )

        await poll_until(is_seen, "both processes with their containers")
        rows = await scrape(agent)
        for name, memory_mib, sm in (("a", 512.0, 0.25), ("b", 256.0, 0.125)):
            assert of_pod(rows["gpushare_container_memory_used_bytes"], name) == [memory_mib * MIB]
            assert of_pod(rows["gpushare_container_sm_utilization_ratio"], name) == [sm]
            assert of_pod(rows["container_gpu_memory_total"], name) == [memory_mib, memory_mib]
            assert of_pod(rows["container_gpu_utilization"], name) == [sm * 100, sm * 100]
            assert of_pod(rows["gpushare_container_memory_limit_bytes"], name) == [8 * 256 * MIB]
        unattributed = {labels["gpu"]: value for labels, value in rows["gpushare_gpu_stranger_memory_used_bytes"]}
        assert unattributed == {"0": 0.0, "1": 64.0 * MIB}
        found = {labels["method"]: value for labels, value in rows["gpushare_identifications_total"]}
        assert sum(found.values()) >= 2
        points = json.loads(b"".join(agent.parts.observability.usage_history.pieces()))["containers"][
            f"{key_of(node, 'a').pod_uid}/main"
        ]
        assert points["memory_bytes"][-1] is not None


async def test_a_container_has_its_series_from_its_allocation_on_and_loses_them_with_it() -> None:
    """Limit, given and used, 0 as long as no process shows; nothing but the counters' last values outlives the pod."""
    async with sampled_node() as (node, agent):
        await next_round(agent, None)
        rows = await scrape(agent)
        assert of_pod(rows["gpushare_container_memory_used_bytes"], "a") == [0.0]
        assert of_pod(rows["gpushare_container_allocated_cores_ratio"], "a") == [0.3]
        assert sum(value for _, value in rows["gpushare_gpu_cores_allocated_ratio"]) == 0.6
        await node.remove_pod("a", grace_period_s=0)
        await node.wait_until(lambda: len(agent.parts.node.cache) == 1, "the share to be freed")
        rows = await scrape(agent)
        counters = ["gpushare_container_gpu_seconds_total", "gpushare_container_memory_byte_seconds_total"]
        assert [name for name, found in rows.items() if of_pod(found, "a")] == counters
        first = {name: of_pod(rows[name], "a") for name in counters}
        assert first == {name: of_pod((await scrape(agent))[name], "a") for name in counters}
        assert of_pod(rows["gpushare_container_allocated_cores_ratio"], "b") == [0.3]


async def test_a_lost_driver_takes_the_used_series_away_and_brings_them_back() -> None:
    """Stale numbers are not shown; limits are, for those hold."""
    async with sampled_node() as (node, agent):
        await next_round(agent, None)
        node.paths.faults.write_text(json.dumps({"all_lost": "fell off the bus"}))
        await poll_until(lambda: agent.parts.observability.usage.current is None, "numbers to be dropped")
        rows = await scrape(agent)
        assert "gpushare_container_memory_used_bytes" not in rows
        assert "gpushare_usage_sampled_timestamp_seconds" not in rows
        assert of_pod(rows["gpushare_container_memory_limit_bytes"], "a") == [8 * 256 * MIB]
        assert rows["gpushare_sampling_failures_total"][0][1] >= 1
        node.paths.faults.write_text("{}")
        await next_round(agent, None)
        assert "gpushare_container_memory_used_bytes" in await scrape(agent)


async def test_a_restarted_containers_new_process_is_its_own() -> None:
    """Another PID and another container ID, and the use is still the container's."""
    async with sampled_node() as (node, agent):
        run = node.container_of("a")
        node.kubelet.runtime.kill(run)

        def runs_again() -> bool:
            return node.container_of("a").id != run.id and bool(pids_of(node, "a"))

        await node.wait_until(runs_again, "the container to run again")
        (pid, *_) = pids_of(node, "a")
        put_usage(node, {"pid": pid, "gpu": index_of(node, agent, "a"), "sm": 0.5, "memory_bytes": MIB})
        (uuid,) = node.gpus_of("a")
        key = key_of(node, "a")

        def seen() -> bool:
            now = agent.parts.observability.usage.current
            return now is not None and any(
                where == (key, uuid) and use.pids == (pid,) for where, use in now.containers.items()
            )

        await poll_until(seen, "the new process with its container")
        assert agent.parts.observability.usage.current is not None
        assert not agent.parts.observability.usage.current.unattributed


async def test_of_two_shares_that_compute_on_a_gpu_each_is_shown_with_what_it_paid() -> None:
    """The driver gives each all of the GPU. Once one of them rests the other is as the driver says; its series stay."""
    flags = (*FAST, "--isolation=gpushare", "--simulated.gpus=1")
    async with open_test_node() as node, open_agent(node, *flags) as agent:
        await node.start_pods(*(pod(name, container(cores=cores, blocks=8)) for name, cores in (("a", 30), ("b", 60))))
        put_usage(node, *({"pid": pids_of(node, name)[0], "gpu": 0, "sm": 0.9, "memory_bytes": MIB} for name in "ab"))
        containers = agent.parts.node.settings.virtual_manager.path

        def launch(name: str) -> None:
            """As libgpushare would count it: much more than any share."""
            with (containers / key_of(node, name).pod_uid / "main" / "usage").open("r+b") as usage:
                usage.seek(512 + 48)
                paid, launches = struct.unpack("QQ", usage.read(16))
                usage.seek(512 + 48)
                usage.write(struct.pack("QQ", paid + 1_000_000_000, launches + 1))

        async def shown(computing: str) -> dict[str, tuple[list[float], set[str]]]:
            for name in computing:
                launch(name)
            rows = await scrape(agent)
            ratios, sources = (rows[f"gpushare_container_sm_utilization_{one}"] for one in ("ratio", "info"))
            found = {name: {labels["source"] for labels, _ in sources if labels["pod"] == name} for name in "ab"}
            return {name: (of_pod(ratios, name), found[name]) for name in "ab"}

        async def wait_shown(computing: str, expected: dict[str, tuple[list[float], set[str]]]) -> None:
            while await shown(computing) != expected:
                await asyncio.sleep(0.05)

        await wait_shown("ab", {"a": ([0.3], {"library"}), "b": ([0.6], {"library"})})
        put_usage(node, {"pid": pids_of(node, "a")[0], "gpu": 0, "sm": 0.4, "memory_bytes": MIB})
        await wait_shown("a", {"a": ([0.4], {"driver"}), "b": ([0.0], {"driver"})})


async def test_five_pods_start_while_the_file_of_another_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its own container starts again, with new files and a socket that is served."""
    async with open_test_node() as node, open_agent(node, *FAST, "--isolation=gpushare") as agent:
        await node.start_pods(pod("hostile", container(cores=10, blocks=2)))
        directory = agent.parts.node.settings.virtual_manager.path / key_of(node, "hostile").pod_uid / "main"
        former = (directory / "usage").stat().st_ino
        slow = SlowFiles(monkeypatch)
        try:
            os.truncate(directory / "usage", 1 << 20)
            await poll_until(lambda: bool(slow.slow), "the file being shortened")
            for number in range(5):
                node.api.create_pod(pod(f"other{number}", container(cores=10, blocks=2)))
            await node.wait_running(*(f"other{number}" for number in range(5)))
            node.kill_container("hostile")
            await node.wait_until(lambda: len(node.calls_of("hostile", "PreStartContainer")) == 2, "the restart")
            assert not node.calls_of("hostile", "PreStartContainer")[-1].error
            assert (directory / "usage").stat().st_ino != former and is_served(directory / "vcuda.sock")
            # The thread that removes what was put aside may wait for it.
            assert set(slow.waited) <= {"unlink usage"}
        finally:
            slow.release()


@pytest.mark.parametrize("is_away", [False, True], ids=["listed", "API server away"])
async def test_the_first_round_waits_a_moment_for_the_pods_list(is_away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it the runtime would be asked for every container's ID, and READY would wait for the round."""
    begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(sampling: UsageSampling) -> None:
        begun.set_result(sampling.pods.is_synced)

    monkeypatch.setattr(UsageSampling, "run", run)
    async with open_test_node() as node:
        parts = build(NodeSettings(settings=load_settings(node.arguments(), {}).settings))
    if is_away:
        monkeypatch.setattr(part, "LIST_WAIT_S", 0)
    else:
        asyncio.get_running_loop().call_soon(parts.node.pods.replace_all, ())
    await parts.observability.late_tasks()["usage sampling"]()
    assert begun.result() is not is_away
