"""The agent's metrics: counted when things happen, read at /metrics.

Each method is named after its event and never fails. States (GPUs, containers and their use) are not counted but made
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
from gpushare_agent.agent.observability.metrics.text import NodePage, families_text
from gpushare_agent.core.kit.http_answers import in_slices
from gpushare_agent.core.kube.informer import WATCH_OUTCOMES
from gpushare_agent.core.model.errors import RefusalReason

RPC_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SAMPLING_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
MIG_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
METHODS = ("Allocate", "GetPreferredAllocation", "PreStartContainer")
IDENTIFIED_BY = ("listed", "fetched", "repeated", "pod-store")
"""admission/identification.py has the cases."""
_MAX_XID = 200
"""NVIDIA's catalogue ends below it."""
_MAX_VALUES = 64
"""Label values that come from outside, each with a series for ever: further ones share the value `other`."""
_ERROR = re.compile(r"[a-z0-9_]{1,64}")
_EOF = b"# EOF\n"


class Counted:
    """A counter, called with the values of its labels when something happens."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def __call__(self, *labels: str, count: int = 1) -> None:
        self.begin(*labels).inc(count)

    def begin(self, *labels: str) -> Counter:
        """The series of these labels, at zero if nothing was counted yet."""
        return self.counter.labels(*labels) if labels else self.counter


class AgentMetrics:
    """`registry` holds what is counted; `exposition` is the whole answer."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
        registry = self.registry = CollectorRegistry()
        self._page: NodePage | None = None
        self._states: list[Collector] = []
        self._registered: set[str] = set()
        self._uuids: set[str] = set()
        self._errors: set[str] = set()
        ProcessCollector(registry=registry)
        text = "Version of the agent and of Python."
        build = Gauge("gpushare_build_info", text, ["version", "python"], registry=registry)
        build.labels(__version__, platform.python_version()).set(1)
        count, observe = self._counter, self._histogram
        # The kubelet's calls and the containers'.
        text = "Allocate calls, and claims as resourceclaims.resource.k8s.io; allocated, or refused and the reason."
        self.admission = count("admissions", text, resource=(), outcome=(), reason=())
        text = "The kubelet's calls by how their container was identified: listed, fetched, repeated, pod-store."
        self.identified = count("identifications", text, method=IDENTIFIED_BY)
        text = "Duration of a call of the kubelet; the node's admissions wait for it."
        self._rpc_duration = observe("rpc_duration_seconds", text, RPC_BUCKETS_S, "resource", "method")
        text = "Calls of the kubelet by gRPC status; GetPreferredAllocation by the status of its decision."
        self._rpcs = count("rpcs", text, resource=(), method=(), code=())
        text = "RegisterVDevice calls of containers by gRPC status (isolation vcuda)."
        codes = ("OK", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
        self.vdevice_registered = count("vdevice_registrations", text, code=codes)
        self._registrations = count("registrations", "Registrations with the kubelet.", resource=())
        text = "Later registrations: the kubelet restarted or a stream was lost."
        self._reregistrations = count("reregistrations", text, resource=())
        text = "PodResources Lists: admission, recovery, reconcile; overlapped met an open Allocate and should stay 0."
        purposes = ("admission", "overlapped", "reconcile", "recovery")
        self.pod_resources_listed = count("pod_resources_lists", text, purpose=purposes)
        text = "Size of the device IDs in the status of a pod with all cores and memory of the node."
        self._status_bytes = Gauge("gpushare_pod_status_max_bytes", text, registry=registry)
        text = "Allocated device IDs that the kubelet offered; they are not allocated again."
        self.taken_ids_offered = count("taken_ids_offered", text, resource=())
        text = "Corrected differences from the kubelet's ledger; should stay 0."
        kinds = ("adopted", "changed", "ended", "unlisted")
        self.reconcile_corrected = count("reconcile_corrections", text, kind=kinds)
        # The API server's pods.
        self._pod_lists = count("pod_lists", "Lists of the node's pods from the API server.")
        text = "Ended watches of the node's pods: ended, or the kind of error."
        self._pod_watches = count("pod_watches_ended", text, outcome=WATCH_OUTCOMES)
        self._unreadable = count("pods_unreadable", "Pods of the API server that could not be read.")
        text, ends = "Patches of pod annotations by outcome.", ("gone", "patched", "refused", "unavailable")
        self.pod_annotated = count("pod_annotations", text, outcome=ends)
        self.pod_event = count("pod_events", "Events on pods by outcome.", outcome=("dropped", "refused", "sent"))
        self.rejected_pod_deleted = count("rejected_pods_deleted", "Rejected pods deleted after their replacement.")
        # The driver: events, errors, sampling.
        text = "Driver's events: kind xid or double-bit-ecc, xid 1 to 200 or other, ignored by health.ignored_xids."
        self._gpu_events = count("gpu_events", text, kind=(), xid=(), ignored=(), uuid=())
        self._health_changes = count("gpu_health_changes", "GPUs that became unhealthy or healthy.", uuid=(), to=())
        text = "Errors of the GPU driver by its own names; look_failed and events_failed where it could not be read."
        self._driver_errors = count("driver_errors", text, error=())
        self._sampling = observe("sampling_duration_seconds", "Duration of a round of sampling.", SAMPLING_BUCKETS_S)
        self.sampling_failed = count("sampling_failures", "Rounds of sampling that failed.")
        text = "Rounds of sampling that took longer than their period; the next were left out."
        self.sampling_overran = count("sampling_overruns", text)
        text = "Duration of calls for a MIG instance: create or destroy; done, failed, or left as it is."
        self._mig_calls = observe("mig_call_duration_seconds", text, MIG_BUCKETS_S, "call", "outcome")

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counted:
        """`labels` by name, with the values of an only one that are known from the start."""
        counted = Counted(Counter(f"gpushare_{name}", text, labels, registry=self.registry))
        # Of several labels only the caller knows which values go together: `know_resources` and `know_gpus` begin
        # those.
        for value in chain(*labels.values()):
            counted.begin(value)
        return counted

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"gpushare_{name}", text, labels, buckets=buckets, registry=self.registry)

    def know_resources(self, resources: Iterable[str]) -> None:
        """The resources that this node offers: their series begin at zero."""
        for resource in resources:
            self.know_admissions(resource)
            for method in METHODS:
                self._rpc_duration.labels(resource, method)
                self._rpcs.begin(resource, method, "OK")
            for counted in (self._registrations, self._reregistrations, self.taken_ids_offered):
                counted.begin(resource)

    def know_admissions(self, resource: str) -> None:
        """A resource is allocated as `resource`. Begins its series: `increase()` misses a refusal that begins a series."""
        self.admission.begin(resource, "allocated", "")
        for reason in RefusalReason:
            self.admission.begin(resource, "refused", reason.value)

    def know_gpus(self, uuids: Collection[str], status_bytes: int) -> None:
        """The node's GPUs: their series begin at zero. `status_bytes`: kubelet/device_table.py."""
        self._status_bytes.set(status_bytes)
        for uuid in uuids:
            for to in ("healthy", "unhealthy"):
                # Bounded: a series stays for ever, and MIG instances come and go.
                self._health_changes.begin(_bounded(uuid, self._uuids), to)

    def rpc_finished(self, resource: str, method: str, code: str, duration_s: float) -> None:
        """`code` is the gRPC status name."""
        self._rpc_duration.labels(resource, method).observe(duration_s)
        self._rpcs(resource, method, code)

    def registered(self, resource: str) -> None:
        self._registrations(resource)
        # Also at the first registration, so that the series begins at zero.
        self._reregistrations(resource, count=int(resource in self._registered))
        self._registered.add(resource)

    def listed(self, kind: str, duration_s: float) -> None:
        self._pod_lists()

    def watch_ended(self, kind: str, outcome: str) -> None:
        self._pod_watches(outcome)

    def unreadable(self, kind: str) -> None:
        self._unreadable()

    def gpu_event(self, kind: str, xid: int, is_ignored: bool, uuid: str | None) -> None:
        """`kind` is GpuEventKind's value; `xid` counts if the event is one; `uuid` is None if the driver names no GPU."""
        # Bounded, whatever number a future driver reports.
        shown = "" if xid <= 0 else str(xid) if xid <= _MAX_XID else "other"
        gpu = _bounded(uuid, self._uuids) if uuid else ""
        self._gpu_events(str(kind), shown, "true" if is_ignored else "false", gpu)

    def gpu_health_changed(self, uuid: str, healthy: bool) -> None:
        self._health_changes(_bounded(uuid, self._uuids), "healthy" if healthy else "unhealthy")

    def driver_error(self, error: str, count: int = 1) -> None:
        """`error` is the driver's own name of it, in lower case: `gpu_is_lost`, `timeout`."""
        # The driver's library makes the name; a label must have no other letters, whatever it says.
        shown = _bounded(error, self._errors) if _ERROR.fullmatch(error) else "other"
        self._driver_errors(shown, count=count)

    def sampled(self, duration_s: float) -> None:
        """A round of sampling ended well."""
        self._sampling.observe(duration_s)

    def mig_called(self, call: str, outcome: str, duration_s: float) -> None:
        """`call` is create or destroy, `outcome` done, failed or left."""
        self._mig_calls.labels(call, outcome).observe(duration_s)

    def show_mig_instances(self, count: Callable[[], Mapping[str, float]]) -> None:
        """`count`: the instances by their state. Call once, where instances are made on demand."""
        text = (
            "MIG instances on GPUs of mig.on_demand: creating, held, idle, destroying, or foreign, which others made."
        )
        self._show(_StateCollector("gpushare_mig_instances", text, count, "state"))

    def show_node(self, page: NodePage) -> None:
        """The GPUs and containers, made when they are read. Call once."""
        self._page = page

    def show_pod_event_age(self, age_s: Callable[[], float]) -> None:
        """`age_s` is the time since the last response of the API server, or since the start. Call once."""
        text = "Time since the API server's last response, else since the agent's start."
        self._show(_StateCollector("gpushare_pod_event_age_seconds", text, lambda: {"": age_s()}))

    def show_isolations(self, are_available: Callable[[], Mapping[str, bool]]) -> None:
        """`are_available`: by isolation, whether the last check found all that it needs; one that was not checked yet is
        not in it. Call once."""
        text = "1 while the node has all that the isolation needs, 0 while its shares are refused."
        self._show(_StateCollector("gpushare_isolation_available", text, are_available, "isolation"))

    def show_isolation_probe(self, isolation: str, is_failed: Callable[[], bool | None]) -> None:
        """`is_failed`: a program of the agent's own was not limited; None where that was not tried yet. Call once for
        each."""
        text = "1 where a program of the agent's own was not limited, 0 where it was; none before it ran."
        name = "gpushare_isolation_probe_failed"
        self._show(_StateCollector(name, text, lambda: {isolation: is_failed()}, "isolation"))

    def show_node_configuration(self, is_refused: Callable[[], bool]) -> None:
        """Call once, on nodes with settings of their own."""
        text = "1 while the node's named configuration cannot be used."
        self._show(_StateCollector("gpushare_node_configuration_refused", text, lambda: {"": is_refused()}))

    def begin_again(self) -> AgentMetrics:
        """Forgets the states, because the parts that reported them have ended (SIGHUP); counters stay. Returns itself."""
        self._page = None
        for collector in self._states:
            # The next parts register the same names, which the registry refuses while these are there.
            self.registry.unregister(collector)
        self._states.clear()
        return self

    def _show(self, collector: Collector) -> None:
        self._states.append(collector)
        self.registry.register(collector)

    async def prepare(self, *, is_all: bool = False) -> None:
        """Before `exposition`, which holds the loop: what takes long of it, in slices between which other tasks run."""
        if self._page is not None:
            await in_slices(self._page.prepared(is_all))

    def exposition(self, accept: str, *, is_all: bool = False) -> tuple[str, bytes]:
        """Content type and text, as the Accept header asks: Prometheus' text or OpenMetrics. `is_all`: ContainerSeries."""
        try:
            _, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # it compares versions that are no numbers
            _, content_type = choose_encoder("")
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        # The node's rows are made apart from the library: metrics/text.py has the costs.
        node = self._page.text(is_openmetrics=is_openmetrics, is_all=is_all) if self._page is not None else b""
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
