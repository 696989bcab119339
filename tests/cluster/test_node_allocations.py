"""The node's annotation about the allocations: what is in it, and when it is written, through a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.cluster.node_fields import ALLOCATIONS, ROLE, NodeFieldsWriter
from gpushare_agent.agent.cluster.part import AllocationsReport
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    AllocatedTo,
    allocations_annotation,
    allocations_by_pod,
)
from tests.cluster.support_kube import FAST, NODE, opened, running
from tests.fakes.api_server import FakeApiServer, Seen, answers, fake_api, raw_status
from tests.support_core import allocation as made_allocation
from tests.support_core import container, inventory, used_blocks
from tests.support_core import ids as made_ids
from tests.support_core import pod as made_pod
from tests.support_node import node_of

NAMES = ResourceNames()
UID = PodUid("u1")


def gpu(index: int) -> Gpu:
    return Gpu(index=index, minor=index, uuid=GpuUuid(f"GPU-{index}"), bus_id="", name="", memory_mib=16384)


GPUS = [gpu(index) for index in range(4)]


def ids(*gpus: int, first: int = 0, count: int = 100) -> frozenset[DeviceId]:
    return frozenset(DeviceId(f"GPU-{one}::{number}") for one in gpus for number in range(first, first + count))


def allocation(
    name: str = "main", gpus: tuple[int, ...] = (0,), *, uid: PodUid = UID, at: float = 0.0, **more: Any
) -> Allocation:
    kinds = {"cores": ResourceKind.VCORE, "blocks": ResourceKind.VMEMORY, "units": ResourceKind.GPU_MEM}
    found = {kind: more.pop(name) for name, kind in kinds.items() if name in more}
    return Allocation(
        key=ContainerKey(uid, name),
        namespace="default",
        pod_name=f"pod-{uid}",
        kind=more.pop("kind", ContainerKind.MAIN),
        gpus=tuple(GpuUuid(f"GPU-{one}") for one in gpus),
        allocated_at=at,
        ids=found,
        **more,
    )


def pod(*containers: ContainerSpec, started: bool = False) -> Pod:
    return Pod(
        uid=UID, namespace="default", name="p", phase=PodPhase.PENDING, containers=containers, has_started=started
    )


def spec(
    name: str = "main", cores: int = 0, blocks: int = 0, kind: ContainerKind = ContainerKind.MAIN
) -> ContainerSpec:
    return ContainerSpec(name=name, kind=kind, position=0, requests={NAMES.vcore: cores, NAMES.vmemory: blocks})


def counts_of(*allocations: Allocation, known: Pod | None = None) -> dict[str, dict[int, tuple[int, ...]]]:
    found = allocations_by_pod(allocations, GPUS, lambda uid: known, NAMES)
    return {one.pod_uid: dict(one.gpus) for one in found.values()}


# --- what is in it ---


def test_a_share_is_its_cores_and_its_blocks_on_its_gpu() -> None:
    """The memory is charged to the GPU of the cores, whatever GPU its IDs name."""
    share = allocation(gpus=(1,), cores=ids(1, count=30), blocks=ids(3, count=4))
    assert counts_of(share) == {UID: {1: (30, 4)}}


def test_whole_gpus_are_said_to_be_whole_and_their_memory_is_not_counted() -> None:
    """All of it is theirs."""
    whole = allocation(gpus=(0, 2), cores=ids(0, 2), blocks=ids(0, count=8), is_whole=True)
    assert counts_of(whole) == {UID: {0: (100, 0, 0, 1), 2: (100, 0, 0, 1)}}


def test_ids_that_containers_of_one_pod_share_count_once() -> None:
    """The kubelet hands an init container's IDs to those after it."""
    first = allocation("init", cores=ids(0, count=50), blocks=ids(0, count=5), kind=ContainerKind.INIT)
    then = allocation("main", cores=ids(0, first=20, count=40), blocks=ids(0, first=3, count=4))
    assert counts_of(first, then) == {UID: {0: (60, 7)}}


