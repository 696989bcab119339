"""Tells a pod's owner why it got no card: a Kubernetes Event on the pod.

Never in the admission path: `refused` only notes the event, `run` sends it. Events are a courtesy: bounded in number and
rate (a ReplicaSet's rejected pods come ten a second), and dropped rather than kept for long. The mutable state is the
queue and what was told of late. Format: Kubernetes core/v1 Event.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.adapters.kube.slot import ApiSlot
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Refused, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod

log = structlog.get_logger(__name__)

MAX_MESSAGE_CHARS = 1024
"""The API server refuses a longer Event message."""
QUEUE_LIMIT = 256
TOLD_LIMIT = 4096
_TEXT_KEPT = 256
"""Of a text, to know it again: with TOLD_LIMIT this bounds the memory."""
REPEAT_AFTER_S = 600.0
BURST = 25
TRIES = 6
COMPONENT = "gpushare-agent"


class CreatesEvents(Protocol):
    async def create_event(self, raw: dict[str, Any]) -> None: ...


class CountsEvents(Protocol):
    def pod_event(self, outcome: str) -> None: ...


class PodEvents:
    """`refused` at any time, also before the API server can be reached; `run` once.

    After BURST events in a row the rest follow `interval_s` apart.
    """

    def __init__(
        self,
        *,
        node_name: str,
        api: CreatesEvents | None = None,
        metrics: CountsEvents | None = None,
        interval_s: float = 1.0,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._api: ApiSlot[CreatesEvents] = ApiSlot(api)
        self._metrics = metrics
        self._interval_s = interval_s
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=10.0)
        self._clock = clock
        self._queue: deque[dict[str, Any]] = deque()
        self._told: OrderedDict[tuple[PodUid, str, str], float] = OrderedDict()
        self._is_wanted = asyncio.Event()

    def attach(self, api: CreatesEvents) -> None:
        """The API server's client, once it is open."""
        self._api.put(api)

    def refused(self, pod: Pod, refused: Refused) -> None:
        """Note a Warning on the pod, once in ten minutes per pod and reason."""
        self._note(pod, refused.reason.value, refused.detail, text="")

    def warned(self, pod: Pod, reason: str, detail: str) -> None:
        """The same for what is no refusal: something of the pod's is ignored. Once per pod, reason and text, also in the
        log: who mends an annotation and makes another mistake must hear of it."""
        if self._note(pod, reason, detail, text=detail[:_TEXT_KEPT]):
            log.warning("pod_warned", pod=f"{pod.namespace}/{pod.name}", reason=reason, detail=detail)

    def _note(self, pod: Pod, reason: str, detail: str, *, text: str) -> bool:
        """Is it news? `text` tells apart what is told for the same reason."""
        now, key = self._clock(), (pod.uid, reason, text)
        told_at = self._told.get(key)
        if told_at is not None and now - told_at < REPEAT_AFTER_S:
            return False
        if len(self._queue) >= QUEUE_LIMIT:
            self._count("dropped")
            return False
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > TOLD_LIMIT:
            self._told.popitem(last=False)
        self._queue.append(warning_event(pod, reason, detail, node_name=self._node_name, now=datetime.now(UTC)))
        self._is_wanted.set()
        return True

    async def run(self) -> NoReturn:
        """Send the noted events, in order, until cancelled."""
        api = await self._api.get()
        credit, spent_at = float(BURST), self._clock()
        while True:
            while not self._queue:
                self._is_wanted.clear()
                await self._is_wanted.wait()
            credit = min(BURST, credit + (self._clock() - spent_at) / self._interval_s)
            if credit < 1:
                await asyncio.sleep((1 - credit) * self._interval_s)
                credit = 1.0
            credit, spent_at = credit - 1, self._clock()
            await self._send(api, self._queue.popleft())

    async def _send(self, api: CreatesEvents, raw_event: dict[str, Any]) -> None:
        pod = f"{raw_event['metadata']['namespace']}/{raw_event['involvedObject']['name']}"
        for tried in range(1, TRIES + 1):
            try:
                await api.create_event(raw_event)
            except Unavailable as e:
                if tried == TRIES:
                    self._count("dropped")
                    log.warning("pod_event_dropped", pod=pod, error=str(e))
                    return
                await asyncio.sleep(self._backoff.delay_s(tried))
            except AgentError as e:
                # A vanished namespace, or a missing permission: the refusal itself is in the log and in the pod's status.
                self._count("refused")
                log.warning("pod_event_refused", pod=pod, error=str(e))
                return
            else:
                self._count("sent")
                return

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.pod_event(outcome)


def warning_event(pod: Pod, reason: str, detail: str, *, node_name: str, now: datetime) -> dict[str, Any]:
    """A core/v1 Event; its name is unique by time, as kubectl and the kubelet make theirs."""
    at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{pod.name[:230].rstrip('-.')}.{int(now.timestamp() * 1e6):x}",
            "namespace": pod.namespace,
        },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "resourceVersion": pod.resource_version,
        },
        "reason": reason,
        "message": detail if len(detail) <= MAX_MESSAGE_CHARS else detail[: MAX_MESSAGE_CHARS - 1] + "…",
        "type": "Warning",
        "source": {"component": COMPONENT, "host": node_name},
        "reportingComponent": COMPONENT,
        "reportingInstance": node_name[:128],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
