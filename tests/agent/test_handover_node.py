"""Two agents on one node, as during an upgrade: one takes over, nothing is refused, and either may end or die."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from gpushare_agent.agent.auto_isolation import resolve_isolation
from gpushare_agent.agent.composition import build
from gpushare_agent.agent.kubelet.handover import ServingLock
from gpushare_agent.agent.program import run_generation
from gpushare_agent.sandbox.node import running_task
from tests.agent.support_agent import InnerAgent, counted_for_costs, open_agent, open_child, poll_until, record_claim
from tests.isolation.support_library import fake_library
from tests.sandbox.support_sandbox import NodeUnderTest, container, open_test_node, pod


async def _wait_serving(node: NodeUnderTest, times: int) -> None:
    """So many times an agent has rebuilt its ledger, and the kubelet has devices."""
    await poll_until(lambda: len(node.log_lines("allocations_recovered")) == times, f"agent {times} serves")
    await node.wait_registered()


def _are_available(agent: InnerAgent) -> list[tuple[str, float]]:
    """The isolations in its metrics, and whether they can be had."""
    found = {one.name: one for one in agent.parts.node.metrics.registry.collect()}
    return [(one.labels["isolation"], one.value) for one in found["gpushare_isolation_available"].samples]


async def _end(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    child.send_signal(number)
    await child.wait()


async def test_an_incoming_agent_takes_over_during_a_burst_and_no_pod_is_refused() -> None:
    """The first agent waits for a pause, hands over, and stands by until it is ended. The ledger is whole."""
    names = [f"burst-{number}" for number in range(12)]
    async with open_test_node() as node, open_child(node) as old:
        for name in names[:6]:
            node.api.create_pod(pod(name, container(cores=10, blocks=4)))
        async with open_child(node, wait=False) as new:
            for name in names[6:]:
                node.api.create_pod(pod(name, container(cores=10, blocks=4)))
            await _wait_serving(node, times=2)
            await node.wait_running(*names)
            await poll_until(
                lambda: len(list(node.paths.device_plugin_path.glob("v*-*.sock"))) == 4, "the first stands by"
            )
            await _end(old, signal.SIGTERM)
            assert old.returncode == 0
            node.api.create_pod(pod("after", container(cores=10, blocks=4)))
            await node.wait_running(*names, "after")
            assert node.plugin_socket("vcore").is_socket()
            await _end(new, signal.SIGTERM)
        async with open_agent(node) as agent:
            await node.wait_sound(agent)
            assert len(agent.held()) == len(names) + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_one_that_stands_by_serves_again_when_the_incoming_one_ends(number: signal.Signals) -> None:
    """An upgrade that fails, or is taken back: no third agent is needed, also where the incoming one was killed."""
    async with open_test_node() as node, open_child(node):
        await node.start_pods(pod("before", container(cores=60, blocks=40)))
        async with open_child(node, wait=False) as new:
            await _wait_serving(node, times=2)
            await poll_until(lambda: len(node.log_lines("another_agent_serves")) == 2, "the first stands by")
            await _end(new, number)
            await _wait_serving(node, times=3)
            node.api.create_pod(pod("after", container(cores=60, blocks=40)))
            await node.wait_running("before", "after")
            node.assert_nothing_shared()


async def test_an_incoming_agent_serves_when_the_agent_that_served_was_killed() -> None:
    """While it asks: the kernel frees the lock."""
    async with open_test_node() as node, open_child(node) as old:
        old.send_signal(signal.SIGSTOP)
        async with open_child(node, wait=False):
            await poll_until(lambda: node.log_lines("another_agent_serves"), "the incoming one asks")
            await _end(old, signal.SIGKILL)
            await _wait_serving(node, times=2)
            await node.start_pods(pod("after", container(cores=60, blocks=40)))


async def test_an_agent_that_stands_by_is_ready_and_one_that_asks_is_not() -> None:
    """A rollout goes on only when the incoming one serves; a rollback finds the old one ready. Costs count once."""
    async with open_test_node() as node, open_agent(node) as old:
        assert not old.parts.kubelet.not_ready()
        await node.start_pods(pod("p", container(cores=60, blocks=40)))
        async with open_agent(node, wait=False) as new:
            await poll_until(lambda: old.parts.kubelet.handover.waiting > 0, "the incoming one asks")
            assert new.parts.kubelet.not_ready()
            assert not old.parts.kubelet.not_ready()
            assert (counted_for_costs(old), counted_for_costs(new)) == (True, False)


async def test_of_two_incoming_agents_one_serves_and_the_other_waits_for_it(short_dir: Path) -> None:
    """Also before it has the lock: the other would take it, and the kubelet follow the one that has none."""
    async with (
        open_test_node() as node,
        open_agent(node) as old,
        open_agent(node, wait=False) as one,
        open_agent(node, wait=False) as other,
    ):
        await poll_until(lambda: old.parts.kubelet.handover.waiting == 4, "both ask at both sockets")
        lock, old.parts.kubelet.lock = old.parts.kubelet.lock, ServingLock(short_dir)
        await old.parts.leave()
        old.task.cancel()
        both = {one.parts.kubelet, other.parts.kubelet}
        await poll_until(lambda: any(kubelet.handover.waiting for kubelet in both), "one asks the other")
        (serves,) = (kubelet for kubelet in both if kubelet.handover.waiting)
        (waits,) = both - {serves}
        lock.release()
        await poll_until(lambda: serves.has_recovered, "the other serves")
        assert not waits.lock.is_held and not any(map(waits.registrar.is_registered, waits.node.names.names))


async def test_what_an_operator_does_while_an_agent_hands_over_counts_for_the_next_one(short_dir: Path) -> None:
    """The incoming one has read what is saved before it registers: until the other has ended, that takes commands."""
    async with open_test_node() as node, open_agent(node, "--gpus=2") as old, open_agent(node, wait=False) as new:
        first, second = (gpu.uuid for gpu in old.parts.node.gpus().gpus)
        old.parts.node.inventory.cordon(first, "fan")
        await old.parts.gpus.writer.save_now()
        await poll_until(lambda: old.parts.kubelet.handover.waiting, "it asks")
        lock, old.parts.kubelet.lock = old.parts.kubelet.lock, ServingLock(short_dir)
        await old.parts.leave()
        await poll_until(lambda: new.parts.node.inventory.cordoned == {first: "fan"}, "it offers its devices")
        old.parts.node.inventory.uncordon(first)
        old.parts.node.inventory.cordon(second, "dust")
        await old.parts.gpus.writer.save_now()
        old.task.cancel()
        lock.release()
        await poll_until(lambda: new.parts.kubelet.has_recovered, "it serves")
        assert new.parts.node.inventory.cordoned == {second: "dust"}


async def test_an_agent_that_reloads_before_it_serves_registers_again_with_its_devices() -> None:
    """Its sockets are new ones: of those before, another agent's registration may have made the kubelet forget."""
    async with open_test_node() as node, open_agent(node) as old, open_agent(node, wait=False) as new:
        await poll_until(lambda: old.parts.kubelet.handover.waiting, "it asks")
        await new.parts.kubelet.pause()
        new.task.cancel()
        await asyncio.wait({new.task})
        again = build(await resolve_isolation(new.parts.node.settings), previous=new.parts)
        plugins = {one.endpoint.resource: one.endpoint.plugin for one in again.kubelet.registrar._resources}
        registered: dict[str, int] = {}
        again.kubelet.registrar.on_registered = lambda name: registered.update({name: len(plugins[name].table.devices)})
        async with running_task("agent", partial(run_generation, again)):
            await poll_until(lambda: old.parts.kubelet.handover.waiting, "it asks again")
            await old.parts.leave()
            old.task.cancel()
            await poll_until(lambda: again.kubelet.has_recovered, "it serves")
            await node.wait_registered()
            assert registered == {name: len(plugins[name].table.devices) for name in plugins} and all(
                registered.values()
            )