def test_units_of_gpu_memory_stand_in_the_third_place() -> None:
    """Zeros before them stay, zeros behind are left out."""
    assert counts_of(allocation(units=ids(0, count=6))) == {UID: {0: (0, 0, 6)}}


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param((), id="the second container"),
        pytest.param((allocation("second", (0,), cores=ids(0, first=30, count=10)),), id="its memory"),
    ],
)
def test_a_pod_whose_admission_is_under_way_is_not_named(missing: tuple[Allocation, ...]) -> None:
    """The extender would take half a pod for all of it, and give the other half away."""
    first = allocation("first", cores=ids(0, count=30), blocks=ids(0, count=4))
    known = pod(spec("first", 30, 4), spec("plain"), spec("second", 10, 2))
    assert counts_of(first, *missing, known=known) == {}
    second = allocation("second", cores=ids(0, first=30, count=10), blocks=ids(0, first=4, count=2))
    assert counts_of(first, second, known=known) == {UID: {0: (40, 6)}}


def test_a_pod_that_has_started_is_named_with_what_it_has() -> None:
    """Its init container's IDs may be gone from the kubelet's list; nothing more is to come."""
    main = allocation("main", cores=ids(0, count=30), blocks=ids(0, count=4))
    known = pod(spec("init", 50, 4, ContainerKind.INIT), spec("main", 30, 4), started=True)
    assert counts_of(main, known=known) == {UID: {0: (30, 4)}}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(1, 40),
            st.integers(0, 60),
            st.integers(0, 8),
        ),
        max_size=8,
    )
)
def test_the_sums_are_those_of_the_allocation_cache(rows: list[tuple[str, int, int, int, int, int]]) -> None:
    """What the agent believes to be free, the extender believes too."""
    cache = AllocationCache()
    for uid, number, index, cores, first, blocks in rows:
        cache.put(
            allocation(
                f"c{number}",
                (index,),
                uid=PodUid(f"{uid}{index}"),
                cores=ids(index, first=first, count=cores),
                blocks=frozenset(DeviceId(f"GPU-0::{uid}{index}{n}") for n in range(blocks)),
            )
        )
    found = allocations_by_pod(cache, GPUS, lambda uid: None, NAMES)
    for one in GPUS:
        counts = [(*pod_gpus.gpus.get(one.index, ()), 0, 0)[:2] for pod_gpus in found.values()]
        by_pod = {f"{uid}{one.index}" for uid in "ab"}
        cores = [
            len({d for a in cache if a.key.pod_uid == uid for d in a.ids_of(ResourceKind.VCORE)})
            for uid in sorted(by_pod)
        ]
        assert sum(count[0] for count in counts) == sum(cores)
        assert sum(count[1] for count in counts) == used_blocks(cache).get(one.uuid, 0)


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


# --- when it is written ---


