"""What is replayed: a cluster's nodes, and pods with the time of their arrival and how long they run.

A pod here has one container. Times are seconds from the begin of the replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.extender.values import ClusterNode
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.model.resources import ResourceNames

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


class Workload(Struct, frozen=True, kw_only=True):
    """Pods in the order of their arrival. `skipped` counts what the source has and the replay has not, by reason."""

    source: str
    arrivals: tuple[Arrival, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def window_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s if self.arrivals else 0.0

    @property
    def span_s(self) -> float:
        """From the first arrival to the last end, if nobody had to wait."""
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
    """The same pods, whose arrivals are spread so that they ask for `load` of the cluster's cores on average meanwhile: 1
    fills it if nothing were lost and everybody had arrived long ago. Unchanged where all arrive at once."""
    core_seconds = sum(arrival.shape.cores * arrival.duration_s for arrival in workload.arrivals)
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
        containers = self._containers.get(key)
        if containers is None:
            asked = {self._names.vcore: shape.cores, self._names.vmemory: shape.blocks}
            requests = {resource: count for resource, count in asked.items() if count}
            one = ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests=requests)
            containers = self._containers[key] = (one,)
        return Pod(uid=PodUid(name), namespace=NAMESPACE, name=name, phase=PodPhase.PENDING, containers=containers)