async def test_a_reload_of_one_that_stood_by_and_has_the_lock_by_then_registers_its_devices() -> None:
    """The one that served has ended, and this one was about to register: its lists were not made yet."""
    async with open_test_node() as node:
        async with open_agent(node) as old:
            chosen = await resolve_isolation(old.parts.node.settings)
        before = build(chosen)
        assert before.kubelet.lock.try_acquire()
        await before.kubelet.pause()
        again = build(chosen, previous=before)
        plugins = {one.endpoint.resource: one.endpoint.plugin for one in again.kubelet.registrar._resources}
        registered: dict[str, int] = {}
        again.kubelet.registrar.on_registered = lambda name: registered.update({name: len(plugins[name].table.devices)})
        async with running_task("agent", partial(run_generation, again, is_incoming=False)):
            await poll_until(lambda: again.kubelet.has_recovered, "it serves")
            await node.wait_registered()
            assert set(registered) == set(plugins) and all(registered.values())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--libgpushare.directory=/proc/nope/gpushare"], "libgpushare.directory"),
        (["--isolation=vcuda", "--virtual-manager.path=/proc/nope/vm"], "virtual_manager.path"),
        (["--libgpushare.library=/proc/self/status"], "/proc/self/status"),
        (["--isolation=none", "--isolations-allowed=gpushare", "--libgpushare.library=/proc/self/status"], "status"),
        (["--isolation=mps", "--mps.pipe-directory=/nope/pipe"], "/nope/pipe"),
        (["--kubelet.pod-resources-socket=/nope/kubelet.sock"], "/nope/kubelet.sock"),
        (["--device-list-strategy=cdi-cri", "--cdi.spec-directories=/proc/nope/cdi"], "/proc/nope/cdi"),
    ],
)
async def test_an_incoming_agent_that_could_give_no_share_leaves_the_kubelet_to_the_agent_that_serves(
    flags: list[str], named: str
) -> None:
    """It is not Ready and says why, so the rollout stops; shares are given as before."""
    async with open_test_node() as node, open_agent(node) as old, open_agent(node, *flags, wait=False) as new:
        await poll_until(
            lambda: any(named in one for one in new.parts.readiness.not_ready()), "the incoming one has looked"
        )
        await node.start_pods(pod("after", container(cores=60, blocks=40)))
        assert old.held() and not new.held()
        assert not old.parts.kubelet.handover.waiting
        assert not old.parts.readiness.not_ready()
        assert _are_available(new) == [], "nothing was checked there, so nothing is missing"
        assert len(list(node.paths.device_plugin_path.glob("v*-*.sock"))) == 2


