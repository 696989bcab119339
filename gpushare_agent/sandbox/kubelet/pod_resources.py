"""The embedded kubelet's PodResources API, version v1: List and Get, and its rate limit.

List makes the device manager rebuild its set of allocated devices, as the real one does: see device_manager. Owns the
token bucket; its answers come from the kubelet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from msgspec import Struct

from gpushare_agent.kit.protobuf import bytes_field
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.sandbox.kubelet.calls import CallLog, PodResourcesCall
from gpushare_agent.sandbox.kubelet.device_manager import DeviceManager
from gpushare_agent.sandbox.kubelet.pod_worker import KnownPod
from gpushare_agent.wire.v1 import GetPodResourcesRequest

CALLS_PER_S = 100.0
BURST = 10.0
_SERVICE = "/v1.PodResourcesLister"


class PodResourcesService(Struct, kw_only=True, eq=False):
    """`listed` returns the pods of List, `find` one of Get; `has_get`: this version of the kubelet has Get switched on."""

    listed: Callable[[], list[KnownPod]]
    find: Callable[[str, str], KnownPod | None]
    devices: DeviceManager
    calls: CallLog
    rng: random.Random
    has_get: bool
    notify: Callable[[], None]
    _tokens: float = BURST
    _filled_at: float = 0.0

    def __mapping__(self) -> dict[str, Handler]:
        methods = {"List": self._list, "Get": self._get}
        return {f"{_SERVICE}/{name}": self._handler(name, method) for name, method in methods.items()}

    def _handler(self, name: str, method: Callable[[bytes], bytes]) -> Handler:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self._admit_call(name)
            await stream.send_message(method(request or b""))

        serve: Callable[[Any], Awaitable[None]] = handle
        return Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)

    def _admit_call(self, method: str) -> None:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled_at) * CALLS_PER_S)
        self._filled_at = now
        is_refused = self._tokens < 1.0
        inside = tuple(self.calls.open_calls)
        self.calls.pod_resources_calls.append(PodResourcesCall(method=method, inside=inside, is_refused=is_refused))
        self.notify()
        if is_refused:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1.0

    def _list(self, _request: bytes) -> bytes:
        pods = self.listed()
        # Also in the middle of an Allocate, whose IDs are then free again: a fault of the real kubelet (device_manager.py).
        self.devices.update_allocated()
        self.rng.shuffle(pods)
        return b"".join([bytes_field(1, self._pod_message(pod)) for pod in pods])

    def _get(self, raw_request: bytes) -> bytes:
        if not self.has_get:
            raise GRPCError(Status.UNKNOWN, "PodResources API Get method disabled")
        request = GetPodResourcesRequest.parse(raw_request)
        pod = self.find(request.pod_namespace, request.pod_name)
        if pod is None:
            text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            raise GRPCError(Status.UNKNOWN, text)
        return bytes_field(1, self._pod_message(pod))

    def _pod_message(self, pod: KnownPod) -> bytes:
        """A PodResources message of the pod's main containers and sidecars."""
        where = pod.identity
        parts = [bytes_field(1, where.name.encode()), bytes_field(2, where.namespace.encode())]
        for container in pod.containers:
            if container.kind is not ContainerKind.INIT:
                message = self.devices.records.container_message(where.uid, container.name, self.rng)
                parts.append(bytes_field(3, message))
        return b"".join(parts)
