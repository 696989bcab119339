"""Does a pod still have processes? Looks for its cgroup below the mounted hierarchies.

Needed for one case: the kubelet gives a force-deleted pod's devices away while its processes run on (measured). The pod's
cgroup directory carries its UID whatever the driver, version, QoS class or nesting: `pod<UID>` or, under systemd,
`…-pod<UID with _>.slice`. It exists while the kubelet has not cleaned up; what counts is whether a process is in it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.names import PodUid

MAX_DEPTH = 8
MAX_DIRECTORIES = 20_000
LOOK_TIMEOUT_S = 2.0


class PodProcesses:
    """`root` is where the cgroup hierarchies are mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._thread = DaemonThread("pod-cgroups", advice="Check the file system; it is looked at again.")

    async def are_running(self, uid: PodUid) -> bool | None:
        """True while a process is in one of the pod's cgroups, None where that cannot be known here.

        Raises:
            Unavailable: the file system does not answer now, so that it must be asked again.
        """
        what = f"looking for processes of pod {uid} below {self._root}"
        return await self._thread.call(partial(_are_running, self._root, uid), what, LOOK_TIMEOUT_S)


def _are_running(root: Path, uid: str) -> bool | None:
    if not uid or not uid.replace("-", "").isalnum():
        return None
    marks = (f"pod{uid}", f"pod{uid.replace('-', '_')}.slice")
    seen = 0
    pending = [(str(root), 0)]
    if not root.is_dir():
        return None
    while pending:
        directory, depth = pending.pop()
        try:
            with os.scandir(directory) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for name in names:
            seen += 1
            path = f"{directory}/{name}"
            if name.endswith(marks):
                if _has_process(path):
                    return True
            elif depth < MAX_DEPTH and seen < MAX_DIRECTORIES and _may_hold_pods(name, depth):
                pending.append((path, depth + 1))
    return False if seen < MAX_DIRECTORIES else None


def _may_hold_pods(name: str, depth: int) -> bool:
    """Keeps out of the hundreds of service cgroups; prefixes and nesting above kubepods are at most a few levels."""
    return depth < 4 or "kubepods" in name or name in ("besteffort", "burstable")


def _has_process(path: str) -> bool:
    for directory, _, files in os.walk(path):
        if "cgroup.procs" in files:
            try:
                with Path(directory, "cgroup.procs").open("rb") as procs:
                    if procs.read(1):
                        return True
            except OSError:
                continue
    return False
