"""The experiment of "Beware of Fragmentation" (USENIX ATC'23) on Alibaba's public trace: how much of a cluster's GPUs can
be allocated while more and more is asked for.

The trace's pods in random order, then more drawn from them, until 130 % of the GPUs have been asked for. Pods come one after
the other, none ends, none is tried again; nodes have CPU and main memory. Measured is what part of all GPUs is allocated
whenever so many percent have been asked for. The policies of the paper (random, dot-product, packing, best-fit) are here to
hold the simulation against what its authors published; fgd, binpack and spread are decided by the extender's code
(extender/cluster_state.py), which learns the typical pods of fgd from those that come; fgd-of-trace knows the trace's, as in
the paper. State owned: during a run what the nodes have left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterPolicy, NodePolicy
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.pods import HostRequest
from gpushare_agent.placement.fragmentation import WHOLE, FreeNode, PodKind, TypicalPods
from gpushare_agent.simulation.workload import Machine, PodMaker, Shape

MARKS = (50, 80, 90, 95, 100, 110, 120, 130)
"""Percent of the GPUs that have been asked for, at which the published table has figures."""
_LARGEST_CPU_MILLI, _LARGEST_GPUS = 128_000, 8
"""The largest of the trace's nodes; best-fit and dot-product measure in them."""
_BEST_SCORE = 100


class InflationPolicy(StrEnum):
    """What places pods that ask for GPUs; those of the paper place the others too."""

    FGD = "fgd"
    FGD_OF_TRACE = "fgd-of-trace"
    BINPACK = "binpack"
    SPREAD = "spread"
    RANDOM = "random"
    DOT_PRODUCT = "dot-product"
    PACKING = "packing"
    BEST_FIT = "best-fit"


class CpuPods(StrEnum):
    """What places pods without GPUs under the product's own policies."""

    LEAST = "least"
    """kube-scheduler's default: the most CPU and memory free."""
    MOST = "most"
    """kube-scheduler's MostAllocated: the least free."""
    GPU_AWARE = "gpu-aware"
    """Under fgd-of-trace as it places all others, else the fewest free GPUs."""


class Host(NamedTuple):
    """A node of the trace, empty: its CPU, main memory, model and number of GPUs."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


class Inflated(Struct, frozen=True, kw_only=True):
    """One policy's result: percent of all GPUs that were allocated when so many percent, from 1 on, had been asked for."""

    policy: InflationPolicy
    seed: int
    allocated_percent: Mapping[int, float]


def inflation_document(results: Sequence[Inflated]) -> dict[str, Any]:
    """The results for programs; `seed` as it was given."""
    return {
        "policies": [
            {
                "policy": one.policy.value,
                "seed": one.seed,
                "allocated_percent": {str(mark): one.allocated_percent[mark] for mark in MARKS},
            }
            for one in results
        ]
    }


class _Offer(NamedTuple):
    """What placing a pod on a node comes to: the lowest rank is taken. `left` are the choices there that are as good."""

    rank: float
    left: Sequence[FreeNode]


_EXTENDERS: Mapping[InflationPolicy, NodePolicy] = {
    InflationPolicy.FGD: "fgd",
    InflationPolicy.BINPACK: "binpack",
    InflationPolicy.SPREAD: "spread",
}

_Rank = Callable[[Host, FreeNode, PodKind], _Offer]


def inflate(
    hosts: Sequence[Host],
    pods: Sequence[PodKind],
    policy: InflationPolicy,
    *,
    seed: int,
    cpu_pods: CpuPods,
    rules: ClusterPolicy,
    on_progress: Callable[[int], None] = lambda percent: None,
) -> Inflated:
    """One run. The same for the same arguments."""
    chance = Random(seed)
    all_parts = WHOLE * sum(host.gpus for host in hosts)
    # Drawn before the policy is at work: with one seed every policy sees the same pods in the same order.
    queue = _queue(pods, all_parts, chance)
    cluster: _RankedCluster | _ExtendersCluster
    if policy in _EXTENDERS:
        cluster = _ExtendersCluster(hosts, replace(rules, node_policy=_EXTENDERS[policy]), _rank_of_cpu_pods(cpu_pods))
    else:
        rank = _rank_of(policy, hosts, pods, cpu_pods)
        cluster = _RankedCluster(hosts, rank, chance, is_random=policy is InflationPolicy.RANDOM)
    asked = allocated = 0
    percents: dict[int, float] = {}
    for pod in queue:
        asked += pod.gpus * pod.parts
        allocated += pod.gpus * pod.parts if cluster.place(pod) else 0
        # A pod of eight GPUs may pass several percent at once: each gets the state after it.
        while 100 * asked >= (len(percents) + 1) * all_parts:
            percents[len(percents) + 1] = round(100 * allocated / all_parts, 2)
            on_progress(len(percents))
    # The next pod drawn would pass the end, so the last percents are not reached.
    last = round(100 * allocated / all_parts, 2)
    percents |= dict.fromkeys(range(len(percents) + 1, MARKS[-1] + 1), last)
    return Inflated(policy=policy, seed=seed, allocated_percent=percents)


