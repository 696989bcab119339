"""The labels of NVIDIA's GPU Feature Discovery, for clusters whose pods select by them and that do not run it. Pure.

Source: k8s-device-plugin v0.20.0, internal/lm (resource.go, nvml.go, machine-type.go, timestamp.go): names, values, and
what a text becomes. Not written: labels of MIG instances, `mig.capable`, vGPU and IMEX, which this agent does not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpushare_agent.model.gpus import Gpu, GpuInventory

PREFIX = "nvidia.com/"
TIMESTAMP_LABEL = f"{PREFIX}gfd.timestamp"
_GPU = f"{PREFIX}gpu"
_CUDA = f"{PREFIX}cuda"
_MAX_CHARS = 63
_NOT_KEPT = re.compile(r"[^A-Za-z0-9\-_. ]")
_FAMILIES = {
    1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper", 10: "blackwell", 12: "blackwell",
    13: "rubin",
}  # fmt: skip
_MODES = {0x030000: "graphics", 0x030200: "compute"}
"""By PCI class: VGA controller, 3D controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many containers share a GPU of nvidia.com/gpu: `strategy` is `time-slicing`, `mps` or `shares`."""

    count: int = 1
    strategy: str = "time-slicing"
    is_renamed: bool = False


def feature_labels(
    inventory: GpuInventory,
    *,
    replicas: Callable[[Gpu], Replicas],
    mig_strategy: str,
    machine: str,
    pci_classes: Sequence[int],
    written_at: int,
) -> dict[str, str]:
    """Of the most numerous model, where there are several. None while the driver names no GPU. `machine` is what DMI has,
    `pci_classes` are those of the GPUs that have one, `written_at` is in seconds since the epoch."""
    named = [gpu for gpu in inventory.gpus if gpu.name and gpu.memory_mib > 0]
    if not named:
        return {}
    counts = Counter(gpu.name for gpu in named)
    gpu = min(named, key=lambda gpu: (-counts[gpu.name], gpu.name, gpu.index))
    shared = replicas(gpu)
    is_shared = shared.count > 1
    suffix = "-SHARED" if is_shared and not shared.is_renamed else ""
    labels = {
        f"{_GPU}.product": sanitised(gpu.name)[: _MAX_CHARS - len(suffix)] + suffix,
        f"{_GPU}.count": str(counts[gpu.name]),
        f"{_GPU}.replicas": str(shared.count),
        f"{_GPU}.sharing-strategy": shared.strategy if is_shared else "none",
        f"{_GPU}.memory": str(gpu.memory_mib),
        f"{_GPU}.machine": sanitised(machine.strip() or "unknown"),
        f"{_GPU}.mode": _MODES.get(pci_classes[0], "unknown") if len(set(pci_classes)) == 1 else "unknown",
        f"{PREFIX}mps.capable": str(is_shared and shared.strategy == "mps").lower(),
        TIMESTAMP_LABEL: str(written_at),
        **_architecture(gpu),
        **_versions(inventory),
    }
    return labels if mig_strategy == "none" else {**labels, f"{PREFIX}mig.strategy": mig_strategy}


def sanitised(text: str) -> str:
    """Letters, digits, `-_.` and single dashes for spaces, as GPU Feature Discovery has it; cut to what a label holds."""
    return "-".join(_NOT_KEPT.sub("", text).split())[:_MAX_CHARS].strip("-_.")


def _architecture(gpu: Gpu) -> Mapping[str, str]:
    if gpu.compute_capability is None or gpu.compute_capability[0] == 0:
        return {}
    major, minor = gpu.compute_capability
    family = _FAMILIES.get(major, "undefined")
    if major == 7:
        family = "volta" if minor < 5 else "turing"
    elif major == 8:
        family = "ampere" if minor < 9 else "ada-lovelace"
    return {f"{_GPU}.family": family, f"{_GPU}.compute.major": str(major), f"{_GPU}.compute.minor": str(minor)}


def _versions(inventory: GpuInventory) -> Mapping[str, str]:
    """With the older names. A driver version is X.Y or X.Y.Z."""
    labels: dict[str, str] = {}
    driver = inventory.driver_version.split(".")
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
