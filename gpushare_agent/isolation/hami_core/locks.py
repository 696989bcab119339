"""Frees the locks of HAMi-core's shared region that a killed process left taken.

Without it the container's next CUDA processes wait for minutes in cuInit (isolation/decisions/hami_core_locks.py). Who may
hold a lock is decided by the processes that the kernel has in the container's cgroup; an agent that cannot see them, without
the host's PID namespace, waits longer. Processes that wait already look again each second, as the library is built here.

State owned: since when each lock was seen taken, and the containers for which that was logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.isolation.decisions.hami_core_locks import Held, LockName, held_locks, is_left
from gpushare_agent.isolation.decisions.hami_core_region import free_lock_edit
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.runtime.cgroups import Cgroups

log = structlog.get_logger(__name__)

ContainerOfPod = tuple[str | None, PodUid]
"""The runtime's ID, None while it is not known, and the pod's UID."""
TIMEOUT_S = 5.0
PERIOD_S = 2.0


class Pods(Protocol):
    def get(self, uid: PodUid) -> Pod | None: ...


class LockWatch:
    """`run` once. `is_in_use` is whether the pod's isolation is hami-core; `clock` gives monotonic seconds; `users` are the
    containers that use the share, where it is a claim's and not one container's."""

    def __init__(
        self,
        *,
        files: HamiCoreFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: Pods,
        is_in_use: Callable[[Pod], bool],
        cgroups: Cgroups,
        clock: Callable[[], float],
        users: Callable[[ContainerKey], Sequence[ContainerOfPod]] | None = None,
    ) -> None:
        self._files = files
        self._allocations = allocations
        self._pods = pods
        self._is_in_use = is_in_use
        self._cgroups = cgroups
        self._clock = clock
        self._users = users or (lambda key: ())
        self._thread = DaemonThread("region-locks", advice="Check the disk of the setting hami_core.directory.")
        self._held: dict[ContainerKey, dict[LockName, Held]] = {}
        self._logged: set[ContainerKey] = set()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(PERIOD_S)

    async def poll(self) -> None:
        """Reads the regions of all shares once. A file that cannot be used is passed over: its tenant may have done it."""
        shares = {
            key: pod
            for key, allocation in self._allocations().items()
            if allocation.is_limited and (pod := self._pods.get(key.pod_uid)) is not None and self._is_in_use(pod)
        }
        self._held = {key: held for key, held in self._held.items() if key in shares}
        self._logged &= shares.keys()
        if not shares:
            return
        before = {key: self._held.get(key, {}) for key in sorted(shares)}
        try:
            # All in one call: to change threads costs as much as to read a region.
            found = await self._thread.call(partial(self._read_all, before, self._clock()), "reading locks", TIMEOUT_S)
        except AgentError as e:
            log.debug("regions_not_read", error=str(e))
            return
        self._held |= found
        for key in [key for key, held in found.items() if held]:
            try:
                await self._free_left(key, shares[key], found[key])
            except AgentError as e:
                log.debug("region_not_read", pod_uid=key.pod_uid, container=key.container, error=str(e))

    async def _free_left(self, key: ContainerKey, pod: Pod, held: Mapping[LockName, Held]) -> None:
        alive = await self._alive(key, pod) if LockName.POSTINIT in held else None
        for name, one in held.items():
            if is_left(name, one, self._clock(), alive):
                await self._thread.call(partial(self._free, key, name), f"freeing a lock of {key.container}", TIMEOUT_S)
                del self._held[key]
                if key not in self._logged:
                    self._logged.add(key)
                    log.warning(
                        "hami_core_lock_freed", pod_uid=key.pod_uid, container=key.container, lock=name.value,
                        why="a process of the container was killed in cuInit", then="not logged again for it",
                    )  # fmt: skip
                return

    async def _alive(self, key: ContainerKey, pod: Pod) -> set[int] | None:
        """The PIDs of the container's processes in every namespace; None where the kernel does not show them."""
        containers = self._users(key) or [(pod.container_ids.get(key.container), key.pod_uid)]
        known = [(container_id, uid) for container_id, uid in containers if container_id is not None]
        if len(known) < len(containers):
            return None
        places = await self._cgroups.find_many_in_thread(known)
        processes = await self._cgroups.processes_round_in_thread(places.values())
        pids = [pid for one in processes.values() if one is not None for pid in one.pids]
        if not pids:  # none at all: those of another PID namespace are left out
            return None
        inside = await self._cgroups.namespace_pids_in_thread(pids)
        return {pid for of_one in inside.values() for pid in of_one} | set(pids)

    def _read_all(
        self, before: Mapping[ContainerKey, Mapping[LockName, Held]], now: float
    ) -> dict[ContainerKey, dict[LockName, Held]]:
        """Without those that cannot be read."""
        found = {}
        for key, known in before.items():
            try:
                found[key] = self._read(key, known, now)
            except AgentError as e:
                log.debug("region_not_read", pod_uid=key.pod_uid, container=key.container, error=str(e))
        return found

    def _read(self, key: ContainerKey, before: Mapping[LockName, Held], now: float) -> dict[LockName, Held]:
        with self._files.opened_region(key) as region:
            head = region.head() if region is not None else None
            if region is None or head is None:
                return {}
            tail = region.tail()
            if head.lock.value and tail.postinit_lock.value:
                return {}
            return held_locks(head, tail, region.slots(tail.slots), before, now)

    def _free(self, key: ContainerKey, name: LockName) -> None:
        with self._files.opened_region(key) as region:
            if region is not None:
                region.write(*free_lock_edit(is_postinit=name is LockName.POSTINIT))
