"""Makes a cache file for each container with a share before it starts, and removes it when its pod is gone.

Every share of the node gets one, whatever isolation its pod names: the annotation may have changed since Allocate answered
the mounts, and the runtime makes a missing mount source an empty directory. Level-triggered: each cycle compares the
directories with the pods. File access is in a thread, bounded.

The file of a container that was allocated now is made at once (ahead.py); it serves one start, each later one gets another.

A claim's container is started again without a call of the kubelet: there each container that runs gets its file to itself,
within seconds of its start, and the next start finds another.

State owned: which library was installed last, the failures that were logged last, the claims' containers that have their
files, and those whose file was found too large, or could not be shortened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import structlog

from gpushare_agent.isolation.ahead import PreparedAhead
from gpushare_agent.isolation.directories import REMOVAL_TIMEOUT_S
from gpushare_agent.isolation.tenant_files import LibraryStamp, TenantFiles
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.kit.supervision import ReportOnce, forever
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused

if TYPE_CHECKING:
    from gpushare_agent.cluster.pod_store import PodStore

log = structlog.get_logger(__name__)
T = TypeVar("T")

FILES_TIMEOUT_S = 5.0
"""One call; the kubelet waits 30 s for PreStartContainer."""
CLEANUP_PERIOD_S = 2.0


class PrivateCaches:
    """`check` first and again, `run` once, `prepare` at any time."""

    def __init__(
        self,
        *,
        files: TenantFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: PodStore,
        running_claims: Callable[[], Mapping[ContainerKey, str]] = dict,
        cleanup_period_s: float = CLEANUP_PERIOD_S,
        removes: bool = True,
    ) -> None:
        """`running_claims`: of each claim's share that one container runs with, the runtime's ID of it. `removes` is False
        where the files lie in directories that somebody else removes."""
        self._files = files
        self._allocations = allocations
        self._pods = pods
        self._running_claims = running_claims
        self._removes = removes
        self._started: dict[ContainerKey, str] = {}
        self._cleanup_period_s = cleanup_period_s
        advice = f"Check the disk of the setting {files.kind.setting}."
        self._thread = DaemonThread("private-caches", advice=advice)
        # Three further threads: a tenant decides how long the kernel takes to free or shorten its file (25 s measured), and
        # no start may wait for that.
        self._removal = DaemonThread("private-caches-removal", advice=advice)
        self._cutting = DaemonThread("private-caches-cutting", advice=advice)
        self._keeping = DaemonThread("private-caches-keeping", advice=advice)
        self._failures = ReportOnce()
        self._too_large: set[ContainerKey] = set()
        self._not_cut: set[ContainerKey] = set()
        self._installed: LibraryStamp | None = None
        self.ahead = PreparedAhead(self._make_ahead, at_once=1)  # a start takes the next one out before its turn

    async def check(self) -> None:
        """The library is there for this machine, and in its place for containers, with what goes with it. A library that
        was replaced is put there anew. Raises AgentError with the remedy."""
        stamp = await self._in_thread(self._files.check_library, f"reading {self._files.kind.owner} library")
        # At the start, and where the deployer replaces the library while the agent runs.
        if stamp != self._installed:
            await self._in_thread(self._files.install, f"installing {self._files.kind.owner} library")
            self._installed = stamp
            if note := self._files.without_library:
                log.warning("isolation_library_missing", detail=note)
                return
            log.info(
                "isolation_library_installed",
                isolation=self._files.kind.isolation,
                library=str(self._files.library),
                directory=str(self._files.directory),
            )

    async def look(self) -> None:
        """Whether `check` will find all that it needs. Raises AgentError with the remedy."""
        await self._in_thread(self._files.look, f"reading {self._files.kind.owner} library")

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Makes empty files for the shares among containers that are about to start; bounded."""
        allocations = self._allocations()
        # Whole GPUs get no library and so no cache.
        shares = [key for key in sorted(keys) if key in allocations and allocations[key].is_limited]
        try:
            for key in shares:
                if not self.ahead.take(key):
                    await self._make(key)
        except AgentError as e:
            log.error("private_cache_not_prepared", error=str(e))
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"the container's private cache cannot be prepared: {e}. The kubelet tries again.",
            )
        return None

    async def run(self) -> NoReturn:
        """Until cancelled. A cycle that fails is logged, once for each error, and repeated."""
        removal = partial(self._repeat, self.remove_aside, "removing what was put aside")
        sizes = partial(self._repeat, self.cut_oversized, "comparing the sizes of caches")
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("private caches ahead", self.ahead.run), name="private caches ahead")
            if self._removes:
                group.create_task(forever("private caches removal", removal), name="private caches removal")
            group.create_task(forever("private caches sizes", sizes), name="private caches sizes")
            while True:
                self.ahead.keep_only(self._allocations().__contains__)
                # Before the first list every pod would look as if it were gone.
                if self._pods.is_synced:
                    await self._keep_started()
                    if self._removes:
                        await self._try(self.remove_stale, "removing caches of pods that have ended")
                await asyncio.sleep(self._cleanup_period_s)

    async def _repeat(self, work: Callable[[], Awaitable[None]], what: str) -> NoReturn:
        while True:
            await self._try(work, what)
            await asyncio.sleep(self._cleanup_period_s)

    async def _keep_started(self) -> None:
        running = self._running_claims()
        for key, container_id in running.items():
            if self._started.get(key) == container_id:
                continue
            keep = partial(self._files.keep_started, key, container_id)
            try:
                await self._keeping.call(keep, f"keeping the cache of {key.container}", FILES_TIMEOUT_S)
            except AgentError as e:
                # At debug: the tenant can make it come and go, and it is tried again.
                log.debug("private_cache_not_kept", pod_uid=key.pod_uid, container=key.container, error=str(e))
            else:
                self._started[key] = container_id
        self._started = {key: known for key, known in self._started.items() if key in running}

    async def _make_ahead(self, keys: Sequence[ContainerKey]) -> list[ContainerKey]:
        allocations = self._allocations()
        try:
            shares = [key for key in keys if key in allocations and allocations[key].is_limited]
            for key in shares:
                await self._make(key)
        # No log: PreStartContainer makes it again, and reports.
        except AgentError:
            return []
        return shares

    async def _make(self, key: ContainerKey) -> None:
        await self._in_thread(partial(self._files.prepare, key), f"preparing the cache of {key.container}")

    async def remove_stale(self) -> None:
        """Puts the files of pods that the pod store no longer has aside. A pod whose files cannot be moved does not stop the
        others; its error is raised at the end. Raises AgentError."""
        present = await self._in_thread(self._files.list_pods, "listing private caches")
        living = {key.pod_uid for key in self._allocations()}
        failed: AgentError | None = None
        for uid in present:
            # Of claims no pod store knows the UID: the allocation alone keeps the directory.
            if uid in living or self._pods.get(uid) is not None:
                continue
            try:
                if await self._in_thread(partial(self._files.remove_pod, uid), f"removing the caches of pod {uid}"):
                    log.info("private_cache_removed", pod_uid=uid)
            except AgentError as e:
                failed = e
        if failed is not None:
            raise failed

    async def remove_aside(self) -> None:
        """Removes what was put aside, one after the other: tenants decide how long that takes. What cannot be removed does
        not stop the others; its error is raised at the end. Raises AgentError."""
        failed: AgentError | None = None
        for name in await self._in_thread(self._files.list_aside, "listing what was put aside"):
            try:
                remove = partial(self._files.remove_aside, name)
                await self._removal.call(remove, f"removing {name}", REMOVAL_TIMEOUT_S)
            except AgentError as e:
                failed = e
        if failed is not None:
            raise failed

    async def cut_oversized(self) -> None:
        """Shortens files that are larger than the library makes them, the largest first, and logs it once for a container.
        Raises AgentError."""
        shares = [key for key, allocation in self._allocations().items() if allocation.is_limited]
        # A container that is allocated anew is warned of again.
        self._too_large.intersection_update(shares)
        self._not_cut.intersection_update(shares)
        for key, size in await self._in_thread(partial(self._files.oversized, shares), "comparing the sizes of caches"):
            if key not in self._too_large:
                self._too_large.add(key)
                log.warning(
                    "private_cache_too_large", pod_uid=key.pod_uid, container=key.container, size_bytes=size,
                    then="it is shortened, now and whenever it grows again, and not logged again for it",
                )  # fmt: skip
            try:
                await self._cutting.call(
                    partial(self._files.cut, key), f"shortening the cache of {key.container}", REMOVAL_TIMEOUT_S
                )
            except AgentError as e:
                # A tenant that executes its file keeps everybody from writing to it: a person has to know, once.
                if key not in self._not_cut:
                    self._not_cut.add(key)
                    log.warning(
                        "private_cache_not_cut", pod_uid=key.pod_uid, container=key.container, error=str(e),
                        then="it stays large, is tried again, and not logged again; to end the pod frees it",
                    )  # fmt: skip

    async def _try(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        try:
            await work()
        except AgentError as e:
            if self._failures.is_new(str(e), what):
                log.warning("private_caches_not_removed", what=what, error=str(e), then="the next cycle tries again")
            return
        if self._failures.is_over(what):
            log.info("private_caches_removed_again", what=what)

    async def _in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)
