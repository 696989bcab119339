"""The few pods that would have to move to make GPUs whole again. This is advice, nothing is moved. Pure.

Partly used GPUs are taken in the order of their number of pods, so each step is a GPU that becomes whole, and the first
steps are worth most. A pod goes to a GPU that is used already, on any node that kube-scheduler would take for it; where is
decided by `plan_pod`. No move needs the room that another one leaves, so they can be made in any order or at once. Greedy:
for several GPUs a smaller set of pods may exist.

Bounded by MAX_COMPARED comparisons of a pod with a node; `Advice.is_complete` says whether that sufficed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.kube.budgets import Budget
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import Capacity, capacity_of
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.decisions.pod_plan import plan_pod, signature_of
from gpushare_agent.extender.values import PodPlan, Reservation, Stage
from gpushare_agent.kubectl.decisions.cluster_view import ClusterView, NodeView, PodView, hindrance, may_fit

MAX_COMPARED = 300_000
"""About ten microseconds each."""
COST_OF_A_STEP = 20
"""Taking a GPU's pods off and back costs about as much as so many comparisons."""


class Stays(StrEnum):
    """Why a pod is not advised to move."""

    NO_CONTROLLER = "no controller would make it again"
    DAEMON_SET = "a DaemonSet's pod belongs to its node"
    STATIC = "a static pod belongs to its node"
    BUDGET = "its PodDisruptionBudget allows no more disruption"
    TWO_BUDGETS = "it has several PodDisruptionBudgets, which no eviction takes"
    UNCHECKED = "it asks for more than is checked here: affinity to pods, spread, volumes, ports or claims"
    ENDING = "it is ending already"
    UNREPORTED = "where it is, its agent has not reported"
    GONE = "the API server lists no such pod"
    SEVERAL = "it has whole GPUs, or parts of several"
    NO_PLACE = "it fits on no other used GPU"


_OWNERS = {"": Stays.NO_CONTROLLER, "DaemonSet": Stays.DAEMON_SET, "Node": Stays.STATIC}


class Move(Struct, frozen=True, kw_only=True):
    """GPUs by index."""

    uid: PodUid
    to_node: str
    to_gpus: tuple[int, ...]


class Freed(Struct, frozen=True, kw_only=True):
    """A GPU that is whole after these moves and those of the steps before."""

    node: str
    gpu: int
    moves: tuple[Move, ...]


class Advice(Struct, frozen=True, kw_only=True):
    """`whole` GPUs are free now. `staying` are the pods of partly used GPUs that are not advised to move."""

    whole: int
    freed: tuple[Freed, ...]
    staying: Mapping[PodUid, Stays]
    is_complete: bool


class _Shadow(Struct, kw_only=True, eq=False):
    """A node after the moves so far. `closed` GPUs take no pod: those that are whole, or shall be."""

    view: NodeView
    ledger: NodeLedger
    closed: set[int]
    used: Counter[str]
    room: tuple[list[GpuAccount], Capacity] | None = None
    """The GPUs that can take a pod; worked out after a change."""

    def open(self) -> tuple[list[GpuAccount], Capacity]:
        if self.room is None:
            gpus = [replace(gpu, is_healthy=False) if gpu.index in self.closed else gpu for gpu in self.ledger.gpus]
            self.room = gpus, capacity_of(gpus)
        return self.room

    @property
    def cores(self) -> int:
        """The most free cores of one of its GPUs."""
        return max((free[0] for free in self.open()[1].free), default=0)


class _Search(Struct, kw_only=True, eq=False):
    view: ClusterView
    nodes: dict[str, _Shadow]
    budgets: dict[PodUid, list[int]]
    """The budgets that cover the pod, by their place."""
    allowed: list[int]
    by_cores: list[dict[str, None]]
    """The nodes by the most free cores that one of their GPUs can give."""
    staying: dict[PodUid, Stays] = field(default_factory=dict)
    moved: set[PodUid] = field(default_factory=set)
    compared: int = 0


