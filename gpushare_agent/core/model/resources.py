"""The kinds of extended resources, a row of a table each; how their names (a setting) map to them; and what a container
requests of them (`Request`). Pure.

To add a kind, write its row (`ResourceKind`) into `KINDS`: its names, which may be a field of `ResourceNames` that a setting
fills, its socket, and the part of a GPU that one device is, its `Measure`. A kind whose devices are parts of GPUs has a rule
too, its `UnitLayout`: which GPU serves how many. Device lists, planning, the ledger, recovery, garbage
collection and the annotations follow from the row; tests/admission/test_new_kind.py adds one.

A unit under NVIDIA's names is a whole GPU (or MIG instance), or one of its replicas. Its replica layout is in its device ID,
`<GPU UUID>::2/4s` inside the agent: replica 2 of 4, limited by the node's isolation. A container keeps the layout under
which it was admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct, field
from msgspec.structs import force_setattr

from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    MEMORY_BLOCK_MIB,
    NVIDIA_GPU_RESOURCE,
    NVIDIA_MIG_PREFIX,
    SHARED_SUFFIX,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
    DeviceId,
    GpuUuid,
    gpu_of,
    unit_id,
    unit_suffix,
)
from gpushare_agent.core.model.pods import ContainerSpec, Pod

_LETTERS = {Sharing.TIME_SLICING: "", Sharing.MPS: "m", Sharing.SHARES: "s"}
_BY_LETTER = {letter: sharing for sharing, letter in _LETTERS.items()}


class ReplicaLayout(NamedTuple):
    """One of so many units of a GPU, and what limits its containers to their part."""

    of: int
    sharing: Sharing = Sharing.TIME_SLICING

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    @property
    def part(self) -> Fraction:
        """The part of the GPU's memory and compute."""
        return Fraction(1, self.of)


class ServedUnits(NamedTuple):
    """What a GPU serves: the resource, and the replica layout."""

    resource: str
    replicas: ReplicaLayout

    def ids(self, gpu: GpuUuid) -> list[DeviceId]:
        suffix = f"{self.replicas.of}{_LETTERS[self.replicas.sharing]}"
        return [unit_id(gpu, number, suffix) for number in range(self.replicas.of)]


class UnitLayout(Struct, frozen=True, kw_only=True):
    """The rule of a kind of resource whose devices are parts of GPUs: `served`. What limits the parts is `sharing`.
    `refuses_several`: a container may have only one part; `is_packed` fills the fullest GPU first."""

    sharing: Sharing = Sharing.TIME_SLICING
    refuses_several: bool = False
    is_packed: bool = False

    def served(self, gpu: Gpu) -> ServedUnits | None:
        """What the GPU serves, None where it serves none of these resources."""
        return None

    def unlike(self, gpus: Iterable[Gpu]) -> str:
        """Why the node gives no unit at all, with the remedy; empty where it does."""
        return ""


