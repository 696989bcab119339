"""Errors of GPUs on the whole node: what the kubelet hears, what pods meet, how a GPU returns, what an operator does."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.watch import EVENT_PERIOD_S
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginDevice, PluginEndpoint
from tests.agent.support_agent import InnerAgent, open_agent, open_child, poll_until
from tests.gpus.support_health import write_rehearsal
from tests.sandbox.support_sandbox import (
    BLOCKS,
    CORE,
    CORES,
    MEMORY,
    NodeUnderTest,
    container,
    key_of,
    open_test_node,
    pod,
)
from tests.settings.support_settings import clean_environment, run_program

FAST = ("--simulated.gpus=2", "--health.recovery-probes=2", "--health.recovery-period-s=0.05")


class Lists(list[tuple[str, dict[str, tuple[int, int]]]]):
    """Every device list that the kubelet is sent: the resource, and by GPU how many of its IDs are healthy and not."""

    def of(self, resource: str) -> list[dict[str, tuple[int, int]]]:
        return [gpus for name, gpus in self if name == resource]


def _record_lists(node: NodeUnderTest) -> Lists:
    """From now on, at the kubelet's end of ListAndWatch."""
    lists, devices = Lists(), node.kubelet.devices
    receive = devices._receive

    def note(endpoint: PluginEndpoint, found: Mapping[str, PluginDevice]) -> None:
        gpus: dict[str, tuple[int, int]] = {}
        for device in found.values():
            gpu = device.id.rpartition("-")[0]
            healthy, unhealthy = gpus.get(gpu, (0, 0))
            gpus[gpu] = (healthy + device.is_healthy, unhealthy + (not device.is_healthy))
        lists.append((endpoint.resource, gpus))
        receive(endpoint, found)

    devices._receive = note  # type: ignore[method-assign]
    return lists


@asynccontextmanager
async def _agent(*flags: str, event_period_s: float = 0.05) -> AsyncIterator[tuple[NodeUnderTest, InnerAgent, Path]]:
    """A node and an agent with an empty faults file that it has read, so that every entry added later is new."""
    async with open_test_node() as node:
        write_rehearsal(node.paths.faults)
        async with open_agent(node, *FAST, *flags) as agent:
            agent.parts.gpus.watch.event_period_s = event_period_s
            yield node, agent, node.paths.faults


def _is_away(node: NodeUnderTest, uuid: str) -> bool:
    """All IDs of the GPU are Unhealthy, in both resources."""
    return node.states_of(uuid) == {False}


def _event_reasons(node: NodeUnderTest) -> list[str]:
    return [event["reason"] for event in node.api.events() if event["involvedObject"]["kind"] == "Node"]


async def test_xid_79_takes_the_gpu_away_and_a_reset_brings_it_back() -> None:
    """With the default period of events. Both resources, in one message each; the other GPU is never touched, who runs goes
    on, a new pod goes elsewhere, one for which no GPU is left is refused with the reason, and the reset GPU is used."""
    flags = ("--simulated.gpus=3", "--health.check-period-s=0.2")
    async with _agent(*flags, event_period_s=EVENT_PERIOD_S) as (node, agent, faults):
        ill, *others = (agent.uuid_of(index) for index in range(3))
        await node.start_pods(pod("first", container(cores=30, blocks=10)))
        assert node.gpus_of("first") == {ill}
        lists, before = _record_lists(node), agent.held()
        write_rehearsal(faults, xids=[{"id": 1, "gpu": 0, "xid": 79}])
        await node.wait_until(lambda: _is_away(node, ill), "the GPU's IDs Unhealthy in both resources")
        for resource, count in ((CORE, CORES), (MEMORY, BLOCKS)):
            assert lists.of(resource) == [{key_of(ill): (0, count)} | {key_of(other): (count, 0) for other in others}]
        assert agent.held() == before
        for name in ("second", "third"):
            node.api.create_pod(pod(name, container(cores=60, blocks=10)))
            await node.wait_running("first", name)
            assert node.gpus_of(name) < set(others)
        node.api.create_pod(pod("nowhere", container(cores=70, blocks=10), nodeName=node.name))
        message = await node.wait_settled("nowhere")  # 80 cores are free for the kubelet, but on two GPUs
        assert "Xid 79 (GPU has fallen off the bus)" in message and "waits for a reset" in message, message
        assert node.states_of(ill) == {False}  # however many polls found it usable meanwhile
        write_rehearsal(faults, xids=[{"id": 1, "gpu": 0, "xid": 79}], resets=[{"id": 2, "gpu": 0}])
        await node.wait_until(lambda: node.states_of(ill) == {True}, "the reset GPU back")
        node.api.create_pod(pod("fourth", container(cores=70, blocks=10)))
        await node.wait_running("first", "second", "third", "fourth")
        assert node.gpus_of("fourth") == {ill}
        await node.wait_sound(agent)
        assert agent.count("gpushare_gpu_events_total", kind="xid", xid="79", ignored="false", uuid=ill) == 1
        changes = agent.parts.observability.past.changes.newest()
        assert [one.what for one in changes.pop(ill)] == ["recovered", "unhealthy", "xid"] and not changes
        await node.wait_until(lambda: len(_event_reasons(node)) == 2, "both Events")
        assert _event_reasons(node) == ["GPUUnhealthy", "GPURecovered"]


