"""A tree of plain files in the place of cgroups, where the machine lets this user make none.

The files have the shape of cgroup v2, beside a pretended /proc that tells an agent whose a process is. Nobody is moved by
writing a number into a file: membership is followed by looking at the processes of the machine, every half second and at
each question. Who belongs to a container: what was attached, its descendants as long as they can be seen as such, and the
first process's session. A process that leaves the session and loses its parent within half a second gets away.

State owned: `<root>`, `<proc>`, and who is in which cgroup. Format of the files: cgroups(7), proc(5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

LOOK_INTERVAL_S = 0.5
_PODS = Path("kubepods", "burstable")


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    session: int
    started: int
    """In clock ticks since the boot: with the PID it names a process for good."""


class FileCgroups:
    """`root` and `proc_root` are made anew."""

    def __init__(self, root: Path, proc_root: Path) -> None:
        self.root = root
        self.proc_root = proc_root
        self._members: dict[Path, dict[int, int]] = {}
        self._sessions: dict[int, Path] = {}
        self._timer: asyncio.TimerHandle | None = None
        for path in (root, proc_root):
            shutil.rmtree(path, ignore_errors=True)
        (root / _PODS).mkdir(parents=True)
        (root / "cgroup.controllers").write_text("\n")
        for name in ("self", "1"):
            (proc_root / name).mkdir(parents=True)
            (proc_root / name / "cgroup").write_text("0::/\n")

    def add(self, pod_uid: str, container_id: str) -> Path:
        path = self.root / _PODS / f"pod{pod_uid}" / container_id
        path.mkdir(parents=True)
        self._members[path] = {}
        self._write(path)
        return path

    def attach(self, cgroup: Path, pid: int) -> None:
        if cgroup not in self._members:
            raise FileNotFoundError(f"no cgroup {cgroup}")
        process = _read_process(pid)
        if process is None:
            raise ProcessLookupError(f"no process {pid}")
        for other, members in self._members.items():
            if members.pop(pid, None) is not None:
                self._write(other)
        self._members[cgroup][pid] = process.started
        if process.session == pid:
            self._sessions[pid] = cgroup
        self._show(cgroup, pid)
        self._write(cgroup)
        self._look_later()

    def pids(self, cgroup: Path) -> list[int]:
        self._look()
        return sorted(self._members.get(cgroup, ()))

    def kill(self, cgroup: Path) -> None:
        for pid in self.pids(cgroup):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, cgroup: Path) -> bool:
        if self.pids(cgroup):
            return False
        self._members.pop(cgroup, None)
        self._sessions = {sid: path for sid, path in self._sessions.items() if path != cgroup}
        shutil.rmtree(cgroup, ignore_errors=True)
        with contextlib.suppress(OSError):  # other containers of the pod are in it
            cgroup.parent.rmdir()
        return True

    def close(self) -> bool:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for cgroup in list(self._members):
            self.kill(cgroup)
            self.remove(cgroup)
        if self._members:
            return False
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.proc_root, ignore_errors=True)
        return True

    # --- following the processes ---

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()
        if any(self._members.values()):
            self._look_later()

    def _look(self) -> None:
        """Who is in which cgroup now; writes what has changed."""
        if not any(self._members.values()):
            return
        processes = {pid: p for pid in _all_pids() if (p := _read_process(pid)) is not None}
        owners = {
            pid: cgroup
            for cgroup, members in self._members.items()
            for pid, started in members.items()
            if pid in processes and processes[pid].started == started
        }
        for pid, process in processes.items():
            if pid not in owners and process.session in self._sessions:
                owners[pid] = self._sessions[process.session]
        self._add_descendants(owners, processes)
        now: dict[Path, dict[int, int]] = {cgroup: {} for cgroup in self._members}
        for pid, cgroup in owners.items():
            now[cgroup][pid] = processes[pid].started
        before, self._members = self._members, now
        for cgroup, members in now.items():
            if members != before[cgroup]:
                for pid in members.keys() - before[cgroup].keys():
                    self._show(cgroup, pid)
                for pid in before[cgroup].keys() - owners.keys():
                    shutil.rmtree(self.proc_root / str(pid), ignore_errors=True)
                self._write(cgroup)

    def _add_descendants(self, owners: dict[int, Path], processes: dict[int, _Process]) -> None:
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
        pending = list(owners)
        while pending:
            parent = pending.pop()
            for pid in children.get(parent, ()):
                if pid not in owners:
                    owners[pid] = owners[parent]
                    pending.append(pid)

    def _show(self, cgroup: Path, pid: int) -> None:
        (self.proc_root / str(pid)).mkdir(exist_ok=True)
        _replace(self.proc_root / str(pid) / "cgroup", f"0::/{cgroup.relative_to(self.root)}\n")

    def _write(self, cgroup: Path) -> None:
        pids = sorted(self._members[cgroup])
        _replace(cgroup / "cgroup.procs", "".join(f"{pid}\n" for pid in pids))
        _replace(cgroup / "cgroup.events", f"populated {int(bool(pids))}\nfrozen 0\n")


def _replace(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read_process(pid: int) -> _Process | None:
    """None where it is gone, or dead and not yet waited for."""
    try:
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return _Process(parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))
