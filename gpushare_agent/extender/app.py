"""The scheduler extender: its parts, how they start, how they end.

It listens at once and answers 503 until it leads and has listed the cluster since then (leader_election.py). On SIGTERM it
stops listening, lets binds end, and releases lease and label: another replica leads within seconds.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct
from pydantic import ValidationError

from gpushare_agent.core.kit.json_schema import loaded
from gpushare_agent.core.kit.process import sd_notify
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.kit.supervision import forever, set_by_signals, stop_task, wait_for
from gpushare_agent.core.kube.client import ALL_NODES, LIVE_PODS, config_map
from gpushare_agent.core.kube.configuration import SERVICE_ACCOUNT
from gpushare_agent.core.kube.events import EventRecorder
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.kube.objects import OwnerReference
from gpushare_agent.core.model.errors import Corrupt, StartupError, Unavailable, os_errors_as
from gpushare_agent.core.settings.former_flags import ADMISSION_FIELDS
from gpushare_agent.core.settings.resource_names import resource_names
from gpushare_agent.core.settings.sections import ExtenderSettings
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.bind import BIND_TIMEOUT_S, Binder, BindTiming, PodWrites
from gpushare_agent.extender.claims_webhook import ClaimsWebhook
from gpushare_agent.extender.cluster_feed import NodesFeed, PodsFeed, QuotaFeed, report_mistakes
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.debug import StatePages, typical_documents
from gpushare_agent.extender.http import ExtenderWeb
from gpushare_agent.extender.leader_election import AlwaysLeads, LeaderElection, LeaderLabel, Leadership, LeaseTerms
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.objects import read_node
from gpushare_agent.extender.preemption import Preemption
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.extender.verbs import Extender
from gpushare_agent.extender.waiters import Waiters

if TYPE_CHECKING:
    from gpushare_agent.core.kube.client import ClusterApi

log = structlog.get_logger(__name__)

API_RETRY_S = 2.0
DEFAULT_NAMESPACE = "kube-system"
"""The lease's namespace, where neither a setting nor the pod names one."""
LEASE_NAME = "gpushare-agent-extender"
"""The Role of manifests/extender names it."""
LEASE_DURATION_S, RENEW_DEADLINE_S, RETRY_PERIOD_S = 15.0, 10.0, 2.0
"""kube-scheduler's own times. A leader must stop before another one may begin, and try at least once more before it
stops."""
REQUEST_TIMEOUT_S = min(BIND_TIMEOUT_S / 2, LEASE_DURATION_S - RENEW_DEADLINE_S)
"""The time of one request to the API server: two fit the time of a bind, and a request that a leader began at its deadline
is over when another replica can lead."""
MOST_FITTING_NODES = 100
"""The most that filter answers."""
ADMISSION_CONFIGS = (
    Path("/etc/kubernetes/gpu-admission.config"),
    Path("/etc/kubernetes/gpu-quota-admission.config"),
)
"""The files that gpu-admission's image, and the one named gpu-quota-admission, read without a flag."""
ADMISSION_CONFIG_BYTES = 64 << 10
_UNUSED = frozenset({"SkipBindTime"})
"""SkipBindTime is accepted and not used: there is no such wait here."""


class ExtenderParts(Struct, kw_only=True):
    """Everything that runs."""

    api: ClusterApi
    state: ClusterState
    election: LeaderElection | AlwaysLeads
    leadership: Leadership
    label: LeaderLabel | None
    informers: tuple[Informer, ...]
    pods: PodsFeed
    binder: Binder
    waiters: Waiters
    preemption: Preemption
    events: EventRecorder
    web: ExtenderWeb


GC_THRESHOLDS = (50_000, 20, 100)
"""Objects before a collection of each generation. With Python's own (700, 10, 10) a list of 50,000 pods sets off full
collections again and again: 5 of 22 s of processor time, and filter waits for them (measured)."""