def _queue(pods: Sequence[PodKind], all_parts: int, chance: Random) -> list[PodKind]:
    queue = list(pods)
    # In random order, as in the paper.
    chance.shuffle(queue)
    left = all_parts * MARKS[-1] // 100 - sum(pod.gpus * pod.parts for pod in queue)
    while left < 0:  # a trace for a larger cluster
        pod = queue.pop()
        left += pod.gpus * pod.parts
    while True:
        pod = chance.choice(pods)
        if (left := left - pod.gpus * pod.parts) < 0:
            return queue
        queue.append(pod)


class _RankedCluster:
    """Nodes of which each pod gets the one with the lowest rank, of equals the first; or any, as `is_random`."""

    def __init__(self, hosts: Sequence[Host], rank: _Rank, chance: Random, *, is_random: bool) -> None:
        self._hosts = hosts
        self._nodes = [_empty(host) for host in hosts]
        self._rank = rank
        self._chance = chance
        self._is_random = is_random
        self._known: dict[tuple[int, int, FreeNode, PodKind], _Offer] = {}
        # Of each kind of pod the offers of all nodes, and how many of `changes` are in them: a node changes only where a pod
        # is placed, and the kinds are few.
        self._offers: dict[PodKind, tuple[list[_Offer | None], int]] = {}
        self._changes: list[int] = []

    def place(self, pod: PodKind) -> bool:
        """Whether it has a node now."""
        offers, seen = self._offers.get(pod) or ([None] * len(self._nodes), -1)
        # Only nodes that changed since this kind was asked for last: a run has thousands of nodes and pods.
        for at in range(len(self._nodes)) if seen < 0 else set(self._changes[seen:]):
            offers[at] = self._offer(at, pod)
        self._offers[pod] = offers, len(self._changes)
        fitting = [(offer.rank, at, offer.left) for at, offer in enumerate(offers) if offer is not None]
        if not fitting:
            return False
        # At most one per node, so `left` is never compared.
        _, at, left = self._chance.choice(fitting) if self._is_random else min(fitting)
        self._nodes[at] = self._chance.choice(left) if self._is_random else left[0]
        self._changes.append(at)
        return True

    def _offer(self, at: int, pod: PodKind) -> _Offer | None:
        host, node = self._hosts[at], self._nodes[at]
        if not node.fits(pod):
            return None
        # Hosts of one size in one state rank alike; their names do not matter.
        key = host.cpu_milli, host.memory_mib, node, pod
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._rank(host, node, pod)
        return known


class _ExtendersCluster:
    """The extender filters, scores and reserves; whether CPU and main memory suffice is decided here, as by kube-scheduler,
    and so is where pods without GPUs go. Each GPU has as many memory blocks as cores, and pods ask for as many, for the
    trace says nothing of memory."""

    def __init__(self, hosts: Sequence[Host], rules: ClusterPolicy, rank_cpu_pod: _Rank) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._nodes = {host.name: _empty(host) for host in hosts}
        self._rank_cpu_pod = rank_cpu_pod
        self._state = ClusterState(policy=rules)
        self._make = PodMaker(rules.names).pod
        self._placed = 0
        memory_mib = CORES_PER_GPU * rules.names.memory_block_mib
        for host in hosts:
            machine = Machine(model=host.model, gpus=host.gpus, memory_mib=memory_mib)
            node = replace(machine.node(host.name), cpu_milli=host.cpu_milli, memory_mib=host.memory_mib)
            self._state.put_node(node, 0.0)

    def place(self, pod: PodKind) -> bool:
        names = [name for name, node in self._nodes.items() if node.fits(pod)]
        if not names:
            return False
        request = HostRequest(pod.cpu_milli, pod.memory_mib, pod.models)
        self._placed += 1
        uid = PodUid(f"pod-{self._placed}")
        if not pod.gpus:
            name = min(names, key=lambda one: self._rank_cpu_pod(self._hosts[one], self._nodes[one], pod).rank)
            gpus = self._nodes[name].gpus
            self._state.put_other_pod(uid, name, request)
        else:
            cores = pod.gpus * pod.parts
            # A whole GPU has all its memory anyhow.
            shape = Shape(cores, cores if pod.is_share else 0)
            made = replace(self._make(uid, shape), host_request=request)
            if not (fitting := self._state.filter(made, names).fitting):
                return False
            # The first of equals, as in the authors' simulator; kube-scheduler takes any.
            name = max(self._state.prioritize(made, fitting), key=lambda one: one[1])[0]
            if isinstance(self._state.reserve(made, name, 0.0), Refused):
                return False
            # Binding takes no time here, nor does the watch.
            self._state.bound(uid)
            self._state.put_pod(replace(made, node_name=name), 0.0)
            gpus = tuple(sorted(gpu.free_cores for gpu in self._state.gpus(name)))
        before = self._nodes[name]
        self._nodes[name] = FreeNode(
            before.cpu_milli - pod.cpu_milli, before.memory_mib - pod.memory_mib, gpus, before.model
        )
        return True


