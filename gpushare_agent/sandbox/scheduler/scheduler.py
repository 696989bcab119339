"""The two schedulers of the embedded cluster. One counts resources and allocates claims (claims.py). The other also asks
an extender, as kube-scheduler does: its own resource fit, filter, prioritize, bind.

The free resources of a node are the allocatable ones less the pods' requests. `ExtenderScheduler` decides one pod at a
time. Binds go on in the background, and pods that are being bound count as on their node. A pod that fits nowhere waits
with the extender's reasons. It is tried again with back-off once something that could help has changed, and occasionally
without a change. There is no preemption and no score of the scheduler's own. It asks by JSON over HTTP, extender v1,
`nodeCacheCapable`: field names are those of k8s.io/kube-scheduler/extender/v1 (its types have no JSON tags, so they are
the names in Go).

State owned: the requests of each living pod, read once; the pods that are being bound, and when each waiting pod is due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import ClientError, ClientSession
from msgspec import Struct

from gpushare_agent.core.kube import scheduling
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.kube.scheduling import DEFAULT_SCHEDULER
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import NVIDIA_GPU_RESOURCE
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION, parse_gpus
from gpushare_agent.core.placement.mistakes import Offer, mistakes
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.api.store import Change, Expired
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, pod_requests, timestamp
from gpushare_agent.sandbox.scheduler.claims import PodClaims

log = structlog.get_logger(__name__)

UNSCHEDULABLE = "Unschedulable"
CORDONED = "node(s) were unschedulable"
TAINTED = "node(s) had untolerated taint(s)"
UNSELECTED = "node(s) didn't match Pod's node affinity/selector"
"""kube-scheduler's words."""
SCHEDULER_NAMES = (DEFAULT_SCHEDULER,)
EXTENDER_SCHEDULER_NAMES = (DEFAULT_SCHEDULER, "gpushare-scheduler")
"""The second is that of manifests/extender/second-scheduler. A pod that names another scheduler waits for it."""
_SWITCHES = {NVIDIA_GPU_RESOURCE: "--nvidia.enabled=true", "aliyun.com/gpu-mem": "--gpushare.enabled=true"}
"""What makes an agent offer a resource that it does not offer by default."""
_NVIDIA_CLASS_SWITCH = "--dra.nvidia_names=true"
NO_CLAIMS = "the sandbox's scheduler that asks an extender allocates no claims: start it without --extender, with --dra"


class NodeFit:
    """The nodes are those of the API server. With `names`, the agents', it says what is wrong with requests, because no
    extender does."""

    def __init__(self, api: EmbeddedApiServer, names: ResourceNames | None = None) -> None:
        self._api = api
        self._names = names
        self._requests: dict[str, dict[str, int]] = {}

    def requests(self, pod: RawObject) -> dict[str, int]:
        uid = pod["metadata"]["uid"]
        found = self._requests.get(uid)
        if found is None:
            found = self._requests[uid] = pod_requests(pod)
        return found

    def free(self, assumed: Mapping[str, str]) -> dict[str, dict[str, int]]:
        """What is free by node and resource. `assumed` are the nodes of pods that are being bound, by UID."""
        pods = self._api.store.in_creation_order("pods")
        nodes = {raw["metadata"]["name"]: _extended(raw) for raw in self._api.store.all("nodes")}
        # What is known of pods that have gone is dropped below: a burst has thousands.
        living: dict[str, None] = {}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            living[uid] = None
            # A pod that is being bound counts as on its node.
            node_name = pod["spec"].get("nodeName") or assumed.get(uid)
            # A node may be gone; a pod that has ended uses nothing.
            if node_name in nodes and not is_terminal(pod):
                take(nodes[node_name], self.requests(pod))
        for uid in self._requests.keys() - living.keys():
            del self._requests[uid]
        return nodes

    def remedy(self, pod: RawObject) -> str:
        """The setting that would offer what no node offers, and what is wrong with the request, as sentences. kube-scheduler
        says neither."""
        nodes = self._api.store.all("nodes")
        offered = frozenset(name for raw in nodes for name in _extended(raw))
        # Before an agent has registered, everything is missing.
        missing = [name for name in self.requests(pod) if name in _SWITCHES and offered and name not in offered]
        by_class = {raw["spec"].get("extendedResourceName") for raw in self._api.store.all("deviceclasses")}
        switches = {name: _NVIDIA_CLASS_SWITCH if name in by_class else _SWITCHES[name] for name in missing}
        found = [f"A sandbox with {switch} offers {name}." for name, switch in switches.items()]
        if offered and self._names is not None:
            gpus = []
            for raw in nodes:
                with suppress(Corrupt):  # an agent has not written it yet, or a user has
                    gpus.append(parse_gpus((raw["metadata"].get("annotations") or {}).get(GPUS_ANNOTATION)).gpus)
            most_mib = max((gpu.memory_mib for of_node in gpus for gpu in of_node), default=0)
            offer = Offer(offered, max(map(len, gpus), default=0), most_mib)
            found.append(mistakes(read_pod_json(msgspec.json.encode(pod)), self._names, offer))
        found.append(self._api.claims_remedy("pods", pod))
        return "".join(f" {text}" for text in found if text)

    def reasons_against(
        self,
        free: Mapping[str, Mapping[str, int]],
        pod: RawObject,
        requests: Mapping[str, int],
        claimed: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, list[str]]:
        """Why the pod does not fit, by node; empty where it does. What a node gives by claims, in `claimed`, is
        none."""
        # kube-scheduler gives the first reason alone of a node that takes no such pod.
        refusing = {raw["metadata"]["name"]: why for raw in self._api.store.all("nodes") if (why := _refusal(pod, raw))}
        return {
            name: [refusing[name]]
            if name in refusing
            else [
                f"Insufficient {one}" for one in lacking(free_on, requests) if one not in (claimed or {}).get(name, ())
            ]
            for name, free_on in free.items()
        }


