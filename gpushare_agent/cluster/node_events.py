"""Tells who watches the node what became of its GPUs: a Kubernetes Event on the Node.

`note` only queues, `run` sends; bounded and deduplicated as pods' Events are (event_queue.py). The Events are in namespace
default and name the node as their object's UID, as the kubelet's own do: there `kubectl describe node` looks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn

from gpushare_agent.cluster.event_queue import CreatesEvents, EventQueue, raw_event
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.node_events import NodeEventReason

NAMESPACE = "default"


class NodeEvents:
    """`note` at any time, also before the API server can be reached; `run` once."""

    def __init__(
        self,
        *,
        node_name: str,
        api: CreatesEvents | None = None,
        interval_s: float = 1.0,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._queue = EventQueue(api=api, interval_s=interval_s, backoff=backoff, clock=clock)

    def attach(self, api: CreatesEvents) -> None:
        """The API server's client, once it is open."""
        self._queue.attach(api)

    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None:
        """Once in ten minutes per GPU, reason and text."""
        name = self._node_name
        involved = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}
        self._queue.note(
            (uuid, reason.value, message),
            lambda: raw_event(
                involved,
                namespace=NAMESPACE,
                type_=reason.type,
                reason=reason.value,
                message=message,
                node_name=name,
                now=datetime.now(UTC),
            ),
        )

    async def run(self) -> NoReturn:
        """Send the noted events, in order, until cancelled."""
        await self._queue.run()
