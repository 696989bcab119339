"""Which processes are in a container: its ID as somebody tells it, its cgroup by the ID, the PIDs in it and below.

The ID comes a second or two after the container. Until then the container is given all processes of its pod that are not of
another known container: too many rather than too few, for the in-container library counts as the container's what is in the
list, and lets pass what is not. State owned: the IDs, and what is known of each container's present life.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroups import CgroupDir

log = structlog.get_logger(__name__)

Life = tuple[ContainerKey, int]
"""A container between two of its starts."""

LONG_UNKNOWN_S = 5.0
"""After a restart of the agent a container's list of before is better than its whole pod's, but not for ever."""


class Ids(Protocol):
    """Container IDs; isolation/vcuda/container_ids.py."""

    async def running(self) -> Mapping[ContainerKey, str]: ...
    async def owner_of(self, container_id: str) -> ContainerKey | None: ...


class ContainerCgroups(Protocol):
    """Every method raises Unavailable where the file system does not answer."""

    async def find_many_in_thread(self, wanted: Iterable[tuple[str, PodUid | None]]) -> Mapping[str, CgroupDir]: ...
    async def find_pods_in_thread(self, uids: Collection[PodUid]) -> Mapping[PodUid, list[CgroupDir]]: ...
    async def pids_round_in_thread(self, directories: Iterable[CgroupDir]) -> Mapping[str, list[int] | None]: ...


@dataclass(slots=True, kw_only=True)
class _Life:
    """From one start of a container to the next. `former`: the ID of the life before, which sources may still tell."""

    number: int = field(default_factory=itertools.count().__next__)
    id: str | None = None
    former: str | None = None
    unknown_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Host PIDs, in the life in which they were read."""

    pids: tuple[int, ...]
    life: object


class ContainerProcesses:
    """`read` may be overtaken by `begin_life`: ask `is_current` before using what it gave."""

    def __init__(self, ids: Ids, cgroups: ContainerCgroups, *, clock: Callable[[], float]) -> None:
        self._source = ids
        self._cgroups = cgroups
        self._clock = clock
        self._lives: dict[ContainerKey, _Life] = {}

    def begin_life(self, key: ContainerKey) -> None:
        """The container is about to start, again or for the first time."""
        before = self._lives.get(key)
        self._lives[key] = _Life(
            former=before.id or before.former if before is not None else None, unknown_since=float("-inf")
        )

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        for key in [key for key in self._lives if key not in keys]:
            del self._lives[key]

    def is_known(self, key: ContainerKey) -> bool:
        life = self._lives.get(key)
        return life is not None and life.id is not None

    def is_current(self, key: ContainerKey, processes: Processes) -> bool:
        return self._lives.get(key) is processes.life

    def note(self, key: ContainerKey, container_id: str) -> bool:
        """The container itself has told, and the kernel has confirmed it. False where the ID is of the life before: whoever
        told it has ended, or is about to."""
        life = self._lives.setdefault(key, _Life())
        if container_id == life.former:
            return False
        life.id = container_id
        return True

    def unknown(self, keys: Iterable[ContainerKey]) -> frozenset[Life]:
        """The lives whose ID nobody has told yet."""
        lives = {key: self._lives.setdefault(key, _Life()) for key in keys}
        return frozenset((key, life.number) for key, life in lives.items() if life.id is None)

    async def learn(self) -> None:
        """Take over the running containers' IDs. A source that is away delays, and loses nothing."""
        lives = dict(self._lives)
        try:
            reported = await self._source.running()
        except AgentError as e:
            log.warning("container_ids_unknown", error=str(e), then="asked again")
            return
        for key, container_id in reported.items():
            life = self._lives.setdefault(key, _Life())
            if life is lives.get(key, life) and container_id != life.former:
                life.id = container_id

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        """Whose container this is. Raises Unavailable."""
        for key, life in self._lives.items():
            if life.id == container_id:
                return key
        return await self._source.owner_of(container_id)

    async def read(self, wanted: Collection[ContainerKey]) -> dict[ContainerKey, Processes]:
        """Those that can be known now. Raises Unavailable."""
        lives = {key: self._lives.setdefault(key, _Life()) for key in wanted}
        cgroups = await self._own_cgroups(lives)
        cgroups |= await self._pods_cgroups({key: life for key, life in lives.items() if key not in cgroups})
        if not cgroups:
            return {}
        read = await self._cgroups.pids_round_in_thread([place for places in cgroups.values() for place in places])
        found: dict[ContainerKey, Processes] = {}
        for key, places in cgroups.items():
            lists = [pids for place in places if (pids := read.get(place.container_id)) is not None]
            if lists:
                found[key] = Processes(pids=tuple(sorted({pid for pids in lists for pid in pids})), life=lives[key])
        return found

    async def _own_cgroups(self, lives: Mapping[ContainerKey, _Life]) -> dict[ContainerKey, list[CgroupDir]]:
        ids = {key: life.id for key, life in lives.items() if life.id is not None}
        if not ids:
            return {}
        places = await self._cgroups.find_many_in_thread([(id_, key.pod_uid) for key, id_ in ids.items()])
        for key, id_ in ids.items():
            if id_ in places:
                lives[key].unknown_since = None
            elif lives[key].id == id_:  # it has ended: its ID goes with it
                lives[key].id = None
        return {key: [places[id_]] for key, id_ in ids.items() if id_ in places}

    async def _pods_cgroups(self, lives: Mapping[ContainerKey, _Life]) -> dict[ContainerKey, list[CgroupDir]]:
        now = self._clock()
        for life in lives.values():
            if life.unknown_since is None:
                life.unknown_since = now
        unknown = {key: life for key, life in lives.items() if now - (life.unknown_since or 0.0) >= LONG_UNKNOWN_S}
        if not unknown:
            return {}
        pods = await self._cgroups.find_pods_in_thread({key.pod_uid for key in unknown})
        taken = {life.id: key for key, life in self._lives.items() if life.id is not None}
        return {
            key: [
                place
                for place in pods.get(key.pod_uid, ())
                if place.container_id != life.former and taken.get(place.container_id, key) == key
            ]
            for key, life in unknown.items()
        }
