"""The experiment of "Beware of Fragmentation" (USENIX ATC'23) on Alibaba's public trace: how much of a cluster's GPUs can
be allocated while more and more is asked for.

The trace's pods in random order, then more drawn from them, until 130 % of the GPUs have been asked for. Pods come one after
the other, none ends, none is tried again; nodes have CPU and main memory. Measured is what part of all GPUs is allocated
whenever so many percent have been asked for. The policies of the paper (random, dot-product, packing, best-fit) are here to
hold the simulation against what its authors published; fgd, binpack and spread are decided by the extender's code
(extender/cluster_state.py), which learns the typical pods of fgd from those that come; fgd-of-trace knows the trace's, as in
the paper; dra is kube-scheduler's rules. State owned: during a run what the nodes have left.

The first of equal nodes is taken, and that decides much: packing's figures go from 90.9 to 92.5 % by the order of the nodes
alone. The published runs are of nodes under names that are not in the trace, so each seed has an order of its own here.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.model.pods import HostRequest, Pod
from gpushare_agent.core.placement.fragmentation import WHOLE, FreeNode, KindCosts, PodKind, TypicalPods
from gpushare_agent.core.placement.free_gpus import FreeGpus, has_taint
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterPolicy, NodePolicy
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
    DRA = "dra"
    """Claims: kube-scheduler chooses every pod's node by `CpuPods`, and there the first GPU that fits; the fullest is first
    in the slice."""
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
    TAINT = "taint"
    """As LEAST, among the nodes without the taint of free GPUs as long as there are any."""
    GPU_AWARE = "gpu-aware"
    """Under fgd-of-trace as it places all others, else the fewest free GPUs."""


class CpuRule(Struct, frozen=True):
    """`taint_above` is facts.taint_above, for CpuPods.TAINT."""

    pods: CpuPods
    taint_above: float = 1.0


class Host(NamedTuple):
    """A node of the trace, empty: its CPU, main memory, model and number of GPUs."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


_MILLI_PER_PART = 10


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The trace's nodes that have GPUs, by name."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    hosts = (
        Host(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"]) for row in rows
    )
    return tuple(sorted(host for host in hosts if host.gpus))


def read_kinds(path: Path) -> tuple[PodKind, ...]:
    """All pods of the trace, those without GPUs too."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(_kind, csv.DictReader(file)))


def _kind(row: Mapping[str, str]) -> PodKind:
    gpus = int(row["num_gpu"])
    # Thousandths in the trace, hundredths here: rounded up, so that a pod has at least what it had there.
    parts = -(-int(row["gpu_milli"]) // _MILLI_PER_PART) if gpus else 0
    return PodKind(
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
        gpus=gpus,
        parts=WHOLE if gpus > 1 else parts,
        models=tuple(sorted({model for model in row["gpu_spec"].split("|") if model})),
    )


class Inflated(Struct, frozen=True, kw_only=True):
    """One policy's result: percent of all GPUs that were allocated when so many percent, from 1 on, had been asked for."""

    policy: InflationPolicy
    seed: int
    allocated_percent: Mapping[int, float]


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
    cpu_pods: CpuRule,
    rules: ClusterPolicy,
) -> Inflated:
    """One run. The same for the same arguments."""
    chance = Random(seed)
    all_parts = WHOLE * sum(host.gpus for host in hosts)
    # Drawn before the policy is at work: with one seed every policy sees the same pods in the same order.
    queue = shuffled_pods(pods, all_parts, chance)
    hosts = list(hosts)
    Random(f"{seed}/nodes").shuffle(hosts)
    rank_cpu_pod = _kube_scheduler(cpu_pods)
    cluster: _RankedCluster | _ExtendersCluster
    if policy in _EXTENDERS:
        cluster = _ExtendersCluster(hosts, replace(rules, node_policy=_EXTENDERS[policy]), rank_cpu_pod)
    else:
        if policy is InflationPolicy.FGD_OF_TRACE:
            rank = _fgd(hosts, pods, None if cpu_pods.pods is CpuPods.GPU_AWARE else rank_cpu_pod)
        else:
            rank = _PAPERS.get(policy, rank_cpu_pod)
        cluster = _RankedCluster(hosts, rank, chance, is_random=policy is InflationPolicy.RANDOM)
    asked = allocated = 0
    percents: dict[int, float] = {}
    for pod in queue:
        asked += pod.gpus * pod.parts
        allocated += pod.gpus * pod.parts if cluster.place(pod) else 0
        # A pod of eight GPUs may pass several percent at once: each gets the state after it.
        while 100 * asked >= (len(percents) + 1) * all_parts:
            percents[len(percents) + 1] = round(100 * allocated / all_parts, 2)
    # The next pod drawn would pass the end, so the last percents are not reached.
    last = round(100 * allocated / all_parts, 2)
    percents |= dict.fromkeys(range(len(percents) + 1, MARKS[-1] + 1), last)
    return Inflated(policy=policy, seed=seed, allocated_percent=percents)


