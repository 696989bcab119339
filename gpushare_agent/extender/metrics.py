"""The extender's metrics: counted by event, read at /metrics. Listed in docs/reference/extender.md.

Methods never fail. Label sets that are known from the start begin at zero, or rate() would miss the first event. State
owned: the registry, one per instance.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from gpushare_agent import __version__
from gpushare_agent.core.kube.informer import WATCH_OUTCOMES

VERBS = ("bind", "filter", "mutate", "preempt", "prioritize")
KINDS = ("configmap", "nodes", "pods")
REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LIST_BUCKETS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTERS: Mapping[str, tuple[str, Mapping[str, Sequence[str]]]] = {
    "requests": (
        "Requests by how they ended; mutate is the webhook.",
        {"verb": VERBS, "outcome": ("bad", "error", "ok", "unready")},
    ),
    "filtered_nodes": (
        "Nodes that filter answered about: fits, failed, unresolvable.",
        {"verdict": ("failed", "fits", "unresolvable")},
    ),
    "binds": ("Binds: bound, refused, failed, unknown.", {"outcome": ("bound", "failed", "refused", "unknown")}),
    "bind_retries": ("Tries of a bind after the first.", {}),
    "binds_settled": ("Binds whose outcome was unknown at first.", {"outcome": ("bound", "not-bound")}),
    "reservations_expired": ("With reserve filter: pods that were never bound.", {}),
    "node_annotations_unreadable": ("Node annotations of the agent that could not be read.", {}),
    "placement_disagreements": ("Pods whose agent chose other GPUs than planned.", {}),
    "watches_ended": ("Watches by why they ended.", {"kind": KINDS, "outcome": WATCH_OUTCOMES}),
    "objects_unreadable": ("Objects that could not be read.", {"kind": KINDS}),
    "quota_loads": (
        "Readings of the quota; a malformed one leaves the last good in force.",
        {"outcome": ("absent", "good", "malformed")},
    ),
    "retries": (
        "Waiting pods tried again: their quota allows them, or a node not asked about would take them.",
        {"reason": ("node", "quota")},
    ),
    "leaderships": ("Times that this replica became the leader.", {}),
}
"""By name: what is counted, and the values of its labels."""


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
        self._counters: dict[str, Counter] = {}
        for name, (what, labels) in COUNTERS.items():
            counter = Counter(f"gpushare_extender_{name}", what, tuple(labels), registry=registry)
            for values in product(*labels.values()) if labels else ():
                counter.labels(*values)
            self._counters[name] = counter
        what = "Time to answer a request, without reading it."
        self._duration = self._histogram("request_duration_seconds", what, "verb", VERBS, REQUEST_BUCKETS_S)
        self._lists = self._histogram("list_duration_seconds", "Time of a list.", "kind", KINDS, LIST_BUCKETS_S)
        # Apart from the counter: a mistake that stays is no increase, nor is one that was there at the start.
        self._quota_malformed = self.gauge("quota_malformed", "1 while the quota's ConfigMap cannot be used.")

    def count(self, name: str, *labels: str, times: int = 1) -> None:
        """One of COUNTERS."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(times)

    def request(self, verb: str, outcome: str, duration_s: float) -> None:
        self.count("requests", verb, outcome)
        self._duration.labels(verb).observe(duration_s)

    def quota_loaded(self, outcome: str) -> None:
        self.count("quota_loads", outcome)
        self._quota_malformed.set(outcome == "malformed")

    # --- as the informers call them ---

    def listed(self, kind: str, duration_s: float) -> None:
        self._lists.labels(kind).observe(duration_s)

    def watch_ended(self, kind: str, outcome: str) -> None:
        self.count("watches_ended", kind, outcome)

    def unreadable(self, kind: str) -> None:
        self.count("objects_unreadable", kind)

    # --- the present state ---

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """A gauge for `set_function`, which is called at each scrape."""
        return Gauge(f"gpushare_extender_{name}", what, labels, registry=self.registry)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, in the format that an Accept header asks for."""
        # Prometheus asks for OpenMetrics, a person with curl gets the text format.
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)

    def _histogram(
        self, name: str, what: str, label: str, values: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        made = Histogram(f"gpushare_extender_{name}", what, (label,), buckets=buckets, registry=self.registry)
        for value in values:
            made.labels(value)
        return made
