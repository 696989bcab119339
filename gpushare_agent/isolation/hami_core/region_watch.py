"""Repairs HAMi-core's shared regions by what the kernel says of the containers' processes: frees locks that a killed process
left taken, and writes the host PIDs that processes did not find.

Without it the container's next CUDA processes wait for minutes in cuInit, and a process that starts while another one of its
GPU ends has no limit of compute (isolation/hami_core/repairs.py).
An agent that cannot see the containers' processes, without the host's PID namespace, frees locks later and writes no PID.
Processes that wait for a lock already look again each second, as the library is built here.

State owned: since when each lock was seen taken, the processes to which a host PID was given, for which PIDs the kernel was
asked last, and the containers for which something was logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.hami_core.region_format import MAX_PROCESSES, free_lock_edit, host_pid_edit
from gpushare_agent.isolation.hami_core.repairs import (
    Held,
    LockName,
    SlotPids,
    can_correct,
    held_locks,
    is_left,
    right_host_pids,
)
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.runtime.cgroups import Cgroups

if TYPE_CHECKING:
    from gpushare_agent.admission.claim_pods import ClaimPods

log = structlog.get_logger(__name__)

ContainerOfPod = tuple[str | None, PodUid]
"""The runtime's ID, None while it is not known, and the pod's UID."""
TIMEOUT_S = 5.0
PERIOD_S = 2.0
ASK_AGAIN_S = 30.0
"""For a slot without a host PID whose process the kernel did not have: it ended, or its PID is another one's by now."""


class _Seen(Struct, frozen=True, kw_only=True):
    """One region at one poll."""

    held: Mapping[LockName, Held]
    pids: tuple[SlotPids, ...]


