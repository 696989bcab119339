"""The DRA driver's gRPC services: prepare, unprepare, and the health of the devices.

Errors are texts in the answer, per claim: the kubelet puts driver and claim before them in the pod's Event. Format:
protos/dra.proto, protos/drahealth.proto. State owned: the open health streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import structlog

from gpushare_agent.dra.claims import Claims
from gpushare_agent.dra.decisions.claim import checked_ref
from gpushare_agent.dra.decisions.devices import device_name
from gpushare_agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.model.allocations import ClaimRef
from gpushare_agent.model.errors import AgentError, Corrupt, Refused
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.wire import v1alpha1
from gpushare_agent.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1

log = structlog.get_logger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 44.0
"""The kubelet gives up after 45 s; what is left is for an answer that names what was slow."""
_LATE = f"the agent could not do it in {CALL_TIMEOUT_S:g} s (its log has the reason). The kubelet tries again."
HEALTH_PERIOD_S = 10.0
"""The kubelet takes a device for Unknown after 30 s without a report."""
MAX_MESSAGE_CHARS = 1000
"""It is written into the status of each pod on the GPU."""


class DraPlugin(dra_v1.DraPluginBase):
    """`ready` is set once the ledger is there: calls before that wait, for the pod would wait longer after an error."""

    def __init__(self, claims: Claims, ready: asyncio.Event, pool: str) -> None:
        self._claims = claims
        self._ready = ready
        self._pool = pool
        self.open_calls = 0

    async def node_prepare_resources(
        self, message: dra_v1.NodePrepareResourcesRequest
    ) -> dra_v1.NodePrepareResourcesResponse:
        answers = await self._each(message.claims, self._prepare)
        return dra_v1.NodePrepareResourcesResponse(claims=answers)

    async def node_unprepare_resources(
        self, message: dra_v1.NodeUnprepareResourcesRequest
    ) -> dra_v1.NodeUnprepareResourcesResponse:
        answers = await self._each(message.claims, self._unprepare)
        return dra_v1.NodeUnprepareResourcesResponse(claims=answers)

    async def _each(
        self, claims: Iterable[dra_v1.Claim], call: Callable[[dra_v1.Claim], Coroutine[None, None, T]]
    ) -> dict[str, T]:
        """All at once: a claim that waits holds up no other."""
        self.open_calls += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {claim.uid: group.create_task(call(claim), name="claim") for claim in claims}
            return {uid: task.result() for uid, task in tasks.items()}
        finally:
            self.open_calls -= 1

    async def _prepare(self, claim: dra_v1.Claim) -> dra_v1.NodePrepareResourceResponse:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._ready.wait()
                outcome = await self._claims.prepare(_ref(claim))
        except TimeoutError:
            return dra_v1.NodePrepareResourceResponse(error=_LATE)
        except AgentError as e:
            return dra_v1.NodePrepareResourceResponse(error=str(e))
        if isinstance(outcome, Refused):
            log.warning("claim_refused", namespace=claim.namespace, claim=claim.name, why=outcome.detail)
            return dra_v1.NodePrepareResourceResponse(error=outcome.detail)
        return dra_v1.NodePrepareResourceResponse(devices=[*_devices(outcome, self._pool)])

    async def _unprepare(self, claim: dra_v1.Claim) -> dra_v1.NodeUnprepareResourceResponse:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._ready.wait()
                await self._claims.unprepare(_ref(claim))
        except TimeoutError:
            return dra_v1.NodeUnprepareResourceResponse(error=_LATE)
        except AgentError as e:
            return dra_v1.NodeUnprepareResourceResponse(error=str(e))
        return dra_v1.NodeUnprepareResourceResponse()


class DeviceHealth(v1alpha1.DraResourceHealthBase):
    """Reports every GPU of the node at once, when one is another than before, and each 10 s."""

    def __init__(self, gpus: Callable[[], Sequence[Gpu]], pool: str) -> None:
        self._gpus = gpus
        self._pool = pool
        self._has_changed: set[asyncio.Event] = set()

    def changed(self) -> None:
        """A GPU, perhaps: in a burst of claims each allocation comes here, and none changes a GPU's health."""
        for event in self._has_changed:
            event.set()

    async def node_watch_resources(
        self, message: v1alpha1.NodeWatchResourcesRequest
    ) -> AsyncIterator[v1alpha1.NodeWatchResourcesResponse]:
        event = asyncio.Event()
        self._has_changed.add(event)
        try:
            while True:
                gpus = self._gpus()
                yield v1alpha1.NodeWatchResourcesResponse(devices=[self._health(gpu) for gpu in gpus])
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEALTH_PERIOD_S):
                        while self._gpus() == gpus:
                            await event.wait()
                            event.clear()
        finally:
            self._has_changed.discard(event)

    def _health(self, gpu: Gpu) -> v1alpha1.DeviceHealth:
        status = v1alpha1.HealthStatus.HEALTHY if gpu.is_healthy else v1alpha1.HealthStatus.UNHEALTHY
        return v1alpha1.DeviceHealth(
            device=v1alpha1.DeviceIdentifier(pool_name=self._pool, device_name=device_name(gpu)),
            health=status,
            last_updated_time=int(time.time()),
            message=gpu.unhealthy_reason[:MAX_MESSAGE_CHARS],
        )


def _ref(claim: dra_v1.Claim) -> ClaimRef:
    """Raises Corrupt."""
    try:
        return checked_ref(claim.namespace, claim.name, claim.uid)
    except Corrupt as e:
        raise Corrupt(f"the kubelet's call names no claim: {e}") from e


def _devices(claim: PreparedClaim, pool: str) -> Iterable[dra_v1.Device]:
    for one in claim.results:
        yield dra_v1.Device(
            request_names=[one.request],
            pool_name=pool,
            device_name=one.device,
            cdi_device_ids=list(one.cdi_devices),
            share_id=one.share_id or None,
        )
