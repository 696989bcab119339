"""Settings of the resources with NVIDIA's names: whole GPUs, replicas of GPUs, MIG instances; a section of settings/tree.py.

A selector names GPUs as `Gpu.is_selected` reads it: an index, a UUID, or the model's name, a glob pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import MAX_REPLICAS, NVIDIA_GPU_RESOURCE, SHARED_SUFFIX
from gpushare_agent.settings.values import (
    MAX_NVIDIA_RESOURCE_NAME_CHARS,
    OptionalPath,
    ResourceName,
    Section,
    check_resource_name,
    comma_list,
    empty_is_none,
)

_COUNT = re.compile(r"[0-9]{1,5}", re.ASCII)


def _pairs(values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """`LEFT=RIGHT` of each. Raises ValueError where one is none."""
    pairs = []
    for value in values:
        left, equals, right = (part.strip() for part in value.rpartition("="))
        if not equals or not left or not right:
            raise ValueError(f"{value!r} is no pair such as LEFT=RIGHT")
        pairs.append((left, right))
    return tuple(pairs)


def _short_name(value: str) -> str:
    """A resource name of at most 63 characters, as NVIDIA's plugin takes them: also with `.shared`. Raises ValueError."""
    check_resource_name(value)
    if len(value) > MAX_NVIDIA_RESOURCE_NAME_CHARS:
        raise ValueError(
            f"is a resource name of {len(value)} characters; NVIDIA's names have at most {MAX_NVIDIA_RESOURCE_NAME_CHARS}"
        )
    return value


NvidiaName = Annotated[ResourceName, AfterValidator(_short_name)]
Texts = Annotated[tuple[str, ...], BeforeValidator(comma_list)]


class NvidiaSettings(Section):
    """GPUs, replicas of them and MIG instances under the names of NVIDIA's device plugin (docs/explanation/nvidia.md)."""

    enabled: bool = Field(
        default=False,
        description="Offer them. false: nothing here is used, and NVIDIA's own device plugin may run for other GPUs.",
    )
    config: OptionalPath = Field(
        default=None,
        description="Configuration file of NVIDIA's device plugin (version: v1, YAML or JSON), whose variables"
        " and flags are read too (docs/how-to/migrate-from-nvidia.md). Settings of this agent win over it. Empty: none.",
    )
    resource: NvidiaName = Field(
        default=NVIDIA_GPU_RESOURCE, description="Resource whose unit is a GPU, or a replica of one. NVIDIA's name."
    )
    gpus: Texts = Field(
        default=("all",),
        description="GPUs that serve these resources, comma list: all, indexes, UUIDs, models' names, which may be glob"
        " patterns such as *A100*. The others serve shares alone.",
    )
    names: Texts = Field(
        default=(),
        description="Other resource names by model, comma list of PATTERN=RESOURCE such as *A100*=nvidia.com/a100; the first"
        " whose pattern matches counts. Empty: all have nvidia.resource.",
    )
    mig_strategy: Literal["none", "single", "mixed"] = Field(
        default="none",
        description="MIG instances. none: not offered by these names. single: an instance is a unit of nvidia.resource."
        " mixed: of nvidia.com/mig-PROFILE, such as nvidia.com/mig-1g.10gb.",
    )
    mig_names: Texts = Field(
        default=(),
        description="Other resource names of MIG instances with strategy mixed, comma list of PROFILE=RESOURCE, the profile"
        " as nvidia-smi has it, such as 1g.10gb; glob patterns may be used, the first that matches counts.",
    )
    replicas: Texts = Field(
        default=(),
        description="How many containers may have one GPU or instance, comma list of SELECTOR=COUNT, the first that matches"
        " counts; the selector is a resource's name, an index, a UUID, a model's glob pattern, or *. Empty: one.",
    )
    sharing: Sharing = Field(
        default=Sharing.TIME_SLICING,
        description="What a replica is. time-slicing: nothing limits it. mps: NVIDIA MPS limits it to 1/COUNT of memory and"
        " compute. shares: the node's isolation does.",
    )
    rename_replicas: bool = Field(
        default=False, description="Resources of replicas have .shared after their names, NVIDIA's renameByDefault."
    )
    refuse_several_replicas: Annotated[bool | None, BeforeValidator(empty_is_none)] = Field(
        default=None,
        description="Refuse containers that ask for more than one replica, NVIDIA's failRequestsGreaterThanOne. Empty: true"
        " for sharing mps, else false.",
    )
    device_ids: Literal["uuid", "index"] = Field(
        default="uuid",
        description="How a container's GPUs are named to the container runtime, NVIDIA's deviceIDStrategy. index: as"
        " NVIDIA_VISIBLE_DEVICES=0,1; an instance is PARENT:INSTANCE.",
    )
    replica_policy: Literal["packed", "distributed"] = Field(
        default="distributed",
        description="Replicas go to the fullest GPU that has one (packed) or the emptiest (distributed), NVIDIA's"
        " sharedDevicesAllocationPolicy.",
    )

    labels: bool = Field(
        default=False,
        description="Write the labels of NVIDIA's GPU Feature Discovery to the node, such as nvidia.com/gpu.product"
        " (docs/reference/node-facts.md). Labels of one that runs are left alone. false: those that the agent wrote are"
        " removed. Needs facts.is_written.",
    )

    @property
    def name_pairs(self) -> tuple[tuple[str, str], ...]:
        """Pattern and resource name, in the setting's order."""
        return _pairs(self.names)

    @property
    def mig_name_pairs(self) -> tuple[tuple[str, str], ...]:
        return _pairs(self.mig_names)

    @property
    def replica_counts(self) -> tuple[tuple[str, int], ...]:
        """Selector and count."""
        return tuple((selector, int(count)) for selector, count in _pairs(self.replicas))

    @property
    def resource_names(self) -> frozenset[str]:
        """All that are named here, of replicas too; not the names made of MIG profiles."""
        plain = {self.resource, *(name for _, name in self.name_pairs + self.mig_name_pairs)}
        return frozenset(plain | {name + SHARED_SUFFIX for name in plain} if self.rename_replicas else plain)

    @property
    def refuses_several_replicas(self) -> bool:
        return self.sharing is Sharing.MPS if self.refuse_several_replicas is None else self.refuse_several_replicas

    @field_validator("names", "mig_names")
    @classmethod
    def _names_are_pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for _, name in _pairs(value):
            _short_name(name)
        return value

    @field_validator("replicas")
    @classmethod
    def _counts_are_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for selector, count in _pairs(value):
            if not _COUNT.fullmatch(count) or not 1 <= int(count) <= MAX_REPLICAS:
                raise ValueError(f"the count of {selector!r} is {count!r}, but must be from 1 to {MAX_REPLICAS}")
        return value

    @model_validator(mode="after")
    def _shared_names_fit(self) -> Self:
        if self.rename_replicas:
            for name in sorted(self.resource_names):
                _short_name(name)
        return self
