"""What is allocated on every node of the cluster, and by which pod: the extender's ledger. Synchronous, no clock, no I/O.

`NodeLedger` has one node: its reservations, the allocations of pods that only its agent names, and the sums of both by GPU.
Every change is told, for it outdates the answers worked out for the node. `ClusterLedger` has all nodes, and a
reservation for every pod that has something or may have it; of all other pods, too, what they request of their nodes' CPU
and main memory. extender/cluster_state.py is the only one to change them.

Sources of what a pod has, best first: the report of the node's agent, our own plan, and for a pod of which neither is known
all that it may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from gpushare_agent.extender.decisions.pod_plan import charges_anywhere, plan_pod
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, PodPlan, Reservation, Stage
from gpushare_agent.model.allocations import NO_CHARGE, Charge, add_charges
from gpushare_agent.model.gpus import GpuReport
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import HostRequest, Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.fragmentation import WHOLE, FreeNode
from gpushare_agent.placement.gpu_account import Capacity, account_of, capacity_of

V = TypeVar("V")
OnChange = Callable[[str, bool], None]
"""Called with a node's name, and whether its GPUs have changed or its CPU and main memory alone."""


class NodeLedger:
    """`gpus`, `capacity` and `free` are worked out when asked for, after a change."""

    __slots__ = (
        "_accounts",
        "_capacity",
        "_free",
        "_gpus",
        "_hosted",
        "_names",
        "_on_change",
        "_used",
        "node",
        "reservations",
        "unattributed",
    )

    def __init__(self, node: ClusterNode, names: ResourceNames, on_change: OnChange = lambda name, gpus: None) -> None:
        self.node = node
        self._on_change = on_change
        self.reservations: dict[PodUid, Reservation] = {}
        self.unattributed: dict[PodUid, Mapping[int, Charge]] = {}
        """What pods have that only the agent names: ended by force, or not seen yet."""
        self._names = names
        self._used: dict[int, Charge] = {}
        self._accounts: dict[int, GpuAccount] = {}
        """The accounts of the GPUs that have not changed since it was computed, by index."""
        self._gpus: list[GpuAccount] | None = None
        self._capacity: Capacity | None = None
        self._hosted = _NOTHING_HOSTED
        self._free: FreeNode | None = None

    def add(self, reservation: Reservation) -> None:
        # A reservation that changes its stage or its charges replaces the former one.
        self.remove(reservation.pod_uid)
        self.reservations[reservation.pod_uid] = reservation
        self._charge(reservation.plan.charges, 1)

    def remove(self, uid: PodUid) -> Reservation | None:
        old = self.reservations.pop(uid, None)
        if old is not None:
            self._charge(old.plan.charges, -1)
        return old

    def set_unattributed(self, unattributed: Mapping[PodUid, Mapping[int, Charge]]) -> None:
        # Else every report would outdate all answers about the node.
        if unattributed == self.unattributed:
            return
        for charges in self.unattributed.values():
            self._charge(charges, -1)
        self.unattributed = dict(unattributed)
        for charges in self.unattributed.values():
            self._charge(charges, 1)

    def set_node(self, node: ClusterNode) -> None:
        # A report that changes only who has what changes no GPU; its charges come through `add`.
        if _facts(node) != _facts(self.node):
            self._accounts.clear()
            self._changed()
        self.node = node

    @property
    def gpus(self) -> list[GpuAccount]:
        """Every GPU's account, by index."""
        if self._gpus is None:
            accounts = self._accounts
            # Only the GPUs that changed are computed anew: a node has eight or more, and a pod is on one.
            self._gpus = [accounts.get(gpu.index) or self._account(gpu) for gpu in self.node.gpus]
        return self._gpus

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            self._capacity = capacity_of(self.gpus)
        return self._capacity

    @property
    def free(self) -> FreeNode:
        """What is left, for policy fgd; the same object until it changes."""
        if self._free is None:
            parts = sorted(_free_parts(gpu) for gpu in self.gpus if gpu.is_healthy and gpu.takes_shares)
            self._free = FreeNode(
                cpu_milli=self.node.cpu_milli - self._hosted.cpu_milli,
                memory_mib=self.node.memory_mib - self._hosted.memory_mib,
                gpus=tuple(parts),
                model=self.node.model,
                gpu_mib=min((gpu.memory_mib for gpu in self.gpus), default=0),
            )
        return self._free

    def set_hosted(self, hosted: Hosted) -> None:
        """What the node's pods request of it. It changes no fit: kube-scheduler decides on CPU and memory."""
        self._hosted, self._free = hosted, None
        self._on_change(self.node.name, False)

    @property
    def is_stale(self) -> bool:
        """`gpus` and `capacity` have to be worked out anew."""
        return self._capacity is None

    def gpus_without(self, uids: frozenset[PodUid]) -> list[GpuAccount]:
        """The accounts of all GPUs as if these pods were gone."""
        # A copy: a question must not outdate answers.
        shadow = NodeLedger(self.node, self._names)
        for reservation in self.reservations.values():
            if reservation.pod_uid not in uids:
                shadow.add(reservation)
        shadow.set_unattributed({uid: charges for uid, charges in self.unattributed.items() if uid not in uids})
        return shadow.gpus

    def _account(self, gpu: GpuReport) -> GpuAccount:
        account = account_of(gpu, self._names, self._used.get(gpu.index, NO_CHARGE))
        self._accounts[gpu.index] = account
        return account

    def _charge(self, charges: Mapping[int, Charge], times: int) -> None:
        add_charges(self._used, charges, times)
        for index in charges:
            # An account is immutable: it is dropped, and made when somebody asks.
            self._accounts.pop(index, None)
        self._changed()

    def _changed(self) -> None:
        self._gpus = self._capacity = self._free = None
        self._on_change(self.node.name, True)


