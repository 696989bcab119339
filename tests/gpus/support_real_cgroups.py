"""Real cgroups for a test, named as a kubelet and a runtime name those of containers, with real processes in them.

Made below the root of what this machine lets root write: the v2 hierarchy, and the v1 pids controller where it is mounted.
Everything is removed at the end, after its processes ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpushare_agent.agent.runtime.cgroup_paths import parse_proc_cgroup
from tests.support_deadline import DEADLINE_S

ROOT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """The v2 hierarchy first. On a hybrid host it stands beside the controllers of v1."""
    candidates = [ROOT] if (ROOT / "cgroup.controllers").exists() else [ROOT / "unified", ROOT / "pids"]
    return [path for path in candidates if (path / "cgroup.procs").exists()]


def why_not() -> str | None:
    """Why this machine has no cgroups to make, None if it has."""
    if not hierarchies():
        return f"neither cgroup v2 nor the v1 pids controller is mounted below {ROOT}"
    if (identity := parse_proc_cgroup(Path("/proc/self/cgroup").read_text())) is not None:
        return f"the tests run in a container themselves: their own cgroup says {identity}"
    for hierarchy in hierarchies():
        probe = hierarchy / f"gs-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            return f"no cgroup can be made in {hierarchy}: {error.strerror}"
    return None


class RealCgroups:
    """`<hierarchy>/<name>/kubepods/pod<uid>/<container id>` in every hierarchy."""

    def __init__(self, name: str) -> None:
        self.tops = [hierarchy / name for hierarchy in hierarchies()]

    def paths(self, pod_uid: str, container_id: str) -> list[Path]:
        """Of one container, made if they are not there."""
        found = [top / "kubepods" / f"pod{pod_uid}" / container_id for top in self.tops]
        for path in found:
            path.mkdir(parents=True, exist_ok=True)
        return found

    def move(self, pid: int, pod_uid: str, container_id: str, *, in_first_only: bool = False) -> None:
        for path in self.paths(pod_uid, container_id)[: 1 if in_first_only else None]:
            (path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Their processes must have ended; the kernel may need a moment more to let go of them."""
        for top in self.tops:
            until = time.monotonic() + DEADLINE_S
            while top.exists():
                for directory, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(directory)
                if top.exists():
                    assert time.monotonic() < until, f"{top} cannot be removed: something still runs in it"
                    time.sleep(0.01)


@contextmanager
def real_cgroups() -> Iterator[RealCgroups]:
    made = RealCgroups(f"gs-{os.getpid()}")
    try:
        yield made
    finally:
        made.remove()
