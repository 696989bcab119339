"""The cluster as the scheduler extender sees it: nodes with their GPUs, and the reservations of pods.

Sources: the agent's annotations on the node (`gpushare-agent/cards`, `gpushare-agent/held`), never a pod's annotations,
which any tenant can write. GPUs are named by their index on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from gpushare_agent.cluster.decisions.node_annotations import Charge
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.requests import Request
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.topology import Topology
from gpushare_agent.placement.request import SharePolicy


class NodeGpu(Struct, frozen=True, kw_only=True):
    """One GPU of a node, or one MIG instance; `instance` and `takes_shares` as GpuAccount has them. A cordoned GPU is not
    healthy. `name` and `cordoned` (why, empty if it is not) are for people."""

    index: int
    uuid: GpuUuid
    memory_mib: int
    is_healthy: bool = True
    instance: str = ""
    takes_shares: bool = True
    name: str = ""
    cordoned: str = ""


class ClusterNode(Struct, frozen=True, kw_only=True):
    """One node that offers our resources. `is_exact` is False where the agent has not reported its GPUs and the node's
    capacity is divided evenly. `allocated` is what each pod has of each GPU as the agent reports it, None without a
    report."""

    name: str
    gpus: tuple[NodeGpu, ...]
    topology: Topology
    model: str = ""
    pool: str = ""
    is_exact: bool = True
    allocated: Mapping[PodUid, tuple[Charge, ...]] | None = None


class ClusterPolicy(Struct, frozen=True, kw_only=True):
    """The settings on which the extender's decisions depend. `names` and `share_policy` must be those of the nodes' agents:
    else both choose different GPUs."""

    names: ResourceNames
    share_policy: SharePolicy = "binpack"
    node_policy: SharePolicy = "binpack"


class PlannedContainer(Struct, frozen=True, kw_only=True):
    """One container's GPUs by index, and its request; no GPUs where it asks for nothing of ours."""

    name: str
    kind: ContainerKind
    position: int
    request: Request
    gpus: tuple[int, ...] = ()


class PodPlan(Struct, frozen=True, kw_only=True):
    """Where a pod's containers go on one node, and what the pod has then of each GPU (sorted by index)."""

    containers: tuple[PlannedContainer, ...]
    charges: tuple[Charge, ...]


class Stage(StrEnum):
    """How sure a reservation is."""

    ASSUMED = "assumed"
    """In memory; the bind is under way, or its outcome unknown."""
    BOUND = "bound"
    """The pod is bound to the node; its agent has not reported it yet."""
    CONFIRMED = "confirmed"
    """The node's agent reports it: the reported GPUs count, whatever was planned."""
    UNPLACED = "unplaced"
    """Bound by another scheduler, or before this process started, and not reported: charged on every GPU where it may be."""


class Reservation(Struct, frozen=True, kw_only=True):
    """What is reserved for one pod. `at` is monotonic seconds."""

    pod_uid: PodUid
    namespace: str
    pod: str
    node: str
    plan: PodPlan
    stage: Stage
    at: float
