"""The annotations by which a node reports its GPUs and who has them: how they are read, and the second one written. Pure.

They are read as text that others may have written, bounded and checked, by the extender and the command line. The agent
writes them: the first in agent/cluster/node_facts.py. The extender takes the second for the truth instead of what
it has planned, so a pod is named only when its admission is over: half a pod would set the other half free for another.
Formats: docs/reference/node-facts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.json import encode

from gpushare_agent.core.kit.json_schema import converted, loaded
from gpushare_agent.core.model.allocations import Allocation, Charge, ContainerKey, add_charges, charges_of
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.gpus import Gpu, GpuReport, HostMemory, MigReport
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.gpu_account import GpuAccount, account_of

T = TypeVar("T")

OWN_PREFIX = "gpushare-agent"
GPUS_ANNOTATION = f"{OWN_PREFIX}/gpus"
GPUS_SCHEMA = 1
ALLOCATIONS_ANNOTATION = f"{OWN_PREFIX}/allocations"
ALLOCATIONS_SCHEMA = 1
MAX_ANNOTATION_CHARS = 256 * 1024
"""All annotations of an object together may have so many bytes."""
MAX_GPUS = 256
MAX_INDEX = 10_000
MAX_TEXT_CHARS = 128
MAX_REASON_CHARS = 256
MAX_MEMORY_MIB = 1 << 30
MAX_BLOCK_MIB = 1 << 16
MAX_PODS = 512
"""The most with GPUs of one node."""
_MAX_NUMA = 4096
_MAX_UID_CHARS = 128
_MAX_COUNT = 1 << 30
_COUNTS = 4
"""Counts of a pod on a GPU: the first fields of a Charge, with 1 for a whole GPU."""


class ReportedGpus(Struct, frozen=True, kw_only=True):
    """The GPUs in the annotation's order, no index twice. `memory_block_mib` is None where it is absent. `mig_gpus` are
    those on which MIG instances are made on demand, also without any; the instances are in `gpus`."""

    gpus: tuple[GpuReport, ...]
    mig_gpus: tuple[GpuReport, ...] = ()
    memory_block_mib: int | None = None


class ReportedAllocations(Struct, frozen=True, kw_only=True):
    """Each pod's part of each GPU, by index. `is_truncated` is True where the agent had no room for all pods."""

    of_pod: Mapping[PodUid, Mapping[int, Charge]]
    is_truncated: bool = False


def parse_gpus(text: object) -> ReportedGpus:
    """The annotation `gpushare-agent/gpus`. One bad GPU makes the whole unreadable: half a list would show a
    smaller node than there is.

    Raises:
        Corrupt: what is wrong, without the annotation's name.
    """
    document = _read(_Gpus, text)
    gpus = tuple(map(_gpu, document.gpus))
    if len({gpu.index for gpu in gpus}) != len(gpus):
        raise Corrupt("two GPUs have the same index")
    divided = tuple(map(_gpu, document.mig_gpus))
    return ReportedGpus(gpus=gpus, mig_gpus=divided, memory_block_mib=document.memory_block_mib)


def parse_allocations(text: object, indexes: Collection[int]) -> ReportedAllocations:
    """The annotation `gpushare-agent/allocations` of a node whose GPUs have these indexes. One bad entry makes the whole
    unreadable: a part would show too much as free.

    Raises:
        Corrupt: what is wrong, without the annotation's name.
    """
    document = _read(_Allocations, text)
    # By text, as JSON has keys: `01` or `+1` is no index that an agent writes.
    by_key = {str(index): index for index in indexes}
    of_pod = {PodUid(uid): _charges(uid, counts, by_key) for uid, counts in sorted(document.allocations.items())}
    return ReportedAllocations(of_pod=of_pod, is_truncated=document.truncated is True)


def _read(schema: type[T], text: object) -> T:
    """Raises Corrupt: what is wrong, without the annotation's name."""
    if not isinstance(text, str):
        raise Corrupt("it is no text")
    if len(text) > MAX_ANNOTATION_CHARS:
        raise Corrupt(f"it has {len(text)} characters, more than {MAX_ANNOTATION_CHARS}")
    return converted(loaded(text), schema)


