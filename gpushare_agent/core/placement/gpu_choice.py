"""The GPUs that a pod accepts, by HAMi's and vgpu-manager's annotations, for the agent and the extender alike. Pure.

Each annotation is a list with commas. One names a GPU where it is part of the GPU's model or UUID, in upper or lower case.
Without anything named an annotation says nothing. Source: CheckType and CheckUUID in pkg/device/devices.go of HAMi 4707fb0,
CheckDeviceType and CheckDeviceUuid in pkg/util/util.go of vgpu-manager 3d7f66d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpushare_agent.core.model.names import GPU_CHOICE_ANNOTATIONS, MAX_ANNOTATION_CHARS
from gpushare_agent.core.placement.gpu_account import GpuAccount


class Rule(NamedTuple):
    """Leaves out what `named` names; with `is_wanted`, what it does not name. The list has models, or UUIDs."""

    named: tuple[str, ...]
    of_model: bool
    is_wanted: bool

    def accepts(self, gpu: GpuAccount) -> bool:
        text = (f"NVIDIA-{gpu.name}" if self.of_model else gpu.uuid).upper()
        return any(one in text for one in self.named) is self.is_wanted


GpuChoice = tuple[Rule, ...]


def choice_of(annotations: Mapping[str, str]) -> GpuChoice:
    """The pod's rules; each must accept a GPU. Empty for nearly every pod."""
    found = []
    for name in GPU_CHOICE_ANNOTATIONS:
        if value := annotations.get(name):
            is_wanted = name.startswith(("nvidia.com/use-", "nvidia.com/include-"))
            named = tuple(text for one in value.upper().split(",") if (text := one.strip()))
            # The rest of a list that was too long is not known: no GPU is safe.
            if len(value) >= MAX_ANNOTATION_CHARS:
                named, is_wanted = ("",), False
            if named:
                found.append(Rule(named, name.endswith("type"), is_wanted))
    return tuple(found)


def accepting(choice: GpuChoice, gpus: Sequence[GpuAccount]) -> Sequence[GpuAccount]:
    """The accounts, those that the pod does not accept marked so."""
    if not choice:
        return gpus
    return [gpu if all(rule.accepts(gpu) for rule in choice) else replace(gpu, is_accepted=False) for gpu in gpus]
