"""The devices allocated to a container, the edits that an Allocate answer makes in it, and what it is charged. Pure.

A `Charge` is the one count behind every account of a GPU. The agent charges a pod for its allocations (`charges_of`) and
reports that on the node's object; the extender charges pods for the reports, and for its own plans until they are reported.
placement/gpu_account.py makes an account of the sum.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    ENV_VISIBLE_DEVICES,
    DeviceId,
    GpuUuid,
    PodUid,
    former_program,
    named_gpus,
)
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import Measure, ResourceKind, parts_of, replica_layout

VOLUME_MOUNT_ROOT = "/var/run/nvidia-container-devices"
_GPU_NAME = re.compile(
    r"/dev/nvidia[0-9]{1,4}|/dev/nvidia-caps/nvidia-cap[0-9]{1,6}|[0-9]{1,4}(:[0-9]{1,4})?|GPU-[0-9a-f-]{1,64}",
    re.ASCII,
)
NO_IDS: frozenset[DeviceId] = frozenset()


class ContainerKey(NamedTuple):
    """Names one container for the agent's whole life: a pod recreated under the same name has another UID."""

    pod_uid: PodUid
    container: str


class ShareSize(Struct, frozen=True, kw_only=True):
    """How much of one GPU: cores (1/100 of it; 0 where they follow the memory) and memory, in units of the resource that the
    container asked for: memory blocks, or GPUShare's units."""

    cores: int
    memory: int

    def at_least(self, other: ShareSize) -> ShareSize:
        """The greater number of each."""
        return ShareSize(cores=max(self.cores, other.cores), memory=max(self.memory, other.memory))


class ClaimRef(NamedTuple):
    """Names one ResourceClaim of Dynamic Resource Allocation for its whole life."""

    namespace: str
    name: str
    uid: str


class ClaimShare(Struct, frozen=True, kw_only=True):
    """The request and the claim of an allocation (`request` without the alternative that was chosen), and what the claim
    asked for apart from the size: its isolation, and the elastic ceiling, 0 without one. `shown_as` is the claim's name in
    its pod, or its own where no template made it. `view` names one of the claim's allocations: under its key the isolation
    keeps its files for all allocations that a container uses together."""

    ref: ClaimRef
    shown_as: str
    request: str
    isolation: str
    core_limit: int = 0
    view: str = ""


K = TypeVar("K")


class Charge(NamedTuple):
    """The part of one GPU that a container, a pod or all pods together have; a count below 0 is given back.

    `cores` are 1/100 of the GPU, `blocks` of memory, `units` those of GPUShare's resource. `wholes` counts who has the GPU
    as a whole, with all its memory: more than one only where it is not known which GPU a pod has. `shares` are the
    containers that share it under an isolation, `part` is what units under NVIDIA's names are of it. A tuple: a cluster has
    many.
    """

    cores: int = 0
    blocks: int = 0
    units: int = 0
    wholes: int = 0
    shares: int = 0
    part: Fraction = Fraction(0)

    @property
    def is_whole(self) -> bool:
        return self.wholes > 0

    def count(self, kind: ResourceKind) -> int:
        """The number of the resource's units; parts of GPUs have none."""
        counts = {Measure.CORES: self.cores, Measure.BLOCKS: self.blocks, Measure.UNITS: self.units}
        return counts.get(kind.measure, 0)

    def plus(self, more: Charge, times: int = 1) -> Charge:
        return Charge(
            self.cores + times * more.cores,
            self.blocks + times * more.blocks,
            self.units + times * more.units,
            self.wholes + times * more.wholes,
            self.shares + times * more.shares,
            # Adding fractions takes ten times as long as comparing with 0, and most charges have none.
            self.part + times * more.part if more.part else self.part,
        )

    def grown(self) -> Charge:
        """The charge without the counts below 0."""
        return Charge(cores=max(0, self.cores), blocks=max(0, self.blocks), units=max(0, self.units))


NO_CHARGE = Charge()


