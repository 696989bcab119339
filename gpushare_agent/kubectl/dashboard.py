"""The page of all nodes, for a person with a kubeconfig: what is allocated where, and why pods wait, GPU by GPU.

It has the extender's view of the cluster, which informers read with the person's own rights; it decides and writes nothing,
and needs no extender. It listens on this machine alone, and answers no other web page (debug_guard.py). What comes from pods
is bounded here and becomes text alone in the browser. The long answer comes in pages of nodes (extender/debug.py).

The use of a node's GPUs is known to its agent alone. `/nodes/NODE/` is the agent's page, in this program's version; what it
shows, and the use on the cluster's page, is read from the agent through the API server's proxy, while somebody looks.
State owned: the informers' view of the cluster, what the scheduler says of waiting pods, where agents were found, and since
when the API server does not answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from msgspec import Raw, field
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.core.cli.command_line import AGENT_NAMESPACE, Invocation
from gpushare_agent.core.kit.http_answers import (
    SECURITY_HEADERS,
    BadQueryError,
    JsonBody,
    RequestQueue,
    Word,
    bad_query,
    encode,
    join_in_slices,
    json_answer,
    read_query,
    shown,
)
from gpushare_agent.core.kit.http_server import HttpLimits, HttpServer
from gpushare_agent.core.kit.supervision import forever
from gpushare_agent.core.kit.tcp_listeners import listen_tcp
from gpushare_agent.core.kube.client import ALL_NODES, LIVE_PODS, KubeApi
from gpushare_agent.core.kube.informer import Informer, Lost
from gpushare_agent.core.kube.pods import PodJson, PodSpec, scheduler_message
from gpushare_agent.core.kube.scheduling import CPU, MEMORY, PODS, pod_needs
from gpushare_agent.core.model.errors import AgentError, NotFound, Unavailable
from gpushare_agent.core.model.names import MIB, PodUid
from gpushare_agent.core.model.resources import Request, ResourceNames, request_of
from gpushare_agent.core.node_report.reported import reported_state
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_choice import accepting, choice_of
from gpushare_agent.core.placement.mistakes import Offer, mistakes
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.core.web.debug_guard import Guard
from gpushare_agent.core.web.page import WebPage
from gpushare_agent.extender.cluster_feed import NodesFeed, PodsFeed
from gpushare_agent.extender.cluster_state import MAX_ASKING
from gpushare_agent.extender.debug import StatePages
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.decisions.pod_plan import signature_of
from gpushare_agent.extender.decisions.quota import NOTHING, Quota
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.objects import read_node
from gpushare_agent.kubectl.agent_client import AgentPod, find_agent, read_through_pod
from gpushare_agent.kubectl.cluster_nodes import open_cluster
from gpushare_agent.kubectl.cluster_reading import (
    QUOTA_NOT_ENFORCED,
    NodeFacts,
    NodesReader,
    ReadCluster,
    new_state,
    node_facts,
    pod_view,
    read_claims,
    read_quota_of,
    shows_extender,
    view_of,
)
from gpushare_agent.kubectl.decisions.cluster_view import NodeView, PodView, hindrance
from gpushare_agent.kubectl.decisions.instances import ClaimCluster
from gpushare_agent.kubectl.explain_waiting import (
    asked_by,
    first_reason,
    lines_of,
    may_want_instances,
    waiting_document,
    wanted_instances,
)

T = TypeVar("T")

ADDRESS = "localhost"
INDEX = "cluster.html"
MOST_WAITING = 200
MOST_MIG_NODES = 1000
CLAIMS_S = QUOTA_S = 30.0
MOST_NODES = 20
"""Shown GPU by GPU for one waiting pod."""
_MAX_UID_CHARS = 128
_MAX_NODE_CHARS = 253
_BACKLOG = 16
_NODE_PATHS = "node|history|changes|decisions"
"""The paths of an agent's API: no other path of a pod is reachable through this page."""
_PROBE_S = 5.0
_READS = 8
"""Documents of agents that are read at once, each of up to 16 MiB."""


def _keep(kept: dict[PodUid, T], uid: PodUid, value: T | None) -> None:
    if value is not None:
        kept[uid] = value
    else:
        kept.pop(uid, None)


