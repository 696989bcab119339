"""What is taken on every node of the cluster, and by which pod: the extender's books. Memory only, synchronous, one owner.

The mutable state is: the nodes with what each of their cards has given away, and a reservation for every pod that has
something or may have it. extender/cluster_state.py is the only one to change it. Every change of a node raises its
`version`, by which answers that were worked out for it become old.

Whose word counts for a pod, best first: the node's agent (`held`), our own plan, and for a pod that nobody tells about
all that it could have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpushare_agent.extender.free_capacity import NodeRoom, room_of
from gpushare_agent.extender.pod_plan import CardRoom, charges_anywhere, plan_pod
from gpushare_agent.extender.values import Charge, ClusterNode, ClusterPolicy, PodPlan, Reservation, Stage
from gpushare_agent.model.names import CORES_PER_CARD, PodUid
from gpushare_agent.model.pods import Pod

NO_PLAN = PodPlan(containers=(), charges=())


class NodeBooks:
    """One node. `rooms` and `room` are worked out when asked for, after a change."""

    __slots__ = ("_policy", "_room", "_rooms", "_used", "node", "reservations", "strangers", "version")

    def __init__(self, node: ClusterNode, policy: ClusterPolicy) -> None:
        self.node = node
        self.version = 0
        self.reservations: dict[PodUid, Reservation] = {}
        self.strangers: dict[PodUid, tuple[Charge, ...]] = {}
        """Of pods that the agent names and nobody else does: ended by force, or not seen yet."""
        self._policy = policy
        self._used: dict[int, list[int]] = {}
        self._rooms: list[CardRoom] | None = None
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

    def set_strangers(self, strangers: Mapping[PodUid, tuple[Charge, ...]]) -> None:
        if strangers == self.strangers:
            return
        for charges in self.strangers.values():
            self._charge(charges, -1)
        self.strangers = dict(strangers)
        for charges in self.strangers.values():
            self._charge(charges, 1)

    def set_node(self, node: ClusterNode) -> None:
        if (node.cards, node.topology, node.model, node.pool, node.is_exact) != (
            self.node.cards,
            self.node.topology,
            self.node.model,
            self.node.pool,
            self.node.is_exact,
        ):
            self._changed()
        self.node = node

    @property
    def rooms(self) -> list[CardRoom]:
        """Every card with what is taken of it, by index."""
        if self._rooms is None:
            self._rooms = [self._room_of_card(position) for position in range(len(self.node.cards))]
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

    def rooms_without(self, uids: frozenset[PodUid]) -> list[CardRoom]:
        """As if these pods were gone."""
        shadow = NodeBooks(self.node, self._policy)
        for reservation in self.reservations.values():
            if reservation.pod_uid not in uids:
                shadow.add(reservation)
        shadow.set_strangers({uid: charges for uid, charges in self.strangers.items() if uid not in uids})
        return shadow.rooms

    def _room_of_card(self, position: int) -> CardRoom:
        card = self.node.cards[position]
        cores, blocks, units, wholes = self._used.get(card.index, (0, 0, 0, 0))
        return CardRoom(
            index=card.index,
            uuid=card.uuid,
            memory_mib=card.memory_mib,
            is_healthy=card.is_healthy,
            cores=min(cores, CORES_PER_CARD),
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


class ClusterBooks:
    """All nodes. Pods of a node that is not known yet wait for it."""

    def __init__(self, policy: ClusterPolicy) -> None:
        self._policy = policy
        self._nodes: dict[str, NodeBooks] = {}
        self._pods: dict[PodUid, Pod] = {}
        self._of_node: dict[str, dict[PodUid, None]] = {}
        self._place: dict[PodUid, str] = {}
        """The node on whose books a pod is."""
        self._orphans: dict[str, dict[PodUid, Reservation]] = {}
        """What is assumed on nodes that went away meanwhile."""

    def __len__(self) -> int:
        return len(self._place)

    def nodes(self) -> Iterator[NodeBooks]:
        """In order of name."""
        return (self._nodes[name] for name in sorted(self._nodes))

    def node(self, name: str) -> NodeBooks | None:
        return self._nodes.get(name)

    def orphans(self) -> list[Reservation]:
        """On nodes that are away, by node and UID."""
        return [r for _, kept in sorted(self._orphans.items()) for _, r in sorted(kept.items())]

    def reservation(self, uid: PodUid) -> Reservation | None:
        place = self._place.get(uid, "")
        books = self._nodes.get(place)
        return books.reservations.get(uid) if books is not None else self._orphans.get(place, {}).get(uid)

    # --- nodes ---

    def put_node(self, node: ClusterNode, now: float) -> list[Reservation]:
        """The reservations that are new: of pods that were waiting for the node."""
        books = self._nodes.get(node.name)
        settled: list[Reservation] = []
        if books is None:
            books = self._nodes[node.name] = NodeBooks(node, self._policy)
            for assumed in self._orphans.pop(node.name, {}).values():
                self._put(books, assumed)
            for uid in self._of_node.get(node.name, ()):
                is_new = uid not in books.reservations
                self._settle(books, self._pods[uid], now)
                settled += [books.reservations[uid]] if is_new else []
        else:
            if node == books.node:
                return settled
            former = books.node.held or {}
            books.set_node(node)
            for uid, charges in (node.held or {}).items():
                known = books.reservations.get(uid)
                # Only a pod that is bound can be held: a node that names others would keep their binds from being undone.
                if former.get(uid) != charges and known is not None and known.stage is not Stage.ASSUMED:
                    self._confirm(books, uid, charges, now)
        books.set_strangers(
            {uid: charges for uid, charges in (node.held or {}).items() if uid not in books.reservations}
        )
        return settled

    def remove_node(self, name: str) -> list[Reservation]:
        """Its pods stay known, and what is assumed is kept: the node may come back before they end. What was dropped."""
        books = self._nodes.pop(name, None)
        dropped = []
        for uid, reservation in sorted(books.reservations.items()) if books is not None else ():
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
        books = self._nodes.get(pod.node_name)
        if books is not None:
            self._settle(books, pod, now)

    def reserve(self, pod: Pod, node: str, plan: PodPlan, now: float) -> Reservation:
        """Sets the plan's cards aside. The pod has no reservation before."""
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
        books = self._nodes.get(reservation.node)
        if books is not None:
            self._put(books, bound)
            held = (books.node.held or {}).get(uid)
            if held is not None:
                self._confirm(books, uid, held, reservation.at)
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
        books = self._nodes.get(place)
        if books is None:
            orphans = self._orphans.get(place, {})
            orphan = orphans.pop(uid, None)
            if not orphans:
                self._orphans.pop(place, None)
            return orphan
        old = books.remove(uid)
        held = books.node.held or {}
        if uid in held:  # the agent has not let go of it yet: its processes may run on
            books.set_strangers({**books.strangers, uid: held[uid]})
        return old

    def _settle(self, books: NodeBooks, pod: Pod, now: float) -> None:
        """A bound pod: by the agent's word, by our plan, else by all that it may have."""
        held = (books.node.held or {}).get(pod.uid)
        known = books.reservations.get(pod.uid)
        if held is not None:
            if known is None:
                self._put(books, self._reservation(pod, NO_PLAN, Stage.CONFIRMED, now))
            self._confirm(books, pod.uid, held, now)
        elif known is not None:
            self.mark_bound(pod.uid)
        else:
            self._put(books, self._reservation(pod, self._guess(books, pod), Stage.UNPLACED, now))

    def _guess(self, books: NodeBooks, pod: Pod) -> PodPlan:
        """Where the node has our agent it tells what it holds within a second, and nothing may be booked twice meanwhile.
        Another agent never tells, which would leave the node useless: there the pod is planned as it is likely to be."""
        if books.node.held is None and not books.node.is_exact:
            planned = plan_pod(pod, books.rooms, books.node.topology, self._policy)
            if isinstance(planned, PodPlan):
                return replace(
                    planned, containers=()
                )  # charged, and never compared with what the agent may tell one day
        indexes = [card.index for card in books.node.cards]
        return PodPlan(containers=(), charges=charges_anywhere(pod, indexes, self._policy.names))

    def _confirm(self, books: NodeBooks, uid: PodUid, charges: tuple[Charge, ...], now: float) -> None:
        """The agent's word: it replaces the charges, and the plan stays to be compared with it."""
        known = books.reservations[uid]
        if uid in books.strangers:
            books.set_strangers({other: held for other, held in books.strangers.items() if other != uid})
        self._put(books, replace(known, plan=replace(known.plan, charges=charges), stage=Stage.CONFIRMED, at=now))

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

    def _put(self, books: NodeBooks, reservation: Reservation) -> None:
        self._place[reservation.pod_uid] = books.node.name
        books.add(reservation)
