"""The API server's side: the pods of this node, and everything that is written to pods and to the node's object."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import structlog
from msgspec import Struct, field

from gpushare_agent.admission.rejected_pods import RejectedPods
from gpushare_agent.agent.state import NodeState
from gpushare_agent.agent.views import wanted_allocations, wanted_facts, wanted_of_pod
from gpushare_agent.cluster.decisions.node_facts import NodeFacts
from gpushare_agent.cluster.events import NodeEvents, PodEvents
from gpushare_agent.cluster.informer import Informer
from gpushare_agent.cluster.kube.client import pods_of_node
from gpushare_agent.cluster.node_fields import ALLOCATIONS, CAPACITY, FACTS, NodeFieldsWriter
from gpushare_agent.cluster.node_pods import NodePods
from gpushare_agent.cluster.pod_annotations import PodAnnotations
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.kit.supervision import Tasks, start_tasks
from gpushare_agent.kubelet.facts import KubeletFacts
from gpushare_agent.kubelet.static_pods import StaticPods
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.cluster.kube.client import KubeApi

log = structlog.get_logger(__name__)

API_RETRY_S = 2.0
PODS_BACKOFF = Backoff(base_s=0.5, cap_s=5.0)
"""After an outage everything else waits for the list of pods; a kubelet that cannot renew its lease tries every 7 s."""


class _RunsOnApi(Protocol):
    async def run(self, api: Any) -> object: ...


class ClusterSide(Struct, frozen=True, kw_only=True):
    """A writer is None where the settings switch it off."""

    settings: Settings
    store: PodStore
    node_pods: NodePods
    informer: Informer
    annotations: PodAnnotations
    pod_events: PodEvents
    node_events: NodeEvents
    rejected_pods: RejectedPods | None
    node_capacity: NodeFieldsWriter[Mapping[str, int]] | None
    node_facts: NodeFieldsWriter[NodeFacts] | None
    node_allocations: NodeFieldsWriter[str] | None
    kubelet_facts: KubeletFacts
    may_write: asyncio.Event
    """Set once this agent serves: one that waits for another to leave reads only."""
    further: dict[str, _RunsOnApi | None] = field(default_factory=dict)
    """What else writes to the API server, put here by the composition."""

    def late_tasks(self) -> Tasks:
        """Late: the Kubernetes client alone costs a third of a second to load."""
        return {"kubernetes": self._run}

    def not_ready(self) -> list[str]:
        """Why this side is not ready, nothing when it is."""
        return [] if self.store.is_synced else ["the API server has not listed this node's pods yet"]

    async def wait_synced(self) -> None:
        """The API server has listed this node's pods."""
        version = self.store.version
        while not self.store.is_synced:
            version = await self.store.wait_change(version)

    async def _run(self) -> NoReturn:
        """All that needs the API server. While it is away, all of this waits."""
        async with AsyncExitStack() as stack:
            api = await self._open_api(stack)
            self.node_pods.attach(api)
            async with asyncio.TaskGroup() as group:
                start_tasks(group, _bound(api, {"pod informer": self.informer, "kubelet facts": self.kubelet_facts}))
                await self.may_write.wait()
                start_tasks(group, _bound(api, self._writers()))
        raise AssertionError("the tasks do not return")

    def _writers(self) -> Mapping[str, _RunsOnApi | None]:
        return {
            "pod annotations": self.annotations,
            "pod events": self.pod_events,
            "node events": self.node_events,
            "node capacity": self.node_capacity,
            "node facts": self.node_facts,
            "node allocations": self.node_allocations,
            "rejected pods": self.rejected_pods,
            **self.further,
        }

    async def _open_api(self, stack: AsyncExitStack) -> KubeApi:
        """The API server's client. Credentials that are not there yet are waited for; a wrong configuration is not."""
        from gpushare_agent.cluster.kube.client import open_kube_api

        while True:
            try:
                return await stack.enter_async_context(open_kube_api(kubeconfig=self.settings.kubeconfig))
            except Unavailable as e:
                log.warning("kubernetes_not_ready", error=str(e), retried_in_s=API_RETRY_S)
            await asyncio.sleep(API_RETRY_S)


def _bound(api: KubeApi, clients: Mapping[str, _RunsOnApi | None]) -> Tasks:
    return {name: partial(client.run, api) for name, client in clients.items() if client is not None}


def build_cluster_side(state: NodeState, kubelet_facts: KubeletFacts) -> ClusterSide:
    """Joined, not started."""
    settings, names, metrics = state.settings, state.names, state.metrics
    node_name = settings.node_name
    rejected_pods = node_capacity = node_facts = node_allocations = None
    if settings.allocation.cleanup_rejected_pods:
        rejected_pods = RejectedPods(
            pods=state.store, resources=names.names, per_minute=settings.allocation.cleanup_per_minute, metrics=metrics
        )
    if settings.gpushare.enabled:
        resource = settings.gpushare.count_resource
        node_capacity = NodeFieldsWriter(
            CAPACITY, node_name=node_name, wanted=lambda: {resource: len(state.gpus().gpus)}
        )
    if settings.facts.is_written:
        node_facts = NodeFieldsWriter(FACTS, node_name=node_name, wanted=lambda: wanted_facts(state))
        node_allocations = NodeFieldsWriter(ALLOCATIONS, node_name=node_name, wanted=lambda: wanted_allocations(state))
    static_pods = None
    if (kubelet := settings.kubelet).api_address:
        static_pods = StaticPods(
            address=kubelet.api_address, port=kubelet.api_port, ca_file=kubelet.api_ca, node_name=node_name
        )
    node_pods = NodePods(store=state.store, node_name=node_name, resources=names.names, kubelet=static_pods)
    return ClusterSide(
        settings=settings,
        store=state.store,
        node_pods=node_pods,
        informer=Informer(
            kind="pods", watched=pods_of_node(node_name), handler=node_pods, metrics=metrics, backoff=PODS_BACKOFF
        ),
        annotations=PodAnnotations(pods=state.store, wanted=partial(wanted_of_pod, state), metrics=metrics),
        pod_events=PodEvents(node_name, count=metrics.pod_event),
        node_events=NodeEvents(node_name),
        rejected_pods=rejected_pods,
        node_capacity=node_capacity,
        node_facts=node_facts,
        node_allocations=node_allocations,
        kubelet_facts=kubelet_facts,
        may_write=asyncio.Event(),
    )