class _Pods(PodsFeed, kw_only=True, eq=False):
    """Also keeps the pods that ask for GPUs as the decisions read them, and those that wait as they are."""

    views: dict[PodUid, PodView] = field(default_factory=dict)
    waiting: dict[PodUid, PodJson] = field(default_factory=dict)
    claiming: dict[PodUid, PodJson] = field(default_factory=dict)
    """Those that wait for something else, perhaps for a MIG instance."""
    others: dict[PodUid, tuple[str, Mapping[str, int]]] = field(default_factory=dict)
    """What pods ask of their node besides CPU, memory and GPUs."""
    extenders: dict[PodUid, bool] = field(default_factory=dict)
    """Those that show that an extender enforces the quota."""

    def put_pod(self, read: PodJson) -> bool:
        is_ours, uid = super().put_pod(read), PodUid(read.meta.uid or "")
        names = self.state.policy.names
        view = pod_view(read, names) if is_ours else None
        # A mistyped name asks for nothing of ours.
        waits = not read.spec.node_name and (view is not None or mistakes(read, names, self.state.offer))
        _keep(self.views, uid, view)
        _keep(self.waiting, uid, read if waits else None)
        others, node = _of_other_resources(read.spec, names.names), read.spec.node_name
        _keep(self.others, uid, (node, others) if node and others else None)
        _keep(self.extenders, uid, shows_extender(read) or None)
        claims = not waits and not read.spec.node_name and may_want_instances(read)
        _keep(self.claiming, uid, read if claims else None)
        # The informer tells the end of those alone of which this returned True.
        return bool(is_ours or waits or claims or uid in self.extenders)

    def remove(self, key: str) -> None:
        super().remove(key)
        for kept in (self.views, self.waiting, self.claiming, self.others, self.extenders):
            kept.pop(PodUid(key), None)


class _Nodes(NodesFeed, kw_only=True, eq=False):
    """Also keeps what kube-scheduler checks of a node, and its GPUs on which MIG instances are made on demand."""

    facts: dict[str, NodeFacts]

    def put(self, raw: Raw) -> bool:
        name, has_shares = self.key(raw), super().put(raw)
        ledger = self.state.node_ledger(name) if has_shares else None
        facts = node_facts(raw, ledger.node if ledger is not None else None)
        # The informer tells the end of those alone of which this returned True.
        if has_gpus := has_shares or bool(facts.mig_gpus):
            self.facts[name] = facts
            if not has_shares:
                super().remove(name)  # it may have had some until now
        return has_gpus

    def remove(self, key: str) -> None:
        super().remove(key)
        self.facts.pop(key, None)


