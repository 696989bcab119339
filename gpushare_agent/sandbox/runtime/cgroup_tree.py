"""The cgroup tree of the embedded node's containers, below this process's cgroup.

Shape: `kubepods/burstable/pod<uid>/<id>/`, as the kubelet creates it with the cgroupfs driver. It uses cgroup v2 if a
process can really be moved there, else a hierarchy of v1, else none. With none, ordinary files say what the kernel would,
and a container has only its first process there. The environment variable GPUSHARE_SANDBOX_CGROUPS (v2, v1, none) insists
on one of them.

State owned: the directory `gpushare-sandbox-<pid>-<PID namespace>-<random>`, removed by `close`. A sandbox that was killed
leaves its own behind; the next one of its PID namespace removes what belongs to no living process. With files: `cgroup`
and `proc` in the node's state directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import structlog

from gpushare_agent.core.model.errors import StartupError

log = structlog.get_logger(__name__)

CgroupTreeKind = Literal["v2", "v1", "none"]
KIND_VARIABLE = "GPUSHARE_SANDBOX_CGROUPS"
PODS = Path("kubepods", "burstable")
_KINDS: tuple[CgroupTreeKind, ...] = ("v2", "v1", "none")
_V1_CONTROLLERS = ("pids", "freezer", "memory", "cpu", "blkio", "devices", "name=systemd")
"""`pids` is mounted nearly everywhere; cpuset is left out, as it takes no process before it has been set up."""
_NAME = re.compile(r"gpushare-sandbox-(\d+)-([0-9a-f]+)-[0-9a-f]{8}")
_REMOVE_TIMEOUT_S = 5.0
_PROBE = ("/bin/sh", "-c", "read -r _")


class KernelCgroups:
    """A tree in a real hierarchy. `parent` is this process's own directory there; `root` is what an agent of the node
    takes for /sys/fs/cgroup, `proc` what it takes for /proc."""

    root: Path
    proc = Path("/proc")
    why_no_exec = ""
    """The reason why nothing can join a container; empty where it can."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError where no process can be moved to such a tree."""
        # Those of killed sandboxes: otherwise their processes go on.
        remove_stale(parent)
        # The random part: two sandboxes of one process, as in tests, must not share a tree.
        self.root = parent / f"gpushare-sandbox-{os.getpid()}-{_pid_namespace()}-{secrets.token_hex(4)}"
        self.root.mkdir()
        try:
            (self.root / PODS).mkdir(parents=True)
            # Proved, not derived: rights, delegation and v2's rule of no inner processes differ from host to host.
            self._try_to_move()
        except OSError:
            _remove_soon(self.root)
            raise

    def add_pod(self, pod_uid: str) -> None:
        """Creates the pod's cgroup, as the kubelet does before the first container's. Raises OSError."""
        (self.root / PODS / f"pod{pod_uid}").mkdir(exist_ok=True)

    def add(self, pod_uid: str, container_id: str) -> Path:
        """Creates the container's cgroup. Raises OSError."""
        path = self.root / PODS / f"pod{pod_uid}" / container_id
        path.mkdir(parents=True)
        return path

    def attach(self, cgroup: Path, pid: int) -> None:
        """Moves a process, and so its later children. Raises OSError, ProcessLookupError among them."""
        file = os.open(cgroup / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)  # never made where the cgroup has gone
        try:
            os.write(file, str(pid).encode())
        finally:
            os.close(file)

    @staticmethod
    def pids(cgroup: Path) -> list[int]:
        """The processes of the cgroup and all below, ascending; none where it is gone."""
        found: set[int] = set()
        for directory, _, _ in os.walk(cgroup):
            with contextlib.suppress(OSError):  # it went away meanwhile
                found.update(map(int, Path(directory, "cgroup.procs").read_text().split()))
        return sorted(found - {0})  # 0 is a process of another PID namespace

    @staticmethod
    def kill(cgroup: Path) -> None:
        """SIGKILL to all of them."""
        for pid in set(KernelCgroups.pids(cgroup)) - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, cgroup: Path) -> bool:
        """Whether the cgroup is gone; it cannot go while a process is in it."""
        if not _remove_tree(cgroup):
            return False
        with contextlib.suppress(OSError):  # other containers of the pod are in it
            cgroup.parent.rmdir()
        return True

    def remove_pod(self, pod_uid: str) -> None:
        """Removes the cgroup of a pod that has no containers left."""
        with contextlib.suppress(OSError):  # it went with the last container, or one is left
            (self.root / PODS / f"pod{pod_uid}").rmdir()

    def close(self) -> bool:
        """Whether everything is gone. Kills what is left in it."""
        self.kill(self.root)
        return _remove_tree(self.root)

    def _try_to_move(self) -> None:
        """A mounted hierarchy says nothing of rights, and of other rules (no processes in inner cgroups) even less."""
        trial = self.root / PODS / "trial"
        trial.mkdir()
        with subprocess.Popen(_PROBE, stdin=subprocess.PIPE, start_new_session=True) as process:  # noqa: S603 - a constant
            try:
                self.attach(trial, process.pid)
            finally:
                process.kill()
                process.wait()
        _remove_soon(trial)


