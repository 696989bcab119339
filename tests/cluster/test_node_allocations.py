"""The node's annotation about the allocations: what is in it. When it is written: test_node_fields.py."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.cluster.part import AllocationsReport
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.node_report.annotations import AllocatedTo, allocations_annotation, allocations_by_pod
from tests.support_core import NAMES, allocation, container, ids, inventory, pod
from tests.support_node import node_of

GPUS = inventory(4).gpus
ONE = pod("one")


def counts_of(*allocations: Allocation, known: Pod | None = None) -> dict[str, dict[int, tuple[int, ...]]]:
    found = allocations_by_pod(allocations, GPUS, lambda uid: known, NAMES)
    return {one.pod_uid: dict(one.gpus) for one in found.values()}


def test_a_share_is_its_cores_and_its_blocks_on_its_gpu() -> None:
    """The memory is charged to the GPU of the cores, whatever GPU its IDs name."""
    share = allocation(ONE, "main", ids(1, range(30)), ids(3, range(4)))
    assert counts_of(share) == {ONE.uid: {1: (30, 4)}}


def test_whole_gpus_are_said_to_be_whole_and_their_memory_is_not_counted() -> None:
    """All of it is theirs."""
    whole = allocation(ONE, "main", ids(0, range(100)) + ids(2, range(100)), ids(0, range(8)))
    assert counts_of(whole) == {ONE.uid: {0: (100, 0, 0, 1), 2: (100, 0, 0, 1)}}


def test_ids_that_containers_of_one_pod_share_count_once() -> None:
    """The kubelet hands an init container's IDs to those after it."""
    first = allocation(ONE, "init", ids(0, range(50)), ids(0, range(5)), ContainerKind.INIT)
    then = allocation(ONE, "main", ids(0, range(20, 60)), ids(0, range(3, 7)))
    assert counts_of(first, then) == {ONE.uid: {0: (60, 7)}}


def test_units_of_gpu_memory_stand_in_the_third_place() -> None:
    """Zeros before them stay, zeros behind are left out."""
    assert counts_of(allocation(ONE, "main", [], [], units=ids(0, range(6)))) == {ONE.uid: {0: (0, 0, 6)}}


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param((), id="the second container"),
        pytest.param((allocation(ONE, "second", ids(0, range(30, 40)), []),), id="its memory"),
    ],
)
def test_a_pod_whose_admission_is_under_way_is_not_named(missing: tuple[Allocation, ...]) -> None:
    """The extender would take half a pod for all of it, and give the other half away."""
    first = allocation(ONE, "first", ids(0, range(30)), ids(0, range(4)))
    known = pod("one", container("first", 30, 4), container("plain"), container("second", 10, 2))
    assert counts_of(first, *missing, known=known) == {}
    second = allocation(ONE, "second", ids(0, range(30, 40)), ids(0, range(4, 6)))
    assert counts_of(first, second, known=known) == {ONE.uid: {0: (40, 6)}}


def test_a_pod_that_has_started_is_named_with_what_it_has() -> None:
    """Its init container's IDs may be gone from the kubelet's list; nothing more is to come."""
    main = allocation(ONE, "main", ids(0, range(30)), ids(0, range(4)))
    known = pod("one", container("init", 50, 4, ContainerKind.INIT), container("main", 30, 4), has_started=True)
    assert counts_of(main, known=known) == {ONE.uid: {0: (30, 4)}}


def test_the_text_is_compact_sorted_and_has_a_schema() -> None:
    """The same holdings give the same text, or it would be written again and again."""
    text = allocations_annotation(
        [
            AllocatedTo(pod_uid=PodUid("b"), gpus={2: (30, 4), 10: (5,)}, since=2.0),
            AllocatedTo(pod_uid=PodUid("a"), gpus={0: (100, 0, 0, 1)}, since=1.0),
        ]
    )
    assert text == '{"schema":1,"allocations":{"a":{"0":[100,0,0,1]},"b":{"2":[30,4],"10":[5]}}}'


@given(st.integers(100, 3000), st.integers(1, 40), st.integers(0, 60))
def test_a_text_without_room_for_all_keeps_the_newest_and_says_so(chars: int, most: int, pods: int) -> None:
    """The newest are those whose place the extender does not know yet."""
    every = [AllocatedTo(pod_uid=PodUid(f"uid-{n:03}"), gpus={n % 8: (n, 1)}, since=float(n)) for n in range(pods)]
    text = allocations_annotation(every, max_chars=chars, max_pods=most)
    document = json.loads(text)
    kept = sorted(document["allocations"])
    assert len(text) <= chars and len(kept) <= most
    assert kept == [f"uid-{n:03}" for n in range(pods - len(kept), pods)]
    assert document.get("truncated", False) is (len(kept) < pods)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["put", "grow", "start", "gone", "free", "gpus"])), max_size=20
    )
)
def test_after_any_changes_the_text_is_as_if_made_of_all(steps: list[tuple[int, str]]) -> None:
    """Pods that come, start, end and come back under one UID, with what they had or more; GPUs that change."""
    store, cache, known = PodStore(), AllocationCache(), inventory(2)
    node = node_of(known, pods=store, cache=cache)
    report, at = AllocationsReport(node), 0
    store.subscribe(lambda old, new: [report.changed(one.uid) for one in (old, new) if one is not None])
    cache.subscribe(lambda old, new: report.changed((new or old).key.pod_uid if new or old else None))
    store.replace_all([])
    for number, step in steps:
        one, at = pod(f"p{number}", container(cores=20, blocks=2), resource_version=str(at + 1)), at + 1
        others = [other for other in store.pods() if other.uid != one.uid]
        cores = range(number * 20, number * 20 + (20 if step == "put" else 10))
        if step in ("put", "grow"):
            cache.put(allocation(one, "main", ids(0, cores), ids(0, range(number * 2, number * 2 + 2))))
        if step == "free":
            cache.release_pod(one.uid)
        elif step == "gpus":
            node.inventory.current = inventory(1 + number % 2)
            report.changed(None)
        else:
            new = replace(one, has_started=step == "start")
            store.replace_all(others if step == "gone" else [*others, new], resource_version=str(at))
        assert report.text() == AllocationsReport(node).text()