async def test_a_storm_of_a_thousand_events_costs_one_list_a_resource_for_each_change() -> None:
    """Away once, back once: two messages of each resource, and two Events."""
    async with _agent() as (node, agent, faults):
        ill = agent.uuid_of(1)
        lists = _record_lists(node)
        storm = [{"id": number, "gpu": 1, "xid": 79} for number in range(1, 1001)]
        write_rehearsal(faults, xids=storm)

        def is_counted() -> bool:
            return agent.count("gpushare_gpu_events_total", kind="xid", xid="79", ignored="false") == 1000

        await poll_until(is_counted, "all events counted")
        await node.wait_until(lambda: _is_away(node, ill), "the GPU away")
        write_rehearsal(faults, xids=storm, resets=[{"id": 1001, "gpu": 1}])
        await node.wait_until(lambda: node.states_of(ill) == {True}, "the GPU back")
        for resource, count in ((CORE, CORES), (MEMORY, BLOCKS)):
            assert [gpus[key_of(ill)] for gpus in lists.of(resource)] == [(0, count), (count, 0)]
        await node.wait_until(lambda: len(_event_reasons(node)) == 2, "both Events")


async def test_ignored_errors_and_those_of_no_gpu_take_none_away() -> None:
    """A tenant's bad pointer is no reason to take a GPU from the others; a lesser error is over after two good polls."""
    async with _agent() as (node, agent, faults):
        lists = _record_lists(node)
        harmless = [{"id": 1, "gpu": 0, "xid": 13}, {"id": 2, "gpu": None, "xid": 79}]
        write_rehearsal(faults, xids=harmless)
        counter = "gpushare_gpu_events_total"
        await poll_until(lambda: agent.count(counter, kind="xid", xid="79", ignored="false") == 1, "both seen")
        assert agent.count("gpushare_gpu_events_total", kind="xid", xid="13", ignored="true") == 1
        assert lists == []
        write_rehearsal(faults, xids=[*harmless, {"id": 3, "gpu": 0, "xid": 94}])
        uuid = agent.uuid_of(0)
        await node.wait_until(lambda: len(lists.of(CORE)) == 2, "away and back")
        assert [gpus[key_of(uuid)] for gpus in lists.of(CORE)] == [(0, CORES), (CORES, 0)]


async def _cordon(node: NodeUnderTest, *words: str) -> tuple[int, str, str]:
    """The command as a user gives it: code, output, warnings."""
    ended = await run_program(
        *words, f"--control.socket={node.paths.agent_control_socket}", environ=clean_environment()
    )
    return ended.code, ended.out, ended.err


