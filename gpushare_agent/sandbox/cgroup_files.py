"""A tree of plain files in the place of cgroups, where the machine lets this user make none.

The files have the shape of cgroup v2, beside a pretended /proc that tells an agent whose a process is. Nobody is moved by
writing a number into a file: membership is followed by looking at the processes of the machine, every half second and at
each question. Who belongs to a container: what was attached, its descendants as long as they can be seen as such, and the
first process's session. A process that leaves the session and loses its parent within half a second gets away.

State owned: `<root>`, `<proc>`, and who is in which cgroup, of which `<proc>/.members` tells the next sandbox if this one
is killed (process_records.py). Format of the files: cgroups(7), proc(5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

from gpushare_agent.sandbox.process_records import (
    descendants,
    end_recorded,
    read_process,
    read_processes,
    replace_file,
    write_book,
)

LOOK_INTERVAL_S = 0.5
_PODS = Path("kubepods", "burstable")


def end_leftovers(proc_root: Path) -> int:
    """Kills what a sandbox that was killed has left of its tree's processes: how many. Before its files are removed."""
    return end_recorded(_book(proc_root))


def _book(proc_root: Path) -> Path:
    return proc_root / ".members"


class FileCgroups:
    """`root` and `proc_root` are made anew, and what a dead sandbox left there is ended."""

    def __init__(self, root: Path, proc_root: Path) -> None:
        self.root = root
        self.proc_root = proc_root
        self._members: dict[Path, dict[int, int]] = {}
        self._sessions: dict[int, Path] = {}
        self._timer: asyncio.TimerHandle | None = None
        end_leftovers(proc_root)
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
        process = read_process(pid)
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
        self._record()
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
        processes = read_processes()
        owners = {
            pid: cgroup
            for cgroup, members in self._members.items()
            for pid, started in members.items()
            if pid in processes and processes[pid].started == started
        }
        for pid, process in processes.items():
            if pid not in owners and process.session in self._sessions:
                owners[pid] = self._sessions[process.session]
        owners |= {pid: owners[origin] for pid, origin in descendants(owners, processes).items()}
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
        if now != before:
            self._record()

    def _show(self, cgroup: Path, pid: int) -> None:
        (self.proc_root / str(pid)).mkdir(exist_ok=True)
        replace_file(self.proc_root / str(pid) / "cgroup", f"0::/{cgroup.relative_to(self.root)}\n")

    def _write(self, cgroup: Path) -> None:
        pids = sorted(self._members[cgroup])
        replace_file(cgroup / "cgroup.procs", "".join(f"{pid}\n" for pid in pids))
        replace_file(cgroup / "cgroup.events", f"populated {int(bool(pids))}\nfrozen 0\n")

    def _record(self) -> None:
        members = {pid: started for group in self._members.values() for pid, started in group.items()}
        write_book(_book(self.proc_root), members, self._sessions)