class NvidiaNames(UnitLayout, frozen=True, kw_only=True):
    """The settings that say which GPU serves which of NVIDIA's names. Selectors as `Gpu.is_selected`; of pairs the first
    that matches counts."""

    resource: str = NVIDIA_GPU_RESOURCE
    gpus: tuple[str, ...] = ("all",)
    names: tuple[tuple[str, str], ...] = ()
    mig_strategy: Literal["none", "single", "mixed"] = "none"
    mig_names: tuple[tuple[str, str], ...] = ()
    replicas: tuple[tuple[str, int], ...] = ()
    is_renamed: bool = False

    def served(self, gpu: Gpu) -> ServedUnits | None:
        name = self._name(gpu) if gpu.is_selected(self.gpus) else None
        if name is None:
            return None
        selectors = (name, "*")
        count = next((n for s, n in self.replicas if s in selectors or gpu.is_selected((s,))), 1)
        # As NVIDIA's plugin, which divides no instance by MPS.
        if count == 1 or (gpu.mig is not None and self.sharing is not Sharing.TIME_SLICING):
            return ServedUnits(name, ReplicaLayout(1))
        # A name that the settings end in .shared already is not given the suffix twice.
        is_renamed = self.is_renamed and not name.endswith(SHARED_SUFFIX)
        return ServedUnits(name + SHARED_SUFFIX if is_renamed else name, ReplicaLayout(count, self.sharing))

    def unlike(self, gpus: Iterable[Gpu]) -> str:
        """Why, with MIG strategy single, no unit is given, with the remedy; empty where all GPUs that serve these resources
        are alike. A pod could not tell what it gets: NVIDIA's plugin does not start there (internal/rm/device_map.go of
        v0.20.0)."""
        if self.mig_strategy != "single":
            return ""
        kinds: dict[str, list[str]] = {}
        for gpu in gpus:
            # An instance that is gone serves nobody new: it must not stop the others.
            if gpu.is_selected(self.gpus) and not gpu.is_gone:
                without = "GPUs in MIG mode without instances" if gpu.mig_mode else "GPUs that MIG does not divide"
                kind = without if gpu.mig is None else f"instances of {gpu.mig.profile}"
                kinds.setdefault(kind, []).append(gpu.label)
        if len(kinds) < 2:
            return ""
        found = ", ".join(f"{kind} ({' '.join(sorted(labels))})" for kind, labels in sorted(kinds.items()))
        return (
            f"{self.resource} is not given: nvidia.mig_strategy is single, and the node has {found}. Divide all GPUs alike, "
            "name those that are alike in nvidia.gpus, or set nvidia.mig_strategy to mixed"
        )

    def _name(self, gpu: Gpu) -> str | None:
        if gpu.mig is None:
            return next((name for pattern, name in self.names if gpu.is_selected((pattern,))), self.resource)
        match self.mig_strategy:
            case "none":
                return None
            case "single":
                return self.resource
            case "mixed":
                return self.mig_resource(gpu.mig.profile)

    def mig_resource(self, profile: str) -> str:
        """The resource of a profile's instances with strategy mixed, `1g.10gb+me` as nvidia.com/mig-1g.10gb.me."""
        named = (name for pattern, name in self.mig_names if fnmatchcase(profile, pattern))
        return next(named, NVIDIA_MIG_PREFIX + profile.replace("+", "."))

    def resources(self, profiles: Collection[str] = ()) -> tuple[str, ...]:
        """All resources that any GPUs, and instances of these profiles, may serve."""
        found: list[str] = []
        of_instances = [self.mig_resource(profile) for profile in sorted(profiles) if self.mig_strategy == "mixed"]
        for name in dict.fromkeys((self.resource, *(name for _, name in self.names), *of_instances)):
            counts = [count for selector, count in self.replicas if selector in (name, "*")][:1]
            of_some = [count for selector, count in self.replicas if selector not in (name, "*")]
            is_plain = not self.is_renamed or name.endswith(SHARED_SUFFIX)
            # Without a rule for it a resource has one unit each; a rule for some GPUs may leave others with one.
            if is_plain or 1 in (counts or [1]) or 1 in of_some:
                found.append(name)
            if not is_plain and max([*counts, *of_some, 1]) > 1:
                found.append(name + SHARED_SUFFIX)
        return tuple(found)


def cores_of_part(part: Fraction) -> int:
    """Percent that a replica, or a share that asks for memory alone, may use: rounded down, so that all together fit, and
    never 0, which is no limit (GPUShare's rule too)."""
    return min(CORES_PER_GPU, max(1, int(part * CORES_PER_GPU)))


class GpuUnits(NamedTuple):
    """A container's units: its part of each GPU, by UUID, and what limits it there, None for whole GPUs."""

    parts: tuple[tuple[GpuUuid, Fraction], ...]
    sharing: Sharing | None


def units_of(devices: Collection[DeviceId]) -> GpuUnits:
    # A container may hold units of two layouts where the settings changed during its pod's admission.
    layouts = {replica_layout(device) for device in devices}
    sharing = next((one.sharing for one in sorted(layouts, reverse=True) if not one.is_whole), None)
    return GpuUnits(tuple(sorted(parts_of(devices).items())), sharing)


@lru_cache(maxsize=256)
def _replica_layout(suffix: str) -> ReplicaLayout:
    digits = suffix.rstrip("ms")
    return ReplicaLayout(int(digits), _BY_LETTER[suffix[len(digits) :]]) if digits else ReplicaLayout(1)


def replica_layout(device: str) -> ReplicaLayout:
    """The replica layout in a unit's device ID. One whose text does not have it counts as the whole GPU."""
    return _replica_layout(unit_suffix(device))


def parts_of(units: Iterable[DeviceId]) -> dict[GpuUuid, Fraction]:
    """How much of each GPU these units are."""
    parts: dict[GpuUuid, Fraction] = {}
    for (gpu, suffix), count in Counter([(gpu_of(device), unit_suffix(device)) for device in units]).items():
        # Fractions: three thirds are exactly a GPU, which floating-point numbers do not ensure.
        parts[gpu] = parts.get(gpu, Fraction(0)) + count * _replica_layout(suffix).part
    return parts


# --- the table of kinds ---

