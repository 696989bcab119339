"""The cluster as the scheduler extender sees it: nodes with their GPUs, and the reservations of pods.

Sources: the agent's annotations on the node (`gpushare-agent/gpus` and `/allocations`), never a pod's annotations,
which any tenant can write. GPUs are named by their index on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.gpus import GpuReport, Topology
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import Request, ResourceNames
from gpushare_agent.core.placement.place import SharePolicy

NodeKind = tuple[str, str]
"""Model and pool: a quota tells nodes apart by these two alone."""


class ClusterNode(Struct, frozen=True, kw_only=True):
    """One node that offers our resources. A cordoned GPU is not healthy here. `is_exact` is False where the agent has not
    reported its GPUs and the node's capacity is divided evenly. `allocated` is what each pod has of each GPU as the agent
    reports it, by index, None without a report. `is_cordoned` (kubectl cordon) and `is_ready` are only shown: kube-scheduler
    itself leaves such nodes out."""

    name: str
    gpus: tuple[GpuReport, ...]
    topology: Topology
    model: str = ""
    pool: str = ""
    is_exact: bool = True
    is_cordoned: bool = False
    is_ready: bool = True
    is_avoided: bool = False
    """It has a taint PreferNoSchedule."""
    allocated: Mapping[PodUid, Mapping[int, Charge]] | None = None
    cpu_milli: int = 0
    memory_mib: int = 0
    """The CPU and main memory that pods can have."""

    @property
    def kind(self) -> NodeKind:
        return self.model, self.pool


NodePolicy = Literal["fgd", "binpack", "spread"]
"""The choice among the nodes that fit a pod: where the fewest free GPUs become useless to the pods that usually come
(core/placement/fragmentation.py), the fullest, or the emptiest."""


class ClusterPolicy(Struct, frozen=True, kw_only=True):
    """The settings on which the extender's decisions depend. `names` and `share_policy` must be those of the nodes' agents:
    else both choose different GPUs."""

    names: ResourceNames
    share_policy: SharePolicy = "binpack"
    node_policy: NodePolicy = "binpack"


class PlannedContainer(Struct, frozen=True, kw_only=True):
    """One container's GPUs by index, and its request; no GPUs where it asks for nothing of ours."""

    name: str
    kind: ContainerKind
    position: int
    request: Request
    gpus: tuple[int, ...] = ()


class PodPlan(Struct, frozen=True, kw_only=True):
    """Where a pod's containers go on one node, and what the pod then has of each GPU, by index."""

    containers: tuple[PlannedContainer, ...]
    charges: Mapping[int, Charge]


class Stage(StrEnum):
    """The certainty of a reservation."""

    ASSUMED = "assumed"
    """Reserved in memory; the bind is under way, or its outcome unknown."""
    BOUND = "bound"
    """The pod is bound to the node; its agent has not reported it yet."""
    CONFIRMED = "confirmed"
    """The node's agent reports it: the reported GPUs count, whatever was planned."""
    UNPLACED = "unplaced"
    """Bound by another scheduler, or before this process started, and not reported: charged on every GPU where it may be."""


class Reservation(Struct, frozen=True, kw_only=True):
    """The reservation of one pod. `at` is monotonic seconds."""

    pod_uid: PodUid
    namespace: str
    pod: str
    node: str
    plan: PodPlan
    stage: Stage
    at: float
