"""kube-scheduler with and without the extender, and with claims: it gives a pod a node and its GPUs there, or says why not.

With the extender the nodes are filtered, scored and reserved by extender/cluster_state.py, as in a cluster. Without it
kube-scheduler uses only each node's free resources, and the node's agent may refuse the pod at its admission. The agent's
decisions plan the GPUs there too. With claims kube-scheduler allocates the GPUs itself.

As in kube-scheduler, a try examines a part of the nodes (percentageOfNodesToScore) and takes one of the best at random.
If the pod fits none of them it goes on with the next part; a real scheduler does that in the pod's next try. A node that
does not fit a pod is left out until a pod on it ends, which makes a replay of thousands of nodes quick.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.first_fit import Capacity, ClaimRequests, Device, DeviceKey, Option, Share, allocate
from gpushare_agent.core.placement.fragmentation import TypicalPods
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy
from gpushare_agent.simulation.workload import Cluster, Shape

_MAX_SHAPES = 64
_IDLE_TRIES = 8
_MIN_NODES = 100
_MIN_PERCENT, _START_PERCENT, _NODES_PER_PERCENT = 5, 50, 125
"""Numbers of kube-scheduler's rule: 50 % of the nodes, one less for every 125 of them, but 5 % and 100 nodes at least."""
_CORES, _MEMORY = "gpu/cores", "gpu/memory"


