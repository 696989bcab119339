"""Prepares containers before they start, for every isolation that makes files for them.

A container is prepared once it is allocated, while the kubelet makes its sandbox. In a burst of pods disk and processors are
busy, and the start waits for PreStartContainer, which then finds everything there. The preparation counts for one start. A
later start, and one that comes before it is done, is prepared in PreStartContainer.

State owned: the containers to prepare, those being prepared, and those prepared that have not started yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import islice
from typing import NoReturn

from msgspec import Struct, field

from gpushare_agent.core.model.allocations import ContainerKey

NOT_STARTED_FOR_S = 60.0
"""A container counts as not started for at most so long."""

Prepare = Callable[[Sequence[ContainerKey]], Awaitable[Collection[ContainerKey]]]


class PreparedAhead(Struct, eq=False):
    """`prepare` answers for which containers it succeeded; a failure is left to their start. `at_once` is how many it gets
    together, None for all; `delay_s` is waited after an allocation, because the admission goes on with the pod's other
    containers and needs no other thread."""

    prepare: Prepare
    at_once: int | None = None
    delay_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _requested: dict[ContainerKey, None] = field(default_factory=dict)
    _under_way: set[ContainerKey] = field(default_factory=set)
    _prepared_at: dict[ContainerKey, float] = field(default_factory=dict)
    _is_new: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: ContainerKey) -> None:
        """The container was just allocated and has not started yet."""
        # Allocated again: what was prepared before may be of other limits.
        self._prepared_at.pop(key, None)
        self._requested[key] = None
        self._is_new.set()

    def take(self, key: ContainerKey) -> bool:
        """The container starts; returns True if it was prepared. From now on the files are its own."""
        self._requested.pop(key, None)
        # A preparation that is under way ends after this start has begun: its files must not count for the next start.
        self._under_way.discard(key)
        return self._prepared_at.pop(key, None) is not None

    @property
    def prepared(self) -> frozenset[ContainerKey]:
        """Those that have not started yet."""
        return frozenset(self._prepared_at)

    def keep_only(self, remains: Callable[[ContainerKey], bool]) -> None:
        """Forgets the others, which are gone, and those that should have started long ago."""
        # A pod may never start after its Allocate (an image that cannot be pulled).
        old = self.clock() - NOT_STARTED_FOR_S
        self._requested = {key: None for key in self._requested if remains(key)}
        self._under_way = set(filter(remains, self._under_way))
        self._prepared_at = {key: at for key, at in self._prepared_at.items() if remains(key) and at > old}

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self._is_new.wait()
            # The event is cleared after the pause: what comes during it is in this turn.
            await asyncio.sleep(self.delay_s)
            self._is_new.clear()
            while self._requested:
                keys = list(islice(self._requested, self.at_once))
                for key in keys:
                    del self._requested[key]
                self._under_way = set(keys)
                done = await self.prepare(keys)
                # One that started meanwhile was prepared again, or will be: this one's files are no longer the last.
                ready = [key for key in done if key in self._under_way and key not in self._requested]
                self._prepared_at |= dict.fromkeys(ready, self.clock())
                self._under_way = set()
