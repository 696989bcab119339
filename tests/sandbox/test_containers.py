"""Containers of the embedded node are real processes: where they are, how they end, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.runtime.cgroup_paths import NOBODY, PeerIdentity
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import NotFound, StartupError, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.sandbox.runtime.cgroup_tree import KIND_VARIABLE, open_cgroup_tree
from gpushare_agent.sandbox.runtime.containers import MAX_LOG_BYTES, ContainerRuntime
from tests.runtime.support_cgroups import find_cgroup
from tests.sandbox.support_containers import KINDS, UID, config, is_alive, open_containers, shell, wait_ended
from tests.support_deadline import DEADLINE_S, poll_until

LEAVES_A_CHILD = "(trap '' TERM; sleep 600 & echo $! > {file}.new; mv {file}.new {file}; wait) & wait"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_containers_processes_are_found_by_the_agents_own_adapters(kind: str) -> None:
    """Its cgroup holds them, those that it forks too; container and pod are told from each PID."""
    async with open_containers(kind) as runtime:
        container = runtime.start(shell("sleep 600 & sleep 600 & wait"))
        assert is_alive(container.pid)
        cgroups = Cgroups(runtime.cgroup_root, Path("/proc"))
        found = find_cgroup(cgroups, container.id, PodUid(UID))
        assert found is not None and found.path == container.cgroup
        await poll_until(lambda: len(cgroups.processes(found).pids) == 3, "three processes")
        pids = cgroups.processes(found).pids
        assert runtime.pids(container) == pids and container.pid in pids
        assert {cgroups.identify(pid) for pid in pids} == {PeerIdentity(pod_uid=PodUid(UID), container_id=container.id)}
        assert cgroups.identify(os.getpid()) == NOBODY
        processes = Cgroups(runtime.cgroup_root)
        assert await processes.has_processes_in_thread(PodUid(UID))
        runtime.stop(container, 30)
        assert await wait_ended(runtime, container) == 143
        assert await processes.has_processes_in_thread(PodUid(UID)) is False
        assert find_cgroup(cgroups, container.id) is None


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exec /no/such/program", 127)],
)
async def test_the_exit_code_is_the_processs_own(script: str, code: int) -> None:
    """Of a signal it is 128 and the signal's number."""
    async with open_containers() as runtime:
        container = runtime.start(shell(script))
        assert await wait_ended(runtime, container) == code
        assert container.finished_at and container.ended_at >= container.created_at
        assert runtime.pids(container) == [] and not container.cgroup.exists()
        for run_s in (0.0, 0.02):  # a stand-in ends well after its time
            assert await wait_ended(runtime, runtime.start(config(run_s=run_s))) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_who_ignores_term_is_killed_after_the_grace_period(kind: str, short_dir: Path) -> None:
    """Whether it catches TERM itself or is not sent it, as the annotation has it."""
    async with open_containers(kind) as runtime:
        deaf = runtime.start(shell(f"trap '' TERM; : > {short_dir}/ready; while :; do sleep 600; done"))
        await poll_until((short_dir / "ready").exists, "the trap set")
        runtime.stop(deaf, 0.05)
        assert await wait_ended(runtime, deaf) == 137
        spared = runtime.start(config(ignore_term_s=60.0))
        runtime.stop(spared, 0.05)
        assert await wait_ended(runtime, spared) == 137
        late = runtime.start(config(ignore_term_s=0.05))
        runtime.stop(late, 30)
        assert await wait_ended(runtime, late) == 143