def defragment(view: ClusterView, budgets: Sequence[Budget], *, most: int | None = None) -> Advice:
    """At most `most` GPUs become whole, as many as possible where it is None."""
    search = _start(view, budgets)
    freed: list[Freed] = []
    whole = sum(gpu.is_free for node in view.nodes for gpu in node.ledger.gpus)
    for _, _, name, index in sorted(_partly_used(search)):
        if search.compared >= MAX_COMPARED or len(freed) == most:
            break
        search.compared += COST_OF_A_STEP
        found = _free(search, search.nodes[name], index)
        if found is not None:
            freed.append(found)
    return Advice(whole=whole, freed=tuple(freed), staying=search.staying, is_complete=search.compared < MAX_COMPARED)


def _start(view: ClusterView, budgets: Sequence[Budget]) -> _Search:
    by_namespace: defaultdict[str, list[int]] = defaultdict(list)
    for place, budget in enumerate(budgets):
        by_namespace[budget.namespace].append(place)
    covering = {
        uid: [
            place for place in by_namespace[one.pod.namespace] if budgets[place].covers(one.pod.namespace, one.labels)
        ]
        for uid, one in view.pods.items()
    }
    search = _Search(
        view=view,
        nodes={node.name: _shadow(node) for node in view.nodes},
        budgets=covering,
        allowed=[budget.allowed for budget in budgets],
        by_cores=[{} for _ in range(CORES_PER_GPU + 1)],
    )
    for name, shadow in search.nodes.items():
        search.by_cores[shadow.cores][name] = None
    return search


def _shadow(node: NodeView) -> _Shadow:
    ledger = node.ledger.without()
    # Breaking up a whole GPU for a pod that leaves another one frees nothing.
    closed = {gpu.index for gpu in ledger.gpus if gpu.is_free}
    return _Shadow(view=node, ledger=ledger, closed=closed, used=Counter(node.used))


def _partly_used(search: _Search) -> Iterator[tuple[int, int, str, int]]:
    """Number of pods, used cores, node and GPU of the GPUs that would be whole if their pods were elsewhere."""
    for name, shadow in search.nodes.items():
        # Nobody can use a whole GPU there.
        if shadow.view.offer.is_cordoned:
            continue
        pods = Counter(index for one in shadow.ledger.reservations.values() for index in one.plan.charges)
        kept = {index for charges in shadow.ledger.unattributed.values() for index in charges}
        for gpu in shadow.ledger.gpus:
            if (
                pods[gpu.index]
                and gpu.index not in kept
                and gpu.is_healthy
                and not gpu.is_instance
                and not gpu.is_whole
            ):
                yield pods[gpu.index], gpu.used.cores, name, gpu.index


def _free(search: _Search, shadow: _Shadow, index: int) -> Freed | None:
    """All pods of the GPU move, or none. Commits the moves."""
    uids = [uid for uid, one in shadow.ledger.reservations.items() if index in one.plan.charges]
    # A pod that moved here meanwhile would move twice.
    if search.moved.intersection(uids) or not _may_move(search, shadow, uids):
        return None
    shadow.closed.add(index)
    # The largest first: small ones find room where large ones do not.
    uids.sort(key=lambda uid: (-shadow.ledger.reservations[uid].plan.charges[index].cores, uid))
    left = [shadow.ledger.reservations[uid] for uid in uids]
    for uid in uids:
        shadow.ledger.remove(uid)
    _changed(search, shadow)
    moves: list[Move] = []
    for reservation in left:
        move = _move(search, shadow, reservation)
        if move is None:
            search.staying[reservation.pod_uid] = Stays.NO_PLACE
            _undo(search, shadow, index, moves, left)
            return None
        moves.append(move)
    for uid in uids:
        search.moved.add(uid)
        search.staying.pop(uid, None)
        for place in search.budgets[uid]:
            search.allowed[place] -= 1
    return Freed(node=shadow.view.name, gpu=index, moves=tuple(moves))


