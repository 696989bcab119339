"""The DRA driver's gRPC services: prepare, unprepare, the health of the devices; and their registration with the kubelet.

Errors are texts in the answer, per claim: the kubelet puts driver and claim before them in the pod's Event.

Two sockets are in the kubelet's plugin registry and in the driver's directory: the kubelet finds the registration socket by
itself, asks it for the driver's endpoint, and calls that. Both names carry the instance, so that two agents can be
registered at once: the kubelet calls the one that connected last, and falls back to the other when it ends. The driver is
served before its registration socket appears.

Format: protos/dra.proto, protos/drahealth.proto, protos/pluginregistration.proto. State owned: the open health streams, the
two servers and their socket files.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.agent.mig.instances import MigInstances
from gpushare_agent.agent.node import Node
from gpushare_agent.core.claims.claim import DRIVER, checked_ref
from gpushare_agent.core.claims.devices import device_name
from gpushare_agent.core.kit.grpc_server import GrpcServer, ServedSocket
from gpushare_agent.core.kit.supervision import ChangeSignal, ReportOnce, retried
from gpushare_agent.core.kit.watch_path import DirectoryWatch
from gpushare_agent.core.model.allocations import ClaimRef
from gpushare_agent.core.model.errors import AgentError, Corrupt, Refused, Unavailable, os_errors_as
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.wire import pluginregistration, v1alpha1
from gpushare_agent.core.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1

log = structlog.get_logger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 44.0
"""The kubelet gives up after 45 s; what is left is for an answer that names what was slow."""
_LATE = f"the agent could not do it in {CALL_TIMEOUT_S:g} s (its log has the reason). The kubelet tries again."
HEALTH_PERIOD_S = 10.0
"""The kubelet takes a device for Unknown after 30 s without a report."""
MAX_MESSAGE_CHARS = 1000
"""The reason is written into the status of each pod on the GPU."""


class DraPlugin(dra_v1.DraPluginBase):
    """`ready` is set once the ledger is there: calls before that wait, because the pod would wait longer after an error."""

    def __init__(self, claims: Claims, ready: asyncio.Event) -> None:
        self._claims = claims
        self._ready = ready
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
            # The calls raise no outside fault: one claim's error is a text in its part of the answer.
            async with asyncio.TaskGroup() as group:
                tasks = {claim.uid: group.create_task(call(claim), name="claim") for claim in claims}
            return {uid: task.result() for uid, task in tasks.items()}
        finally:
            self.open_calls -= 1

    async def _prepare(self, claim: dra_v1.Claim) -> dra_v1.NodePrepareResourceResponse:
        outcome = await self._bounded(self._claims.prepare, claim)
        if isinstance(outcome, Refused):
            log.warning("claim_refused", namespace=claim.namespace, claim=claim.name, why=outcome.detail)
            outcome = outcome.detail
        if isinstance(outcome, str):
            return dra_v1.NodePrepareResourceResponse(error=outcome)
        return dra_v1.NodePrepareResourceResponse(devices=[*_devices(outcome, self._claims.node.settings.node_name)])

    async def _unprepare(self, claim: dra_v1.Claim) -> dra_v1.NodeUnprepareResourceResponse:
        failed = await self._bounded(self._claims.unprepare, claim)
        return dra_v1.NodeUnprepareResourceResponse(error=failed or "")

    async def _bounded(self, call: Callable[[ClaimRef], Awaitable[T]], claim: dra_v1.Claim) -> T | str:
        """What the call returns, else the text of its error."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                # Inside the timeout: an agent without its ledger must answer, because the kubelet's own error names
                # no cause.
                await self._ready.wait()
                return await call(_ref(claim))
        except TimeoutError:
            return _LATE
        except AgentError as e:
            return str(e)


