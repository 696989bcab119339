"""What the node's object should have of the allocations: one annotation, for the scheduler extender. Pure.

The extender takes it for the truth in the place of what it has planned, so a pod is named only when its admission is over:
half a pod would set the other half free for another. Format: docs/reference/node-facts.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

from msgspec import Struct

from gpushare_agent.cluster.decisions.node_annotations import ALLOCATIONS_SCHEMA, MAX_PODS
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.charges import NO_CHARGE, Charge, add_charges, charges_of
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement.gpu_account import GpuAccount, account_of

MAX_CHARS = 200 * 1024
"""All annotations of an object together may have 256 KiB; the rest is for the GPUs and for others."""


class AllocatedTo(Struct, frozen=True, kw_only=True):
    """What one pod has of each GPU, by index: cores, blocks, units and 1 for a whole GPU, trailing zeros left out."""

    pod_uid: PodUid
    gpus: Mapping[int, tuple[int, ...]]
    since: float
    """Monotonic seconds, of its newest container."""


def allocations_by_pod(
    allocations: Iterable[Allocation],
    gpus: Sequence[Gpu],
    pod_of: Callable[[PodUid], Pod | None],
    names: ResourceNames,
    extras: Mapping[ContainerKey, Charge] = MappingProxyType({}),
) -> list[AllocatedTo]:
    """The pods with allocations whose admission is over, sorted by UID.

    Replicas under NVIDIA's names are counted in cores and blocks, a part of one as one. `extras` has how much more or less
    than its allocation is booked for a container that was resized.
    """
    allocations = list(allocations)
    shown = _shown_extras(allocations, extras)
    of_pod: dict[PodUid, list[Allocation]] = {}
    for allocation in allocations:
        of_pod.setdefault(allocation.key.pod_uid, []).append(allocation)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    found = []
    for uid, own in sorted(of_pod.items()):
        pod = pod_of(uid)
        if not _is_admitted(pod, own, names):
            continue
        charges = charges_of(own)
        for one in own:
            add_charges(charges, {gpu: shown.get(one.key, NO_CHARGE) for gpu in one.gpus[:1]})
        gpus_of_pod = {
            by_uuid[uuid].index: counts
            for uuid, charge in sorted(charges.items())
            if uuid in by_uuid and (counts := _counts(account_of(by_uuid[uuid], names, charge)))
        }
        if gpus_of_pod:
            # The extender has a static pod under the UID of its mirror pod.
            uid = (pod.object_uid if pod is not None else None) or uid
            found.append(AllocatedTo(pod_uid=uid, gpus=gpus_of_pod, since=max(one.allocated_at for one in own)))
    return found


def allocations_annotation(
    allocated: Iterable[AllocatedTo], *, max_chars: int = MAX_CHARS, max_pods: int = MAX_PODS
) -> str:
    """Compact JSON. Where not all fit, it has the newest, for the extender waits for those, and is marked as truncated."""
    newest = sorted(allocated, key=lambda one: (-one.since, one.pod_uid))
    chars = len(_document([], is_truncated=True))
    chosen: list[AllocatedTo] = []
    for one in newest[:max_pods]:
        chars += len(_entry(one))
        if chars > max_chars:
            break
        chosen.append(one)
    return _document(chosen, is_truncated=len(chosen) < len(newest))


def _is_admitted(pod: Pod | None, own: Sequence[Allocation], names: ResourceNames) -> bool:
    """A pod that the API server no longer knows counts with what it has: its processes may live on."""
    if pod is None or pod.has_started:
        return True
    ids = {one.key.container: one.ids for one in own}
    return all(
        len(ids.get(container.name, {}).get(kind, ())) >= wanted
        for container in pod.containers
        for kind, wanted in names.asked(container).items()
    )


def _shown_extras(
    allocations: Iterable[Allocation], extras: Mapping[ContainerKey, Charge]
) -> dict[ContainerKey, Charge]:
    """What a GPU's shares give back is shown only as far as others there have grown into it: the kubelet still counts the
    rest as taken, so no scheduler may think it free."""
    shown: dict[ContainerKey, Charge] = {}
    on_gpu: dict[GpuUuid, list[ContainerKey]] = {}
    for one in allocations:
        if one.gpus and one.key in extras:
            on_gpu.setdefault(one.gpus[0], []).append(one.key)
    for keys in on_gpu.values():
        left = reduce(Charge.plus, (extras[key].grown() for key in keys))
        for key in sorted(keys):
            extra = extras[key]
            shown[key] = Charge(
                cores=max(extra.cores, -left.cores),
                blocks=max(extra.blocks, -left.blocks),
                units=max(extra.units, -left.units),
            )
            left = left.plus(shown[key].plus(extra.grown(), -1))
    return shown


def _counts(account: GpuAccount) -> tuple[int, ...]:
    blocks = account.used_blocks + (0 if account.is_whole else account.blocks_of_part)
    counts = [account.allocated_cores, blocks, account.used_units, int(account.is_whole)]
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _entry(one: AllocatedTo) -> str:
    return json.dumps({one.pod_uid: {str(index): list(counts) for index, counts in sorted(one.gpus.items())}})


def _document(allocated: Iterable[AllocatedTo], *, is_truncated: bool) -> str:
    document: dict[str, object] = {
        "schema": ALLOCATIONS_SCHEMA,
        "held": {
            one.pod_uid: {str(index): list(counts) for index, counts in sorted(one.gpus.items())}
            for one in sorted(allocated, key=lambda one: one.pod_uid)
        },
    }
    return json.dumps({**document, **({"truncated": True} if is_truncated else {})}, separators=(",", ":"))
