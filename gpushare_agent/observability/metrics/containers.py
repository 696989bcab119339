"""Allocations and use of containers as metrics: gpu-manager's four series, and ours. Pure functions over the node's
snapshot.

Names and labels kept from gpu-manager: docs/reference/formats.md, section 8. What is not known has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.usage import ContainerUse
from gpushare_agent.observability.metrics.text import Labels, Number, Series, labels_text, rounded
from gpushare_agent.observability.node_snapshot import ContainerFacts, NodeSnapshot


def container_series(snapshot: NodeSnapshot) -> list[Series]:
    """By namespace, pod, container and GPU."""
    containers = sorted(
        snapshot.containers, key=lambda f: (f.allocation.namespace, f.allocation.pod_name, f.allocation.key)
    )
    gpus = snapshot.inventory.by_uuid()
    shares = {facts.allocation.key: _shares(snapshot, facts, gpus) for facts in containers}
    labelled = [
        (
            labels_text(
                pod_name=facts.allocation.pod_name,
                namespace=facts.allocation.namespace,
                node=snapshot.node,
                container_name=facts.allocation.container_name,
            ),
            facts,
        )
        for facts in containers
    ]
    series = [
        *_requested(labelled),
        *_used_as_gpu_manager_shows_it(labelled, shares),
        *_modern([share for own in shares.values() for share in own]),
        _isolation_info(snapshot, containers),
    ]
    has_namesakes = len({labels for labels, _ in labelled}) < len(labelled)
    return [_summed(one) for one in series] if has_namesakes else series


def _summed(series: Series) -> Series:
    """A pod that was deleted by force and created again has the name of one that still has processes: the labels of both are
    the same, and Prometheus refuses a page with a series twice. The row has the sum of both."""
    rows: dict[Labels, Number] = {}
    for labels, value in series.rows:
        rows[labels] = rounded(rows[labels] + value) if labels in rows else value
    return replace(series, rows=list(rows.items()))


class _Share(NamedTuple):
    """A container on one of its GPUs. `use` is None while nothing is known of it."""

    facts: ContainerFacts
    gpu: Gpu
    use: ContainerUse | None
    labels: Labels


def _shares(snapshot: NodeSnapshot, facts: ContainerFacts, gpus: Mapping[GpuUuid, Gpu]) -> list[_Share]:
    allocation = facts.allocation
    own = [gpus[uuid] for uuid in allocation.gpus if uuid in gpus]
    return [
        _Share(
            facts,
            gpu,
            _use_of(snapshot, facts, gpu),
            labels_text(
                namespace=allocation.namespace,
                pod=allocation.pod_name,
                container=allocation.container_name,
                uuid=gpu.uuid,
                gpu=str(gpu.index),
                node=snapshot.node,
            ),
        )
        for gpu in sorted(own, key=attrgetter("index"))
    ]


def _use_of(snapshot: NodeSnapshot, facts: ContainerFacts, gpu: Gpu) -> ContainerUse | None:
    """A container that was admitted after the last round has no process yet: zero."""
    usage = snapshot.usage
    sample = usage.gpus.get(gpu.uuid) if usage is not None else None
    if usage is None or sample is None:
        return None
    use = usage.containers.get((facts.allocation.key, gpu.uuid))
    if use is not None or sample.processes is None:
        return use
    return ContainerUse(key=facts.allocation.key, uuid=gpu.uuid, pids=(), memory_bytes=0, sm_ratio=0.0,
                        memory_ratio=0.0, encoder_ratio=0.0, decoder_ratio=0.0)  # fmt: skip


# --- gpu-manager's four ---


def _requested(containers: Iterable[tuple[Labels, ContainerFacts]]) -> list[Series]:
    cores = Series("container_request_gpu_utilization", "Requested share of GPUs, in GPUs.")
    memory = Series("container_request_gpu_memory", "Requested GPU memory, in MiB.")
    for labels, facts in containers:
        cores.rows.append((f'{labels},req_of_gpu="total"', facts.allocated_cores / CORES_PER_GPU))
        memory.rows.append((f'{labels},req_of_gpu_memory="total"', facts.allocated_memory_bytes / MIB))
    return [cores, memory]


def _used_as_gpu_manager_shows_it(
    containers: Iterable[tuple[Labels, ContainerFacts]], shares: Mapping[ContainerKey, Sequence[_Share]]
) -> list[Series]:
    """A row for each GPU and one for all of them; none of what is not known."""
    sm = Series("container_gpu_utilization", "Used compute in percent of a GPU, by GPU (gpu0) and in total.")
    memory = Series("container_gpu_memory_total", "Used GPU memory in MiB, by GPU (gpu0) and in total.")
    for labels, facts in containers:
        ratios: list[float] = []
        sizes: list[int] = []
        for share in shares[facts.allocation.key]:
            use, index = share.use, share.gpu.index
            if use is not None and use.sm_ratio is not None:
                ratios.append(use.sm_ratio)
                sm.rows.append((f'{labels},gpu="gpu{index}"', rounded(use.sm_ratio * 100)))
            if use is not None and use.memory_bytes is not None:
                sizes.append(use.memory_bytes)
                memory.rows.append((f'{labels},gpu_memory="gpu{index}"', use.memory_bytes / MIB))
        if ratios:
            sm.rows.append((f'{labels},gpu="total"', rounded(sum(ratios) * 100)))
        if sizes:
            memory.rows.append((f'{labels},gpu_memory="total"', sum(sizes) / MIB))
    return [sm, memory]


# --- containers ---

_CONTAINER_STATES: tuple[tuple[str, str, Callable[[_Share], Number]], ...] = (
    (
        "allocated_cores_ratio",
        "Compute of the GPU that is allocated to the container, 1 is the whole GPU.",
        lambda share: share.facts.cores_on(share.gpu) / CORES_PER_GPU,
    ),
    (
        "cores_limit_ratio",
        "Compute of the GPU that the container may use at most; more than allocated for an elastic share.",
        lambda share: (share.facts.core_limit or share.facts.cores_on(share.gpu)) / CORES_PER_GPU,
    ),
    (
        "memory_limit_bytes",
        "Memory of the GPU that the container may use at most.",
        lambda share: share.facts.memory_bytes_on(share.gpu),
    ),
)

_CONTAINER_USES: tuple[tuple[str, str, Callable[[ContainerUse], Number | None]], ...] = (
    ("memory_used_bytes", "Memory of the GPU that the container uses.", attrgetter("memory_bytes")),
    ("sm_utilization_ratio", "Compute of the GPU that the container uses.", attrgetter("sm_ratio")),
    (
        "memory_bandwidth_utilization_ratio",
        "Time in which the container read or wrote the GPU's memory.",
        attrgetter("memory_ratio"),
    ),
    ("encoder_utilization_ratio", "Use of the GPU's encoder by the container.", attrgetter("encoder_ratio")),
    ("decoder_utilization_ratio", "Use of the GPU's decoder by the container.", attrgetter("decoder_ratio")),
    ("processes", "Processes of the container on the GPU.", lambda use: len(use.pids)),
)


def _isolation_info(snapshot: NodeSnapshot, containers: Iterable[ContainerFacts]) -> Series:
    """Namesakes under the same isolation are one row, and it is 1."""
    labels = {
        labels_text(
            namespace=facts.allocation.namespace,
            pod=facts.allocation.pod_name,
            container=facts.allocation.container_name,
            node=snapshot.node,
            isolation=facts.isolation,
            memory_by=facts.kept.memory_by,
            compute_by=facts.kept.compute_by,
            not_kept=",".join(term.value for term in facts.kept.not_kept),
        ): None
        for facts in containers
        if facts.kept is not None
    }
    text = "Who enforces the share's memory and compute, and what is not enforced; always 1."
    return Series("gpushare_container_isolation_info", text, rows=[(one, 1) for one in labels])


def _modern(shares: Sequence[_Share]) -> Iterator[Series]:
    for name, text, state in _CONTAINER_STATES:
        yield Series(f"gpushare_container_{name}", text, rows=[(share.labels, state(share)) for share in shares])
    uses = [(share.labels, share.use) for share in shares if share.use is not None]
    for name, text, used in _CONTAINER_USES:
        rows = [(labels, value) for labels, use in uses if (value := used(use)) is not None]
        yield Series(f"gpushare_container_{name}", text, rows=rows)
