"""The allocation cache's running counts and indexes against counting everything again."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import DeviceId, GpuUuid, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import allocation, ids, pod, used_blocks, used_cores

GPUS = [GpuUuid("GPU-0"), GpuUuid("GPU-1")]
KINDS = (ResourceKind.VCORE, ResourceKind.VMEMORY)
PODS = [PodUid("uid-0"), PodUid("uid-1")]
KEYS = [ContainerKey(uid, name) for uid in PODS for name in ("first", "second")]
DEVICES = st.frozensets(st.builds(device_id, st.sampled_from(GPUS), st.integers(0, 3)), max_size=4)
ALLOCATIONS = st.builds(
    Allocation,
    key=st.sampled_from(KEYS),
    namespace=st.just("default"),
    pod_name=st.just("pod"),
    kind=st.just(ContainerKind.MAIN),
    gpus=st.lists(st.sampled_from(GPUS), max_size=2, unique=True).map(tuple),
    ids=st.fixed_dictionaries(dict.fromkeys(KINDS, DEVICES)),
    is_whole=st.booleans(),
)
CHANGES = st.lists(ALLOCATIONS | st.sampled_from(KEYS) | st.sampled_from(PODS))


def _cores(allocations: Collection[Allocation]) -> dict[GpuUuid, int]:
    held = {(a.key.pod_uid, device) for a in allocations for device in a.ids_of(ResourceKind.VCORE)}
    counts = {gpu: sum(device.startswith(f"{gpu}::") for _, device in held) for gpu in GPUS}
    return {gpu: count for gpu, count in counts.items() if count}


def _blocks(allocations: Collection[Allocation]) -> dict[GpuUuid, int]:
    """A whole GPU's memory needs no counting: no other container can share it."""
    charged = {
        gpu: {
            (a.key.pod_uid, d)
            for a in allocations
            if not a.is_whole and a.gpus[:1] == (gpu,)
            for d in a.ids_of(ResourceKind.VMEMORY)
        }
        for gpu in GPUS
    }
    return {gpu: len(held) for gpu, held in charged.items() if held}


@settings(deadline=None)
@given(CHANGES)
def test_counts_and_holders_are_those_of_a_new_count_after_any_changes(
    changes: list[Allocation | ContainerKey | PodUid],
) -> None:
    """However containers come, change, share IDs in their pod (which then count once) and go, alone or with their pod."""
    cache, model = AllocationCache(), dict[ContainerKey, Allocation]()
    for change in changes:
        if isinstance(change, Allocation):
            cache.put(change)
            model[change.key] = change
        elif isinstance(change, ContainerKey):
            cache.release(change)
            model.pop(change, None)
        else:
            cache.release_pod(change)
            model = {key: one for key, one in model.items() if key.pod_uid != change}
        assert list(cache) == [model[key] for key in sorted(model)] and len(cache) == len(model)
        for without in (None, *KEYS):
            others = [one for one in cache if one.key != without]
            assert used_cores(cache, without=without) == _cores(others)
            assert used_blocks(cache, without=without) == _blocks(others)
        for kind in KINDS:
            holders: dict[DeviceId, set[ContainerKey]] = {}
            for one in cache:
                for device in one.ids_of(kind):
                    holders.setdefault(device, set()).add(one.key)
            assert cache.holders(kind) == holders


def test_ids_with_the_same_holders_have_one_set() -> None:
    """Of a container that was named after a restart, whose thousands of IDs another key had for a moment."""
    cache = AllocationCache()
    unnamed, named = (allocation(pod(name), "main", ids(0, range(5)), ids(0, range(5))) for name in ("one", "two"))
    for one in (unnamed, named):
        cache.put(one)
    cache.release(unnamed.key)
    assert len({id(holders) for kind in KINDS for holders in cache.holders(kind).values()}) == 1
