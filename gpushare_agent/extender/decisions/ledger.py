"""The extender's ledger of one node: what is allocated, and to which pod. Synchronous, no clock, no I/O.

`NodeLedger` has the node's reservations, the allocations of pods that only its agent names, and the sums of both by GPU.
Every change comes here, because it outdates the answers worked out for the node. extender/cluster_state.py has one for each
node and is the only one to change them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from gpushare_agent.core.model.allocations import NO_CHARGE, Charge, add_charges
from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import HostRequest
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.fragmentation import WHOLE, FreeNode
from gpushare_agent.core.placement.gpu_account import Capacity, account_of, capacity_of
from gpushare_agent.extender.values import ClusterNode, Reservation

OnChange = Callable[[str, bool], None]
"""Called with a node's name, and whether its GPUs have changed or its CPU and main memory alone."""


class Hosted(NamedTuple):
    """The sum of what some pods request of their node."""

    pods: int
    cpu_milli: int
    memory_mib: int

    def plus(self, request: HostRequest, sign: int) -> Hosted:
        return Hosted(
            self.pods + sign, self.cpu_milli + sign * request.cpu_milli, self.memory_mib + sign * request.memory_mib
        )


NOTHING_HOSTED = Hosted(0, 0, 0)


class NodeLedger(Struct, eq=False):
    """`gpus`, `capacity` and `free` are worked out when asked for, after a change."""

    node: ClusterNode
    names: ResourceNames
    on_change: OnChange = lambda name, gpus: None
    reservations: dict[PodUid, Reservation] = field(default_factory=dict)
    unattributed: dict[PodUid, Mapping[int, Charge]] = field(default_factory=dict)
    """The charges of pods that only the agent names: ended by force, or not seen yet."""
    _used: dict[int, Charge] = field(default_factory=dict)
    _accounts: dict[int, GpuAccount] = field(default_factory=dict)
    """The accounts of the GPUs that have not changed since it was computed, by index."""
    _gpus: list[GpuAccount] | None = None
    _capacity: Capacity | None = None
    hosted: Hosted = NOTHING_HOSTED
    _free: FreeNode | None = None

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
        # Otherwise every report would outdate all answers about the node.
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
            # Only the GPUs that changed are computed again: a node has eight or more, and a pod is on one.
            self._gpus = [accounts.get(gpu.index) or self._account(gpu) for gpu in self.node.gpus]
        return self._gpus

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            self._capacity = capacity_of(self.gpus)
        return self._capacity

    @property
    def free(self) -> FreeNode:
        """The rest of the node, for policy fgd; the same object until it changes."""
        if self._free is None:
            parts = sorted(_free_parts(gpu) for gpu in self.gpus if gpu.is_healthy and gpu.takes_shares)
            self._free = FreeNode(
                cpu_milli=self.node.cpu_milli - self.hosted.cpu_milli,
                memory_mib=self.node.memory_mib - self.hosted.memory_mib,
                gpus=tuple(parts),
                model=self.node.model,
                gpu_mib=min((gpu.memory_mib for gpu in self.gpus), default=0),
            )
        return self._free

    def set_hosted(self, hosted: Hosted) -> None:
        """The requests of the node's pods. They change no fit: kube-scheduler decides on CPU and memory."""
        self.hosted, self._free = hosted, None
        self.on_change(self.node.name, False)

    @property
    def is_stale(self) -> bool:
        """`gpus` and `capacity` have to be worked out again."""
        return self._capacity is None

    def without(self, uids: Collection[PodUid] = ()) -> NodeLedger:
        """A copy, as if these pods were gone: a question must not outdate answers."""
        copy = NodeLedger(self.node, self.names)
        for uid, reservation in self.reservations.items():
            if uid not in uids:
                copy.add(reservation)
        copy.set_unattributed({uid: charges for uid, charges in self.unattributed.items() if uid not in uids})
        return copy

    def _account(self, gpu: GpuReport) -> GpuAccount:
        account = account_of(gpu, self.names, self._used.get(gpu.index, NO_CHARGE))
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
        self.on_change(self.node.name, True)


def _facts(node: ClusterNode) -> tuple[object, ...]:
    """The facts, apart from its allocations, on which decisions about the node depend."""
    return node.gpus, node.topology, node.model, node.pool, node.is_exact, node.cpu_milli, node.memory_mib


def _free_parts(gpu: GpuAccount) -> int:
    """The free part by cores or by memory, whichever is less. A MIG instance is never a whole GPU."""
    blocks = gpu.total_blocks
    parts = min(gpu.free_cores, WHOLE * gpu.free_blocks // blocks) if blocks else gpu.free_cores
    return min(parts, WHOLE - 1) if gpu.is_instance else parts
