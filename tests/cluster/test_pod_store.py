"""The pod store has the newest state that was reported of each pod, and never brings back a deleted one."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.cluster.pod_store import GONE_REMEMBERED_S, MAX_GONE, PodStore, liveliness
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod, PodPhase
from tests.cluster.support_kube import pod
from tests.fakes.clock import FakeClock


def _names(store: PodStore) -> list[str]:
    return [one.name for one in store.pods()]


def test_the_first_list_makes_the_store_synced() -> None:
    """Synced follows from a list, also an empty one, and from nothing else."""
    store = PodStore()
    store.upsert(pod("a"))
    assert not store.is_synced
    before = store.changes.count
    store.replace_all([pod("a")])
    assert store.is_synced
    assert store.changes.count > before


def test_of_versions_that_are_no_numbers_the_later_state_counts() -> None:
    """They cannot be compared. Of numbers the larger one is newer, whichever comes later: the property below."""
    store = PodStore()
    store.upsert(pod("a", version="x9", phase=PodPhase.RUNNING))
    store.upsert(pod("a", version="x1"))
    assert [one.phase for one in store.pods()] == [PodPhase.PENDING]


def test_a_pod_that_left_a_list_may_come_back() -> None:
    """Only a reported deletion is final: a list may come from a cache that lags."""
    store = PodStore()
    store.upsert(pod("a", version="5"))
    store.replace_all([], resource_version="9")
    assert store.pods() == ()
    store.upsert(pod("a", version="5"))
    assert _names(store) == ["a"]


def test_a_pod_newer_than_the_list_is_kept() -> None:
    """A list as of version 7 says nothing about a pod that was read at version 8."""
    store = PodStore()
    store.upsert(pod("old", version="6"))
    store.upsert(pod("new", version="8"))
    store.replace_all([pod("listed", version="7")], resource_version="7")
    assert _names(store) == ["listed", "new"]


def test_subscribers_get_old_and_new_after_the_change() -> None:
    """Each change is reported once, in order, when the store already shows it; what changes nothing is not reported."""
    store = PodStore()
    reported: list[tuple[str, str, int]] = []

    def report(old: Pod | None, new: Pod | None) -> None:
        reported.append((old.resource_version if old else "", new.resource_version if new else "", len(store.pods())))

    store.subscribe(report)
    store.upsert(pod("a", version="1"))
    store.upsert(pod("a", version="1"))
    store.upsert(pod("a", version="2"))
    store.replace_all([pod("b", version="3")], resource_version="3")
    store.remove(PodUid("uid-b"))
    store.remove(PodUid("uid-b"))
    assert reported == [("", "1", 1), ("1", "2", 1), ("2", "", 1), ("", "3", 1), ("3", "", 0)]


async def test_a_wait_returns_at_once_or_at_the_next_change() -> None:
    """A waiter that is behind does not wait; one that is not wakes at the change."""
    store = PodStore()
    since = store.changes.count
    store.upsert(pod("a"))
    assert await store.changes.wait(since)
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(store.changes.wait_next())
        await asyncio.sleep(0)
        assert not waiter.done()
        store.remove(PodUid("uid-a"))
    assert waiter.result()


def test_deleted_uids_are_forgotten_in_the_end() -> None:
    """Memory of deletions is bounded in number and in time: a UID that is forgotten may come back."""
    clock = FakeClock()
    store = PodStore(clock=clock)
    deleted = [f"u{number}" for number in range(MAX_GONE + 10)]
    for uid in deleted:
        store.remove(PodUid(uid))
    store.upsert(pod(deleted[0], uid=deleted[0]))
    store.upsert(pod(deleted[-1], uid=deleted[-1]))
    assert _names(store) == [deleted[0]]
    clock.now += GONE_REMEMBERED_S + 1
    store.remove(PodUid("last"))
    store.upsert(pod(deleted[-1], uid=deleted[-1]))
    store.upsert(pod("last", uid="last"))
    assert _names(store) == sorted([deleted[0], deleted[-1]])


STEPS = st.lists(
    st.tuples(st.sampled_from(["upsert", "remove", "list"]), st.integers(0, 3), st.integers(1, 30)), max_size=30
)


@given(steps=STEPS)
def test_no_pod_ever_goes_back_in_time_or_returns(steps: list[tuple[str, int, int]]) -> None:
    """Whatever order messages arrive in, a pod's version only grows while it is stored, and a deleted UID stays away."""
    store = PodStore()
    deleted: set[PodUid] = set()
    for step, number, version in steps:
        before = {one.uid: int(one.resource_version) for one in store.pods()}
        reported = pod(f"p{number}", version=str(version))
        if step == "upsert":
            store.upsert(reported)
        elif step == "remove":
            store.remove(reported.uid)
            deleted.add(reported.uid)
        else:
            store.replace_all([reported], resource_version=str(version))
        for one in store.pods():
            assert one.uid not in deleted
            assert int(one.resource_version) >= before.get(one.uid, 0)
        assert list(store.pods()) == sorted(store.pods(), key=lambda one: one.name)