class Allocation(Struct, frozen=True, kw_only=True):
    """The devices of one container, or what one result of a ResourceClaim has of one GPU.

    `ids` has a resource once the kubelet has allocated it; `gpu_resource` is the one under NVIDIA's names. `gpus` are the
    GPUs named by the IDs of the resource that binds them, else the planned ones, in order of index; the memory is charged to
    them. `is_whole` means whole GPUs: their whole memory is the container's. `allocated_at` is seconds on the monotonic
    clock. `resized_to` is the size to which a running share was changed, None where it has what the kubelet allocated.
    `gpu_names` is what its answer names GPUs by (`gpu_names`), None where no record of that was found.

    The allocation of a claim has a `charge` and no IDs. Its key has the claim's UID instead of the pod's and the result's
    name instead of the container's. `pod_name` names the pod for which it was prepared first.
    """

    key: ContainerKey
    namespace: str
    pod_name: str
    kind: ContainerKind
    gpus: tuple[GpuUuid, ...]
    ids: Mapping[ResourceKind, frozenset[DeviceId]] = {}
    gpu_resource: str = ""
    is_whole: bool = False
    allocated_at: float = 0.0
    resized_to: ShareSize | None = None
    gpu_names: frozenset[str] | None = None
    claim: ClaimShare | None = None
    charge: Charge = NO_CHARGE

    @property
    def container_name(self) -> str:
        """The name for people. A claim's result is `claim:<claim>/<result>`, like the names in a pod's
        allocatedResourcesStatus."""
        return self.key.container if self.claim is None else f"claim:{self.claim.shown_as}/{self.key.container}"

    def __post_init__(self) -> None:
        if not all(self.ids.values()):  # so that two with the same IDs are equal
            force_setattr(self, "ids", {kind: ids for kind, ids in self.ids.items() if ids})

    def ids_of(self, kind: ResourceKind) -> frozenset[DeviceId]:
        return self.ids.get(kind, NO_IDS)

    @property
    def bound_ids(self) -> frozenset[DeviceId]:
        """The IDs of the resource that binds its GPUs."""
        return next((ids for kind, ids in self.ids.items() if kind.binds_gpu), NO_IDS)

    @property
    def unit_ids(self) -> frozenset[DeviceId]:
        """Units of GPUs under a name such as NVIDIA's."""
        for kind, ids in self.ids.items():
            if kind.is_part:
                return ids
        return NO_IDS

    @property
    def memory_kind(self) -> ResourceKind:
        """The resource that its memory counts."""
        return next((kind for kind in self.ids if kind.measure is Measure.UNITS), ResourceKind.VMEMORY)

    @property
    def parts(self) -> dict[GpuUuid, Fraction]:
        """How much of each GPU its replicas are; empty for others."""
        return parts_of(self.unit_ids)

    @property
    def sharing(self) -> Sharing | None:
        """What limits its replicas; None for others."""
        if self.is_whole or not self.unit_ids:
            return None
        return replica_layout(min(self.unit_ids)).sharing

    @property
    def started_by(self) -> str:
        """The program that started the container before this agent came: it, or nobody, keeps the limits. Empty for this
        agent's own."""
        return former_program(next(iter(self.bound_ids), ""))

    @property
    def is_limited(self) -> bool:
        """The node's isolation keeps it to its size: a share, or replicas that are shares."""
        return not self.is_whole and self.sharing in (None, Sharing.SHARES) and not self.started_by

    @property
    def cores(self) -> int:
        if self.unit_ids:
            return int(sum(self.parts.values()) * CORES_PER_GPU)
        return self.charge.cores + len(self.ids_of(ResourceKind.VCORE))

    @property
    def memory_blocks(self) -> int:
        return self.charge.blocks + len(self.ids_of(ResourceKind.VMEMORY))

    @property
    def allocated_size(self) -> ShareSize:
        """The size by the kubelet's device IDs, or by the claim."""
        return ShareSize(cores=self.cores, memory=self.charge.blocks + len(self.ids_of(self.memory_kind)))

    @property
    def size(self) -> ShareSize:
        """The size that the isolation has to enforce."""
        return self.resized_to or self.allocated_size


class ResizedShare(Struct, frozen=True, kw_only=True):
    """A share with another size, or charge, than the kubelet allocated (`allocated`).

    `target` is the wanted size. `charged` is what its GPU is charged: at least `target`, plus what its processes may still
    use above it. `kind` is the resource that its memory counts. `instance` is the runtime's ID of the container that ran
    when `target` was first enforced, empty where that has not happened.
    """

    key: ContainerKey
    gpu: GpuUuid
    kind: ResourceKind
    allocated: ShareSize
    target: ShareSize
    charged: ShareSize
    instance: str = ""

    @property
    def is_over(self) -> bool:
        """It is what the kubelet allocated, also in the ledger."""
        return self.allocated == self.target == self.charged


class ContainerMount(Struct, frozen=True, kw_only=True):
    host_path: str
    container_path: str
    read_only: bool = True


class DeviceNode(Struct, frozen=True, kw_only=True):
    """`numbers` are major and minor of a character device that the host may not have: the nodes of a new MIG instance are
    not there before somebody makes them. The major is 0 where they are not known."""

    host_path: str
    container_path: str
    permissions: str = "rwm"
    numbers: tuple[int, int] = (0, 0)

    @property
    def cdi_numbers(self) -> dict[str, str | int]:
        """So that a runtime needs no node on the host; empty where it has to look there."""
        major, minor = self.numbers
        return {"type": "c", "major": major, "minor": minor} if major else {}


