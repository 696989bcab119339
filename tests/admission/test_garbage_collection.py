"""When the share of a deleted pod is freed, by what is known of its processes; which pods a reconcile asks about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.agent.kubelet.records import CheckpointEntry, ListedPod
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import VCORE_RESOURCE, PodUid
from gpushare_agent.core.model.pods import PodPhase
from tests.support_core import NAMES, allocation, container, ids, listed, pod
from tests.support_node import node_of


class Checkpoint:
    """Keeps the pods whose entries were made, and whose device IDs were read."""

    def __init__(self) -> None:
        self.entries: list[CheckpointEntry] = []
        self.made_of: set[PodUid] = set()
        self.read_of: set[PodUid] = set()

    async def read(self, without: Collection[PodUid] = ()) -> Sequence[CheckpointEntry]:
        found = [one for one in self.entries if one.pod_uid not in without]
        self.made_of = {one.pod_uid for one in found}
        return found

    def ours(self, entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        found = list(entries)
        self.read_of = {one.pod_uid for one in found}
        return found


class Processes:
    """Answers as its field says."""

    def __init__(self) -> None:
        self.answer: bool | Unavailable | None = None

    async def has_processes_in_thread(self, uid: PodUid) -> bool | None:
        if isinstance(self.answer, Unavailable):
            raise self.answer
        return self.answer


class Kubelet:
    """Answers each Get with what the pod has by `listed`, and keeps the names that were asked for. Get and `refresh_static`
    have the effects that the test gives them."""

    is_idle = True
    has_get = True

    def __init__(self) -> None:
        self.listed: dict[str, ListedPod] = {}
        self.asked: list[str] = []
        self.on_refresh: Callable[[], None] = lambda: None
        self.on_get: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def quiet_list(self, purpose: str, *, wait_s: float) -> AsyncIterator[list[Listed]]:
        assert purpose == "recovery"
        yield [Listed(one) for one in self.listed.values()]

    async def refresh_static(self, *, timeout_s: float) -> None:
        self.on_refresh()

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float) -> Listed:
        self.asked.append(name)
        self.on_get()
        if name not in self.listed:
            raise NotFound(name)
        return Listed(self.listed[name])


@dataclass(frozen=True)
class Listed:
    pod: ListedPod

    def decoded(self) -> ListedPod:
        return self.pod


class ReconciledNode:
    """Eight running pods with a share each, as the ledger and the kubelet's records have them."""

    def __init__(self, *, has_pod_resources: bool = True) -> None:
        node, self.kubelet, self.age_s = node_of(), Kubelet(), 1000.0
        self.processes, self.checkpoint = Processes(), Checkpoint()
        self.store, self.cache = node.pods, node.cache
        self.pods = [
            replace(pod(f"p{n}", container(cores=5, blocks=2)), phase=PodPhase.RUNNING, has_started=True)
            for n in range(8)
        ]
        self.store.replace_all(self.pods)
        for number, one in enumerate(self.pods):
            cores, blocks = ids(0, range(number * 5, number * 5 + 5)), ids(0, range(number * 2, number * 2 + 2))
            self.cache.put(allocation(one, "main", cores, blocks))
            self.kubelet.listed[one.name] = listed(one.name, main=(cores, blocks))
        self.collection = GarbageCollection(
            node=node,
            static_pods=self.kubelet,
            gate=self.kubelet,
            pod_resources=self.kubelet,
            checkpoint=self.checkpoint,
            cgroups=self.processes,
            kubelet_age_s=lambda: self.age_s,
            clock=lambda: 100.0,
            has_pod_resources=has_pod_resources,
        )
        self.cache.subscribe(self.collection.allocation_changed)

    async def asked(self) -> set[str]:
        """In one reconcile."""
        self.kubelet.asked.clear()
        await self.collection.reconcile()
        return set(self.kubelet.asked)


async def test_a_share_is_kept_while_its_processes_cannot_be_read_and_that_is_reported_once() -> None:
    """A stalled file system leaves them unknown; when it answers again, what ended is released."""
    node = ReconciledNode()
    deleted, processes = node.pods[0], node.processes
    node.store.remove(deleted.uid)
    node.collection.pod_changed(deleted, None)
    processes.answer = Unavailable("an earlier call still hangs")
    with capture_logs() as logs:
        for _ in range(3):
            await node.collection.release_deleted()
    assert node.cache.of_pod(deleted.uid)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("share_kept", "warning")]
    processes.answer = True
    with capture_logs() as logs:
        for _ in range(3):
            await node.collection.release_deleted()
    assert node.cache.of_pod(deleted.uid)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("share_kept", "info")]
    processes.answer = False
    with capture_logs() as logs:
        await node.collection.release_deleted()
    assert not node.cache.of_pod(deleted.uid)
    (freed,) = [entry for entry in logs if entry["event"] == "share_freed"]
    assert freed["resources"] == {NAMES.vcore: 5, NAMES.vmemory: 2} and freed["gpus"] == ["GPU-0"]
    assert freed["pod_uid"] == deleted.uid


