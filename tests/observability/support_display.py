"""A sample snapshot: two GPUs, a share, a whole GPU, an unattributed process, with and without use."""

from __future__ import annotations

from msgspec.structs import replace

from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, ProcessSample, UsageRound
from tests.observability.support_usage import facts
from tests.observability.support_usage import snapshot as snapshot_of
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

GPU_MIB = 24 * 1024
GPU_0, GPU_1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")
SECRET = "s3cr3t-value-of-a-tenant"


def train_pod() -> Pod:
    """A pod of one sharing container that names its user, and one without a request."""
    main = replace(container("train", cores=30, blocks=8), env={"SUBMITTER": "ann", "PASSWORD": SECRET})
    return pod("train", main, container("log", position=1), annotations={"clusterName": "blue", "note": SECRET})


def train_allocation() -> Allocation:
    return allocation(train_pod(), "train", ids(0, range(30)), ids(0, range(8)))


def whole_allocation() -> Allocation:
    """Both GPUs' second one, whole, of a pod that the informer has not seen."""
    allocated = allocation(pod("big"), "main", ids(1, range(100)), [])
    return replace(allocated, is_whole=True, kind=ContainerKind.MAIN)


def usage_round() -> UsageRound:
    key = ContainerKey(train_pod().uid, "train")
    processes = (ProcessSample(pid=41), ProcessSample(pid=42), ProcessSample(pid=77))
    return UsageRound(
        sampled_at=1000.0,
        gpus={
            GPU_0: GpuSample(uuid=GPU_0, memory_used_bytes=3 * 1024 * MIB, processes=processes),
            GPU_1: GpuSample(uuid=GPU_1, memory_used_bytes=0, processes=()),
        },
        containers={
            (key, GPU_0): ContainerUse(key=key, uuid=GPU_0, pids=(41, 42), memory_bytes=1536 * MIB, sm_ratio=0.07)
        },
        unattributed={GPU_0: (ProcessSample(pid=77),)},
    )


def snapshot(*, usage: UsageRound | None = None) -> NodeSnapshot:
    containers = facts(train_allocation(), pod=train_pod()), facts(whole_allocation())
    seen = snapshot_of(*containers, usage=usage, gpus=inventory(2, GPU_MIB))
    return replace(seen, agent=replace(seen.agent, version="1.2.3"), names=NAMES)