class RegionWatch(Struct, kw_only=True, eq=False):
    """`run` once. `is_in_use` is whether the pod's isolation is hami-core; `clock` gives monotonic seconds; `users` are the
    containers that use the share, where it is a claim's and not one container's; `module` is the driver's kernel module."""

    files: HamiCoreFiles
    allocations: Callable[[], Mapping[ContainerKey, Allocation]]
    pods: ClaimPods
    is_in_use: Callable[[Pod], bool]
    cgroups: Cgroups
    clock: Callable[[], float]
    users: Callable[[ContainerKey], Sequence[ContainerOfPod]] = lambda key: ()
    module: KernelModule | None = None
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "region-watch", advice="Check the disk of the setting hami_core.directory."
        )
    )
    _held: dict[ContainerKey, Mapping[LockName, Held]] = field(default_factory=dict)
    _given: dict[ContainerKey, set[int]] = field(default_factory=dict)
    _asked: dict[ContainerKey, tuple[frozenset[SlotPids], float]] = field(default_factory=dict)
    _logged: set[tuple[str, ContainerKey]] = field(default_factory=set)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(PERIOD_S)

    async def poll(self) -> None:
        """Reads the regions of all shares once. A file that cannot be used is skipped: its tenant may have done it."""
        shares = {
            key: pod
            for key, allocation in self.allocations().items()
            if allocation.is_limited and (pod := self.pods.get(key.pod_uid)) is not None and self.is_in_use(pod)
        }
        state: dict[ContainerKey, Any]
        for state in (self._held, self._given, self._asked):
            for key in [key for key in state if key not in shares]:
                del state[key]
        self._logged = {(event, key) for event, key in self._logged if key in shares}
        if not shares:
            return
        try:
            # All in one call: to change threads costs as much as to read a region.
            found = await self._thread.call(
                partial(self._read_all, sorted(shares), self.clock()), "reading shared regions", TIMEOUT_S
            )
        except AgentError as e:
            log.debug("regions_not_read", error=str(e))
            return
        self._held |= {key: seen.held for key, seen in found.items()}
        for key, given in self._given.items():
            # A region that could not be read now says nothing of who has left.
            given &= {pid for pid, _ in found[key].pids} if key in found else given
        for key in [key for key, seen in found.items() if seen.held]:
            try:
                await self._free_left(key, shares[key], found[key].held)
            except AgentError as e:
                log.debug("region_not_read", pod_uid=key.pod_uid, container=key.container, error=str(e))
        if can_correct(self.module):
            await self._correct_host_pids(shares, {key: frozenset(seen.pids) for key, seen in found.items()})

    async def _free_left(self, key: ContainerKey, pod: Pod, held: Mapping[LockName, Held]) -> None:
        # The other lock has its owner's number, or none: nobody has to be asked.
        alive = await self._alive(key, pod) if LockName.POSTINIT in held else None
        for name, one in held.items():
            if is_left(name, one, self.clock(), alive):
                await self._thread.call(partial(self._free, key, name), f"freeing a lock of {key.container}", TIMEOUT_S)
                # Seen anew: another process may take it at once, and has all of its time.
                del self._held[key]
                if self._is_first("hami_core_lock_freed", key):
                    log.warning(
                        "hami_core_lock_freed", pod_uid=key.pod_uid, container=key.container, lock=name.value,
                        why="a process of the container was killed in cuInit", then="not logged again for it",
                    )  # fmt: skip
                return

    async def _alive(self, key: ContainerKey, pod: Pod) -> set[int] | None:
        """The PIDs of the container's processes in every namespace; None where the kernel does not show them."""
        inside = (await self._processes({key: pod})).get(key)
        # An empty list is no proof that all have ended: the agent may be in a PID namespace of its own.
        return None if not inside else {pid for of_one in inside.values() for pid in of_one} | set(inside)

    async def _correct_host_pids(
        self, shares: Mapping[ContainerKey, Pod], found: Mapping[ContainerKey, frozenset[SlotPids]]
    ) -> None:
        """Writes the host PIDs, once more after a change, for the library moves slots: what was written a moment late is put
        right then."""
        now = self.clock()
        due = {key: shares[key] for key, pids in found.items() if self._is_due(key, pids, now)}
        try:
            processes = await self._processes(due)
        except AgentError as e:
            log.debug("processes_not_read", error=str(e))
            return
        for key, inside in processes.items():
            # Also where nothing was found: the kernel is not asked again until the region changes, or half a minute later.
            self._asked[key] = (found[key], now)
            if not inside:
                continue
            try:
                given = await self._thread.call(
                    partial(self._write_host_pids, key, inside), f"writing host PIDs of {key.container}", TIMEOUT_S
                )
            except AgentError as e:
                log.debug("region_not_read", pod_uid=key.pod_uid, container=key.container, error=str(e))
                continue
            self._given.setdefault(key, set()).update(given)
            if given and self._is_first("hami_core_host_pid_written", key):
                log.info(
                    "hami_core_host_pid_written", pod_uid=key.pod_uid, container=key.container,
                    why="a process of the container did not find it in cuInit", then="not logged again for it",
                )  # fmt: skip

    def _is_due(self, key: ContainerKey, pids: frozenset[SlotPids], now: float) -> bool:
        asked, at = self._asked.get(key, (frozenset(), now))
        return pids != asked or (now - at >= ASK_AGAIN_S and any(not host_pid for _, host_pid in pids))

    async def _processes(self, pods: Mapping[ContainerKey, Pod]) -> dict[ContainerKey, Mapping[int, tuple[int, ...]]]:
        """The PIDs of containers whose ID is known, in their namespaces by the host's; none at all where the kernel does not
        show them all, or they are more than a region has slots. Raises Unavailable."""
        containers = {
            key: self.users(key) or [(pod.container_ids.get(key.container), key.pod_uid)] for key, pod in pods.items()
        }
        known = {key: [(i, uid) for i, uid in of_key if i is not None] for key, of_key in containers.items()}
        # All or nothing: a slot whose process is in the container that is not known would look like one that has ended.
        known = {key: of_key for key, of_key in known.items() if len(of_key) == len(containers[key])}
        if not known:
            return {}
        places = await self.cgroups.find_many_in_thread([one for of_key in known.values() for one in of_key])
        listed = await self.cgroups.processes_round_in_thread(places.values())
        pids: dict[ContainerKey, list[int]] = {}
        for key, of_key in known.items():
            read = [one for container_id, _ in of_key if (one := listed.get(container_id)) is not None]
            own = [pid for one in read for pid in one.pids]
            pids[key] = own if len(read) == len(of_key) and len(own) <= MAX_PROCESSES else []
        inside = await self.cgroups.namespace_pids_in_thread([pid for own in pids.values() for pid in own])
        return {key: {pid: inside[pid] for pid in own if pid in inside} for key, own in pids.items()}

    def _is_first(self, event: str, key: ContainerKey) -> bool:
        is_first = (event, key) not in self._logged
        self._logged.add((event, key))
        return is_first

    def _read_all(self, keys: Sequence[ContainerKey], now: float) -> dict[ContainerKey, _Seen]:
        """What is in the regions, without those that cannot be read."""
        found = {}
        for key in keys:
            try:
                found[key] = self._read(key, now)
            except AgentError as e:
                log.debug("region_not_read", pod_uid=key.pod_uid, container=key.container, error=str(e))
        return found

    def _read(self, key: ContainerKey, now: float) -> _Seen:
        with self.files.opened_region(key) as region:
            head = region.head() if region is not None else None
            if region is None or head is None:
                return _Seen(held={}, pids=())
            tail = region.tail()
            # No lock is taken: the PIDs alone are a tenth of the work of whole slots.
            if head.lock.value and tail.postinit_lock.value:
                return _Seen(held={}, pids=region.slot_pids(tail.slots))
            slots, given = region.slots(tail.slots), self._given.get(key, ())
            # One that was given its host PID may be in cuInit still: it has not written that itself.
            own = [replace(slot, host_pid=0) if slot.pid in given else slot for slot in slots]
            held = held_locks(head, tail, own, self._held.get(key, {}), now)
            return _Seen(held=held, pids=tuple((slot.pid, slot.host_pid) for slot in slots))

    def _write_host_pids(self, key: ContainerKey, inside: Mapping[int, tuple[int, ...]]) -> set[int]:
        """The PIDs of the processes that had none."""
        with self.files.opened_region(key) as region:
            if region is None or region.head() is None:
                return set()
            slots = region.slot_pids(region.tail().slots)
            right = right_host_pids(slots, inside, self.module)
            for number, host_pid in right.items():
                region.write(*host_pid_edit(number, host_pid))
        return {slots[number][0] for number in right if not slots[number][1]}

    def _free(self, key: ContainerKey, name: LockName) -> None:
        with self.files.opened_region(key) as region:
            if region is not None:
                region.write(*free_lock_edit(is_postinit=name is LockName.POSTINIT))
