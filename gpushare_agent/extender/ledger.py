"""What is taken on every node of the cluster, and by which pod: the extender's books. Memory only, synchronous, one owner.

The mutable state is: the nodes with what each of their GPUs has given away, and a reservation for every pod that has
something or may have it. extender/cluster_state.py is the only one to change it. Every change of a node raises its
`version`, by which answers that were worked out for it become old.

Whose word counts for a pod, best first: the node's agent (`held`), our own plan, and for a pod that nobody tells about
all that it could have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpushare_agent.extender.free_capacity import NodeRoom, room_of
from gpushare_agent.extender.pod_plan import GpuRoom, charges_anywhere, plan_pod
from gpushare_agent.extender.values import Charge, ClusterNode, ClusterPolicy, PodPlan, Reservation, Stage
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.pods import Pod

NO_PLAN = PodPlan(containers=(), charges=())


class NodeLedger:
    """One node. `rooms` and `room` are worked out when asked for, after a change."""

    __slots__ = ("_policy", "_room", "_rooms", "_used", "node", "reservations", "unattributed", "version")

    def __init__(self, node: ClusterNode, policy: ClusterPolicy) -> None:
        self.node = node
        self.version = 0
        self.reservations: dict[PodUid, Reservation] = {}
        self.unattributed: dict[PodUid, tuple[Charge, ...]] = {}
        """Of pods that the agent names and nobody else does: ended by force, or not seen yet."""
        self._policy = policy
        self._used: dict[int, list[int]] = {}
        self._rooms: list[GpuRoom] | None = None
        self._room: NodeRoom | None = None

    def add(self, reservation: Reservation) -> None:
        self.remove(reservation.pod_uid)
        self.reservations[reservation.pod_uid] = reservation
        self._charge(reservation.plan.charges, 1)

    def remove(self, uid: PodUid) -> Reservation | None:
        old = self.reservations.pop(uid, None)
        if old is not None:
            self._charge(old.plan.charges, -1)
        return old

    def set_unattributed(self, unattributed: Mapping[PodUid, tuple[Charge, ...]]) -> None:
        if unattributed == self.unattributed:
            return
        for charges in self.unattributed.values():
            self._charge(charges, -1)
        self.unattributed = dict(unattributed)
        for charges in self.unattributed.values():
            self._charge(charges, 1)

    def set_node(self, node: ClusterNode) -> None:
        if (node.gpus, node.topology, node.model, node.pool, node.is_exact) != (
            self.node.gpus,
            self.node.topology,
            self.node.model,
            self.node.pool,
            self.node.is_exact,
        ):
            self._changed()
        self.node = node

    @property
    def rooms(self) -> list[GpuRoom]:
        """Every GPU with what is taken of it, by index."""
        if self._rooms is None:
            self._rooms = [self._room_of_gpu(position) for position in range(len(self.node.gpus))]
        return self._rooms

    @property
    def is_behind(self) -> bool:
        """`rooms` and `room` have to be worked out anew."""
        return self._room is None

    @property
    def room(self) -> NodeRoom:
        if self._room is None:
            self._room = room_of(self.rooms, self._policy.names)
        return self._room

    def rooms_without(self, uids: frozenset[PodUid]) -> list[GpuRoom]:
        """As if these pods were gone."""
        shadow = NodeLedger(self.node, self._policy)
        for reservation in self.reservations.values():
            if reservation.pod_uid not in uids:
                shadow.add(reservation)
        shadow.set_unattributed({uid: charges for uid, charges in self.unattributed.items() if uid not in uids})
        return shadow.rooms

    def _room_of_gpu(self, position: int) -> GpuRoom:
        gpu = self.node.gpus[position]
        cores, blocks, units, wholes = self._used.get(gpu.index, (0, 0, 0, 0))
        return GpuRoom(
            index=gpu.index,
            uuid=gpu.uuid,
            memory_mib=gpu.memory_mib,
            is_healthy=gpu.is_healthy,
            cores=min(cores, CORES_PER_GPU),
            blocks=blocks,
            units=units,
            is_whole=wholes > 0,
        )

    def _charge(self, charges: tuple[Charge, ...], sign: int) -> None:
        for charge in charges:
            used = self._used.setdefault(charge.index, [0, 0, 0, 0])
            used[0] += sign * charge.cores
            used[1] += sign * charge.blocks
            used[2] += sign * charge.units
            used[3] += sign * charge.is_whole
            if not any(used):
                del self._used[charge.index]
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._rooms = self._room = None


class ClusterLedger:
    """All nodes. Pods of a node that is not known yet wait for it."""

    def __init__(self, policy: ClusterPolicy) -> None:
        self._policy = policy
        self._nodes: dict[str, NodeLedger] = {}
        self._pods: dict[PodUid, Pod] = {}
        self._of_node: dict[str, dict[PodUid, None]] = {}
        self._place: dict[PodUid, str] = {}
        """The node on whose books a pod is."""
        self._orphans: dict[str, dict[PodUid, Reservation]] = {}
        """What is assumed on nodes that went away meanwhile."""

    def __len__(self) -> int:
        return len(self._place)

    def nodes(self) -> Iterator[NodeLedger]:
        """In order of name."""
        return (self._nodes[name] for name in sorted(self._nodes))

    def node(self, name: str) -> NodeLedger | None:
        return self._nodes.get(name)

    def orphans(self) -> list[Reservation]:
        """On nodes that are away, by node and UID."""
        return [r for _, kept in sorted(self._orphans.items()) for _, r in sorted(kept.items())]

    def reservation(self, uid: PodUid) -> Reservation | None:
        place = self._place.get(uid, "")
        ledger = self._nodes.get(place)
        return ledger.reservations.get(uid) if ledger is not None else self._orphans.get(place, {}).get(uid)

    # --- nodes ---

    def put_node(self, node: ClusterNode, now: float) -> list[Reservation]:
        """The reservations that are new: of pods that were waiting for the node."""
        ledger = self._nodes.get(node.name)
        settled: list[Reservation] = []
        if ledger is None:
            ledger = self._nodes[node.name] = NodeLedger(node, self._policy)
            for assumed in self._orphans.pop(node.name, {}).values():
                self._put(ledger, assumed)
            for uid in self._of_node.get(node.name, ()):
                is_new = uid not in ledger.reservations
                self._settle(ledger, self._pods[uid], now)
                settled += [ledger.reservations[uid]] if is_new else []
        else:
            if node == ledger.node:
                return settled
            former = ledger.node.held or {}
            ledger.set_node(node)
            for uid, charges in (node.held or {}).items():
                known = ledger.reservations.get(uid)
                # Only a pod that is bound can be held: a node that names others would keep their binds from being undone.
                if former.get(uid) != charges and known is not None and known.stage is not Stage.ASSUMED:
                    self._confirm(ledger, uid, charges, now)
        ledger.set_unattributed(
            {uid: charges for uid, charges in (node.held or {}).items() if uid not in ledger.reservations}
        )
        return settled

    def remove_node(self, name: str) -> list[Reservation]:
        """Its pods stay known, and what is assumed is kept: the node may come back before they end. What was dropped."""
        ledger = self._nodes.pop(name, None)
        dropped = []
        for uid, reservation in sorted(ledger.reservations.items()) if ledger is not None else ():
            if reservation.stage is Stage.ASSUMED:
                self._orphans.setdefault(name, {})[uid] = reservation
            elif self._place.get(uid) == name:
                del self._place[uid]
                dropped.append(reservation)
        return dropped

    # --- pods ---

    def put_bound(self, pod: Pod, now: float) -> None:
        """A pod that is on a node, by the API server's word."""
        former = self._place.get(pod.uid)
        if former is not None and former != pod.node_name:
            self.release(pod.uid)
        self._pods[pod.uid] = pod
        self._of_node.setdefault(pod.node_name, {})[pod.uid] = None
        ledger = self._nodes.get(pod.node_name)
        if ledger is not None:
            self._settle(ledger, pod, now)

    def reserve(self, pod: Pod, node: str, plan: PodPlan, now: float) -> Reservation:
        """Sets the plan's GPUs aside. The pod has no reservation before."""
        reservation = Reservation(
            pod_uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            node=node,
            plan=plan,
            stage=Stage.ASSUMED,
            at=now,
        )
        self._pods[pod.uid] = pod
        self._put(self._nodes[node], reservation)
        return reservation

    def mark_bound(self, uid: PodUid) -> None:
        reservation = self.reservation(uid)
        if reservation is None or reservation.stage is not Stage.ASSUMED:
            return
        bound = replace(reservation, stage=Stage.BOUND)
        ledger = self._nodes.get(reservation.node)
        if ledger is not None:
            self._put(ledger, bound)
            held = (ledger.node.held or {}).get(uid)
            if held is not None:
                self._confirm(ledger, uid, held, reservation.at)
        else:
            self._orphans[reservation.node][uid] = bound

    def release(self, uid: PodUid) -> Reservation | None:
        """Forget the pod and what it has."""
        pod = self._pods.pop(uid, None)
        if pod is not None and (of_node := self._of_node.get(pod.node_name)) is not None:
            of_node.pop(uid, None)
            if not of_node:
                del self._of_node[pod.node_name]
        place = self._place.pop(uid, "")
        ledger = self._nodes.get(place)
        if ledger is None:
            orphans = self._orphans.get(place, {})
            orphan = orphans.pop(uid, None)
            if not orphans:
                self._orphans.pop(place, None)
            return orphan
        old = ledger.remove(uid)
        held = ledger.node.held or {}
        if uid in held:  # the agent has not let go of it yet: its processes may run on
            ledger.set_unattributed({**ledger.unattributed, uid: held[uid]})
        return old

    def _settle(self, ledger: NodeLedger, pod: Pod, now: float) -> None:
        """A bound pod: by the agent's word, by our plan, else by all that it may have."""
        held = (ledger.node.held or {}).get(pod.uid)
        known = ledger.reservations.get(pod.uid)
        if held is not None:
            if known is None:
                self._put(ledger, self._reservation(pod, NO_PLAN, Stage.CONFIRMED, now))
            self._confirm(ledger, pod.uid, held, now)
        elif known is not None:
            self.mark_bound(pod.uid)
        else:
            self._put(ledger, self._reservation(pod, self._guess(ledger, pod), Stage.UNPLACED, now))

    def _guess(self, ledger: NodeLedger, pod: Pod) -> PodPlan:
        """Where the node has our agent it tells what it holds within a second, and nothing may be booked twice meanwhile.
        Another agent never tells, which would leave the node useless: there the pod is planned as it is likely to be."""
        if ledger.node.held is None and not ledger.node.is_exact:
            planned = plan_pod(pod, ledger.rooms, ledger.node.topology, self._policy)
            if isinstance(planned, PodPlan):
                return replace(
                    planned, containers=()
                )  # charged, and never compared with what the agent may tell one day
        indexes = [gpu.index for gpu in ledger.node.gpus]
        return PodPlan(containers=(), charges=charges_anywhere(pod, indexes, self._policy.names))

    def _confirm(self, ledger: NodeLedger, uid: PodUid, charges: tuple[Charge, ...], now: float) -> None:
        """The agent's word: it replaces the charges, and the plan stays to be compared with it."""
        known = ledger.reservations[uid]
        if uid in ledger.unattributed:
            ledger.set_unattributed({other: held for other, held in ledger.unattributed.items() if other != uid})
        self._put(ledger, replace(known, plan=replace(known.plan, charges=charges), stage=Stage.CONFIRMED, at=now))

    def _reservation(self, pod: Pod, plan: PodPlan, stage: Stage, now: float) -> Reservation:
        return Reservation(
            pod_uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            node=pod.node_name,
            plan=plan,
            stage=stage,
            at=now,
        )

    def _put(self, ledger: NodeLedger, reservation: Reservation) -> None:
        self._place[reservation.pod_uid] = ledger.node.name
        ledger.add(reservation)
