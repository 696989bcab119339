"""The node for which the agent's capabilities are built: its settings, its resources' names, and ports of the states that
several of them read; and which of its GPUs the device plugins offer and which ResourceClaims do.

Each state has one owner, the only one to change it (docs/explanation/architecture.md), and is a class in its folder. A
builder takes the node; a service takes of it what it reads.

The setting dra.gpus says which GPUs are for claims. One that the other side still uses is offered by neither until it is
free: the scheduler's extender and the DRA plugin of kube-scheduler each know their own allocations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.model.allocations import Allocation, Charge, ContainerKey, ResizedShare
from gpushare_agent.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.settings.settings import Settings


class GpuSplit(Struct, frozen=True, kw_only=True):
    """Which side has a GPU, by UUID: those that claims can have now, and those that no device plugin offers, with the
    reason."""

    claimable: frozenset[GpuUuid] = frozenset()
    not_plugins: tuple[tuple[GpuUuid, str], ...] = ()


def gpu_split(
    chosen: Collection[str], gpus: Iterable[Gpu], allocations: Iterable[Allocation], excluded: Collection[str] = ()
) -> GpuSplit:
    """`chosen` is the setting dra.gpus, `excluded` the setting excluded_gpus. MIG instances stay the device plugins'."""
    by_claims: set[GpuUuid] = set()
    by_plugins: set[GpuUuid] = set()
    for allocation in allocations:
        (by_plugins if allocation.claim is None else by_claims).update(allocation.gpus)
    claimable, not_plugins = set(), []
    for gpu in gpus:
        if gpu.is_selected(excluded):
            not_plugins.append((gpu.uuid, "it is excluded (setting excluded_gpus)"))
        elif gpu.mig is None and gpu.is_selected(chosen):
            not_plugins.append((gpu.uuid, "it is offered by ResourceClaims alone (setting dra.gpus)"))
            if gpu.uuid not in by_plugins:
                claimable.add(gpu.uuid)
        elif gpu.uuid in by_claims:
            not_plugins.append((gpu.uuid, "ResourceClaims still use it; the device plugins get it when they end"))
    return GpuSplit(claimable=frozenset(claimable), not_plugins=tuple(not_plugins))


def plugins_inventory(inventory: GpuInventory, found: GpuSplit) -> GpuInventory:
    """The inventory as admission sees it: the rows of the topology are indexes, so every GPU stays in its place."""
    reasons = dict(found.not_plugins)
    gpus = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reasons[gpu.uuid]) if gpu.uuid in reasons else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus)


def plugins_devices(inventory: GpuInventory, found: GpuSplit) -> GpuInventory:
    """The inventory as the kubelet sees it: the node's capacity has none of the others."""
    others = {uuid for uuid, _ in found.not_plugins}
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if gpu.uuid not in others))


class Pods(Protocol):
    """The pods of this node. `version` grows with every change; `is_synced` is False until the first list."""

    @property
    def version(self) -> int: ...
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...
    def pods(self) -> tuple[Pod, ...]: ...
    async def wait_change(self, since: int) -> int: ...


class ClaimPods(Protocol):
    """The pods of this node and, beside them, the claims that are prepared on it, each as a pod. `version` is another one
    after every change of these, or of an allocation."""

    @property
    def version(self) -> object: ...
    @property
    def is_synced(self) -> bool: ...
    def get(self, uid: PodUid) -> Pod | None: ...
    def pods(self) -> Iterable[Pod]: ...
    def using(self, uid: PodUid) -> Sequence[Pod]: ...
    def shares(self) -> Mapping[ContainerKey, Allocation]: ...
    def parts(self, key: ContainerKey) -> Sequence[Allocation]: ...
    def sharers(self, key: ContainerKey) -> Mapping[ContainerKey, str] | None: ...
    def claims_of_containers(self) -> Mapping[ContainerKey, tuple[ContainerKey, ...]]: ...


