"""How the GPUs are connected, from NVML: common ancestors on PCIe, and NVLinks.

State owned: what was read once. PCIe does not change while a node runs, so each pair is read once; NVLinks are read
again whenever NVML was opened anew. A lost GPU thereby keeps its place in the topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.gpus.nvml.session import text_of
from gpushare_agent.model.gpus import Gpu, Link, LinkKind, NvLink, Topology
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.placement.topology import build_topology, kind_by_numa

_ANCESTORS = {
    0: LinkKind.PIX,  # NVML_TOPOLOGY_INTERNAL: two GPUs on one board, behind the board's own switch
    10: LinkKind.PIX,  # NVML_TOPOLOGY_SINGLE
    20: LinkKind.PXB,  # NVML_TOPOLOGY_MULTIPLE
    30: LinkKind.PHB,  # NVML_TOPOLOGY_HOSTBRIDGE
    40: LinkKind.NODE,  # NVML_TOPOLOGY_NODE
    50: LinkKind.SYS,  # NVML_TOPOLOGY_SYSTEM
}


def canonical_bus_id(bus_id: str) -> str:
    """NVML's newer form, `00000000:3B:00.0`, also for its older and the kernel's `0000:3b:00.0`."""
    domain, _, rest = bus_id.strip().upper().partition(":")
    return f"{domain:0>8}:{rest}"


class _GpuLinks(Struct, frozen=True, kw_only=True):
    """Active NVLinks of a GPU: to known ends by bus ID, and how many of them go into an NVSwitch."""

    links: tuple[NvLink, ...] = ()
    switch_links: int = 0

    def count_to(self, bus_id: str) -> int:
        return sum(link.remote_bus_id == bus_id for link in self.links)


_NO_LINKS = _GpuLinks()


class NvmlTopology:
    """Reads the topology once and completes it when new GPUs appear."""

    def __init__(self) -> None:
        self._ancestors: dict[frozenset[GpuUuid], LinkKind] = {}
        self._links: dict[GpuUuid, _GpuLinks] = {}
        self._up_to_date: set[GpuUuid] = set()

    def expire_links(self) -> None:
        """NVLinks may come up differently after a driver restart: they are read again of GPUs that answer."""
        self._up_to_date.clear()

    def read(self, nvml: Any, gpus: Sequence[Gpu], handles: Mapping[GpuUuid, Any]) -> tuple[list[Gpu], Topology]:
        """The GPUs with their NVLinks, and the topology with a row per index (unnamed GPUs: far from all).

        `handles` has the GPUs that answer; the others keep what was read of them before.
        """
        for uuid, handle in handles.items():
            if uuid not in self._up_to_date and (links := _read_links(nvml, handle)) is not None:
                self._links[uuid] = links
                self._up_to_date.add(uuid)
        linked = [replace(gpu, nvlinks=self._links_of(gpu).links) for gpu in gpus]
        rows: list[Gpu | None] = [None] * (max((gpu.index for gpu in gpus), default=-1) + 1)
        for gpu in linked:
            rows[gpu.index] = gpu
        pcie = [
            [LinkKind.SELF if row == column else self._pcie_kind(nvml, a, b, handles) for column, b in enumerate(rows)]
            for row, a in enumerate(rows)
        ]
        matrix = [
            [self._link(a, b, kind) for b, kind in zip(rows, kinds, strict=True)]
            for a, kinds in zip(rows, pcie, strict=True)
        ]
        numa = [gpu.numa_node if gpu else None for gpu in rows]
        return linked, build_topology(matrix, numa, pcie=pcie)

    def _links_of(self, gpu: Gpu) -> _GpuLinks:
        return self._links.get(gpu.uuid, _NO_LINKS)

    def _pcie_kind(self, nvml: Any, a: Gpu | None, b: Gpu | None, handles: Mapping[GpuUuid, Any]) -> LinkKind:
        if a is None or b is None:
            return LinkKind.SYS
        first, second = _physical(a), _physical(b)
        if first == second:
            return LinkKind.PIX  # two instances of one GPU
        pair = frozenset({first, second})
        if pair not in self._ancestors and first in handles and second in handles:
            try:
                ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(handles[first], handles[second])
            except nvml.NVMLError:  # virtual machines often have none; read again at the next poll
                return kind_by_numa(a.numa_node, b.numa_node)
            self._ancestors[pair] = _ANCESTORS.get(ancestor, LinkKind.SYS)
        return self._ancestors.get(pair, kind_by_numa(a.numa_node, b.numa_node))

    def _link(self, a: Gpu | None, b: Gpu | None, pcie: LinkKind) -> Link:
        if a is None or b is None or a is b or a.mig is not None or b.mig is not None:
            return Link(kind=pcie)  # MIG instances have no NVLinks
        first, second = self._links_of(a), self._links_of(b)
        direct = max(first.count_to(b.bus_id), second.count_to(a.bus_id))
        nvlinks = direct or min(first.switch_links, second.switch_links)
        return Link(kind=LinkKind.NVLINK, nvlinks=nvlinks) if nvlinks else Link(kind=pcie)


def _physical(gpu: Gpu) -> GpuUuid:
    return gpu.uuid if gpu.mig is None else gpu.mig.parent


def _read_links(nvml: Any, handle: Any) -> _GpuLinks | None:
    """The GPU's active NVLinks, None where the GPU stopped answering half-way."""
    links: list[NvLink] = []
    switch_links = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, number):
                continue
            remote = canonical_bus_id(text_of(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId))
        except nvml.NVMLError as error:
            if not _means_no_link(nvml, error):
                return None
            continue
        links.append(NvLink(number=number, remote_bus_id=remote))
        switch_links += _goes_to_switch(nvml, handle, number)
    return _GpuLinks(links=tuple(links), switch_links=switch_links)


def _goes_to_switch(nvml: Any, handle: Any, number: int) -> bool:
    try:
        remote_type: int = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number)
    except nvml.NVMLError:  # drivers without the call are older than the machines with switches
        return False
    return bool(remote_type == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)


def _means_no_link(nvml: Any, error: Exception) -> bool:
    """A GPU without this link, without any, or a driver without the call."""
    none = (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return getattr(error, "value", None) in none