def shuffled_pods(pods: Sequence[PodKind], all_parts: int, chance: Random) -> list[PodKind]:
    """Those that come to a cluster of so many parts of GPUs, in their order."""
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
        if not fits(node, pod):
            return None
        # Hosts of one size in one state rank alike; their names do not matter.
        key = host.cpu_milli, host.memory_mib, node, pod
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._rank(host, node, pod)
        return known


class _Known(NamedTuple):
    """The costs of a kind of pod by node, with the first `seen` changes and these typical pods."""

    costs: dict[str, float]
    seen: int
    typical: TypicalPods | None


class _ExtendersCluster:
    """The extender filters, scores and reserves; whether CPU and main memory suffice is decided here, as by kube-scheduler,
    and so is where pods without GPUs go. Each GPU has as many memory blocks as cores, and pods ask for as many, for the
    trace says nothing of memory."""

    def __init__(self, hosts: Sequence[Host], rules: ClusterPolicy, rank_cpu_pod: _Rank) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._nodes = {host.name: _empty(host) for host in hosts}
        self._rank_cpu_pod = rank_cpu_pod
        self._known: dict[PodKind, _Known] = {}
        self._changes: list[str] = []
        self._state = ClusterState(policy=rules)
        self._make = PodMaker(rules.names).pod
        self._placed = 0
        memory_mib = CORES_PER_GPU * rules.names.memory_block_mib
        for host in hosts:
            machine = Machine(model=host.model, gpus=host.gpus, memory_mib=memory_mib)
            node = replace(machine.node(host.name), cpu_milli=host.cpu_milli, memory_mib=host.memory_mib)
            self._state.put_node(node, 0.0)

    def place(self, pod: PodKind) -> bool:
        request = HostRequest(pod.cpu_milli, pod.memory_mib, pod.models)
        self._placed += 1
        uid = PodUid(f"pod-{self._placed}")
        cores = pod.gpus * pod.parts
        # A whole GPU has all its memory anyhow.
        made = replace(self._make(uid, Shape(cores, cores if pod.is_share else 0)), host_request=request)
        if not (costs := self._costs(pod, made)):
            return False
        # The first of equals, as in the authors' simulator; kube-scheduler takes any.
        name = min(costs, key=costs.__getitem__)
        gpus = self._nodes[name].gpus
        if not pod.gpus:
            self._state.put_other_pod(uid, name, request)
        else:
            if isinstance(self._state.reserve(made, name, 0.0), Refused):
                return False
            # Binding takes no time here, nor does the watch.
            self._state.bound(uid)
            self._state.put_pod(replace(made, node_name=name), 0.0)
            gpus = tuple(sorted(gpu.free_cores for gpu in self._state.gpus(name)))
        before = self._nodes[name]
        self._changes.append(name)
        self._nodes[name] = FreeNode(
            before.cpu_milli - pod.cpu_milli, before.memory_mib - pod.memory_mib, gpus, before.model
        )
        return True

    def _costs(self, pod: PodKind, made: Pod) -> dict[str, float]:
        """What it costs on each node that it fits, in their order: the extender's scores are the ranks of these."""
        typical = self._state.typical if pod.gpus else None
        known = self._known.get(pod)
        costs = known.costs if known is not None else dict.fromkeys(self._nodes, 0.0)
        # No pod ends, so what does not fit never will. A cost changes where a pod was placed since; under fgd all of them do
        # with the typical pods.
        is_new = known is None or known.typical is not typical
        asked = (
            list(costs)
            if is_new or known is None
            else [one for one in set(self._changes[known.seen :]) if one in costs]
        )
        fitting = [name for name in asked if fits(self._nodes[name], pod)]
        found: Iterable[float | None] = (
            self._rank_cpu_pod(self._hosts[one], self._nodes[one], pod).rank for one in fitting
        )
        of_nodes = dict(zip(fitting, self._state.costs(made, fitting) if pod.gpus else found, strict=True))
        for name in asked:
            cost = of_nodes.get(name)
            if cost is None:
                del costs[name]
            else:
                costs[name] = cost
        self._known[pod] = _Known(costs, len(self._changes), typical)
        return costs


