"""The embedded node's container runtime: each container is a child process of the sandbox, in a cgroup of its own.

There are no namespaces, no images and no root file system: a container sees the machine. container_config.py says what its
process runs. Containers live on while the kubelet is stopped, as real ones do, and end with the sandbox.

A container's first process is a small shell that waits for one line and then becomes the command, so nothing of a
container runs outside its cgroup. The kernel kills it if the sandbox dies first. A container has ended once no process is
left in its cgroup. Processes that its first one leaves behind are killed, as a runtime does without a PID namespace. If no
cgroup can be created, this applies to its process group.
State owned: the containers, their processes, and the cgroup tree (cgroup_tree.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, cast

import structlog
from msgspec import Struct, field, structs

from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import NotFound, Unavailable, os_errors_as
from gpushare_agent.sandbox.pod_manifest import timestamp
from gpushare_agent.sandbox.runtime.cgroup_tree import open_cgroup_tree

_GATE = '[ "$PPID" = "$1" ] || exit 1; ulimit -f "$2" 2>/dev/null; shift 2; read -r _ || exit 1; exec "$@" </dev/null'
"""A parent that has died before the kernel was asked for the death signal is no longer the parent: nothing then runs
on. The second argument bounds each file that is written, in blocks of 512 bytes; a user's own limit
may be lower."""
_END_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_SETPRIV = shutil.which("setpriv")
"""It asks the kernel for the death signal without a fork of this interpreter, which costs four times as much."""
_PREFIX = [_SETPRIV, "--pdeathsig", "KILL"] if _SETPRIV else []
_libc = ctypes.CDLL(None)


class ContainerProcess:
    """Raises OSError where nothing can be started. Use it in the event loop's thread, which must outlive it."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: Path, is_bounded: bool
    ) -> None:
        self._fd: int | None = None
        most = str(2 * MAX_LOG_BYTES // 512) if is_bounded else "unlimited"
        with output.open("ab") as file:
            self._process = subprocess.Popen(  # noqa: S603 - to run what manifests say is its purpose
                [*_PREFIX, "/bin/sh", "-c", _GATE, "sh", str(os.getpid()), most, *command],
                stdin=subprocess.PIPE, stdout=file, stderr=file, env=dict(env), cwd=cwd, start_new_session=True,
                preexec_fn=None if _SETPRIV else end_with_parent,  # noqa: PLW1509 - only where setpriv is missing
            )  # fmt: skip

        self._gate = cast(IO[bytes], self._process.stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self, on_exit: Callable[[int], None]) -> None:
        """Lets it run. `on_exit` gets the exit code, 128 and the signal's number where one ended it, once."""
        # A pidfd becomes readable at the end: no thread waits, and no signal handler of the loop is needed.
        self._fd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._fd, self._ended, on_exit)
        with contextlib.suppress(BrokenPipeError), self._gate:  # killed already: its exit is observed
            self._gate.write(b"\n")

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the signal; nothing where it has ended."""
        self._process.send_signal(number)

    def end(self) -> int | None:
        """Kills it and waits, blocking, for a moment; `on_exit` is not called any more. None where it does not go."""
        # First, so that `on_exit` is not called for an end that was asked for.
        self._forget_fd()
        self._kill_group()
        # A process that was never released waits for its line: closing ends that wait, too.
        self._gate.close()
        try:
            return exit_code(self._process.wait(_END_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return None

    def _ended(self, on_exit: Callable[[int], None]) -> None:
        self._forget_fd()
        self._kill_group()
        on_exit(exit_code(self._process.wait()))

    def _kill_group(self) -> None:
        # Before the wait: until then no other process can have the number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _forget_fd(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


def exit_code(returncode: int) -> int:
    """The exit code as a shell and a container runtime count: a signal's number counts from 128 on."""
    return returncode if returncode >= 0 else 128 - returncode


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Called in the child before exec: the kernel sends it this signal when the sandbox dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


log = structlog.get_logger(__name__)