@pytest.mark.parametrize("kind", KINDS)
async def test_a_child_that_outlives_the_first_process_is_killed(kind: str, short_dir: Path) -> None:
    """As a runtime does without a PID namespace; only then has the container ended."""
    async with open_containers(kind) as runtime:
        file = short_dir / "pid"
        container = runtime.start(shell(LEAVES_A_CHILD.format(file=file)))
        await poll_until(file.exists, "the child")
        child = int(file.read_text())
        assert child in runtime.pids(container)
        runtime.stop(container, 30)
        assert await wait_ended(runtime, container) == 143
        assert not is_alive(child)
        assert not container.cgroup.exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_gets_out_of_a_cgroup_by_leaving_session_and_parent(kind: str, short_dir: Path) -> None:
    """A daemon is ended with its container too, and a cgroup that the container made below its own is removed."""
    async with open_containers(kind) as runtime:
        file = short_dir / "pid"
        daemon = shell(
            "setsid -f sh -c 'echo $$ > $FILE.new; mv $FILE.new $FILE; exec sleep 600'; wait; exec sleep 600"
        )
        container = runtime.start(replace(daemon, env={**daemon.env, "FILE": str(file)}))
        await poll_until(file.exists, "the daemon")
        pid = int(file.read_text())
        inner = container.cgroup / "inner" / "most"
        inner.mkdir(parents=True)
        (inner / "cgroup.procs").write_text(str(pid))
        # setsid has forked, and mv has renamed the file, before they end.
        await poll_until(lambda: runtime.pids(container) == sorted([container.pid, pid]), "the two that stay")
        runtime.kill(container)
        assert await wait_ended(runtime, container) == 137
        assert not is_alive(pid) and not container.cgroup.exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_process_from_outside_joins_a_container_with_its_children(kind: str) -> None:
    """It ends with the container, as one that was executed in it. One that does not exist, or is the node's own, cannot: the
    sandbox would be killed with the container."""
    async with open_containers(kind) as runtime:
        container = runtime.start(config())
        with pytest.raises(NotFound, match="there is no such process here"):
            runtime.join(container, 2**22 + 1)
        for pid in (os.getpid(), 1, 0):
            with pytest.raises(Unavailable, match="cannot be put into container main of pod default/train"):
                runtime.join(container, pid)
        with subprocess.Popen(["sh", "-c", "read -r _; sleep 600 & exec sleep 600"], stdin=subprocess.PIPE) as outsider:
            runtime.join(container, outsider.pid)
            cgroups = Cgroups(runtime.cgroup_root, Path("/proc"))
            assert cgroups.identify(outsider.pid) == PeerIdentity(pod_uid=PodUid(UID), container_id=container.id)
            assert outsider.stdin is not None
            outsider.stdin.write(b"\n")
            outsider.stdin.flush()
            await poll_until(lambda: len(runtime.pids(container)) == 3, "the outsider's child")
            runtime.stop(container, 30)
            await wait_ended(runtime, container)
            assert outsider.wait(DEADLINE_S) == -signal.SIGKILL
        with pytest.raises(NotFound, match="does not run: it ended with exit code 143"):
            runtime.join(container, outsider.pid)


async def test_another_run_is_another_container() -> None:
    """A new ID, the next attempt, and the log goes on until it is too long."""
    async with open_containers() as runtime:
        first = runtime.start(shell("echo one"))
        await wait_ended(runtime, first)
        second = runtime.start(shell("echo two"))
        await wait_ended(runtime, second)
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.id != second.id and runtime.containers() == [second]
        log = runtime.log_of(second)
        assert log.read_text() == "one\ntwo\n"
        with log.open("ab") as file:
            file.truncate(MAX_LOG_BYTES + 1)
        await wait_ended(runtime, runtime.start(shell("echo three")))
        assert log.read_text() == "three\n"


async def test_a_program_that_prints_for_ever_ends_before_the_disk_is_full() -> None:
    """By SIGXFSZ, where its log is bounded."""
    async with open_containers() as runtime:
        endless = runtime.start(config("seq", "1", "100000000", has_bounded_log=True))
        assert await wait_ended(runtime, endless) == 128 + signal.SIGXFSZ
        assert runtime.log_of(endless).stat().st_size == 2 * MAX_LOG_BYTES


async def test_what_cannot_start_leaves_nothing_behind() -> None:
    """The error has the reason; no cgroup stays, and the next start works."""
    async with open_containers() as runtime:
        with pytest.raises(Unavailable, match="container main of pod default/train cannot start: "):
            runtime.start(config("x" * 200_000))  # longer than the kernel takes
        assert runtime.containers() == [] and not list(runtime.cgroup_root.rglob("pod*"))
        assert await wait_ended(runtime, runtime.start(shell("exit 3"))) == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_the_node_ends_every_process(kind: str, short_dir: Path) -> None:
    """Also those that a container left behind, and the directories."""
    runtime = ContainerRuntime(short_dir, ChangeSignal(), kind)
    file = short_dir / "pid"
    containers = [runtime.start(config(name=f"c{n}")) for n in range(5)]
    containers.append(runtime.start(shell(LEAVES_A_CHILD.format(file=file))))
    await poll_until(file.exists, "the child")
    runtime.close()
    assert not any(is_alive(pid) for pid in (*(c.pid for c in containers), int(file.read_text())))
    assert {c.exit_code for c in containers} == {137}
    assert not runtime.cgroup_root.exists()
    with pytest.raises(Unavailable, match="the node has ended"):
        runtime.start(config())
    runtime.close()


