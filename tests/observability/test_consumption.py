"""Counters of what containers had and used: exact by time, counted once, never falling, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.observability.consumption import KEPT_S, MAX_ENDED, Consumption
from gpushare_agent.core.model.allocations import (
    Allocation,
    Charge,
    ClaimRef,
    ClaimShare,
    ContainerKey,
    ResizedShare,
    ShareSize,
)
from gpushare_agent.core.model.names import MIB, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, UsageRound
from tests.fakes.clock import FakeClock
from tests.observability.support_usage import GPU_MIB, UUIDS, allocation, counting_node, inventory, key_of

GIB = 1024 * MIB
Rows = dict[tuple[str, str, str], float]
"""By pod and container, GPU index, kind."""


class Node:
    """A ledger, and what is counted of it."""

    def __init__(self) -> None:
        self.clock, self.cache, self.round_at = FakeClock(1000.0), AllocationCache(), 900.0
        self.counted = self.again(self.cache)

    def again(self, cache: AllocationCache) -> Consumption:
        self.node = counting_node(cache, inventory())
        counted = Consumption(self.node, self.clock)
        cache.subscribe(lambda old, new: counted.changed(one.key) if (one := new or old) else None)
        self.cache, self.counted = cache, counted
        return counted

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def round(self, *uses: tuple[ContainerKey, float | None, int | None], gpu: int = 0) -> None:
        found = {
            (key, UUIDS[gpu]): ContainerUse(key=key, uuid=UUIDS[gpu], pids=(7,), sm_ratio=sm, memory_bytes=size)
            for key, sm, size in uses
        }
        sample = GpuSample(uuid=UUIDS[gpu], processes=())
        covered_s, self.round_at = self.clock.now - self.round_at, self.clock.now
        self.counted.add(UsageRound(sampled_at=1.0, gpus={UUIDS[gpu]: sample}, containers=found, covered_s=covered_s))

    def rows(self) -> tuple[Rows, Rows]:
        found = []
        for series in self.counted.series():
            values: Rows = {}
            for line in "".join(series.lines).splitlines():
                text, _, value = line.rpartition(" ")
                head, _, rest = text.partition("{")
                labels = dict(one.split("=") for one in rest.rstrip("}").replace('"', "").split(","))
                assert (head, series.kind, labels["node"]) == (series.name, "counter", "n1")
                name = f"{labels['pod']}/{labels['container']}", labels["gpu"], labels["kind"]
                assert name not in values, "a series twice"
                values[name] = float(value)
            found.append(values)
        found += [{}, {}]
        return found[0], found[1]

    def seconds(self) -> Rows:
        return self.rows()[0]


ALLOCATED, USED = ("p/main", "0", "allocated"), ("p/main", "0", "used")


def test_what_is_allocated_counts_by_the_clock_whether_or_not_anybody_reads() -> None:
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.wait(3600)
    assert node.rows() == ({ALLOCATED: 1440.0, USED: 0.0}, {ALLOCATED: 2 * GIB * 3600, USED: 0.0})


def test_a_round_counts_for_the_time_for_which_it_stands() -> None:
    """None, which is no round, for nothing."""
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.wait(0.5)
    node.round((key_of(1), 0.2, GIB))  # its first: not for the time before it began
    for seconds in (1.0, 2.5, 60.5):
        node.wait(seconds)
        node.round((key_of(1), 0.2, GIB))
    node.counted.add(None)
    assert node.seconds()[USED] == pytest.approx(0.2 * 64.5)
    assert node.rows()[1][USED] == pytest.approx(GIB * 64.5)


def test_a_container_on_two_gpus_has_rows_of_both() -> None:
    node = Node()
    node.cache.put(allocation(key_of(1), (0, 1), cores=200, blocks=0))
    node.wait(10)
    node.round((key_of(1), 1.0, GIB), gpu=1)
    seconds, sizes = node.rows()
    assert {name: value for name, value in seconds.items() if name[2] == "allocated"} == {
        ("p/main", "0", "allocated"): 10.0,
        ("p/main", "1", "allocated"): 10.0,
    }
    assert sizes["p/main", "1", "allocated"] == GPU_MIB * MIB * 10
    assert (seconds[USED], seconds["p/main", "1", "used"]) == (0.0, 10.0)


def test_devices_that_an_init_container_handed_on_count_once() -> None:
    """For the container that has them; what only the init container had is held for the pod's whole life."""
    node = Node()
    node.cache.put(allocation(key_of(1, "init"), cores=40, blocks=8, kind=ContainerKind.INIT))
    node.cache.put(allocation(key_of(1), cores=30, blocks=8))
    node.wait(10)
    node.round((key_of(1, "init"), 0.1, GIB))
    seconds, sizes = node.rows()
    assert (seconds["p/init", "0", "allocated"], seconds[ALLOCATED]) == (1.0, 3.0)
    assert (sizes["p/init", "0", "allocated"], sizes[ALLOCATED]) == (0, 2 * GIB * 10)
    assert seconds["p/init", "0", "used"] == pytest.approx(1.0)
    early = allocation(key_of(2, "early"), pod="q", kind=ContainerKind.INIT)
    # The kubelet asked for its memory first.
    node.cache.put(replace(early, ids={ResourceKind.VMEMORY: early.ids_of(ResourceKind.VMEMORY)}))
    node.cache.put(early)
    node.cache.put(allocation(key_of(2), pod="q"))
    node.wait(10)
    assert [name for name in node.seconds() if name[0] == "q/early"] == []


