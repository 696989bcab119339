"""Keeps the library where containers get it from, makes each share's files before its container starts, and shortens files
that a tenant has made too long.

Every share of the node gets its files, whatever isolation its pod names: the annotation may have changed since Allocate
answered the mounts, and the runtime makes a missing mount source an empty directory. The files of a container that was just
allocated are made at once (ahead.py); they serve one start, each later one gets others. File access is in threads, bounded.

State owned: which library was installed last, the failure that was logged last, the containers whose file is shortened
now, and what was logged of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import structlog

from gpushare_agent.agent.isolation.ahead import PreparedAhead
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.library import Stamp
from gpushare_agent.agent.isolation.tenant_files import REMOVAL_TIMEOUT_S
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import ReportOnce, forever
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, NotFound, RefusalReason, Refused

log = structlog.get_logger(__name__)
T = TypeVar("T")

FILES_TIMEOUT_S = 5.0
"""One call; the kubelet waits 30 s for PreStartContainer."""
CUT_PERIOD_S = 2.0
_ADVICE = "Check the disk of the setting libgpushare.directory."


class Preparation:
    """Call `check` first and again, `run` once, `prepare` at any time."""

    def __init__(
        self,
        files: GpushareFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        *,
        cut_period_s: float = CUT_PERIOD_S,
    ) -> None:
        self.files = files
        self._allocations = allocations
        self._cut_period_s = cut_period_s
        self._thread = DaemonThread("gpushare-files", advice=_ADVICE)
        # A thread for each file: its tenant decides how long the kernel takes to shorten it (25 s measured), or has a lease
        # on it (45 s). Neither a start may wait for that, nor the file of another tenant, who fills the disk meanwhile.
        self._threads: dict[ContainerKey, DaemonThread] = {}
        self._cutting: set[ContainerKey] = set()
        self._failure = ReportOnce()
        self._warned: set[tuple[ContainerKey, str]] = set()
        self._installed: Stamp | None = None
        self.ahead = PreparedAhead(self._make_ahead, at_once=1)  # a start takes the next one out before its turn

    async def check(self) -> None:
        """Checks that the library is there for this machine, and in its place for containers. Puts a replaced library there
        again. Raises AgentError with the remedy."""
        library = self.files.library
        stamp = await self._in_thread(library.check, "reading libgpushare")
        # At the start, and when the deployer replaces the library while the agent runs.
        if stamp != self._installed:
            await self._in_thread(library.install, "installing libgpushare")
            self._installed = stamp
            if note := library.missing_note:
                log.warning("isolation_library_missing", detail=note)
                return
            places = {"library": str(library.source), "directory": str(library.directory)}
            log.info("isolation_library_installed", isolation="gpushare", **places)

    async def look(self) -> None:
        """Checks that `check` will find all that it needs. Raises AgentError with the remedy."""
        await self._in_thread(self.files.library.look, "reading libgpushare")

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Makes new files for the shares among containers that are about to start; bounded."""
        try:
            for key in self._shares_of(sorted(keys)):
                if not self.ahead.take(key):
                    await self._in_thread(partial(self.files.prepare, key), f"preparing the files of {key.container}")
                self.files.unused.discard(key)
        except AgentError as e:
            log.error("private_cache_not_prepared", error=str(e))
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"the files of the container cannot be prepared: {e}. The kubelet tries again.",
            )
        return None

    async def run(self) -> NoReturn:
        """Until cancelled. A cycle that fails is logged, once for each error, and repeated."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("gpushare files ahead", self.ahead.run), name="gpushare files ahead")
            while True:
                self.ahead.keep_only(self._allocations().__contains__)
                for noted in (self.files.unused, self.files.replaced):
                    noted.intersection_update(self._allocations())
                group.create_task(
                    self._try_to_cut(), name="gpushare cutting"
                )  # not awaited: the next cycle finds others
                await asyncio.sleep(self._cut_period_s)

    async def _try_to_cut(self) -> None:
        try:
            await self.cut_oversized()
        except AgentError as e:
            if self._failure.is_new(str(e)):
                log.warning("private_caches_not_cut", error=str(e), then="the next cycle tries again")
        else:
            self._failure.is_over()

    async def cut_oversized(self) -> None:
        """Shortens files that are larger than the library makes them, but for those that are being shortened, and logs it
        once for a container. Raises AgentError."""
        shares = tuple(self._allocations())
        # A container that is allocated again is warned of again.
        self._warned = {one for one in self._warned if one[0] in shares}
        self._threads = {key: thread for key, thread in self._threads.items() if key in shares}
        if not (unseen := self._shares_of(self.files.unseen(shares))):
            return
        found = await self._in_thread(partial(self.files.oversized, unseen), "comparing the sizes of files")
        async with asyncio.TaskGroup() as group:
            for key, size in found:
                group.create_task(self._cut(key, size), name=f"cut {key.container}")

    async def _cut(self, key: ContainerKey, size: int) -> None:
        if key in self._cutting:
            return
        self._cutting.add(key)
        self._warn_once(key, "private_cache_too_large", size_bytes=size, then="it is shortened whenever it grows")
        try:
            thread = self._threads.setdefault(key, DaemonThread("gpushare-cutting", advice=_ADVICE))
            await thread.call(partial(self.files.cut, key), f"cutting the file of {key.container}", REMOVAL_TIMEOUT_S)
        except NotFound:  # the pod has ended
            return
        except AgentError as e:  # a tenant that executes its file keeps everybody from writing to it
            self._warn_once(key, "private_cache_not_cut", error=str(e), then="to end the pod frees it")
        finally:
            self._cutting.discard(key)

    def _warn_once(self, key: ContainerKey, event: str, **said: object) -> None:
        if (key, event) not in self._warned:
            self._warned.add((key, event))
            log.warning(event, pod_uid=key.pod_uid, container=key.container, **said)

    def _shares_of(self, keys: Collection[ContainerKey]) -> list[ContainerKey]:
        """Whole GPUs get no library and so no files."""
        allocations = self._allocations()
        return [key for key in keys if key in allocations and allocations[key].is_limited]

    async def _make_ahead(self, keys: Sequence[ContainerKey]) -> list[ContainerKey]:
        shares = self._shares_of(keys)
        try:
            for key in shares:
                await self._in_thread(partial(self.files.prepare_ahead, key), f"making the files of {key.container}")
        # Not logged: PreStartContainer makes it again, and reports.
        except AgentError:
            return []
        return shares

    async def _in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)
