"""Sends Kubernetes Events in the background: on pods why they got no GPU, on the node what became of its GPUs.

Recording only queues an Event, `run` sends it. Events are a courtesy: bounded in number and rate (a ReplicaSet's rejected
pods come ten a second), one per key for a while, and dropped rather than queued for long. Namespaces take turns, and within
one its pods, so that a flood of one delays no other's for long. The mutable state is the queue and which keys were recorded
lately. Format: Kubernetes core/v1 Event.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.fair_queue import FairQueue
from gpushare_agent.core.kit.logs import printable
from gpushare_agent.core.kit.rate import TokenBucket
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.objects import ObjectReference
from gpushare_agent.core.model.errors import AgentError, NodeEventReason, Refused, Unavailable
from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

MAX_MESSAGE_CHARS = 1024
"""The API server refuses a longer Event message."""
QUEUE_LIMIT = 256
RECORDED_LIMIT = 4096
REPEAT_AFTER_S = 600.0
BURST = 25
TRIES = 6
COMPONENT = "gpushare-agent"
NODE_NAMESPACE = "default"
_KEY_CHARS = 256
"""Characters of a text in a key: with RECORDED_LIMIT this bounds the memory."""


class _Queued(Struct, frozen=True):
    """`about` names the object in the log."""

    key: tuple[str, ...]
    namespace: str
    about: str
    reason: str
    body: Mapping[str, object]


class EventRecorder(Struct, eq=False):
    """`record` at any time, also before the API server can be reached; `run` once. `reporter` is the host that reports.

    After BURST events in a row the rest follow `interval_s` apart. `count` is called with how each ended: sent, refused,
    dropped.
    """

    reporter: str
    count: Callable[[str], None] = lambda outcome: None
    interval_s: float = 1.0
    backoff: Backoff = Backoff(base_s=0.5, cap_s=10.0)
    clock: Callable[[], float] = time.monotonic
    _queue: FairQueue[_Queued] = field(default_factory=lambda: FairQueue(QUEUE_LIMIT))
    _recorded: OrderedDict[tuple[str, ...], float] = field(default_factory=OrderedDict)
    _has_queued: asyncio.Event = field(default_factory=asyncio.Event)

    def record(
        self, involved: ObjectReference, reason: str, message: str, *, type_: str = "Warning", key: tuple[str, ...]
    ) -> bool:
        """Queue an Event about the object `involved`, in its namespace, unless one with this key was recorded in the last
        REPEAT_AFTER_S; whether it was queued."""
        now = self.clock()
        # Deduplicated here, not by the API server: a pod that is tried again makes the same refusal each time.
        recorded_at = self._recorded.get(key)
        if recorded_at is not None and now - recorded_at < REPEAT_AFTER_S:
            return False
        namespace = involved.namespace or NODE_NAMESPACE
        body = _event(involved, namespace, reason, message, type_, self.reporter, datetime.now(UTC))
        queued = _Queued(key, namespace, f"{involved.kind} {namespace}/{involved.name}", reason, body)
        # The UID, because a name may be used again: each object has its own place among its namespace's.
        dropped = self._queue.put(namespace, involved.uid, queued)
        self._recorded[key] = now
        self._recorded.move_to_end(key)
        # Forgetting the oldest at worst sends one Event twice.
        while len(self._recorded) > RECORDED_LIMIT:
            self._recorded.popitem(last=False)
        self._has_queued.set()
        if dropped is not None:
            self._recorded.pop(dropped.key, None)  # the next time it may be sent
            self._drop(dropped, f"{QUEUE_LIMIT} Events wait, and its namespace had a turn lately or has most of them")
        return dropped is not queued

    async def run(self, api: KubeApi) -> NoReturn:
        """Send the recorded events, each object's in order, until cancelled."""
        # A rollout that fails shows its reason at once, a ReplicaSet that goes on failing writes one Event a second.
        credit = TokenBucket(rate=1 / self.interval_s, burst=BURST, clock=self.clock)
        while True:
            while not self._queue:
                self._has_queued.clear()
                await self._has_queued.wait()
            # What is sent is chosen after the wait: a namespace that comes meanwhile has its turn.
            await asyncio.sleep(credit.owe(1))
            await self._send(api, self._queue.pop())

    async def _send(self, api: KubeApi, event: _Queued) -> None:
        for tried in range(1, TRIES + 1):
            try:
                await api.create_event(event.namespace, event.body)
            except Unavailable as e:
                if tried == TRIES:
                    # An API server that is away for longer would hold all Events behind this one.
                    self._drop(event, str(e))
                    return
                await asyncio.sleep(self.backoff.delay_s(tried))
            except AgentError as e:
                # A vanished namespace, or a missing permission: what the Event reports is in the log, too.
                self.count("refused")
                log.warning("event_refused", about=event.about, reason=event.reason, error=str(e))
                return
            else:
                self.count("sent")
                return

    def _drop(self, event: _Queued, error: str) -> None:
        self.count("dropped")
        log.warning("event_dropped", about=event.about, reason=event.reason, error=error)