_SANDBOX = """
import asyncio, sys
from pathlib import Path
from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.sandbox.runtime.containers import ContainerConfig, ContainerRuntime
async def main():
    runtime = ContainerRuntime(Path(sys.argv[1]), ChangeSignal(), sys.argv[2])
    config = ContainerConfig(pod_uid="u", pod_namespace="n", pod_name="p", name="c")
    print("started", runtime.start(config).pid, runtime.cgroup_root, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("path", [os.environ["PATH"], "/nowhere"], ids=["setpriv", "no setpriv"])
@pytest.mark.parametrize("kind", KINDS)
async def test_containers_die_with_a_sandbox_that_is_killed(kind: str, path: str, short_dir: Path) -> None:
    """The kernel sees to the processes, the next sandbox to the cgroups."""
    command = [sys.executable, "-c", _SANDBOX, str(short_dir), kind]
    env = {**os.environ, "PATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as sandbox:
        assert sandbox.stdout is not None
        started = next(line for line in sandbox.stdout if line.startswith("started "))  # behind what is logged
        _, pid, root = started.split()
        assert is_alive(int(pid))
        sandbox.kill()
    await poll_until(lambda: not is_alive(int(pid)), "the end of the container")
    async with open_containers(kind):
        assert not Path(root).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_without_rights_gets_no_cgroups() -> None:
    """Nothing is left of the attempts."""
    os.seteuid(65_534)
    try:
        with tempfile.TemporaryDirectory() as folder:
            assert open_cgroup_tree(Path(folder)).why_no_exec
        with pytest.raises(StartupError, match=f"unset {KIND_VARIABLE}"):
            open_cgroup_tree(Path(folder), "v2")
    finally:
        os.seteuid(0)


def test_an_unknown_kind_is_refused(short_dir: Path) -> None:
    """The message names what there is."""
    with pytest.raises(StartupError, match="is 'v3': it can be v2, v1, none, or not set"):
        open_cgroup_tree(short_dir, "v3")


# --- without cgroups ---


async def test_without_cgroups_the_agents_adapters_find_the_first_process_in_files() -> None:
    """Alive, its pod and container told from its PID, and gone from there with its end."""
    async with open_containers("none") as runtime:
        container = runtime.start(shell("sleep 600; exit 0"))
        assert is_alive(container.pid) and runtime.pids(container) == [container.pid]
        cgroups = Cgroups(runtime.cgroup_root, runtime.proc_root)
        assert cgroups.identify(container.pid) == PeerIdentity(pod_uid=PodUid(UID), container_id=container.id)
        assert cgroups.identify(os.getpid()) == NOBODY
        found = find_cgroup(cgroups, container.id, PodUid(UID))
        assert found is not None and cgroups.processes(found).pids == [container.pid]
        with pytest.raises(Unavailable, match="this user can create no cgroups"):
            runtime.join(container, os.getppid())
        runtime.stop(container, 30)
        assert await wait_ended(runtime, container) == 143
        assert cgroups.identify(container.pid) == NOBODY and find_cgroup(cgroups, container.id) is None


async def test_without_cgroups_a_command_ends_with_its_code_and_its_children(short_dir: Path) -> None:
    """Those of its process group, also where the node ends."""
    async with open_containers("none") as runtime:
        assert await wait_ended(runtime, runtime.start(shell("exit 7"))) == 7
        assert await wait_ended(runtime, runtime.start(config(run_s=0.02))) == 0
        files = [short_dir / name for name in ("a", "b")]
        first, second = (runtime.start(shell(LEAVES_A_CHILD.format(file=file), name=file.name)) for file in files)
        await poll_until(lambda: all(file.exists() for file in files), "the children")
        children = [int(file.read_text()) for file in files]
        runtime.stop(first, 30)
        assert await wait_ended(runtime, first) == 143
        await poll_until(lambda: not is_alive(children[0]), "the end of the child")
        runtime.kill(second)
        assert await wait_ended(runtime, second) == 137
        await poll_until(lambda: not is_alive(children[1]), "the end of the other child")
    runtime.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pods_cgroup_is_there_before_its_first_container_and_goes_with_the_pod(kind: str) -> None:
    """As a kubelet makes it before it calls PreStartContainer, so that limits can be set on it."""
    async with open_containers(kind) as runtime:
        pod = runtime.cgroup_root / "kubepods" / "burstable" / f"pod{UID}"
        runtime.make_pod_cgroup(UID)
        runtime.make_pod_cgroup(UID)  # before each container
        assert pod.is_dir()
        container = runtime.start(config("sleep", "600"))
        assert container.cgroup.parent == pod
        runtime.kill(container)
        await wait_ended(runtime, container)
        runtime.make_pod_cgroup(UID)
        runtime.forget(UID)
        assert not pod.exists()