async def run(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    # Before anything is read: the first list is what makes the most objects.
    gc.set_threshold(*GC_THRESHOLDS)
    stop = set_by_signals()
    async with AsyncExitStack() as stack:
        # None where the process stops before the credentials are there: then nothing has to be undone.
        api = await _open_api(settings, stack, stop)
        if api is not None:
            await serve(build(settings, api), stop, on_listed=_freeze_memory)
    return 0


async def serve(parts: ExtenderParts, stop: asyncio.Event, *, on_listed: Callable[[], None] = lambda: None) -> None:
    """Runs every part until `stop` is set. `on_listed` is called each time that the cluster was listed, before the first
    answer. Raises a group of errors where a part fails."""
    async with asyncio.TaskGroup() as group:

        def start(name: str, body: Callable[[], Awaitable[object]]) -> asyncio.Task[object]:
            return group.create_task(forever(name, body), name=name)

        # The server first: health has to answer, and the scheduler has to read 503, while the cluster is still being
        # listed.
        web = start("extender web", parts.web.run)
        tasks = [
            start("binds", parts.binder.run),
            start("waiters", parts.waiters.run),
            start("preemption", parts.preemption.run),
            start("events", partial(parts.events.run, parts.api)),
            start("leadership", partial(parts.leadership.run, on_listed)),
            *(start("informer", partial(one.run, parts.api)) for one in parts.informers),
        ]
        # None outside of a pod: no Service selects such a process.
        labelling = start("leader label", parts.label.run) if parts.label is not None else None
        electing = start("election", parts.election.run)
        # A port that cannot be had ends the process before the service manager hears that it is ready.
        await parts.web.wait_listening()
        sd_notify("READY=1", os.environ)
        await stop.wait()
        sd_notify("STOPPING=1", os.environ)
        log.info("stopping")
        # The order matters. No new request, and binds under way may end while this replica still leads; then the lease
        # is released, so that another leads within seconds; then the label, which the new leader would remove anyhow;
        # the rest holds nothing that others wait for.
        await stop_task(web)
        await stop_task(electing)
        await parts.election.release()
        if parts.label is not None and labelling is not None:
            await stop_task(labelling)
            await parts.label.withdraw()
        for task in tasks:
            task.cancel()


def build(settings: Settings, api: ClusterApi, *, clock: Callable[[], float] = time.monotonic) -> ExtenderParts:
    """The parts, not yet running. `clock` is that of reservations."""
    chosen = with_admission_config(settings.extender)
    # The agents' names, from the same settings: other names would be other resources.
    names = resource_names(settings)
    metrics, events = ExtenderMetrics(), EventRecorder(socket.gethostname())
    policy = ClusterPolicy(names=names, share_policy=settings.placement.share_policy, node_policy=chosen.node_policy)
    state = ClusterState(policy=policy)
    election = _election(chosen, api)
    pods = PodsFeed(state=state, model_label=chosen.model_label, clock=clock)
    writes = PodWrites(api=api, names=names, leads=election.leads)
    binder = Binder(
        state=state,
        writes=writes,
        unscheduled=pods.unscheduled,
        metrics=metrics,
        timing=BindTiming(clock=clock),
    )
    read = partial(read_node, names=names, model_label=chosen.model_label, pool_label=chosen.pool_label)
    nodes = NodesFeed(state=state, read=read, metrics=metrics, on_report=pods.drop_missing, clock=clock)
    every_node = Informer(kind="nodes", watched=ALL_NODES, handler=nodes, metrics=metrics)
    pods.on_waiting = partial(
        report_mistakes,
        state=state,
        events=events,
        # Another program's names are right where a node offers them. A new leader lists the nodes first, then all pods.
        may_tell=lambda: election.leads() and every_node.has_listed,
    )
    informers = (
        # In the order in which a new leader lists them: no pod may be allowed before the quota is read, and a pod needs
        # its node.
        Informer(
            kind="configmap",
            watched=config_map(chosen.quota_namespace, chosen.quota_name),
            handler=QuotaFeed(state=state.quota, events=events, metrics=metrics),
            metrics=metrics,
        ),
        every_node,
        Informer(kind="pods", watched=LIVE_PODS, handler=pods, metrics=metrics),
    )
    leadership = Leadership(
        election=election, informers=informers, state=state, unscheduled=pods.unscheduled_pods, metrics=metrics
    )
    waiters = Waiters(state=state, writes=writes, unscheduled=pods.unscheduled, metrics=metrics, clock=clock)
    preemption = Preemption(state=state, writes=writes, unscheduled=pods.unscheduled, events=events, clock=clock)
    # Set later, because the waiters ask the quota, and the quota tells the waiters.
    state.quota.on_gain = waiters.gained
    extender = Extender(
        state=state,
        binder=binder,
        metrics=metrics,
        waiters=waiters,
        preemption=preemption,
        reserves_at_filter=chosen.reserve == "filter",
        most_fitting=MOST_FITTING_NODES,
    )
    pods.on_scheduled = extender.scheduled
    web = ExtenderWeb(
        settings=chosen,
        verbs=extender,
        metrics=metrics,
        ready=leadership.not_ready,
        warm=leadership.not_warm,
        # A lambda, because `parts` are made below, with this server among them.
        pages=StatePages(head=lambda: document(parts), nodes=state),
        webhook=ClaimsWebhook(api=api, names=names) if chosen.claims_webhook != "off" else None,
        is_webhook_open=chosen.claims_webhook == "open",
    )
    parts = ExtenderParts(
        api=api,
        state=state,
        election=election,
        leadership=leadership,
        label=_leader_label(api, election),
        informers=informers,
        pods=pods,
        binder=binder,
        waiters=waiters,
        preemption=preemption,
        events=events,
        web=web,
    )
    show_state(parts, metrics)
    return parts


def with_admission_config(settings: ExtenderSettings, usual: Sequence[Path] = ADMISSION_CONFIGS) -> ExtenderSettings:
    """The settings with those of gpu-admission's configuration file in place. Raises StartupError."""
    # gpu-admission's file is for a migration; most installations have none.
    path = settings.config or next((path for path in usual if path.is_file()), None)
    if path is None:
        return settings
    try:
        # Validated as a whole again: what the file says has to keep the rules of our settings, label names among them.
        found = ExtenderSettings.model_validate(settings.model_dump() | read_admission_config(path))
    except ValidationError as e:
        problems = "; ".join(f"{error['loc'][0]}: {error['msg']}" for error in e.errors(include_url=False))
        raise StartupError(f"cannot use gpu-admission's configuration {path}: {problems}") from e
    log.info("admission_config_read", path=str(path))
    return found


def read_admission_config(path: Path) -> dict[str, str]:
    """The file's content, by the names of our settings. Raises StartupError."""
    what = f"cannot use gpu-admission's configuration {path}"
    with os_errors_as(StartupError, what, otherwise="correct extender.config or leave it out"):
        content = read_regular(path, ADMISSION_CONFIG_BYTES, follow=True)
    try:
        raw = loaded(content)
    except Corrupt as e:
        raise StartupError(f"{what}: {e}") from e
    if not isinstance(raw, dict):
        raise StartupError(f"{what}: it is no JSON object")
    found = {}
    for field, value in sorted(raw.items()):
        # A misspelt field would be a default in silence: pods would run without their quota.
        if field not in ADMISSION_FIELDS and field not in _UNUSED:
            known = ", ".join(sorted(ADMISSION_FIELDS))
            raise StartupError(f"{what}: {field[:80]!r} is no field of it; the fields are {known}")
        # An empty field leaves our setting as it is.
        if value and field not in _UNUSED:
            if not isinstance(value, str):
                raise StartupError(f"{what}: {field} is no text")
            found[ADMISSION_FIELDS[field]] = value
    return found


def document(parts: ExtenderParts) -> Mapping[str, object]:
    """The state without the nodes, for a person."""
    return {
        "is_leading": parts.election.leads(),
        "holder": parts.election.holder,
        "not_ready": parts.leadership.not_ready(),
        "waiting_pods": len(parts.pods.unscheduled_pods()),
        "open_binds": parts.binder.open_binds,
        "typical_pods": typical_documents(parts.state.typical),
    }


def _freeze_memory() -> None:
    """The listed objects live long: without this the garbage collector would stop everything for a quarter of a second,
    again and again, to walk fifty thousand pods."""
    gc.collect()
    gc.freeze()


def _election(settings: ExtenderSettings, api: ClusterApi) -> LeaderElection | AlwaysLeads:
    # One replica: an election would only add a lease to be lost.
    if not settings.leader_elect:
        return AlwaysLeads()
    # All replicas of one Deployment have one namespace, so they agree without a setting.
    namespace = settings.lease_namespace or os.environ.get("POD_NAMESPACE", "") or DEFAULT_NAMESPACE
    terms = LeaseTerms(
        namespace=namespace,
        name=LEASE_NAME,
        owner=lease_owner(namespace),
        duration_s=LEASE_DURATION_S,
        renew_deadline_s=RENEW_DEADLINE_S,
        retry_s=RETRY_PERIOD_S,
    )
    # Random next to the host's name: a container that restarts in its pod must not take the lease for its own.
    return LeaderElection(api=api, identity=f"{socket.gethostname()}_{uuid.uuid4().hex}", terms=terms)


def lease_owner(namespace: str, token: Path = SERVICE_ACCOUNT / "token") -> OwnerReference | None:
    """This pod's service account, which goes with the extender's manifests, where it is of the namespace; None elsewhere.
    Format: the claims of a projected token, a JSON Web Token."""
    with suppress(OSError, ValueError, LookupError, TypeError, Corrupt):  # no pod, or another kind of token
        payload = token.read_text(encoding="ascii").split(".")[1]
        bound = loaded(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["kubernetes.io"]
        name, uid = str(bound["serviceaccount"]["name"]), str(bound["serviceaccount"]["uid"])
        if bound["namespace"] == namespace:
            return OwnerReference(api_version="v1", kind="ServiceAccount", name=name, uid=uid)
    return None


def _leader_label(api: ClusterApi, election: LeaderElection | AlwaysLeads) -> LeaderLabel | None:
    """None where this process does not know its pod, or is in none."""
    named = {variable: os.environ.get(variable, "") for variable in ("POD_NAMESPACE", "POD_NAME")}
    missing = sorted(variable for variable, value in named.items() if not value)
    if not missing:
        return LeaderLabel(api=api, election=election, namespace=named["POD_NAMESPACE"], name=named["POD_NAME"])
    # Elsewhere a missing name is no mistake: a process next to the scheduler has no pod.
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # in a pod
        then = "this pod gets no label when it leads: a Service that selects by it does not find this replica"
        log.warning("leader_label_off", missing=missing, then=then, cure="set these variables from the pod's metadata")
    return None


def show_state(parts: ExtenderParts, metrics: ExtenderMetrics) -> None:
    """Registers the gauges."""
    pods = parts.pods
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("leading", "1 while this replica leads.", lambda: not parts.leadership.not_ready()),
        ("open_binds", "Binds of unknown outcome.", lambda: parts.binder.open_binds),
        ("waiting_pods", "Pods without a node that ask for GPUs.", lambda: len(pods.unscheduled_pods())),
    )
    for name, documentation, read in gauges:
        # Read at each scrape: a gauge that is set at each change would be wrong after the one that forgot it.
        metrics.gauge(name, documentation).set_function(read)
    objects = metrics.gauge("objects", "Objects of the cluster that count.", "kind")
    for informer in parts.informers:
        objects.labels(informer.kind).set_function(partial(getattr, informer, "count"))


async def _open_api(settings: Settings, stack: AsyncExitStack, stop: asyncio.Event) -> ClusterApi | None:
    """The API server's client; None where `stop` is set before. Retried until the credentials are there."""
    from gpushare_agent.core.kube.client import open_cluster_api

    while not stop.is_set():
        # A service account's token may be mounted after the process has started.
        opening = open_cluster_api(kubeconfig=settings.kubeconfig, request_s=REQUEST_TIMEOUT_S)
        try:
            return await stack.enter_async_context(opening)
        except Unavailable as e:
            log.warning("kubernetes_not_ready", error=str(e), retried_in_s=API_RETRY_S)
        await wait_for(stop, API_RETRY_S)
    return None