def _refusal(pod: RawObject, node: RawObject) -> str:
    """Why the node takes no such pod whatever it has free: in order cordon, taints, labels; empty where it does."""
    spec, of_node = pod["spec"], node.get("spec") or {}
    if of_node.get("unschedulable"):
        return CORDONED
    # Most pods and nodes have none of these, and a burst has thousands of pods.
    if not (of_node.get("taints") or spec.get("nodeSelector") or spec.get("affinity")):
        return ""
    needs = scheduling.pod_needs(read_pod_json(msgspec.json.encode(pod)).spec)
    offer = scheduling.node_offer(msgspec.Raw(msgspec.json.encode(node)))
    if scheduling.refusing_taints(needs, offer):
        return TAINTED
    return UNSELECTED if scheduling.lacking_labels(needs, offer) else ""


def _extended(node: RawObject) -> dict[str, int]:
    return {name: int(count) for name, count in node["status"].get("allocatable", {}).items() if "/" in name}


def take(free: dict[str, int], requests: Mapping[str, int]) -> None:
    for name, count in requests.items():
        free[name] = free.get(name, 0) - count


def lacking(free: Mapping[str, int], requests: Mapping[str, int]) -> list[str]:
    """The resources that are too scarce."""
    return [name for name, count in requests.items() if count > free.get(name, 0)]


def waiting_text(nodes: int, reasons: Iterable[str]) -> str:
    """`0/2 nodes are available: 1 Insufficient a/b, 1 too full.`: how many nodes give each reason."""
    # Extenders end their reasons with a full stop, kube-scheduler does not.
    counts = Counter(reason.rstrip(".") for reason in reasons)
    return f"0/{nodes} nodes are available: {', '.join(sorted(f'{n} {reason}' for reason, n in counts.items()))}."


def report_waiting(api: EmbeddedApiServer, pod: RawObject, message: str, reason: str = UNSCHEDULABLE) -> None:
    """Writes the message into the pod's status and an Event; once for the same message."""
    # The same message again would be an Event at each pass.
    if any(condition.get("message") == message for condition in pod["status"].get("conditions", ())):
        return
    condition = {
        "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
        "lastTransitionTime": timestamp(),
    }  # fmt: skip
    metadata = pod["metadata"]
    api.set_pod_status(metadata["namespace"], metadata["name"], {"conditions": [condition]}, uid=metadata["uid"])
    api.record_event(pod, reason="FailedScheduling", message=message, source="default-scheduler")


