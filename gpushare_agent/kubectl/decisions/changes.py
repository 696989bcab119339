"""The smallest changes that would let a waiting pod start now, over all nodes of a cluster: at most one of each kind. Pure.

Every change was tried: the changed pod, node or quota is given to `plan_pod` as the extender does, on a node that
kube-scheduler refuses for no reason that is read here (`hindrance`). Bounded: a pod with one container that asks for GPUs is
compared with each node's summary, in microseconds; for other pods `MAX_PLANS` limits the plans of each kind, and
`Waiting.tried` counts the nodes for which they were made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import IntEnum
from itertools import combinations
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.model.pods import ContainerSpec, Pod
from gpushare_agent.core.model.resources import Request, request_of
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import capacity_of, memory_text
from gpushare_agent.extender.decisions.pod_plan import plan_pod, signature_of
from gpushare_agent.extender.decisions.quota import NamespaceQuota
from gpushare_agent.extender.values import NodeKind, PodPlan, Stage
from gpushare_agent.kubectl.decisions.cluster_view import (
    ClusterView,
    Hindrance,
    NodeView,
    hindrance,
    may_fit,
    over_quota,
)

MAX_PLANS = 4_000
"""Plans of pods with several containers, for each kind of change; each takes about 0.1 ms a container."""
MAX_COMBINED = 16
"""The smallest set is searched among so many pods of one GPU; of more pods the largest come first."""
_MOST_ENDING = 3


class Kind(IntEnum):
    """Sorted by who has to act: the pod's owner first, then the cluster's operator, then the owners of other pods."""

    CORES = 1
    MEMORY = 2
    CORES_AND_MEMORY = 3
    NODES = 4
    UNCORDON = 5
    QUOTA = 6
    END = 7


class Change(Struct, frozen=True, kw_only=True):
    """One change, where the pod would start then (`gpus` by index), and `cost`, by which changes of one rank are sorted:
    the part of the request that is given up, else the number of things that change."""

    kind: Kind
    text: str
    node: str
    gpus: tuple[int, ...]
    cost: float
    container: str = ""
    request: Request | None = None
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """The node's values of the labels that the pod excludes; None: it has none."""
    uncordoned: tuple[int, ...] = ()
    """GPUs; none where the node itself is cordoned."""
    quota: NamespaceQuota | None = None
    ending: tuple[PodUid, ...] = ()

    @property
    def rank(self) -> tuple[int, float, int]:
        # The pod's request is one thing to change, whichever part of it.
        return max(self.kind, Kind.CORES_AND_MEMORY), self.cost, self.kind


class Waiting(Struct, frozen=True, kw_only=True):
    """`fitting` are the nodes where the pod fits as it is. `others` counts the nodes with room on their GPUs that
    kube-scheduler refuses for other reasons. `tried` of the nodes were compared for every change."""

    nodes: int
    fitting: tuple[str, ...]
    gpus: tuple[int, ...]
    """Where it would go on the first node."""
    changes: tuple[Change, ...]
    others: Mapping[str, int]
    tried: int