async def test_an_incoming_agent_takes_over_once_shares_can_be_given(short_dir: Path) -> None:
    """The cause was on the node and is removed: no other rollout is needed."""
    in_the_way = short_dir / "file"
    in_the_way.touch()
    flag = f"--libgpushare.directory={in_the_way / 'gpushare'}"
    async with open_test_node() as node, open_agent(node) as old, open_agent(node, flag, wait=False) as new:
        new.parts.readiness.period_s = 0.05
        await poll_until(lambda: str(in_the_way) in str(new.parts.readiness.not_ready()), "the incoming one has looked")
        in_the_way.unlink()
        await poll_until(lambda: old.parts.kubelet.handover.waiting, "the incoming one asks")
        assert not new.parts.readiness.not_ready()


async def test_an_incoming_agent_with_another_directory_waits_until_the_shares_of_the_first_have_ended(
    short_dir: Path,
) -> None:
    """Their files stay with the agent that keeps them, which serves on."""
    flags = [f"--virtual-manager.path={short_dir}/vm", f"--libgpushare.directory={short_dir}/own"]
    async with open_test_node() as node, open_agent(node) as old:
        await node.start_pods(pod("before", container(cores=40, blocks=8)))
        files = sorted(node.paths.virtual_manager.rglob("*"))
        assert files
        async with open_agent(node, *flags, wait=False) as new:
            new.parts.readiness.period_s = 0.05
            await poll_until(lambda: "earlier directory" in str(new.parts.readiness.not_ready()), "it has looked")
            node.api.create_pod(pod("meanwhile", container(cores=40, blocks=8)))
            await node.wait_running("before", "meanwhile")
            assert old.held() and not new.held() and not old.parts.readiness.not_ready()
            assert set(files) <= set(node.paths.virtual_manager.rglob("*"))
            for name in ("before", "meanwhile"):
                node.api.delete_pod("default", name)
            await poll_until(lambda: old.parts.kubelet.handover.waiting, "the incoming one asks")
            assert not new.parts.readiness.not_ready()


async def test_an_agent_alone_serves_and_warns_of_shares_in_an_earlier_directory(short_dir: Path) -> None:
    """Nobody else could: they keep their files, which it does not touch."""
    async with open_test_node() as node:
        async with open_agent(node):
            await node.start_pods(pod("before", container(cores=40, blocks=8)))
        files = {path: path.stat().st_ino for path in node.paths.virtual_manager.rglob("*") if path.is_file()}
        async with open_agent(node, f"--virtual-manager.path={short_dir}/vm", wait=False) as agent:
            agent.parts.readiness.period_s = 0.05
            await poll_until(lambda: "earlier directory" in str(agent.parts.readiness.not_ready()), "it has looked")
            await node.wait_registered()
            node.api.create_pod(pod("after", container(cores=40, blocks=8)))
            await node.wait_running("before", "after")
            await agent.parts.isolation.vdevices.remove_stale()
            assert files and {path: path.stat().st_ino for path in files} == files
            node.api.delete_pod("default", "before")
            await poll_until(lambda: not agent.parts.readiness.not_ready(), "it is Ready")


