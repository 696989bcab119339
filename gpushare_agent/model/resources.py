"""The two extended resources, and how their names (a setting) map to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpushare_agent.model.names import MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.model.pods import ContainerSpec, Pod


class ResourceKind(StrEnum):
    """What one device ID counts: 1/100 of a card's compute, or one block of its memory."""

    VCORE = "vcore"
    VMEMORY = "vmemory"

    @property
    def other(self) -> ResourceKind:
        return ResourceKind.VMEMORY if self is ResourceKind.VCORE else ResourceKind.VCORE


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceNames:
    """The names under which the kubelet knows the two resources, and the size of one memory block."""

    vcore: str = VCORE_RESOURCE
    vmemory: str = VMEMORY_RESOURCE
    memory_block_mib: int = MEMORY_BLOCK_MIB

    def name(self, kind: ResourceKind) -> str:
        return self.vcore if kind is ResourceKind.VCORE else self.vmemory

    def kind(self, name: str) -> ResourceKind | None:
        if name == self.vcore:
            return ResourceKind.VCORE
        return ResourceKind.VMEMORY if name == self.vmemory else None

    def wanted(self, container: ContainerSpec, kind: ResourceKind) -> int:
        """Units of the resource that the container asks for."""
        return container.requests.get(self.name(kind), 0)

    def wants_any(self, pod: Pod) -> bool:
        return pod.wants(self.vcore) or pod.wants(self.vmemory)