class _Search(Struct, kw_only=True):
    """One pod on all nodes; lives for one question."""

    view: ClusterView
    pod: Pod
    open: list[NodeView] = field(default_factory=list)
    """Nodes that kube-scheduler refuses for nothing but GPUs."""
    hindered: list[tuple[NodeView, Hindrance]] = field(default_factory=list)
    tried: int = 0
    plans: int = 0

    def fits(self, pod: Pod, node: NodeView) -> bool:
        """Answers by the summary where one container asks; nodes that are named at the end are planned once more."""
        policy = self.view.policy
        if not may_fit(pod, node.ledger.capacity, policy):
            return False
        if len(signature_of(pod, policy.names)) > 1 and not self.gpus_for(pod, node):
            return False
        return not over_quota(self.view, pod, node)

    def gpus_for(self, pod: Pod, node: NodeView, gpus: Sequence[GpuAccount] | None = None) -> tuple[int, ...]:
        """The GPUs that the pod would have there, by index, only from `gpus` where they are given; none where it does not
        fit."""
        capacity = node.ledger.capacity if gpus is None else capacity_of(gpus)
        if not may_fit(pod, capacity, self.view.policy):
            return ()
        self.plans += 1
        gpus = node.ledger.gpus if gpus is None else gpus
        plan = plan_pod(pod, gpus, node.ledger.node.topology, self.view.policy)
        if not isinstance(plan, PodPlan):
            return ()
        return tuple(sorted({gpu for container in plan.containers for gpu in container.gpus}))

    def within_bounds(self, nodes: Sequence[NodeView]) -> Iterator[NodeView]:
        """Yields the nodes, until too many plans were made."""
        self.plans = 0
        for number, node in enumerate(nodes):
            if self.plans >= MAX_PLANS:
                self.tried = min(self.tried, number)
                return
            yield node


def waiting(view: ClusterView, pod: Pod) -> Waiting:
    """`pod` waits, is in the view, and asks for GPUs."""
    needs = view.pods[pod.uid].needs
    search = _Search(view=view, pod=pod, tried=len(view.nodes))
    for node in view.nodes:
        against = hindrance(needs, node.offer, node.used)
        if against:
            search.hindered.append((node, against))
        else:
            search.open.append(node)
    fitting = [node for node in search.within_bounds(search.open) if search.fits(pod, node)]
    others: Counter[str] = Counter()
    for node, against in search.hindered:
        if search.plans < MAX_PLANS and search.fits(pod, node):
            others.update(against.words)
    return Waiting(
        nodes=len(view.nodes),
        fitting=tuple(node.name for node in fitting),
        gpus=search.gpus_for(pod, fitting[0]) if fitting else (),
        changes=() if fitting else tuple(sorted(_changes(search), key=lambda change: change.rank)),
        others=dict(others.most_common()),
        tried=search.tried,
    )


def _changes(search: _Search) -> Iterator[Change]:
    found = [change for kind in (Kind.CORES, Kind.MEMORY) if (change := _less(search, kind)) is not None]
    if not found and (both := _less_of_both(search)) is not None:
        found = [both]
    yield from found
    for decide in (_other_nodes, _uncordon, _quota, _ends):
        if (change := decide(search)) is not None:
            yield change


def _change(
    kind: Kind, text: str, node: NodeView, gpus: tuple[int, ...], cost: float, more: str = "", **what: Any
) -> Change:
    """`text` is followed by the GPUs that the pod has then."""
    where = f"{gpus_text(node, gpus)}{more}"
    return Change(kind=kind, text=f"{text}: {where}", node=node.name, gpus=gpus, cost=cost, **what)


def gpus_text(node: NodeView, gpus: Iterable[int]) -> str:
    """GPUs of a node as people name them, by index or as MIG instances."""
    by_index = {gpu.index: gpu.label for gpu in node.ledger.gpus}
    names = [by_index[index] for index in gpus]
    return f"GPU{'' if len(names) == 1 else 's'} {', '.join(names)} of {node.name}"


# --- the pod asks for less ---


def _less(search: _Search, kind: Kind) -> Change | None:
    """The most that one container can have of cores, or of memory, with the rest as it is."""
    found = (_largest(search, container, kind) for container in search.pod.containers)
    return min((one for one in found if one is not None), key=lambda change: change.cost, default=None)


def _smaller(asked: Request, kind: Kind) -> list[Request]:
    """Ascending. Fewer cores are fewer whole GPUs, or a share of one GPU where there is memory for it."""
    if kind is Kind.MEMORY and asked.units:
        return [asked._replace(units=count) for count in range(1, asked.units)]
    if kind is Kind.MEMORY:
        return [asked._replace(blocks=count) for count in range(1, asked.blocks)]
    if asked.cores > CORES_PER_GPU:
        return [asked._replace(cores=count) for count in range(CORES_PER_GPU, asked.cores, CORES_PER_GPU)]
    return [asked._replace(cores=count) for count in range(1, asked.cores)] if asked.blocks else []