class EmbeddedScheduler:
    """Binds pending pods in order of creation to the first node, by name, on which they and their claims fit; a pod that
    fits nowhere does not hold up the later ones."""

    def __init__(self, *, api: EmbeddedApiServer, names: ResourceNames | None = None) -> None:
        self._api = api
        self._fit = NodeFit(api, names)
        self._claims = PodClaims(api)

    async def run(self) -> None:
        """Makes one pass after every change, without an end."""
        while True:
            # Before the pass: its own binds start the next one, which finds what they left.
            version = self._api.version
            self.schedule()
            await self._api.wait_change(version)

    def schedule(self) -> None:
        # First: a claim from a template must be there before its pod can be placed.
        self._claims.reconcile()
        pods = self._api.store.in_creation_order("pods")
        waiting = [pod for pod in pods if _is_pending(pod, SCHEDULER_NAMES)]
        if not waiting:
            return
        free = self._fit.free({})
        # No node has come up yet: pods would get a reason that is over in a moment.
        if not free:
            return
        for pod in waiting:
            requests = self._fit.requests(pod)
            claimed = self._claims.instead_of(requests)
            against = self._fit.reasons_against(free, pod, requests, claimed)
            chosen, reasons = self._claims.place(pod, [name for name, found in against.items() if not found], claimed)
            if chosen is None:
                reasons += [reason for found in against.values() for reason in found]
                report_waiting(self._api, pod, waiting_text(len(free), reasons) + self._fit.remedy(pod))
                continue
            # The next pod of this pass sees what is left.
            take(free[chosen], {name: count for name, count in requests.items() if name not in claimed.get(chosen, ())})
            self._api.bind_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], chosen)
            _record_scheduled(self._api, pod, chosen)


EXTENDER_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 << 20
"""A filter's answer about 5,000 nodes that fail is half a mebibyte."""
T = TypeVar("T")


class FilterAnswer(Struct, frozen=True, rename="pascal"):
    """An ExtenderFilterResult: where the pod fits, and why it does not elsewhere, by node."""

    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""

    @property
    def failed(self) -> dict[str, str]:
        return {**(self.failed_and_unresolvable_nodes or {}), **(self.failed_nodes or {})}


class HostPriority(Struct, frozen=True, rename="pascal"):
    host: str
    score: int


class _BindAnswer(Struct, frozen=True, rename="pascal"):
    error: str = ""


class ExtenderCalls(Struct, frozen=True):
    """`url` is the prefix before the verbs, such as `http://127.0.0.1:3456/scheduler`. All methods raise Unavailable where
    no usable answer came, Rejected where the extender gave an error."""

    url: str
    session: ClientSession

    async def filter(self, pod: RawObject, names: Sequence[str]) -> FilterAnswer:
        answer = await self._post("filter", {"Pod": pod, "NodeNames": list(names)}, FilterAnswer)
        if answer.error:
            raise Rejected(f"the extender refused to filter: {answer.error}")
        return answer

    async def prioritize(self, pod: RawObject, names: Sequence[str]) -> dict[str, int]:
        answer = await self._post("priorities", {"Pod": pod, "NodeNames": list(names)}, list[HostPriority])
        return {entry.host: entry.score for entry in answer}

    async def bind(self, pod: RawObject, node_name: str) -> None:
        metadata = pod["metadata"]
        body = {
            "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"],
            "Node": node_name,
        }  # fmt: skip
        answer = await self._post("bind", body, _BindAnswer)
        if answer.error:
            raise Rejected(f"the extender refused to bind: {answer.error}")

    async def _post(self, verb: str, body: Mapping[str, Any], kind: type[T]) -> T:
        try:
            async with (
                asyncio.timeout(EXTENDER_TIMEOUT_S),
                self.session.post(f"{self.url}/{verb}", json=body) as answer,
            ):
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    # Counted while it comes: the length in the headers may be absent, or wrong.
                    if len(content) > MAX_ANSWER_BYTES:
                        raise Unavailable(f"the extender answered {verb} with more than {MAX_ANSWER_BYTES >> 20} MiB")
                if answer.status != 200:
                    text = content[:200].decode("utf-8", "replace")
                    raise Unavailable(f"the extender answered {verb} with HTTP {answer.status}: {text}")
                return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the extender's answer to {verb} is not of extender v1: {error}") from error
        except (ClientError, OSError, ValueError, TimeoutError) as error:
            why = str(error) or f"no answer within {EXTENDER_TIMEOUT_S:g} s"
            raise Unavailable(f"the extender at {self.url} cannot be asked to {verb}: {why}") from error


SCHEDULER_ERROR = "SchedulerError"
BINDS_AT_ONCE = 16


