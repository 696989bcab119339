"""kube-scheduler with and without the extender, and with claims: for one pod, a node, and there the GPUs; or why not now.

With the extender the nodes are filtered, scored and reserved by extender/cluster_state.py, as in a cluster. Without it
kube-scheduler goes by sums alone, and the node's agent may refuse the pod at its admission: there too the GPUs are
planned by the agent's decisions. With claims it allocates the GPUs itself (first_fit.py).

As in kube-scheduler, a try examines a part of the nodes (percentageOfNodesToScore) and takes one of the best at random.
Where the pod fits none of them it goes on with the next part; a real scheduler does that in the pod's next try.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple

from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.placement import GpuAccount
from gpushare_agent.simulation.candidates import Ring
from gpushare_agent.simulation.first_fit import FirstFit
from gpushare_agent.simulation.judges import ExtenderJudge, SumsJudge
from gpushare_agent.simulation.sums import NodeSums
from gpushare_agent.simulation.workload import Cluster, Shape

_MIN_NODES = 100
_MIN_PERCENT, _START_PERCENT, _NODES_PER_PERCENT = 5, 50, 125
"""Of kube-scheduler's rule: 50 % of the nodes, one less for every 125 of them, but 5 % and 100 nodes at least."""


class Policy(StrEnum):
    """What is compared."""

    BINPACK = "binpack"
    SPREAD = "spread"
    AGENT_ONLY = "agent-only"
    """No extender: kube-scheduler's sums, and the agents' admission."""
    DRA = "dra"
    """Claims: kube-scheduler allocates the GPUs."""


class NoNode(StrEnum):
    """Why a pod has no node now."""

    FULL = "full"
    """No node has enough in sum: it waits with every scheduler."""
    FRAGMENTED = "fragmented"
    """A node has enough in sum, but none on its GPUs: without the extender it would be sent there, and refused."""
    NEVER = "never"
    """Not even an empty node could serve it."""


class Placed(NamedTuple):
    """A pod that has its GPUs."""

    pod_uid: PodUid
    node: str


def nodes_per_try(count: int, percent: int = 0) -> int:
    """How many nodes a try examines. `percent` 0 is kube-scheduler's rule."""
    if count <= _MIN_NODES:
        return count
    part = percent or max(_MIN_PERCENT, _START_PERCENT - count // _NODES_PER_PERCENT)
    return min(count, max(_MIN_NODES, count * part // 100))


class Scheduler:
    """One policy at work. State owned: the cluster's ledger, the sums, and the rings of candidates."""

    def __init__(self, cluster: Cluster, policy: Policy, rules: ClusterPolicy, *, chance: Random, per_try: int) -> None:
        self._knows_gpus = policy is not Policy.AGENT_ONLY
        self._sums = NodeSums(cluster.nodes, rules.names.memory_block_mib)
        self._ledger: ClusterState | FirstFit = ClusterState(policy=rules)
        self._judge: ExtenderJudge | SumsJudge | FirstFit = SumsJudge(self._sums)
        if policy is Policy.DRA:
            is_binpack = rules.share_policy == "binpack"
            self._judge = self._ledger = FirstFit(cluster.nodes, self._judge, rules.names, is_binpack=is_binpack)
        elif self._knows_gpus:
            self._judge = ExtenderJudge(self._ledger)
        self._nodes = {node.name: node for node in cluster.nodes}
        self._chance = chance
        self._per_try = per_try
        self._rings: dict[Shape, Ring] = {}
        self._by_sums: dict[Shape, Ring] = {}
        if isinstance(self._ledger, ClusterState):
            for node in cluster.nodes:
                self._ledger.put_node(node, 0.0)

    def can_ever(self, pod: Pod, shape: Shape) -> bool:
        """Whether the scheduler would ever bind such a pod. To be asked while the cluster is empty."""
        return bool(self._judge.choose(pod, shape, self._one_of_each_kind(shape)).fitting)

    def place(self, pod: Pod, shape: Shape, now: float) -> Placed | Refused | NoNode:
        """A try: the pod's GPUs, or the agent's refusal after the bind, or no node."""
        ring = self._ring(self._rings, shape)
        left = len(ring)
        while left > 0:
            names = ring.next(self._per_try)
            left -= len(names)
            choice = self._judge.choose(pod, shape, names)
            ring.keep(names, choice.fitting)
            if choice.best:
                return self._bind(pod, shape, self._chance.choice(choice.best), now)
        if self._knows_gpus and self._ring(self._by_sums, shape).has_any(lambda name: self._sums.fits(name, shape)):
            return NoNode.FRAGMENTED
        return NoNode.FULL

    def gpus(self, node: str) -> Sequence[GpuAccount]:
        """The accounts of the node's GPUs now."""
        return self._ledger.gpus(node)

    def end(self, uid: PodUid, shape: Shape, node: str) -> None:
        """The pod is gone: its node is a candidate again for everybody."""
        self._ledger.remove_pod(uid)
        self._sums.give_back(node, shape)
        self._judge.changed(node)
        for rings in (self._rings, self._by_sums):
            for ring in rings.values():
                ring.add(node)

    def _bind(self, pod: Pod, shape: Shape, node: str, now: float) -> Placed | Refused:
        if isinstance(self._ledger, FirstFit):
            self._ledger.take(pod.uid, shape, node)
        else:
            reserved = self._ledger.reserve(pod, node, now)
            if isinstance(reserved, Refused):
                return reserved
            self._ledger.bound(pod.uid)
        self._sums.take(node, shape)
        self._judge.changed(node)
        return Placed(pod.uid, node)

    def _ring(self, rings: dict[Shape, Ring], shape: Shape) -> Ring:
        ring = rings.get(shape)
        if ring is None:
            ring = rings[shape] = Ring(self._eligible(shape))
        return ring

    def _one_of_each_kind(self, shape: Shape) -> list[str]:
        kinds: dict[tuple[int, ...], str] = {}
        for name in self._eligible(shape):
            kinds.setdefault(tuple(gpu.memory_mib for gpu in self._nodes[name].gpus), name)
        return list(kinds.values())

    def _eligible(self, shape: Shape) -> list[str]:
        return [name for name, node in self._nodes.items() if not shape.models or node.model in shape.models]