async def test_an_incoming_agent_that_could_give_no_share_serves_when_the_other_agent_has_ended() -> None:
    """What can be had is given, a share is refused with the setting as it is written, and the agent stays not Ready."""
    flags = ("--libgpushare.directory=/proc/nope/gpushare", "--isolations-allowed=none")
    async with open_test_node() as node, open_child(node) as old, open_agent(node, *flags, wait=False) as new:
        await poll_until(lambda: "nope" in str(new.parts.readiness.not_ready()), "the incoming one has looked")
        await _end(old, signal.SIGTERM)
        await poll_until(lambda: new.parts.kubelet.has_recovered, "the incoming one serves")
        await node.wait_registered()
        unlimited = {"tencent.com/gpu-isolation": "none"}
        await node.start_pods(pod("unlimited", container(cores=40, blocks=8), annotations=unlimited))
        node.api.create_pod(pod("limited", container(cores=40, blocks=8)))
        assert "(setting libgpushare.directory)" in await node.wait_settled("limited")
        assert "(setting libgpushare.directory)" in str(new.parts.readiness.not_ready())


async def test_an_agent_is_not_ready_before_shares_can_be_given_and_ready_from_then_on(short_dir: Path) -> None:
    """What breaks later is not for readiness: an agent that is not Ready is ended at once by a rollout."""
    library = short_dir / "libgpushare.so"
    library.write_bytes(b"no library")
    flags = (f"--libgpushare.library={library}", f"--libgpushare.directory={short_dir / 'own'}")
    async with open_test_node() as node, open_agent(node, *flags, wait=False) as agent:
        readiness = agent.parts.readiness
        readiness.period_s = 0.05
        await poll_until(lambda: not agent.parts.kubelet.not_ready(), "it is registered")
        await poll_until(lambda: str(library) in str(readiness.not_ready()), "it has looked")
        status, text = await agent.page("/readyz")
        assert status == 503 and str(library) in text
        fake_library(library)
        await poll_until(lambda: not readiness.not_ready(), "it is Ready")
        watch = agent.parts.isolation.watches["gpushare"]
        await watch.poll()
        assert _are_available(agent) == [("gpushare", 1)]
        library.write_bytes(b"no library")
        await watch.poll()
        assert watch.unavailable_reason and _are_available(agent) == [("gpushare", 0)]
        assert not readiness.not_ready() and await readiness.look()


def _elsewhere(node: NodeUnderTest, directory: Path) -> list[str]:
    """A registry in which no kubelet looks for drivers; the sockets are the kubelet's own."""
    (directory / "plugins_registry").mkdir()
    return [
        f"--kubelet.root-dir={directory}", f"--kubelet.device-plugin-path={node.paths.device_plugin_path}",
        f"--kubelet.pod-resources-socket={node.paths.pod_resources_socket}",
    ]  # fmt: skip


async def test_an_agent_is_not_ready_before_its_claims_can_be_served_and_ready_from_then_on(short_dir: Path) -> None:
    """A rollout stops where the kubelet does not find its driver; a kubelet or API server that goes later ends no agent."""
    async with open_test_node() as node:
        async with open_agent(node, "--dra.gpus=1", *_elsewhere(node, short_dir)) as agent:
            await poll_until(lambda: not any("slice" in one for one in agent.parts.readiness.not_ready()), "the slice")
            status, text = await agent.page("/readyz")
            assert status == 503 and "kubelet.root_dir" in text
        async with open_agent(node, "--dra.gpus=1") as agent:
            await poll_until(lambda: not agent.parts.readiness.not_ready(), "it is Ready")
            await node.api.stop_listening()
            assert agent.parts.dra is not None
            agent.parts.dra.registration.registration.registered.clear()
            assert agent.parts.dra.not_served() and await agent.page("/readyz") == (200, "ok\n")


async def test_claims_that_an_earlier_agent_has_left_keep_no_agent_from_being_ready(short_dir: Path) -> None:
    """Rights and mounts of the component dra are gone with it."""
    async with open_test_node() as node:
        record_claim(node)
        async with open_agent(node, *_elsewhere(node, short_dir)) as agent:
            await poll_until(lambda: not agent.parts.readiness.not_ready(), "it is Ready")
            assert agent.parts.dra is not None and agent.parts.dra.not_served()


async def test_a_claim_with_files_in_an_earlier_directory_keeps_an_incoming_agent_from_being_ready(
    short_dir: Path,
) -> None:
    """As a share of a device plugin does."""
    async with open_test_node() as node:
        record_claim(node, "gpushare")
        async with open_agent(node, *_elsewhere(node, short_dir), wait=False) as agent:
            await poll_until(lambda: "earlier directory" in str(agent.parts.readiness.not_ready()), "it has looked")
            assert "claim " in str(agent.parts.readiness.not_ready())


async def test_the_first_refused_claim_is_an_increase() -> None:
    """For its series is there before, where there are claims."""
    labels = {"resource": "resourceclaims.resource.k8s.io", "outcome": "refused", "reason": "NotReady"}
    async with open_test_node() as node:
        for flags, value in (((), None), (("--dra.gpus=1",), 0)):
            async with open_agent(node, *flags) as agent:
                assert agent.parts.node.metrics.registry.get_sample_value("gpushare_admissions_total", labels) == value
