"""The node's GPUs and MIG instances as devices of a ResourceSlice. Pure.

Source: resource.k8s.io/v1; docs/explanation/dra.md has what users write. Names of attributes and capacities are those
of NVIDIA's and HAMi's drivers where they have one. Quantities are in the form in which the API server returns them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from gpushare_agent.core.kube.claims import Attribute, Device, DeviceCapacity, RequestPolicy, ValidRange
from gpushare_agent.core.kube.objects import binary_quantity
from gpushare_agent.core.model.allocations import NO_CHARGE, Charge
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, LinkKind, Topology
from gpushare_agent.core.model.mig import MigPlacement
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.core.model.taints import Taint
from gpushare_agent.core.placement.topology import components

UNHEALTHY_TAINT = "gpushare-agent/unhealthy"
CORDONED_TAINT = "gpushare-agent/cordoned"
MAX_TEXT_CHARS = 64
"""The longest string attribute."""
NVIDIA_DRIVER = "gpu.nvidia.com"
NVIDIA_MEMORY = f"{NVIDIA_DRIVER}/memory"
"""The name of NVIDIA's DRA driver: the domain of its attributes, and of its configuration in claims."""
_NVIDIA_ATTRIBUTES = (
    "type",
    "uuid",
    "productName",
    "architecture",
    "driverVersion",
    "cudaDriverVersion",
    "cudaComputeCapability",
    "index",
    "parentUUID",
    "profile",
)
"""Our attributes that have the same name and value there; `index` only in its examples."""
_NOT_OF_INSTANCES = {
    *("architecture", "cudaComputeCapability", "cudaDriverVersion", "driverVersion", "index", "minor", "numaNode"),
    *("productName", f"{NVIDIA_DRIVER}/index"),
}
"""By NVIDIA's names an instance has these under one name or none: the API allows 32 attributes and capacities."""
ENGINES = {
    "copyEngines": "copy_engines",
    "decoders": "decoders",
    "encoders": "encoders",
    "jpegEngines": "jpeg_engines",
    "ofaEngines": "ofa_engines",
}
"""NVIDIA's names of the fields of MigAttributes."""
_PLACEMENT_NAME = re.compile(r"gpu-.+-mig-[a-z0-9]{0,10}-[0-9]+-[0-9]+")
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A DNS label, as the API server has it."""
_ARCHITECTURES = {7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}
_ARCHITECTURES_BY_MINOR = {(7, 5): "Turing", (8, 9): "Ada Lovelace"}
_NOT_IN_A_VALUE = re.compile(r"[^A-Za-z0-9._-]+")


class DevicePolicy(Struct, frozen=True, kw_only=True):
    """The settings that concern the slice. `isolation` is the node's own, `memory_by` and `compute_by` what limits them
    under it (agent/isolation/kept.py). `shares` is the setting dra.consumable_shares."""

    block_mib: int
    order: str
    taint_effect: str
    isolation: str
    memory_by: str = ""
    compute_by: str = ""
    nvidia_names: bool = False
    shares: str = "memory"


def device_name(uuid: GpuUuid) -> str:
    """The GPU's name for good: an index means another GPU after the driver has counted them again."""
    # The rest is not made small: two UUIDs that differ in that alone would have one name.
    name = uuid.replace("GPU-", "gpu-", 1) if uuid.startswith("GPU-") else uuid.replace("MIG-", "mig-", 1)
    is_plain = uuid.startswith(("GPU-", "MIG-")) and is_device_name(name)
    return name if is_plain else f"gpu-{hashlib.sha256(repr(uuid).encode()).hexdigest()[:32]}"


def placement_device_name(placement: MigPlacement, profile: str) -> str:
    """The name of a place for an instance, whichever instance lies there: `gpu-<UUID of the GPU>-mig-1g10gb-19-6` by the
    profile's name and ID, and the first memory slice."""
    readable = re.sub("[^a-z0-9]", "", profile)[:10]
    return f"{device_name(placement.parent)}-mig-{readable}-{placement.profile}-{placement.start}"


def is_placement_name(name: str) -> bool:
    """The device is a place for an instance, not a GPU or an instance."""
    return _PLACEMENT_NAME.fullmatch(name) is not None