def even_gpus(counts: Mapping[str, int], names: ResourceNames) -> tuple[int, int]:
    """The number of GPUs and the memory of each, MiB, where only the node's counts of the resources are known: as many as
    the cores' hundreds, each with an equal part of the blocks or units."""
    cores, blocks = counts.get(names.vcore, 0), counts.get(names.vmemory, 0)
    units = counts.get(names.gpu_mem, 0) if names.gpu_mem else 0
    number = min(MAX_GPUS, cores // CORES_PER_GPU)
    memory_mib = max(blocks * names.memory_block_mib, units * names.gpu_mem_unit_mib)
    return number, min(memory_mib // number, MAX_MEMORY_MIB) if number else 0


class _Mig(Struct):
    label: str
    profile: str
    shares: bool


class _Gpu(Struct):
    """Required fields are typed; others are ignored where they have another form."""

    index: Annotated[int, Meta(ge=0, le=MAX_INDEX)]
    memory_mib: Annotated[int, Meta(ge=0, le=MAX_MEMORY_MIB)]
    is_healthy: bool
    uuid: str
    name: str
    cordoned: object = None
    would_be_healthy: object = None
    reason: object = None
    parts: object = None
    numa: object = None
    host_memory: object = None
    links: object = None
    mig: _Mig | UnsetType = UNSET


class _Gpus(Struct):
    schema: Literal[1]
    gpus: Annotated[list[_Gpu], Meta(max_length=MAX_GPUS)]
    mig_gpus: Annotated[Sequence[_Gpu], Meta(max_length=MAX_GPUS)] = ()
    memory_block_mib: Annotated[int, Meta(gt=0, le=MAX_BLOCK_MIB)] | None = None


_Uid = Annotated[str, Meta(min_length=1, max_length=_MAX_UID_CHARS)]
_Counts = Annotated[list[Annotated[int, Meta(ge=0, le=_MAX_COUNT)]], Meta(max_length=_COUNTS)]


class _Allocations(Struct):
    schema: Literal[1]
    allocations: Annotated[dict[_Uid, dict[str, _Counts]], Meta(max_length=MAX_PODS)]
    truncated: object = None


def _gpu(gpu: _Gpu) -> GpuReport:
    # Agents write `true`: a text is from an agent of another version, or a person.
    why = gpu.cordoned[:MAX_TEXT_CHARS] if isinstance(gpu.cordoned, str) else ""
    mig = gpu.mig
    return GpuReport(
        index=gpu.index,
        uuid=GpuUuid(gpu.uuid[:MAX_TEXT_CHARS]),
        name=gpu.name[:MAX_TEXT_CHARS],
        memory_mib=gpu.memory_mib,
        is_healthy=gpu.is_healthy,
        cordoned=why or ("cordoned" if gpu.cordoned else ""),
        would_be_healthy=gpu.would_be_healthy is True,
        unhealthy_reason=gpu.reason[:MAX_REASON_CHARS] if isinstance(gpu.reason, str) and not gpu.is_healthy else "",
        serves_parts=gpu.parts is True,
        # Placement does without the NUMA node and the links: a report is not refused for them.
        numa=gpu.numa if type(gpu.numa) is int and 0 <= gpu.numa <= _MAX_NUMA else None,
        host_memory=next((one for one in HostMemory if one == gpu.host_memory), None),
        links=_words(gpu.links),
        mig=MigReport(label=mig.label[:MAX_TEXT_CHARS], profile=mig.profile[:MAX_TEXT_CHARS], takes_shares=mig.shares)
        if mig
        else None,
    )


def _charges(uid: str, of_gpus: Mapping[str, Sequence[int]], indexes: Mapping[str, int]) -> dict[int, Charge]:
    charges = {}
    for key, counts in of_gpus.items():
        index = indexes.get(key)
        if index is None:
            raise Corrupt(f"pod {uid} has something of GPU {key[:20]!r}, which the node does not have")
        cores, blocks, units, wholes = [*counts, 0, 0, 0, 0][:_COUNTS]  # the agent leaves zeros at the end out
        charges[index] = Charge(cores, blocks, units, wholes)
        # More would make what is free negative, and the account wrong for all others.
        if cores > CORES_PER_GPU or wholes > 1:
            raise Corrupt(f"what pod {uid} has of GPU {index} is more than a GPU")
    return dict(sorted(charges.items()))


def _words(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_GPUS:
        return ()
    return tuple(word for word in raw if isinstance(word, str) and len(word) <= MAX_TEXT_CHARS)


MAX_CHARS = 200 * 1024
"""All annotations of an object together may have 256 KiB; the rest is for the GPUs and for others."""


class AllocatedTo(Struct, frozen=True, kw_only=True):
    """One pod's part of each GPU, by index and in its order: cores, blocks, units and 1 for a whole GPU, trailing zeros left
    out."""

    pod_uid: PodUid
    gpus: Mapping[int, tuple[int, ...]]
    since: float
    """Monotonic seconds; the time of its newest container."""


def allocations_by_pod(
    allocations: Iterable[Allocation],
    gpus: Sequence[Gpu],
    pod_of: Callable[[PodUid], Pod | None],
    names: ResourceNames,
    resized: Mapping[ContainerKey, Charge] = MappingProxyType({}),
    charged: Callable[[PodUid], Mapping[GpuUuid, Charge]] | None = None,
) -> dict[PodUid, AllocatedTo]:
    """The pods with allocations whose admission is over, by UID.

    Replicas under NVIDIA's names are counted in cores and blocks, part of a block as a block. `resized` has how much more or
    less than its allocation is charged for a container that was resized. `charged` has the sums of `charges_of` by pod,
    where somebody keeps them.
    """
    allocations = list(allocations)
    shown = _reported_resizes(allocations, resized) if resized else {}
    of_pod: dict[PodUid, list[Allocation]] = {}
    for allocation in allocations:
        of_pod.setdefault(allocation.key.pod_uid, []).append(allocation)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    # A node's pods have a few sizes: an account is made for each size and not for each pod.
    counts_of: dict[tuple[GpuUuid, Charge], tuple[int, ...]] = {}
    found = {}
    for uid, own in of_pod.items():
        pod = pod_of(uid)
        # Containers are admitted one by one: the scheduler would think the rest of the pod's GPUs free.
        if not _is_admitted(pod, own, names):
            continue
        charges = charges_of(own) if charged is None else dict(charged(uid))
        for one in own:
            # Only shares are resized, and a share is on one GPU.
            if (change := shown.get(one.key)) is not None:
                add_charges(charges, {one.gpus[0]: change})
        gpus_of_pod = {}
        for uuid, charge in sorted(charges.items()):
            # A GPU that is lost has no index any more; its pods are charged when it comes back.
            if (gpu := by_uuid.get(uuid)) is None:
                continue
            if (counts := counts_of.get((uuid, charge))) is None:
                counts = counts_of[uuid, charge] = _counts(account_of(gpu, names, charge))
            if counts:
                gpus_of_pod[gpu.index] = counts
        if gpus_of_pod:
            # The extender has a static pod under the UID of its mirror pod.
            reported = (pod.object_uid if pod is not None else None) or uid
            since = max(one.allocated_at for one in own)
            found[uid] = AllocatedTo(pod_uid=reported, gpus=dict(sorted(gpus_of_pod.items())), since=since)
    return found


def allocations_annotation(
    allocated: Iterable[AllocatedTo], *, max_chars: int = MAX_CHARS, max_pods: int = MAX_PODS
) -> str:
    """Compact JSON. Where not all fit, it has the newest, because the extender waits for those, and is marked as
    truncated."""
    # The extender waits for the report of pods that were bound just now.
    newest = sorted(sorted(allocated, key=attrgetter("pod_uid")), key=attrgetter("since"), reverse=True)
    chosen = newest[:max_pods]
    text = _document(chosen, is_truncated=len(chosen) < len(newest))
    # All annotations of an object share 256 KiB: a longer one would have the whole patch refused.
    while chosen and len(text) > max_chars:
        chosen = chosen[: len(chosen) * max_chars // len(text)]
        text = _document(chosen, is_truncated=True)
    return text


def _is_admitted(pod: Pod | None, own: Sequence[Allocation], names: ResourceNames) -> bool:
    """A pod that the API server no longer knows counts with what it has: its processes may live on."""
    # A container that has run was admitted whole, whatever the counts are now.
    if pod is None or pod.has_started:
        return True
    ids = {one.key.container: one.ids for one in own}
    return all(
        len(ids.get(container.name, {}).get(kind, ())) >= requested
        for container in pod.containers
        for kind, requested in names.asked(container).items()
    )


def _reported_resizes(
    allocations: Iterable[Allocation], resized: Mapping[ContainerKey, Charge]
) -> dict[ContainerKey, Charge]:
    """Memory and cores that a GPU's shares give back are shown only as far as others there have grown into them: the kubelet
    still counts the rest as taken, so no scheduler may think it free."""
    shown: dict[ContainerKey, Charge] = {}
    on_gpu: dict[GpuUuid, list[ContainerKey]] = {}
    for one in allocations:
        if one.gpus and one.key in resized:
            on_gpu.setdefault(one.gpus[0], []).append(one.key)
    for keys in on_gpu.values():
        left = reduce(Charge.plus, (resized[key].grown() for key in keys))
        # In a fixed order, so that the same resizes give the same report.
        for key in sorted(keys):
            change = resized[key]
            shown[key] = Charge(
                cores=max(change.cores, -left.cores),
                blocks=max(change.blocks, -left.blocks),
                units=max(change.units, -left.units),
            )
            left = left.plus(shown[key].plus(change.grown(), -1))
    return shown


def _counts(account: GpuAccount) -> tuple[int, ...]:
    blocks = account.used.blocks + (0 if account.is_whole else account.blocks_of_part)
    counts = [account.allocated_cores, blocks, account.used.units, int(account.is_whole)]
    # 512 pods have to fit: most have cores and blocks alone.
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _document(allocated: Iterable[AllocatedTo], *, is_truncated: bool) -> str:
    by_uid = sorted(allocated, key=attrgetter("pod_uid"))
    allocations = dict(zip(map(attrgetter("pod_uid"), by_uid), map(attrgetter("gpus"), by_uid), strict=True))
    document: dict[str, object] = {"schema": ALLOCATIONS_SCHEMA, "allocations": allocations}
    if is_truncated:
        document["truncated"] = True
    return encode(document).decode()
