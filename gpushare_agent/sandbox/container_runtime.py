"""Pretended containers: they have IDs, start and exit times, an exit code and a cgroup, and run nothing.

State owned: the containers, and the tree `kubepods/burstable/pod<uid>/<id>/` with `cgroup.procs` and `cgroup.events` of
cgroup v2. Containers live on while the kubelet is stopped, as real ones do.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.pod_manifest import timestamp

_FIRST_PID = 5_000_000
"""Above the kernel's largest PID (4,194,304): no pretended process can be mistaken for a real one."""
KILLED, TERMINATED = 137, 143


@dataclass(slots=True, kw_only=True)
class Container:
    """One run of one container. `exit_code` is None while its process lives."""

    id: str
    pod_uid: str
    name: str
    started_at: str
    ignore_term_s: float
    finished_at: str = ""
    exit_code: int | None = None
    cgroup: Path | None = None

    @property
    def is_running(self) -> bool:
        return self.exit_code is None


class ContainerRuntime:
    """Synchronous; exits happen by the loop's timers."""

    def __init__(self, cgroup_root: Path, signal: ChangeSignal) -> None:
        self._root = cgroup_root
        self._signal = signal
        self._containers: dict[tuple[str, str], Container] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pod_signals: dict[str, ChangeSignal] = {}
        self._started = 0
        (cgroup_root / "kubepods" / "burstable").mkdir(parents=True, exist_ok=True)

    def find(self, pod_uid: str, name: str) -> Container | None:
        """The newest run."""
        return self._containers.get((pod_uid, name))

    def is_running(self, pod_uid: str, name: str) -> bool:
        container = self.find(pod_uid, name)
        return container is not None and container.is_running

    def signal_of(self, pod_uid: str) -> ChangeSignal:
        """Wakes up for this pod's containers only: a hundred pod workers need not look after every call of the node."""
        return self._pod_signals.setdefault(pod_uid, ChangeSignal())

    def pods(self) -> set[str]:
        return {uid for uid, _ in self._containers}

    def living(self, pod_uid: str) -> list[Container]:
        return [c for (uid, _), c in sorted(self._containers.items()) if uid == pod_uid and c.is_running]

    def start(self, pod_uid: str, name: str, *, run_s: float | None, ignore_term_s: float) -> Container:
        """`run_s` is the time after which it ends well, None for never; with 0 it has ended at once."""
        self._started += 1
        identity = hashlib.sha256(f"{pod_uid}/{name}/{self._started}".encode()).hexdigest()
        container = Container(
            id=identity, pod_uid=pod_uid, name=name, started_at=timestamp(), ignore_term_s=ignore_term_s
        )
        self._containers[pod_uid, name] = container
        container.cgroup = self._make_cgroup(container)
        if run_s is not None and run_s <= 0:
            self._exit(container, 0)
        elif run_s is not None:
            self._exit_later(container, run_s, 0)
        self._notify(container)
        return container

    def stop(self, container: Container, grace_s: float) -> None:
        """TERM, and KILL after the grace period; returns before the process has gone."""
        if not container.is_running:
            return
        if container.ignore_term_s <= 0:
            self._exit(container, TERMINATED)
        elif container.ignore_term_s >= grace_s:
            self._exit_later(container, grace_s, KILLED)
        else:
            self._exit_later(container, container.ignore_term_s, TERMINATED)

    def kill(self, container: Container) -> None:
        """Ends the process as a crash would."""
        if container.is_running:
            self._exit(container, KILLED)

    def forget(self, pod_uid: str) -> None:
        """Drops the ended containers of a pod."""
        for key in [k for k, c in self._containers.items() if k[0] == pod_uid and not c.is_running]:
            del self._containers[key]
        if not any(uid == pod_uid for uid, _ in self._containers):
            self._pod_signals.pop(pod_uid, None)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def _exit_later(self, container: Container, delay_s: float, code: int) -> None:
        if (timer := self._timers.pop(container.id, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[container.id] = loop.call_later(delay_s, self._exit, container, code)

    def _exit(self, container: Container, code: int) -> None:
        if (timer := self._timers.pop(container.id, None)) is not None:
            timer.cancel()
        container.exit_code, container.finished_at = code, timestamp()
        if container.cgroup is not None:
            shutil.rmtree(container.cgroup, ignore_errors=True)
            if not any(container.cgroup.parent.iterdir()):
                container.cgroup.parent.rmdir()
        self._notify(container)

    def _notify(self, container: Container) -> None:
        self.signal_of(container.pod_uid).notify()
        self._signal.notify()

    def _make_cgroup(self, container: Container) -> Path:
        path = self._root / "kubepods" / "burstable" / f"pod{container.pod_uid}" / container.id
        path.mkdir(parents=True)
        (path / "cgroup.procs").write_text(f"{_FIRST_PID + self._started}\n")
        (path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        return path
