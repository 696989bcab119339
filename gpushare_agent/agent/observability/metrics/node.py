"""Every series made from the node's snapshot: gpu-manager's four of containers, then ours of them, then those of the GPUs.

What is not known has no row: Prometheus shows a gap; a zero would read as idle. Names and labels kept from gpu-manager:
docs/reference/formats.md, section 8. State owned: the lines of each container, kept while what they show stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from gpushare_agent.agent.observability.metrics.text import Kind, Labels, Number, Series, labels_text, line, rounded
from gpushare_agent.agent.observability.node_snapshot import ContainerFacts, NodeSnapshot, mig_gpus
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.model.shares import on_gpu
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
    "memory_used_bytes": ("memory_used_bytes", "Memory in use, by any process."),
    "sm_utilization_ratio": ("sm_ratio", "Time in which it computed."),
    "memory_bandwidth_utilization_ratio": ("memory_ratio", "Time in which its memory was read or written."),
    "encoder_utilization_ratio": ("encoder_ratio", "Use of its encoder."),
    "decoder_utilization_ratio": ("decoder_ratio", "Use of its decoder."),
    "temperature_celsius": ("temperature_celsius", "Temperature."),
    "power_watts": ("power_watts", "Power that it draws."),
    "power_limit_watts": ("power_limit_watts", "Most power that it may draw."),
    "sm_clock_hertz": ("sm_clock_hertz", "Clock of its compute."),
    "memory_clock_hertz": ("memory_clock_hertz", "Clock of its memory."),
    "pcie_received_bytes_per_second": (
        "pcie_received_bytes_per_second",
        "Received over PCIe, by spot checks.",
    ),
    "pcie_sent_bytes_per_second": ("pcie_sent_bytes_per_second", "Sent over PCIe, likewise."),
    "nvlink_received_bytes_total": ("nvlink_received_bytes_total", "Received over NVLink."),
    "nvlink_sent_bytes_total": ("nvlink_sent_bytes_total", "Sent over NVLink."),
}
"""Name of the series -> field of GpuSample, help."""


def node_series(snapshot: NodeSnapshot, containers: ContainerSeries | None = None) -> list[Series]:
    """All series, always in the same order; without `containers` all that a container can have."""
    found = [*(containers or ContainerSeries(is_all=True)).series(snapshot), *gpu_series(snapshot)]
    if snapshot.usage is not None:
        text = "When usage was last sampled; no row after three rounds without a sample."
        rows = [(labels_text(node=snapshot.node), snapshot.usage.sampled_at)]
        found.append(_series("usage_sampled_timestamp_seconds", text, rows))
    return found


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
        return _series(f"gpu_{name}", text, [(one, value) for one, value in values if value is not None])

    infos = [labels_text(**own[gpu.uuid], name=gpu.name, bus_id=gpu.bus_id, driver_version=version) for gpu in every]
    yield _series("gpu_info", "Name, bus ID and driver version.", [(one, 1) for one in infos])
    instances = [
        labels_text(**own[gpu.uuid], instance=gpu.label, profile=gpu.mig.profile, parent=gpu.mig.parent)
        for gpu in gpus
        if gpu.mig is not None
    ]
    text = "Of a MIG instance: number such as 0:1, profile, parent's UUID."
    yield _series("gpu_mig_info", text, [(one, 1) for one in instances])
    text = "MIG instances of this profile for which a GPU of mig.on_demand has room, if it gets no others."
    room = [(own[GpuUuid(gpu["uuid"])], gpu["fits"].items()) for gpu in mig_gpus(snapshot)]
    rows: list[tuple[Labels, Number]] = [(labels_text(**one, profile=p), n) for one, fits in room for p, n in fits]
    yield _series("gpu_mig_room", text, rows)
    text = "Compute that can be allocated: 1; 0 of a MIG instance that takes no shares."
    yield of_gpu("cores_capacity_ratio", text, lambda gpu: snapshot.cores(gpu)[1] / CORES_PER_GPU)
    text = "Compute that is allocated to containers."
    yield of_gpu("cores_allocated_ratio", text, lambda gpu: snapshot.cores(gpu)[0] / CORES_PER_GPU)
    yield of_gpu("memory_capacity_bytes", "Its memory.", lambda gpu: gpu.memory_mib * MIB)
    yield of_gpu(
        "memory_allocated_bytes", "Memory that is allocated to containers.", lambda gpu: memory.get(gpu.uuid, 0)
    )
    # The alert GpushareGPUUnhealthy must not fire for a GPU that no pod can get.
    text = "1 while it is healthy; no row for one of excluded_gpus."
    yield of_gpu("healthy", text, lambda gpu: None if gpu.uuid in snapshot.excluded else int(gpu.is_healthy), every)
    yield of_gpu("cordoned", "1 while it is cordoned.", lambda gpu: int(gpu.uuid in snapshot.cordoned), every)
    text = "1 once it has joined its NVLink fabric, before which CUDA fails; no row without one."
    yield of_gpu("fabric_joined", text, lambda gpu: None if gpu.has_joined is None else int(gpu.has_joined))
    usage = snapshot.usage
    if usage is None:
        return
    # A GPU that did not answer in this round has no row, instead of the values of the round before.
    samples = [(labels[gpu.uuid], usage.gpus[gpu.uuid]) for gpu in gpus if gpu.uuid in usage.gpus]
    for name, (attribute, text) in _GPU_SAMPLES.items():
        rows = [(one, rounded(value)) for one, sample in samples if (value := getattr(sample, attribute)) is not None]
        yield _series(f"gpu_{name}", text, rows)
    yield from _labelled_samples([(own[sample.uuid], sample) for _, sample in samples])
    unattributed = [(one, usage.unattributed.get(s.uuid, ())) for one, s in samples if s.processes is not None]
    text = "Processes that are attributed to no container."
    rows = [(one, len(processes)) for one, processes in unattributed]
    yield _series("gpu_stranger_processes", text, rows)
    text = "Memory that these processes use."
    rows = [(one, size) for one, processes in unattributed if (size := _memory(processes)) is not None]
    yield _series("gpu_stranger_memory_used_bytes", text, rows)


def _series(name: str, text: str, rows: Iterable[tuple[Labels, Number]]) -> Series:
    name = f"gpushare_{name}"
    kind: Kind = "counter" if name.endswith("_total") else "gauge"
    return Series(name, text, kind, [line(name, labels, value) for labels, value in rows])


def _labelled_samples(samples: Iterable[tuple[Mapping[str, str], GpuSample]]) -> tuple[Series, Series]:
    """The series with a label of their own."""
    ecc: list[tuple[Labels, Number]] = []
    throttled: list[tuple[Labels, Number]] = []
    for own, sample in samples:
        for kind, count in (("corrected", sample.ecc_corrected_total), ("uncorrected", sample.ecc_uncorrected_total)):
            if count is not None:
                ecc.append((labels_text(kind=kind, **own), count))
        if sample.throttle_reasons is not None:
            # Known reasons as 0 too: a query over time finds no difference where a series only appears with its 1.
            throttled += [
                (labels_text(reason=reason, **own), int(reason in sample.throttle_reasons))
                for reason in sorted({*THROTTLE_REASONS, *sample.throttle_reasons})
            ]
    text = "Memory errors since the driver was loaded: corrected, uncorrected."
    slowed = _series("gpu_throttled", "1 while it is slowed down for this reason.", throttled)
    return _series("gpu_ecc_errors_total", text, ecc), slowed


def _memory(processes: Sequence[ProcessSample]) -> int | None:
    known = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    # No process uses nothing; of processes without a reported memory nothing is known.
    return sum(known) if known or not processes else None


# --- containers ---

_LIMITS = {
    "gpushare_container_allocated_cores_ratio": "Compute that is allocated to it, of the whole GPU.",
    "gpushare_container_cores_limit_ratio": "Most compute that it may use; more than allocated for an elastic share.",
    "gpushare_container_memory_limit_bytes": "Most memory that it may use.",
    "gpushare_container_isolation_info": "Who enforces the share's memory and compute, and what is not enforced.",
    "gpushare_container_not_limited": "Containers that run without a limit of their share; always 1, no row for others.",
    "container_request_gpu_utilization": "Requested share of GPUs, in GPUs.",
    "container_request_gpu_memory": "Requested GPU memory, in MiB.",
}
"""Name of the series -> help, in the order of `_limits`; likewise the next. The last two are gpu-manager's."""
_USED = {
    "gpushare_container_memory_used_bytes": "Memory that it uses.",
    "gpushare_container_sm_utilization_ratio": "Compute that it uses.",
    # A series of its own: as a label of the ratio's, it would begin another series each time that a neighbour begins to
    # compute, and a mean over time would count both.
    "gpushare_container_sm_utilization_info": "Who says how much compute it uses: driver, or library, by what it paid.",
    "gpushare_container_processes": "Its processes on the GPU.",
    "gpushare_container_memory_bandwidth_utilization_ratio": "Time in which it read or wrote the GPU's memory.",
    "gpushare_container_encoder_utilization_ratio": "Its use of the encoder.",
    "gpushare_container_decoder_utilization_ratio": "Its use of the decoder.",
    "container_gpu_utilization": "Used compute in percent of a GPU, by GPU (gpu0) and in total.",
    "container_gpu_memory_total": "Used GPU memory in MiB, by GPU (gpu0) and in total.",
}
_Row = tuple[int, Labels, Number | None]
"""The series by its place above, labels, and the value if it is known."""


