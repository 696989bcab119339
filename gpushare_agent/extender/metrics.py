"""The extender's metrics: counted by event, read at /metrics. Listed in docs/reference/extender.md.

Methods are named for the event and never fail. Label sets that are known from the start begin at zero, or rate() would miss
the first event. State owned: the registry, one per instance.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from gpushare_agent import __version__

VERBS = ("bind", "filter", "mutate", "preempt", "prioritize")
REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OUTCOMES = ("bad", "error", "ok", "unready")
BINDS = ("bound", "failed", "refused", "unknown")
KINDS = ("configmap", "nodes", "pods")
WATCH_OUTCOMES = ("conflict", "corrupt", "ended", "notfound", "rejected", "throttled", "unavailable")


class ExtenderMetrics:
    """`registry` holds what is counted; `exposition` is the whole answer."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
        # Its own, not the library's global one: tests and the dashboard make several in one process.
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Gauge(
            "gpushare_build_info", "Version of the program and of Python.", ["version", "python"], registry=registry
        )
        build.labels(__version__, platform.python_version()).set(1)
        self._count_requests(registry)
        self._count_cluster(registry)

    def _count_requests(self, registry: CollectorRegistry) -> None:
        self._requests = _counter(
            registry,
            "requests",
            "Requests by how they ended; mutate is the webhook.",
            ("verb", "outcome"),
            [(verb, outcome) for verb in VERBS for outcome in OUTCOMES],
        )
        self._duration = Histogram(
            "gpushare_extender_request_duration_seconds",
            "Time to answer a request, without reading it.",
            ["verb"],
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        for verb in VERBS:
            self._duration.labels(verb)
        self._filtered = _counter(
            registry,
            "filtered_nodes",
            "Nodes that filter answered about: fits, failed, unresolvable.",
            ("verdict",),
            [("failed",), ("fits",), ("unresolvable",)],
        )
        self._binds = _counter(
            registry, "binds", "Binds: bound, refused, failed, unknown.", ("outcome",), [(one,) for one in BINDS]
        )
        self.bind_retried = _counter(registry, "bind_retries", "Tries of a bind after the first.").inc
        self._resolved = _counter(
            registry,
            "binds_settled",
            "Binds whose outcome was unknown at first.",
            ("outcome",),
            [("bound",), ("not-bound",)],
        )
        self.reservation_expired = _counter(
            registry, "reservations_expired", "With reserve filter: pods that were never bound."
        ).inc

    def _count_cluster(self, registry: CollectorRegistry) -> None:
        self.foreign_predicate = _counter(
            registry,
            "foreign_predicates",
            "Pods whose predicate annotations agree with no reservation: forged, or another's.",
        ).inc
        self.node_unreadable = _counter(
            registry, "node_annotations_unreadable", "Node annotations of the agent that could not be read."
        ).inc
        self.disagreed = _counter(
            registry, "placement_disagreements", "Pods whose agent chose other GPUs than planned."
        ).inc
        self._lists = Histogram(
            "gpushare_extender_list_duration_seconds",
            "Time of a list.",
            ["kind"],
            buckets=(0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
            registry=registry,
        )
        for kind in KINDS:
            self._lists.labels(kind)
        self._watches = _counter(
            registry,
            "watches_ended",
            "Watches by why they ended.",
            ("kind", "outcome"),
            [(kind, outcome) for kind in KINDS for outcome in WATCH_OUTCOMES],
        )
        self._unreadable = _counter(
            registry, "objects_unreadable", "Objects that could not be read.", ("kind",), [(kind,) for kind in KINDS]
        )
        self._quota_loads = _counter(
            registry,
            "quota_loads",
            "Readings of the quota; a malformed one leaves the last good in force.",
            ("outcome",),
            [("absent",), ("good",), ("malformed",)],
        )
        # Apart from the counter: a mistake that stays is no increase, nor is one that was there at the start.
        self._quota_malformed = self.gauge("quota_malformed", "1 while the quota's ConfigMap cannot be used.")
        self._retries = _counter(
            registry,
            "retries",
            "Waiting pods tried again: their quota allows them, or a node not asked about would take them.",
            ("reason",),
            [("node",), ("quota",)],
        )
        self.became_leader = _counter(registry, "leaderships", "Times that this replica became the leader.").inc

    # --- requests ---

    def request(self, verb: str, outcome: str, duration_s: float) -> None:
        """`verb` is one of VERBS, `outcome` one of OUTCOMES."""
        self._requests.labels(verb, outcome).inc()
        self._duration.labels(verb).observe(duration_s)

    def filtered(self, fitting: int, failed: int, unresolvable: int) -> None:
        self._filtered.labels("fits").inc(fitting)
        self._filtered.labels("failed").inc(failed)
        self._filtered.labels("unresolvable").inc(unresolvable)

    def bind_ended(self, outcome: str) -> None:
        """One of BINDS."""
        self._binds.labels(outcome).inc()

    def bind_resolved(self, outcome: str) -> None:
        self._resolved.labels(outcome).inc()

    # --- the cluster ---

    def listed(self, kind: str, duration_s: float) -> None:
        self._lists.labels(kind).observe(duration_s)

    def watch_ended(self, kind: str, outcome: str) -> None:
        self._watches.labels(kind, outcome).inc()

    def unreadable(self, kind: str) -> None:
        self._unreadable.labels(kind).inc()

    def quota_loaded(self, outcome: str) -> None:
        self._quota_loads.labels(outcome).inc()
        self._quota_malformed.set(outcome == "malformed")

    def retried(self, reason: str) -> None:
        """node or quota."""
        self._retries.labels(reason).inc()

    # --- the present state ---

    def gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        """A gauge for `set_function`, which is called at each scrape."""
        return Gauge(f"gpushare_extender_{name}", documentation, labels, registry=self.registry)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, in the format that an Accept header asks for."""
        # Prometheus asks for OpenMetrics, a person with curl gets the text format.
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)


def _counter(
    registry: CollectorRegistry,
    name: str,
    documentation: str,
    labels: tuple[str, ...] = (),
    begin: Iterable[tuple[str, ...]] = (),
) -> Counter:
    """`begin` are the label values known from the start."""
    counter = Counter(f"gpushare_extender_{name}", documentation, labels, registry=registry)
    # A label set that first appears with its first event has no increase for rate() to see.
    for values in begin:
        counter.labels(*values)
    return counter