async def test_a_cordoned_gpu_gets_no_new_pod_until_it_is_put_back() -> None:
    """By the command line, on a running agent; who runs on the GPU goes on; the Node and the document show it."""
    async with _agent() as (node, agent, _):
        await node.start_pods(pod("first", container(cores=30, blocks=10)))
        uuid, other = agent.uuid_of(0), agent.uuid_of(1)
        code, out, err = await _cordon(node, "cordon", "0", "--reason", "new fan")
        assert (code, err) == (0, "")
        assert out.startswith(f"GPU 0 ({uuid}) is cordoned: new fan.\nPods that run on it go on; no new pod gets it")
        await node.wait_until(lambda: _is_away(node, uuid), "the cordoned GPU away")
        assert (await _cordon(node, "cordon", uuid, "--reason", "new fan"))[1].startswith(f"GPU 0 ({uuid}) is already")
        node.api.create_pod(pod("second", container(cores=30, blocks=10)))
        await node.wait_running("first", "second")
        assert node.gpus_of("second") == {other}
        code, out, _ = await _cordon(node, "cordon", "--list")
        rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
        assert rows[1:] == [["0", uuid, "Cordoned", "new fan"], ["1", other, "Healthy", "-"]]
        assert await _shown(agent) == [("new fan", "", False), (None, "", True)]
        code, out, _ = await _cordon(node, "uncordon", uuid[:12])
        assert (code, out) == (0, f"GPU 0 ({uuid}) is in service again.\n")
        await node.wait_until(lambda: node.states_of(uuid) == {True}, "the GPU back")
        await node.wait_until(lambda: len(_event_reasons(node)) == 2, "both Events")
        assert _event_reasons(node) == ["GPUCordoned", "GPUUncordoned"]


async def test_a_cordon_without_a_reason_and_a_failure_are_reported_apart() -> None:
    """GPU 0 is cordoned, GPU 1 is ill as well: in the list of the command and in the document that all else is made of."""
    async with _agent() as (node, agent, faults):
        write_rehearsal(faults, xids=[{"id": 1, "gpu": 1, "xid": 79}])
        uuid, other = agent.uuid_of(0), agent.uuid_of(1)
        await node.wait_until(lambda: _is_away(node, other), "the ill GPU away")
        for index in ("0", "1"):
            assert (await _cordon(node, "cordon", index))[0] == 0
        reason = agent.parts.node.inventory.unhealthy_reasons[other]
        _, out, _ = await _cordon(node, "cordon", "--list")
        rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
        assert rows[1:] == [["0", uuid, "Cordoned", "-"], ["1", other, "Cordoned, Unhealthy (needs-reset)", reason]]
        assert reason.startswith("Xid 79 (GPU has fallen off the bus); waits for a reset")
        assert await _shown(agent) == [("no reason given", "", False), ("no reason given", reason, False)]


async def _shown(agent: InnerAgent) -> list[tuple[Any, ...]]:
    """Of /api/v1/node: each GPU's cordon, reason and health."""
    gpus = json.loads((await agent.page("/api/v1/node"))[1])["gpus"]
    return [(gpu["cordoned"], gpu["health_reason"], gpu["is_healthy"]) for gpu in gpus]


async def test_the_commands_report_errors_in_one_line_and_end_with_the_right_code() -> None:
    """2 for a wrong command line or an unknown GPU, 1 where no agent answers."""
    async with _agent() as (node, agent, _):
        code, out, err = await _cordon(node, "cordon", "7")
        assert (code, out) == (2, "") and err.count("\n") == 1 and agent.uuid_of(1) in err
        code, _, err = await _cordon(node, "cordon", "GPU-")
        assert code == 2 and "beginning of 2 GPUs" in err
        code, _, err = await _cordon(node, "uncordon")
        assert code == 2 and "--list" in err
        code, _, err = await _cordon(node, "cordon", "0", f"--socket={node.paths.state / 'nobody.sock'}")
        assert code == 1 and "no agent listens" in err and err.count("\n") == 1
        ended = await run_program("cordon", "0", "--control.socket=", environ=clean_environment())
        assert ended.code == 1 and "control.socket is empty" in ended.err