def _largest(search: _Search, container: ContainerSpec, kind: Kind) -> Change | None:
    """Each node is asked first whether it can do better than the best so far."""
    asked = request_of(container, search.view.policy.names)
    requests, trials = _smaller(asked, kind), dict[int, Pod]()
    low, chosen = 0, None

    def fits(place: int) -> bool:
        if place not in trials:
            trials[place] = _with(search, container, requests[place])
        return search.fits(trials[place], node)

    for node in search.within_bounds(search.open) if requests else ():
        if low == len(requests):
            break
        place = None
        if kind is Kind.CORES and asked.cores > CORES_PER_GPU:
            # Fewer GPUs may have too little memory together, so not all that is below fits.
            place = next((one for one in range(len(requests) - 1, low - 1, -1) if fits(one)), None)
        elif fits(low):
            # The last that fits: what is below it does.
            place = low + bisect_left(range(low + 1, len(requests)), True, key=lambda one: not fits(one))
        if place is not None:
            low, chosen = place + 1, node
    return _asking(search, chosen, container, asked, requests[low - 1], kind) if chosen is not None else None


def _less_of_both(search: _Search) -> Change | None:
    """Fewer cores and less memory, of the pod's only container that asks for GPUs; also a share instead of a whole GPU."""
    asking = [one for one in search.pod.containers if request_of(one, search.view.policy.names) != Request()]
    if len(asking) != 1:
        return None
    asked = request_of(asking[0], search.view.policy.names)
    if asked.units or not 0 < asked.cores <= CORES_PER_GPU:
        return None
    found: dict[tuple[Request, str, str], NodeView] = {}
    for node in search.open:
        where = node.ledger.node
        for gpu in node.ledger.gpus:
            # A GPU that can be given whole is all free, and then cores or memory alone would have sufficed.
            cores, blocks, _ = gpu.free
            request = Request(cores=min(cores, asked.cores), blocks=min(blocks, asked.blocks or blocks))
            key = request, where.model, where.pool
            if gpu.is_healthy and 0 < request.cores < CORES_PER_GPU and request.blocks and key not in found:
                found[key] = node
    ordered = sorted((_given_up(asked, one[0]), -one[0].blocks, node.name, one[0]) for one, node in found.items())
    nodes = {node.name: node for node in found.values()}
    for _, _, name, request in ordered:
        if search.fits(_with(search, asking[0], request), nodes[name]):
            return _asking(search, nodes[name], asking[0], asked, request, Kind.CORES_AND_MEMORY)
    return None


def _given_up(asked: Request, request: Request) -> float:
    """The parts of its cores and of its memory."""
    return sum(1 - now / before for now, before in zip(request[:3], asked[:3], strict=True) if before)


def _with(search: _Search, container: ContainerSpec, request: Request) -> Pod:
    """The pod whose container asks for that."""
    names = search.view.policy.names
    counts = {names.vcore: request.cores, names.vmemory: request.blocks}
    if names.gpu_mem:
        counts[names.gpu_mem] = request.units
    changed = replace(container, requests={name: count for name, count in counts.items() if count})
    return replace(search.pod, containers=tuple(changed if one is container else one for one in search.pod.containers))


def _asking(
    search: _Search, node: NodeView, container: ContainerSpec, asked: Request, request: Request, kind: Kind
) -> Change | None:
    gpus = search.gpus_for(_with(search, container, request), node)
    if not gpus:
        return None
    names, less = search.view.policy.names, []
    if request.cores != asked.cores:
        less.append(f"{request.cores} cores ({asked.cores - request.cores} fewer)")
    for count, before, size_mib, unit in (
        (request.blocks, asked.blocks, names.memory_block_mib, "memory blocks"),
        (request.units, asked.units, names.gpu_mem_unit_mib, "units"),
    ):
        if count != before:
            size, fewer = memory_text(count * size_mib), memory_text((before - count) * size_mib)
            less.append(f"{count} {unit} ({size}{f', {fewer} less' if before else ''})")
    name = f"container {container.name}: " if len(search.pod.containers) > 1 else ""
    text = f"{name}ask for {' and '.join(less)}"
    cost = _given_up(asked, request)
    return _change(kind, text, node, gpus, cost, container=container.name, request=request)