class DeviceHealth(v1alpha1.DraResourceHealthBase):
    """Reports every GPU of the node at once, after each change, and each 10 s."""

    def __init__(self, node: Node, mig: MigInstances) -> None:
        self._node = node
        self._mig = mig
        self._changes = ChangeSignal()

    def changed(self) -> None:
        """A GPU, perhaps: in a burst of claims each allocation comes here, and none changes a GPU's health."""
        self._changes.notify()

    async def node_watch_resources(
        self, message: v1alpha1.NodeWatchResourcesRequest
    ) -> AsyncIterator[v1alpha1.NodeWatchResourcesResponse]:
        while True:
            found = self._named()
            yield v1alpha1.NodeWatchResourcesResponse(devices=[self._health(name, gpu) for name, gpu in found])
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_PERIOD_S):
                    # Compared, not counted: a burst of claims wakes this often, and the kubelet needs no report of it.
                    while self._named() == found:
                        await self._changes.wait_next()

    def _named(self) -> list[tuple[str, Gpu]]:
        """By their devices' names: an instance that was made here has its place's."""
        places = {gpu.uuid: name for name, gpu in self._mig.gpus.items()}
        return [(places.get(gpu.uuid) or device_name(gpu.uuid), gpu) for gpu in self._node.gpus().gpus]

    def _health(self, name: str, gpu: Gpu) -> v1alpha1.DeviceHealth:
        status = v1alpha1.HealthStatus.HEALTHY if gpu.is_healthy else v1alpha1.HealthStatus.UNHEALTHY
        return v1alpha1.DeviceHealth(
            device=v1alpha1.DeviceIdentifier(pool_name=self._node.settings.node_name, device_name=name),
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


if TYPE_CHECKING:
    from grpclib._typing import IServable

PLUGIN_TYPE = "DRAPlugin"
SOCKET_NAMES = re.compile(r"dra-[0-9a-f]{8}\.sock|gpushare-agent-[0-9a-f]{8}-reg\.sock")
"""The names of every agent's sockets in the two directories."""
SERVICES = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
POLL_S = 5.0
RETRY_S = 1.0


class Registration(pluginregistration.RegistrationBase):
    """What the kubelet asks of the registration socket, and what it reports there."""

    def __init__(self, endpoint: Path) -> None:
        self._endpoint = endpoint
        self.registered = asyncio.Event()

    async def get_info(self, message: pluginregistration.InfoRequest) -> pluginregistration.PluginInfo:
        return pluginregistration.PluginInfo(
            type=PLUGIN_TYPE, name=DRIVER, endpoint=str(self._endpoint), supported_versions=list(SERVICES)
        )

    async def notify_registration_status(
        self, message: pluginregistration.RegistrationStatus
    ) -> pluginregistration.RegistrationStatusResponse:
        # The kubelet calls this on each registration; that the socket exists does not show that it accepted.
        if message.plugin_registered:
            self.registered.set()
            log.info("dra_driver_registered", driver=DRIVER)
        else:
            self.registered.clear()
            log.error("dra_driver_not_registered", driver=DRIVER, error=message.error[:1000])
        return pluginregistration.RegistrationStatusResponse()


class DraRegistration:
    """Keeps both sockets there while `run` runs; `instance` is part of their names."""

    def __init__(self, *, instance: str, registry: Path, plugin_path: Path, services: Collection[IServable]) -> None:
        self.registry, self.plugin_path = registry, plugin_path
        endpoint = plugin_path / f"dra-{instance}.sock"
        self.registration = Registration(endpoint)
        self._driver_socket = ServedSocket(endpoint, lambda: GrpcServer(services))
        self._registration_socket = ServedSocket(
            registry / f"{DRIVER}-{instance}-reg.sock", lambda: GrpcServer([self.registration])
        )
        self._is_leaving = False
        self._failure = ReportOnce()
        self.is_running = False

    async def leave(self) -> None:
        """From now on the kubelet calls another agent of the node, if there is one. Open calls go on."""
        self._is_leaving = True
        await self._registration_socket.stop()

    async def run(self) -> None:
        """Serves both sockets until cancelled; then removes them, the registration's first."""
        self.is_running = True
        try:
            await retried(self._keep, RETRY_S, "dra_driver_not_served", self._failure)
        finally:
            await self._registration_socket.stop()
            await self._driver_socket.stop()

    async def _keep(self) -> None:
        with closing(DirectoryWatch(self.registry, poll_s=POLL_S)) as watch:
            while True:
                await self._serve_missing()
                self._failure.is_over()
                await watch.wait_change()

    async def _serve_missing(self) -> None:
        # The kubelet connects to the driver as soon as it has read its path from the registration socket.
        if not self._driver_socket.is_serving:
            await self._registration_socket.stop()
            with os_errors_as(Unavailable, f"{self.plugin_path} cannot be made"):
                self.plugin_path.mkdir(mode=0o750, parents=True, exist_ok=True)
            await self._driver_socket.serve()
        # A kubelet that starts may empty the registry: what is missing is served again.
        if not self._registration_socket.is_serving and not self._is_leaving:
            self.registration.registered.clear()
            await self._registration_socket.serve()
