"""One GPU as its node reports it to the cluster, as a document. Pure."""

from __future__ import annotations

from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.node_report import documents
from gpushare_agent.core.placement.gpu_account import GpuAccount

NO_REASON = "no reason given"
"""The reason of a cordon without one: an empty text would read as "not cordoned" in many languages."""


def reported_state(gpu: GpuReport) -> documents.MigGpu:
    """Whether it is in service, and why not."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "is_healthy": gpu.is_healthy,
        # An agent of another version says that a GPU is unhealthy, not why.
        "health_reason": gpu.unhealthy_reason or ("" if gpu.is_healthy else None),
        "cordoned": gpu.cordoned or None,
    }


def reported_gpu(gpu: GpuReport, account: GpuAccount) -> documents.ReportedGpu:
    """One GPU as its node reports it to the cluster."""
    document: documents.ReportedGpu = {
        **reported_state(gpu),  # type: ignore[typeddict-item]  # it has no further keys
        # A MIG instance that takes no shares has no cores to offer; allocated as a whole it would show 100 of 0.
        "cores": {"capacity": gpu.cores, "allocated": min(account.allocated_cores, gpu.cores)},
        "memory": {"capacity_bytes": gpu.memory_bytes, "allocated_bytes": account.allocated_mib * MIB},
    }
    if gpu.host_memory is not None:
        document["host_memory"] = gpu.host_memory
    if gpu.mig is not None:
        document["mig"] = {"label": gpu.mig.label, "profile": gpu.mig.profile}
    return document