class SchedulerTimes(Struct, frozen=True, kw_only=True):
    """The back-off of kube-scheduler. A real one retries a pod without any change after five minutes only."""

    first_backoff_s: float = 1.0
    last_backoff_s: float = 10.0


class _Waiting(Struct, kw_only=True):
    """A pod that was tried in vain: `epoch` is what had changed until then."""

    attempts: int
    due_at: float
    latest_at: float
    epoch: int


class ExtenderScheduler:
    """`run` once. Pods without a request of an extended resource are bound without the extender, to the first node."""

    def __init__(
        self, *, api: EmbeddedApiServer, extender: ExtenderCalls, times: SchedulerTimes | None = None, seed: int = 0
    ) -> None:
        self._api = api
        self._extender = extender
        self._times = times or SchedulerTimes()
        self._rng = random.Random(seed)
        self._fit = NodeFit(api)
        self._assumed: dict[str, str] = {}
        self._waiting: dict[str, _Waiting] = {}
        # kube-scheduler binds in the background too; a bound keeps a burst from opening a hundred connections.
        self._places = asyncio.Semaphore(BINDS_AT_ONCE)
        self._version = api.version
        self._epoch = 0

    async def run(self) -> None:
        """Schedules, without an end."""
        async with asyncio.TaskGroup() as binds:
            while True:
                # Before the look: a change during it ends the wait at once.
                seen = self._api.signal.count
                self._note_changes()
                pod = self._next()
                if pod is None:
                    await self._wait(seen)
                else:
                    await self._schedule(pod, binds)

    # --- which pod is next ---

    def _note_changes(self) -> None:
        """Notes whether something has changed that could help a waiting pod."""
        try:
            changes = list(self._api.store.changes_since(self._version))
        # More has changed than the history has: something may have helped.
        except Expired:
            self._epoch += 1
        else:
            self._epoch += any(_could_help(change) for change in changes)
        self._version = self._api.version

    def _next(self) -> RawObject | None:
        """The first due one, in order of creation."""
        # Asking an extender about no node would only give each pod a reason that is over in a moment.
        if not self._api.store.all("nodes"):
            return None
        now = time.monotonic()
        pods = self._api.store.in_creation_order("pods")
        pending = {p["metadata"]["uid"]: p for p in pods if _is_pending(p, EXTENDER_SCHEDULER_NAMES)}
        for uid in self._waiting.keys() - pending.keys():
            del self._waiting[uid]
        for uid, pod in pending.items():
            waiting = self._waiting.get(uid)
            # Never tried, or long ago: what the extender knows may have changed without a change here. Else its back-off is
            # over, and something has changed since it was tried.
            is_due = (
                waiting is None or now >= waiting.latest_at or (now >= waiting.due_at and waiting.epoch != self._epoch)
            )
            # A pod that is being bound is not decided a second time.
            if is_due and uid not in self._assumed:
                return pod
        return None

    async def _wait(self, seen: int) -> None:
        """Waits for the next change, or until a pod is due."""
        now = time.monotonic()
        # What each pod waits for next: its back-off, or the longest wait.
        dues = [w.due_at if w.epoch != self._epoch else w.latest_at for w in self._waiting.values()]
        await self._api.signal.wait(seen, max(0.0, min(dues) - now) if dues else None)

    # --- one pod ---

    async def _schedule(self, pod: RawObject, binds: asyncio.TaskGroup) -> None:
        requests = self._fit.requests(pod)
        against = self._fit.reasons_against(self._fit.free(self._assumed), pod, requests)
        names = [name for name, found in against.items() if not found]
        reasons = [reason for found in against.values() for reason in found]
        if pod["spec"].get("resourceClaims"):
            # This one allocates none, and a pod without its claims would wait on the node for ever.
            self._put_back(pod, waiting_text(len(against), [NO_CLAIMS]), UNSCHEDULABLE)
            return
        try:
            # A pod without extended resources is no business of the extender, as `managedResources` of a real
            # configuration has it.
            if names and requests:
                answer = await self._extender.filter(pod, names)
                reasons += [reason for _, reason in sorted(answer.failed.items())]
                # In our order: the extender's order means nothing.
                names = [name for name in names if name in (answer.node_names or ())]
            if not names:
                self._put_back(pod, waiting_text(len(against), reasons) + self._fit.remedy(pod), UNSCHEDULABLE)
                return
            # One node needs no score.
            scores = await self._scores(pod, names) if requests and len(names) > 1 else {}
        except AgentError as error:
            self._put_back(pod, str(error), SCHEDULER_ERROR)
            return
        best = max(scores.get(name, 0) for name in names)
        # Among equals at random, as kube-scheduler.
        chosen = self._rng.choice([name for name in names if scores.get(name, 0) == best])
        uid = pod["metadata"]["uid"]
        self._assumed[uid] = chosen  # before the wait: the next pod must not be given the same place
        await self._places.acquire()
        binds.create_task(self._bind(pod, chosen, is_ours=not requests), name=f"bind {pod['metadata']['name']}")

    async def _scores(self, pod: RawObject, names: list[str]) -> Mapping[str, int]:
        """A failure counts for no score, as in kube-scheduler."""
        try:
            return await self._extender.prioritize(pod, names)
        except AgentError as error:
            log.warning("prioritize_failed", error=str(error))
            return {}

    async def _bind(self, pod: RawObject, node_name: str, *, is_ours: bool) -> None:
        metadata = pod["metadata"]
        try:
            # The extender binds what it has decided on, because it reserves the GPUs in the same step.
            if is_ours:
                self._api.bind_pod(metadata["namespace"], metadata["name"], node_name, uid=metadata["uid"])
            else:
                await self._extender.bind(pod, node_name)
            _record_scheduled(self._api, pod, node_name)
            self._waiting.pop(metadata["uid"], None)
        except AgentError as error:
            reason = UNSCHEDULABLE if isinstance(error, Rejected) else SCHEDULER_ERROR
            self._put_back(pod, f"binding to node {node_name}: {error}", reason)
        finally:
            # After the bind, or its failure: the object says from here on where the pod is.
            del self._assumed[metadata["uid"]]
            self._places.release()
            self._api.signal.notify()

    def _put_back(self, pod: RawObject, message: str, reason: str) -> None:
        uid, now, times = pod["metadata"]["uid"], time.monotonic(), self._times
        known = self._waiting.get(uid)
        attempts = known.attempts + 1 if known is not None else 1
        delay_s = min(times.first_backoff_s * 2 ** min(attempts - 1, 16), times.last_backoff_s)
        # Only time can end an error; a pod that fits nowhere waits for a change, and the last back-off is the longest wait.
        # After a change it has two tries: the extender may be asked before it has heard of the change.
        is_first = known is None or known.epoch != self._epoch
        latest_s = delay_s if reason == SCHEDULER_ERROR else times.first_backoff_s if is_first else times.last_backoff_s
        self._waiting[uid] = _Waiting(
            attempts=attempts, due_at=now + delay_s, latest_at=now + latest_s, epoch=self._epoch
        )
        with suppress(NotFound, Conflict):  # it may have gone, or be bound, meanwhile
            newest = self._api.pod(pod["metadata"]["namespace"], pod["metadata"]["name"])
            if newest["metadata"]["uid"] == uid and not newest["spec"].get("nodeName"):
                report_waiting(self._api, newest, message, reason)


