"""The processes of this machine as /proc shows them, and a book of those that belong to containers, for after a crash.

Where no cgroup holds a container's processes together (cgroup_files.py), a sandbox that is killed leaves those behind that
outlive their first process. The book names them, and the next sandbox ends them: by PID and start time, of the same boot and
PID namespace, so that a process which was given the PID later is never met. State owned: the file. Format of /proc: proc(5).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger(__name__)

_END_TIMEOUT_S = 1.0
_LOOKS = 50
"""Enough for processes that fork while they are being stopped."""


@dataclass(frozen=True, slots=True)
class Process:
    parent: int
    session: int
    started: int
    """In clock ticks since the boot: with the PID it names a process for good."""


def read_process(pid: int) -> Process | None:
    """None where it is gone, or dead and not yet waited for."""
    try:
        fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return Process(parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def read_processes() -> dict[int, Process]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def descendants(pids: Iterable[int], processes: Mapping[int, Process]) -> dict[int, int]:
    """Those of `pids` that are no key of it themselves, each with the one of `pids` that it comes from."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    origins = {pid: pid for pid in pids}
    pending = list(origins)
    given = set(origins)
    while pending:
        parent = pending.pop()
        for pid in children.get(parent, ()):
            if pid not in origins:
                origins[pid] = origins[parent]
                pending.append(pid)
    return {pid: origin for pid, origin in origins.items() if pid not in given}


def replace_file(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


# --- the book ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Book:
    members: dict[int, int]
    """PID and start."""
    sessions: frozenset[int]
    """Those whose leader was a container's process: all in them belong to it."""


def write_book(path: Path, members: Mapping[int, int], sessions: Iterable[int]) -> None:
    owner = read_process(os.getpid())
    replace_file(path, json.dumps({
        "machine": _machine(), "owner": [os.getpid(), owner.started if owner is not None else 0],
        "members": sorted(members.items()), "sessions": sorted(sessions),
    }))  # fmt: skip


def end_recorded(path: Path) -> int:
    """Kills, blocking for a moment, what a dead sandbox left: how many. Nothing where its writer lives.

    Before anything is killed all of it is stopped: whoever forks meanwhile is found in the next look, and the number of a
    session stays in use as long as one of its processes lives, so none of them can be taken for another.
    """
    book = _read_book(path)
    if book is None:
        return 0
    held: dict[int, int] = {}
    try:
        for _ in range(_LOOKS):
            if not _hold(_left_behind(book), held):
                break
        for descriptor in held.values():
            _send(descriptor, signal.SIGKILL)
        _wait_gone(held)
    finally:
        for descriptor in held.values():
            os.close(descriptor)
    if held:
        log.info("processes_of_a_dead_sandbox_killed", book=str(path), pids=sorted(held))
    return len(held)


def _left_behind(book: _Book) -> dict[int, Process]:
    """Its members that live, their descendants, and the sessions that a living member proves to be the same.

    This process and its ancestors are left out, with what else those have started: a person may start the next sandbox
    from a shell that `exec` has put into a container of the dead one.
    """
    processes = read_processes()
    spared = _line_of(os.getpid(), processes)
    known = {pid for pid, started in book.members.items() if pid in processes and processes[pid].started == started}
    sessions = {processes[pid].session for pid in known} & book.sessions - {processes[pid].session for pid in spared}
    known |= {pid for pid, process in processes.items() if process.session in sessions}
    known -= spared
    found = known | descendants(known, processes).keys()
    return {pid: processes[pid] for pid in found - spared}


def _line_of(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """The process and its ancestors."""
    line: set[int] = set()
    while pid in processes and pid not in line:
        line.add(pid)
        pid = processes[pid].parent
    return line


def _hold(found: Mapping[int, Process], held: dict[int, int]) -> bool:
    """Stops those that are new, and keeps a descriptor of each, which no later process of that PID can answer to."""
    is_any = False
    for pid in sorted(found.keys() - held.keys()):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # gone meanwhile
            continue
        now = read_process(pid)
        if now is None or now.started != found[pid].started or not _send(descriptor, signal.SIGSTOP):
            os.close(descriptor)
            continue
        held[pid] = descriptor
        is_any = True
    return is_any


def _send(descriptor: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, number)
    except OSError:  # gone, or another user's by now
        return False
    return True


def _wait_gone(held: Mapping[int, int]) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    for descriptor in held.values():
        waiter = select.poll()
        waiter.register(descriptor, select.POLLIN)
        waiter.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _read_book(path: Path) -> _Book | None:
    """None where there is none of ours that still says something. What cannot be read names nobody."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(file) as text, contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        raw: dict[str, Any] = json.load(text)
        pid, started = raw["owner"]
        owner = read_process(pid)
        is_ours = os.fstat(file).st_uid == os.geteuid() and raw["machine"] == _machine()
        if is_ours and (owner is None or owner.started != started):
            return _Book(members=dict(raw["members"]), sessions=frozenset(raw["sessions"]))
    return None


@functools.cache
def _machine() -> str:
    """Start times and PIDs mean the same in one boot and one PID namespace only."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino:x}"