# --- other nodes, cordons, the quota ---


def _other_nodes(search: _Search) -> Change | None:
    """Nodes that the pod's selector or affinity excludes: the fewest labels, then the most nodes."""
    groups: dict[tuple[tuple[str, str | None], ...], list[NodeView]] = {}
    excluded = {node.name: against for node, against in search.hindered if against.labels and not against.is_cordoned}
    nodes = [node for node, against in search.hindered if node.name in excluded and not against.others]
    for node in search.within_bounds(nodes):
        if search.fits(search.pod, node):
            labels = {**node.offer.labels, "metadata.name": node.name}
            groups.setdefault(tuple((key, labels.get(key)) for key in excluded[node.name].labels), []).append(node)
    for changed, found in sorted(groups.items(), key=lambda one: (len(one[0]), -len(one[1]), one[1][0].name)):
        if gpus := search.gpus_for(search.pod, found[0]):
            words = [
                f"nodes with {key}={value}" if value is not None else f"nodes without {key}" for key, value in changed
            ]
            text = f"let its selector or affinity allow {' and '.join(words)}"
            more = f" and {len(found) - 1} more nodes" if len(found) > 1 else ""
            return _change(Kind.NODES, text, found[0], gpus, len(changed), more, labels=dict(changed))
    return None


def _uncordon(search: _Search) -> Change | None:
    """One GPU where that suffices, else one node, else all cordoned GPUs of a node."""
    best: Change | None = None
    for node in search.within_bounds(search.open):
        for indexes in _to_uncordon(node):
            if best is not None and best.cost <= len(indexes):
                break
            gpus = [replace(gpu, is_healthy=True) if gpu.index in indexes else gpu for gpu in node.ledger.gpus]
            found = search.gpus_for(search.pod, node, gpus)
            if found and not over_quota(search.view, search.pod, node):
                best = Change(
                    kind=Kind.UNCORDON,
                    text=f"uncordon {gpus_text(node, indexes)} (`gpushare-agent uncordon` there)",
                    node=node.name,
                    gpus=found,
                    cost=len(indexes),
                    uncordoned=indexes,
                )
                break
    # A node is one thing, too; with it all its GPUs come back, so one GPU is preferred.
    if best is not None and best.cost == 1:
        return best
    cordoned = [
        node for node, against in search.hindered if against.is_cordoned and not (against.labels or against.others)
    ]
    for node in search.within_bounds(cordoned):
        if search.fits(search.pod, node) and (found := search.gpus_for(search.pod, node)):
            return _change(Kind.UNCORDON, f"kubectl uncordon {node.name}", node, found, 1)
    return best


def _to_uncordon(node: NodeView) -> list[tuple[int, ...]]:
    each: list[tuple[int, ...]] = [(index,) for index in sorted(node.uncordonable)]
    return [*each, tuple(sorted(node.uncordonable))] if len(each) > 1 else each


def _quota(search: _Search) -> Change | None:
    """The quota of the pod's namespace for the kind of nodes where the fewest of its numbers have to change."""
    best: Change | None = None
    seen: set[NodeKind] = set()
    for node in search.within_bounds(search.open):
        where = node.ledger.node
        if where.kind in seen or not over_quota(search.view, search.pod, node):
            continue
        gpus = search.gpus_for(search.pod, node)
        if not gpus:
            continue
        seen.add(where.kind)
        raised = search.view.quotas.raised(search.pod, model=where.model, pool=where.pool)
        if raised is not None and raised[1] and (best is None or len(raised[1]) < best.cost):
            text = f"the quota of namespace {search.pod.namespace}: {', '.join(raised[1])}"
            best = _change(Kind.QUOTA, text, node, gpus, len(raised[1]), quota=raised[0])
    return best


