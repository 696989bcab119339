"""The one gate through which every PodResources List goes.

A List while an Allocate is open makes the kubelet forget the device IDs in flight and offer them to the next pod
(measured on every version). So a List is sent only

1. inside a GetPreferredAllocation (`preferring`), when no Allocate is open: an admission has none open then, but a
   container that restarts beside it may;
2. outside (`quiet_list`), when no admission call is open and none was for `quiet_s`; a GetPreferredAllocation that
   arrives meanwhile waits until that List has been answered.

An Allocate cannot be delayed: the kubelet has opened it before it reaches us. One that meets a List is counted.

State owned: how many GetPreferredAllocations, Allocates and Lists are open, whether a List runs outside, and when the
last call ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from msgspec import Struct, field

from gpushare_agent.kit.supervision import wait_for
from gpushare_agent.kubelet.pod_resources import PodListing
from gpushare_agent.model.errors import Unavailable


class Lister(Protocol):
    async def list_entries(self, *, timeout_s: float) -> Sequence[PodListing]: ...


class PodResourcesGate(Struct, eq=False):
    """Counts the admission calls that the kubelet has open, and lets a List through where none can be harmed by it."""

    lister: Lister
    clock: Callable[[], float] = time.monotonic
    quiet_s: float = 0.1
    list_timeout_s: float = 2.0
    on_list: Callable[[str], None] = lambda purpose: None
    _preferring: int = 0
    _allocating: int = 0
    _listing: int = 0
    _is_outside: bool = False
    _last_call_at: float = float("-inf")
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_idle(self) -> bool:
        """No call of an admission is open."""
        return not self._preferring and not self._allocating

    @asynccontextmanager
    async def preferring(self) -> AsyncIterator[InsideList]:
        """The time of one GetPreferredAllocation; gives the right to List inside it."""
        self._preferring += 1
        try:
            while self._is_outside:
                await self._wait()
            yield InsideList(self._list_inside)
        finally:
            self._preferring -= 1
            self._call_ended()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """The time of one Allocate."""
        self._allocating += 1
        if self._listing:
            self.on_list("overlapped")
        try:
            yield
        finally:
            self._allocating -= 1
            self._call_ended()

    @asynccontextmanager
    async def quiet_list(self, purpose: str, *, wait_s: float) -> AsyncIterator[Sequence[PodListing]]:
        """A List between admissions. Until the block ends no GetPreferredAllocation goes on, so keep it short and free
        of awaits: what is read is then still true. Raises Unavailable (also where admissions do not pause within
        `wait_s`), Corrupt."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._is_quiet():
                    await self._wait(self.quiet_s)
        except TimeoutError as e:
            raise Unavailable(f"admissions did not pause for {self.quiet_s:g} s within {wait_s:g} s") from e
        self._is_outside = True
        try:
            yield await self._list(purpose, self.list_timeout_s)
        finally:
            self._is_outside = False
            self._notify()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """The time between admissions, without a List."""
        while not self._is_quiet():
            await self._wait(self.quiet_s)
        yield

    def _is_quiet(self) -> bool:
        return self.is_idle and not self._is_outside and self.clock() - self._last_call_at >= self.quiet_s

    async def _list_inside(self) -> Sequence[PodListing]:
        until = self.clock() + self.list_timeout_s
        try:
            async with asyncio.timeout(self.list_timeout_s):
                while self._allocating:
                    await self._wait()
        except TimeoutError as e:
            raise Unavailable("an Allocate of another container stays open, so the kubelet cannot be asked") from e
        return await self._list("admission", until - self.clock())

    async def _list(self, purpose: str, timeout_s: float) -> Sequence[PodListing]:
        self.on_list(purpose)
        self._listing += 1
        try:
            return await self.lister.list_entries(timeout_s=timeout_s)
        finally:
            self._listing -= 1

    def _call_ended(self) -> None:
        self._last_call_at = self.clock()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, at_most_s: float | None = None) -> None:
        await wait_for(self._changed, at_most_s)


class InsideList:
    """The right to List that an open GetPreferredAllocation gives."""

    def __init__(self, list_inside: Callable[[], Awaitable[Sequence[PodListing]]]) -> None:
        self._list_inside = list_inside

    async def list_entries(self) -> Sequence[PodListing]:
        """What the kubelet lists now. Raises Unavailable, Corrupt."""
        return await self._list_inside()