class ContainerEdits(Struct, frozen=True, kw_only=True):
    """The changes of an Allocate answer in a container. Isolations and device-list strategies return them; they are
    merged."""

    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[ContainerMount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_devices: tuple[str, ...] = ()

    @property
    def gpu_names(self) -> frozenset[str]:
        """What it names GPUs by."""
        mounts, nodes = (one.container_path for one in self.mounts), (one.host_path for one in self.devices)
        return gpu_names(dict(self.env).get(ENV_VISIBLE_DEVICES, ""), mounts, nodes)


def gpu_names(visible: str, mounts: Iterable[str], nodes: Iterable[str]) -> frozenset[str]:
    """What an answer names GPUs by, in NVIDIA's variable, in paths of mounts in the container and in device nodes: UUIDs,
    and the driver's numbers, which another GPU may have after a boot."""
    texts = (*visible.split(","), *(path.removeprefix(f"{VOLUME_MOUNT_ROOT}/") for path in mounts), *nodes)
    return frozenset(text for text in texts if _GPU_NAME.fullmatch(text))


def merged(*parts: ContainerEdits) -> ContainerEdits:
    """All of them together; the last value of a variable or annotation counts."""
    return ContainerEdits(
        env=tuple(sorted({name: value for part in parts for name, value in part.env}.items())),
        mounts=tuple(dict.fromkeys([mount for part in parts for mount in part.mounts])),
        devices=tuple(dict.fromkeys([device for part in parts for device in part.devices])),
        annotations=tuple(sorted({name: value for part in parts for name, value in part.annotations}.items())),
        cdi_devices=tuple(dict.fromkeys([device for part in parts for device in part.cdi_devices])),
    )


# --- what is charged to a GPU ---


def add_charges(sums: dict[K, Charge], charges: Mapping[K, Charge], times: int = 1) -> None:
    """Adds `charges` to `sums`, which never has an empty entry."""
    for key, charge in charges.items():
        charged = sums.get(key, NO_CHARGE).plus(charge, times)
        # Empty sums are removed, so that two ledgers with the same allocations are equal.
        if charged == NO_CHARGE:
            sums.pop(key, None)
        else:
            sums[key] = charged


def charges_of(allocations: Iterable[Allocation]) -> dict[GpuUuid, Charge]:
    """The charges of each GPU for all containers of one pod, or all results of one claim.

    A device ID counts once: the kubelet hands an init container's IDs on to the containers after it. Memory blocks are
    charged to the GPU of the container's cores, whatever GPU their IDs name; whole GPUs come with all of theirs. An init
    container is no share, because it ends before the others start.
    """
    found: defaultdict[Measure, set[DeviceId]] = defaultdict(set)
    blocks: set[tuple[GpuUuid, DeviceId]] = set()
    wholes: set[GpuUuid] = set()
    shares: list[GpuUuid] = []
    of_claims: dict[GpuUuid, Charge] = {}
    for one in allocations:
        if one.claim is not None:
            add_charges(of_claims, dict.fromkeys(one.gpus, one.charge))
            continue
        for kind, ids in one.ids.items():
            if kind.binds_gpu:
                found[kind.measure] |= ids
            # The blocks of whole GPUs are IDs that the kubelet counts; their memory is nobody else's.
            elif not one.is_whole:
                # A share is on one GPU. The pair, because containers on two GPUs of one pod may have the same block ID.
                blocks.update([(gpu, device) for gpu in one.gpus[:1] for device in ids])
        if one.is_whole:
            wholes.update(one.gpus)
            continue
        if one.kind is ContainerKind.INIT:
            continue
        # Replicas by time slicing are limited by nothing, so they take no place among the sharing containers.
        if not one.unit_ids:
            shares += one.gpus[:1]
        elif one.sharing in (Sharing.MPS, Sharing.SHARES):
            shares += one.gpus
    of_cores, of_blocks = Counter(named_gpus(found[Measure.CORES])), Counter([gpu for gpu, _ in blocks])
    of_units = Counter(named_gpus(units)) if (units := found[Measure.UNITS]) else Counter[GpuUuid]()
    of_shares, parts = Counter(shares), parts_of(found[Measure.PART])
    return of_claims or {
        gpu: Charge(
            cores=of_cores[gpu],
            blocks=of_blocks[gpu],
            units=of_units[gpu],
            wholes=int(gpu in wholes),
            shares=of_shares[gpu],
            part=parts.get(gpu, Fraction(0)),
        )
        for gpu in sorted({*of_cores, *of_units, *of_blocks, *wholes, *of_shares, *parts})
    }
