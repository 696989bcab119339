"""Finds the processes of a container: its ID, its cgroup by the ID, the PIDs in the cgroup and below.

The ID becomes known a second or two after the container starts. Until then the list has all processes of its pod that are
not of another known container: too many rather than too few: the in-container library counts only processes that are in
the list, and does not limit others. The PIDs are those that the driver in use reports: the host's, or those of the
container's PID namespace. State owned: the ID and the instance of each container, its processes as the kernel listed them
last, and their PIDs in namespaces.

A claim's list has the processes of all containers that use it: of those that registered, by the ID of the kernel, and of
those that run by the pods' statuses. No process of another container of their pods is in it: each registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.runtime.cgroups import CgroupDir, CgroupProcesses, Cgroups
from gpushare_agent.core.formats.vdevice import MAX_PIDS
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.names import PodUid

log = structlog.get_logger(__name__)

Instance = tuple[ContainerKey, int]
"""A container from one of its starts to the next."""

Sharers = Callable[[ContainerKey], Mapping[ContainerKey, str] | None]
"""The containers that use a claim, with their IDs, empty where one does not run; None for the key of a container itself."""

LONG_UNKNOWN_S = 5.0
"""After a restart of the agent a container's existing list is better than its whole pod's, but only for so long."""


class _Instance(Struct, kw_only=True):
    """What is known of a container from one start to the next. `previous`: the ID of the instance before, which sources may
    still report."""

    number: int = field(default_factory=itertools.count().__next__)
    id: str | None = None
    previous: str | None = None
    unknown_since: float | None = None
    registered: dict[str, PodUid | None] = field(default_factory=dict)
    """Of a claim: the containers that registered, by ID, with their pods."""
    noted: dict[int, int] = field(default_factory=dict)
    """Processes that registered and whose cgroup does not say whose they are: when each has started."""
    listed: Sequence[CgroupProcesses] = ()
    """As of the last read; none while it is not known which cgroups are the container's own."""
    namespace_pids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By host PID, of the processes of the last read: a process keeps them, so they are read once."""


class Processes(Struct, frozen=True, kw_only=True):
    """PIDs as the driver reports them, with the instance of which they were read."""

    pids: tuple[int, ...]
    instance: object


class ContainerProcesses(Struct, eq=False):
    """`read` may be overtaken by `begin_instance`: ask `is_current` before using what it gave."""

    ids: ContainerIds
    cgroups: Cgroups
    clock: Callable[[], float]
    module: KernelModule | None = None
    sharers: Sharers = lambda key: None
    _instances: dict[ContainerKey, _Instance] = field(default_factory=dict)
    _unknown: set[ContainerKey] = field(default_factory=set)
    """Those whose ID is not known."""
    _owners: dict[str, ContainerKey] = field(default_factory=dict)
    """The others, by ID."""

    def begin_instance(self, key: ContainerKey) -> None:
        """The container is about to start, again or for the first time."""
        before = self._instances.get(key)
        self.forget([key])
        self._unknown.add(key)
        self._instances[key] = _Instance(
            # The pod's status and the runtime still report the ID of the instance that ended; its processes must not come
            # into the list of the new one.
            previous=before.id or before.previous if before is not None else None,
            unknown_since=float("-inf"),
        )

    def forget(self, keys: Iterable[ContainerKey]) -> None:
        for key in keys:
            if (instance := self._instances.pop(key, None)) is not None and instance.id is not None:
                self._owners.pop(instance.id, None)
            self._unknown.discard(key)

    def keys(self) -> Collection[ContainerKey]:
        """Those of which something is kept."""
        return self._instances.keys()

    def is_known(self, key: ContainerKey) -> bool:
        # A claim has no ID of its own: its users register, or their pods' statuses name them.
        if self.sharers(key) is not None:
            return True
        instance = self._instances.get(key)
        return instance is not None and instance.id is not None

    def is_awaited(self, key: ContainerKey) -> bool:
        """Its ID is unknown, but not for so long that the whole pod's processes are used instead of its own."""
        if self.sharers(key) is not None:
            return True
        instance = self._instances.get(key)
        if instance is None or instance.id is not None or instance.unknown_since is None:
            return False
        return self.clock() - instance.unknown_since < LONG_UNKNOWN_S

    def is_current(self, key: ContainerKey, processes: Processes) -> bool:
        # By identity: a container that was prepared again while its cgroup was read has a new instance, and the read is of
        # the old one.
        return self._instances.get(key) is processes.instance

    def note(self, key: ContainerKey, container_id: str) -> bool:
        """The container itself sent its ID, and the kernel confirmed it. False where the ID is of the instance before, which
        has ended or is ending."""
        # A process of the instance that is ending may still register.
        if container_id == self._instance(key).previous:
            return False
        self._set_id(key, container_id)
        return True

    def note_sharer(self, key: ContainerKey, container_id: str, pod_uid: PodUid | None) -> None:
        """A container that uses the claim registered, and the kernel confirmed its ID."""
        self._instance(key).registered[container_id] = pod_uid

    async def note_process(self, key: ContainerKey, pid: int) -> None:
        """It called through the container's own socket, and holds the connection; no cgroup says whose it is. Raises
        Unavailable."""
        # With the start time, because another process will have the PID one day.
        started = await self.cgroups.started_in_thread([pid])
        noted = self._instance(key).noted
        noted |= started
        if len(noted) > MAX_PIDS:
            # The oldest: a tenant may register as many processes as it starts.
            del noted[next(iter(noted))]

    def unknown(self) -> frozenset[Instance]:
        """The instances whose ID is not known yet."""
        return frozenset((key, self._instances[key].number) for key in self._unknown if self.sharers(key) is None)

    def _instance(self, key: ContainerKey) -> _Instance:
        if (known := self._instances.get(key)) is None:
            known = self._instances[key] = _Instance()
            self._unknown.add(key)
        return known

    def _set_id(self, key: ContainerKey, container_id: str | None) -> None:
        self._owners.pop(self._instances[key].id or "", None)
        self._instances[key].id = container_id
        if container_id is None:
            self._unknown.add(key)
        else:
            self._unknown.discard(key)
            self._owners[container_id] = key

    async def read_ids(self, keys: Iterable[ContainerKey] = ()) -> None:
        """Takes over the IDs of running containers, at least those that are not known of these and others. A source that
        does not answer only delays."""
        for key in keys:
            self._instance(key)
        # As they were before the await: an ID that was reported for the instance before must not reach one that began
        # meanwhile.
        instances = dict(self._instances)
        try:
            reported = await self.ids.running({key.pod_uid for key, _ in self.unknown()})
        except AgentError as e:
            log.warning("container_ids_unknown", error=str(e), then="read again")
            return
        for key, container_id in reported.items():
            instance = self._instances.get(key)
            if instance is not None and instance is instances.get(key) and container_id != instance.previous:
                self._set_id(key, container_id)

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        """The container with this ID. Raises Unavailable."""
        return self._owners.get(container_id) or await self.ids.owner_of(container_id)

    async def changed(self, keys: Iterable[ContainerKey] | None = None) -> set[ContainerKey]:
        """Of all containers, or of these, those whose processes may be others than at the last `read`. Raises
        Unavailable."""
        known_keys = self._instances if keys is None else self._instances.keys() & keys
        listed = {key: self._instances[key].listed for key in known_keys}
        known = {key: processes for key, processes in listed.items() if processes}
        # A list that was not read yet counts as changed.
        return {*(listed.keys() - known.keys()), *(await self.cgroups.changed_in_thread(known) if known else ())}

    async def read(self, keys: Collection[ContainerKey]) -> dict[ContainerKey, Processes]:
        """The processes of those whose cgroup is known now. Raises Unavailable."""
        instances = {key: self._instance(key) for key in keys}
        for instance in instances.values():
            instance.listed = ()
        now, ids = self.clock(), self._known_ids(instances)
        # Also of those with an ID, whose cgroup may be gone or not there yet.
        uids = {
            key.pod_uid
            for key, one in instances.items()
            if self.sharers(key) is None and one.unknown_since is not None and now - one.unknown_since >= LONG_UNKNOWN_S
        }
        users = [(container_id, uid) for found in ids.values() for container_id, uid in found.items()]
        # Found and read at once: each call in a thread costs as much as what is done in it.
        known, pods, read = await self.cgroups.find_and_read_in_thread(users, uids) if users or uids else ({}, {}, {})
        own = self._own_cgroups(instances, ids, known)
        rest = {key: one for key, one in instances.items() if key not in own and self.sharers(key) is None}
        cgroups = own | self._pods_cgroups(rest, pods, now)
        noted = await self._alive(instances)
        if not cgroups and not noted:
            return {}
        host_pids: dict[ContainerKey, list[int]] = {}
        for key, places in cgroups.items():
            lists = [listed for place in places if (listed := read.get(place.container_id)) is not None]
            # A cgroup that could not be read is not an empty one; a claim without a running user has none.
            if lists or not places:
                host_pids[key] = sorted({pid for listed in lists for pid in listed.pids})
                # A pod's cgroups are no stable answer: its list is read again each time until the container's own is known.
                instances[key].listed = lists if key in own else ()
        for key, pids in noted.items():
            host_pids[key] = sorted({*host_pids.get(key, ()), *pids})
        await self._read_namespace_pids(instances, host_pids)
        return {
            key: Processes(pids=self._reported(instances[key], pids), instance=instances[key])
            for key, pids in host_pids.items()
        }

    async def _alive(self, instances: Mapping[ContainerKey, _Instance]) -> dict[ContainerKey, Collection[int]]:
        """Those noted that live; the others are forgotten."""
        every = [pid for instance in instances.values() for pid in instance.noted]
        started = await self.cgroups.started_in_thread(every) if every else {}
        for instance in instances.values():
            for pid in [pid for pid, at in instance.noted.items() if started.get(pid) != at]:
                del instance.noted[pid]
        return {key: instance.noted for key, instance in instances.items() if instance.noted}

    def _reported(self, instance: _Instance, host_pids: Sequence[int]) -> tuple[int, ...]:
        known = instance.namespace_pids
        if not known:  # as with most drivers: the host's, in order already
            return tuple(host_pids)
        return tuple(sorted({n for pid in host_pids for n in reported_pids(pid, known.get(pid, ()), self.module)}))

    async def _read_namespace_pids(
        self, instances: Mapping[ContainerKey, _Instance], host_pids: Mapping[ContainerKey, Sequence[int]]
    ) -> None:
        """Reads those of processes that were not there at the last read; of each container as many as its list can hold."""
        if self.module is None or not self.module.lists_namespace_pids:
            return
        of_containers = {key: [pid for pid in pids if pid > 0][:MAX_PIDS] for key, pids in host_pids.items()}
        new = {pid for key, pids in of_containers.items() for pid in pids if pid not in instances[key].namespace_pids}
        read = await self.cgroups.namespace_pids_in_thread(new) if new else {}
        for key, pids in of_containers.items():
            before = instances[key].namespace_pids
            instances[key].namespace_pids = {
                pid: known for pid in pids if (known := read.get(pid, before.get(pid))) is not None
            }

    def _known_ids(self, instances: Mapping[ContainerKey, _Instance]) -> dict[ContainerKey, dict[str, PodUid | None]]:
        """With their pods: a container's own, and of a claim those of its users, without claims of which no user is known
        yet."""
        ids: dict[ContainerKey, dict[str, PodUid | None]] = {}
        for key, instance in instances.items():
            if sharers := self.sharers(key):
                running = {container_id: user.pod_uid for user, container_id in sharers.items() if container_id}
                ids[key] = {**instance.registered, **running}
            elif sharers is None and instance.id is not None:
                ids[key] = {instance.id: key.pod_uid}
        return ids

    def _own_cgroups(
        self,
        instances: Mapping[ContainerKey, _Instance],
        ids: Mapping[ContainerKey, Mapping[str, PodUid | None]],
        places: Mapping[str, CgroupDir],
    ) -> dict[ContainerKey, list[CgroupDir]]:
        """IDs of containers that have ended are forgotten."""
        for key, found in ids.items():
            instance = instances[key]
            for container_id in [one for one in instance.registered if one in found and one not in places]:
                del instance.registered[container_id]
            if instance.id in places:
                instance.unknown_since = None
            elif instance.id in found and self._instances.get(key) is instance:  # else it was learnt meanwhile
                self._set_id(key, None)
        is_claims = {key for key in ids if self.sharers(key) is not None}
        own = {key: [places[one] for one in found if one in places] for key, found in ids.items()}
        return {key: found for key, found in own.items() if found or key in is_claims}

    def _pods_cgroups(
        self, instances: Mapping[ContainerKey, _Instance], pods: Mapping[PodUid, Sequence[CgroupDir]], now: float
    ) -> dict[ContainerKey, list[CgroupDir]]:
        """Of those that have been without an ID for long."""
        for instance in instances.values():
            if instance.unknown_since is None:
                instance.unknown_since = now
        return {
            key: [
                place
                for place in pods.get(key.pod_uid, ())
                # Processes known to be another container's are left out of the whole pod's.
                if place.container_id != instance.previous and self._owners.get(place.container_id, key) == key
            ]
            for key, instance in instances.items()
            if now - (instance.unknown_since or 0.0) >= LONG_UNKNOWN_S
        }


def reported_pids(host_pid: int, namespace_pids: Sequence[int], module: KernelModule | None) -> tuple[int, ...]:
    """The PIDs by which the driver in use reports a process to those of its container: pids.config holds these.

    | kernel module | process lists | utilisation samples | here |
    |---|---|---|---|
    | proprietary, not known, open before 515 | host | host | the host's PID |
    | open 515 to 569 | namespace | host | both |
    | open from 570 | namespace | namespace | the namespaces' |

    `namespace_pids` are those of the container's PID namespace and of those nested in it; none for a process in the host's,
    which has its host PID there too. With both kinds in one list another container's process is taken for one of this
    container where its host PID equals a PID of our namespace: its utilisation is then counted as ours, which holds us below
    our share, never above. Host PIDs that low are the kernel's own at first, so that is left so.
    """
    if module is None or not module.lists_namespace_pids or not namespace_pids:
        return (host_pid,)
    return tuple(namespace_pids) if module.samples_namespace_pids else (host_pid, *namespace_pids)