class NodeObject:
    """A node of the API server: answers GET, applies merge patches."""

    def __init__(self, text: str | None = None) -> None:
        self.annotations: dict[str, str] = {} if text is None else {ALLOCATIONS_ANNOTATION: text}
        self.patched = asyncio.Event()

    async def __call__(self, server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        if seen.method == "PATCH":
            self.annotations |= seen.body["metadata"]["annotations"]
            self.patched.set()
        body = {"kind": "Node", "metadata": {"name": NODE, "annotations": self.annotations}}
        return await answers(200, body)(server, seen, request)

    async def wait_patch(self) -> str:
        await self.patched.wait()
        self.patched.clear()
        return self.annotations[ALLOCATIONS_ANNOTATION]


class Ledger:
    def __init__(self, text: str | None = "first") -> None:
        self.text = text
        self.reads = 0
        self._is_read = asyncio.Event()

    def __call__(self) -> str | None:
        self.reads += 1
        self._is_read.set()
        return self.text

    async def wait_reads(self, count: int) -> None:
        while self.reads < count:
            self._is_read.clear()
            await self._is_read.wait()


@asynccontextmanager
async def written(
    server: FakeApiServer, ledger: Ledger, *, gap_s: float = 0.0, period_s: float = 60.0
) -> AsyncIterator[NodeFieldsWriter[str]]:
    fields = replace(ALLOCATIONS, gap_s=gap_s, period_s=period_s)
    writer = NodeFieldsWriter(fields=fields, node_name=NODE, desired=ledger, backoff=FAST)
    async with opened(server.url) as api, running(lambda: writer.run(api)):
        yield writer


def methods(server: FakeApiServer) -> list[str]:
    return [request.method for request in server.seen]


async def wait_requests(server: FakeApiServer, count: int) -> None:
    await server.wait_for(lambda seen: len(seen) >= count)


async def test_each_change_is_one_patch_and_the_node_is_read_once() -> None:
    """A node with many pods changes often; what was written last is known."""
    node, ledger = NodeObject(), Ledger()
    async with fake_api(others=[node]) as server, written(server, ledger) as writer:
        assert await node.wait_patch() == "first"
        ledger.text = "second"
        writer.changed()
        assert await node.wait_patch() == "second"
        assert methods(server) == ["GET", "PATCH", "PATCH"]
        assert server.seen[-1].body == {"metadata": {"annotations": {ALLOCATIONS_ANNOTATION: "second"}}}


async def test_changes_during_the_gap_are_one_patch() -> None:
    """However many pods come in one second."""
    node, ledger = NodeObject(), Ledger()
    async with fake_api(others=[node]) as server, written(server, ledger, gap_s=0.2) as writer:
        await node.wait_patch()
        for number in range(50):
            ledger.text = f"change {number}"
            writer.changed()
            await asyncio.sleep(0)
        assert await node.wait_patch() == "change 49"
        assert methods(server) == ["GET", "PATCH", "PATCH"]


async def test_what_the_node_says_already_is_not_written_again() -> None:
    """After the agent's own restart nothing has changed."""
    node, ledger = NodeObject("first"), Ledger()
    async with fake_api(others=[node]) as server, written(server, ledger) as writer:
        await wait_requests(server, 1)
        reads = ledger.reads
        writer.changed()
        await ledger.wait_reads(reads + 2)
        assert methods(server) == ["GET"]


async def test_nothing_is_written_until_the_ledger_can_be_trusted() -> None:
    """An empty text would give away what running pods have."""
    node, ledger = NodeObject("what the agent before it wrote"), Ledger(None)
    async with fake_api(others=[node]) as server, written(server, ledger) as writer:
        await ledger.wait_reads(3)
        assert methods(server) == []
        ledger.text = "known now"
        writer.changed()
        assert await node.wait_patch() == "known now"


async def test_what_somebody_undid_comes_back_after_the_period() -> None:
    """Level, not edge."""
    node, ledger = NodeObject(), Ledger()
    async with fake_api(others=[node]) as server, written(server, ledger, period_s=0.1):
        await node.wait_patch()
        node.annotations[ALLOCATIONS_ANNOTATION] = "forged"
        assert await node.wait_patch() == "first"
        assert "forged" not in node.annotations.values()


async def test_after_a_failed_patch_the_node_is_read_again() -> None:
    """The server may have taken it all the same."""
    node, ledger = NodeObject(), Ledger()
    fails = answers(500, raw_status(500, "etcd is away"))

    async def answer(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        is_first_patch = seen.method == "PATCH" and methods(server).count("PATCH") == 1
        return await (fails if is_first_patch else node)(server, seen, request)

    async with fake_api(others=[answer]) as server, written(server, ledger):
        assert await node.wait_patch() == "first"
        assert methods(server) == ["GET", "PATCH", "GET", "PATCH"]


async def test_a_missing_right_is_reported_once_with_what_is_lost_and_the_cure() -> None:
    """And asked for again each period, not each second."""
    ledger = Ledger()
    with capture_logs() as logs:
        async with (
            fake_api(others=[answers(403, raw_status(403, "nodes is forbidden"))]) as server,
            written(server, ledger, period_s=0.05),
        ):
            await wait_requests(server, 3)
    (reported,) = [entry for entry in logs if entry["event"] == "node_fields_not_written"]
    assert ROLE in reported["cure"] and "extender" in reported["lost"]


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
        one, at = made_pod(f"p{number}", container(cores=20, blocks=2), resource_version=str(at + 1)), at + 1
        others = [other for other in store.pods() if other.uid != one.uid]
        cores = range(number * 20, number * 20 + (20 if step == "put" else 10))
        if step in ("put", "grow"):
            cache.put(made_allocation(one, "main", made_ids(0, cores), made_ids(0, range(number * 2, number * 2 + 2))))
        if step == "free":
            cache.release_pod(one.uid)
        elif step == "gpus":
            node.inventory.current = inventory(1 + number % 2)
            report.changed(None)
        else:
            new = replace(one, has_started=step == "start")
            store.replace_all(others if step == "gone" else [*others, new], resource_version=str(at))
        assert report.text() == AllocationsReport(node).text()