async def test_pods_that_agree_with_the_kubelet_are_asked_about_again_in_turns() -> None:
    """The first reconcile asks about all, each later one about five; after two every pod was asked about again. The
    checkpoint's entries of the others are not made, which takes longer than all else; one of a pod that is gone is, because
    its name may be another's by now."""
    node = ReconciledNode()
    everything = {one.name for one in node.pods}
    assert await node.asked() == everything
    gone = pod("p0", uid="gone")
    for one in (*node.pods, gone):
        entry = CheckpointEntry(
            pod_uid=one.uid, container="main", resource=VCORE_RESOURCE,
            device_ids=frozenset(ids(0, range(5))),
        )  # fmt: skip
        node.checkpoint.entries.append(entry)
    later = [await node.asked() for _ in range(2)]
    asked = {one.uid for one in node.pods if one.name in later[-1]}
    assert (node.checkpoint.made_of, node.checkpoint.read_of) == ({*asked, gone.uid}, asked)
    assert [len(asked) for asked in later] == [5, 5]
    assert set().union(*later) == everything
    assert len(node.cache) == 8


async def test_what_may_differ_is_asked_about_at_once() -> None:
    """A pod that has ended, a container with other IDs, and after a restart of the kubelet every pod. Other changes of pods
    are none of the kubelet's records: the agent writes annotations to all of a node that it comes to."""
    node = ReconciledNode()
    await node.asked()
    for one in node.pods:
        node.store.upsert(replace(one, annotations={"gpushare-agent/gpus": "0"}, resource_version="2"))
    node.store.upsert(replace(node.pods[7], phase=PodPhase.SUCCEEDED, resource_version="3"))
    node.cache.release_pod(node.pods[6].uid)
    asked = await node.asked()
    assert {"p6", "p7"} < asked and len(asked) == 7 and not node.cache.of_pod(node.pods[7].uid)
    assert node.cache.of_pod(node.pods[6].uid)  # adopted again from the kubelet's records
    node.collection.kubelet_restarted()
    assert len(await node.asked()) == 8


async def test_a_pod_that_has_not_started_or_is_missing_is_asked_about_each_time() -> None:
    """Its devices may be taken from it without a word: a later container was refused."""
    node = ReconciledNode()
    waiting = replace(node.pods[7], has_started=False, resource_version="2")
    node.store.upsert(waiting)
    del node.kubelet.listed["p6"]
    await node.asked()
    assert {"p6", "p7"} <= await node.asked()
    assert not node.cache.of_pod(node.pods[6].uid)  # not listed twice in a row
    node.kubelet.listed["p7"] = listed("p7")
    await node.asked()
    assert not node.cache.of_pod(waiting.uid)


async def test_after_a_start_only_what_may_differ_from_what_the_kubelet_listed_then_is_asked_about() -> None:
    """A pod whose allocation changed since, one that has not started, and one that came in the place of another; all after
    a restart of the kubelet, and later the others in turns."""
    node = ReconciledNode()
    assert await node.collection.recover() == 8
    node.cache.put(replace(node.cache.of_pod(node.pods[6].uid)[0], pod_name="p6"))
    node.store.upsert(replace(node.pods[7], has_started=False, resource_version="2"))
    new = replace(pod("p5", container(cores=5, blocks=2), uid="uid-new", resource_version="3"), has_started=True)
    node.store.upsert(new)
    assert await node.asked() == {"p5", "p6", "p7"}
    assert not node.cache.of_pod(PodUid("uid-new"))
    assert len(await node.asked()) > 3
    node = ReconciledNode()
    await node.collection.recover()
    node.collection.kubelet_restarted()
    assert len(await node.asked()) == 8


async def test_an_allocation_that_changes_while_the_kubelet_is_asked_is_compared_at_the_next_time() -> None:
    """The kubelet's answer about its pod may be older. It is asked about again then."""
    node = ReconciledNode()
    moved = allocation(node.pods[3], "main", ids(1, range(5)), ids(1, range(2)))
    node.kubelet.on_get = lambda: node.cache.put(moved)
    await node.collection.reconcile()
    assert node.cache.of_pod(node.pods[3].uid) == (moved,)
    node.kubelet.on_get = lambda: None
    assert "p3" in await node.asked()


async def test_a_kubelet_that_has_just_started_is_asked_about_everything() -> None:
    node = ReconciledNode()
    node.age_s = 3.0
    assert len(await node.asked()) == 8
    assert len(await node.asked()) == 8


@pytest.mark.parametrize("has_pod_resources", [True, False])
async def test_static_pods_are_asked_for_before_anything_is_compared(has_pod_resources: bool) -> None:
    """No event tells a new agent of a static pod without a mirror pod: its share would count as that of a deleted pod."""
    node = ReconciledNode(has_pod_resources=has_pod_resources)
    static = replace(node.pods[7], is_static=True)
    node.store.replace_all(node.pods[:7])
    node.kubelet.on_refresh = lambda: node.store.put_static([static])
    await node.collection.reconcile()
    await node.collection.release_deleted()
    assert node.cache.of_pod(static.uid)
    assert len(node.cache) == 8