NO_NVIDIA_NAMES = NvidiaNames()
NO_LAYOUT = UnitLayout()


class Measure(StrEnum):
    """The part of a GPU that a device is: the field of a Request, and of a Charge, that counts it."""

    CORES = "cores"
    """1/100 of the GPU's compute."""
    BLOCKS = "blocks"
    """A block of memory. Its IDs are counters: the GPU is that of the container's other IDs."""
    UNITS = "units"
    """A unit of memory, and an equal part of the compute."""
    PART = "part"
    """An equal part of memory and compute. It is in the ID, because a container keeps the layout under which it was
    admitted."""


class ResourceKind(Struct, frozen=True, kw_only=True, eq=False):
    """A row: all facts about one kind. `value` names it in files and pages. A kind with several names has the number of the
    name in its `socket`, as `{}`. `layout` is the rule of a kind whose devices are parts of GPUs."""

    value: str
    socket: str
    measure: Measure
    names: Callable[[ResourceNames], tuple[str, ...]]
    layout: Callable[[ResourceNames], UnitLayout] = lambda _: NO_LAYOUT
    is_part: bool = False
    binds_gpu: bool = True
    """The ID says which GPU the container is on. Others are charged to the GPU of the IDs that do. Both follow from
    `measure`, and are fields because every admission call asks them of every allocation."""

    VCORE: ClassVar[ResourceKind]
    VMEMORY: ClassVar[ResourceKind]
    GPU_MEM: ClassVar[ResourceKind]
    GPU: ClassVar[ResourceKind]

    def __post_init__(self) -> None:
        force_setattr(self, "is_part", self.measure is Measure.PART)
        force_setattr(self, "binds_gpu", self.measure is not Measure.BLOCKS)

    def __str__(self) -> str:
        return self.value


