"""Tells a pod's owner why it got no GPU: a Kubernetes Event on the pod.

Never in the admission path: `refused` only notes the event, `run` sends it. Events are a courtesy: bounded in number and
rate (a ReplicaSet's rejected pods come ten a second), and dropped rather than kept for long. The queue is event_queue.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.event_queue import (
    BURST,
    COMPONENT,
    MAX_MESSAGE_CHARS,
    QUEUE_LIMIT,
    REPEAT_AFTER_S,
    TRIES,
    CreatesEvents,
    EventQueue,
    raw_event,
)
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.pods import Pod

__all__ = [
    "BURST",
    "COMPONENT",
    "MAX_MESSAGE_CHARS",
    "QUEUE_LIMIT",
    "REPEAT_AFTER_S",
    "TRIES",
    "PodEvents",
    "warning_event",
]

log = structlog.get_logger(__name__)

_TEXT_KEPT = 256
"""Of a text, to know it again: with the queue's TOLD_LIMIT this bounds the memory."""


class CountsEvents(Protocol):
    def pod_event(self, outcome: str) -> None: ...


class PodEvents:
    """`refused` at any time, also before the API server can be reached; `run` once."""

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
        count = metrics.pod_event if metrics is not None else None
        self._queue = EventQueue(api=api, count=count, interval_s=interval_s, backoff=backoff, clock=clock)

    def attach(self, api: CreatesEvents) -> None:
        """The API server's client, once it is open."""
        self._queue.attach(api)

    def refused(self, pod: Pod, refused: Refused) -> None:
        """Note a Warning on the pod, once in ten minutes per pod and reason."""
        self._note(pod, refused.reason.value, refused.detail, text="")

    def warned(self, pod: Pod, reason: str, detail: str) -> None:
        """The same for what is no refusal: something of the pod's is ignored. Once per pod, reason and text, also in the
        log: who mends an annotation and makes another mistake must hear of it."""
        if self._note(pod, reason, detail, text=detail[:_TEXT_KEPT]):
            log.warning("pod_warned", pod=f"{pod.namespace}/{pod.name}", reason=reason, detail=detail)

    async def run(self) -> NoReturn:
        """Send the noted events, in order, until cancelled."""
        await self._queue.run()

    def _note(self, pod: Pod, reason: str, detail: str, *, text: str) -> bool:
        """Is it news? `text` tells apart what is told for the same reason."""
        return self._queue.note(
            (pod.uid, reason, text),
            lambda: warning_event(pod, reason, detail, node_name=self._node_name, now=datetime.now(UTC)),
        )


def warning_event(pod: Pod, reason: str, detail: str, *, node_name: str, now: datetime) -> dict[str, Any]:
    involved = {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "resourceVersion": pod.resource_version,
    }
    return raw_event(
        involved,
        namespace=pod.namespace,
        type_="Warning",
        reason=reason,
        message=detail,
        node_name=node_name,
        now=now,
    )
