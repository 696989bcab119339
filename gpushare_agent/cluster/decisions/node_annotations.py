"""The annotations by which a node reports its GPUs, read as text that others may have written: bounded and checked. Pure.

The agent writes them (node_facts.py, node_allocations.py); the extender and the command line read them. Formats:
docs/reference/node-facts.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from msgspec import Struct

from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.resources import ResourceNames

OWN_PREFIX = "gpushare-agent"
GPUS_ANNOTATION = f"{OWN_PREFIX}/cards"
GPUS_SCHEMA = 1
ALLOCATIONS_ANNOTATION = f"{OWN_PREFIX}/held"
ALLOCATIONS_SCHEMA = 1
MAX_ANNOTATION_CHARS = 256 * 1024
"""All annotations of an object together may have so many bytes."""
MAX_GPUS = 256
MAX_INDEX = 10_000
MAX_TEXT_CHARS = 128
MAX_MEMORY_MIB = 1 << 30
MAX_BLOCK_MIB = 1 << 16
MAX_PODS = 512
"""With GPUs of one node."""
_MAX_NUMA = 4096
_MAX_UID_CHARS = 128
_MAX_COUNT = 1 << 30
_COUNTS = 4
"""Of a pod on a GPU: cores, blocks, units, and 1 for a whole GPU."""


class ReportedMig(Struct, frozen=True, kw_only=True):
    """What a MIG instance is: NVIDIA's name of it, such as `0:1`, and whether it takes shares by vcuda's names."""

    label: str
    profile: str
    takes_shares: bool


class ReportedGpu(Struct, frozen=True, kw_only=True):
    """One GPU as the annotation has it. `mig` is None unless it is a MIG instance. `cordoned` is why an operator took it
    out of service, empty where nobody did; `links` has nvidia-smi's abbreviation for each GPU of the list, and is empty
    where that cannot be read."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    is_healthy: bool
    cordoned: str = ""
    numa: int | None = None
    links: tuple[str, ...] = ()
    mig: ReportedMig | None = None


class ReportedGpus(Struct, frozen=True, kw_only=True):
    """The GPUs in the annotation's order, no index twice. `memory_block_mib` is None where it is absent."""

    gpus: tuple[ReportedGpu, ...]
    memory_block_mib: int | None = None


class Charge(Struct, frozen=True, kw_only=True):
    """What a pod has of one GPU, all its containers together."""

    index: int
    cores: int = 0
    blocks: int = 0
    units: int = 0
    is_whole: bool = False


class ReportedAllocations(Struct, frozen=True, kw_only=True):
    """What each pod has, of each GPU by index. `is_truncated` is True where the agent had no room for all pods."""

    of_pod: Mapping[PodUid, tuple[Charge, ...]]
    is_truncated: bool = False


def parse_gpus(text: object) -> ReportedGpus:
    """The annotation `gpushare-agent/cards`. One bad GPU makes the whole unreadable: half a list would show a
    smaller node than there is.

    Raises:
        Corrupt: what is wrong, without the annotation's name.
    """
    raw = parse_document(text, GPUS_SCHEMA)
    raw_gpus, block_mib = raw.get("cards"), raw.get("memory_block_mib")
    if not isinstance(raw_gpus, list):
        raise Corrupt("`cards` is no list")
    if len(raw_gpus) > MAX_GPUS:
        raise Corrupt(f"it lists {len(raw_gpus)} GPUs, more than {MAX_GPUS}")
    if block_mib is not None and (not is_count(block_mib, MAX_BLOCK_MIB) or not block_mib):
        raise Corrupt("`memory_block_mib` is no size of a memory block")
    gpus = tuple(_gpu(raw_gpu, position) for position, raw_gpu in enumerate(raw_gpus))
    if len({gpu.index for gpu in gpus}) != len(gpus):
        raise Corrupt("two GPUs have the same index")
    return ReportedGpus(gpus=gpus, memory_block_mib=block_mib)


def parse_allocations(text: object, indexes: Collection[int]) -> ReportedAllocations:
    """The annotation `gpushare-agent/held` of a node whose GPUs have these indexes. One bad entry makes the whole
    unreadable: a part would show too much as free.

    Raises:
        Corrupt: what is wrong, without the annotation's name.
    """
    document = parse_document(text, ALLOCATIONS_SCHEMA)
    raw = document.get("held")
    if not isinstance(raw, dict):
        raise Corrupt("`held` is no JSON object")
    if len(raw) > MAX_PODS:
        raise Corrupt(f"it names {len(raw)} pods, more than {MAX_PODS}")
    by_key = {str(index): index for index in indexes}
    of_pod = {PodUid(uid): _charges(uid, raw[uid], by_key) for uid in sorted(raw)}
    return ReportedAllocations(of_pod=of_pod, is_truncated=document.get("truncated") is True)