class _Container(Struct):
    """`limits` are the lines that only another allocation, limit or GPU changes; `used` those of `uses`."""

    facts: ContainerFacts
    inventory: GpuInventory
    gpus: Sequence[Gpu]
    names: tuple[str, ...]
    former: Labels
    labels: Sequence[Labels]
    """Of each GPU."""
    limits: Sequence[str] = ()
    uses: Sequence[ContainerUse | None] | None = None
    used: Sequence[str] = ()


class ContainerSeries(Struct, eq=False):
    """The series of the containers, rows by namespace, pod, container and GPU. `is_all`: also those that few read."""

    is_all: bool = False
    _known: dict[ContainerKey, _Container] = field(default_factory=dict)

    def prepared(self, snapshot: NodeSnapshot) -> Iterator[object]:
        """Writes the lines that have changed, one container's at a time, so that `series` is quick."""
        return (self._prepared(facts, snapshot) for facts in snapshot.containers)

    def series(self, snapshot: NodeSnapshot) -> list[Series]:
        """Always in the same order, and all of this snapshot, whatever was prepared for another."""
        known = [self._prepared(facts, snapshot) for facts in snapshot.containers_by_name()]
        # A new dictionary each time: what has ended is dropped without a search for it.
        self._known = {one.facts.allocation.key: one for one in known}
        # Rarely so, and summing costs a dictionary of thousands of rows at each scrape.
        has_namesakes = len({one.names for one in known}) < len(known)
        columns = (*zip(*(one.limits for one in known), strict=True), *zip(*(one.used for one in known), strict=True))
        return [
            Series(name, text, lines=_summed(name, column) if has_namesakes else column)
            for (name, text), column in zip((_LIMITS | _USED).items(), columns, strict=False)
        ]

    def _prepared(self, facts: ContainerFacts, snapshot: NodeSnapshot) -> _Container:
        key = facts.allocation.key
        one = self._known.get(key)
        # By identity: facts are made again when anything in them changes.
        if one is None or one.facts is not facts or one.inventory is not snapshot.inventory:
            one = self._known[key] = self._known_of(facts, snapshot)
        uses = [snapshot.use_of(key, gpu.uuid) for gpu in one.gpus]
        if uses != one.uses:
            one.uses, one.used = uses, _written(_USED, self._used(one, uses))
        return one

    def _known_of(self, facts: ContainerFacts, snapshot: NodeSnapshot) -> _Container:
        allocation, gpus = facts.allocation, snapshot.gpus_of(facts.allocation)
        pod, container = allocation.pod_name, allocation.container_name
        names = {"namespace": allocation.namespace, "node": snapshot.node}
        former = labels_text(**names, pod_name=pod, container_name=container) if self.is_all else ""
        names |= {"pod": pod, "container": container}
        labels = [labels_text(**names, uuid=gpu.uuid, gpu=str(gpu.index)) for gpu in gpus]
        one = _Container(facts, snapshot.inventory, gpus, (allocation.namespace, pod, container), former, labels)
        one.limits = _written(_LIMITS, self._limits(one, names, snapshot.names))
        return one

    def _limits(self, one: _Container, own: Mapping[str, str], names: ResourceNames) -> Iterator[_Row]:
        facts = one.facts
        for gpu, labels in zip(one.gpus, one.labels, strict=True):
            cores, memory_bytes = on_gpu(facts.allocation, facts.cores, facts.memory_bytes, gpu)
            yield 0, labels, cores / CORES_PER_GPU
            # core_limit is 0 without an elastic ceiling: then the share itself is the limit.
            yield 1, labels, (facts.core_limit or cores) / CORES_PER_GPU
            yield 2, labels, memory_bytes
        # None without a known pod: its isolation, and so who enforces the share, is not known.
        if (kept := facts.kept) is not None:
            by = {"memory_by": kept.memory_by, "compute_by": kept.compute_by, "not_kept": ",".join(kept.not_kept)}
            yield 3, labels_text(**own, isolation=facts.isolation, **by), 1
        if facts.not_limited:
            yield 4, labels_text(**own), 1
        if self.is_all:
            # What the kubelet allocated: a live resize changes the limit, which has a series of ours, not the request.
            yield 5, f'{one.former},req_of_gpu="total"', facts.allocated_cores / CORES_PER_GPU
            yield 6, f'{one.former},req_of_gpu_memory="total"', facts.requested_mib(names)

    def _used(self, one: _Container, uses: Sequence[ContainerUse | None]) -> Iterator[_Row]:
        for labels, use in zip(one.labels, uses, strict=True):
            if use is None:
                continue
            yield 0, labels, use.memory_bytes
            yield 1, labels, use.sm_ratio
            yield 2, f'{labels},source="{use.sm_source}"', None if use.sm_ratio is None else 1
            if self.is_all:
                yield 3, labels, len(use.pids)
                yield 4, labels, use.memory_ratio
                yield 5, labels, use.encoder_ratio
                yield 6, labels, use.decoder_ratio
        if self.is_all:
            known = [(f"gpu{gpu.index}", use) for gpu, use in zip(one.gpus, uses, strict=True) if use is not None]
            ratios = {gpu: use.sm_ratio * 100 for gpu, use in known if use.sm_ratio is not None}
            sizes = {gpu: use.memory_bytes / MIB for gpu, use in known if use.memory_bytes is not None}
            for place, label, values in ((7, "gpu", ratios), (8, "gpu_memory", sizes)):
                # The total is of the GPUs that are known: gpu-manager has it also for a single GPU.
                for gpu, value in (values | {"total": sum(values.values())} if values else {}).items():
                    yield place, f'{one.former},{label}="{gpu}"', rounded(value)


def _written(series: Mapping[str, str], rows: Iterable[_Row]) -> list[str]:
    """The lines of each of these series."""
    names, texts = tuple(series), [""] * len(series)
    for place, labels, value in rows:
        if value is not None:
            texts[place] += line(names[place], labels, value)
    return texts


def _summed(name: str, texts: Iterable[str]) -> list[str]:
    """A pod that was deleted by force and created again has the name of one that still has processes: the labels of both are
    the same, and Prometheus refuses a page with a series twice. The row has the sum of both; of those that are always 1 it
    is 1."""
    rows: dict[str, Number] = {}
    is_one = name.endswith(("_info", "_not_limited"))
    for one in "".join(texts).split("\n")[:-1]:
        labels, _, value = one.rpartition(" ")
        number: Number = int(value) if value.isdigit() else float(value)
        rows[labels] = rounded(rows[labels] + number) if labels in rows and not is_one else number
    return [f"{labels} {value!r}\n" for labels, value in rows.items()]
