"""The sandbox's state directory: one live owner, leftovers of dead ones removed, everything removed at the end.

Ownership is a lock on the file `owner`, which the kernel gives back when its holder dies; the file's text is the PID, for
messages, and whether the directory itself was made by a sandbox.

A user who can write to the directory controls the agent, and what `sandbox exec` runs. So it must belong to this user
alone. The default is the same in every terminal, unlike a path in $XDG_RUNTIME_DIR, which a login's end removes and which
cron, sudo and containers do not have. Its name can be guessed: another user who takes it first can only keep a sandbox
from starting there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from gpushare_agent.core.cli.command_line import runnable
from gpushare_agent.core.kit.directories import DIRECTORY, made_directory, names_in, opened, status_of
from gpushare_agent.core.kit.sockets import MAX_ADDRESS_BYTES
from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.core.model.resources import ResourceKind

_OWNER, _PLACES = "owner", "var"
_MADE = "this sandbox made the directory"
"""Second line of the file `owner` where the directory is to go with the sandbox."""


class NodePaths:
    """The places of things, all below the state directory: those of an agent as its setting `root` has them."""

    def __init__(self, *, state: Path) -> None:
        self.state = state
        self.owner = state / _OWNER
        """Locked by the process that runs the node. It holds that process's PID."""
        self.control_socket = state / "control.sock"
        self.kubeconfig = state / "kubeconfig"
        """Holds the API server's token: mode 0600."""
        kubelet, agent = state / "var/lib/kubelet", state / "var/lib/gpushare-agent"
        self.device_plugin_path = kubelet / "device-plugins"
        self.pod_resources_socket = kubelet / "pod-resources" / "kubelet.sock"
        self.plugin_registry, self.dra_plugin = kubelet / "plugins_registry", kubelet / "plugins" / "gpushare-agent"
        """Where the kubelet finds DRA drivers, and the agent's own DRA socket."""
        self.claim_records = agent / "claims"
        """The agent's records of prepared claims."""
        self.health_state, self.resize_state = agent / "health.json", agent / "resize.json"
        self.runtime_socket = state / "containerd.sock"
        """Where the container runtime answers CRI."""
        self.cdi = state / "var/run/cdi"
        """The only directory where the container runtime looks for CDI specs."""
        self.logs = state / "logs"
        """What containers print: `<namespace>_<pod>_<container>.log`."""
        self.virtual_manager = state / "etc/gpu-manager/vm"
        self.libgpushare = state / "etc/gpu-manager/vdriver/gpushare"
        """The containers' files of isolation gpushare."""
        self.mps_pipe, self.mps_logs = state / "run/gpushare-mps/pipe", state / "run/gpushare-mps/log"
        """The fake MPS control daemon's, which runs with isolation mps."""
        self.mps_control = state / "run/gpushare-mps/nvidia-cuda-mps-control"
        """The fake's control program, under the real one's name."""
        self.agent_log, self.extender_log = state / "agent.log", state / "extender.log"
        self.agent_control_socket = state / "run/gpushare-agent/control.sock"
        """The agent's own, for `cordon` and `uncordon`."""
        self.display_socket = state / "var/run/gpu-manager.sock"
        self.faults = state / "faults.json"
        """What fails at the simulated GPUs."""
        self.usage = state / "usage.json"
        """What the containers' processes use of the simulated GPUs."""

    def make_directories(self) -> None:
        """Those that a node has before its agent comes."""
        kubelets = (self.device_plugin_path, self.pod_resources_socket.parent, self.plugin_registry)
        for path in (*kubelets, self.health_state.parent, self.display_socket.parent):
            path.mkdir(parents=True, exist_ok=True)


def default_state_directory() -> Path:
    return Path(f"/tmp/gpushare-sandbox-{os.geteuid()}")  # noqa: S108 - short for unix addresses; ownership is checked


def prepare_state_directory(state: Path) -> NodePaths:
    """Makes the directory. Raises StartupError, with nothing written, where it cannot serve or is not this user's
    alone."""
    paths = NodePaths(state=state.absolute())
    with _opened(paths) as (directory, _), _refused_by_the_system(paths.state), made_directory(directory, _PLACES):
        return paths


