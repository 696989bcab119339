"""The agent's metrics: counted where things happen, read at /metrics.

Methods are named for the event and never fail. States (GPUs, containers and their use) are not counted but made
from the node's snapshot (metrics/node.py), so that no series outlives its pod. Label sets that are known from the start
begin at zero, or rate() would miss the first event. The mutable state is the registry, one per instance, and the page of
the node. Names kept from gpu-manager: docs/reference/formats.md, section 8.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpushare_agent import __version__
from gpushare_agent.model.errors import RefusalReason
from gpushare_agent.observability.metrics.text import NodePage, families_text

RPC_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SAMPLING_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
METHODS = ("Allocate", "GetPreferredAllocation", "PreStartContainer")
IDENTIFIED_BY = ("listed", "fetched", "looked-again", "own-books")
"""admission/identification.py has the cases."""
_MAX_XID = 200
"""NVIDIA's catalogue ends below it."""
_MAX_VALUES = 64
"""Label values that come from outside, each with a series for ever: further ones share the value `other`."""
_ERROR = re.compile(r"[a-z0-9_]{1,64}")
_EOF = b"# EOF\n"


class AgentMetrics:
    """`registry` holds what is counted; `exposition` is the whole answer."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
        registry = self.registry = CollectorRegistry()
        self._page: NodePage | None = None
        self._states: list[Collector] = []
        ProcessCollector(registry=registry)
        build = Gauge(
            "gpushare_build_info",
            "Version of the agent and of Python; always 1.",
            ["version", "python"],
            registry=registry,
        )
        build.labels(__version__, platform.python_version()).set(1)
        self._count_calls()
        self._count_pods()
        self._count_gpus()

    def _count_calls(self) -> None:
        """The kubelet's calls and the containers'."""
        self._admissions = self._counter(
            "admissions",
            "Allocate calls, and claims as resourceclaims.resource.k8s.io; allocated, or refused and the reason.",
            resource=(),
            outcome=(),
            reason=(),
        )
        text = "Targets of calls of the kubelet, by how they were identified: listed, fetched, looked-again, own-books."
        self._identifications = self._counter("identifications", text, method=IDENTIFIED_BY)
        text = "Duration of a call of the kubelet; the node's admissions wait for it."
        self._rpc_duration = self._histogram("rpc_duration_seconds", text, RPC_BUCKETS_S, "resource", "method")
        self._rpcs = self._counter(
            "rpcs",
            "Calls of the kubelet by gRPC status; GetPreferredAllocation by the status of its decision.",
            resource=(),
            method=(),
            code=(),
        )
        self._vdevice_registrations = self._counter(
            "vdevice_registrations",
            "RegisterVDevice calls of containers by gRPC status (isolation vcuda).",
            code=("OK", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
        )
        self._registered: set[str] = set()
        self._registrations = self._counter("registrations", "Registrations with the kubelet.", resource=())
        text = "Registrations after the first: the kubelet restarted or a stream was lost."
        self._reregistrations = self._counter("reregistrations", text, resource=())
        self._lists = self._counter(
            "pod_resources_lists",
            "PodResources Lists: admission, recovery, reconcile; overlapped met an open Allocate and should stay 0.",
            purpose=("admission", "overlapped", "reconcile", "recovery"),
        )
        text = "Size of the device IDs in the status of a pod with all cores and memory of the node."
        self._status_bytes = Gauge("gpushare_pod_status_max_bytes", text, registry=self.registry)
        text = "Device IDs that the kubelet offered though they are allocated; they are not allocated again."
        self._taken_ids = self._counter("taken_ids_offered", text, resource=())
        self._corrections = self._counter(
            "reconcile_corrections",
            "Corrected differences between the agent's ledger and the kubelet's; should stay 0.",
            kind=("adopted", "changed", "ended", "unlisted"),
        )

    def _count_pods(self) -> None:
        """The API server's pods."""
        self._pod_lists = self._counter("pod_lists", "Lists of the node's pods from the API server.")
        self._pod_watches = self._counter(
            "pod_watches_ended",
            "Watches of the node's pods by why they ended: ended, or the kind of error.",
            outcome=("conflict", "corrupt", "ended", "notfound", "rejected", "unavailable"),
        )
        self._unreadable = self._counter("pods_unreadable", "Pods of the API server that could not be read.")
        self._annotations = self._counter(
            "pod_annotations",
            "Patches of pod annotations by outcome.",
            outcome=("gone", "patched", "refused", "unavailable"),
        )
        text = "Events on pods by outcome."
        self._events = self._counter("pod_events", text, outcome=("dropped", "refused", "sent"))
        self._deletions = self._counter("rejected_pods_deleted", "Rejected pods deleted after their replacement.")

    def _count_gpus(self) -> None:
        """The driver: events, errors, sampling."""
        self._uuids: set[str] = set()
        self._errors: set[str] = set()
        text = (
            "Events of the driver: kind xid or double-bit-ecc, xid 1 to 200 or other, ignored by health.ignored_xids."
        )
        self._gpu_events = self._counter("gpu_events", text, kind=(), xid=(), ignored=())
        text = "GPUs that became unhealthy or healthy."
        self._health_changes = self._counter("card_health_changes", text, uuid=(), to=())
        self._driver_errors = self._counter(
            "driver_errors",
            "Errors of the GPU driver by its own names; look_failed and events_failed where it could not be read.",
            error=(),
        )
        self._sampling = self._histogram(
            "sampling_duration_seconds", "Duration of a round of sampling.", SAMPLING_BUCKETS_S
        )
        self._sampling_failures = self._counter("sampling_failures", "Rounds of sampling that failed.")
        text = "Rounds of sampling that took longer than their period; the next were left out."
        self._sampling_overruns = self._counter("sampling_overruns", text)

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        """`labels` by name, with the values of an only one that are known from the start."""
        counter = Counter(f"gpushare_{name}", text, labels, registry=self.registry)
        # Of several labels only the caller knows which values go together: `know_resources` and `know_gpus` begin
        # those.
        for value in chain(*labels.values()):
            counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"gpushare_{name}", text, labels, buckets=buckets, registry=self.registry)

    def know_resources(self, resources: Iterable[str]) -> None:
        """The resources that this node offers: their series begin at zero."""
        for resource in resources:
            self.know_admissions(resource)
            for method in METHODS:
                self._rpc_duration.labels(resource, method)
                self._rpcs.labels(resource, method, "OK")
            self._registrations.labels(resource)
            self._reregistrations.labels(resource)
            self._taken_ids.labels(resource)

    def know_admissions(self, resource: str) -> None:
        """What is allocated as `resource`: `increase()` sees no first refusal of a reason whose series begins with it."""
        self._admissions.labels(resource, "allocated", "")
        for reason in RefusalReason:
            self._admissions.labels(resource, "refused", reason.value)

    def know_gpus(self, uuids: Collection[str], status_bytes: int) -> None:
        """The node's GPUs: their series begin at zero. `status_bytes`: kubelet/device_table.py."""
        self._status_bytes.set(status_bytes)
        for uuid in uuids:
            for to in ("healthy", "unhealthy"):
                # Bounded: a series stays for ever, and MIG instances come and go.
                self._health_changes.labels(_bounded(uuid, self._uuids), to)

    def admission(self, resource: str, outcome: str, reason: str) -> None:
        """An Allocate ended; `reason` is empty unless it was refused."""
        self._admissions.labels(resource, outcome, reason).inc()

    def identified(self, method: str) -> None:
        """A container was found for a call of the kubelet; one of IDENTIFIED_BY."""
        self._identifications.labels(method).inc()

    def rpc_finished(self, resource: str, method: str, code: str, duration_s: float) -> None:
        """`code` is the gRPC status name."""
        self._rpc_duration.labels(resource, method).observe(duration_s)
        self._rpcs.labels(resource, method, code).inc()

    def registered(self, resource: str) -> None:
        self._registrations.labels(resource).inc()
        # Also at the first registration, so that the series begins at zero.
        again = self._reregistrations.labels(resource)
        if resource in self._registered:
            again.inc()
        self._registered.add(resource)

    def pod_resources_listed(self, purpose: str) -> None:
        self._lists.labels(purpose).inc()

    def taken_ids_offered(self, resource: str, count: int) -> None:
        self._taken_ids.labels(resource).inc(count)

    def reconcile_corrected(self, kind: str, count: int = 1) -> None:
        self._corrections.labels(kind).inc(count)

    def listed(self, kind: str, duration_s: float) -> None:
        self._pod_lists.inc()

    def watch_ended(self, kind: str, outcome: str) -> None:
        self._pod_watches.labels(outcome).inc()

    def unreadable(self, kind: str) -> None:
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

    def gpu_event(self, kind: str, xid: int, is_ignored: bool) -> None:
        """`kind` is GpuEventKind's value; `xid` counts where it is one."""
        # Bounded, whatever number a future driver reports.
        shown = "" if xid <= 0 else str(xid) if xid <= _MAX_XID else "other"
        self._gpu_events.labels(str(kind), shown, "true" if is_ignored else "false").inc()

    def gpu_health_changed(self, uuid: str, healthy: bool) -> None:
        self._health_changes.labels(_bounded(uuid, self._uuids), "healthy" if healthy else "unhealthy").inc()

    def driver_error(self, error: str, count: int = 1) -> None:
        """`error` is the driver's own name of it, in lower case: `gpu_is_lost`, `timeout`."""
        # The driver's library makes the name; a label must have no other letters, whatever it says.
        shown = _bounded(error, self._errors) if _ERROR.fullmatch(error) else "other"
        self._driver_errors.labels(shown).inc(count)

    def sampled(self, duration_s: float) -> None:
        """A round of sampling ended well."""
        self._sampling.observe(duration_s)

    def sampling_failed(self) -> None:
        self._sampling_failures.inc()

    def sampling_overran(self) -> None:
        """A round took longer than its period."""
        self._sampling_overruns.inc()

    def show_node(self, page: NodePage) -> None:
        """The GPUs and containers, made when they are read. Call once."""
        self._page = page

    def show_pod_event_age(self, age_s: Callable[[], float]) -> None:
        """`age_s` is the time since the last response of the API server, or since the start. Call once."""
        text = "Time since the last response of the API server; since the agent's start where there was none."
        self._show(_StateCollector("gpushare_pod_event_age_seconds", text, lambda: {"": age_s()}))

    def show_isolations(self, are_available: Callable[[], Mapping[str, bool]]) -> None:
        """`are_available`: by isolation, whether the last check found all that it needs; one that was not checked yet is
        not in it. Call once."""
        text = "1 while the node has all that the isolation needs, 0 while its shares are refused."
        self._show(_StateCollector("gpushare_isolation_available", text, are_available, "isolation"))

    def show_isolation_probe(self, isolation: str, is_failed: Callable[[], bool | None]) -> None:
        """`is_failed`: a program of the agent's own was not limited; None where that was not tried yet. Call once for
        each."""
        text = "1 where a program of the agent's own was not limited on this node, 0 where it was; none before it ran."
        name = "gpushare_isolation_probe_failed"
        self._show(_StateCollector(name, text, lambda: {isolation: is_failed()}, "isolation"))

    def show_node_configuration(self, is_refused: Callable[[], bool]) -> None:
        """Call once, on nodes with settings of their own."""
        text = "1 while the node's named configuration is not in force, for it cannot be used."
        self._show(_StateCollector("gpushare_node_configuration_refused", text, lambda: {"": is_refused()}))

    def begin_anew(self) -> AgentMetrics:
        """Forgets the states, for the parts that reported them have ended (SIGHUP); counters stay. Returns itself."""
        self._page = None
        for collector in self._states:
            # The next parts register the same names, which the registry refuses while these are there.
            self.registry.unregister(collector)
        self._states.clear()
        return self

    def _show(self, collector: Collector) -> None:
        self._states.append(collector)
        self.registry.register(collector)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, in the format that an Accept header names: Prometheus' text or OpenMetrics."""
        try:
            _, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # it compares versions that are no numbers
            _, content_type = choose_encoder("")
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        # The node's rows are made apart from the library: metrics/text.py has the costs.
        node = self._page.text(is_openmetrics=is_openmetrics) if self._page is not None else b""
        counted = families_text(self.registry.collect(), is_openmetrics=is_openmetrics)
        return content_type, node + counted + (_EOF if is_openmetrics else b"")


def _bounded(value: str, known: set[str]) -> str:
    if value not in known:
        if len(known) >= _MAX_VALUES:
            return "other"
        known.add(value)
    return value


class _StateCollector(Collector):
    """One gauge, read at each scrape: by the value of its only label, or one value where it has none; no sample for
    None."""

    def __init__(
        self, name: str, documentation: str, read: Callable[[], Mapping[str, float | None]], label: str = ""
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._read = read
        self._labels = [label] if label else []

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry would collect while registering

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        # None is no sample at all; the family stays, so that its help is shown from the start.
        for one, value in self._read().items():
            if value is not None:
                family.add_metric([one] if self._labels else [], float(value))
        yield family