class ClusterPage:
    """`names` and `settings` must be those of the agents. `run` once."""

    def __init__(
        self, settings: Settings, names: ResourceNames, *, port: int, agent_namespace: str = AGENT_NAMESPACE
    ) -> None:
        self._settings = settings
        self._agent_namespace = agent_namespace
        self._agents: dict[str, AgentPod] = {}
        self._lost: Lost | None = None
        self._names = names = replace(names, gpu=())  # a node's object does not show NVIDIA's units
        self._facts: dict[str, NodeFacts] = {}
        self._port = port
        self._quota, self._quota_problem, self._quota_at = Quota(), "", -math.inf
        self._claims, self._claims_at = ClaimCluster(slices=(), claims=(), classes=()), -math.inf
        metrics = ExtenderMetrics()
        self._state = new_state(settings, names)
        self._pods = _Pods(state=self._state)
        labels = settings.extender
        read = partial(read_node, names=names, model_label=labels.model_label, pool_label=labels.pool_label)
        nodes = _Nodes(
            state=self._state, read=read, metrics=metrics, on_report=self._pods.drop_missing, facts=self._facts
        )
        self._informers = (
            Informer(kind="nodes", watched=ALL_NODES, handler=nodes, metrics=metrics),
            Informer(kind="pods", watched=LIVE_PODS, handler=self._pods, metrics=metrics),
        )
        self._page, self._node_page = WebPage(INDEX), WebPage()
        self._reads = asyncio.Semaphore(_READS)
        # Without a token: the page shows only what this person may read, on this machine.
        self._guard = Guard(None, has_page=True)

    async def run(self, api: KubeApi, *, on_listening: Callable[[int], None]) -> NoReturn:
        """Serve until cancelled. `on_listening` gets the port. Raises Unavailable: the port cannot be used."""
        await asyncio.to_thread(self._page.load)
        await asyncio.to_thread(self._node_page.load)
        # Before the informers: a port that is taken ends the command at once.
        listeners = await listen_tcp(ADDRESS, self._port, backlog=_BACKLOG, only_loopback=True)
        server = HttpServer(
            "dashboard", self._routes(api), limits=HttpLimits(), middlewares=[self._guarded], headers=SECURITY_HEADERS
        )
        on_listening(listeners[0].getsockname()[1])
        async with asyncio.TaskGroup() as group:
            for one in self._informers:
                group.create_task(forever("informer", partial(one.run, api)), name="informer")
            group.create_task(forever("probe", partial(self._probe, api)), name="probe")
            await server.serve(listeners)
        raise AssertionError("unreachable: the server serves until it is cancelled")

    async def _probe(self, api: KubeApi) -> NoReturn:
        """Finds out within seconds that the API server is gone: a watch whose other end has gone is silent, like most
        watches."""
        while True:
            try:
                await api.check_answers(timeout_s=_PROBE_S)
            except Unavailable as e:
                self._lost = Lost(since=self._lost.since if self._lost is not None else time.monotonic(), why=str(e))
            else:
                self._lost = None
            await asyncio.sleep(_PROBE_S)

    def _routes(self, api: KubeApi) -> list[web.AbstractRouteDef]:
        queue = RequestQueue()
        pages = StatePages(head=self._head, nodes=self._state)
        return [
            web.get("/", self._page.index),
            *(web.get(path, handler) for path, handler in self._page.routes()),
            web.get("/api/v1/cluster", pages.show),
            web.get("/api/v1/waiting", queue.one_at_a_time(partial(self._show_waiting, api))),
            web.get("/api/v1/mig", self._show_mig),
            web.get("/api/v1/namespaces", queue.one_at_a_time(partial(self._show_namespaces, api))),
            web.get("/nodes/{node}/", self._node_page.index),
            *(web.get(f"/nodes/{{node}}{path}", handler) for path, handler in self._node_page.routes()),
            web.get(f"/nodes/{{node}}/api/v1/{{what:{_NODE_PATHS}}}", partial(self._show_of_agent, api)),
        ]

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        denied = await self._guard.denies(request.raw_path, request.headers, is_local=True)  # listens there only
        if denied is not None:
            return web.Response(status=denied.status, text=f"{denied.text}\n")
        return await handler(request)

    async def _show_of_agent(self, api: KubeApi, request: web.Request) -> web.StreamResponse:
        """The agent's answer; a failure as its text."""
        node = request.match_info["node"]
        try:
            if node not in self._facts:
                raise NotFound(f"no node {shown(node)} is known")
            if (agent := self._agents.get(node)) is None:
                agent = await find_agent(api, self._settings, node=node, namespace=self._agent_namespace)
                self._agents[node] = agent
            path, query = f"/api/v1/{request.match_info['what']}", dict(request.query)
            async with self._reads:
                answer = await read_through_pod(api, agent, path, query)
            return await JsonBody(answer).answer(request)
        except AgentError as e:
            # The pod may be another by now.
            self._agents.pop(node, None)
            return json_answer(request, {"error": str(e)}, status=404 if isinstance(e, NotFound) else 502)

    def _head(self) -> Mapping[str, Any]:
        received = [one.last_message_at for one in self._informers]
        lost = [one for one in (self._lost, *(informer.lost for informer in self._informers)) if one is not None]
        first = min(lost, key=lambda one: one.since, default=None)
        now = time.monotonic()
        return {
            "version": __version__,
            "not_listed": [one.kind for one in self._informers if not one.has_listed],
            "silent_seconds": max((now - at for at in received if at is not None), default=None),
            "lost": {"seconds": now - first.since, "why": first.why} if first is not None else None,
            "memory_block_bytes": self._names.memory_block_mib * MIB,
            "unit_bytes": self._names.gpu_mem_unit_mib * MIB,
        }

    async def _show_mig(self, request: web.Request) -> web.StreamResponse:
        """The nodes with GPUs on which MIG instances are made on demand, and what they report of them."""

        def document(facts: NodeFacts) -> Mapping[str, Any]:
            gpus = [reported_state(gpu) for gpu in facts.mig_gpus]
            return {"is_ready": facts.is_ready, "is_cordoned": facts.offer.is_cordoned, "mig_gpus": gpus}

        found = [(name, facts) for name, facts in self._facts.items() if facts.mig_gpus]
        pieces = (encode({name: document(facts)})[1:-1] for name, facts in found[:MOST_MIG_NODES])
        nodes = await join_in_slices(pieces, b",")
        return await JsonBody(b'{"count":%d,"nodes":{%s}}' % (len(found), nodes)).answer(request)

    async def _show_waiting(self, api: KubeApi, request: web.Request) -> web.StreamResponse:
        """All waiting pods; with `uid` one pod as `explain` has it, and the nodes' GPUs with what each lacks."""
        try:
            asked = read_query(request.query, {"uid": Word(most_characters=_MAX_UID_CHARS)})
        except BadQueryError as e:
            return bad_query(request, e)
        waiting, problem = list(self._pods.waiting.values()), ""
        if not asked["uid"] and self._pods.claiming:
            try:
                claims = await self._read_claims(api)
            except AgentError as e:
                problem = str(e)
            else:
                waiting += [one for one in self._pods.claiming.values() if any(wanted_instances(one, claims))]
        if not asked["uid"]:
            first = [self._waiting(pod) for pod in waiting[:MOST_WAITING]]
            return json_answer(request, {"count": len(waiting), "pods": first, "claims_problem": problem})
        await self._read_quota(api)
        is_enforced, problem = self._is_quota_enforced(), self._quota_problem
        self._state.quota.quota = self._quota if is_enforced else Quota()
        uid = PodUid(asked["uid"])
        pod = self._pods.waiting.get(uid) or self._pods.claiming.get(uid)
        used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for node, more in self._pods.others.values():
            used[node].update(more)
        # The cluster now, as `explain` lists it.
        view = view_of(self._state, self._facts, self._pods.views, lambda one: used[one.node.name] | _hosted(one))
        read = ReadCluster(view=view, state=self._state, quota_problem=problem if is_enforced else QUOTA_NOT_ENFORCED)
        try:
            found = await waiting_document(api, read, pod) if pod is not None else None
        except AgentError as e:
            return json_answer(request, {"error": str(e)}, status=502)
        if pod is None or found is None:
            return json_answer(request, {"error": "the pod does not wait any more"}, status=404)
        lines = {"lines": lines_of(found, pod_needs(pod.spec))}
        return json_answer(request, {**found, **lines, **self._waiting(pod), **self._nodes_for(pod, read)})

    async def _read_claims(self, api: KubeApi) -> ClaimCluster:
        """At most so old: a page asks every few seconds. Raises AgentError."""
        if time.monotonic() - self._claims_at > CLAIMS_S:
            self._claims = await read_claims(api)
            self._claims_at = time.monotonic()
        return self._claims

    async def _read_quota(self, api: KubeApi) -> None:
        """The quota, and why it is not known."""
        try:
            self._quota, self._quota_problem = await read_quota_of(api, self._settings)
        except AgentError as e:  # the page shows what it has
            self._quota_problem = str(e)

    def _is_quota_enforced(self) -> bool:
        # Until the pods are listed, for which rights may be missing, nothing is known of extenders.
        is_unknown = not all(one.has_listed for one in self._informers)
        return is_unknown or bool(self._pods.extenders) or not self._quota.namespaces

    async def _show_namespaces(self, api: KubeApi, request: web.Request) -> web.StreamResponse:
        """What each namespace has allocated, as quotas count it, and how it stands with its quota: of those that have pods
        on nodes, or a quota."""
        if time.monotonic() - self._quota_at > QUOTA_S:
            await self._read_quota(api)
            self._quota_at = time.monotonic()
        state, names = self._state.quota, self._names
        limited = self._quota.namespaces if not self._quota_problem else {}
        used = state.totals()

        def document(name: str) -> Mapping[str, Any]:
            use, limits = used.get(name, NOTHING), limited.get(name)
            return {
                "namespace": name,
                "cores": use.vcore,
                "memory_bytes": use.vmemory * names.memory_block_mib * MIB,
                "pools": limits.pools if limits is not None else (),
                "limits": state.standing(name, limits) if limits is not None else None,
            }

        found = await join_in_slices((encode(document(name)) for name in sorted({*used, *limited})), b",")
        head = encode(
            {
                "quota_problem": self._quota_problem,
                "quota_note": "" if self._is_quota_enforced() else QUOTA_NOT_ENFORCED,
            }
        )
        return await JsonBody(head[:-1] + b',"namespaces":[' + found + b"]}").answer(request)

    def _waiting(self, read: PodJson) -> dict[str, Any]:
        """The requests of as many containers as are planned: a pod may have thousands. None of a pod whose amounts mean
        something else: `asked` has them as they are written."""
        uid, offer = PodUid(read.meta.uid or ""), self._state.offer
        known = self._pods.views.get(uid)
        is_mistaken = known is None or mistakes(read, self._names, Offer(offer.resources))
        message, mistake = scheduler_message(read), mistakes(read, self._names, offer)
        containers = () if known is None or is_mistaken else known.pod.containers
        requests = [request_of(one, self._names) for one in containers[:MAX_ASKING]]
        return {
            "uid": uid,
            "namespace": read.meta.namespace,
            "pod": read.meta.name,
            "asked": asked_by(read),
            "requests": [
                {"cores": one.cores, "memory_bytes": self._names.requested_mib(one) * MIB} for one in requests
            ],
            "more_requests": max(len(containers) - MAX_ASKING, 0),
            "nominated_node": (read.status.nominated_node_name or "")[:_MAX_NODE_CHARS],
            "since": read.meta.created_at,
            "reason": first_reason(message, mistake),
            "message": message,
            "mistake": mistake,
        }

    def _nodes_for(self, waits: PodJson, read: ReadCluster) -> dict[str, Any]:
        """The nodes where it fits first, then the others by name. GPUs are compared with the largest request."""
        known = self._pods.views.get(PodUid(waits.meta.uid or ""))
        if known is None:
            return {"count": 0, "nodes": []}
        # One more is refused as thousands are.
        pod = replace(known.pod, containers=known.pod.containers[: MAX_ASKING + 1])
        answer = self._state.filter(pod, None)
        refused = {**answer.failed, **answer.unresolvable}

        def verdict_of(node: NodeView) -> str:
            unready = "" if node.ledger.node.is_ready else "the node is not ready"
            against = hindrance(known.needs, node.offer, node.used).words
            return "; ".join(filter(None, (unready, *against, refused.get(node.name))))

        verdicts = [(verdict_of(node), node) for node in read.view.nodes]
        # The containers' requests compete for the same GPUs: what fits the largest says most.
        requests = [request for _, request in signature_of(pod, self._names)]
        largest = max(requests, key=lambda one: (one.cores, one.blocks, one.units))
        shown = sorted(verdicts, key=lambda one: (one[0] != "", one[1].name))[:MOST_NODES]
        return {
            "count": len(verdicts),
            "nodes": [
                {
                    "name": node.name,
                    "verdict": verdict or "the pod fits: the scheduler has another reason",
                    "gpus": [
                        _gpu(gpu, largest, "free, but the node does not suit the pod" if verdict else "fits")
                        for gpu in accepting(choice_of(pod.annotations), node.ledger.gpus)
                    ],
                }
                for verdict, node in shown
            ],
        }


