"""The input of a replay: a cluster's nodes with their GPUs, and pods with the time of their arrival and how long they run.

A pod here has one container. Times are seconds from the start of the replay. Traces name models without their memory:
`MEMORY_MIB` has what nvidia-smi shows for such GPUs. A model that is a code name has `UNKNOWN_MEMORY_MIB`, which is an
assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.model.gpus import GpuReport, Link, LinkKind, Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, HostRequest, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.extender.values import ClusterNode

NAMESPACE = "simulated"


class Size(StrEnum):
    """The classes of pods that results distinguish: larger requests wait longer."""

    SHARE = "share"
    ONE_GPU = "one GPU"
    SEVERAL_GPUS = "several GPUs"


class Shape(NamedTuple):
    """What a pod asks for. Pods of one shape are alike for every decision. `models` are those that it may run on, sorted;
    none: any."""

    cores: int
    blocks: int
    models: tuple[str, ...] = ()

    @property
    def whole_gpus(self) -> int:
        return self.cores // CORES_PER_GPU

    @property
    def size(self) -> Size:
        if self.cores < CORES_PER_GPU:
            return Size.SHARE
        return Size.ONE_GPU if self.whole_gpus == 1 else Size.SEVERAL_GPUS


class Arrival(NamedTuple):
    """One pod of the workload."""

    at_s: float
    name: str
    shape: Shape
    duration_s: float
    gang: str = ""
    """All pods with this name compute together: none runs before the last has its GPUs. Empty: it runs alone."""


class Workload(Struct, frozen=True, kw_only=True):
    """Pods in the order of their arrival. `skipped` counts, by reason, what the replay leaves out of the source."""

    source: str
    arrivals: tuple[Arrival, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def window_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s if self.arrivals else 0.0

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last end, if nobody had to wait."""
        ends = (arrival.at_s + arrival.duration_s for arrival in self.arrivals)
        return max(ends, default=0.0) - (self.arrivals[0].at_s if self.arrivals else 0.0)


class Cluster(Struct, frozen=True, kw_only=True):
    """Nodes in order of name."""

    source: str
    nodes: tuple[ClusterNode, ...]

    @property
    def number_of_gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)


def at_load(workload: Workload, cluster: Cluster, load: float) -> Workload:
    """The same pods, with arrivals spread so that they ask on average for `load` times the cluster's cores. 1 would fill it
    if nothing were lost and everybody had arrived long ago. Unchanged if all arrive at once."""
    core_seconds = sum(arrival.shape.cores * arrival.duration_s for arrival in workload.arrivals)
    # Nothing to spread, or nothing that takes room.
    if not workload.window_s or not core_seconds:
        return workload
    begin_s = workload.arrivals[0].at_s
    factor = core_seconds / (load * CORES_PER_GPU * cluster.number_of_gpus) / workload.window_s
    arrivals = (one._replace(at_s=round((one.at_s - begin_s) * factor, 3)) for one in workload.arrivals)
    return replace(workload, source=f"{workload.source} at load {load:g}", arrivals=tuple(arrivals))


class PodMaker:
    """Makes the pods that the decisions see. Pods of a shape share their containers."""

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self._containers: dict[tuple[int, int], tuple[ContainerSpec, ...]] = {}

    def pod(self, name: str, shape: Shape) -> Pod:
        key = shape.cores, shape.blocks
        # One object for all pods of a shape, as the extender's reader makes of equal containers.
        containers = self._containers.get(key)
        if containers is None:
            asked = {self._names.vcore: shape.cores, self._names.vmemory: shape.blocks}
            requests = {resource: count for resource, count in asked.items() if count}
            one = ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests=requests)
            containers = self._containers[key] = (one,)
        return Pod(
            uid=PodUid(name),
            namespace=NAMESPACE,
            name=name,
            phase=PodPhase.PENDING,
            containers=containers,
            host_request=HostRequest(models=shape.models),
        )


MEMORY_MIB = {
    "A10": 23_028,
    "A100": 81_920,
    "H100": 81_559,
    "P100": 16_280,
    "T4": 15_360,
    "V100M16": 16_160,
    "V100M32": 32_510,
}
UNKNOWN_MEMORY_MIB = 32_768
SMALLEST_MEMORY_MIB = min(MEMORY_MIB.values())
_MESHED = frozenset({"A100", "H100"})
"""Models with NVLink between all their GPUs."""
_NVLINKS = 12


class Machine(Struct, frozen=True, kw_only=True):
    """A kind of node."""

    model: str
    gpus: int
    memory_mib: int

    def node(self, name: str) -> ClusterNode:
        return ClusterNode(
            name=name,
            gpus=tuple(
                GpuReport(index=index, uuid=GpuUuid(f"GPU-{name}-{index}"), memory_mib=self.memory_mib)
                for index in range(self.gpus)
            ),
            # One object for all nodes of a kind: the tree over its links is the costly part.
            topology=_topology(self.gpus, self.model in _MESHED),
            model=self.model,
        )


def memory_of(model: str) -> int:
    return MEMORY_MIB.get(model, UNKNOWN_MEMORY_MIB)


@cache
def _topology(gpus: int, is_meshed: bool) -> Topology:
    """Meshed: NVLink between all. Else pairs below one switch, and half of the GPUs at each of two sockets from four up."""
    # Smaller machines have one socket.
    socket = (lambda index: 2 * index // gpus) if gpus >= 4 else (lambda index: 0)
    links = [[_link(a, b, socket, is_meshed) for b in range(gpus)] for a in range(gpus)]
    return build_topology(links, [socket(index) for index in range(gpus)])


def _link(a: int, b: int, socket: Callable[[int], int], is_meshed: bool) -> Link:
    if a == b:
        return Link(kind=LinkKind.SELF)
    if is_meshed:
        return Link(kind=LinkKind.NVLINK, nvlinks=_NVLINKS)
    if socket(a) != socket(b):
        return Link(kind=LinkKind.SYS)
    return Link(kind=LinkKind.PIX if a // 2 == b // 2 else LinkKind.PHB)
