"""Every series made from the node's snapshot; those of the GPUs are here. Pure functions. What is not known has no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MIB
from gpushare_agent.model.usage import GpuSample, ProcessSample
from gpushare_agent.observability.metrics.containers import container_series
from gpushare_agent.observability.metrics.text import Number, Series, labels_text, rounded
from gpushare_agent.observability.node_snapshot import NodeSnapshot

THROTTLE_REASONS = (
    "applications_clocks",
    "board_limit",
    "display_clocks",
    "hw_slowdown",
    "hw_thermal",
    "power_brake",
    "power_cap",
    "reliability",
    "sw_thermal",
    "sync_boost",
)
"""The driver's reasons: a GPU that reports any has each of them as 0 or 1. Any other is shown while it applies."""

_GPU_SAMPLES = (
    ("memory_used_bytes", "memory_used_bytes", "Memory of the GPU in use, by any process."),
    ("sm_utilization_ratio", "sm_ratio", "Time in which the GPU computed."),
    ("memory_bandwidth_utilization_ratio", "memory_ratio", "Time in which the GPU's memory was read or written."),
    ("encoder_utilization_ratio", "encoder_ratio", "Use of the GPU's encoder."),
    ("decoder_utilization_ratio", "decoder_ratio", "Use of the GPU's decoder."),
    ("temperature_celsius", "temperature_celsius", "Temperature of the GPU."),
    ("power_watts", "power_watts", "Power that the GPU draws."),
    ("power_limit_watts", "power_limit_watts", "Power that the GPU may draw at most."),
    ("sm_clock_hertz", "sm_clock_hertz", "Clock of the GPU's compute."),
    ("memory_clock_hertz", "memory_clock_hertz", "Clock of the GPU's memory."),
    (
        "pcie_received_bytes_per_second",
        "pcie_received_bytes_per_second",
        "Traffic that the GPU receives over PCIe, a spot check of the driver.",
    ),
    ("pcie_sent_bytes_per_second", "pcie_sent_bytes_per_second", "Traffic that the GPU sends over PCIe, likewise."),
    ("nvlink_received_bytes_total", "nvlink_received_bytes_total", "What the GPU received over NVLink."),
    ("nvlink_sent_bytes_total", "nvlink_sent_bytes_total", "What the GPU sent over NVLink."),
)
"""Name of the series, field of GpuSample, help."""


def node_series(snapshot: NodeSnapshot) -> list[Series]:
    """Those that have a row, always in the same order."""
    found = [*container_series(snapshot), *gpu_series(snapshot)]
    if snapshot.usage is not None:
        text = "When usage was last sampled; no row after three rounds without a sample."
        rows: list[tuple[str, Number]] = [(labels_text(node=snapshot.node), snapshot.usage.sampled_at)]
        found.append(Series("gpushare_usage_sampled_timestamp_seconds", text, rows=rows))
    return [series for series in found if series.rows]


def gpu_series(snapshot: NodeSnapshot) -> Iterator[Series]:
    """By GPU index."""
    gpus = sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.index)
    labels = {gpu.uuid: labels_text(uuid=gpu.uuid, gpu=str(gpu.index), node=snapshot.node) for gpu in gpus}
    yield _gpu_info(snapshot, gpus)
    yield _mig_info(snapshot, gpus)
    for name, text, state in _gpu_states(snapshot):
        yield Series(f"gpushare_card_{name}", text, rows=[(labels[gpu.uuid], state(gpu)) for gpu in gpus])
    usage = snapshot.usage
    if usage is None:
        return
    samples = [(gpu.uuid, usage.gpus[gpu.uuid]) for gpu in gpus if gpu.uuid in usage.gpus]
    for name, field, text in _GPU_SAMPLES:
        rows = [(labels[uuid], rounded(value)) for uuid, s in samples if (value := getattr(s, field)) is not None]
        yield Series(f"gpushare_card_{name}", text, "counter" if name.endswith("_total") else "gauge", rows)
    yield from _labelled_samples(snapshot, gpus, [sample for _, sample in samples])
    unattributed = [(labels[s.uuid], usage.unattributed.get(s.uuid, ())) for _, s in samples if s.processes is not None]
    text = "Processes on the GPU that are attributed to no container."
    rows = [(one, len(processes)) for one, processes in unattributed]
    yield Series("gpushare_card_stranger_processes", text, rows=rows)
    text = "Memory of the GPU that these processes use."
    rows = [(one, size) for one, processes in unattributed if (size := _memory(processes)) is not None]
    yield Series("gpushare_card_stranger_memory_used_bytes", text, rows=rows)


