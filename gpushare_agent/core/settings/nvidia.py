"""Settings of the resources with NVIDIA's names: whole GPUs, replicas of GPUs, MIG instances; a section of settings/tree.py.

A selector names GPUs as `Gpu.is_selected` reads it: an index, a UUID, or the model's name, a glob pattern.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, field_validator, model_validator

from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import MAX_REPLICAS, NVIDIA_GPU_RESOURCE, SHARED_SUFFIX
from gpushare_agent.core.settings.values import (
    MAX_NVIDIA_RESOURCE_NAME_CHARS,
    OptionalPath,
    ResourceName,
    Section,
    Texts,
    check_resource_name,
    empty_is_none,
)

_COUNT = re.compile(r"[0-9]{1,5}", re.ASCII)


def _pairs(values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """`LEFT=RIGHT` of each. Raises ValueError where an entry is no pair."""
    pairs = []
    for value in values:
        # At the last sign: a pattern for models may hold one, a count or a resource's name does not.
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


class NvidiaSettings(Section):
    """NVIDIA's names: GPUs, replicas, MIG instances (docs/explanation/nvidia.md)."""

    enabled: bool = False
    """Offer them. NVIDIA's device plugin must not run on the same GPUs."""
    config: OptionalPath = None
    """Configuration file of NVIDIA's device plugin, version v1 (docs/how-to/migrate-from-nvidia.md)."""
    resource: NvidiaName = NVIDIA_GPU_RESOURCE
    """Resource for one GPU, or one replica."""
    gpus: Texts = ("all",)
    """GPUs that serve them: all, indexes, UUIDs, models or patterns such as *A100*."""
    names: Texts = ()
    """Names by model, PATTERN=RESOURCE such as *A100*=nvidia.com/a100; the first match counts. Empty: nvidia.resource."""
    mig_strategy: Literal["none", "single", "mixed"] = "none"
    """MIG instances. none: not offered by these names. single: each as a unit of nvidia.resource. mixed: as
    nvidia.com/mig-PROFILE."""
    mig_names: Texts = ()
    """Names of MIG instances (mixed), PROFILE=RESOURCE such as 1g.10gb=nvidia.com/small; the first match counts."""
    replicas: Texts = ()
    """Replicas of each GPU, SELECTOR=COUNT, the first match counts. SELECTOR: resource, index, UUID, model or pattern.
    COUNT: 1 to 1000. Empty: one."""
    sharing: Sharing = Sharing.TIME_SLICING
    """Limit of a replica. time-slicing: none. mps: 1/COUNT of memory and compute by NVIDIA MPS. shares: the same by the
    node's isolation."""
    rename_replicas: bool = False
    """Add .shared to the names of resources with replicas (NVIDIA's renameByDefault)."""
    refuse_several_replicas: Annotated[bool | None, BeforeValidator(empty_is_none)] = None
    """Refuse containers that ask for several replicas (failRequestsGreaterThanOne). Empty: only with sharing mps."""
    device_ids: Literal["uuid", "index"] = "uuid"
    """Names of a container's GPUs for the container runtime (deviceIDStrategy)."""
    replica_policy: Literal["packed", "distributed"] = "distributed"
    """Replicas go to the fullest GPU (packed) or the emptiest (distributed) (sharedDevicesAllocationPolicy)."""

    labels: bool = False
    """Write the labels of GPU Feature Discovery (docs/reference/node-facts.md). Needs facts.is_written."""

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
        # With MPS NVIDIA's plugin refuses them always.
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
                bounds = f"from 1 to {MAX_REPLICAS} for each GPU: the kubelet takes all units of a node in one message"
                raise ValueError(f"the count of {selector!r} is {count!r}, but must be {bounds}")
        return value

    @model_validator(mode="after")
    def _shared_names_fit(self) -> Self:
        # The suffix may make a name longer than NVIDIA's plugin takes.
        if self.rename_replicas:
            for name in sorted(self.resource_names):
                _short_name(name)
        return self