# --- other pods end ---


class _Freed(Struct, frozen=True, order=True):
    """Pods whose end gives the GPUs, as far as sums say."""

    count: int
    cores: int
    node: str
    uids: tuple[PodUid, ...]


def _ends(search: _Search) -> Change | None:
    """The fewest pods; among equal numbers those with the fewest cores."""
    signature = signature_of(search.pod, search.view.policy.names)
    best: tuple[_Freed, Change] | None = None
    needs = search.view.pods[search.pod.uid].needs
    nodes = [
        node
        for node in search.view.nodes
        # Only a shortage of CPU and the like may end with those pods.
        if not hindrance(needs, node.offer, {}) and not over_quota(search.view, search.pod, node)
    ]
    for node in search.within_bounds(nodes):
        if len(signature) > 1:
            found = _least_freed(search, node)
        else:
            most = best[0].count if best is not None else len(search.view.pods)
            found = _freed(node, signature[0][1], search.view.pods.keys(), most)
        for one in sorted(found):
            if best is not None and best[0] <= one:
                break
            change = _ending(search, node, one.uids)
            if change is not None:
                best = one, change
                break
    return best[1] if best is not None else None


def _freed(node: NodeView, request: Request, known: Set[PodUid], most: int) -> list[_Freed]:
    """One entry for each GPU that the end of at most `most` pods would give, or one for whole GPUs together."""
    on_gpu: dict[int, dict[PodUid, Charge]] = {}
    for uid, reservation in node.ledger.reservations.items():
        # The GPUs of a pod that its agent has not reported are a guess: its end promises nothing.
        if uid in known and reservation.stage is not Stage.UNPLACED:
            for index, charge in reservation.plan.charges.items():
                on_gpu.setdefault(index, {})[uid] = charge
    if request.whole_gpus:
        return _freed_wholes(node, request, on_gpu, most)
    found = []
    for gpu in node.ledger.gpus:
        pods = on_gpu.get(gpu.index)
        if not pods or not gpu.is_healthy or not gpu.takes_shares:
            continue
        uids = _fewest(gpu, request, pods, most)
        if uids:
            found.append(_Freed(len(uids), sum(pods[uid].cores for uid in uids), node.name, uids))
            most = min(most, len(uids))
    return found


def _freed_wholes(
    node: NodeView, request: Request, on_gpu: Mapping[int, Mapping[PodUid, Charge]], most: int
) -> list[_Freed]:
    """GPU by GPU the one that adds the fewest pods: a pod may be on several."""
    chosen: set[PodUid] = set()
    left = {gpu.index for gpu in node.ledger.gpus if gpu.is_healthy and not gpu.is_instance}
    # Devices of a pod that nobody can name stay.
    left -= {index for charges in node.ledger.unattributed.values() for index in charges}
    for _ in range(request.whole_gpus):
        if not left:
            return []
        best = min(left, key=lambda index: (len(on_gpu.get(index, {}).keys() - chosen), index))
        chosen |= on_gpu.get(best, {}).keys()
        left.discard(best)
        if len(chosen) > most:
            return []
    cores = sum(charge.cores for pods in on_gpu.values() for uid, charge in pods.items() if uid in chosen)
    return [_Freed(len(chosen), cores, node.name, tuple(sorted(chosen)))] if chosen else []