def is_instance_name(name: str) -> bool:
    return name.startswith("mig-") or is_placement_name(name)


def is_device_name(name: str) -> bool:
    return _DEVICE_NAME.fullmatch(name) is not None


def capacity_mib(gpu: Gpu, block_mib: int) -> int:
    """The memory that claims can have: whole blocks, because the default must be a multiple of the step. All of an
    instance's, whose step is 1 MiB: a claim may ask for exactly what a profile has."""
    return gpu.memory_mib // block_mib * block_mib if gpu.mig is None else gpu.memory_mib


def slice_devices(
    gpus: Iterable[Gpu],
    inventory: GpuInventory,
    charges: Mapping[GpuUuid, Charge],
    cordoned: Mapping[GpuUuid, str],
    policy: DevicePolicy,
) -> list[Device]:
    """The devices in the order in which the scheduler is to try them. A GPU without a whole block of memory is left out: the
    driver reports nothing but its UUID."""
    groups = link_groups(inventory.topology)
    # The scheduler takes the first device that fits: the order of the slice is the placement.
    sign = -1 if policy.order == "binpack" else 1

    def key(gpu: Gpu) -> tuple[int, int, int]:
        # Memory too, because a share may take that alone (`cores: "0"`).
        charge = charges.get(gpu.uuid, NO_CHARGE)
        return sign * charge.cores, sign * charge.blocks, gpu.index

    return [
        Device(
            name=device_name(gpu.uuid),
            allow_multiple_allocations=True,
            attributes=attributes_of(gpu, inventory, groups, policy),
            capacity=capacity_of(gpu, policy),
            taints=taints_of(gpu, cordoned, policy),
        )
        for gpu in sorted(gpus, key=key)
        if gpu.memory_mib >= policy.block_mib
    ]


def capacity_of(gpu: Gpu, policy: DevicePolicy) -> dict[str, DeviceCapacity]:
    """A claim that names none takes the whole GPU. By NVIDIA's names it takes all of the memory and no cores, which is the
    whole GPU too: nobody else can have memory there. By unlimited and numbered shares it takes no memory either."""

    def counted(value: str, default: str, least: str, step: str = "1") -> DeviceCapacity:
        return DeviceCapacity(value, RequestPolicy(default, ValidRange(min=least, max=value, step=step)))

    memory, block, cores = quantity(capacity_mib(gpu, policy.block_mib)), quantity(policy.block_mib), str(CORES_PER_GPU)
    step = block if gpu.mig is None else quantity(1)
    found = {"cores": counted(cores, cores, "0"), "memory": counted(memory, memory, block, step)}
    if policy.nvidia_names:
        found = {
            "cores": counted(cores, "0", "0"),
            # For selectors; a claim that asks for it by this name is refused when it is prepared.
            NVIDIA_MEMORY: counted(memory, "0", "0", step),
            "memory": counted(memory, *((memory, block) if policy.shares == "memory" else ("0", "0")), step),
        }
        if policy.shares.isdigit():
            found["shares"] = counted(policy.shares, "1", "1")
    if gpu.mig is not None and gpu.mig.attributes is not None:
        # For selectors: a request of 0 alone is valid, or the first share would take them all. Also those that it has none
        # of: an expression that names what is not there is an error that stops the scheduler.
        for_selectors = RequestPolicy("0", valid_values=["0"])
        prefix = f"{NVIDIA_DRIVER}/" if policy.nvidia_names else ""
        for name, field in {"multiprocessors": "multiprocessors", **ENGINES}.items():
            found[prefix + name] = DeviceCapacity(str(getattr(gpu.mig.attributes, field)), for_selectors)
    return dict(sorted(found.items()))