KILLED = 137
MAX_LOG_BYTES = 10 * 1024 * 1024
"""A container's log that is larger than this is emptied when the container starts again."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.001, 0.05
_CLOSE_TIMEOUT_S = 10.0


class ContainerConfig(Struct, kw_only=True, eq=False):
    """What to start. Without a command it sleeps, and ends with code 0 after `run_s`, None for never. `note` is the first
    line of its log.

    `ignore_term_s` is how long it does not get its TERM. A command with `has_bounded_log` ends by SIGXFSZ at twice
    MAX_LOG_BYTES.
    """

    pod_uid: str
    pod_namespace: str
    pod_name: str
    name: str
    command: tuple[str, ...] = ()
    has_bounded_log: bool = False
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    run_s: float | None = None
    note: str = ""
    ignore_term_s: float = 0.0


class Container(ContainerConfig, kw_only=True, eq=False):
    """One run of one container. `exit_code` is None while it runs; `pid` is the first process's."""

    id: str
    attempt: int
    pid: int
    created_at: float
    """Seconds since the epoch."""
    started_at: str
    cgroup: Path
    process: ContainerProcess | None
    """The first one, until it has ended."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    finished_at: str = ""
    ended_at: float = 0.0
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def end(self, code: int) -> None:
        self.exit_code, self.finished_at, self.ended_at = code, timestamp(), time.time()


class ContainerRuntime:
    """Files below `state`: `logs/`. `cgroups` insists on a kind (cgroup_tree.py).

    Synchronous, within an event loop, which reports the processes' ends. Raises StartupError (see open_cgroup_tree).
    """

    def __init__(self, state: Path, change: ChangeSignal, cgroups: str | None = None) -> None:
        self._tree = open_cgroup_tree(state, cgroups)
        self.cgroup_root, self.proc_root = self._tree.root, self._tree.proc
        self.why_no_exec = self._tree.why_no_exec
        self.logs = state / "logs"
        self.logs.mkdir(exist_ok=True)
        self._change = change
        self._salt = secrets.token_hex(8)
        self._containers: dict[tuple[str, str], Container] = {}
        self._pod_signals: dict[str, ChangeSignal] = {}
        self._forgotten: set[str] = set()
        self._started = 0
        self._is_closed = False

    # --- reading ---

    def find(self, pod_uid: str, name: str) -> Container | None:
        """The newest run."""
        return self._containers.get((pod_uid, name))

    def is_running(self, pod_uid: str, name: str) -> bool:
        container = self.find(pod_uid, name)
        return container is not None and container.is_running

    def signal_of(self, pod_uid: str) -> ChangeSignal:
        """Wakes up for this pod's containers only: a hundred pod workers need not wake up at every call of the node."""
        return self._pod_signals.setdefault(pod_uid, ChangeSignal())

    def pods(self) -> set[str]:
        return {uid for uid, _ in self._containers}

    def living(self, pod_uid: str) -> list[Container]:
        return [c for (uid, _), c in sorted(self._containers.items()) if uid == pod_uid and c.is_running]

    def containers(self) -> list[Container]:
        """The newest run of each that is not forgotten, by namespace, pod and name."""
        return sorted(self._containers.values(), key=lambda c: (c.pod_namespace, c.pod_name, c.name, c.id))

    def pids(self, container: Container) -> list[int]:
        """The processes of its cgroup and all below, ascending; none once it has ended."""
        return self._tree.pids(container.cgroup) if container.is_running else []

    def log_of(self, container: ContainerConfig) -> Path:
        return self.logs / f"{container.pod_namespace}_{container.pod_name}_{container.name}.log"

    def join(self, container: Container, pid: int) -> None:
        """Moves a running process, and its later children, into the container.

        Raises:
            NotFound: no such process, or the container has ended.
            Unavailable: this user may not move it.
        """
        where = f"container {container.name} of pod {container.pod_namespace}/{container.pod_name}"
        if not container.is_running:
            raise NotFound(f"{where} does not run: it ended with exit code {container.exit_code}")
        if self.why_no_exec:
            raise Unavailable(f"process {pid} cannot be put into {where}: {self.why_no_exec}; run the sandbox as root")
        # PID 1 and the sandbox itself would go with the container's end.
        if pid <= 1 or pid == os.getpid():
            raise Unavailable(f"process {pid} cannot be put into {where}: only a process started for it can")
        try:
            self._tree.attach(container.cgroup, pid)
        except ProcessLookupError as error:
            raise NotFound(f"process {pid} cannot be put into {where}: there is no such process here") from error
        except OSError as error:
            raise Unavailable(f"process {pid} cannot be put into {where}: {error.strerror or error}") from error
        self._notify(container)

    # --- starting and ending ---

    def make_pod_cgroup(self, pod_uid: str) -> None:
        """What a kubelet does before it prepares the first container. Raises Unavailable."""
        with os_errors_as(Unavailable, f"no cgroup can be made for pod {pod_uid}"):
            self._tree.add_pod(pod_uid)

    def start(self, config: ContainerConfig) -> Container:
        """Raises Unavailable if the machine gives no process or no cgroup, or if no process can have such an argument or
        variable."""
        where = f"container {config.name} of pod {config.pod_namespace}/{config.pod_name}"
        if self._is_closed:
            raise Unavailable(f"{where} cannot start: the node has ended")
        # The run before has ended: its number goes on.
        before = self.find(config.pod_uid, config.name)
        attempt = before.attempt + 1 if before is not None else 0
        try:
            with os_errors_as(Unavailable, f"{where} cannot start"):
                container = self._create(config, attempt)
        except ValueError as error:
            raise Unavailable(
                f"{where} cannot start: no process can have such a command or environment: {error}; correct the manifest"
            ) from error
        self._forgotten.discard(config.pod_uid)
        # Known before its release, because it may end at once: its end must belong to a known container.
        self._containers[config.pod_uid, config.name] = container
        assert container.process is not None  # noqa: S101 - it waits for its release
        container.process.release(partial(self._remove_rest, container, _FIRST_RETRY_S))
        self._notify(container)
        return container

    def _create(self, config: ContainerConfig, attempt: int) -> Container:
        """A container with its first process in its cgroup, waiting for its release."""
        self._started += 1
        # 64 hexadecimal digits, as containerd's: the agent finds cgroups by that form.
        identity = hashlib.sha256(f"{self._salt}/{config.pod_uid}/{config.name}/{self._started}".encode()).hexdigest()
        cgroup = self._tree.add(config.pod_uid, identity)
        try:
            process = self._new_process(config, cgroup, attempt)
        except (OSError, ValueError):  # the latter: a null byte, a variable's name with "="
            self._tree.remove(cgroup)
            raise
        return Container(
            **structs.asdict(config), id=identity, attempt=attempt, pid=process.pid, created_at=time.time(),
            started_at=timestamp(), cgroup=cgroup, process=process,
        )  # fmt: skip

    def _new_process(self, config: ContainerConfig, cgroup: Path, attempt: int) -> ContainerProcess:
        sleep = ("sleep", "infinity" if config.run_s is None else f"{config.run_s:.3f}")
        command, log_path = config.command or sleep, self.log_of(config)
        # A new pod of this name begins with an empty log; restarts go on in it, up to the bound.
        if log_path.exists() and (attempt == 0 or log_path.stat().st_size > MAX_LOG_BYTES):
            log_path.unlink()
        if config.note:
            with log_path.open("a") as file:
                file.write(f"{config.note}\n")
        process = ContainerProcess(
            command, env=config.env, cwd=Path("/"), output=log_path, is_bounded=config.has_bounded_log
        )
        try:
            # While it waits at its gate: nothing of the container runs outside its cgroup.
            self._tree.attach(cgroup, process.pid)
        except OSError:
            process.end()
            raise
        return process

    def stop(self, container: Container, grace_s: float) -> None:
        """TERM, and KILL after the grace period; returns before the process has gone. The last call's times count."""
        if not container.is_running:
            return
        # A second stop with a shorter grace period replaces the first.
        self._cancel_timers(container)
        # The annotation delays TERM, for tests of programs that do not end at once.
        if container.ignore_term_s <= 0:
            self._signal(signal.SIGTERM, container)
        elif container.ignore_term_s < grace_s:
            self._later(container, container.ignore_term_s, partial(self._signal, signal.SIGTERM))
        # In any case: TERM may be ignored.
        self._later(container, grace_s, self.kill)

    def kill(self, container: Container) -> None:
        """Ends all its processes as a crash would; returns before they have gone."""
        if container.is_running:
            self._signal(signal.SIGKILL, container)
            # All of its processes: children may have made sessions of their own.
            self._tree.kill(container.cgroup)

    def forget(self, pod_uid: str) -> None:
        """Drops the ended containers of a pod; those that still live once they have ended, unless one starts again."""
        for key in [k for k, c in self._containers.items() if k[0] == pod_uid and not c.is_running]:
            del self._containers[key]
        # Some still live: they are forgotten when they have ended.
        if any(uid == pod_uid for uid, _ in self._containers):
            self._forgotten.add(pod_uid)
        else:
            self._forgotten.discard(pod_uid)
            self._pod_signals.pop(pod_uid, None)
            self._tree.remove_pod(pod_uid)

    def close(self) -> None:
        """Ends everything, blocking for the moment that killed processes need. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # Blocking, because the loop may be gone: the sandbox is at its end.
        for container in self._containers.values():
            self._cancel_timers(container)
            if container.process is not None and container.process.end() is None:
                log.warning("container_process_stays", container=container.id, pid=container.pid)
            if container.is_running:
                container.end(KILLED)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        # A killed process needs a moment, and a processor, to be gone.
        while not self._tree.close():
            if time.monotonic() > deadline:
                log.warning("cgroups_stay", path=str(self.cgroup_root), next="the next sandbox removes them")
                return
            time.sleep(_FIRST_RETRY_S)

    def _signal(self, number: signal.Signals, container: Container) -> None:
        if container.process is not None:
            container.process.send_signal(number)

    def _remove_rest(self, container: Container, retry_s: float, code: int) -> None:
        """The first process has ended: ends what is left in the cgroup, as often as it takes."""
        container.process = None
        if self._is_closed:
            return
        self._tree.kill(container.cgroup)
        # A cgroup with a process in it cannot go: tried again, at most 20 times a second.
        if not self._tree.remove(container.cgroup):
            next_s = min(retry_s * 2, _LAST_RETRY_S)
            self._later(container, retry_s, lambda ended: self._remove_rest(ended, next_s, code))
            return
        self._cancel_timers(container)
        # Only now: a container has ended when the last of its processes has.
        container.end(code)
        self._notify(container)
        if container.pod_uid in self._forgotten:
            self.forget(container.pod_uid)

    def _later(self, container: Container, delay_s: float, act: Callable[[Container], None]) -> None:
        container.timers.append(asyncio.get_running_loop().call_later(delay_s, act, container))

    def _cancel_timers(self, container: Container) -> None:
        while container.timers:
            container.timers.pop().cancel()

    def _notify(self, container: Container) -> None:
        self.signal_of(container.pod_uid).notify()
        self._change.notify()
