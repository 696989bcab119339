"""When the share of a deleted pod is freed, by what is known of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from structlog.testing import capture_logs

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.kubelet.records import CheckpointEntry
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from tests.support_core import NAMES, allocation, ids, inventory, pod


class NoPods:
    """The store after the pods were deleted."""

    is_synced = True

    def get(self, uid: PodUid) -> Pod | None:
        return None

    def pods(self) -> tuple[Pod, ...]:
        return ()


class Unused:
    """The kubelet, which is not asked here."""

    is_idle = True
    has_get = False

    def quiet_list(self, purpose: str, *, wait_s: float) -> NoReturn:
        raise AssertionError

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float) -> NoReturn:
        raise AssertionError


class NoCheckpoint:
    async def read(self) -> Sequence[CheckpointEntry]:
        return ()


class Processes:
    """Answers as its field says."""

    def __init__(self) -> None:
        self.answer: bool | Unavailable | None = None

    async def are_running(self, uid: PodUid) -> bool | None:
        if isinstance(self.answer, Unavailable):
            raise self.answer
        return self.answer


async def test_a_share_is_kept_while_its_processes_cannot_be_read_and_that_is_reported_once() -> None:
    """A stalled file system leaves them unknown; when it answers again, what ended is released."""
    cache, processes = AllocationCache(), Processes()
    collection = GarbageCollection(
        cache=cache,
        pods=NoPods(),
        static_pods=Unused(),
        gate=Unused(),
        pod_resources=Unused(),
        checkpoint=NoCheckpoint(),
        processes=processes,
        names=NAMES,
        inventory=inventory,
        kubelet_age_s=lambda: None,
        clock=lambda: 0.0,
        period_s=1.0,
    )
    deleted = pod("deleted")
    cache.put(allocation(deleted, "main", ids(0, range(10)), ids(0, range(4))))
    collection.pod_changed(deleted, None)
    processes.answer = Unavailable("an earlier call still hangs")
    with capture_logs() as logs:
        for _ in range(3):
            await collection.release_deleted()
    assert len(cache) == 1
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("share_kept", "warning")]
    processes.answer = True
    await collection.release_deleted()
    assert len(cache) == 1
    processes.answer = False
    await collection.release_deleted()
    assert len(cache) == 0