class ResourceNames(Struct, frozen=True, kw_only=True, dict=True):
    """The names under which the kubelet knows the resources, and the sizes of their units. `gpu_mem` is empty where
    GPUShare's resource is not offered, and `gpu` where NVIDIA's are not; `nvidia` says which GPU serves which of `gpu`."""

    vcore: str = VCORE_RESOURCE
    vmemory: str = VMEMORY_RESOURCE
    offers_vcore: bool = True
    """Whether vcore and vmemory are offered."""
    gpu_mem: str = ""
    memory_block_mib: int = MEMORY_BLOCK_MIB
    gpu_mem_unit_mib: int = 1024
    gpu: tuple[str, ...] = ()
    nvidia: NvidiaNames = NO_NVIDIA_NAMES
    shares_in_mig: bool = False
    """Whether the node's isolation keeps shares inside MIG instances: else these have no units but NVIDIA's."""
    table: tuple[ResourceKind, ...] = field(default_factory=lambda: KINDS)

    @cached_property
    def kinds(self) -> Mapping[ResourceKind, tuple[str, ...]]:
        """The kinds that the node offers, in the order of the table, with their names."""
        return {kind: names for kind in self.table if (names := kind.names(self))}

    @cached_property
    def by_name(self) -> Mapping[str, ResourceKind]:
        """The kind of each name; asked for every container of the node in every admission."""
        return {name: kind for kind, names in self.kinds.items() for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @cached_property
    def offers_parts(self) -> bool:
        """It offers parts of GPUs."""
        return any(kind.is_part for kind in self.kinds)

    def serves_parts(self, gpu: Gpu) -> bool:
        """Whether a name such as NVIDIA's offers the GPU too, as a whole or in parts."""
        return self.offers_parts and any(kind.is_part and self.units(gpu, kind) for kind in self.kinds)

    @property
    def binding_names(self) -> tuple[str, ...]:
        """The names of the resources whose IDs say which GPU a container is on."""
        return tuple(name for name, kind in self.by_name.items() if kind.binds_gpu)

    def name(self, kind: ResourceKind) -> str:
        """The kind's name, or its first name; empty where the node does not offer it."""
        return self.kinds.get(kind, ("",))[0]

    def name_in(self, container: ContainerSpec, kind: ResourceKind) -> str:
        """The name by which the container asks for it."""
        names = self.kinds.get(kind, ())
        return names[0] if len(names) == 1 else next((name for name in names if container.requests.get(name)), "")

    def socket(self, resource: str) -> str:
        """Each name has its own: two may differ in their prefixes alone."""
        kind = self.by_name[resource]
        return kind.socket.format(self.kinds[kind].index(resource))

    def asked(self, container: ContainerSpec) -> dict[ResourceKind, int]:
        """Units of each resource of the node's that the container asks for, in the order of the table."""
        found: dict[ResourceKind, int] = {}
        for name, kind in self.by_name.items():
            if count := container.requests.get(name):
                found[kind] = found.get(kind, 0) + count
        return found

    def wants_any(self, pod: Pod) -> bool:
        return any(map(self.asked, pod.containers))

    def part_kind(self, container: ContainerSpec) -> ResourceKind | None:
        """The resource of parts of GPUs that the container asks for."""
        for kind in self.asked(container):
            if kind.is_part:
                return kind
        return None

    def takes_shares(self, gpu: Gpu) -> bool:
        """False for a MIG instance if the isolation cannot limit a share of it, or others have the same memory."""
        return gpu.mig is None or (self.shares_in_mig and gpu.mig.has_own_memory)

    def units(self, gpu: Gpu, kind: ResourceKind) -> int:
        """Whole units of a GPU; where the resource has several names, units of the one that the GPU serves."""
        if kind.is_part:
            served = kind.layout(self).served(gpu) if kind in self.kinds else None
            return served.replicas.of if served is not None else 0
        if not self.takes_shares(gpu):
            return 0
        return CORES_PER_GPU if kind.measure is Measure.CORES else gpu.memory_mib // self.unit_mib(kind)

    def unit_mib(self, kind: ResourceKind) -> int:
        """The size of a unit of memory."""
        return self.gpu_mem_unit_mib if kind.measure is Measure.UNITS else self.memory_block_mib

    def memory_mib(self, container: ContainerSpec) -> int:
        """The memory that the container asks for, by any resource."""
        return self.requested_mib(request_of(container, self))

    def requested_mib(self, asked: Request) -> int:
        return asked.blocks * self.memory_block_mib + asked.units * self.gpu_mem_unit_mib


ResourceKind.VCORE = ResourceKind(
    value="vcore",
    socket="vcore",
    measure=Measure.CORES,
    names=lambda names: (names.vcore,) if names.offers_vcore else (),
)
ResourceKind.VMEMORY = ResourceKind(
    value="vmemory",
    socket="vmemory",
    measure=Measure.BLOCKS,
    names=lambda names: (names.vmemory,) if names.offers_vcore else (),
)
ResourceKind.GPU_MEM = ResourceKind(
    value="gpu-mem",
    socket="gpumem",
    measure=Measure.UNITS,
    names=lambda names: (names.gpu_mem,) if names.gpu_mem else (),
)
ResourceKind.GPU = ResourceKind(
    value="gpu",
    socket="gpu{}",
    measure=Measure.PART,
    names=lambda names: names.gpu,
    layout=lambda names: names.nvidia,
)

KINDS: tuple[ResourceKind, ...] = (ResourceKind.VCORE, ResourceKind.VMEMORY, ResourceKind.GPU_MEM, ResourceKind.GPU)
"""The table, in the order in which the kubelet learns of the resources."""


# --- what a container requests ---


class Request(NamedTuple):
    """The request of one container, or of one result of a ResourceClaim. A tuple: the extender compares and hashes many.

    | it is | given by |
    |---|---|
    | a share of one GPU | `cores` 1 to 99, and memory `blocks` |
    | whole GPUs | `cores` in hundreds; `blocks` are what they must have together, 0 for any |
    | memory of one GPU by GPUShare's resource | `units` |
    | units of one GPU under NVIDIA's names | `part` of that GPU's compute and memory |

    `hint` holds GPU indexes from the scheduler extender's annotation, which any tenant can write. `must_gpus` are the GPUs
    that the kubelet's must-include IDs are on. `is_share`: 100 cores are no whole GPU, as a ResourceClaim may ask for them.
    """

    cores: int = 0
    blocks: int = 0
    units: int = 0
    part: Fraction | None = None
    hint: tuple[int, ...] = ()
    must_gpus: tuple[GpuUuid, ...] = ()
    is_share: bool = False

    @property
    def whole_gpus(self) -> int:
        """How many whole GPUs are asked for, 0 for a share."""
        return 0 if self.is_share else self.cores // CORES_PER_GPU


NOTHING = Request()
WHOLE_GPU = Request(cores=CORES_PER_GPU)


def request_of(container: ContainerSpec, names: ResourceNames) -> Request:
    """What the container's limits ask for; nothing for NVIDIA's names, because their part depends on the GPU."""
    asked = names.asked(container)
    return Request(
        cores=asked.get(ResourceKind.VCORE, 0),
        blocks=asked.get(ResourceKind.VMEMORY, 0),
        units=asked.get(ResourceKind.GPU_MEM, 0),
    )