class Inventory(Protocol):
    """The node's GPUs. `is_read` is False until the driver was read once."""

    @property
    def current(self) -> GpuInventory: ...
    @property
    def is_read(self) -> bool: ...
    @property
    def cordoned(self) -> Mapping[GpuUuid, str]: ...
    @property
    def unhealthy_reasons(self) -> Mapping[GpuUuid, str]: ...


class Allocations(Protocol):
    """What the node's containers and claims have."""

    def __iter__(self) -> Iterator[Allocation]: ...
    def get(self, key: ContainerKey) -> Allocation | None: ...
    def view(self) -> Mapping[ContainerKey, Allocation]: ...
    def charges(self) -> Mapping[GpuUuid, Charge]: ...
    def charges_of_pod(self, uid: PodUid) -> Mapping[GpuUuid, Charge]: ...
    def charge_differences(self) -> Mapping[ContainerKey, Charge]: ...
    @property
    def resized(self) -> Mapping[ContainerKey, ResizedShare]: ...


class Metrics(Protocol):
    """What the agent's services count; observability/metrics/agent.py says of what."""

    def admission(self, resource: str, outcome: str, reason: str) -> None: ...
    def driver_error(self, error: str, count: int = 1) -> None: ...
    def gpu_event(self, kind: str, xid: int, is_ignored: bool) -> None: ...
    def gpu_health_changed(self, uuid: str, healthy: bool) -> None: ...
    def identified(self, method: str) -> None: ...
    def listed(self, kind: str, duration_s: float) -> None: ...
    def pod_annotated(self, outcome: str) -> None: ...
    def pod_event(self, outcome: str) -> None: ...
    def pod_resources_listed(self, purpose: str) -> None: ...
    def reconcile_corrected(self, kind: str, count: int = 1) -> None: ...
    def rejected_pod_deleted(self) -> None: ...
    def rpc_finished(self, resource: str, method: str, code: str, duration_s: float) -> None: ...
    def sampled(self, duration_s: float) -> None: ...
    def sampling_failed(self) -> None: ...
    def sampling_overran(self) -> None: ...
    def show_isolation_probe(self, isolation: str, is_failed: Callable[[], bool | None]) -> None: ...
    def show_isolations(self, are_available: Callable[[], Mapping[str, bool]]) -> None: ...
    def taken_ids_offered(self, resource: str, count: int) -> None: ...
    def unreadable(self, kind: str) -> None: ...
    def vdevice_registered(self, code: str) -> None: ...
    def watch_ended(self, kind: str, outcome: str) -> None: ...


class Node(Struct, frozen=True, kw_only=True):
    settings: Settings
    isolation_reason: str
    """Why the isolation was chosen, empty where the setting names it."""
    names: ResourceNames
    metrics: Metrics
    inventory: Inventory
    pods: Pods
    cache: Allocations
    claim_pods: ClaimPods
    has_claims: bool
    """GPUs are for claims, or an earlier agent has recorded some: these have their GPUs until they end."""

    def gpus(self) -> GpuInventory:
        """The GPUs as the inventory has them now."""
        return self.inventory.current

    @property
    def gpu_split(self) -> GpuSplit:
        """Which GPUs are the device plugins', and which are claims'."""
        if not self._are_some_others:
            return GpuSplit()
        return gpu_split(self.settings.dra.gpus, self.gpus().gpus, self.cache, self.settings.excluded_gpus)

    def plugins_gpus(self) -> GpuInventory:
        """The GPUs as admission sees them."""
        return plugins_inventory(self.gpus(), self.gpu_split) if self._are_some_others else self.gpus()

    def plugins_devices(self) -> GpuInventory:
        """The GPUs as the device plugins offer them."""
        return plugins_devices(self.gpus(), self.gpu_split) if self._are_some_others else self.gpus()

    @property
    def _are_some_others(self) -> bool:
        """GPUs may be other than the device plugins'."""
        return self.has_claims or bool(self.settings.excluded_gpus)
