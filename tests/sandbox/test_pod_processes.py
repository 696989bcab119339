"""Pods of the embedded node as the processes that they are: what runs, with which environment, how it ends and restarts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.formats.vdevice import decode_pids
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, Mount
from tests.agent.support_agent import open_agent
from tests.sandbox.support_containers import KINDS, host_container, is_alive, needs_processes
from tests.sandbox.support_sandbox import CORE, FOO, NodeUnderTest, SmallPlugin, container, open_test_node, pod
from tests.support_deadline import poll_until


async def test_a_host_container_runs_its_command_with_the_manifests_and_the_plugins_environment() -> None:
    """Nothing of the sandbox's own; GPUSHARE_VDEVICE names the socket that would be mounted at /etc/vcuda."""
    answer = ContainerAllocateResponse(
        envs={"FROM": "plugin", "CARD": "0"}, mounts=[Mount(container_path="/etc/vcuda", host_path="/vm/u/main")]
    )
    plugin = SmallPlugin(FOO, {"foo-0": ("Healthy", None)}, answer=answer)
    async with open_test_node() as node, node.open_plugin(plugin):
        env = [{"name": "FROM", "value": "manifest"}, {"name": "OWN", "value": "a b\nc"}, {"name": "EMPTY"}]
        inner = host_container("main", "sh", args=["-c", "env; pwd; readlink /proc/self/fd/0"], env=env)
        node.api.create_pod(pod("p", {**inner, "resources": {"limits": {FOO: "1"}}}, restartPolicy="Never"))
        await node.wait_phase("p", "Succeeded")
        lines = node.printed("p").splitlines()
        assert lines[-2:] == ["/", "/dev/null"]
        names = {line.partition("=")[0] for line in lines[:-2]} - {"PWD", "SHLVL", "_", "OLDPWD"}  # the shell's own
        assert names == {"PATH", "HOME", "LANG", "FROM", "CARD", "OWN", "c", "EMPTY", "GPUSHARE_VDEVICE"}
        assert {"FROM=plugin", "CARD=0", "OWN=a b", "EMPTY=", "GPUSHARE_VDEVICE=/vm/u/main/vcuda.sock"} <= set(lines)
        assert node.container_of("p").env["GPUSHARE_VDEVICE"] == "/vm/u/main/vcuda.sock"


async def test_a_host_container_without_a_command_waits_with_the_reason() -> None:
    """As a runtime refuses an image without an entry point."""
    async with open_test_node() as node:
        node.api.create_pod(pod("p", {"name": "main", "image": "sandbox/host"}))

        await node.kubelet.wait_for(lambda: node.waiting("p").get("reason") == "CreateContainerError")
        message = node.waiting("p")["message"]
        assert "no command specified" in message
        # kubectl describe pod shows Events, and no message of a state that waits.
        assert node.messages("Failed") == [f"Error: {message}"]
        assert node.api.pod("default", "p")["status"]["phase"] == "Pending"


