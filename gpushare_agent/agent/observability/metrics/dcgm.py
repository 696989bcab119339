"""The series of GPUs by the names of NVIDIA's dcgm-exporter, for dashboards and alerts that were made for it.

Only those that mean the same, from the same calls of the driver. Source: dcgm-exporter 4.5.3-4.8.2, etc/default-counters.csv
(names, units) and internal/pkg/rendermetrics (labels). MIG instances have none: there the exporter's numbers are DCGM's own.
A GPU that one container has alone names it, as the exporter does. One that several share names none: the exporter names the
last one that the kubelet lists, or repeats the row for each, and its sums then count the GPU as often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpushare_agent.agent.observability.metrics.text import Number, Series, labels_text, line
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import GpuSample

_MHZ = 10**6
_Value = Callable[[GpuSample], Number | None]


def _of(field: str, factor: float = 1) -> _Value:
    """The exporter writes whole numbers, but for power."""

    def value(sample: GpuSample) -> Number | None:
        found: float | None = getattr(sample, field)
        return None if found is None else round(found * factor)

    return value


_SERIES: dict[str, tuple[str, _Value]] = {
    "GPU_UTIL": ("GPU utilization (in %).", _of("sm_ratio", 100)),
    "MEM_COPY_UTIL": ("Memory utilization (in %).", _of("memory_ratio", 100)),
    "ENC_UTIL": ("Encoder utilization (in %).", _of("encoder_ratio", 100)),
    "DEC_UTIL": ("Decoder utilization (in %).", _of("decoder_ratio", 100)),
    "FB_USED": ("Framebuffer memory used (in MiB).", _of("memory_used_bytes", 1 / MIB)),
    "FB_FREE": ("Framebuffer memory free (in MiB).", _of("memory_free_bytes", 1 / MIB)),
    "GPU_TEMP": ("GPU temperature (in C).", _of("temperature_celsius")),
    "POWER_USAGE": ("Power draw (in W).", lambda sample: sample.power_watts),
    "SM_CLOCK": ("SM clock frequency (in MHz).", _of("sm_clock_hertz", 1 / _MHZ)),
    "MEM_CLOCK": ("Memory clock frequency (in MHz).", _of("memory_clock_hertz", 1 / _MHZ)),
}
"""Name after DCGM_FI_DEV_ -> help, value."""


def dcgm_series(snapshot: NodeSnapshot) -> Iterator[Series]:
    """Those that have a row; rows by GPU index."""
    if snapshot.usage is None:
        return
    holders: dict[GpuUuid, list[tuple[str, str, str]]] = {}
    for facts in snapshot.containers:
        one = facts.allocation
        names = [(pod.namespace, pod.name, container.name) for pod, container in facts.users]
        for uuid in one.gpus:
            own = names if one.claim is not None else [(one.namespace, one.pod_name, one.container_name)]
            holders.setdefault(uuid, []).extend(own)
    rows: list[tuple[str, GpuSample]] = []
    for gpu in sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.number):
        if gpu.mig is not None or (sample := snapshot.usage.gpus.get(gpu.uuid)) is None:
            continue
        labels = {"UUID": gpu.uuid, "pci_bus_id": gpu.bus_id, "modelName": gpu.name, "Hostname": snapshot.node}
        labels |= {"gpu": str(gpu.number), "device": f"nvidia{gpu.number}"}
        if len(found := holders.get(gpu.uuid, [])) == 1:
            labels |= dict(zip(("namespace", "pod", "container"), found[0], strict=True))
        rows.append((labels_text(**labels), sample))
    for name, (text, value_of) in _SERIES.items():
        name = f"DCGM_FI_DEV_{name}"
        lines = [line(name, labels, value) for labels, sample in rows if (value := value_of(sample)) is not None]
        if lines:
            yield Series(name, text, lines=lines)