def fits(node: FreeNode, kind: PodKind) -> bool:
    if node.cpu_milli < kind.cpu_milli or node.memory_mib < kind.memory_mib:
        return False
    if not kind.gpus:
        return True
    if kind.models and node.model not in kind.models:
        return False
    return kind.gpus <= len(node.gpus) and node.gpus[-kind.gpus] >= kind.parts_of(node.gpu_mib)


def choices(node: FreeNode, kind: PodKind) -> list[FreeNode]:
    """What the node would have left, for each GPU that makes a difference, the fullest first; whole GPUs are alike. The kind
    must fit."""
    if not kind.is_share:
        return [node.left(kind)]
    fitting = range(bisect_left(node.gpus, kind.parts_of(node.gpu_mib)), len(node.gpus))
    # GPUs that have as much free give the same node: one of them is enough.
    return [node.left_on(kind, at) for at in fitting if at == fitting[0] or node.gpus[at] != node.gpus[at - 1]]


def _empty(host: Host) -> FreeNode:
    return FreeNode(host.cpu_milli, host.memory_mib, (WHOLE,) * host.gpus, host.model)


def _fgd(hosts: Sequence[Host], pods: Sequence[PodKind], rank_cpu_pod: _Rank | None) -> _Rank:
    """Pods without GPUs as `rank_cpu_pod` says, where it is given."""
    supply = Counter[str]()
    for host in hosts:
        supply[host.model] += host.gpus
    typical = TypicalPods(Counter(pods), supply)

    def rank(host: Host, node: FreeNode, pod: PodKind) -> _Offer:
        if not pod.gpus and rank_cpu_pod is not None:
            return rank_cpu_pod(host, node, pod)
        cost, left = KindCosts(typical, pod).of(node), node.left(pod)
        return _Offer(cost, (left,))

    return rank


def _kube_scheduler(rule: CpuRule) -> _Rank:
    def rank(host: Host, node: FreeNode, pod: PodKind) -> _Offer:
        left = node.left(pod)
        # LeastAllocated weighs CPU and memory alike.
        free = (left.cpu_milli / host.cpu_milli + left.memory_mib / host.memory_mib) / 2
        if rule.pods is CpuPods.GPU_AWARE:
            return _Offer(sum(left.gpus) + free, (left,))
        if rule.pods is CpuPods.MOST:
            return _Offer(free, (left,))
        is_tainted = rule.pods is CpuPods.TAINT and _is_tainted(host, node, rule.taint_above)
        # TaintToleration weighs 3, more than the two scores that the free CPU and memory have together.
        return _Offer(is_tainted - free, (left,))

    return rank


def _is_tainted(host: Host, node: FreeNode, taint_above: float) -> bool:
    free = FreeGpus(part=sum(node.gpus) / (WHOLE * host.gpus), taint_above=taint_above)
    # No pod ends: each node begins with all GPUs free, with the taint, and keeps it until they are used.
    return has_taint(free, is_there=taint_above < 1)


# The paper's baselines. Their scores are whole numbers from 0 to 100, so that many nodes are equal: then the first
# is taken, as in its authors' simulator. In a node a share goes to the GPU with the least room, but under random.


def _random(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    return _Offer(0.0, choices(node, pod))


def _best_fit(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """The least left: of CPU and GPUs alike, as part of the largest node's."""
    left = choices(node, pod)[0]
    rest = (left.cpu_milli / _LARGEST_CPU_MILLI + sum(left.gpus) / (WHOLE * _LARGEST_GPUS)) / 2
    return _Offer(-int((1 - rest) * _BEST_SCORE), (left,))


def _dot_product(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """Tetris: the least product of what is asked and what is free."""
    cpu = node.cpu_milli * pod.cpu_milli / _LARGEST_CPU_MILLI**2
    gpus = sum(node.gpus) * pod.gpus * pod.parts / (WHOLE * _LARGEST_GPUS) ** 2
    return _Offer(-int((1 - (cpu + gpus) / 2) * _BEST_SCORE), choices(node, pod)[:1])


def _packing(_: Host, node: FreeNode, pod: PodKind) -> _Offer:
    """GPUs in use first, those with the least room; then free ones of nodes in use, the fewest; then of free nodes."""
    left = choices(node, pod)[:1]
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
