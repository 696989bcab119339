"""Units of GPUs under NVIDIA's resource names: which GPU serves which resource, as how many units, on what terms. Pure.

A unit is a whole GPU (or MIG instance), or one of its replicas. The terms of a unit are in its device ID, `<GPU UUID>::2/4s`
inside the agent: replica 2 of 4, limited by the node's isolation. A container keeps the terms under which it was admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import (
    CORES_PER_GPU,
    NVIDIA_GPU_RESOURCE,
    NVIDIA_MIG_PREFIX,
    SHARED_SUFFIX,
    DeviceId,
    GpuUuid,
    gpu_of,
    unit_id,
    unit_suffix,
)

_LETTERS = {Sharing.TIME_SLICING: "", Sharing.MPS: "m", Sharing.SHARES: "s"}
_BY_LETTER = {letter: sharing for sharing, letter in _LETTERS.items()}


class UnitTerms(NamedTuple):
    """One of so many units of a GPU, and what limits its containers to their part."""

    of: int
    sharing: Sharing = Sharing.TIME_SLICING

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    @property
    def part(self) -> Fraction:
        """Of the GPU's memory and compute."""
        return Fraction(1, self.of)


class ServedUnits(NamedTuple):
    """What a GPU serves: of which resource, on which terms."""

    resource: str
    terms: UnitTerms

    def ids(self, gpu: GpuUuid) -> list[DeviceId]:
        suffix = f"{self.terms.of}{_LETTERS[self.terms.sharing]}"
        return [unit_id(gpu, number, suffix) for number in range(self.terms.of)]


class UnitLayout(Struct, frozen=True, kw_only=True):
    """The rule of a kind of resource whose devices are parts of GPUs: `served`. What limits the parts is `sharing`.
    `refuses_several` is of parts in one container; `is_packed` fills the fullest GPU first."""

    sharing: Sharing = Sharing.TIME_SLICING
    refuses_several: bool = False
    is_packed: bool = False

    def served(self, gpu: Gpu) -> ServedUnits | None:
        """None where the GPU serves none of these resources."""
        return None

    def unlike(self, gpus: Iterable[Gpu]) -> str:
        """Why the node gives no unit at all, with the cure; empty where it does."""
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
        if count == 1 or (gpu.mig is not None and self.sharing is not Sharing.TIME_SLICING):  # no isolation limits one
            return ServedUnits(name, UnitTerms(1))
        is_renamed = self.is_renamed and not name.endswith(SHARED_SUFFIX)
        return ServedUnits(name + SHARED_SUFFIX if is_renamed else name, UnitTerms(count, self.sharing))

    def unlike(self, gpus: Iterable[Gpu]) -> str:
        """With MIG strategy single, why no unit is given, with the cure; empty where all GPUs that serve these resources are
        alike. A pod could not tell what it gets: NVIDIA's plugin does not start there (internal/rm/device_map.go of
        v0.20.0)."""
        if self.mig_strategy != "single":
            return ""
        kinds: dict[str, list[str]] = {}
        for gpu in gpus:
            if gpu.is_selected(self.gpus) and not (gpu.mig is not None and gpu.mig.is_gone):
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
        """Of the instances of a profile with strategy mixed, `1g.10gb+me` as nvidia.com/mig-1g.10gb.me."""
        named = (name for pattern, name in self.mig_names if fnmatchcase(profile, pattern))
        return next(named, NVIDIA_MIG_PREFIX + profile.replace("+", "."))

    def resources(self, profiles: Collection[str] = ()) -> tuple[str, ...]:
        """All that GPUs may serve, whichever the node has, and instances of these profiles."""
        found: list[str] = []
        of_instances = [self.mig_resource(profile) for profile in sorted(profiles) if self.mig_strategy == "mixed"]
        for name in dict.fromkeys((self.resource, *(name for _, name in self.names), *of_instances)):
            counts = [count for selector, count in self.replicas if selector in (name, "*")][:1]
            of_some = [count for selector, count in self.replicas if selector not in (name, "*")]
            is_plain = not self.is_renamed or name.endswith(SHARED_SUFFIX)
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
    """What a container has of GPUs by units: the part of each, by UUID, and what limits it there, None for whole GPUs."""

    parts: tuple[tuple[GpuUuid, Fraction], ...]
    sharing: Sharing | None


def units_of(devices: Collection[DeviceId]) -> GpuUnits:
    terms = {terms_of(device) for device in devices}
    sharing = next((one.sharing for one in sorted(terms, reverse=True) if not one.is_whole), None)
    return GpuUnits(tuple(sorted(parts_of(devices).items())), sharing)


@lru_cache(maxsize=256)
def _terms(suffix: str) -> UnitTerms:
    digits = suffix.rstrip("ms")
    return UnitTerms(int(digits), _BY_LETTER[suffix[len(digits) :]]) if digits else UnitTerms(1)


def terms_of(device: str) -> UnitTerms:
    """Of a unit's device ID. One whose text does not have them counts as the whole GPU."""
    return _terms(unit_suffix(device))


def parts_of(units: Iterable[DeviceId]) -> dict[GpuUuid, Fraction]:
    """How much of each GPU these units are."""
    parts: dict[GpuUuid, Fraction] = {}
    for (gpu, suffix), count in Counter((gpu_of(device), unit_suffix(device)) for device in units).items():
        parts[gpu] = parts.get(gpu, Fraction(0)) + count * _terms(suffix).part
    return parts
