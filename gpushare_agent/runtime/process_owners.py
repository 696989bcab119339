"""The owners of processes: many PIDs at once, from `/proc/<pid>/cgroup`, for the sampling of usage.

The file is read anew each time: it costs as much as reading the start time that would show whether a cached answer is still
this process's (8 µs each, measured), and it is right after a PID was given to another process or a process was moved.
What costs more, parsing the text, is done once for each text: the processes of a container share it.

Not for one peer of a socket: runtime/cgroups.py. State owned: the texts of the last read with what they mean, and the
owners that it found, for a process that has ended while the driver still counts its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.runtime.cgroup_paths import NOBODY, PeerIdentity, parse_proc_cgroup
from gpushare_agent.runtime.cgroups import read_own_text, read_proc_text

READ_TIMEOUT_S = 2.0
MAX_PROCESSES = 8_192
"""Read in one round: 16 GPUs with 48 MPS clients each are a tenth of it. Further ones belong to no container."""


class ProcessOwners:
    """`proc` is the host's /proc: PIDs of another PID namespace are not in it, and belong to no container."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own_text = ""
        self._meanings: dict[str, PeerIdentity] = {}
        self._owners: dict[int, PeerIdentity] = {}
        self._thread = DaemonThread("process-owners", advice=f"Check {proc}; it is read again.")

    async def identify(self, pids: Collection[int]) -> Mapping[int, PeerIdentity]:
        """All of `pids`, in one call of a thread. Raises Unavailable where /proc does not answer in time."""
        if not pids:  # an idle node starts no thread
            self._owners = {}
            return {}
        return await self._thread.call(
            partial(self.read, tuple(pids)), f"reading the cgroups of {len(pids)} processes", READ_TIMEOUT_S
        )

    def read(self, pids: Collection[int]) -> Mapping[int, PeerIdentity]:
        """The same, blocking; from one thread at a time."""
        before, self._owners = self._owners, {}
        old_meanings, self._meanings = self._meanings, {}
        self._own_text = self._own_text or read_own_text(self._proc)
        for pid in sorted(pids)[:MAX_PROCESSES]:
            try:
                text = read_proc_text(self._proc / str(pid) / "cgroup")
            except OSError:
                self._owners[pid] = before.get(pid, NOBODY)
                continue
            meaning = self._meanings.get(text) or old_meanings.get(text)
            if meaning is None:
                meaning = parse_proc_cgroup(text, own_text=self._own_text) or NOBODY
            self._meanings[text] = self._owners[pid] = meaning
        return {pid: self._owners.get(pid, NOBODY) for pid in pids}
