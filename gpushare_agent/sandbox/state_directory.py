"""The sandbox's state directory: one live owner, leftovers of dead ones removed, everything removed at the end.

Ownership is a lock on the file `owner`, which the kernel gives back when its holder dies; the file's text is the PID, for
messages, and whether the directory itself was made by a sandbox.

Who writes to the directory controls the agent, and what `sandbox exec` runs: it must be this user's alone. The
default is the same in every terminal, unlike one that follows $XDG_RUNTIME_DIR, which a login's end removes, and which
cron, sudo and containers do not have. Its name can be guessed: who takes it first keeps a sandbox from starting there, and
no more than that.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpushare_agent.kit.sockets import MAX_ADDRESS_BYTES
from gpushare_agent.model.errors import StartupError
from gpushare_agent.model.names import VMEMORY_SOCKET

_MADE = "this sandbox made the directory"
"""Second line of the file `owner` where the directory is to go with the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePaths:
    """Where things are, all below the state directory."""

    state: Path

    @property
    def device_plugin_path(self) -> Path:
        return self.state / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        return self.state / "pod-resources" / "kubelet.sock"

    @property
    def virtual_manager(self) -> Path:
        return self.state / "vm"

    @property
    def mps_pipe(self) -> Path:
        """The pipe directory of the fake MPS control daemon, which runs where isolation mps is in use."""
        return self.state / "mps" / "pipe"

    @property
    def mps_logs(self) -> Path:
        return self.state / "mps" / "log"

    @property
    def mps_control(self) -> Path:
        """The fake's control program, under the real one's name."""
        return self.state / "mps" / "nvidia-cuda-mps-control"

    @property
    def runtime_socket(self) -> Path:
        """Where the container runtime answers CRI."""
        return self.state / "containerd.sock"

    @property
    def logs(self) -> Path:
        """What containers print: `<namespace>_<pod>_<container>.log`."""
        return self.state / "logs"

    @property
    def cdi(self) -> Path:
        """The only directory where the container runtime looks for CDI specs."""
        return self.state / "cdi"

    @property
    def kubeconfig(self) -> Path:
        """Holds the API server's token: mode 0600."""
        return self.state / "kubeconfig"

    @property
    def agent_log(self) -> Path:
        return self.state / "agent.log"

    @property
    def control_socket(self) -> Path:
        return self.state / "control.sock"

    @property
    def agent_control_socket(self) -> Path:
        """The agent's own, for `cordon` and `uncordon`."""
        return self.state / "agent-control.sock"

    @property
    def display_socket(self) -> Path:
        return self.state / "gpu-manager.sock"

    @property
    def health_state(self) -> Path:
        return self.state / "health.json"

    @property
    def faults(self) -> Path:
        """What fails at the simulated GPUs."""
        return self.state / "faults.json"

    @property
    def usage(self) -> Path:
        """What the containers' processes use of the simulated GPUs."""
        return self.state / "usage.json"

    @property
    def extender_log(self) -> Path:
        return self.state / "extender.log"

    @property
    def owner(self) -> Path:
        """Locked by the process that runs the node, whose PID it holds."""
        return self.state / "owner"


def default_state_directory() -> Path:
    return Path(f"/tmp/gpushare-sandbox-{os.geteuid()}")  # noqa: S108 - short for unix addresses; ownership is checked


def prepare_state_directory(state: Path) -> NodePaths:
    """Makes the directory. Raises StartupError where it cannot serve."""
    paths = NodePaths(state=state.absolute())
    longest = max(len(os.fsencode(p)) for p in (paths.device_plugin_path / VMEMORY_SOCKET, paths.pod_resources_socket))
    if longest > MAX_ADDRESS_BYTES:
        raise StartupError(
            f"the state directory {paths.state} cannot hold sockets: a socket's path would have {longest} bytes, "
            f"{MAX_ADDRESS_BYTES} are possible; choose a shorter one with --state-dir, such as /tmp/gpushare"
        )
    try:
        paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.virtual_manager.mkdir(exist_ok=True)
        probe = paths.state / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise StartupError(
            f"the state directory {paths.state} cannot be used: {error.strerror or error}; "
            "it must be a directory, or not exist, and be writable: choose another with --state-dir"
        ) from error
    return paths


@contextmanager
def owned_state_directory(state: Path) -> Iterator[NodePaths]:
    """Raises StartupError where the directory cannot serve, is another's, or is in use."""
    is_new = not state.exists()
    if not is_new:
        _check_is_ours(state)
    paths = prepare_state_directory(state)
    _check_is_private(paths.state)  # another user may have created it just now
    with paths.owner.open("a+") as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner.seek(0)
            raise StartupError(
                f"another sandbox (PID {owner.readline().strip() or 'unknown'}) runs in {paths.state}; speak to it with "
                f"`gpushare-agent sandbox status --state-dir {paths.state}`, end it with Ctrl-C in its terminal, or "
                "choose another directory with --state-dir and another --port"
            ) from error
        owner.seek(0)
        is_new = is_new or _MADE in owner.read().splitlines()  # by the dead sandbox whose leftovers these are
        _clear(paths, keep=paths.owner)
        paths.virtual_manager.mkdir()
        owner.truncate(0)
        owner.write(f"{os.getpid()}\n" + (f"{_MADE}\n" if is_new else ""))
        owner.flush()
        try:
            yield paths
        finally:
            _clear(paths, keep=paths.owner)
            paths.owner.unlink(missing_ok=True)
            if is_new and not any(paths.state.iterdir()):
                paths.state.rmdir()


def _check_is_ours(state: Path) -> None:
    """A directory with other files in it is not the sandbox's: nothing in it may be removed."""
    if not state.is_dir():
        return  # prepare_state_directory words this
    _check_is_private(state)
    if any(state.iterdir()) and not (state / "owner").is_file():
        raise StartupError(
            f"the state directory {state} holds files that no sandbox left there; choose a new or empty one (--state-dir)"
        )


def _check_is_private(state: Path) -> None:
    if problem := why_not_private(state):
        raise StartupError(
            f"the state directory {state} cannot be trusted: {problem}, or choose another with --state-dir"
        )


def why_not_private(state: Path) -> str:
    """Why others control the directory, and the cure; empty where it is this user's alone, or is not there."""
    try:
        status = state.lstat()
    except OSError:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return f"it is a link; name the directory itself ({state.resolve()})"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and you are user {os.geteuid()}; run the command as that user"
    if stat.S_ISDIR(status.st_mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {mode:04o}); run `chmod go-w {state}`"
    return ""


def _clear(paths: NodePaths, *, keep: Path) -> None:
    for path in paths.state.iterdir():
        if path == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