def _fewest(gpu: GpuAccount, request: Request, pods: Mapping[PodUid, Charge], most: int) -> tuple[PodUid, ...]:
    """The smallest set of the GPU's pods whose charges give what is lacking; none where all together do not."""
    need = (
        request.cores - gpu.free_cores,
        request.blocks - gpu.free_blocks,
        request.units - gpu.free_units,
    )

    def gives(uids: Iterable[PodUid]) -> bool:
        gained = [_gain(gpu, pods[uid]) for uid in uids]
        return all(sum(one[n] for one in gained) >= need[n] for n in range(3))

    # The largest first, so that what is cut off matters least.
    ordered = sorted(pods, key=lambda uid: (-max(pods[uid].cores, pods[uid].wholes * CORES_PER_GPU), uid))
    if not gives(ordered):
        return ()
    for count in range(1, min(_MOST_ENDING, most) + 1):
        sets = [uids for uids in combinations(ordered[:MAX_COMBINED], count) if gives(uids)]
        if sets:
            return min(sets, key=lambda uids: (sum(pods[uid].cores for uid in uids), uids))
    return _without_needless(ordered, gives) if most > _MOST_ENDING else ()


def _gain(gpu: GpuAccount, charge: Charge) -> tuple[int, int, int]:
    """The most that its end gives: blocks and units are parts of one memory, so a plan has the last word."""
    if charge.is_whole:
        return CORES_PER_GPU, gpu.total_blocks, gpu.total_units
    memory_mib = charge.blocks * gpu.block_mib + charge.units * gpu.unit_mib
    return charge.cores, -(-memory_mib // gpu.block_mib), -(-memory_mib // gpu.unit_mib)


def _without_needless(ordered: Sequence[PodUid], gives: Callable[[Sequence[PodUid]], bool]) -> tuple[PodUid, ...]:
    """The pods that are all needed; the smallest are tried first."""
    kept = list(ordered)
    for uid in reversed(ordered):
        fewer = [one for one in kept if one != uid]
        if gives(fewer):
            kept = fewer
    return tuple(kept)


def _least_freed(search: _Search, node: NodeView) -> list[_Freed]:
    """For a pod of several containers: all pods of the node end, and one after the other stays where it can."""
    reservations = {
        uid: one
        for uid, one in node.ledger.reservations.items()
        if uid in search.view.pods and one.stage is not Stage.UNPLACED
    }

    def cores_of(uids: Iterable[PodUid]) -> int:
        return sum(charge.cores for uid in uids for charge in reservations[uid].plan.charges.values())

    def gives(uids: Sequence[PodUid]) -> bool:
        return bool(search.gpus_for(search.pod, node, node.ledger.without(frozenset(uids)).gpus))

    ordered = sorted(reservations, key=lambda uid: (-cores_of([uid]), uid))
    if not ordered or not gives(ordered):
        return []
    uids = _without_needless(ordered, gives)
    return [_Freed(len(uids), cores_of(uids), node.name, uids)]


def _ending(search: _Search, node: NodeView, uids: tuple[PodUid, ...]) -> Change | None:
    """Answers by the plan without those pods, and with their CPU and the like given back."""
    view = search.view
    gpus = search.gpus_for(search.pod, node, node.ledger.without(frozenset(uids)).gpus)
    used = Counter(node.used)
    for uid in uids:
        used.subtract(view.pods[uid].needs.requests)
    if not gpus or hindrance(view.pods[search.pod.uid].needs, node.offer, used):
        return None
    had = sorted({index for uid in uids for index in node.ledger.reservations[uid].plan.charges})
    then = f": {gpus_text(node, gpus)}" if set(gpus) != set(had) else ""
    names = [f"{view.pods[uid].pod.namespace}/{view.pods[uid].pod.name}" for uid in uids]
    more = f" and {len(names) - _MOST_ENDING} more" if len(names) > _MOST_ENDING else ""
    pods = f"{'pod' if len(names) == 1 else 'pods'} {', '.join(names[:_MOST_ENDING])}{more}"
    text = f"the end of {pods} on {gpus_text(node, had)}{then}"
    return Change(kind=Kind.END, text=text, node=node.name, gpus=gpus, cost=len(uids), ending=uids)
