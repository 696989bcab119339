"""What a killed sandbox leaves where cgroups are plain files: the next one ends it, and never somebody else's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpushare_agent.sandbox.process_records import end_recorded, read_process, write_book
from gpushare_agent.sandbox.state_directory import owned_state_directory
from tests.support_containers import DEADLINE_S, is_alive, wait_true

_SANDBOX = """
import asyncio, sys
from pathlib import Path
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.container_runtime import ContainerConfig, ContainerRuntime
from gpushare_agent.sandbox.state_directory import owned_state_directory
async def main():
    with owned_state_directory(Path(sys.argv[1])) as paths:
        runtime = ContainerRuntime(paths.state, ChangeSignal(), "files")
        command = ("sh", "-c", sys.argv[2])
        env = {"PATH": "/usr/bin:/bin"}
        config = ContainerConfig(pod_uid="u", pod_namespace="n", pod_name="p", name="c", command=command, env=env)
        container = runtime.start(config)
        while not Path(sys.argv[3]).exists():
            await asyncio.sleep(0.01)
        print(*runtime.pids(container), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
_DAEMON = """setsid sh -c '
echo $$ > {at}/pid.new; mv {at}/pid.new {at}/pid
while [ ! -e {at}/orphaned ]; do sleep 0.01; done
sleep 600 & echo $! > {at}/child.new; mv {at}/child.new {at}/child; wait' & sleep 600"""


async def test_what_left_its_container_is_ended_by_the_next_sandbox_of_the_directory(short_dir: Path) -> None:
    """A daemon in a session of its own outlives the SIGKILL of its sandbox; what it starts after that ends with it."""
    state = short_dir / "s"
    command = [sys.executable, "-c", _SANDBOX, str(state), _DAEMON.format(at=short_dir), str(short_dir / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sandbox:
        assert sandbox.stdout is not None
        listed = [int(pid) for pid in sandbox.stdout.readline().split()]
        sandbox.kill()
    daemon = int((short_dir / "pid").read_text())
    assert daemon in listed
    (short_dir / "orphaned").touch()
    await wait_true((short_dir / "child").exists, "the daemon's child")
    child = int((short_dir / "child").read_text())
    assert is_alive(daemon) and is_alive(child)
    with owned_state_directory(state):
        left = [pid for pid in (daemon, child, *listed) if is_alive(pid)]
    for pid in left:  # only where this test fails
        os.kill(pid, signal.SIGKILL)
    assert left == []


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """The leader of a session of its own."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def start_of(pid: int) -> int:
    process = read_process(pid)
    assert process is not None
    return process.started


def dead_book(
    path: Path, members: dict[int, int], sessions: tuple[int, ...] = (), changed: dict[str, object] | None = None
) -> Path:
    """As a sandbox has left it that is no more."""
    write_book(path, members, sessions)
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner": [os.getpid(), 1], **(changed or {})}))
    return path


def test_a_recorded_process_is_killed_with_its_session(short_dir: Path) -> None:
    """PID and start time agree: it is the same process, and the session that it leads is a container's."""
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        second = int(leader.stdout.readline())
        book = dead_book(short_dir / "book", {second: start_of(second)}, (leader.pid,))
        assert end_recorded(book) == 2
        assert leader.wait(DEADLINE_S) == -signal.SIGKILL
        assert not is_alive(second)


@pytest.mark.parametrize(
    "changed", [{"machine": "another boot"}, {"owner": None}, {"members": 5}, {"members": [["x"]]}, {"sessions": None}]
)
def test_a_book_that_does_not_hold_here_and_now_ends_nobody(short_dir: Path, changed: dict[str, object]) -> None:
    """Of another boot or PID namespace, or damaged."""
    with sleeper() as process:
        book = dead_book(short_dir / "book", {process.pid: start_of(process.pid)}, (process.pid,), changed)
        assert end_recorded(book) == 0
        assert process.poll() is None


def test_a_pid_that_was_given_to_another_process_is_left_alone(short_dir: Path) -> None:
    """Another start time is another process; the number of a session alone proves nothing either."""
    with sleeper() as process:
        book = dead_book(short_dir / "book", {process.pid: start_of(process.pid) - 1}, (process.pid,))
        assert end_recorded(book) == 0
        assert process.poll() is None


def test_the_processes_of_a_sandbox_that_lives_are_left_alone(short_dir: Path) -> None:
    """Its book is no inheritance; neither is one behind a link, nor none at all."""
    with sleeper() as process:
        members = {process.pid: start_of(process.pid)}
        write_book(short_dir / "living", members, (process.pid,))
        assert end_recorded(short_dir / "living") == 0
        (short_dir / "link").symlink_to(dead_book(short_dir / "book", members))
        assert end_recorded(short_dir / "link") == end_recorded(short_dir / "absent") == 0
        assert process.poll() is None
        assert end_recorded(short_dir / "book") == 1


_IN_A_DEAD_CONTAINER = """
import json, os, sys
from pathlib import Path
from gpushare_agent.sandbox.process_records import end_recorded, read_process, write_book
path, members = Path(sys.argv[1]), {pid: read_process(pid).started for pid in (os.getpid(), os.getppid())}
write_book(path, members, [os.getsid(0)])
path.write_text(json.dumps({**json.loads(path.read_text()), "owner": [os.getpid(), 1]}))
print(end_recorded(path), flush=True)
"""


def test_a_sandbox_started_from_within_a_dead_ones_container_spares_itself_and_its_shell(short_dir: Path) -> None:
    """The person's shell goes on, and so does what it has started beside."""
    script = 'sleep 600 & "$0" -c "$1" "$2"; kill -0 $! && echo shell; kill $!'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, _IN_A_DEAD_CONTAINER, str(short_dir / "book")],
        capture_output=True, text=True, timeout=DEADLINE_S, start_new_session=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("0\nshell\n", 0), done.stderr
