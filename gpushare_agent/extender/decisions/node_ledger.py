"""What is allocated on one node of the cluster, and by which pod; the same for a person. Synchronous, no clock, no I/O.

State owned: the node's reservations, the allocations of pods that only its agent names, and the sums of both by GPU. Every
change raises `version`, which outdates the answers worked out for the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpushare_agent.extender.values import ClusterNode, Reservation
from gpushare_agent.model.allocations import NO_CHARGE, Charge, add_charges
from gpushare_agent.model.gpus import GpuReport
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.node_snapshot import ReportedGpuDocument, reported_gpu_document
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.gpu_account import Capacity, account_of, capacity_of


class NodeLedger:
    """`gpus` and `capacity` are worked out when asked for, after a change."""

    __slots__ = (
        "_accounts",
        "_capacity",
        "_gpus",
        "_names",
        "_used",
        "node",
        "reservations",
        "unattributed",
        "version",
    )

    def __init__(self, node: ClusterNode, names: ResourceNames) -> None:
        self.node = node
        self.version = 0
        self.reservations: dict[PodUid, Reservation] = {}
        self.unattributed: dict[PodUid, Mapping[int, Charge]] = {}
        """Of pods that only the agent names: ended by force, or not seen yet."""
        self._names = names
        self._used: dict[int, Charge] = {}
        self._accounts: dict[int, GpuAccount] = {}
        """Of the GPUs that have not changed since it was computed, by index."""
        self._gpus: list[GpuAccount] | None = None
        self._capacity: Capacity | None = None

    def add(self, reservation: Reservation) -> None:
        self.remove(reservation.pod_uid)
        self.reservations[reservation.pod_uid] = reservation
        self._charge(reservation.plan.charges, 1)

    def remove(self, uid: PodUid) -> Reservation | None:
        old = self.reservations.pop(uid, None)
        if old is not None:
            self._charge(old.plan.charges, -1)
        return old

    def set_unattributed(self, unattributed: Mapping[PodUid, Mapping[int, Charge]]) -> None:
        if unattributed == self.unattributed:
            return
        for charges in self.unattributed.values():
            self._charge(charges, -1)
        self.unattributed = dict(unattributed)
        for charges in self.unattributed.values():
            self._charge(charges, 1)

    def set_node(self, node: ClusterNode) -> None:
        if _facts(node) != _facts(self.node):
            self._accounts.clear()
            self._changed()
        self.node = node

    @property
    def gpus(self) -> list[GpuAccount]:
        """Every GPU's account, by index."""
        if self._gpus is None:
            accounts = self._accounts
            self._gpus = [accounts.get(gpu.index) or self._account(gpu) for gpu in self.node.gpus]
        return self._gpus

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            self._capacity = capacity_of(self.gpus)
        return self._capacity

    @property
    def is_stale(self) -> bool:
        """`gpus` and `capacity` have to be worked out anew."""
        return self._capacity is None

    def gpus_without(self, uids: frozenset[PodUid]) -> list[GpuAccount]:
        """As if these pods were gone."""
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
            self._accounts.pop(index, None)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._gpus = self._capacity = None


class ReservationDocument(Struct, kw_only=True):
    """`containers` are the GPUs by container, `charges` cores, blocks, units and whole GPUs by GPU index."""

    pod: str
    pod_uid: str
    stage: str
    containers: Mapping[str, Sequence[int]]
    charges: Mapping[str, Sequence[int]]


class NodeLedgerDocument(Struct, kw_only=True):
    name: str
    model: str
    pool: str
    is_exact: bool
    gpus: Sequence[ReportedGpuDocument]
    reservations: Sequence[ReservationDocument]
    unattributed: Sequence[PodUid]


def node_document(ledger: NodeLedger) -> NodeLedgerDocument:
    """One node for a person: its GPUs, and the pods that have some of them. Sorted."""
    node = ledger.node
    return NodeLedgerDocument(
        name=node.name,
        model=node.model,
        pool=node.pool,
        is_exact=node.is_exact,
        gpus=[reported_gpu_document(reported, gpu) for gpu, reported in zip(ledger.gpus, node.gpus, strict=True)],
        reservations=[
            ReservationDocument(
                pod=f"{one.namespace}/{one.pod}",
                pod_uid=one.pod_uid,
                stage=one.stage.value,
                containers={c.name: c.gpus for c in one.plan.containers if c.gpus},
                charges={
                    str(index): (charge.cores, charge.blocks, charge.units, charge.wholes)
                    for index, charge in one.plan.charges.items()
                },
            )
            for _, one in sorted(ledger.reservations.items())
        ],
        unattributed=sorted(ledger.unattributed),
    )


def _facts(node: ClusterNode) -> tuple[object, ...]:
    """What decisions about the node depend on besides its allocations."""
    return node.gpus, node.topology, node.model, node.pool, node.is_exact
