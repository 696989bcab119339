"""Finds containers that libgpushare does not limit, says so, and ends their processes where `libgpushare.unlimited` is end.

Whether a program loads the library is decided in its container: one for musl, linked statically or in a chroot
does not. But the driver names every process on a GPU, and the library gives each a slot of `usage` before its context:

    no slot            the process computes by the driver, and is not limited
    above the limit    by the driver alone, whatever the container writes into its `usage`
    unknown functions  the library says that it has let the program have some

A slot counts as long as a process holds its lock. A tenant who makes up slots hides a process from the first rule, not from
the second. Graphics processes need no slot: the library limits none. A share that is made smaller may have what it is
charged while the resize lasts. What was found is believed once it is there for SETTLED_S: a look that finds something new
asks for more rounds of usage sampling, and nothing here reads the driver itself.

State owned: since when which container and process is found, what is wrong with a container now, and which problems
its pod has an Event of.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import MOST_SLOTS, GpuLimits, Slot
from gpushare_agent.agent.isolation.gpushare.observed import TIMEOUT_S
from gpushare_agent.agent.isolation.part import IsolationHost
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import Reconciler
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import ProcessKind, ProcessSample, UsageRound

SETTLED_S = 5.0
"""And two looks are half as far apart at least: a round comes each second while the use is read."""
PROCESS_BYTES = 16 * MIB
"""What each process may have more than the library counts: NVML's granule, and a pool's rest (14 MiB on an H200)."""
CODE_BYTES = 128 * MIB
"""What a container may: code that the driver loads when the share is full is counted, and not refused."""
ENDED_BYTES = 1024 * MIB
"""Above the limit by more, a container's processes are ended although all have a slot."""
NO_LIBRARY = (
    "a program uses the GPU without libgpushare: it is static, of musl (Alpine), of 32 bits, in a chroot, older than the"
    " isolation, or computes by OpenCL. Use an image with glibc, isolation gpushare+driver or a whole GPU; create an older"
    " pod again"
)
ABOVE = (
    "its processes have more memory of a GPU than its limit: a program takes it past libgpushare, as by Vulkan, OpenGL or"
    " dlmopen. Use isolation gpushare+driver, or a whole GPU"
)
UNKNOWN = "a program uses functions of CUDA that this libgpushare does not know, nor limit. Update the agent"


class Seen(Struct):
    """A container's processes on its limited GPUs in one round. `excess_bytes` is what it has above what it may have, of
    the GPU where that is most."""

    pids: set[int] = field(default_factory=set)
    computing: set[int] = field(default_factory=set)
    excess_bytes: int = 0


def seen_in(
    usage: UsageRound,
    shares: Mapping[ContainerKey, Sequence[GpuLimits]],
    share_of: Callable[[ContainerKey], ContainerKey] = lambda key: key,
) -> dict[ContainerKey, Seen]:
    """Those with a process. One without memory is in no list of the driver's: it may have encoded video, or has ended."""
    on_gpu: dict[tuple[ContainerKey, GpuUuid], list[ProcessSample]] = {}
    by_pid = {uuid: {one.pid: one for one in gpu.processes or ()} for uuid, gpu in usage.gpus.items()}
    for (key, uuid), use in usage.containers.items():
        listed = [one for pid in use.pids if (one := by_pid[uuid][pid]).memory_bytes is not None]
        on_gpu.setdefault((share_of(key), uuid), []).extend(listed)
    found: dict[ContainerKey, Seen] = {}
    for (key, uuid), processes in on_gpu.items():
        limit = next((one.memory_bytes for one in shares.get(key, ()) if one.uuid == uuid), None)
        if limit is None or not processes:
            continue
        seen = found.setdefault(key, Seen())
        seen.pids.update(one.pid for one in processes)
        seen.computing.update(one.pid for one in processes if one.kind is not ProcessKind.GRAPHICS)
        used = sum(one.memory_bytes or 0 for one in processes)
        seen.excess_bytes = max(seen.excess_bytes, used - limit - CODE_BYTES - PROCESS_BYTES * len(processes))
    return found


def problems_in(seen: Seen, own_pids: Mapping[int, int], slots: Sequence[Slot] | None) -> dict[str, Collection[int]]:
    """What is wrong with a container, each with the host PIDs of the processes that may be ended for it. `own_pids` are of
    those that live; `slots` is None where they cannot be read."""
    found: dict[str, Collection[int]] = {}
    computing = {pid: own for pid in seen.computing if (own := own_pids.get(pid)) is not None}
    with_slot = Counter(pid for pid, _ in slots or ())
    # More than one process of a PID are in several PID namespaces, as of the containers that use one claim. With all slots
    # taken the library refuses the next process its context.
    if slots is not None and len(slots) < MOST_SLOTS and Counter(computing.values()) - with_slot:
        found[NO_LIBRARY] = [pid for pid, own in computing.items() if own not in with_slot]
    elif seen.excess_bytes > 0:
        found[ABOVE] = seen.pids & own_pids.keys() if seen.excess_bytes > ENDED_BYTES else ()
    if any(unhooked for _, unhooked in slots or ()):
        found[UNKNOWN] = ()
    return found


