"""The parts that show one agent: usage, the one snapshot of the node, and everything that shows it.

`build` joins the parts. Below it the snapshot is read from the states that know the node: cache, pods, inventory, limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.agent.admission.outcomes import KEPT_DECISIONS
from gpushare_agent.agent.gpus.watch import GpuDriver
from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.observability.attribution import has_handed_over
from gpushare_agent.agent.observability.consumption import Consumption
from gpushare_agent.agent.observability.display import DisplayServer
from gpushare_agent.agent.observability.display import routes as display_routes
from gpushare_agent.agent.observability.http.debug_pages import DebugSources
from gpushare_agent.agent.observability.http.node_api import NodeApi
from gpushare_agent.agent.observability.http.server import WebServer
from gpushare_agent.agent.observability.metrics.dcgm import dcgm_series
from gpushare_agent.agent.observability.metrics.node import ContainerSeries, node_series
from gpushare_agent.agent.observability.metrics.text import NodePage, Series
from gpushare_agent.agent.observability.node_snapshot import (
    MAX_AGE_S,
    AgentFacts,
    ContainerFacts,
    NodeSnapshot,
    SnapshotCache,
)
from gpushare_agent.agent.observability.saved_past import SavedPast
from gpushare_agent.agent.observability.usage_history import HISTORY_POINTS, UsageHistory
from gpushare_agent.agent.observability.usage_sampling import UsageSampling
from gpushare_agent.agent.runtime.cgroups import ProcessOwners
from gpushare_agent.core.kit.supervision import Runs, Tasks, at_most, bodies
from gpushare_agent.core.model.allocations import NO_CHARGE, Allocation, ContainerKey
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.model.pods import ClaimUser, Pod
from gpushare_agent.core.model.shares import share_limits
from gpushare_agent.core.placement.gpu_account import account_of

if TYPE_CHECKING:
    from gpushare_agent.agent.mig.instances import MigInstances

LIST_WAIT_S = 2.0
"""For the list of the node's pods, before the use is sampled without it."""


class ObservabilityPart(Struct, frozen=True, kw_only=True):
    """`display` is None if the settings switch it off."""

    usage: UsageSampling
    usage_history: UsageHistory
    consumption: Consumption
    past: SavedPast
    snapshots: SnapshotCache
    metrics_page: NodePage
    web: WebServer
    display: DisplayServer | None

    def web_tasks(self) -> Tasks:
        return bodies({"web": self.web})

    def late_tasks(self) -> Tasks:
        services: dict[str, Runs | None] = {"past": self.past, "display": self.display}
        return {"usage sampling": self._sample, **bodies(services)}

    async def _sample(self) -> NoReturn:
        # The runtime would be asked for each container's ID, which the pods' statuses have.
        await at_most(LIST_WAIT_S, self.usage.pods.wait_synced())
        await self.usage.run()

    def take_over(self, previous: ObservabilityPart) -> None:
        """The past of an agent that has read its settings again."""
        self.usage.take_over(previous.usage)
        self.usage_history.take_over(previous.usage_history)
        self.past.take_over(previous.past)
        self.consumption.take_over(previous.consumption)

    def expire(self) -> None:
        """The node has changed: all that shows it is made again when it is asked for next."""
        self.snapshots.expire()
        self.metrics_page.expire()


def build(
    node: Node,
    driver: GpuDriver,
    isolation: Isolations,
    not_ready: Callable[[], Sequence[str]],
    needs_restart: Callable[[], Sequence[str]],
    mig: MigInstances | None = None,
) -> ObservabilityPart:
    """Joined, not started."""
    settings, metrics, decisions = node.settings, node.metrics, node.decisions
    usage = UsageSampling(
        driver=driver,
        owners=ProcessOwners(settings.runtime.proc_root),
        pods=node.pods,
        ids=ContainerIds(isolation.host.runtime, node.pods),
        claims=node.claim_pods.claims_of_containers,
        allocations=node.cache.view,
        paid=isolation.paid,
        metrics=metrics,
        period_s=settings.sample_period_s,
        idle_period_s=settings.usage.idle_period_s,
    )
    history = UsageHistory(settings.usage.history_s, HISTORY_POINTS, allocations=node.cache.view)
    consumption = Consumption(node)
    past = SavedPast(directory=settings.state_directory, recent=history, gpus=node.gpus)
    view = NodeView(node, isolation, usage, not_ready, mig)
    # A short period must show; a long one must not hold back readiness, which has no notification.
    snapshots = SnapshotCache(view.snapshot, max_age_s=min(settings.sample_period_s, MAX_AGE_S))
    node_api = NodeApi(
        snapshot=snapshots.current,
        history=history,
        past=past,
        decisions=decisions,
        kept_decisions=KEPT_DECISIONS,
        describe=usage.owners.describe,
    )
    socket = settings.display.socket
    shown = ContainerSeries(), ContainerSeries(is_all=True)

    def series(is_all: bool) -> list[Series]:
        snapshot = snapshots.current()
        dcgm = dcgm_series(snapshot) if settings.web.dcgm_names else ()
        return [*node_series(snapshot, shown[is_all]), *consumption.series(), *dcgm]

    return ObservabilityPart(
        usage=usage,
        usage_history=history,
        past=past,
        snapshots=snapshots,
        consumption=consumption,
        metrics_page=NodePage(
            series, settings.sample_period_s, lambda is_all: shown[is_all].prepared(snapshots.current())
        ),
        web=WebServer(
            settings.web.addr,
            settings.web.port,
            node_name=settings.node_name,
            metrics=metrics,
            ready=not_ready,
            needs_restart=needs_restart,
            all_series=settings.web.all_series,
            routes=[*node_api.routes(), *display_routes(snapshots.current)],
            before_reading=usage.refresh,
            debug=DebugSources(
                settings=settings,
                snapshot=snapshots.current,
                allocations=lambda: node.cache,
                pods=node.pods.pods,
                now=time.monotonic,
            ),
        ),
        display=DisplayServer(socket, snapshots.current, before_reading=usage.refresh) if socket is not None else None,
    )