class Policy(StrEnum):
    """The policies to compare."""

    FGD = "fgd"
    BINPACK = "binpack"
    SPREAD = "spread"
    AGENT_ONLY = "agent-only"
    """No extender: kube-scheduler's sums of resources, and the agents' admission."""
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
    """One policy at work. State owned: the cluster's ledger, the nodes' free resources, the number of pods that have
    GPUs, and the candidates."""

    def __init__(self, cluster: Cluster, policy: Policy, rules: ClusterPolicy, *, chance: Random, per_try: int) -> None:
        # Who knows the GPUs can tell a full cluster from a fragmented one.
        self._knows_gpus = policy is not Policy.AGENT_ONLY
        self._resources = NodeResources(cluster.nodes, rules.names.memory_block_mib)
        self._ledger: ClusterState | FirstFit = ClusterState(policy=rules)
        self._chooser: ExtenderChooser | NodeResources | FirstFit = self._resources
        if policy is Policy.DRA:
            is_binpack = rules.share_policy == "binpack"
            self._chooser = self._ledger = FirstFit(cluster.nodes, self._resources, rules.names, is_binpack=is_binpack)
        elif self._knows_gpus:
            self._chooser = ExtenderChooser(self._ledger)
        self._nodes = {node.name: node for node in cluster.nodes}
        self._chance = chance
        self._per_try = per_try
        self._running = 0
        self._candidates: dict[Shape, Candidates] = {}
        self._candidates_by_resources: dict[Shape, Candidates] = {}
        if isinstance(self._ledger, ClusterState):
            for node in cluster.nodes:
                self._ledger.put_node(node, 0.0)

    def can_ever(self, pod: Pod, shape: Shape) -> bool:
        """Whether the scheduler would ever bind such a pod. To be asked while the cluster is empty."""
        return bool(self._chooser.choose(pod, shape, self._one_of_each_kind(shape)).fitting)

    def place(
        self, pods: Sequence[tuple[Pod, Shape]], now: float, *, is_probe: bool = False
    ) -> list[Placed] | Refused | NoNode:
        """A try: the GPUs of all pods, or an agent's refusal after the bind, or no node for one of them. Then none keeps
        any, nor does a probe."""
        # The largest first: a smaller one could take, by chance, the only node for it.
        ordered = sorted(pods, key=lambda one: (-one[1].cores, -one[1].blocks))
        found = self._place_all(ordered, now)
        # Chance may still decide, and where nothing runs nothing ends after which a gang would be tried again.
        for _ in range(_IDLE_TRIES if self._running == 0 and len(pods) > 1 else 0):
            if not isinstance(found, NoNode):
                break
            found = self._place_all(ordered, now)
        if not isinstance(found, dict):
            return found
        if is_probe:
            self._take_back(ordered, found)
        # Only now: the extender learns its typical pods from those that are bound.
        elif isinstance(self._ledger, ClusterState):
            for pod, _ in pods:
                # Binding takes no time here, nor does the watch.
                self._ledger.bound(pod.uid)
                self._ledger.put_pod(replace(pod, node_name=found[pod.uid].node), now)
        return [found[pod.uid] for pod, _ in pods]

    def _place_all(self, pods: Sequence[tuple[Pod, Shape]], now: float) -> dict[PodUid, Placed] | Refused | NoNode:
        placed: dict[PodUid, Placed] = {}
        for pod, shape in pods:
            found = self._place(pod, shape, now)
            if not isinstance(found, Placed):
                self._take_back(pods, placed)
                return found
            placed[pod.uid] = found
        return placed

    def _take_back(self, pods: Sequence[tuple[Pod, Shape]], placed: Mapping[PodUid, Placed]) -> None:
        for (_, shape), one in zip(pods, placed.values(), strict=False):
            self.end(one.pod_uid, shape, one.node)

    def _place(self, pod: Pod, shape: Shape, now: float) -> Placed | Refused | NoNode:
        candidates = self._candidates_of(self._candidates, shape)
        left = len(candidates)
        while left > 0:
            names = candidates.next(self._per_try)
            left -= len(names)
            choice = self._chooser.choose(pod, shape, names)
            # What does not fit now does not fit until something ends there, so it is not asked about again.
            candidates.retain(names, choice.fitting)
            if choice.best:
                # kube-scheduler takes one of the best at random.
                return self._bind(pod, shape, self._chance.choice(choice.best), now)
        if self._knows_gpus and self._candidates_of(self._candidates_by_resources, shape).has_any(
            lambda name: self._resources.fits(name, shape)
        ):
            return NoNode.FRAGMENTED
        return NoNode.FULL

    def gpus(self, node: str) -> Sequence[GpuAccount]:
        """The accounts of the node's GPUs now."""
        return self._ledger.gpus(node)

    def end(self, uid: PodUid, shape: Shape, node: str) -> None:
        """The pod is gone: its node is a candidate again for everybody."""
        self._running -= 1
        self._ledger.remove_pod(uid)
        self._resources.give_back(node, shape)
        self._chooser.changed(node)
        for of_shapes in (self._candidates, self._candidates_by_resources):
            for candidates in of_shapes.values():
                candidates.add(node)

    def _bind(self, pod: Pod, shape: Shape, node: str, now: float) -> Placed | Refused:
        if isinstance(self._ledger, FirstFit):
            self._ledger.take(pod.uid, shape, node)
        else:
            # The same code plans for the extender and, without one, for the node's agent: there a refusal is the
            # agent's.
            reserved = self._ledger.reserve(pod, node, now)
            if isinstance(reserved, Refused):
                return reserved
        self._running += 1
        self._resources.take(node, shape)
        self._chooser.changed(node)
        return Placed(pod.uid, node)

    def _candidates_of(self, of_shapes: dict[Shape, Candidates], shape: Shape) -> Candidates:
        candidates = of_shapes.get(shape)
        if candidates is None:
            candidates = of_shapes[shape] = Candidates(self._eligible(shape))
        return candidates

    def _one_of_each_kind(self, shape: Shape) -> list[str]:
        kinds: dict[tuple[int, ...], str] = {}
        for name in self._eligible(shape):
            # Nodes with the same GPUs are alike while they are empty: a few have to be asked about, not thousands.
            kinds.setdefault(tuple(gpu.memory_mib for gpu in self._nodes[name].gpus), name)
        return list(kinds.values())

    def _eligible(self, shape: Shape) -> list[str]:
        return [name for name, node in self._nodes.items() if not shape.models or node.model in shape.models]


class Choice(NamedTuple):
    """Those nodes to which the scheduler would bind the pod, in their order, and of them those with the best score."""

    fitting: Sequence[str]
    best: Sequence[str]


class Candidates:
    """The nodes that may fit pods of one shape: each try begins after the nodes of the last one, as in kube-scheduler, and
    after the last of them comes the first.

    State owned: their names, in order and as a set, and how many of them are behind the last try.
    """

    def __init__(self, eligible: Iterable[str]) -> None:
        self._eligible = frozenset(eligible)
        self._names = sorted(self._eligible)
        self._members = set(self._eligible)
        self._passed = 0

    def __len__(self) -> int:
        return len(self._names)

    def next(self, count: int) -> list[str]:
        """The next nodes, fewer only where there are fewer. `retain` has to follow before anything else."""
        # Turned, so that the nodes behind the end come first again.
        if self._passed + count > len(self._names):
            self._names = self._names[self._passed :] + self._names[: self._passed]
            self._passed = 0
        return self._names[self._passed : self._passed + count]

    def retain(self, examined: Sequence[str], fitting: Sequence[str]) -> None:
        """Leaves out those of the nodes that `next` gave which do not fit."""
        if len(fitting) != len(examined):
            still_fitting = set(fitting)
            self._members.difference_update([name for name in examined if name not in still_fitting])
            self._names[self._passed : self._passed + len(examined)] = fitting
        self._passed += len(fitting)

    def add(self, name: str) -> None:
        """A pod on the node has ended: others may fit again."""
        # At the end: it comes when the others had their turn.
        if name not in self._members and name in self._eligible:
            self._members.add(name)
            self._names.append(name)

    def has_any(self, is_fit: Callable[[str], bool]) -> bool:
        """Whether a node fits. Those found not to are left out from now on."""
        first = next((position for position, name in enumerate(self._names) if is_fit(name)), len(self._names))
        self._members.difference_update(self._names[:first])
        # Those before the first that fits do not fit, and need not be looked at again.
        del self._names[:first]
        return bool(self._names)


