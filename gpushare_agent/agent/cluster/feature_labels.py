"""The labels of NVIDIA's GPU Feature Discovery, for clusters whose pods select by them and that do not run it. Pure.

Source: k8s-device-plugin v0.20.0, internal/lm (resource.go, nvml.go, mig-strategy.go, machine-type.go, timestamp.go,
imex.go, vgpu.go) and internal/vgpu: names, values, and what a text becomes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.mig import MigPlace
from gpushare_agent.core.model.names import NVIDIA_MIG_PREFIX, SHARED_SUFFIX
from gpushare_agent.core.model.resources import ServedUnits

PREFIX = "nvidia.com/"
TIMESTAMP_LABEL = f"{PREFIX}gfd.timestamp"
_GPU = f"{PREFIX}gpu"
_CUDA = f"{PREFIX}cuda"
_MAX_CHARS = 63
_REMOVED_CHARACTERS = re.compile(r"[^A-Za-z0-9\-_. ]")
_FAMILIES = {
    1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper", 10: "blackwell", 12: "blackwell",
    13: "rubin",
}  # fmt: skip
_INVALID = {f"{_GPU}.replicas": "0", f"{_GPU}.sharing-strategy": "", f"{_GPU}.memory": "0"}
_ATTRIBUTES = {
    "memory": "memory_mib", "multiprocessors": "multiprocessors", "slices.gi": "gi_slices", "slices.ci": "ci_slices",
    "engines.copy": "copy_engines", "engines.decoder": "decoders", "engines.encoder": "encoders",
    "engines.jpeg": "jpeg_engines", "engines.ofa": "ofa_engines",
}  # fmt: skip
"""Suffix of the label, and field of MigAttributes."""
_MODES = {0x030000: "graphics", 0x030200: "compute"}
"""The mode by PCI class: VGA controller, 3D controller."""
_CONFIGURATION_BYTES = 256


def feature_labels(
    inventory: GpuInventory,
    *,
    served: Callable[[Gpu], ServedUnits | None],
    mig_strategy: str,
    machine: str,
    pci_classes: Sequence[int],
    pci_configurations: Sequence[bytes],
    written_at: int,
) -> dict[str, str]:
    """The labels of the most numerous model, and of GPUs in MIG mode only where there are no others. None while
    the driver names no GPU. `served` has what a GPU or MIG instance serves, `machine` is what DMI has, `pci_classes` and
    `pci_configurations` are those of the GPUs that have one, `written_at` is in seconds since the epoch."""
    # GPUs in MIG mode and the others, without instances: these labels are about physical GPUs.
    gpus = sorted((gpu for gpu in inventory.known if gpu.mig is None and gpu.name), key=lambda gpu: gpu.index)
    if not gpus:
        return {}
    counts = Counter(gpu.name for gpu in gpus)
    whole = [gpu for gpu in gpus if not gpu.mig_mode]
    # One product is all that a label holds; name and index break ties, so that restarts give the same labels.
    gpu = min(whole or gpus, key=lambda gpu: (-counts[gpu.name], gpu.name, gpu.index))
    # A GPU in MIG mode is offered as its instances, whose labels follow below.
    units = served(gpu) if whole else None
    is_mps = units is not None and units.replicas.of > 1 and units.replicas.sharing is Sharing.MPS
    return {
        **_resource(_GPU, [gpu.name], counts[gpu.name], units),
        # Nothing is served under the whole GPU's name, as NVIDIA's program has it.
        **({} if whole else {f"{_GPU}.replicas": "0"}),
        **({f"{_GPU}.memory": str(gpu.memory_mib)} if gpu.memory_mib else {}),
        f"{_GPU}.machine": sanitised(machine.strip() or "unknown"),
        # NVIDIA's program says unknown where the GPUs of a node differ.
        f"{_GPU}.mode": _MODES.get(pci_classes[0], "unknown") if len(set(pci_classes)) == 1 else "unknown",
        f"{PREFIX}mps.capable": str(is_mps).lower(),
        f"{PREFIX}mig.capable": str(any(gpu.mig_mode is not None for gpu in gpus)).lower(),
        TIMESTAMP_LABEL: str(written_at),
        **_architecture(gpu),
        **_versions(inventory),
        **_clique(gpus),
        **_vgpu(pci_configurations),
        **_of_strategy(mig_strategy, inventory, gpus, served),
    }


def _resource(name: str, parts: Sequence[str], count: int, units: ServedUnits | None) -> dict[str, str]:
    """`parts` make the product's name. The suffix -SHARED stays where the name is cut."""
    shared = units if units is not None and units.replicas.of > 1 else None
    # Renamed replicas have the word in the resource's name already.
    suffix = "-SHARED" if shared is not None and not shared.resource.endswith(SHARED_SUFFIX) else ""
    model, *others = (sanitised(part) for part in parts)
    end = "".join(f"-{part}" for part in others) + suffix
    return {
        f"{name}.product": model[: _MAX_CHARS - len(end)] + end,
        f"{name}.count": str(count),
        f"{name}.replicas": str(shared.replicas.of if shared is not None else 1),
        f"{name}.sharing-strategy": shared.replicas.sharing.value if shared is not None else "none",
    }