def _hosted(ledger: NodeLedger) -> Counter[str]:
    hosted = ledger.hosted
    return Counter({CPU: hosted.cpu_milli, MEMORY: hosted.memory_mib * MIB, PODS: hosted.pods})


def _of_other_resources(spec: PodSpec, ours: Collection[str]) -> Mapping[str, int]:
    """What a pod asks of its node besides CPU, memory and GPUs: nothing, mostly."""
    asking = (spec, *(spec.init_containers or ()), *(spec.containers or ()))
    if {name for one in asking for name in one.requests}.issubset({*ours, CPU, MEMORY}):
        return {}
    return {name: n for name, n in pod_needs(spec, ours).requests.items() if name not in (CPU, MEMORY, PODS)}


def _gpu(gpu: GpuAccount, request: Request, otherwise: str) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "label": gpu.label,
        # What an unhealthy GPU has left is offered to nobody.
        "free_cores": gpu.free_cores if gpu.is_healthy else 0,
        "free_bytes": gpu.free_blocks * gpu.block_mib * MIB if gpu.is_healthy else 0,
        "verdict": lack.of_gpu() if (lack := gpu.lack(request)) is not None else otherwise,
    }


async def run(call: Invocation) -> int:
    """Serve until cancelled. Raises AgentError: the cluster cannot be read, or the port not used."""
    settings, options = call.settings(), call.options

    def on_listening(found: int) -> None:
        print(f"The cluster's GPUs are at http://localhost:{found}/ until Ctrl-C.", flush=True)

    async with open_cluster(settings) as api:
        # The informers repeat a list that fails for ever: one list before them ends the command with the reason.
        reader = NodesReader(settings)
        await api.list_all(ALL_NODES, reader.node)
        page = ClusterPage(settings, reader.names, port=options.port, agent_namespace=options.agent_namespace)
        await page.run(api, on_listening=on_listening)