async def test_exit_codes_reach_the_pods_status() -> None:
    """Of a main container, and of an init container, after which no main one starts."""
    async with open_test_node() as node:
        node.api.create_pod(pod("p", host_container("main", "sh", "-c", "exit 3"), restartPolicy="Never"))
        await node.wait_phase("p", "Failed")
        status = node.container_status("p")
        assert status["state"]["terminated"]["exitCode"] == 3
        assert status["containerID"] == f"containerd://{node.container_of('p').id}"
        init = host_container("setup", "sh", "-c", "exit 4")
        node.api.create_pod(pod("q", container("main"), init=(init,), restartPolicy="Never"))
        raw = (await node.wait_phase("q", "Failed"))["status"]
        assert raw["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
        assert node.container_of("q") is None


async def test_main_containers_wait_for_the_init_containers_end(short_dir: Path) -> None:
    """And an init container that fails is run again until it ends well."""
    async with open_test_node() as node:
        script = f"test -e {short_dir}/once || {{ : > {short_dir}/once; exit 1; }}; cat {short_dir}/gate"
        gate = short_dir / "gate"
        init = host_container("setup", "sh", "-c", f"mkfifo {gate} 2>/dev/null; {script}")
        node.api.create_pod(pod("p", container("main"), init=(init,)))
        await node.kubelet.wait_for(lambda: (found := node.container_of("p", "setup")) and found.attempt == 1)
        assert node.container_of("p") is None
        assert node.api.pod("default", "p")["status"]["phase"] == "Pending"
        await poll_until(lambda: _open_gate(gate), "the init container at the gate")
        await node.wait_phase("p", "Running")
        assert node.api.pod("default", "p")["status"]["initContainerStatuses"][0]["restartCount"] == 1


def _open_gate(gate: Path) -> bool:
    """Whether somebody reads there, who then reads the end."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


async def test_a_container_that_ends_again_and_again_is_started_later_and_later() -> None:
    """At once after its first end; then it is in CrashLoopBackOff, with its last end."""
    async with open_test_node() as node:
        node.api.create_pod(pod("p", host_container("main", "sh", "-c", "echo run; exit 5")))

        await node.kubelet.wait_for(lambda: node.waiting("p").get("reason") == "CrashLoopBackOff")
        status = node.container_status("p")
        assert status["lastState"]["terminated"]["exitCode"] == 5
        assert status["state"]["waiting"]["message"] == "back-off 0.1s restarting failed container=main"
        await node.kubelet.wait_for(lambda: node.container_of("p").attempt >= 3)
        assert node.printed("p").count("run\n") >= 3
        await node.remove_pod("p")


@pytest.mark.parametrize("kind", KINDS)
async def test_processes_live_on_while_the_kubelet_restarts_and_end_with_the_node(kind: str) -> None:
    """The same process before and after."""
    async with open_test_node(cgroups=kind) as node:
        await node.start_pods(pod("p", container("main"), container("other")))
        before = node.container_of("p")
        await node.kubelet.restart()
        await node.kubelet.wait_for(node.kubelet.listed_pods)
        assert node.container_of("p") is before and is_alive(before.pid)
        pids = [c.pid for c in node.kubelet.runtime.containers()]
        assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


@needs_processes
async def test_a_deleted_pods_processes_have_gone_before_its_object_does() -> None:
    """Also those that ignore TERM."""
    async with open_test_node() as node:
        script = "trap '' TERM; (trap '' TERM; sleep 600) & echo ready; while :; do sleep 600; done"
        await node.start_pods(pod("p", host_container("main", "sh", "-c", script)))
        found = node.container_of("p")
        await poll_until(
            lambda: node.printed("p") == "ready\n" and len(node.kubelet.runtime.pids(found)) > 2, "children"
        )
        pids = node.kubelet.runtime.pids(found)
        await node.remove_pod("p", grace_period_s=1)
        assert found.exit_code == 137
        assert not any(is_alive(pid) for pid in pids)
        await node.kubelet.wait_for(lambda: not node.kubelet.runtime.containers(), what="the pod forgotten")


def reported(node: NodeUnderTest, container: Any) -> list[int]:
    """The processes that the agent has written for a container."""
    return list(decode_pids((node.paths.virtual_manager / container.pod_uid / "main" / "pids.config").read_bytes()))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_agent_writes_the_real_pids_of_a_share(kind: str) -> None:
    """All processes of its container and no others, also those that it forks later."""
    async with open_test_node(cgroups=kind) as node, open_agent(node, "--isolation=vcuda"):
        shared = {"limits": {CORE: "30", "tencent.com/vcuda-memory": "10"}}
        go = node.paths.state / "go"
        script = f"mkfifo {go}; sleep 600 & cat {go}; sleep 600 & wait"
        await node.start_pods(
            pod("share", {**host_container("main", "sh", "-c", script), "resources": shared}),
            pod("other", container(cores=20, blocks=10)),
        )
        for name, count in (("share", 3), ("other", 1)):
            found = node.container_of(name)

            def is_right(found: Any = found, count: int = count) -> bool:
                pids = reported(node, found)
                return len(pids) == count and pids == node.kubelet.runtime.pids(found)

            await poll_until(is_right, f"the {count} PIDs of {name}")
            assert found.env["GPUSHARE_VDEVICE"] == str(
                node.paths.virtual_manager / found.pod_uid / "main" / "vcuda.sock"
            )
        await poll_until(lambda: _open_gate(go), "the container at the gate")
        share = node.container_of("share")
        await poll_until(
            lambda: [_name(pid) for pid in reported(node, share)].count("sleep") == 2, "the PID of the second child"
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_container_registers_at_its_own_socket(kind: str) -> None:
    """The agent knows the process by its cgroup; what it reads back are its own limits and PIDs."""
    async with open_test_node(cgroups=kind) as node, open_agent(node, "--isolation=vcuda"):
        shared = {"limits": {CORE: "30", "tencent.com/vcuda-memory": "10"}}
        command = [sys.executable, "-P", "-m", "gpushare_agent", "vdevice", "-o", "json"]
        env = [{"name": "PYTHONPATH", "value": str(Path(__file__).parents[2])}]
        raw = {**host_container("main", *command, env=env), "resources": shared}
        node.api.create_pod(pod("share", raw, restartPolicy="Never"))
        await node.wait_phase("share", "Succeeded", "Failed")
        found = node.container_of("share")
        assert found.exit_code == 0, node.printed("share")
        said = json.loads(node.printed("share"))
        assert found.pid in said["pids"], said


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