@given(steps=STEPS, uids=st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_of_several_pods_of_one_name_the_live_one_counts_then_the_newest(
    steps: list[tuple[str, int, int]], uids: list[int]
) -> None:
    """Whatever is reported in whatever order, by_name says what a look at all pods says."""
    store = PodStore()
    for (step, number, version), uid in zip(steps, uids, strict=False):
        phase = PodPhase.SUCCEEDED if version % 3 else PodPhase.RUNNING
        reported = pod(f"p{number % 2}", uid=f"u{number % 2}-{uid}", version=str(version), phase=phase)
        if step == "upsert":
            store.upsert(reported)
        elif step == "remove":
            store.remove(reported.uid)
        else:
            store.replace_all([reported], resource_version=str(version))
        newest = {(one.namespace, one.name): one for one in sorted(store.pods(), key=liveliness)}
        assert store.by_name() == newest


HASH = "0123456789abcdef0123456789abcdef"


def _static(name: str = "s-node-1", uid: str = HASH, mirror: str = "", **fields: object) -> Pod:
    """A static pod: as its mirror pod shows it, or as the kubelet alone has it."""
    return pod(name, uid=uid, is_static=True, mirror_uid=mirror, **{"version": "5" if mirror else "", **fields})


def test_a_static_pod_and_its_mirror_pod_are_one() -> None:
    """Under the kubelet's UID, first without an object, then with it; a later list of the kubelet changes nothing of it."""
    store = PodStore()
    store.replace_all([], resource_version="4")
    store.put_static([_static()])
    assert [(one.uid, one.object_uid) for one in store.pods()] == [(HASH, None)]
    store.upsert(_static(mirror="api-1", phase=PodPhase.RUNNING))
    store.put_static([_static()])
    assert [(one.uid, one.object_uid, one.phase) for one in store.pods()] == [(HASH, "api-1", PodPhase.RUNNING)]
    assert store.get_object(PodUid("api-1")) == store.get(PodUid(HASH))


def test_a_list_of_the_api_server_knows_nothing_of_static_pods_without_a_mirror_pod() -> None:
    """The kubelet's does: they go when it lists them no more, and only they."""
    store = PodStore()
    store.put_static([_static()])
    store.upsert(_static("t-node-1", uid="f" * 32, mirror="api-2"))
    store.upsert(pod("a"))
    store.replace_all([pod("a"), _static("t-node-1", uid="f" * 32, mirror="api-2")], resource_version="9")
    assert _names(store) == ["a", "s-node-1", "t-node-1"]
    store.put_static([])
    assert _names(store) == ["a", "t-node-1"]


def test_a_mirror_pod_that_is_made_anew_has_the_same_static_pod() -> None:
    """Who deletes it does not end the pod: the kubelet makes another of the same hash. The former one does not return."""
    store = PodStore()
    store.upsert(_static(mirror="api-1"))
    store.remove(PodUid("api-1"))
    assert store.pods() == ()
    store.upsert(_static(mirror="api-1", version="6"))
    assert store.pods() == ()
    store.upsert(_static(mirror="api-2", version="7"))
    assert [one.object_uid for one in store.pods()] == ["api-2"]


def test_a_forged_mirror_pod_does_not_take_a_static_pods_place() -> None:
    """Anyone who may create pods can make one that names the hash; its own name gives it away."""
    store = PodStore()
    real = _static(mirror="api-1")
    store.upsert(real)
    forged = _static("forged", mirror="api-2", version="8")
    store.upsert(forged)
    store.replace_all([real, forged], resource_version="9")
    store.remove(PodUid("api-2"))
    assert store.pods() == (real,)
