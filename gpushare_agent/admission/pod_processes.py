"""Whether a pod still has processes, by its cgroup below the mounted hierarchies.

Needed for one case: the kubelet allocates a force-deleted pod's devices anew while its processes still run (measured). The
pod's cgroup directory has its UID in its name whatever the driver, version, QoS class or nesting. It exists until the
kubelet has cleaned up; what counts is whether a process is in it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroup_paths import pod_uid_of
from gpushare_agent.runtime.cgroups import CgroupWalk

READ_TIMEOUT_S = 2.0


class PodProcesses:
    """`root` is where the cgroup hierarchies are mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._thread = DaemonThread("pod-cgroups", advice="Check the file system; it is read again.")

    async def are_running(self, uid: PodUid) -> bool | None:
        """True while a process is in one of the pod's cgroups, None where this host does not show it.

        Raises:
            Unavailable: the file system does not answer now; try again.
        """
        what = f"reading the processes of pod {uid} below {self._root}"
        return await self._thread.call(partial(_are_running, self._root, uid), what, READ_TIMEOUT_S)


def _are_running(root: Path, uid: str) -> bool | None:
    if pod_uid_of(f"pod{uid}") != uid or not root.is_dir():
        return None
    walk = CgroupWalk(root)
    if any(place.pod_uid == uid and _has_process(place.path) for place in walk.places()):
        return True
    return False if walk.is_complete else None


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
