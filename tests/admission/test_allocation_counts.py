"""The allocation cache's running counts against counting everything again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import GpuUuid, PodUid, device_id
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import used_blocks, used_cores

GPUS = [GpuUuid("GPU-0"), GpuUuid("GPU-1")]
KEYS = [ContainerKey(PodUid(f"uid-{pod}"), name) for pod in range(2) for name in ("first", "second")]
DEVICES = st.frozensets(st.builds(device_id, st.sampled_from(GPUS), st.integers(0, 3)), max_size=4)
ALLOCATIONS = st.builds(
    Allocation,
    key=st.sampled_from(KEYS),
    namespace=st.just("default"),
    pod_name=st.just("pod"),
    kind=st.just(ContainerKind.MAIN),
    gpus=st.lists(st.sampled_from(GPUS), max_size=2, unique=True).map(tuple),
    ids=st.fixed_dictionaries({ResourceKind.VCORE: DEVICES, ResourceKind.VMEMORY: DEVICES}),
    is_whole=st.booleans(),
)
CHANGES = st.lists(ALLOCATIONS | st.sampled_from(KEYS))


def _cores(cache: AllocationCache, without: ContainerKey | None) -> dict[GpuUuid, int]:
    held = {(a.key.pod_uid, device) for a in cache if a.key != without for device in a.ids_of(ResourceKind.VCORE)}
    counts = {gpu: sum(device.startswith(f"{gpu}::") for _, device in held) for gpu in GPUS}
    return {gpu: count for gpu, count in counts.items() if count}


def _blocks(cache: AllocationCache, without: ContainerKey | None) -> dict[GpuUuid, int]:
    charged = {
        gpu: {
            (a.key.pod_uid, d)
            for a in cache
            if a.key != without and not a.is_whole and a.gpus[:1] == (gpu,)
            for d in a.ids_of(ResourceKind.VMEMORY)
        }
        for gpu in GPUS
    }
    return {gpu: len(ids) for gpu, ids in charged.items() if ids}


@settings(deadline=None)
@given(CHANGES)
def test_counts_by_gpu_equal_a_count_of_everything_after_any_changes(
    changes: list[Allocation | ContainerKey],
) -> None:
    """However containers come, change, share IDs in their pod and go, the counts kept along are those of a new count."""
    cache = AllocationCache()
    for change in changes:
        if isinstance(change, Allocation):
            cache.put(change)
        else:
            cache.release(change)
        for without in (None, *KEYS):
            assert used_cores(cache, without=without) == _cores(cache, without)
            assert used_blocks(cache, without=without) == _blocks(cache, without)