def _of_strategy(
    strategy: str, inventory: GpuInventory, gpus: Sequence[Gpu], served: Callable[[Gpu], ServedUnits | None]
) -> dict[str, str]:
    """The labels by MIG strategy. With `single`, an instance is a nvidia.com/gpu: its labels are those of the GPUs,
    where all are partitioned into instances of one profile; MIG-INVALID where only some are. With `mixed` each profile
    has labels of its own."""
    if strategy == "none":
        return {}
    labels = {f"{PREFIX}mig.strategy": strategy}
    by_profile: dict[str, list[tuple[Gpu, MigPlace]]] = {}
    for gpu in inventory.gpus:
        # An instance that was destroyed stays listed while a pod has it.
        if gpu.mig is not None and not gpu.is_gone:
            by_profile.setdefault(gpu.mig.profile, []).append((gpu, gpu.mig))
    models = {gpu.uuid: gpu.name for gpu in gpus}
    partitioned = [gpu for gpu in gpus if gpu.mig_mode]
    if strategy == "single" and partitioned:
        parents = {place.parent for instances in by_profile.values() for _, place in instances}
        # With `single` every nvidia.com/gpu is an instance of one kind. A mixture has no product that would be true.
        if len(by_profile) != 1 or any(gpu.uuid not in parents for gpu in gpus):
            return labels | _resource(_GPU, [partitioned[0].name, "MIG", "INVALID"], 0, None) | _INVALID
    for profile, instances in sorted(by_profile.items()):
        gpu, place = instances[0]
        # 1g.10gb+me: a plus is not allowed in a label's or a resource's name.
        known_as = profile.replace("+", ".")
        name = _GPU if strategy == "single" else NVIDIA_MIG_PREFIX + known_as
        labels |= _resource(name, [models.get(place.parent, ""), "MIG", known_as], len(instances), served(gpu))
        labels |= {f"{name}.{suffix}": str(value) for suffix, value in _attributes(place)}
    return labels


def _attributes(place: MigPlace) -> Iterator[tuple[str, int]]:
    if place.attributes is not None:
        yield from ((suffix, getattr(place.attributes, field)) for suffix, field in _ATTRIBUTES.items())


def sanitised(text: str) -> str:
    """Letters, digits, `-_.` and single dashes for spaces, as GPU Feature Discovery has it; cut to what a label holds."""
    return "-".join(_REMOVED_CHARACTERS.sub("", text).split())[:_MAX_CHARS].strip("-_.")


def _architecture(gpu: Gpu) -> Mapping[str, str]:
    if gpu.compute_capability is None or gpu.compute_capability[0] == 0:
        return {}
    major, minor = gpu.compute_capability
    family = _FAMILIES.get(major, "undefined")
    if major == 7:
        # Compute capability 7.5 is Turing, 8.9 Ada Lovelace: the major number has two families here.
        family = "volta" if minor < 5 else "turing"
    elif major == 8:
        family = "ampere" if minor < 9 else "ada-lovelace"
    return {f"{_GPU}.family": family, f"{_GPU}.compute.major": str(major), f"{_GPU}.compute.minor": str(minor)}


