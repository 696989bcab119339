"""Gives each container with a share a cache file of its own before it starts, and removes it when its pod has gone.

For isolations whose preparation is PRIVATE_CACHE. Every share of the node gets one, whatever isolation its pod names: the
annotation may have been changed since the kubelet was told what to mount, and a mount whose source is missing becomes an
empty directory of root's. Level, not edge: each round compares what is there with the pods. Files are touched in a thread,
bounded.

State owned: the fault that was told last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import structlog

from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, RefusalReason, Refused
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)
T = TypeVar("T")

FILES_TIMEOUT_S = 5.0
"""One call; the kubelet waits 30 s for PreStartContainer."""
CLEANING_PERIOD_S = 2.0


class Pods(Protocol):
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...


class CacheFiles(Protocol):
    """Blocking. Each raises AgentError."""

    def install(self) -> None: ...
    def prepare(self, key: ContainerKey) -> None: ...
    def list_pods(self) -> tuple[PodUid, ...]: ...
    def remove_pod(self, uid: PodUid) -> bool: ...


class PrivateCaches:
    """`install` first, `run` once, `prepare` at any time."""

    def __init__(
        self,
        *,
        files: CacheFiles,
        allocations: Callable[[], Mapping[ContainerKey, Allocation]],
        pods: Pods,
        cleaning_period_s: float = CLEANING_PERIOD_S,
    ) -> None:
        self._files = files
        self._allocations = allocations
        self._pods = pods
        self._cleaning_period_s = cleaning_period_s
        self._thread = DaemonThread("private-caches", advice="Check the disk of the setting hami_core.directory.")
        self._fault = ""

    async def install(self) -> None:
        """What all containers share. Raises StartupError, or Unavailable where the disk does not answer."""
        await self._in_thread(self._files.install, "making the directory of private caches")

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Empty files for the shares among containers that are about to start; bounded."""
        held = self._allocations()
        shares = [key for key in sorted(keys) if key in held and not held[key].is_whole]
        try:
            for key in shares:
                await self._in_thread(partial(self._files.prepare, key), f"preparing the cache of {key.container}")
        except AgentError as e:
            log.error("private_cache_not_prepared", error=str(e))
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail=f"the container's private cache cannot be prepared: {e}. The kubelet tries again.",
            )
        return None

    async def run(self) -> NoReturn:
        """Until cancelled. A round that fails is logged, once for each text, and tried again."""
        while True:
            if self._pods.is_synced:
                await self._clean_and_tell()
            await asyncio.sleep(self._cleaning_period_s)

    async def clean(self) -> None:
        """Removes what belongs to pods that have gone, by the pod store's word. One that cannot be removed does not keep
        the others; its error is raised in the end. Raises AgentError."""
        there = await self._in_thread(self._files.list_pods, "listing private caches")
        living = {key.pod_uid for key in self._allocations()}
        failed: AgentError | None = None
        for uid in there:
            if uid in living or self._pods.get(uid) is not None:
                continue
            try:
                if await self._in_thread(partial(self._files.remove_pod, uid), f"removing the caches of pod {uid}"):
                    log.info("private_cache_removed", pod_uid=uid)
            except AgentError as e:
                failed = e
        if failed is not None:
            raise failed

    async def _clean_and_tell(self) -> None:
        try:
            await self.clean()
        except AgentError as e:
            if str(e) != self._fault:
                self._fault = str(e)
                log.warning("private_caches_not_cleaned", error=str(e), then="the next round tries again")
            return
        if self._fault:
            self._fault = ""
            log.info("private_caches_cleaned_again")

    async def _in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return await self._thread.call(blocking, what, FILES_TIMEOUT_S)