async def test_a_cordon_and_a_wait_for_a_reset_outlive_a_killed_agent() -> None:
    """The next one never offers the two GPUs, not in its first message either; uncordon gives each back."""
    async with open_test_node() as node:
        write_rehearsal(node.paths.faults)
        flags = (*FAST, "--simulated.gpus=3")
        async with open_child(node, *flags) as child:
            await node.wait_until(node.paths.agent_control_socket.exists, "the control socket")
            assert (await _cordon(node, "cordon", "0"))[0] == 0
            write_rehearsal(node.paths.faults, xids=[{"id": 1, "gpu": 1, "xid": 79}])
            await node.wait_devices(CORE, 3 * CORES, CORES)
            await poll_until(lambda: "waits_for_reset" in node.paths.health_state.read_text(), "the wait written down")
            child.kill()
            await child.wait()
        lists = _record_lists(node)
        async with open_agent(node, *flags) as agent:
            uuids = [agent.uuid_of(index) for index in range(3)]
            assert all(
                [gpus[key_of(uuid)] for uuid in uuids] == [(0, 100), (0, 100), (100, 0)] for gpus in lists.of(CORE)
            )
            assert (await _cordon(node, "uncordon", "0"))[0] == 0
            code, out, _ = await _cordon(node, "uncordon", "1")
            assert code == 0 and "that wait is ended" in out
            await node.wait_devices(CORE, 3 * CORES, 3 * CORES)


async def test_a_reload_keeps_what_is_known_against_the_gpus_also_where_no_file_does() -> None:
    """SIGHUP with a state file that cannot be written: a cordoned, a waiting and a probed GPU stay away without a gap."""
    async with open_test_node() as node:
        write_rehearsal(node.paths.faults)
        (node.paths.state / "file").write_text("")
        settings = node.paths.state / "settings.yaml"
        settings.write_text("simulated: {gpus: 4}\n")
        flags = (f"--config={settings}", f"--state-directory={node.paths.state}/file")
        async with open_child(node, *flags, "--health.recovery-period-s=3600", *FAST[1:2]) as child:
            await node.wait_until(node.paths.agent_control_socket.exists, "the control socket")
            assert (await _cordon(node, "cordon", "0", "--reason", "fan"))[0] == 0
            write_rehearsal(node.paths.faults, xids=[{"id": 1, "gpu": 1, "xid": 79}, {"id": 2, "gpu": 2, "xid": 94}])
            one_left = {CORE: (4 * CORES, CORES), MEMORY: (4 * BLOCKS, BLOCKS)}
            await node.wait_until(lambda: node.kubelet.devices.capacity() == one_left, "one GPU left")
            lists = _record_lists(node)
            settings.write_text("simulated: {gpus: 4}\nresources: {memory_block_mib: 512}\n")
            child.send_signal(signal.SIGHUP)
            larger = {CORE: CORES, MEMORY: BLOCKS // 2}
            await node.wait_until(
                lambda: {name: healthy for name, (_, healthy) in node.kubelet.devices.capacity().items()} == larger,
                "one GPU still, in larger blocks",
            )
            assert {sum(healthy > 0 for healthy, _ in gpus.values()) for _, gpus in lists} <= {0, 1}
            await node.wait_until(node.paths.agent_control_socket.exists, "the control socket again")
            _, out, _ = await _cordon(node, "cordon", "--list")
            states = [re.split(r" {2,}", line.strip())[2] for line in out.splitlines()[1:]]
            assert states == ["Cordoned", "Unhealthy (needs-reset)", "Unhealthy (probing)", "Healthy"]


async def test_without_a_place_for_the_socket_and_the_state_file_the_agent_serves() -> None:
    """Both are warned of; pods run."""
    async with open_test_node() as node:
        (node.paths.state / "file").write_text("")
        below = node.paths.state / "file"
        lost = [f"--control.socket={below}/c.sock", f"--state-directory={below}"]
        with capture_logs() as logged:
            async with open_agent(node, *FAST, *lost):
                await node.start_pods(pod("first", container(cores=30, blocks=10)))
        assert {"control_socket_not_open", "health_state_not_read"} <= {line["event"] for line in logged}
