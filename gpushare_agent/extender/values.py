"""The cluster as the scheduler extender sees it: nodes with their GPUs, and what it has set aside for pods.

Sources: the agent's annotations on the node (`gpushare-agent/cards`, `gpushare-agent/held`), never a pod's annotations,
which any tenant can write. GPUs are named by their index on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """One GPU of a node. A cordoned GPU is not healthy."""

    index: int
    uuid: GpuUuid
    memory_mib: int
    is_healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a pod takes of one GPU, all its containers together."""

    index: int
    cores: int = 0
    blocks: int = 0
    units: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One node that offers our resources. `is_exact` is False where the agent has not told of its GPUs and the node's
    capacity was divided evenly. `held` is what each pod has of each GPU by the agent's ledger, None where it is silent."""

    name: str
    gpus: tuple[NodeGpu, ...]
    topology: Topology
    model: str = ""
    pool: str = ""
    is_exact: bool = True
    held: Mapping[PodUid, tuple[Charge, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """The settings that bear on what the extender decides. `names` must be those of the nodes' agents, and `share_policy`
    theirs too: else both choose different GPUs."""

    names: ResourceNames
    share_policy: Literal["binpack", "spread"] = "binpack"
    node_policy: Literal["binpack", "spread"] = "binpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedContainer:
    """One container's GPUs by index; empty where it asks for nothing of ours. `cores` is 1/100 of a GPU, `blocks` memory
    blocks, `units` GPUShare's units, each as asked."""

    name: str
    kind: ContainerKind
    position: int
    gpus: tuple[int, ...]
    cores: int = 0
    blocks: int = 0
    units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """Where a pod's containers go on one node, and what that takes of each GPU (sorted by index)."""

    containers: tuple[PlannedContainer, ...]
    charges: tuple[Charge, ...]
    link_cost: int = 0
    """Of all the containers with several GPUs, as placement/link.py counts it."""


class Stage(StrEnum):
    """How sure a reservation is."""

    ASSUMED = "assumed"
    """In memory; the bind is under way, or its outcome unknown."""
    BOUND = "bound"
    """The pod is bound to the node; its agent has not told of it yet."""
    CONFIRMED = "confirmed"
    """The node's agent holds it: its GPUs count, whatever was planned."""
    UNPLACED = "unplaced"
    """Bound by somebody else, or before our time, and nobody tells its GPUs: charged wherever it could be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What is set aside for one pod. `at` is monotonic seconds."""

    pod_uid: PodUid
    namespace: str
    pod: str
    node: str
    plan: PodPlan
    stage: Stage
    at: float
