"""Walks mounted cgroup hierarchies for the directories of pods and containers, whatever the driver, version or nesting.

Goes into no container of a pod: what a tenant makes below its own cgroup is never taken for a pod or a container. Where the
node is itself a container of another cluster's pod, and that cluster's cgroups are in sight, `root` must be the node's
directory (setting runtime.cgroup_root). Follows no symbolic link. Not for reading what is in the directories. No state.
Format of the names: runtime/cgroup_paths.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroup_paths import container_id_of, pod_uid_of, split_joined

MAX_DEPTH = 12
ANY_NAME_DEPTH = 6
"""Prefixes above the pods (a node in a container, a user's session) are at most this deep; below it only directories that
the kubelet names are followed."""
MAX_DIRECTORIES = 20_000


class FoundDirectory(Struct, frozen=True, kw_only=True):
    """The directory of a pod (then `container_id` is None), of a container of one, or of a container without a pod."""

    path: str
    pod_uid: PodUid | None
    container_id: str | None


class CgroupDir(Struct, frozen=True, kw_only=True):
    """The cgroup of one container. `pod_uid` is None where the path names no pod."""

    path: Path
    container_id: str
    pod_uid: PodUid | None


class CgroupWalk:
    """One walk below `root`, which may have one hierarchy or several."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.is_complete = True
        """False once a limit has cut the walk short."""

    def places(self) -> Iterator[FoundDirectory]:
        """Pods, and containers that stand in no pod's directory; nearest to the root first."""
        pending = deque([(self._root, 0)])
        seen = 0
        while pending:
            directory, depth = pending.popleft()
            for name in subdirectories(directory):
                seen += 1
                if seen > MAX_DIRECTORIES:
                    self.is_complete = False
                    return
                path = f"{directory}/{name}"
                place = _classify(path, name)
                if place is not None:
                    yield place
                is_of_pod = place is not None and place.pod_uid is not None
                if not is_of_pod and (depth < ANY_NAME_DEPTH or (depth < MAX_DEPTH and _may_contain_pods(name))):
                    pending.append((path, depth + 1))

    def containers(self) -> Iterator[CgroupDir]:
        """Containers, with the pod in whose directory they lie."""
        for place in self.places():
            found = [("", place.container_id)]
            if place.container_id is None:
                found = [(name, container_id_of(name)) for name in subdirectories(place.path)]
            for name, container_id in found:
                if container_id is not None:
                    yield CgroupDir(path=Path(place.path, name), container_id=container_id, pod_uid=place.pod_uid)


def subdirectories(path: str) -> list[str]:
    """Names in any order; links are left out, and what cannot be read (it goes away at any time) has none."""
    try:
        with os.scandir(path) as entries:
            return [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _classify(path: str, name: str) -> FoundDirectory | None:
    if joined := split_joined(name):
        return FoundDirectory(path=path, pod_uid=joined[0], container_id=joined[1])
    uid, container_id = pod_uid_of(name), container_id_of(name)
    if uid is None and container_id is None:
        return None
    return FoundDirectory(path=path, pod_uid=uid, container_id=container_id)


def _may_contain_pods(name: str) -> bool:
    return "kubepods" in name or name in ("besteffort", "burstable")