def _gpu_info(snapshot: NodeSnapshot, gpus: Iterable[Gpu]) -> Series:
    info = Series("gpushare_card_info", "Name, bus ID and driver version of the GPU; always 1.")
    for gpu in gpus:
        labels = labels_text(
            uuid=gpu.uuid,
            gpu=str(gpu.index),
            node=snapshot.node,
            name=gpu.name,
            bus_id=gpu.bus_id,
            driver_version=snapshot.inventory.driver_version,
        )
        info.rows.append((labels, 1))
    return info


def _mig_info(snapshot: NodeSnapshot, gpus: Iterable[Gpu]) -> Series:
    info = Series(
        "gpushare_card_mig_info", "Instance such as 0:1, profile and parent's UUID of a MIG instance; always 1."
    )
    for gpu in gpus:
        if gpu.mig is not None:
            labels = labels_text(
                uuid=gpu.uuid,
                gpu=str(gpu.index),
                node=snapshot.node,
                instance=gpu.label,
                profile=gpu.mig.profile,
                parent=gpu.mig.parent,
            )
            info.rows.append((labels, 1))
    return info


def _gpu_states(snapshot: NodeSnapshot) -> tuple[tuple[str, str, Callable[[Gpu], Number]], ...]:
    memory, cordoned = snapshot.memory_allocated_bytes, snapshot.cordoned
    return (
        (
            "cores_capacity_ratio",
            "Compute of the GPU that can be allocated: 1; 0 of a MIG instance that takes no shares.",
            lambda gpu: snapshot.cores(gpu)[1] / CORES_PER_GPU,
        ),
        (
            "cores_allocated_ratio",
            "Compute of the GPU that is allocated to containers.",
            lambda gpu: snapshot.cores(gpu)[0] / CORES_PER_GPU,
        ),
        ("memory_capacity_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_mib * MIB),
        (
            "memory_allocated_bytes",
            "Memory of the GPU that is allocated to containers.",
            lambda gpu: memory.get(gpu.uuid, 0),
        ),
        ("healthy", "1 while the GPU is healthy.", lambda gpu: int(gpu.is_healthy)),
        ("cordoned", "1 while the GPU is cordoned.", lambda gpu: int(gpu.uuid in cordoned)),
    )


def _labelled_samples(
    snapshot: NodeSnapshot, gpus: Iterable[Gpu], samples: Iterable[GpuSample]
) -> tuple[Series, Series]:
    """What has a label of its own."""
    index = {gpu.uuid: str(gpu.index) for gpu in gpus}
    ecc = Series(
        "gpushare_card_ecc_errors_total",
        "Memory errors since the driver was loaded: corrected, uncorrected.",
        "counter",
    )
    throttled = Series("gpushare_card_throttled", "1 while the GPU is slowed down for this reason.")
    for sample in samples:
        common = {"uuid": sample.uuid, "gpu": index[sample.uuid], "node": snapshot.node}
        for kind, count in (("corrected", sample.ecc_corrected_total), ("uncorrected", sample.ecc_uncorrected_total)):
            if count is not None:
                ecc.rows.append((labels_text(kind=kind, **common), count))
        if sample.throttle_reasons is not None:
            for reason in sorted({*THROTTLE_REASONS, *sample.throttle_reasons}):
                labels = labels_text(reason=reason, **common)
                throttled.rows.append((labels, int(reason in sample.throttle_reasons)))
    return ecc, throttled


def _memory(processes: Sequence[ProcessSample]) -> int | None:
    known = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    return sum(known) if known or not processes else None