def _record_scheduled(api: EmbeddedApiServer, pod: RawObject, node_name: str) -> None:
    text = f"Successfully assigned {pod['metadata']['namespace']}/{pod['metadata']['name']} to {node_name}"
    api.record_event(pod, reason="Scheduled", message=text, source="default-scheduler", kind="Normal")


def _is_pending(pod: RawObject, schedulers: Sequence[str]) -> bool:
    is_over = is_terminal(pod) or bool(pod["metadata"].get("deletionTimestamp"))
    return not is_over and not pod["spec"].get("nodeName") and pod["spec"].get("schedulerName") in schedulers


def _could_help(change: Change) -> bool:
    """A pod on a node is gone or has ended; or a node is new, was uncordoned, or has other allocatable resources,
    annotations, labels or taints."""
    before, after = change.before, change.after
    if change.resource == "pods" and before is not None and before["spec"].get("nodeName"):
        return after is None or (is_terminal(after) and not is_terminal(before))
    if change.resource != "nodes" or after is None:
        return False
    return before is None or _offer(before) != _offer(after)


def _offer(node: RawObject) -> tuple[object, ...]:
    metadata = node["metadata"]
    offered = node["status"].get("allocatable"), metadata.get("annotations"), metadata.get("labels")
    spec = node.get("spec") or {}
    return *offered, spec.get("unschedulable"), spec.get("taints")