def _facts(node: ClusterNode) -> tuple[object, ...]:
    """What decisions about the node depend on besides its allocations."""
    return node.gpus, node.topology, node.model, node.pool, node.is_exact, node.cpu_milli, node.memory_mib


def _free_parts(gpu: GpuAccount) -> int:
    """Of cores or memory, whichever is less. A MIG instance is never a whole GPU."""
    blocks = gpu.total_blocks
    parts = min(gpu.free_cores, WHOLE * gpu.free_blocks // blocks) if blocks else gpu.free_cores
    return min(parts, WHOLE - 1) if gpu.is_instance else parts


class Hosted(NamedTuple):
    """What some pods request of their node, in sum."""

    pods: int
    cpu_milli: int
    memory_mib: int

    def plus(self, request: HostRequest, sign: int) -> Hosted:
        return Hosted(
            self.pods + sign, self.cpu_milli + sign * request.cpu_milli, self.memory_mib + sign * request.memory_mib
        )


_NOTHING_HOSTED = Hosted(0, 0, 0)


NO_PLAN = PodPlan(containers=(), charges={})


class ClusterLedger:
    """All nodes. Bound pods of a node that is not known yet are remembered until it is."""

    def __init__(self, policy: ClusterPolicy, on_change: OnChange = lambda name, gpus: None) -> None:
        self._policy = policy
        self._on_change = on_change
        self._nodes: dict[str, NodeLedger] = {}
        self._pods: dict[PodUid, Pod] = {}
        self._bound: dict[str, dict[PodUid, None]] = {}
        """The pods, by node, that the API server shows bound to it."""
        self._reserved_on: dict[PodUid, str] = {}
        """The node whose ledger, or pending reservations, have the pod."""
        self._pending: dict[str, dict[PodUid, Reservation]] = {}
        """Reservations whose bind is under way, of nodes that are away."""
        self._host_requests: dict[PodUid, tuple[str, HostRequest]] = {}
        self._hosted: dict[str, Hosted] = {}
        """Their sums by node, of nodes that are away or offer no GPUs, too."""

    def nodes(self) -> Iterator[NodeLedger]:
        """The ledgers of all nodes, in order of name."""
        return (self._nodes[name] for name in sorted(self._nodes))

    def names(self) -> Set[str]:
        return self._nodes.keys()

    def node(self, name: str) -> NodeLedger | None:
        return self._nodes.get(name)

    def pending(self) -> list[Reservation]:
        """Reservations on nodes that are away, by node and UID."""
        return [r for _, on_node in sorted(self._pending.items()) for _, r in sorted(on_node.items())]

    def reservation(self, uid: PodUid) -> Reservation | None:
        name = self._reserved_on.get(uid, "")
        ledger = self._nodes.get(name)
        return ledger.reservations.get(uid) if ledger is not None else self._pending.get(name, {}).get(uid)

    # --- nodes ---

    # put_node, in the order of the code:
    #
    # node           pod                                             becomes
    # new            pending reservation                             reservation on the node, as it was
    # new            bound, the agent reports it                     CONFIRMED with the reported charges
    # new            bound, pending reservation                      BOUND with the plan's charges
    # new            bound, neither                                  UNPLACED (`_guess`)
    # unchanged      any                                             as it was
    # changed        reported anew or otherwise, not ASSUMED         CONFIRMED with the reported charges
    # changed        reported, ASSUMED                               as it was: an agent cannot confirm a pod before its bind
    # changed        reported before and not now                     as it was, until the pod ends
    # new, changed   reported, without a reservation                 unattributed: charged, to no pod

    def put_node(self, node: ClusterNode, now: float) -> list[Reservation]:
        """The node as it is now. Returns the new reservations: of pods that were bound before the node was known."""
        ledger = self._nodes.get(node.name)
        if ledger is None:
            resolved = self._add_node(node, now)
        # The watch delivers a node with every update of its status.
        elif node == ledger.node:
            return []
        else:
            resolved = []
            self._update_node(ledger, node, now)
        ledger = self._nodes[node.name]
        ledger.set_unattributed(
            # Pods ended by force, and such as our watch has not shown yet: their processes have the GPU all the same.
            {uid: charges for uid, charges in (node.allocated or {}).items() if uid not in ledger.reservations}
        )
        return resolved

    def _add_node(self, node: ClusterNode, now: float) -> list[Reservation]:
        ledger = self._nodes[node.name] = NodeLedger(node, self._policy.names, self._on_change)
        # Of a new node there are no answers at all.
        self._on_change(node.name, True)
        ledger.set_hosted(self._hosted.get(node.name, _NOTHING_HOSTED))
        for reservation in self._pending.pop(node.name, {}).values():
            self._put(ledger, reservation)
        # Pending reservations are no news: they were counted while the node was away.
        known = frozenset(ledger.reservations)
        bound = tuple(self._bound.get(node.name, ()))
        for uid in bound:
            self._resolve(ledger, self._pods[uid], now)
        return [ledger.reservations[uid] for uid in bound if uid not in known]

    def _update_node(self, ledger: NodeLedger, node: ClusterNode, now: float) -> None:
        former = ledger.node.allocated or {}
        ledger.set_node(node)
        for uid, charges in (node.allocated or {}).items():
            known = ledger.reservations.get(uid)
            # An ASSUMED pod is left alone: an agent that names it would otherwise keep its bind from being undone.
            if former.get(uid) != charges and known is not None and known.stage is not Stage.ASSUMED:
                self._confirm(ledger, uid, charges, now)

    def remove_node(self, name: str) -> list[Reservation]:
        """Returns the reservations that are dropped. Bound pods stay known, and ASSUMED reservations become pending: the
        node may come back before they end."""
        ledger = self._nodes.pop(name, None)
        dropped = []
        for uid, reservation in sorted(ledger.reservations.items()) if ledger is not None else ():
            if reservation.stage is Stage.ASSUMED:
                self._pending.setdefault(name, {})[uid] = reservation
            # Else the pod was reserved on another node meanwhile, and that one counts.
            elif self._reserved_on.get(uid) == name:
                del self._reserved_on[uid]
                dropped.append(reservation)
        return dropped

    # --- pods ---

    def put_bound(self, pod: Pod, now: float) -> None:
        """A pod that the API server shows on a node."""
        former = self._reserved_on.get(pod.uid)
        # Another scheduler bound it elsewhere: what was planned here will not happen.
        if former is not None and former != pod.node_name:
            self.release(pod.uid)
        self.put_hosted(pod.uid, pod.node_name, pod.host_request)
        self._pods[pod.uid] = pod
        self._bound.setdefault(pod.node_name, {})[pod.uid] = None
        ledger = self._nodes.get(pod.node_name)
        if ledger is not None:
            self._resolve(ledger, pod, now)

    def reserve(self, pod: Pod, node: str, plan: PodPlan, now: float) -> Reservation:
        """Reserves the plan's GPUs. The pod has no reservation before."""
        self._pods[pod.uid] = pod
        # With the GPUs, before the watch shows the pod: the next one may be decided in between.
        self.put_hosted(pod.uid, node, pod.host_request)
        return self._put(self._nodes[node], _reservation(pod, node, plan, Stage.ASSUMED, now))

    def mark_bound(self, uid: PodUid) -> None:
        reservation = self.reservation(uid)
        # The watch may be quicker than the answer to the bind, and the agent than both.
        if reservation is None or reservation.stage is not Stage.ASSUMED:
            return
        bound = replace(reservation, stage=Stage.BOUND)
        ledger = self._nodes.get(reservation.node)
        if ledger is None:
            # The node is away: the stage counts when it returns.
            self._pending[reservation.node][uid] = bound
            return
        self._put(ledger, bound)
        # Reported before we knew of the bind: `_update_node` has left it alone, so it is confirmed now.
        allocated = (ledger.node.allocated or {}).get(uid)
        if allocated is not None:
            self._confirm(ledger, uid, allocated, reservation.at)

    def release(self, uid: PodUid) -> Reservation | None:
        """Forget the pod and what it has. Returns its reservation."""
        self._drop_hosted(uid)
        pod = self._pods.pop(uid, None)
        if pod is not None:
            _drop(self._bound, pod.node_name, uid)
        name = self._reserved_on.pop(uid, "")
        ledger = self._nodes.get(name)
        if ledger is None:
            pending = self._pending.get(name, {}).get(uid)
            _drop(self._pending, name, uid)
            return pending
        old = ledger.remove(uid)
        allocated = ledger.node.allocated or {}
        if uid in allocated:  # its agent has not released it yet: its processes may run on
            ledger.set_unattributed({**ledger.unattributed, uid: allocated[uid]})
        return old

    def put_hosted(self, uid: PodUid, node: str, request: HostRequest) -> None:
        """What a pod, whether it asks for GPUs or not, requests of the node to which it is bound, or about to be."""
        # The watch delivers a pod with every change of its status.
        if self._host_requests.get(uid) != (node, request):
            self._drop_hosted(uid)
            self._host_requests[uid] = node, request
            self._add_hosted(node, request, 1)

    def _drop_hosted(self, uid: PodUid) -> None:
        known = self._host_requests.pop(uid, None)
        if known is not None:
            self._add_hosted(*known, -1)

    def _add_hosted(self, node: str, request: HostRequest, sign: int) -> None:
        hosted = self._hosted.get(node, _NOTHING_HOSTED).plus(request, sign)
        if hosted.pods:
            self._hosted[node] = hosted
        else:
            del self._hosted[node]
        ledger = self._nodes.get(node)
        if ledger is not None:
            ledger.set_hosted(hosted)

    def _resolve(self, ledger: NodeLedger, pod: Pod, now: float) -> None:
        """What a bound pod has: by the agent's report, by our plan, else all that it may have."""
        allocated = (ledger.node.allocated or {}).get(pod.uid)
        known = ledger.reservations.get(pod.uid)
        if allocated is not None:
            # Bound before this process started: the report says what it has, and no plan is known.
            if known is None:
                self._put(ledger, _reservation(pod, pod.node_name, NO_PLAN, Stage.CONFIRMED, now))
            self._confirm(ledger, pod.uid, allocated, now)
        elif known is not None:
            self.mark_bound(pod.uid)
        else:
            self._put(ledger, _reservation(pod, pod.node_name, self._guess(ledger, pod), Stage.UNPLACED, now))

    def _guess(self, ledger: NodeLedger, pod: Pod) -> PodPlan:
        """Charges for a pod of unknown GPUs. Our agent reports them within a second, and nothing may be allocated twice
        meanwhile: all that it asks, on every GPU. Another agent never reports, and that would leave its node useless: there
        the pod is charged as it is likely to be placed."""
        # No annotation of ours at all: most likely gpu-manager's node.
        if ledger.node.allocated is None and not ledger.node.is_exact:
            planned = plan_pod(pod, ledger.gpus, ledger.node.topology, self._policy)
            if isinstance(planned, PodPlan):
                return replace(planned, containers=())  # charged, and never compared with a later report
        indexes = [gpu.index for gpu in ledger.node.gpus]
        return PodPlan(containers=(), charges=charges_anywhere(pod, indexes, self._policy.names))

    def _confirm(self, ledger: NodeLedger, uid: PodUid, charges: Mapping[int, Charge], now: float) -> None:
        """The agent's report replaces the charges; the plan stays to be compared with it."""
        known = ledger.reservations[uid]
        if uid in ledger.unattributed:
            ledger.set_unattributed({other: had for other, had in ledger.unattributed.items() if other != uid})
        self._put(ledger, replace(known, plan=replace(known.plan, charges=charges), stage=Stage.CONFIRMED, at=now))

    def _put(self, ledger: NodeLedger, reservation: Reservation) -> Reservation:
        self._reserved_on[reservation.pod_uid] = ledger.node.name
        ledger.add(reservation)
        return reservation


def _reservation(pod: Pod, node: str, plan: PodPlan, stage: Stage, now: float) -> Reservation:
    return Reservation(
        pod_uid=pod.uid, namespace=pod.namespace, pod=pod.name, node=node, plan=plan, stage=stage, at=now
    )


def _drop(groups: dict[str, dict[PodUid, V]], name: str, key: PodUid) -> None:
    """Removes `key` of the group, and a group that is empty then."""
    group = groups.get(name)
    if group is not None:
        group.pop(key, None)
        if not group:
            del groups[name]