def test_a_claim_that_several_pods_use_counts_once() -> None:
    node = Node()
    share = ClaimShare(ref=ClaimRef("default", "c", "u"), shown_as="c", request="r", isolation="none")
    one = replace(allocation(key_of(1), blocks=0, cores=0), ids={}, claim=share, charge=Charge(cores=25, blocks=4))
    node.cache.put(one)
    node.wait(100)
    assert node.seconds()["p/claim:c/main", "0", "allocated"] == 25.0


def test_a_live_resize_counts_from_its_moment() -> None:
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.wait(10)
    size = ShareSize(cores=10, memory=4)
    node.cache.charge(
        ResizedShare(
            key=key_of(1), gpu=UUIDS[0], kind=ResourceKind.VMEMORY, allocated=ShareSize(cores=40, memory=8), target=size,
            charged=size,
        )
    )  # fmt: skip
    node.cache.resize(key_of(1))
    node.wait(10)
    assert (node.seconds()[ALLOCATED], node.rows()[1][ALLOCATED]) == (5.0, 30 * GIB)


def test_the_last_value_of_a_container_that_ended_is_shown_for_some_minutes() -> None:
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.wait(10)
    node.round((key_of(1), 0.5, GIB))
    node.cache.release(key_of(1))
    node.wait(KEPT_S - 1)
    node.round((key_of(1), 0.5, GIB))
    assert node.seconds() == {ALLOCATED: 4.0, USED: 5.0}
    node.wait(1)
    assert node.seconds() == {}


def test_a_namesake_goes_on_where_the_pod_before_it_was() -> None:
    """Also while both have processes, because the first was deleted by force: no counter falls when either ends."""
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.wait(10)
    node.cache.put(allocation(key_of(2)))
    node.wait(10)
    node.cache.release(key_of(1))
    node.wait(2 * KEPT_S)
    assert node.seconds()[ALLOCATED] == 0.4 * (20 + 10 + 2 * KEPT_S)
    node.cache.release(key_of(2))
    node.wait(KEPT_S / 2)
    before = node.seconds()[ALLOCATED]
    node.cache.put(allocation(key_of(3)))
    node.wait(KEPT_S)
    assert node.seconds()[ALLOCATED] == pytest.approx(before + 0.4 * KEPT_S)


def test_pods_that_end_at_once_leave_a_bounded_number_of_rows() -> None:
    node = Node()
    for number in range(MAX_ENDED + 40):
        node.cache.put(allocation(key_of(number), pod=f"p{number}"))
        node.wait(0.01)
        node.cache.release(key_of(number))
    assert len(node.counted._rows) == MAX_ENDED
    assert f"p{MAX_ENDED + 39}/main" in {name[0] for name in node.seconds()}


