"""The agent's metrics: counted where things happen, read at /metrics.

Methods are named for the event and never fail. What is a state (cards, containers) is not counted but read from a
snapshot while Prometheus asks, so that no series outlives its pod. Usage series come with sampling: nothing here makes
them up. The mutable state is the registry, one per instance. Names kept from gpu-manager: docs/formats.md, section 8.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpushare_agent import __version__
from gpushare_agent.model.names import CORES_PER_CARD

RPC_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerView:
    """A container that holds a share: what it asked for. `cards` are card indexes."""

    namespace: str
    pod: str
    container: str
    node: str
    cores: int
    memory_mib: int
    cards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """A card and what of it is allocated."""

    index: int
    uuid: str
    memory_mib: int
    cores_allocated: int
    memory_mib_allocated: int
    is_healthy: bool


class AgentMetrics:
    """`registry` is what /metrics shows."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Gauge(
            "gpushare_build_info", "Version of the agent and of Python.", ["version", "python"], registry=registry
        )
        build.labels(__version__, platform.python_version()).set(1)
        self._admissions = Counter(
            "gpushare_admissions",
            "Allocate calls by how they ended.",
            ["resource", "outcome", "reason"],
            registry=registry,
        )
        self._rpc_duration = Histogram(
            "gpushare_rpc_duration_seconds",
            "Time that a call of the kubelet took.",
            ["resource", "method"],
            buckets=RPC_BUCKETS_S,
            registry=registry,
        )
        self._rpcs = Counter(
            "gpushare_rpcs", "Calls of the kubelet by gRPC status.", ["resource", "method", "code"], registry=registry
        )
        self._vdevice_registrations = _counter(
            registry, "vdevice_registrations", "RegisterVDevice calls of containers by gRPC status.", "code"
        )
        self._registrations = _counter(registry, "registrations", "Registrations with the kubelet.", "resource")
        self._lists = _counter(
            registry, "pod_resources_lists", "List calls to the kubelet's PodResources API.", "purpose"
        )
        self._taken_ids = _counter(
            registry,
            "taken_ids_offered",
            "Device IDs that the kubelet offered though a live container holds them.",
            "resource",
        )
        self._corrections = _counter(
            registry, "reconcile_corrections", "Differences between cache and kubelet that were put right.", "kind"
        )
        self._pod_lists = _counter(registry, "pod_lists", "Lists of the node's pods from the API server.")
        self._pod_watches = _counter(
            registry, "pod_watches_ended", "Watches of the node's pods, by why they ended.", "outcome"
        )
        self._unreadable = _counter(registry, "pods_unreadable", "Pods of the API server that could not be read.")
        self._annotations = _counter(registry, "pod_annotations", "Patches of pod annotations by outcome.", "outcome")
        self._events = _counter(registry, "pod_events", "Kubernetes Events on pods by outcome.", "outcome")
        self._deletions = _counter(registry, "rejected_pods_deleted", "Rejected pods deleted after their replacement.")

    def admission(self, resource: str, outcome: str, reason: str) -> None:
        """An Allocate ended; `reason` is empty unless it was refused."""
        self._admissions.labels(resource, outcome, reason).inc()

    def rpc_finished(self, resource: str, method: str, code: str, duration_s: float) -> None:
        """`code` is the gRPC status name."""
        self._rpc_duration.labels(resource, method).observe(duration_s)
        self._rpcs.labels(resource, method, code).inc()

    def registered(self, resource: str) -> None:
        self._registrations.labels(resource).inc()

    def pod_resources_listed(self, purpose: str) -> None:
        self._lists.labels(purpose).inc()

    def taken_ids_offered(self, resource: str, count: int) -> None:
        self._taken_ids.labels(resource).inc(count)

    def reconcile_corrected(self, kind: str, count: int = 1) -> None:
        self._corrections.labels(kind).inc(count)

    def pods_listed(self) -> None:
        self._pod_lists.inc()

    def pod_watch_ended(self, outcome: str) -> None:
        self._pod_watches.labels(outcome).inc()

    def pod_unreadable(self) -> None:
        self._unreadable.inc()

    def pod_annotated(self, outcome: str) -> None:
        self._annotations.labels(outcome).inc()

    def pod_event(self, outcome: str) -> None:
        self._events.labels(outcome).inc()

    def vdevice_registered(self, code: str) -> None:
        """`code` is the gRPC status name."""
        self._vdevice_registrations.labels(code).inc()

    def rejected_pod_deleted(self) -> None:
        self._deletions.inc()

    def show_containers(self, snapshot: Callable[[], Sequence[ContainerView]]) -> None:
        """Ask `snapshot` for the containers at each scrape. Call once."""
        self.registry.register(_ContainerCollector(snapshot))

    def show_cards(self, snapshot: Callable[[], Sequence[CardView]]) -> None:
        """Ask `snapshot` for the cards at each scrape. Call once."""
        self.registry.register(_CardCollector(snapshot))

    def show_pod_event_age(self, age_s: Callable[[], float | None]) -> None:
        """Ask `age_s` for the time since the API server was last heard; None before the first list. Call once."""
        self.registry.register(_EventAgeCollector(age_s))


def _counter(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"gpushare_{name}", documentation, labels, registry=registry)


class _ContainerCollector(Collector):
    """gpu-manager's two series of requests, one row a container, sorted."""

    def __init__(self, snapshot: Callable[[], Sequence[ContainerView]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry would collect while registering

    def collect(self) -> Iterator[Metric]:
        names = ["pod_name", "namespace", "node", "container_name"]
        cards = GaugeMetricFamily(
            "container_request_gpu_utilization", "Requested share of GPUs, in cards.", labels=[*names, "req_of_gpu"]
        )
        memory = GaugeMetricFamily(
            "container_request_gpu_memory", "Requested GPU memory, in MiB.", labels=[*names, "req_of_gpu_memory"]
        )
        for view in sorted(self._snapshot(), key=lambda view: (view.namespace, view.pod, view.container)):
            labels = [view.pod, view.namespace, view.node, view.container, "total"]
            cards.add_metric(labels, view.cores / CORES_PER_CARD)
            memory.add_metric(labels, view.memory_mib)
        yield cards
        yield memory


class _CardCollector(Collector):
    def __init__(self, snapshot: Callable[[], Sequence[CardView]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        views = sorted(self._snapshot(), key=lambda view: view.index)
        for name, documentation, value in _CARD_SERIES:
            family = GaugeMetricFamily(f"gpushare_card_{name}", documentation, labels=["card", "uuid"])
            for view in views:
                family.add_metric([str(view.index), view.uuid], value(view))
            yield family


_CARD_SERIES: tuple[tuple[str, str, Callable[[CardView], float]], ...] = (
    ("cores_capacity", "Compute of the card, in 1/100.", lambda view: CORES_PER_CARD),
    ("cores_allocated", "Allocated compute of the card, in 1/100.", lambda view: view.cores_allocated),
    ("memory_capacity_mib", "Memory of the card.", lambda view: view.memory_mib),
    ("memory_allocated_mib", "Allocated memory of the card.", lambda view: view.memory_mib_allocated),
    ("healthy", "1 while the card is healthy.", lambda view: float(view.is_healthy)),
)


class _EventAgeCollector(Collector):
    def __init__(self, age_s: Callable[[], float | None]) -> None:
        self._age_s = age_s

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        age_s = self._age_s()
        family = GaugeMetricFamily("gpushare_pod_event_age_seconds", "Time since the API server was last heard.")
        if age_s is not None:
            family.add_metric([], age_s)
        yield family