class FileCgroups(KernelCgroups):
    """Files in place of the kernel's, for a user who can create no cgroups: an agent of the node reads them as a tree of v2
    and as /proc. No process can be moved there. The caller decides which process is killed."""

    why_no_exec = "this user can create no cgroups"

    def __init__(self, state: Path) -> None:
        """Raises OSError."""
        self.root, self.proc = state / "cgroup", state / "proc"
        (self.root / PODS).mkdir(parents=True)
        (self.root / "cgroup.controllers").touch()  # by which v2 is known
        self.proc.mkdir()
        (self.proc / "self").symlink_to("/proc/self")  # an agent compares its own cgroup with the others

    def attach(self, cgroup: Path, pid: int) -> None:
        """Notes a container's first process. Raises OSError."""
        (cgroup / "cgroup.procs").write_text(f"{pid}\n")
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text(f"0::/{cgroup.relative_to(self.root)}\n")

    @staticmethod
    def kill(cgroup: Path) -> None:
        """Nothing: the process may have ended, and its number may be another's."""

    def remove(self, cgroup: Path) -> bool:
        for pid in self.pids(cgroup):
            shutil.rmtree(self.proc / str(pid), ignore_errors=True)
        (cgroup / "cgroup.procs").unlink(missing_ok=True)
        return super().remove(cgroup)

    def close(self) -> bool:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.proc, ignore_errors=True)
        return True


def open_cgroup_tree(state: Path, kind: str | None = None) -> KernelCgroups:
    """The first kind that works, or the requested one, here or in the environment. Raises StartupError if it does not."""
    requested = kind or os.environ.get(KIND_VARIABLE) or None
    if requested is not None and requested not in _KINDS:
        raise StartupError(f"{KIND_VARIABLE} is {requested!r}: it can be {', '.join(_KINDS)}, or not set")
    for candidate in _KINDS if requested is None else (requested,):
        if candidate == "none":
            return FileCgroups(state)
        # Several controllers of v1 may be mounted; one that can be written is enough.
        for parent in _parents(candidate):
            try:
                return KernelCgroups(parent)
            except OSError as error:
                log.debug("cgroup_tree_impossible", kind=candidate, parent=str(parent), error=str(error))
    raise StartupError(
        f"no cgroup {requested} can be created for the sandbox's containers: none is mounted, or this process may not move "
        f"processes there; run it with the rights, or unset {KIND_VARIABLE}"
    )


def remove_stale(parent: Path) -> None:
    """The trees of dead sandboxes. Their remaining processes are killed."""
    for path in sorted(parent.glob("gpushare-sandbox-*")):
        match = _NAME.fullmatch(path.name)
        # A PID of another namespace says nothing here. Its sandbox may live.
        if match is None or match[2] != _pid_namespace() or Path("/proc", match[1]).exists():
            continue
        with contextlib.suppress(FileNotFoundError):  # another sandbox has removed it
            # Another user's tree is theirs to remove.
            if path.stat().st_uid == os.geteuid():
                KernelCgroups.kill(path)
                log.info("stale_cgroups_found", path=str(path), is_removed=_remove_soon(path))


def _pid_namespace() -> str:
    """A number means another process in another one."""
    return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"


# --- where this process's own cgroup is mounted ---


def _parents(kind: CgroupTreeKind) -> Iterator[Path]:
    # Below this process's own cgroup: elsewhere a user may have no right, and a container sees nothing else.
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    # By controller; the name of v2's line is empty.
    own = {name: path for _, names, path in lines for name in names.split(",")}
    mounts = [line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for name in ("",) if kind == "v2" else _V1_CONTROLLERS:
        for before, after in mounts:  # proc(5), mountinfo
            file_system, _, options = after.split(" ", 2)
            root, point = before.split(" ")[3:5]
            is_it = file_system == "cgroup2" if name == "" else file_system == "cgroup" and name in options.split(",")
            if is_it and name in own and (below := _below(own[name], root)) is not None:
                # The kernel escapes blanks and backslashes of paths as octal numbers.
                yield Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), point), below)


def _below(own: str, root: str) -> str | None:
    """Our path as seen from the mounted directory; None where the mount does not show it."""
    # Outside of its cgroup namespace's root: the mount does not show where it is.
    if ".." in own.split("/"):
        return None
    if root == "/":
        return own.lstrip("/")
    return own[len(root) :].lstrip("/") if own == root or own.startswith(f"{root}/") else None


# --- the kernel's files ---


def _remove_soon(cgroup: Path) -> bool:
    """Waits, blocking, for processes that are on their way out."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while not (is_gone := _remove_tree(cgroup)) and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_gone


def _remove_tree(cgroup: Path) -> bool:
    """Deepest first: containers may have made cgroups of their own."""
    for directory, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            try:
                Path(directory).rmdir()
            except OSError:  # a process is still in it, or on its way out
                return False
    return not cgroup.exists()