class NodeResources:
    """kube-scheduler's own arithmetic: it adds up a node's cores and memory blocks, and does not consider GPUs.

    It counts what pods ask for. A whole GPU without a request for memory takes no blocks here, though nobody else
    gets any of that GPU, as in a cluster. kube-scheduler's defaults score CPU and main memory, which are not
    simulated. They grow with the number of pods, as these resources do, so these stand for them.
    State owned: the free cores and blocks of every node, and what part of its own that is.
    """

    def __init__(self, nodes: Iterable[ClusterNode], block_mib: int) -> None:
        self._total = {
            node.name: (
                CORES_PER_GPU * len(node.gpus),
                sum(gpu.memory_mib // block_mib for gpu in node.gpus),
            )
            for node in nodes
        }
        self._cores = {name: cores for name, (cores, _) in self._total.items()}
        self._blocks = {name: blocks for name, (_, blocks) in self._total.items()}
        self._free_part = dict.fromkeys(self._total, 1.0)

    def fits(self, name: str, shape: Shape) -> bool:
        return self._cores[name] >= shape.cores and self._blocks[name] >= shape.blocks

    def choose(self, _pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        free_cores, free_blocks, (cores, blocks, _) = self._cores, self._blocks, shape
        return self.best_of([name for name in names if free_cores[name] >= cores and free_blocks[name] >= blocks])

    def best_of(self, fitting: Sequence[str]) -> Choice:
        """The best of them by the mean free part of both resources: what kube-scheduler's LeastAllocated prefers."""
        return Choice(fitting, _highest(fitting, [self._free_part[name] for name in fitting]))

    def changed(self, name: str) -> None:
        """Nothing is remembered from one choice to the next."""

    def take(self, name: str, shape: Shape) -> None:
        self._add(name, -shape.cores, -shape.blocks)

    def give_back(self, name: str, shape: Shape) -> None:
        self._add(name, shape.cores, shape.blocks)

    def _add(self, name: str, cores: int, blocks: int) -> None:
        self._cores[name] += cores
        self._blocks[name] += blocks
        all_cores, all_blocks = self._total[name]
        self._free_part[name] = (self._cores[name] / all_cores + self._blocks[name] / all_blocks) / 2


class ExtenderChooser:
    """Asks the extender's filter and costs, and once more only where the node, or under fgd the typical pods, have changed
    since: neither depends on anything else. State owned: the costs of fitting nodes, by shape."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._costs: OrderedDict[Shape, dict[str, float]] = OrderedDict()
        self._typical: TypicalPods | None = None

    def choose(self, pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        if (typical := self._state.renew_typical()) is not self._typical:
            self._typical = typical
            self._costs.clear()
        known = self._costs_of(shape)
        costs = list(map(known.get, names))
        # Filter is asked about the unknown ones alone.
        if None in costs:
            unknown = [position for position, cost in enumerate(costs) if cost is None]
            fitting = self._state.filter(pod, [names[position] for position in unknown]).fitting
            found = zip(fitting, self._state.costs(pod, fitting), strict=True)
            known.update((name, -cost) for name, cost in found if cost is not None)
            for position in unknown:
                costs[position] = known.get(names[position])
        # The usual case of a large cluster, where every candidate fits: no list has to be made.
        if None not in costs:
            return Choice(names, _highest(names, costs))
        fitting = [name for name, cost in zip(names, costs, strict=True) if cost is not None]
        return Choice(fitting, _highest(fitting, [cost for cost in costs if cost is not None]))

    def changed(self, name: str) -> None:
        """Something was bound to the node, or ended there."""
        for costs in self._costs.values():
            costs.pop(name, None)

    def _costs_of(self, shape: Shape) -> dict[str, float]:
        costs = self._costs.get(shape)
        if costs is None:
            costs = self._costs[shape] = {}
            if len(self._costs) > _MAX_SHAPES:
                self._costs.popitem(last=False)
        self._costs.move_to_end(shape)
        return costs


class FirstFit:
    """Dynamic Resource Allocation: kube-scheduler allocates GPUs to the pods' claims, first fit in the order of the slices.

    A share is a claim with cores and memory, whole GPUs are a claim with a count. The agent orders the slice by `dra.order`;
    here that takes no time. The nodes where a claim fits are scored as without an extender, because claims have no score of
    their own. State owned: what the pods' claims have, and which nodes a shape fits, until something on them
    changes.
    """

    def __init__(
        self, nodes: Sequence[ClusterNode], resources: NodeResources, names: ResourceNames, *, is_binpack: bool
    ) -> None:
        self._resources = resources
        self._names = names
        self._sign = -1 if is_binpack else 1
        self._nodes = {node.name: node for node in nodes}
        self._devices = {node.name: [self._device(node, index) for index in range(len(node.gpus))] for node in nodes}
        self._used: dict[str, dict[DeviceKey, dict[str, int]]] = {node.name: {} for node in nodes}
        self._claims: dict[PodUid, tuple[str, list[Share]]] = {}
        self._fits: dict[Shape, dict[str, bool]] = {}

    def choose(self, _pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        known = self._fits.setdefault(shape, {})
        for name in names:
            if name not in known:
                known[name] = self._allocated(name, shape) is not None
        return self._resources.best_of([name for name in names if known[name]])

    def changed(self, name: str) -> None:
        for known in self._fits.values():
            known.pop(name, None)

    def take(self, uid: PodUid, shape: Shape, name: str) -> None:
        """Allocates the pod's claim on one of the nodes that were chosen."""
        shares = self._allocated(name, shape)
        if shares is None:
            raise AssertionError(f"{shape} does not fit {name} any more")
        self._claims[uid] = name, shares
        self._add(name, shares, 1)

    def remove_pod(self, uid: PodUid) -> None:
        self._add(*self._claims.pop(uid), -1)

    def gpus(self, name: str) -> Sequence[GpuAccount]:
        used = self._used[name]
        return [
            account_of(gpu, self._names, Charge(cores=consumed.get(_CORES, 0), blocks=consumed.get(_MEMORY, 0)))
            for gpu, device in zip(self._nodes[name].gpus, self._devices[name], strict=True)
            for consumed in (used.get(device.key, {}),)
        ]

    def _allocated(self, name: str, shape: Shape) -> list[Share] | None:
        used = self._used[name]
        # The agent orders its slice by what is allocated, and the allocator takes the first that fits.
        ordered = sorted(self._devices[name], key=lambda device: self._sign * used.get(device.key, {}).get(_CORES, 0))
        found = allocate([_requests_of(shape)], ordered, used)
        return None if found is None else found[0]

    def _add(self, name: str, shares: Sequence[Share], sign: int) -> None:
        for share in shares:
            device = self._used[name].setdefault(share.device.key, dict.fromkeys(share.consumed, 0))
            for capacity, amount in share.consumed.items():
                device[capacity] += sign * amount

    def _device(self, node: ClusterNode, index: int) -> Device:
        blocks = node.gpus[index].memory_mib // self._names.memory_block_mib
        return Device(
            key=("gpu", node.name, f"gpu-{index}"),
            capacity={
                _CORES: Capacity(value=CORES_PER_GPU, default=CORES_PER_GPU, steps=(0, CORES_PER_GPU, 1)),
                _MEMORY: Capacity(value=blocks, default=blocks, steps=(1, blocks, 1)),
            },
        )


def _requests_of(shape: Shape) -> ClaimRequests:
    """Whole GPUs have together the memory that is asked for, if each has its part."""
    # A share names its cores and memory; whole GPUs are a count with the least memory of each.
    if shape.cores % CORES_PER_GPU:
        option = Option(name="gpu", asked={_CORES: shape.cores, _MEMORY: shape.blocks})
    else:
        least = -(-shape.blocks // shape.whole_gpus)
        option = Option(
            name="gpu", count=shape.whole_gpus, selects=lambda device: device.capacity[_MEMORY].value >= least
        )
    return ClaimRequests(requests=((option,),))


def _highest(names: Sequence[str], scores: Sequence[float | None]) -> list[str]:
    """No score is None."""
    top = max(scores, default=None)  # type: ignore[type-var]  # see above
    if top is not None and scores.count(top) == 1:  # quicker, and the usual case of free parts
        return [names[scores.index(top)]]
    return [name for name, score in zip(names, scores, strict=True) if score == top]