def test_what_is_unknown_has_no_row() -> None:
    """A GPU that lists no processes, and one that does not say how much they compute, such as a MIG instance. Without
    processes nothing is used, which is known."""
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.round((key_of(1), None, GIB))
    assert (set(node.seconds()), set(node.rows()[1])) == (set(), set())
    node.wait(1)
    node.round((key_of(1), None, GIB))
    assert (set(node.seconds()), set(node.rows()[1])) == ({ALLOCATED}, {ALLOCATED, USED})
    use = ContainerUse(key=key_of(1), uuid=UUIDS[0], pids=())
    sample = GpuSample(uuid=UUIDS[0])
    node.counted.add(UsageRound(sampled_at=1.0, gpus={UUIDS[0]: sample}, containers={(key_of(1), UUIDS[0]): use}))
    assert set(node.rows()[1]) == {ALLOCATED}
    idle = replace(use, sm_ratio=0.0, memory_bytes=0)
    node.counted.add(UsageRound(sampled_at=2.0, gpus={UUIDS[0]: sample}, containers={(key_of(1), UUIDS[0]): idle}))
    assert (set(node.seconds()), set(node.rows()[1])) == ({ALLOCATED, USED}, {ALLOCATED, USED})
    node.round((key_of(1), 0.1, GIB))
    assert set(node.seconds()) == {ALLOCATED, USED}


def test_a_gpu_that_is_not_known_yet_counts_once_it_is() -> None:
    """The place of a MIG instance that is made for a claim."""
    node = Node()
    node.node.inventory.current = inventory(1)
    node.cache.put(allocation(key_of(1), (1,)))
    node.wait(10)
    assert node.seconds() == {}
    node.node.inventory.current = inventory(2)
    node.counted.gpus_changed()
    node.wait(10)
    assert node.seconds()["p/main", "1", "allocated"] == 4.0


def test_a_change_of_gpus_counts_each_pod_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of its containers, with all of them."""
    node, counted = Node(), list[PodUid]()
    for pod in range(3):
        for container in range(4):
            node.cache.put(allocation(key_of(pod, f"c{container}"), pod=f"p{pod}"))
    of_pod = node.cache.of_pod
    monkeypatch.setattr(node.cache, "of_pod", lambda uid: (counted.append(uid), of_pod(uid))[1])
    node.counted.gpus_changed()
    assert counted == [key_of(pod).pod_uid for pod in range(3)]


def test_a_reload_counts_on_and_ends_what_ended_meanwhile() -> None:
    node = Node()
    node.cache.put(allocation(key_of(1)))
    node.cache.put(allocation(key_of(2), pod="q"))
    node.round()
    node.wait(10)
    former = node.counted
    node.again(AllocationCache()).take_over(former)
    node.wait(2)
    node.cache.put(allocation(key_of(1)))
    node.wait(2)
    node.round((key_of(1), 0.5, GIB))
    node.wait(10)
    seconds = node.seconds()
    assert (seconds[ALLOCATED], seconds[USED]) == (pytest.approx(0.4 * 24), pytest.approx(0.5 * 14))
    assert seconds["q/main", "0", "allocated"] == pytest.approx(0.4 * 14)


def test_a_container_counts_once_its_pod_is_known() -> None:
    """The kubelet's checkpoint alone has no names."""
    node = Node()
    node.cache.put(replace(allocation(key_of(1)), pod_name="", namespace=""))
    node.wait(10)
    node.cache.put(allocation(key_of(1)))
    node.wait(10)
    assert node.seconds() == {ALLOCATED: 4.0, USED: 0.0}


Step = tuple[int, str, bool, int, int]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(("init", "main", "other")), st.booleans(), st.integers(0, 4),
                  st.integers(1, 30)),
        max_size=20,
    )
)  # fmt: skip
def test_all_rows_together_are_what_the_ledger_charges_and_none_falls(steps: list[Step]) -> None:
    """Containers of three pods, two with one name, come and go, and hand devices on within a pod."""
    node, charged, before = Node(), 0, {}
    for pod, container, is_there, first, seconds in steps:
        key = key_of(pod, container)
        if is_there:
            kind = ContainerKind.INIT if container == "init" else ContainerKind.MAIN
            # Main containers of one pod never share devices; an init container's go to any of them.
            begin = {"init": first, "main": 0, "other": 10}[container] * 2
            cores = frozenset(device_id(UUIDS[0], 100 * pod + begin + n) for n in range(12))
            one: Allocation = allocation(key, pod="p" if pod < 3 else "q", kind=kind)
            node.cache.put(replace(one, ids={ResourceKind.VCORE: cores}))
        else:
            node.cache.release(key)
        node.wait(seconds)
        node.round((key, 0.3, GIB))
        charged += sum(charge.cores for charge in node.cache.charges().values()) * seconds
        now = node.seconds()
        assert all(now.get(name, value) >= value for name, value in before.items())
        before = now
    counted = sum(row.allocated_until(node.clock.now)[0] for row in node.counted._rows.values())
    assert counted == pytest.approx(charged)
