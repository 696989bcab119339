"""What is wrong with a pod's requests whatever is free, and what to write instead. Pure.

kube-scheduler only says `Insufficient tencent.com/vcuda-memory`, of bytes for blocks and of a mistyped name. These sentences
are in `explain`, the extender's Event, the page of all nodes and the webhooks' answers; an agent refuses with the same of
`validate_request`. Names of other programs: pkg/device/nvidia/device.go of HAMi 4707fb0, pkg/device/allocator of
vgpu-manager 3d7f66d, and the documents of Volcano and GPUShare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.kit.near_names import AMONG_OTHERS, AMONG_OWN, nearest
from gpushare_agent.core.kube.objects import Quantity, amount
from gpushare_agent.core.kube.pods import MAX_COMPARED, MAX_NAME_CHARS, ContainerJson, PodJson
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, NVIDIA_GPU_RESOURCE, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.model.resources import Request, ResourceNames
from gpushare_agent.core.placement.gpu_account import memory_text
from gpushare_agent.core.placement.place import validate_request

_BYTES = 1 << 20
"""So many units of memory, or more, are meant as bytes."""
_MOST_SAID = 3
_MOST_CONTAINERS = 32
"""Of a kind. Names are compared letter by letter, while the event loop waits."""
_MOST_GPUS = 64
_OTHER_SCHEDULERS = ("hami", "volcano", "vgpu")
"""Parts of the names of schedulers that read the names of their programs."""


class Family(Struct, frozen=True):
    """The names of one program, empty where it has none; memory is in `unit_mib`. The annotation `elastic` lets a share
    compute beyond its cores, and `ignored` have no effect; placement follows those that choose GPUs (gpu_choice.py)."""

    program: str
    count: str
    memory: str
    cores: str
    percentage: str = ""
    priority: str = ""
    elastic: str = ""
    ignored: tuple[str, ...] = ()
    unit_mib: int = 1

    @property
    def asking(self) -> tuple[str, ...]:
        """Those by which a container asks."""
        return tuple(filter(None, (self.count, self.memory, self.cores, self.percentage)))


def _names(*names: str, domain: str = "nvidia.com") -> tuple[str, ...]:
    return tuple(f"{domain}/{name}" for name in names)


HAMI = Family(
    "HAMi",
    count=NVIDIA_GPU_RESOURCE,
    memory="nvidia.com/gpumem",
    cores="nvidia.com/gpucores",
    percentage="nvidia.com/gpumem-percentage",
    priority="nvidia.com/priority",
    ignored=(
        *_names("vgpu-mode", "numa-bind"),
        *_names("node-scheduler-policy", "gpu-scheduler-policy", "device-scoring-weights", domain="hami.io"),
    ),
)
VGPU_MANAGER = Family(
    "vgpu-manager",
    count="nvidia.com/vgpu-number",
    memory="nvidia.com/vgpu-memory",
    cores="nvidia.com/vgpu-cores",
    elastic="nvidia.com/vgpu-compute-policy",
    ignored=_names(
        *("node-scheduler-policy", "device-scheduler-policy", "memory-scheduler-policy"),
        *("device-topology-mode", "cross-pod-topology"),
    ),
)
_FAMILIES = (
    HAMI,
    VGPU_MANAGER,
    Family(
        "Volcano",
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-cores",
        "volcano.sh/vgpu-memory-percentage",
    ),
    Family("GPUShare", "", "aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", unit_mib=1024),
)


class Offer(NamedTuple):
    """What the nodes of a cluster have: the names of their extended resources, the most GPUs of a node, and the memory of
    the largest GPU; 0 where it is not known."""

    resources: Set[str] = frozenset()
    gpus: int = 0
    memory_mib: int = 0


NO_OFFER = Offer()


def mistakes(pod: PodJson, names: ResourceNames, offer: Offer = NO_OFFER) -> str:
    """Sentences, each with its remedy; empty where nothing is wrong. Raises nothing, whatever a quantity is."""
    # Commands of a cluster read GPUShare's name whether or not a node offers it.
    if offer.resources and names.gpu_mem not in offer.resources:
        names = replace(names, gpu_mem="")
    return " ".join(islice(_mistakes(pod, names, offer), _MOST_SAID))


def _mistakes(pod: PodJson, names: ResourceNames, offer: Offer) -> Iterator[str]:
    spec = pod.spec
    for name in sorted({*(spec.resources.limits or {}), *spec.requests})[:MAX_COMPARED]:
        if meant := name if name in names.names else _meant(name, names):
            yield f"spec.resources of the pod: write {meant} in resources.limits of the container that computes."
    others = any(part in str(spec.scheduler_name or "") for part in _OTHER_SCHEDULERS)
    for kind, containers in (("init container", spec.init_containers), ("container", spec.containers)):
        for one in (containers or ())[:_MOST_CONTAINERS]:
            found = [*_of_names(one, names, offer), *(() if others else _of_families(one, names, offer))]
            # The size of what is written wrongly would be one mistake more.
            for text in found or _of_size(one, names, offer):
                yield f"{kind} {(one.name or '')[:MAX_NAME_CHARS]}: {text}"


def _of_names(one: ContainerJson, names: ResourceNames, offer: Offer) -> Iterator[str]:
    unknown = [name for name in sorted(one.requests) if name not in names.names and name not in offer.resources]
    for name in unknown[:MAX_COMPARED]:
        if (meant := _meant(name, names)) not in ("", name):
            yield f"the agents offer no {name[:MAX_NAME_CHARS]}. {write_instead(meant, one.requests[name], names)}"
    for name in names.names:
        given, limit, unit_mib = one.requests.get(name), one.limits.get(name), _unit_mib(name, names)
        if given is None:
            continue
        value = amount(given)
        if value is None or value.denominator != 1 or not 0 <= value < 1 << 63:
            yield f"{name}: {given!r:.80} is no whole number. {write_instead(name, given, names)}"
        elif value != amount(limit):
            was = f"{limit!r:.80} in limits" if limit is not None else "not in limits"
            yield f"{name} is {given!r:.80} in requests and {was}. Write it in limits alone."
        elif unit_mib and value >= _BYTES:
            unit = f"units of {memory_text(unit_mib)}, not in bytes"
            yield f"{name}: {given!r:.80} is in {unit}. {write_instead(name, given, names)}"


def _meant(name: str, names: ResourceNames) -> str:
    """The resource of ours that this name was meant to be, whatever its domain; empty where none is similar."""
    domain, _, behind = name[: 2 * MAX_NAME_CHARS].rpartition("/")
    known = {own.rpartition("/")[2]: own for own in (names.vcore, names.vmemory)}
    known = {"vcuda-core": names.vcore, "vcuda-memory": names.vmemory, **known}
    is_own = any(own.startswith(f"{domain}/") for own in (names.vcore, VCORE_RESOURCE, VMEMORY_RESOURCE))
    return known.get(nearest(behind.lower().replace("_", "-"), known, AMONG_OWN if is_own else AMONG_OTHERS), "")


def _unit_mib(name: str, names: ResourceNames) -> int:
    """The unit of a resource of memory, 0 of any other."""
    return {names.vmemory: names.memory_block_mib, names.gpu_mem: names.gpu_mem_unit_mib}.get(name, 0)


def write_instead(name: str, given: Quantity, names: ResourceNames) -> str:
    """The remedy, with the number that was meant as far as it can be known: fractions are of a GPU's compute, and GiB."""
    text = str(given).strip()
    value, unit_mib = amount(text.rstrip("% ")) or Fraction(0), _unit_mib(name, names)
    if unit_mib:
        size_mib = value * (1024 if value.denominator != 1 else unit_mib) if value < _BYTES else value / MIB
        count = ceil(size_mib / unit_mib) if not text.endswith("%") else 0
        if not 0 < count < _BYTES:
            return f"Write {name} in units of {memory_text(unit_mib)}."
        return f"Write {name}: {count} for {memory_text(count * unit_mib)}."
    count = ceil(value if text.endswith("%") or value.denominator == 1 else value * CORES_PER_GPU)
    count = count if count < CORES_PER_GPU else -(-count // CORES_PER_GPU) * CORES_PER_GPU
    number = f": {count}" if 0 < count <= _MOST_GPUS * CORES_PER_GPU else ""
    return f"Write {name}{number}, in 1/100 of a GPU's compute."


def _of_families(one: ContainerJson, names: ResourceNames, offer: Offer) -> Iterator[str]:
    """Names of other programs that no node offers, and no webhook has translated, as ours."""
    # NVIDIA's own plugin offers HAMi's name for the number.
    common = {NVIDIA_GPU_RESOURCE, *names.names}
    for family in _FAMILIES:
        wrong = [name for name in family.asking if name in one.requests and name not in common]
        # Where nodes offer one of its names the program runs there, and reads the others by itself.
        if not wrong or not offer.resources.isdisjoint({*family.asking} - common):
            continue
        counts = {name: ceil(amount(one.requests[name]) or 0) for name in family.asking if name in one.requests}
        if (memory := counts.get(family.memory, 0)) >= _BYTES:
            counts[family.memory] = -(-memory // (MIB * family.unit_mib))
        asked = asked_of_family(family, counts, names)
        write = f"{names.vcore}, in 1/100 of a GPU's compute, and {names.vmemory}, in blocks of {names.memory_block_mib} MiB"
        if isinstance(asked, FamilyRequest):
            write = f"{names.vcore}: {'1 to 99' if asked.is_unlimited else asked.cores}"
            write += f" and {names.vmemory}: {asked.blocks}" if asked.blocks else ""
        yield f"the agents offer no {' and no '.join(wrong)} of {family.program}. Write {write}."


class FamilyRequest(NamedTuple):
    """A container's request by another program's names. `blocks` 0 for none. `is_unlimited`: nothing was said about its
    compute."""

    cores: int
    blocks: int
    is_unlimited: bool = False


def asked_of_family(family: Family, requests: Mapping[str, int], names: ResourceNames) -> FamilyRequest | str:
    """What the container asks for in vcuda's units, else why that cannot be said."""
    # Without a number HAMi's webhook adds one, by default 1.
    count = requests.get(family.count, 1)
    memory_mib, percent = requests.get(family.memory, 0) * family.unit_mib, requests.get(family.percentage, 0)
    # For both programs, missing memory means all of the GPU's memory, and then without cores the GPU is the container's own.
    is_all = not memory_mib and percent in (0, CORES_PER_GPU)
    cores = requests.get(family.cores, 0) or (CORES_PER_GPU if is_all else 0)
    blocks = -(-memory_mib // names.memory_block_mib)
    if count < 1 or cores > CORES_PER_GPU:
        return f"{family.count} is at least 1, and {family.cores} at most {CORES_PER_GPU}"
    if cores == CORES_PER_GPU and percent in (0, CORES_PER_GPU):
        return FamilyRequest(count * CORES_PER_GPU, count * blocks)
    if not memory_mib:
        return (
            f"how much {percent or CORES_PER_GPU} % of a GPU's memory are is known only once there is one: write"
            f" {family.memory}, in MiB"
        )
    if count > 1:
        return (
            f"it asks for parts of {count} GPUs, and a share is of one. Ask for whole GPUs, or for a ResourceClaim with"
            " several requests"
        )
    return FamilyRequest(cores or 1, blocks, is_unlimited=not cores)


def _of_size(one: ContainerJson, names: ResourceNames, offer: Offer) -> Iterator[str]:
    """More than any node has, else what is neither a share nor whole GPUs."""
    counts = {name: int(amount(count) or 0) for name, count in one.limits.items() if name in names.names}
    cores, blocks, units = (counts.get(name, 0) for name in (names.vcore, names.vmemory, names.gpu_mem))
    request = Request(cores=cores, blocks=blocks, units=units)
    if not any(request[:3]):
        return
    gpus, asked, name = request.whole_gpus or 1, units or blocks, names.gpu_mem if units else names.vmemory
    unit_mib = _unit_mib(name, names)
    most = offer.memory_mib // unit_mib * gpus
    if 0 < offer.gpus * CORES_PER_GPU < cores:
        have = f"{cores / CORES_PER_GPU:.15g} GPUs, and no node has more than {offer.gpus}"
        yield f"{cores} cores are {have}. Write {names.vcore}: {offer.gpus * CORES_PER_GPU} or less."
    elif (refused := validate_request(request, names, share_mode=True)) is not None:
        yield refused.detail
    elif 0 < most < asked:
        # Whoever asks for 4096 blocks means MiB.
        in_mib = f", or {ceil(asked / unit_mib)} for {memory_text(asked)}" if asked >= unit_mib else ""
        have = f"{memory_text(asked * unit_mib)}, more than {f'{gpus} GPUs have' if gpus > 1 else 'any GPU has'}"
        size = memory_text(most * unit_mib)
        yield f"{asked} units of {memory_text(unit_mib)} are {have}. Write {name}: {most} ({size}) or less{in_mib}."