def _may_move(search: _Search, shadow: _Shadow, uids: Sequence[PodUid]) -> bool:
    """Whether every one of the pods may be evicted, all of them at the same time."""
    needed: Counter[int] = Counter()
    why: dict[PodUid, Stays] = {}
    for uid in uids:
        stays = _stays(search, shadow.ledger.reservations[uid])
        if stays is not None:
            why[uid] = stays
            continue
        for place in search.budgets[uid]:
            needed[place] += 1
            if needed[place] > search.allowed[place]:
                why[uid] = Stays.BUDGET
    search.staying.update(why)
    return not why


def _stays(search: _Search, reservation: Reservation) -> Stays | None:
    known = search.view.pods.get(reservation.pod_uid)
    if known is None:
        return Stays.GONE
    if known.owner in _OWNERS:
        return _OWNERS[known.owner]
    if reservation.stage is Stage.UNPLACED:
        return Stays.UNREPORTED
    if known.pod.is_deleting:
        return Stays.ENDING
    # What it leaves on its other GPUs would be room that moves of the same step could take.
    if len(reservation.plan.charges) > 1 or any(one.is_whole for one in reservation.plan.charges.values()):
        return Stays.SEVERAL
    if known.needs.unchecked:
        return Stays.UNCHECKED
    return Stays.TWO_BUDGETS if len(search.budgets[reservation.pod_uid]) > 1 else None


def _move(search: _Search, source: _Shadow, reservation: Reservation) -> Move | None:
    """Moves the pod to the node where the fullest fitting GPU has the fewest cores left; commits the move."""
    view, known = search.view, search.view.pods[reservation.pod_uid]
    pod, needs = known.pod, known.needs
    least = max(request.cores for _, request in signature_of(pod, view.policy.names))
    for nodes in search.by_cores[min(least, CORES_PER_GPU) :]:
        for name in list(nodes):
            target = search.nodes[name]
            search.compared += 1
            if search.compared >= MAX_COMPARED:
                return None
            gpus, capacity = target.open()
            if not may_fit(pod, capacity, view.policy) or not _takes(search, source, target, known):
                continue
            plan = plan_pod(pod, gpus, target.ledger.node.topology, view.policy)
            if not isinstance(plan, PodPlan):
                continue
            target.ledger.add(replace(reservation, node=name, plan=plan))
            # What it leaves on its own node counts there still: the moves need not be made in order.
            target.used.update(needs.requests)
            _changed(search, target)
            return Move(uid=pod.uid, to_node=name, to_gpus=tuple(sorted(plan.charges)))
    return None


def _takes(search: _Search, source: _Shadow, target: _Shadow, known: PodView) -> bool:
    """Whether kube-scheduler and the namespace's quota would take the node."""
    before, after = source.ledger.node, target.ledger.node
    if hindrance(known.needs, target.view.offer, target.used):
        return False
    # On nodes of the same model and pool its use of the quota stays the same, whatever else moves.
    if (before.model, before.pool) == (after.model, after.pool):
        return True
    return search.view.quotas.raised(known.pod, model=after.model, pool=after.pool) is None and (
        search.view.quotas(known.pod, model=after.model, pool=after.pool) is None
    )


def _undo(search: _Search, shadow: _Shadow, index: int, moves: Iterable[Move], left: Iterable[Reservation]) -> None:
    for move in moves:
        target = search.nodes[move.to_node]
        target.ledger.remove(move.uid)
        target.used.subtract(search.view.pods[move.uid].needs.requests)
        _changed(search, target)
    for reservation in left:
        shadow.ledger.add(reservation)
    shadow.closed.discard(index)
    _changed(search, shadow)


def _changed(search: _Search, shadow: _Shadow) -> None:
    """Its room is worked out again, and the node found by it."""
    name = shadow.view.name
    if shadow.room is not None:
        search.by_cores[shadow.cores].pop(name, None)
    shadow.room = None
    search.by_cores[shadow.cores][name] = None
