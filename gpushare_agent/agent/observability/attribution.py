"""Attributes processes to containers: joins one sample of the driver with the containers that have GPUs allocated. Pure.

A process counts for a container that has that very GPU allocated. Every other process of a GPU is unattributed, so that the
processes of a GPU are always all accounted for. A container without a process uses nothing: zero. What the driver does not
report is None.

If several compute on a GPU, a driver's sample may name any one process with the percents of the whole GPU (an H200's does).
So if a container's isolation counts what it pays, that is its compute while somebody else computes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.usage import (
    ContainerUse,
    DriverSample,
    GpuSample,
    ProcessKind,
    ProcessSample,
    SmSource,
    UsageRound,
)

T = TypeVar("T")
PaidRatio = Callable[[ContainerKey, GpuUuid], float | None]
"""What a container pays, of the GPU's time; None if nobody counts it, or it has launched nothing lately."""

RATIO_DIGITS = 6
"""More than any driver reports; further digits are rounding errors of the sum."""


class AllocatedContainers(Struct, frozen=True, kw_only=True):
    """The containers that have GPUs allocated, with their GPUs, and the container of each known container ID.

    `by_id` has containers without a GPU too: a process in one of those is attributed to no other container.
    """

    gpus: Mapping[ContainerKey, tuple[GpuUuid, ...]]
    by_id: Mapping[str, ContainerKey]
    claims: Mapping[ContainerKey, tuple[ContainerKey, ...]] = field(default_factory=dict)
    """The keys of the claims' allocations that a container uses."""


def has_handed_over(allocation: Allocation, pod: Pod | None) -> bool:
    """True for an init container that has run: the kubelet has given its devices to later containers, and they are counted
    there."""
    return allocation.kind is ContainerKind.INIT and pod is not None and pod.has_started


def join_usage(
    sample: DriverSample,
    owners: Mapping[int, PeerIdentity],
    allocated: AllocatedContainers,
    *,
    sampled_at: float,
    sampled_boot_s: float = 0.0,
    paid: PaidRatio = lambda key, uuid: None,
) -> UsageRound:
    """One round: what each container uses of each of its GPUs that answered, and the unattributed processes there.

    `owners` are the processes' cgroups by PID.
    """
    on_gpu = _by_gpu(allocated.gpus)
    containers: dict[tuple[ContainerKey, GpuUuid], ContainerUse] = {}
    unattributed: dict[GpuUuid, tuple[ProcessSample, ...]] = {}
    for gpu in sample.gpus:
        here = on_gpu.get(gpu.uuid, {})
        found: dict[ContainerKey, list[ProcessSample]] = {key: [] for keys in here.values() for key in keys}
        unknown: list[ProcessSample] = []
        # None if the driver does not list them: `_use` then says that nothing is known, not that nothing is used.
        for process in gpu.processes or ():
            key = _container_of(owners.get(process.pid), here, allocated)
            (unknown if key is None else found[key]).append(process)
        uses = [_use(key, gpu, processes) for key, processes in found.items()]
        for use in _with_paid(uses, paid, others_compute=any(process.sm_ratio for process in unknown)):
            containers[use.key, gpu.uuid] = use
        if unknown:
            unattributed[gpu.uuid] = tuple(unknown)
    return UsageRound(
        sampled_at=sampled_at,
        gpus={gpu.uuid: gpu for gpu in sample.gpus},
        containers=dict(sorted(containers.items())),
        unattributed=dict(sorted(unattributed.items())),
        sampled_boot_s=sampled_boot_s,
    )


def unknown_ids(
    sample: DriverSample, owners: Mapping[int, PeerIdentity], allocated: AllocatedContainers
) -> frozenset[str]:
    """Container IDs that are not known yet, in pods that have GPUs allocated: for a moment after a container's start."""
    pods = {key.pod_uid for key in (*allocated.gpus, *allocated.claims)}
    found = (owners.get(process.pid) for gpu in sample.gpus for process in gpu.processes or ())
    return frozenset(
        one.container_id
        for one in found
        if one is not None
        and one.container_id is not None
        and one.container_id not in allocated.by_id
        # A path may name the container alone, as the agent's own pod seen from inside: it may be one of these pods'.
        and (one.pod_uid is None or one.pod_uid in pods)
    )


def _by_gpu(gpus: Mapping[ContainerKey, tuple[GpuUuid, ...]]) -> dict[GpuUuid, dict[PodUid, list[ContainerKey]]]:
    found: dict[GpuUuid, dict[PodUid, list[ContainerKey]]] = {}
    for key, uuids in gpus.items():
        for uuid in uuids:
            found.setdefault(uuid, {}).setdefault(key.pod_uid, []).append(key)
    return found


def _container_of(
    owner: PeerIdentity | None, here: Mapping[PodUid, Sequence[ContainerKey]], allocated: AllocatedContainers
) -> ContainerKey | None:
    """The container by its ID, or its claim; while the ID is not known, the pod's only container on this GPU."""
    if owner is None:
        return None
    reported = allocated.by_id.get(owner.container_id) if owner.container_id is not None else None
    if reported is not None:
        # A claim's devices are charged to the claim, so a process may use a GPU under its container's key or a
        # claim's.
        possible = (reported, *allocated.claims.get(reported, ()))
        return next((key for key in possible if key in here.get(key.pod_uid, ())), None)
    # With two containers on this GPU it could be either's: unattributed for a second is better than charged to the
    # wrong one.
    keys = here.get(owner.pod_uid, ()) if owner.pod_uid is not None else ()
    return keys[0] if len(keys) == 1 else None


def _use(key: ContainerKey, gpu: GpuSample, processes: Sequence[ProcessSample]) -> ContainerUse:
    if gpu.processes is None:
        return ContainerUse(key=key, uuid=gpu.uuid, pids=())
    memory = _known(process.memory_bytes for process in processes)
    sm_ratio = _share(process.sm_ratio for process in processes)
    is_in_server = sm_ratio is None and any(process.kind is ProcessKind.MPS for process in processes)
    return ContainerUse(
        key=key,
        uuid=gpu.uuid,
        pids=tuple(sorted(process.pid for process in processes)),
        # Without processes zero is known; with processes whose memory the driver does not report nothing is.
        memory_bytes=sum(memory) if memory or not processes else None,
        sm_ratio=sm_ratio,
        sm_source=SmSource.MPS if is_in_server else SmSource.DRIVER,
        memory_ratio=_share(process.memory_ratio for process in processes),
        encoder_ratio=_share(process.encoder_ratio for process in processes),
        decoder_ratio=_share(process.decoder_ratio for process in processes),
    )


def _with_paid(uses: Sequence[ContainerUse], paid: PaidRatio, *, others_compute: bool) -> list[ContainerUse]:
    """The uses of one GPU. `others_compute`: by the driver, a process of no container computes."""
    # A share of several allocations has its processes in one of them, and pays once.
    pays = {use.key: ratio for use in uses if use.pids and (ratio := paid(use.key, use.uuid)) is not None}
    computing = sum(1 for use in uses if use.key in pays or use.sm_ratio) + others_compute
    if computing < 2:
        return list(uses)
    return [
        replace(use, sm_ratio=round(min(1.0, pays[use.key]), RATIO_DIGITS), sm_source=SmSource.LIBRARY)
        if use.key in pays
        else use
        for use in uses
    ]


def _share(ratios: Iterable[float | None]) -> float | None:
    """At most the whole GPU: processes that are counted one by one may add up to a little more."""
    values = list(ratios)
    known = _known(values)
    return min(1.0, round(sum(known, 0.0), RATIO_DIGITS)) if known or not values else None


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]