def _versions(inventory: GpuInventory) -> Mapping[str, str]:
    """The driver's and CUDA's versions, with the older names. A driver version is X.Y or X.Y.Z."""
    labels: dict[str, str] = {}
    driver = inventory.driver_version.split(".")
    # Anything else would give labels that no selector expects.
    if len(driver) in (2, 3) and all(part.isascii() and part.isdigit() for part in driver):
        major, minor, revision = (*driver, "")[:3]
        for base, last in ((f"{_CUDA}.driver", "rev"), (f"{_CUDA}.driver-version", "revision")):
            labels |= {f"{base}.major": major, f"{base}.minor": minor, f"{base}.{last}": revision}
        labels[f"{_CUDA}.driver-version.full"] = inventory.driver_version
    cuda = inventory.cuda_version.split(".")
    if len(cuda) == 2 and all(part.isascii() and part.isdigit() for part in cuda):
        for base in (f"{_CUDA}.runtime", f"{_CUDA}.runtime-version"):
            labels |= {f"{base}.major": cuda[0], f"{base}.minor": cuda[1]}
        labels[f"{_CUDA}.runtime-version.full"] = inventory.cuda_version
    return labels


def _clique(gpus: Sequence[Gpu]) -> Mapping[str, str]:
    """The clique of the GPUs on an NVLink fabric; none where they differ."""
    fabrics = {gpu.fabric for gpu in gpus if gpu.fabric}
    # Pods select nodes of one NVLink domain by it: two cliques on a node would promise a connection that is not there.
    return {f"{_GPU}.clique": fabrics.pop()} if len(fabrics) == 1 else {}


def _vgpu(configurations: Sequence[bytes]) -> Mapping[str, str]:
    """Whether the GPUs are vGPUs, and of these the hypervisor's driver; none where a configuration is cut off, as without
    CAP_SYS_ADMIN."""
    # Without the right the kernel gives 64 bytes, where the capability list has not begun.
    if any(len(configuration) < _CONFIGURATION_BYTES for configuration in configurations):
        return {}
    capabilities = [found for one in configurations if (found := _vendor_capability(one))[3:5] == b"VF"]
    labels = {f"{PREFIX}vgpu.present": str(bool(capabilities)).lower()}
    for capability in capabilities:
        version, branch = _host_driver(capability)
        if version:
            labels |= {f"{PREFIX}vgpu.host-driver-version": version, f"{PREFIX}vgpu.host-driver-branch": branch}
    return labels


def _vendor_capability(configuration: bytes) -> bytes:
    """The vendor-specific capability (PCI Local Bus Specification 3.0, section 6.7): ID, place of the next, length, data.
    Empty where there is none."""
    # The status register's bit 4 says whether there is a list at all; 0x34 is where it begins.
    at = configuration[0x34] if configuration[0x06] & 0x10 else 0
    for _ in range(_CONFIGURATION_BYTES):  # the list may be a circle
        if at == 0 or at + 2 >= _CONFIGURATION_BYTES or configuration[at] == 0xFF:
            return b""
        if configuration[at] == 0x09:
            return configuration[at : at + configuration[at + 2]]
        at = configuration[at + 1]
    return b""


def _host_driver(capability: bytes) -> tuple[str, str]:
    """A vGPU's version and branch of the hypervisor's driver, ten bytes each, in the record 0 of those that follow the
    signature. A record has its ID, its length and its data."""
    at = 5
    while at + 1 < len(capability) and capability[at] != 0 and capability[at + 1] > 0:
        at += capability[at + 1]
    record = capability[at + 2 : at + 22]
    if len(record) < 20 or capability[at] != 0:
        return "", ""
    version, branch = (sanitised(part.decode("ascii", "ignore")) for part in (record[:10], record[10:]))
    return version, branch