class PodEvents(EventRecorder, eq=False):
    """Events about why a pod got no GPU, or which of its annotations is ignored."""

    def refused(self, pod: Pod, refused: Refused) -> None:
        """A Warning on the pod, once in ten minutes per pod and reason."""
        self.record(_pod(pod), refused.reason.value, refused.detail, key=(pod.uid, refused.reason.value))

    def warned(self, pod: Pod, reason: str, detail: str, *, key: str | None = None) -> None:
        """A Warning that is no refusal, once per pod, reason and text (`key` instead of the text), also in the log: a user
        who corrects an annotation and makes another mistake must hear of it."""
        # The log as often as the Event: admission may ask a hundred times about one pod.
        if self.record(_pod(pod), reason, detail, key=(pod.uid, reason, (detail if key is None else key)[:_KEY_CHARS])):
            log.warning("pod_warned", pod=f"{pod.namespace}/{pod.name}", reason=reason, detail=detail)

    def mistyped(self, pod: Pod, detail: str) -> None:
        """A Warning about annotations that nothing reads, once in ten minutes per pod whatever its text: a tenant may
        make up another name as often as he likes."""
        self.warned(pod, "AnnotationUnknown", detail, key="")

    def noted(self, pod: Pod, reason: str, detail: str) -> None:
        """A Normal Event, once as `warned`."""
        if self.record(_pod(pod), reason, detail, type_="Normal", key=(pod.uid, reason, detail[:_KEY_CHARS])):
            log.info("pod_noted", pod=f"{pod.namespace}/{pod.name}", reason=reason, detail=detail)


class NodeEvents(EventRecorder, eq=False):
    """Events about the GPUs of the node that reports."""

    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None:
        """An Event on the node, once in ten minutes per GPU, reason and text. In namespace default and with the node's
        name as its UID, as the kubelet's own: there `kubectl describe node` looks for them."""
        involved = ObjectReference(api_version="v1", kind="Node", name=self.reporter, uid=self.reporter)
        self.record(involved, reason.value, message, type_=reason.type, key=(uuid, reason.value, message))


def _pod(pod: Pod) -> ObjectReference:
    return ObjectReference(
        api_version="v1",
        kind="Pod",
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        resource_version=pod.resource_version,
    )


def _event(
    involved: ObjectReference, namespace: str, reason: str, message: str, type_: str, reporter: str, now: datetime
) -> Mapping[str, object]:
    """Its name is unique by time, as kubectl and the kubelet make theirs."""
    message = printable(message)  # kubectl prints it as it is
    at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    # 253 characters are allowed; the suffix takes sixteen.
    name = f"{involved.name[:230].rstrip('-.')}.{int(now.timestamp() * 1e6):x}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": involved,
        "reason": reason,
        "message": message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…",
        "type": type_,
        "source": {"component": COMPONENT, "host": reporter},
        "reportingComponent": COMPONENT,
        # The API server refuses longer ones.
        "reportingInstance": reporter[:128],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