class NodeView(Struct, eq=False):
    """Everything that is shown of the node. The facts of a container are made again when its allocation, its pod, a GPU or
    its limit has changed: between two rounds of sampling hardly any has."""

    node: Node
    isolation: Isolations
    usage: UsageSampling
    not_ready: Callable[[], Sequence[str]]
    mig: MigInstances | None = None
    started_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    _known: dict[ContainerKey, tuple[tuple[object, ...], ContainerFacts]] = field(default_factory=dict)

    def snapshot(self) -> NodeSnapshot:
        """As it is now."""
        node, settings, inventory = self.node, self.node.settings, self.node.inventory
        charges = node.cache.charges()
        accounts = [account_of(gpu, node.names, charges.get(gpu.uuid, NO_CHARGE)) for gpu in node.gpus().gpus]
        return NodeSnapshot(
            node=settings.node_name,
            at=time.time(),
            agent=AgentFacts(
                version=__version__,
                started_at=self.started_at,
                not_ready=tuple(self.not_ready()),
                isolation=settings.isolation,
                driver=settings.driver,
                sample_period_s=settings.sample_period_s,
                isolations=self.isolation.facts(),
                isolation_reason=node.isolation_reason,
            ),
            names=node.names,
            inventory=inventory.current,
            cordoned=inventory.cordoned,
            unhealthy_reasons=inventory.unhealthy_reasons,
            excluded=frozenset(gpu.uuid for gpu in node.gpus().gpus if gpu.is_selected(settings.excluded_gpus)),
            # From the accounts that placement uses, so that what is shown as free is what a pod can get.
            cores_allocated={one.uuid: one.allocated_cores for one in accounts},
            memory_allocated_bytes={one.uuid: one.allocated_mib * MIB for one in accounts},
            containers=self._containers(),
            usage=self.usage.current,
            mig_made=self.mig.made if self.mig is not None else (),
            mig_blocked=self.mig.blocked if self.mig is not None else {},
        )

    def _containers(self) -> list[ContainerFacts]:
        """The facts of the containers that have not ended."""
        node = self.node
        # A new dictionary each time: containers that have ended are dropped without a search for them.
        before, self._known = self._known, {}
        users_of = node.claim_pods.users
        for allocation in node.cache:
            pod, users = node.pods.get(allocation.key.pod_uid), users_of.get(allocation.key, ())
            if not allocation.pod_name or has_handed_over(allocation, pod):
                continue
            # An isolation writes the limits some time after the Allocate, without a change of the other four.
            inputs = (allocation, pod, users, node.inventory.current, self.isolation.problem(allocation.key))
            known = before.get(allocation.key)
            # By identity: states replace their values and never change them, and comparing whole pods would cost more.
            if known is None or any(old is not new for old, new in zip(known[0], inputs, strict=True)):
                known = inputs, self._container(allocation, pod, users)
            self._known[allocation.key] = known
        return [facts for _, facts in self._known.values()]

    def _container(self, allocation: Allocation, pod: Pod | None, users: Sequence[ClaimUser]) -> ContainerFacts:
        gpus, names = self.node.inventory.current.by_uuid(), self.node.names
        share = allocated = share_limits(allocation, pod, gpus, names)
        # A live resize changes the limits alone: the kubelet and the scheduler go on to count what was allocated.
        if allocation.resized_to is not None:
            allocated = share_limits(replace(allocation, resized_to=None), pod, gpus, names)
        return ContainerFacts(
            allocation=allocation,
            pod=pod,
            users=users,
            cores=share.cores,
            memory_bytes=share.memory_bytes,
            core_limit=share.core_limit,
            allocated_cores=allocated.cores,
            allocated_memory_bytes=allocated.memory_bytes,
            isolation=self.isolation.isolation_name(allocation) or "",
            kept=self.isolation.kept(allocation),
            not_limited=self.isolation.problem(allocation.key),
        )
