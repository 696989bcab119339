"""Every series made from the node's snapshot: those of the GPUs, then gpu-manager's four of containers, then ours of them.

Pure functions. What is not known has no row: Prometheus shows a gap; a zero would read as idle. Names and labels kept
from gpu-manager: docs/reference/formats.md, section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from gpushare_agent.agent.observability.metrics.text import Labels, Number, Series, labels_text, rounded
from gpushare_agent.agent.observability.node_snapshot import ContainerFacts, NodeSnapshot, mig_gpus
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, ProcessSample

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

_GPU_SAMPLES = {
    "memory_used_bytes": ("memory_used_bytes", "Memory of the GPU in use, by any process."),
    "sm_utilization_ratio": ("sm_ratio", "Time in which the GPU computed."),
    "memory_bandwidth_utilization_ratio": ("memory_ratio", "Time in which the GPU's memory was read or written."),
    "encoder_utilization_ratio": ("encoder_ratio", "Use of the GPU's encoder."),
    "decoder_utilization_ratio": ("decoder_ratio", "Use of the GPU's decoder."),
    "temperature_celsius": ("temperature_celsius", "Temperature of the GPU."),
    "power_watts": ("power_watts", "Power that the GPU draws."),
    "power_limit_watts": ("power_limit_watts", "Power that the GPU may draw at most."),
    "sm_clock_hertz": ("sm_clock_hertz", "Clock of the GPU's compute."),
    "memory_clock_hertz": ("memory_clock_hertz", "Clock of the GPU's memory."),
    "pcie_received_bytes_per_second": (
        "pcie_received_bytes_per_second",
        "Traffic that the GPU receives over PCIe, a spot check of the driver.",
    ),
    "pcie_sent_bytes_per_second": ("pcie_sent_bytes_per_second", "Traffic that the GPU sends over PCIe, likewise."),
    "nvlink_received_bytes_total": ("nvlink_received_bytes_total", "What the GPU received over NVLink."),
    "nvlink_sent_bytes_total": ("nvlink_sent_bytes_total", "What the GPU sent over NVLink."),
}
"""Name of the series -> field of GpuSample, help."""


def node_series(snapshot: NodeSnapshot) -> list[Series]:
    """The series that have a row, always in the same order."""
    found = [*container_series(snapshot), *gpu_series(snapshot)]
    if snapshot.usage is not None:
        text = "When usage was last sampled; no row after three rounds without a sample."
        rows: list[tuple[str, Number]] = [(labels_text(node=snapshot.node), snapshot.usage.sampled_at)]
        found.append(Series("gpushare_usage_sampled_timestamp_seconds", text, rows=rows))
    # Prometheus takes a family without rows, but each costs two lines a scrape.
    return [series for series in found if series.rows]


def gpu_series(snapshot: NodeSnapshot) -> Iterator[Series]:
    """The series of the GPUs, rows by GPU index."""
    gpus = sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.index)
    # On demand a GPU is one to watch before it has any instance.
    every = [*gpus, *snapshot.inventory.on_demand]
    own = {gpu.uuid: {"uuid": gpu.uuid, "gpu": str(gpu.index), "node": snapshot.node} for gpu in every}
    labels = {uuid: labels_text(**found) for uuid, found in own.items()}
    version, memory = snapshot.inventory.driver_version, snapshot.memory_allocated_bytes

    def of_gpu(name: str, text: str, value_of: Callable[[Gpu], Number | None], of: Sequence[Gpu] = gpus) -> Series:
        values = ((labels[gpu.uuid], value_of(gpu)) for gpu in of)
        return Series(f"gpushare_gpu_{name}", text, rows=[(one, value) for one, value in values if value is not None])

    infos = [labels_text(**own[gpu.uuid], name=gpu.name, bus_id=gpu.bus_id, driver_version=version) for gpu in every]
    yield _info("gpu_info", "Name, bus ID and driver version of the GPU; always 1.", infos)
    instances = [
        labels_text(**own[gpu.uuid], instance=gpu.label, profile=gpu.mig.profile, parent=gpu.mig.parent)
        for gpu in gpus
        if gpu.mig is not None
    ]
    yield _info(
        "gpu_mig_info", "Instance such as 0:1, profile and parent's UUID of a MIG instance; always 1.", instances
    )
    text = "MIG instances of this profile for which a GPU of mig.on_demand has room now, if it gets no others."
    room = [(own[GpuUuid(gpu["uuid"])], gpu["fits"].items()) for gpu in mig_gpus(snapshot)]
    rows: list[tuple[Labels, Number]] = [(labels_text(**one, profile=p), n) for one, fits in room for p, n in fits]
    yield Series("gpushare_gpu_mig_room", text, rows=rows)
    text = "Compute of the GPU that can be allocated: 1; 0 of a MIG instance that takes no shares."
    yield of_gpu("cores_capacity_ratio", text, lambda gpu: snapshot.cores(gpu)[1] / CORES_PER_GPU)
    text = "Compute of the GPU that is allocated to containers."
    yield of_gpu("cores_allocated_ratio", text, lambda gpu: snapshot.cores(gpu)[0] / CORES_PER_GPU)
    yield of_gpu("memory_capacity_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_mib * MIB)
    text = "Memory of the GPU that is allocated to containers."
    yield of_gpu("memory_allocated_bytes", text, lambda gpu: memory.get(gpu.uuid, 0))
    # The alert GpushareGPUUnhealthy must not fire for a GPU that no pod can get.
    text = "1 while the GPU is healthy; no row for one of excluded_gpus."
    yield of_gpu("healthy", text, lambda gpu: None if gpu.uuid in snapshot.excluded else int(gpu.is_healthy), every)
    yield of_gpu("cordoned", "1 while the GPU is cordoned.", lambda gpu: int(gpu.uuid in snapshot.cordoned), every)
    text = "1 once the GPU has joined its NVLink fabric, before which CUDA fails on it; no row for one on no fabric."
    yield of_gpu("fabric_joined", text, lambda gpu: None if gpu.has_joined is None else int(gpu.has_joined))
    usage = snapshot.usage
    if usage is None:
        return
    # A GPU that did not answer in this round has no row, instead of the values of the round before.
    samples = [(labels[gpu.uuid], usage.gpus[gpu.uuid]) for gpu in gpus if gpu.uuid in usage.gpus]
    for name, (field, text) in _GPU_SAMPLES.items():
        rows = [(one, rounded(value)) for one, sample in samples if (value := getattr(sample, field)) is not None]
        yield Series(f"gpushare_gpu_{name}", text, "counter" if name.endswith("_total") else "gauge", rows)
    yield from _labelled_samples([(own[sample.uuid], sample) for _, sample in samples])
    unattributed = [(one, usage.unattributed.get(s.uuid, ())) for one, s in samples if s.processes is not None]
    text = "Processes on the GPU that are attributed to no container."
    rows = [(one, len(processes)) for one, processes in unattributed]
    yield Series("gpushare_gpu_stranger_processes", text, rows=rows)
    text = "Memory of the GPU that these processes use."
    rows = [(one, size) for one, processes in unattributed if (size := _memory(processes)) is not None]
    yield Series("gpushare_gpu_stranger_memory_used_bytes", text, rows=rows)


def _info(name: str, text: str, labels: Iterable[Labels]) -> Series:
    return Series(f"gpushare_{name}", text, rows=[(one, 1) for one in labels])


def _labelled_samples(samples: Iterable[tuple[Mapping[str, str], GpuSample]]) -> tuple[Series, Series]:
    """The series with a label of their own."""
    text = "Memory errors since the driver was loaded: corrected, uncorrected."
    ecc = Series("gpushare_gpu_ecc_errors_total", text, "counter")
    throttled = Series("gpushare_gpu_throttled", "1 while the GPU is slowed down for this reason.")
    for own, sample in samples:
        for kind, count in (("corrected", sample.ecc_corrected_total), ("uncorrected", sample.ecc_uncorrected_total)):
            if count is not None:
                ecc.rows.append((labels_text(kind=kind, **own), count))
        if sample.throttle_reasons is not None:
            # Known reasons as 0 too: a query over time finds no difference where a series only appears with its 1.
            for reason in sorted({*THROTTLE_REASONS, *sample.throttle_reasons}):
                throttled.rows.append((labels_text(reason=reason, **own), int(reason in sample.throttle_reasons)))
    return ecc, throttled


def _memory(processes: Sequence[ProcessSample]) -> int | None:
    known = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    # No process uses nothing; of processes without a reported memory nothing is known.
    return sum(known) if known or not processes else None


class _Share(NamedTuple):
    """A container on one of its GPUs. `use` is None while nothing is known of it."""

    facts: ContainerFacts
    gpu: Gpu
    use: ContainerUse | None
    labels: Labels


def container_series(snapshot: NodeSnapshot) -> list[Series]:
    """The series of the containers, rows by namespace, pod, container and GPU."""
    labelled, shares, isolations, unlimited = [], [], [], []
    for facts in snapshot.containers_by_name():
        allocation, kept = facts.allocation, facts.kept
        names = {"namespace": allocation.namespace, "node": snapshot.node}
        pod, container = allocation.pod_name, allocation.container_name
        former = labels_text(**names, pod_name=pod, container_name=container)
        names |= {"pod": pod, "container": container}
        own = [
            _Share(
                *(facts, gpu, snapshot.use_of(allocation.key, gpu.uuid)),
                labels_text(**names, uuid=gpu.uuid, gpu=str(gpu.index)),
            )
            for gpu in snapshot.gpus_of(allocation)
        ]
        labelled.append((former, facts, own))
        shares += own
        # None without a known pod: its isolation, and so who enforces the share, is not known.
        if kept is not None:
            by = {"memory_by": kept.memory_by, "compute_by": kept.compute_by, "not_kept": ",".join(kept.not_kept)}
            isolations.append(labels_text(**names, isolation=facts.isolation, **by))
        if facts.not_limited:
            unlimited.append(labels_text(**names))
    not_limited = "Containers that run without a limit of their share; always 1, no row for others."
    text = "Who enforces the share's memory and compute, and what is not enforced; always 1."
    series = [
        *_requested(labelled, snapshot.names),
        *_used_as_gpu_manager_shows_it(labelled),
        *_modern(shares),
        _sm_info(shares),
        # Namesakes under the same isolation are one row, and it is 1.
        _info("container_isolation_info", text, dict.fromkeys(isolations)),
        _info("container_not_limited", not_limited, dict.fromkeys(unlimited)),
    ]
    # Rarely so, and summing costs a dictionary of thousands of rows at each scrape.
    has_namesakes = len({labels for labels, _, _ in labelled}) < len(labelled)
    return [_summed(one) for one in series] if has_namesakes else series


def _summed(series: Series) -> Series:
    """A pod that was deleted by force and created again has the name of one that still has processes: the labels of both are
    the same, and Prometheus refuses a page with a series twice. The row has the sum of both."""
    rows: dict[Labels, Number] = {}
    for labels, value in series.rows:
        rows[labels] = rounded(rows[labels] + value) if labels in rows else value
    return replace(series, rows=list(rows.items()))


# --- gpu-manager's four ---

_Labelled = Sequence[tuple[Labels, ContainerFacts, Sequence[_Share]]]


def _requested(containers: _Labelled, names: ResourceNames) -> list[Series]:
    cores = Series("container_request_gpu_utilization", "Requested share of GPUs, in GPUs.")
    memory = Series("container_request_gpu_memory", "Requested GPU memory, in MiB.")
    for labels, facts, _ in containers:
        # What the kubelet allocated: a live resize changes the limit, which has a series of ours, not the request.
        cores.rows.append((f'{labels},req_of_gpu="total"', facts.allocated_cores / CORES_PER_GPU))
        memory.rows.append((f'{labels},req_of_gpu_memory="total"', facts.requested_mib(names)))
    return [cores, memory]


def _used_as_gpu_manager_shows_it(containers: _Labelled) -> list[Series]:
    """A row for each GPU and one for all of them; no row for what is not known."""
    sm = Series("container_gpu_utilization", "Used compute in percent of a GPU, by GPU (gpu0) and in total.")
    memory = Series("container_gpu_memory_total", "Used GPU memory in MiB, by GPU (gpu0) and in total.")
    for labels, _, shares in containers:
        used = [(share.gpu.index, share.use) for share in shares if share.use is not None]
        ratios = [(index, use.sm_ratio) for index, use in used if use.sm_ratio is not None]
        sizes = [(index, use.memory_bytes) for index, use in used if use.memory_bytes is not None]
        sm.rows.extend((f'{labels},gpu="gpu{index}"', rounded(ratio * 100)) for index, ratio in ratios)
        memory.rows.extend((f'{labels},gpu_memory="gpu{index}"', size / MIB) for index, size in sizes)
        # The total is of the GPUs that are known: gpu-manager has it also for a single GPU.
        if ratios:
            sm.rows.append((f'{labels},gpu="total"', rounded(sum(ratio for _, ratio in ratios) * 100)))
        if sizes:
            memory.rows.append((f'{labels},gpu_memory="total"', sum(size for _, size in sizes) / MIB))
    return [sm, memory]


# --- containers ---


def _sm_info(shares: Iterable[_Share]) -> Series:
    """A series of its own: as a label of the ratio's, it would begin another series each time that a neighbour begins to
    compute, and a mean over time would count both."""
    labels = dict.fromkeys(
        f'{share.labels},source="{share.use.sm_source}"'
        for share in shares
        if share.use is not None and share.use.sm_ratio is not None
    )
    text = "Who says how much of the GPU's compute the container uses: driver, or library, by what it paid; always 1."
    return _info("container_sm_utilization_info", text, labels)


def _modern(shares: Sequence[_Share]) -> Iterator[Series]:
    uses = [(share.labels, share.use) for share in shares if share.use is not None]

    def limit(name: str, text: str, value_of: Callable[[ContainerFacts, Gpu], Number]) -> Series:
        rows = [(share.labels, value_of(share.facts, share.gpu)) for share in shares]
        return Series(f"gpushare_container_{name}", text, rows=rows)

    def used(name: str, text: str, value_of: Callable[[ContainerUse], Number | None]) -> Series:
        rows = [(labels, value) for labels, use in uses if (value := value_of(use)) is not None]
        return Series(f"gpushare_container_{name}", text, rows=rows)

    text = "Compute of the GPU that is allocated to the container, 1 is the whole GPU."
    yield limit("allocated_cores_ratio", text, lambda facts, gpu: facts.cores_on(gpu) / CORES_PER_GPU)
    text = "Compute of the GPU that the container may use at most; more than allocated for an elastic share."
    # core_limit is 0 without an elastic ceiling: then the share itself is the limit.
    ceiling = "cores_limit_ratio"
    yield limit(ceiling, text, lambda facts, gpu: (facts.core_limit or facts.cores_on(gpu)) / CORES_PER_GPU)
    text = "Memory of the GPU that the container may use at most."
    yield limit("memory_limit_bytes", text, lambda facts, gpu: facts.memory_bytes_on(gpu))
    yield used("memory_used_bytes", "Memory of the GPU that the container uses.", attrgetter("memory_bytes"))
    yield used("sm_utilization_ratio", "Compute of the GPU that the container uses.", attrgetter("sm_ratio"))
    text = "Time in which the container read or wrote the GPU's memory."
    yield used("memory_bandwidth_utilization_ratio", text, attrgetter("memory_ratio"))
    yield used("encoder_utilization_ratio", "Use of the GPU's encoder by the container.", attrgetter("encoder_ratio"))
    yield used("decoder_utilization_ratio", "Use of the GPU's decoder by the container.", attrgetter("decoder_ratio"))
    yield used("processes", "Processes of the container on the GPU.", lambda use: len(use.pids))