def _empty(host: Host) -> FreeNode:
    return FreeNode(host.cpu_milli, host.memory_mib, (WHOLE,) * host.gpus, host.model)


def _rank_of(policy: InflationPolicy, hosts: Sequence[Host], pods: Sequence[PodKind], cpu_pods: CpuPods) -> _Rank:
    if policy is not InflationPolicy.FGD_OF_TRACE:
        return _PAPERS[policy]
    supply = Counter[str]()
    for host in hosts:
        supply[host.model] += host.gpus
    typical, rank_cpu_pod = TypicalPods(Counter(pods), supply), _rank_of_cpu_pods(cpu_pods)

    def fgd(host: Host, node: FreeNode, pod: PodKind) -> _Offer:
        if not pod.gpus and cpu_pods is not CpuPods.GPU_AWARE:
            return rank_cpu_pod(host, node, pod)
        cost, left = typical.cost(node, pod)
        return _Offer(cost, (left,))

    return fgd


def _rank_of_cpu_pods(cpu_pods: CpuPods) -> _Rank:
    def rank(host: Host, node: FreeNode, pod: PodKind) -> _Offer:
        (left,) = node.choices(pod)
        # LeastAllocated weighs CPU and memory alike.
        free = (left.cpu_milli / host.cpu_milli + left.memory_mib / host.memory_mib) / 2
        if cpu_pods is CpuPods.GPU_AWARE:
            return _Offer(sum(left.gpus) + free, (left,))
        return _Offer(free if cpu_pods is CpuPods.MOST else -free, (left,))

    return rank


# The paper's baselines. Their scores are whole numbers from 0 to 100, so that many nodes are equal: then the first by name
# is taken, as in its authors' simulator. In a node a share goes to the GPU with the least room, but under random.


def _random(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    return _Offer(0.0, node.choices(pod))


def _best_fit(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """The least left: of CPU and GPUs alike, as part of the largest node's."""
    left = node.choices(pod)[0]
    rest = (left.cpu_milli / _LARGEST_CPU_MILLI + sum(left.gpus) / (WHOLE * _LARGEST_GPUS)) / 2
    return _Offer(-int((1 - rest) * _BEST_SCORE), (left,))


def _dot_product(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """Tetris: the least product of what is asked and what is free."""
    cpu = node.cpu_milli * pod.cpu_milli / _LARGEST_CPU_MILLI**2
    gpus = sum(node.gpus) * pod.gpus * pod.parts / (WHOLE * _LARGEST_GPUS) ** 2
    return _Offer(-int((1 - (cpu + gpus) / 2) * _BEST_SCORE), node.choices(pod)[:1])


def _packing(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """GPUs in use first, those with the least room; then free ones of nodes in use, the fewest; then of free nodes."""
    left = node.choices(pod)[:1]
    whole = sum(free == WHOLE for free in node.gpus)
    if not pod.gpus:
        return _Offer(0.0, left)
    if whole == len(node.gpus):
        return _Offer(-max(_BEST_SCORE // 3 - whole, whole), left)
    used = [free for free in node.gpus if free >= pod.parts][: pod.gpus]
    # Some of the GPUs it takes are free ones on a node in use.
    if opened := sum(free == WHOLE for free in used):
        return _Offer(-max(_BEST_SCORE // 2 - opened, _BEST_SCORE // 3), left)
    return _Offer(-max(_BEST_SCORE - sum(used) // 10, _BEST_SCORE // 2), left)


_PAPERS: Mapping[InflationPolicy, _Rank] = {
    InflationPolicy.RANDOM: _random,
    InflationPolicy.BEST_FIT: _best_fit,
    InflationPolicy.DOT_PRODUCT: _dot_product,
    InflationPolicy.PACKING: _packing,
}