def attributes_of(
    gpu: Gpu, inventory: GpuInventory, groups: Mapping[str, Mapping[int, str]], policy: DevicePolicy
) -> dict[str, Attribute]:
    capability, mig = gpu.compute_capability, gpu.mig
    texts = {
        "type": "gpu" if mig is None else "mig",
        "uuid": gpu.uuid,
        **({"parentUUID": mig.parent, "profile": mig.profile} if mig is not None else {}),
        "productName": gpu.name,
        "architecture": _architecture(capability),
        # NVML writes eight digits of domain, Kubernetes' attribute has four, in small letters.
        "resource.kubernetes.io/pciBusID": gpu.bus_id.lower()[-12:],
        "resource.kubernetes.io/pcieRoot": gpu.pcie_root,
        **({f"{NVIDIA_DRIVER}/brand": gpu.brand} if policy.nvidia_names else {}),
        "isolation": policy.isolation,
        "memoryLimitedBy": policy.memory_by,
        "computeLimitedBy": policy.compute_by,
        **{name: group.get(gpu.index, "") for name, group in groups.items() if mig is None},
    }
    versions = {
        "driverVersion": _version(inventory.driver_version),
        "cudaDriverVersion": _version(inventory.cuda_version),
        "cudaComputeCapability": f"{capability[0]}.{capability[1]}.0" if capability is not None else "",
    }
    numbers = {
        "index": gpu.number,
        "minor": gpu.minor,
        "numaNode": gpu.numa_node,
        "resource.kubernetes.io/numaNode": gpu.numa_node,
        **({"profileId": mig.profile_id, "start": mig.start} if mig is not None else {}),
    }
    found = {name: Attribute(text=text[:MAX_TEXT_CHARS]) for name, text in texts.items() if text}
    found |= {name: Attribute(version=text) for name, text in versions.items() if text}
    # -1 stands for what the driver did not report: an attribute that is left out matches no expression.
    found |= {name: Attribute(number=number) for name, number in numbers.items() if number is not None and number >= 0}
    if policy.nvidia_names:
        found |= {f"{NVIDIA_DRIVER}/{name}": found[name] for name in _NVIDIA_ATTRIBUTES if name in found}
    if policy.nvidia_names and mig is not None:
        found = {name: value for name, value in found.items() if name not in _NOT_OF_INSTANCES}
    return dict(sorted(found.items()))


def taints_of(gpu: Gpu, cordoned: Mapping[GpuUuid, str], policy: DevicePolicy) -> Sequence[Taint]:
    # Before the health: a cordoned GPU counts as unhealthy too, and a claim may tolerate one taint and not the other.
    if gpu.uuid in cordoned:
        return [Taint(CORDONED_TAINT, policy.taint_effect, taint_value(cordoned[gpu.uuid]))]
    if not gpu.is_healthy:
        return [Taint(UNHEALTHY_TAINT, policy.taint_effect, taint_value(gpu.unhealthy_reason))]
    return ()


def taint_value(reason: str) -> str:
    """A label's value: at most 63 characters of a few kinds, letters or digits at both ends."""
    return _NOT_IN_A_VALUE.sub("-", reason)[:63].strip("-._") or "unknown"


def link_groups(topology: Topology) -> dict[str, dict[int, str]]:
    """The group of each GPU, by attribute and by index: GPUs joined by NVLink (directly or through others), and by PCIe
    switches alone. A GPU that is alone has no such attribute, so matchAttribute does not take it. The driver does not report
    the PCIe path of two GPUs with an NVLink, so they have a common PCIe group only through a third GPU."""
    return {
        "nvlinkGroup": _connected(topology, "nvlink", {LinkKind.NVLINK}),
        "pcieSwitchGroup": _connected(topology, "pcie", {LinkKind.PIX, LinkKind.PXB}),
    }


def _connected(topology: Topology, name: str, kinds: Collection[LinkKind]) -> dict[int, str]:
    groups = components(range(len(topology.links)), lambda a, b: topology.links[a][b].kind in kinds)
    return {index: f"{name}-{group[0]}" for group in groups if len(group) > 1 for index in group}


def _architecture(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return ""
    return _ARCHITECTURES_BY_MINOR.get(capability, _ARCHITECTURES.get(capability[0], ""))


def _version(text: str) -> str:
    """A semantic version: three numbers without leading zeros."""
    numbers = re.findall(r"\d{1,6}", text)[:3]
    return ".".join(str(int(number)) for number in [*numbers, "0", "0"][:3]) if numbers else ""


def quantity(mib: int) -> str:
    return binary_quantity(mib * MIB)
