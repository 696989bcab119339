"""The allocation cache counts distinct IDs and forgets exactly what is released."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import allocation, container, ids, pod, used_blocks, used_cores

GPU = GpuUuid("GPU-0")


def test_an_id_handed_on_inside_a_pod_counts_once() -> None:
    """Init container and sidecar hold the same five IDs: five units are used."""
    chain = pod("chain", container("i", cores=5, kind=ContainerKind.INIT), container("s", cores=5))
    cache = AllocationCache()
    cache.put(allocation(chain, "i", ids(0, range(5)), ids(0, range(2)), ContainerKind.INIT))
    cache.put(allocation(chain, "s", ids(0, range(5)), ids(0, range(2))))
    assert used_cores(cache) == {GPU: 5}
    assert used_blocks(cache) == {GPU: 2}
    cache.release(ContainerKey(chain.uid, "i"))
    assert used_cores(cache) == {GPU: 5}
    cache.release_pod(chain.uid)
    assert used_cores(cache) == {} and not cache.holders(ResourceKind.VCORE)


def test_use_can_be_seen_without_one_container() -> None:
    """Its own IDs are free for itself."""
    one, two = pod("one"), pod("two")
    cache = AllocationCache()
    cache.put(allocation(one, "main", ids(0, range(10)), ids(0, range(3))))
    cache.put(allocation(two, "main", ids(0, range(10, 30)), ids(0, range(3, 5))))
    assert used_cores(cache, without=ContainerKey(one.uid, "main")) == {GPU: 20}
    assert used_blocks(cache, without=ContainerKey(one.uid, "main")) == {GPU: 2}


def test_whole_gpus_charge_no_blocks() -> None:
    """Their memory needs no counting; no other container can share them."""
    cache = AllocationCache()
    cache.put(allocation(pod("w"), "main", ids(0, range(100)), ids(0, range(7))))
    assert used_cores(cache) == {GPU: 100} and used_blocks(cache) == {}


def test_changes_are_reported() -> None:
    """A subscriber sees old and new of each container."""
    seen: list[tuple[bool, bool]] = []
    cache = AllocationCache()
    cache.subscribe(lambda old, new: seen.append((old is not None, new is not None)))
    one = pod("one")
    cache.put(allocation(one, "main", ids(0, range(1)), []))
    cache.put(allocation(one, "main", ids(0, range(2)), []))
    cache.release_pod(one.uid)
    cache.release_pod(one.uid)
    assert seen == [(False, True), (True, True), (True, False)]


KEYS = st.tuples(st.sampled_from(["p", "q", "r"]), st.sampled_from(["a", "b"]))
STEPS = st.lists(
    st.tuples(KEYS, st.frozensets(st.integers(0, 12)), st.frozensets(st.integers(0, 12)), st.booleans()), max_size=30
)


@settings(deadline=None)
@given(STEPS)
def test_the_indexes_always_say_what_the_allocations_say(
    steps: list[tuple[tuple[str, str], frozenset[int], frozenset[int], bool]],
) -> None:
    """After any sequence of puts and releases the holders are exactly those of the allocations left."""
    cache = AllocationCache()
    model: dict[ContainerKey, tuple[frozenset[str], frozenset[str]]] = {}
    for (name, inner), cores, memory, is_release in steps:
        key = ContainerKey(PodUid(f"uid-{name}"), inner)
        if is_release:
            cache.release(key)
            model.pop(key, None)
        else:
            made = allocation(pod(name), inner, [f"GPU-0::{n}" for n in cores], [f"GPU-0::{n}" for n in memory])
            cache.put(made)
            model[key] = (made.ids_of(ResourceKind.VCORE), made.ids_of(ResourceKind.VMEMORY))
    for position, kind in enumerate((ResourceKind.VCORE, ResourceKind.VMEMORY)):
        expected: dict[str, set[ContainerKey]] = {}
        for key, held in model.items():
            for device in held[position]:
                expected.setdefault(device, set()).add(key)
        assert {d: set(k) for d, k in cache.holders(kind).items()} == expected
    assert {a.key for a in cache} == set(model)
    assert all(DeviceId(d) for d in cache.holders(ResourceKind.VCORE))
    assert len(cache) == len(model)