def parse_document(text: object, schema: int) -> dict[str, Any]:
    """The JSON object of an annotation that states its schema.

    Raises:
        Corrupt: what is wrong, without the annotation's name.
    """
    if not isinstance(text, str):
        raise Corrupt("it is no text")
    if len(text) > MAX_ANNOTATION_CHARS:
        raise Corrupt(f"it has {len(text)} characters, more than {MAX_ANNOTATION_CHARS}")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt("it is no JSON") from error
    if not isinstance(raw, dict):
        raise Corrupt("it is no JSON object")
    if raw.get("schema") != schema or isinstance(raw.get("schema"), bool):
        raise Corrupt(f"its `schema` is not {schema}, which is all that is understood here")
    return raw


def is_count(value: Any, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def even_gpus(counts: Mapping[str, int], names: ResourceNames) -> tuple[int, int]:
    """The number of GPUs and the memory of each, MiB, where only the node's counts of the resources are known: as many as
    the cores' hundreds, each with an equal part of the blocks or units."""
    cores, blocks = counts.get(names.vcore, 0), counts.get(names.vmemory, 0)
    units = counts.get(names.gpu_mem, 0) if names.gpu_mem else 0
    number = min(MAX_GPUS, cores // CORES_PER_GPU)
    memory_mib = max(blocks * names.memory_block_mib, units * names.gpu_mem_unit_mib)
    return number, min(memory_mib // number, MAX_MEMORY_MIB) if number else 0


def _gpu(raw: Any, position: int) -> ReportedGpu:
    where = f"the GPU at place {position} of the list"
    if not isinstance(raw, dict):
        raise Corrupt(f"{where} is no JSON object")
    index, memory_mib, is_healthy = raw.get("index"), raw.get("memory_mib"), raw.get("is_healthy")
    uuid, name, cordoned, numa = raw.get("uuid"), raw.get("name"), raw.get("cordoned"), raw.get("numa")
    if not is_count(index, MAX_INDEX):
        raise Corrupt(f"{where} has no usable `index`")
    if not is_count(memory_mib, MAX_MEMORY_MIB):
        raise Corrupt(f"{where} has no usable `memory_mib`")
    if not isinstance(is_healthy, bool):
        raise Corrupt(f"{where} has no usable `is_healthy`")
    if not isinstance(uuid, str) or not isinstance(name, str):
        raise Corrupt(f"{where} has no `uuid` or no `name`")
    why = cordoned[:MAX_TEXT_CHARS] if isinstance(cordoned, str) else ""
    return ReportedGpu(
        index=index,
        uuid=uuid[:MAX_TEXT_CHARS],
        name=name[:MAX_TEXT_CHARS],
        memory_mib=memory_mib,
        is_healthy=is_healthy,
        cordoned=why or ("cordoned" if cordoned else ""),
        numa=numa if is_count(numa, _MAX_NUMA) else None,
        links=_words(raw.get("links")),
        mig=_mig(raw["mig"], where) if "mig" in raw else None,
    )


def _mig(raw: Any, where: str) -> ReportedMig:
    label, profile, shares = (
        (raw.get(key) for key in ("label", "profile", "shares")) if isinstance(raw, dict) else (None,) * 3
    )
    if not isinstance(label, str) or not isinstance(profile, str) or not isinstance(shares, bool):
        raise Corrupt(f"{where} has no usable `mig`")
    return ReportedMig(label=label[:MAX_TEXT_CHARS], profile=profile[:MAX_TEXT_CHARS], takes_shares=shares)


def _charges(uid: str, raw: Any, indexes: Mapping[str, int]) -> tuple[Charge, ...]:
    if not uid or len(uid) > _MAX_UID_CHARS:
        raise Corrupt("a pod's UID is empty or too long")
    if not isinstance(raw, dict):
        raise Corrupt(f"what pod {uid} has is no JSON object")
    charges = [_charge(uid, key, counts, indexes) for key, counts in raw.items()]
    return tuple(sorted(charges, key=lambda charge: charge.index))


def _charge(uid: str, key: str, raw: Any, indexes: Mapping[str, int]) -> Charge:
    index = indexes.get(key)
    if index is None:
        raise Corrupt(f"pod {uid} has something of GPU {key[:20]!r}, which the node does not have")
    where = f"what pod {uid} has of GPU {index}"
    if not isinstance(raw, list) or len(raw) > _COUNTS or not all(is_count(count, _MAX_COUNT) for count in raw):
        raise Corrupt(f"{where} is no list of at most {_COUNTS} counts")
    cores, blocks, units, whole = [*raw, 0, 0, 0, 0][:_COUNTS]
    if cores > CORES_PER_GPU or whole > 1:
        raise Corrupt(f"{where} is more than a GPU")
    return Charge(index=index, cores=cores, blocks=blocks, units=units, is_whole=whole == 1)


def _words(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_GPUS:
        return ()
    return tuple(word for word in raw if isinstance(word, str) and len(word) <= MAX_TEXT_CHARS)