_Finding = tuple[ContainerKey, str, int, int]
"""A container and what is wrong; a process to be ended for it, and its start, or 0."""


class UnlimitedContainers(Struct, kw_only=True, eq=False):
    """Call `run` once. `shares` are the containers and claims under this isolation."""

    files: GpushareFiles
    host: IsolationHost
    shares: Callable[[], Mapping[ContainerKey, Sequence[GpuLimits]]]
    request_usage: Callable[[], None]
    thread: DaemonThread
    clock: Callable[[], float] = time.monotonic
    _usage: UsageRound | None = None
    _since: dict[_Finding, float] = field(default_factory=dict)
    _problems: dict[ContainerKey, str] = field(default_factory=dict)
    _warned: set[tuple[ContainerKey, str]] = field(default_factory=set)
    _reconciler: Reconciler = field(default_factory=Reconciler)

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """For UsageSampling.subscribe."""
        if usage is not None:  # else the last round would count as two
            self._usage = usage
            self._reconciler.request()

    def problem(self, key: ContainerKey) -> str:
        """Why the share of an allocation is not limited, empty where nothing was found."""
        return self._problems.get(self.host.share_of(key), "") if self._problems else ""

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._reconciler.run(self.look, lambda: None, pause_s=SETTLED_S / 2)

    async def look(self) -> None:
        """Looks at the last round. What cannot be read now is looked at after the next one."""
        shares = self.shares()
        seen = seen_in(self._usage, self._charged(shares), self.host.share_of) if self._usage is not None else {}
        try:
            found = await self._findings(seen) if seen else set()
        except AgentError:
            return
        now = self.clock()
        self._since = {one: self._since.get(one, now) for one in found}
        settled = sorted(one for one, at in self._since.items() if now - at >= SETTLED_S)
        if len(settled) < len(found):
            self.request_usage()  # rounds are rare while nobody reads the use
        self._problems = {key: why for key, why, _, _ in settled}
        self._warned = {one for one in self._warned if one[0] in shares}
        for key, why, pid, started in settled:
            if pid:
                await self._end(key, why, pid, started)
            elif (key, why) not in self._warned:
                self._warned.add((key, why))
                self.host.warn_of(key, "ShareNotLimited", f"is not limited: {why}")

    async def _findings(self, seen: Mapping[ContainerKey, Seen]) -> set[_Finding]:
        """Raises Unavailable."""
        pids, cgroups, found = {pid for one in seen.values() for pid in one.pids}, self.host.cgroups, set[_Finding]()
        inner, started = await cgroups.namespace_pids_in_thread(pids), await cgroups.started_in_thread(pids)
        slots = await self.thread.call(lambda: {key: self.files.slots(key) for key in seen}, "reading slots", TIMEOUT_S)
        own_pids = {pid: (pid, *inner[pid])[-1] for pid in inner.keys() & started}
        ends = self.host.node.settings.libgpushare.unlimited == "end"
        for key, one in seen.items():
            for why, ended in problems_in(one, own_pids, slots[key]).items():
                found |= {(key, why, 0, 0), *((key, why, pid, started[pid]) for pid in ended if ends)}
        return found

    def _charged(self, shares: Mapping[ContainerKey, Sequence[GpuLimits]]) -> dict[ContainerKey, Sequence[GpuLimits]]:
        """A share that becomes smaller may have what it is charged, and no more: the tenant says when it is over."""
        found = dict(shares)
        for part, resized in self.host.node.cache.resized.items():
            charged, target, key = resized.charged.memory, resized.target.memory, self.host.share_of(part)
            found[key] = [
                replace(one, memory_bytes=one.memory_bytes * charged // max(target, 1))
                if one.uuid == resized.gpu and one.memory_bytes is not None and charged > target
                else one
                for one in found.get(key, ())
            ]
        return found

    async def _end(self, key: ContainerKey, why: str, pid: int, started: int) -> None:
        pods = {pod.uid for pod in self.host.node.claim_pods.using(key.pod_uid)}
        try:
            if await self.host.cgroups.end_in_thread(pid, started, pods):
                self.host.warn_of(key, "UnlimitedProcessEnded", f"had a process ended (libgpushare.unlimited): {why}")
        except AgentError as e:
            self.host.warn_of(key, "ShareNotLimited", f"is not limited, and {e}")
