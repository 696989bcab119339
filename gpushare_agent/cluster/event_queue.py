"""Sends Kubernetes Events in the background: bounded in number and rate, once per key for a while, dropped rather than kept.

For pod_events.py and node_events.py, which know what an Event says. The mutable state is the queue and what was told of
late. Format: Kubernetes core/v1 Event.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.slot import ApiSlot
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Unavailable

log = structlog.get_logger(__name__)

MAX_MESSAGE_CHARS = 1024
"""The API server refuses a longer Event message."""
QUEUE_LIMIT = 256
REPORTED_LIMIT = 4096
REPEAT_AFTER_S = 600.0
BURST = 25
TRIES = 6
COMPONENT = "gpushare-agent"


class CreatesEvents(Protocol):
    async def create_event(self, raw: dict[str, Any]) -> None: ...


class EventQueue:
    """`note` at any time, also before the API server can be reached; `run` once.

    After BURST events in a row the rest follow `interval_s` apart. `count` is told how each ended: sent, refused, dropped.
    """

    def __init__(
        self,
        *,
        api: CreatesEvents | None = None,
        count: Callable[[str], None] | None = None,
        interval_s: float = 1.0,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api: ApiSlot[CreatesEvents] = ApiSlot(api)
        self._count = count or _forget
        self._interval_s = interval_s
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=10.0)
        self._clock = clock
        self._queue: deque[dict[str, Any]] = deque()
        self._reported: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._is_wanted = asyncio.Event()

    def attach(self, api: CreatesEvents) -> None:
        """The API server's client, once it is open."""
        self._api.put(api)

    def note(self, key: tuple[str, ...], make: Callable[[], dict[str, Any]]) -> bool:
        """Queue the Event that `make` returns, unless one with this key was told of late; whether it is news."""
        now = self._clock()
        reported_at = self._reported.get(key)
        if reported_at is not None and now - reported_at < REPEAT_AFTER_S:
            return False
        if len(self._queue) >= QUEUE_LIMIT:
            self._count("dropped")
            return False
        self._reported[key] = now
        self._reported.move_to_end(key)
        while len(self._reported) > REPORTED_LIMIT:
            self._reported.popitem(last=False)
        self._queue.append(make())
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
        involved = raw_event["involvedObject"]
        about = f"{involved['kind']} {raw_event['metadata']['namespace']}/{involved['name']}"
        for tried in range(1, TRIES + 1):
            try:
                await api.create_event(raw_event)
            except Unavailable as e:
                if tried == TRIES:
                    self._count("dropped")
                    log.warning("event_dropped", about=about, reason=raw_event["reason"], error=str(e))
                    return
                await asyncio.sleep(self._backoff.delay_s(tried))
            except AgentError as e:
                # A vanished namespace, or a missing permission: what the Event tells is in the log, too.
                self._count("refused")
                log.warning("event_refused", about=about, reason=raw_event["reason"], error=str(e))
                return
            else:
                self._count("sent")
                return


def raw_event(
    involved: Mapping[str, Any], *, namespace: str, type_: str, reason: str, message: str, node_name: str, now: datetime
) -> dict[str, Any]:
    """A core/v1 Event about the object `involved`; its name is unique by time, as kubectl and the kubelet make theirs."""
    at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{involved['name'][:230].rstrip('-.')}.{int(now.timestamp() * 1e6):x}",
            "namespace": namespace,
        },
        "involvedObject": dict(involved),
        "reason": reason,
        "message": message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…",
        "type": type_,
        "source": {"component": COMPONENT, "host": node_name},
        "reportingComponent": COMPONENT,
        "reportingInstance": node_name[:128],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _forget(outcome: str) -> None:
    """Nobody counts."""
