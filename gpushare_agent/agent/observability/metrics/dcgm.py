"""The series of GPUs by the names of NVIDIA's dcgm-exporter, for dashboards and alerts that were made for it.

Only those that mean the same, from the same calls of the driver. Source: dcgm-exporter 4.5.3-4.8.2, etc/default-counters.csv
(names, units) and internal/pkg/rendermetrics (labels). MIG instances have none: there the exporter's numbers are DCGM's own.
A GPU that one container has alone names it, as the exporter does. One that several share names none: the exporter names the
last one that the kubelet lists, or repeats the row for each, and its sums then count the GPU as often.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpushare_agent.agent.observability.metrics.text import Series, labels_text, line
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import GpuSample

_MHZ = 10**6
_SERIES: dict[str, tuple[str, str, float]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("Time in which it computed, percent.", "sm_ratio", 100),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("Time in which its memory was read or written, percent.", "memory_ratio", 100),
    "DCGM_FI_DEV_ENC_UTIL": ("Use of its encoder, percent.", "encoder_ratio", 100),
    "DCGM_FI_DEV_DEC_UTIL": ("Use of its decoder, percent.", "decoder_ratio", 100),
    "DCGM_FI_DEV_FB_USED": ("Memory in use, MiB.", "memory_used_bytes", 1 / MIB),
    "DCGM_FI_DEV_FB_FREE": ("Free memory, MiB.", "memory_free_bytes", 1 / MIB),
    "DCGM_FI_DEV_GPU_TEMP": ("Temperature, degrees Celsius.", "temperature_celsius", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("Power that it draws, watts.", "power_watts", 1),
    "DCGM_FI_DEV_SM_CLOCK": ("Clock of its compute, MHz.", "sm_clock_hertz", 1 / _MHZ),
    "DCGM_FI_DEV_MEM_CLOCK": ("Clock of its memory, MHz.", "memory_clock_hertz", 1 / _MHZ),
}
"""Name -> help, field of GpuSample, factor."""


def dcgm_series(snapshot: NodeSnapshot) -> Iterator[Series]:
    """Rows by GPU index."""
    if snapshot.usage is None:
        return
    holders: dict[GpuUuid, list[tuple[str, str, str]]] = {}
    for facts in snapshot.containers:
        one = facts.allocation
        users = [(pod.namespace, pod.name, container.name) for pod, container in facts.users]
        own = users if one.claim is not None else [(one.namespace, one.pod_name, one.container_name)]
        for uuid in one.gpus:
            holders.setdefault(uuid, []).extend(own)
    rows: list[tuple[str, GpuSample]] = []
    for gpu in sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.number):
        if gpu.mig is not None or (sample := snapshot.usage.gpus.get(gpu.uuid)) is None:
            continue
        found = holders.get(gpu.uuid, [])
        whose = dict(zip(("namespace", "pod", "container"), found[0], strict=True)) if len(found) == 1 else {}
        names = {"UUID": gpu.uuid, "pci_bus_id": gpu.bus_id, "modelName": gpu.name, "Hostname": snapshot.node}
        rows.append((labels_text(**names, gpu=str(gpu.number), device=f"nvidia{gpu.number}", **whose), sample))
    for name, (text, value, factor) in _SERIES.items():
        known = [(labels, found) for labels, sample in rows if (found := getattr(sample, value)) is not None]
        yield Series(name, text, lines=[line(name, labels, round(found * factor, 3)) for labels, found in known])