@contextmanager
def owned_state_directory(state: Path) -> Iterator[NodePaths]:
    """Raises StartupError where the directory cannot serve, is another's, or is in use."""
    paths = NodePaths(state=state.absolute())
    with ExitStack() as stack:
        # All that follows goes by this descriptor: the name may be given to another directory at any moment.
        directory, is_new = stack.enter_context(_opened(paths))
        with _refused_by_the_system(paths.state):
            owner_status = status_of(directory, _OWNER)
            # Before anything is removed: a directory with other files in it is not the sandbox's.
            if names_in(directory) and (owner_status is None or not stat.S_ISREG(owner_status.st_mode)):
                raise StartupError(
                    f"the state directory {paths.state} holds files that no sandbox left there; choose a new or empty one"
                    " (--state-dir)"
                )
            owner = stack.enter_context(open(_open_owner(directory), "r+", encoding="utf-8", errors="replace"))
            # The kernel gives it back with the process: no stale lock is left by a kill.
            _lock(owner, paths.state)
            _clear(directory)
            with made_directory(directory, _PLACES):
                pass
        is_new = is_new or _MADE in owner.read().splitlines()  # by the dead sandbox that left these
        owner.seek(0)
        owner.truncate()
        owner.write(f"{os.getpid()}\n" + (f"{_MADE}\n" if is_new else ""))
        owner.flush()
        try:
            yield paths
        finally:
            _clear(directory)
            with suppress(FileNotFoundError):
                os.unlink(_OWNER, dir_fd=directory)
            # A directory that a person made, or put something into, stays.
            if is_new and not names_in(directory):
                paths.state.rmdir()


@contextmanager
def _opened(paths: NodePaths) -> Iterator[tuple[int, bool]]:
    """A descriptor of the directory, which is checked before anything is written by it, and whether it was made just now.
    From here on it is one directory, even if another user makes one under this name. Raises StartupError."""
    sockets = paths.device_plugin_path / ResourceKind.VMEMORY.socket, paths.pod_resources_socket
    longest = max(len(os.fsencode(path)) for path in sockets)
    if longest > MAX_ADDRESS_BYTES:
        raise StartupError(
            f"the state directory {paths.state} cannot hold sockets: a socket's path would have {longest} bytes, "
            f"{MAX_ADDRESS_BYTES} are possible; choose a shorter one with --state-dir, such as /tmp/gpushare"
        )
    is_new = True
    with ExitStack() as stack:
        with _refused_by_the_system(paths.state):
            try:
                # Made, and not asked for first: another user could make it in between.
                paths.state.mkdir(mode=0o700, parents=True)
            except FileExistsError:
                is_new = False
            directory = stack.enter_context(opened(paths.state, None, DIRECTORY))
        # Of the descriptor, and not of the name.
        if problem := _distrust(os.fstat(directory), paths.state):
            raise _not_trusted(paths.state, problem)
        yield directory, is_new


@contextmanager
def _refused_by_the_system(state: Path) -> Iterator[None]:
    """Raises StartupError for what the file system refuses."""
    try:
        yield
    except OSError as error:
        if problem := why_not_private(state):
            raise _not_trusted(state, problem) from error
        raise StartupError(
            f"the state directory {state} cannot be used: {error.strerror or error}; "
            "it must be a directory, or not exist, and be writable: choose another with --state-dir"
        ) from error


def _not_trusted(state: Path, problem: str) -> StartupError:
    return StartupError(f"the state directory {state} cannot be trusted: {problem}, or choose another with --state-dir")


def _open_owner(directory: int) -> int:
    """The file of a dead sandbox, or of one that runs, else a new one."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(_OWNER, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except FileExistsError:
        return os.open(_OWNER, flags, dir_fd=directory)


def _lock(owner: TextIO, state: Path) -> None:
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartupError(
            f"another sandbox (PID {owner.readline().strip() or 'unknown'}) runs in {state}; speak to it with "
            f"`{runnable()} sandbox status --state-dir {state}`, end it with Ctrl-C in its terminal, or "
            "choose another directory with --state-dir and another --port"
        ) from error


def why_not_private(state: Path) -> str:
    """Why others control the directory, and the remedy; empty where it is this user's alone, or cannot be seen."""
    try:
        return _distrust(state.lstat(), state)
    except OSError:
        return ""


def _distrust(status: os.stat_result, state: Path) -> str:
    mode = stat.S_IMODE(status.st_mode)
    # The link's owner decides where it leads.
    if stat.S_ISLNK(status.st_mode):
        return f"it is a link; name the directory itself ({state.resolve()})"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and you are user {os.geteuid()}; run the command as that user"
    if stat.S_ISDIR(status.st_mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {mode:04o}); run `chmod go-w {state}`"
    return ""


def _clear(directory: int) -> None:
    """Removes all but the file `owner`."""
    for name in names_in(directory):
        status = status_of(directory, name)
        if name == _OWNER or status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            # What cannot be removed, such as a cgroup's file, must not keep the rest.
            shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
            continue
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
