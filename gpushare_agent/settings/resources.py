"""Settings of the extended resources that the node offers: gpu-manager's and GPUShare's; sections of settings/tree.py."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from gpushare_agent.model.names import MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.settings.values import Count, ResourceName, Section


class ResourceSettings(Section):
    """The extended resources that the node offers."""

    vcore: ResourceName = Field(
        default=VCORE_RESOURCE,
        description="Resource with the unit 1/100 of a GPU's compute.",
    )
    vmemory: ResourceName = Field(
        default=VMEMORY_RESOURCE,
        description="Resource with the unit one memory block.",
    )
    memory_block_mib: Count = Field(
        default=MEMORY_BLOCK_MIB,
        ge=1,
        le=65536,
        description="Size of one memory block, MiB. Smaller blocks make more device IDs (docs/reference/formats.md).",
    )

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.vcore == self.vmemory:
            raise ValueError(f"vcore and vmemory are both {self.vcore!r}, but must be two resources")
        return self


class GpushareSettings(Section):
    """GPUShare's resource, memory alone, beside vcore and vmemory."""

    enabled: bool = Field(default=False, description="Offer GPUShare's resource on this node.")
    resource: ResourceName = Field(
        default="aliyun.com/gpu-mem", description="Resource with the unit one unit of a GPU's memory."
    )
    count_resource: ResourceName = Field(
        default="aliyun.com/gpu-count",
        description="Capacity of the node with its number of GPUs.",
    )
    unit: Literal["GiB", "MiB"] = Field(
        default="GiB", description="Size of one unit. MiB makes one device ID for each MiB."
    )
