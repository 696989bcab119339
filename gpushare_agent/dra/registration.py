"""Registers the DRA driver with the kubelet: two sockets, in the kubelet's plugin registry and in the driver's directory.

The kubelet finds the registration socket by itself, asks it for the driver's endpoint, and calls that. Both names carry the
instance, so that two agents can be registered at once: the kubelet calls the one that connected last, and falls back to the
other when it ends. The driver is served before its registration socket appears. Format: protos/pluginregistration.proto.

State owned: the two servers and their socket files.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.sockets import FileIdentity, bind_unix_socket, file_identity, remove_socket
from gpushare_agent.kit.supervision import ReportOnce
from gpushare_agent.kit.watch_path import open_directory_watch
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.wire import pluginregistration

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = structlog.get_logger(__name__)

PLUGIN_TYPE = "DRAPlugin"
SOCKET_NAMES = re.compile(r"dra-[0-9a-f]{8}\.sock|gpushare-agent-[0-9a-f]{8}-reg\.sock")
"""Of every agent's sockets in the two directories."""
SERVICES = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
_SOCKET_MODE = 0o600
POLL_S = 5.0
RETRY_S = 1.0


class Registration(pluginregistration.RegistrationBase):
    """What the kubelet asks of the registration socket, and what it reports there."""

    def __init__(self, driver: str, endpoint: Path) -> None:
        self._driver = driver
        self._endpoint = endpoint
        self.is_registered = False

    async def get_info(self, message: pluginregistration.InfoRequest) -> pluginregistration.PluginInfo:
        return pluginregistration.PluginInfo(
            type=PLUGIN_TYPE, name=self._driver, endpoint=str(self._endpoint), supported_versions=list(SERVICES)
        )

    async def notify_registration_status(
        self, message: pluginregistration.RegistrationStatus
    ) -> pluginregistration.RegistrationStatusResponse:
        self.is_registered = message.plugin_registered
        if message.plugin_registered:
            log.info("dra_driver_registered", driver=self._driver)
        else:
            log.error("dra_driver_not_registered", driver=self._driver, error=message.error[:1000])
        return pluginregistration.RegistrationStatusResponse()


class _Socket:
    """A server on a socket file of its own."""

    def __init__(self, path: Path, handlers: Collection[IServable]) -> None:
        self.path = path
        self._handlers = handlers
        self._server: GrpcServer | None = None
        self._identity: FileIdentity | None = None

    @property
    def is_there(self) -> bool:
        return self._server is not None and self._identity == file_identity(self.path)

    async def serve(self) -> None:
        """Raises Unavailable."""
        await self.stop()
        try:
            sock = bind_unix_socket(self.path, mode=_SOCKET_MODE)
        except OSError as e:
            raise Unavailable(f"{self.path} cannot be served: {e.strerror or e}; it is tried again") from e
        self._identity = file_identity(self.path)
        self._server = GrpcServer(self._handlers)
        await self._server.serve(sock)

    async def stop(self) -> None:
        server, self._server = self._server, None
        with suppress(OSError):
            remove_socket(self.path, self._identity)
        if server is not None:
            await server.stop()


class DraRegistration:
    """Keeps both sockets there while `run` runs; `instance` is part of their names."""

    def __init__(
        self, *, driver: str, instance: str, registry: Path, plugin_path: Path, services: Collection[IServable]
    ) -> None:
        self._registry = registry
        self._plugin_path = plugin_path
        endpoint = plugin_path / f"dra-{instance}.sock"
        self.registration = Registration(driver, endpoint)
        self._driver_socket = _Socket(endpoint, services)
        self._registration_socket = _Socket(registry / f"{driver}-{instance}-reg.sock", [self.registration])
        self._is_leaving = False
        self._failure = ReportOnce()
        self.is_running = False

    async def leave(self) -> None:
        """The kubelet calls another agent of the node from now on, where there is one. Open calls go on."""
        self._is_leaving = True
        await self._registration_socket.stop()

    async def run(self) -> None:
        """Until cancelled; then the sockets are gone, the registration's first."""
        self.is_running = True
        try:
            while True:
                try:
                    await self._keep()
                except Unavailable as e:
                    if self._failure.is_new(str(e)):
                        log.warning("dra_driver_not_served", error=str(e), retried_in_s=RETRY_S)
                    await asyncio.sleep(RETRY_S)
        finally:
            await self._registration_socket.stop()
            await self._driver_socket.stop()

    async def _keep(self) -> None:
        async with open_directory_watch(self._registry, poll_s=POLL_S) as watch:
            while True:
                await self._serve_missing()
                self._failure.is_over()
                await watch.wait_change()

    async def _serve_missing(self) -> None:
        if not self._driver_socket.is_there:
            await self._registration_socket.stop()
            try:
                self._plugin_path.mkdir(mode=0o750, parents=True, exist_ok=True)
            except OSError as e:
                raise Unavailable(f"{self._plugin_path} cannot be made: {e.strerror or e}") from e
            await self._driver_socket.serve()
        if not self._registration_socket.is_there and not self._is_leaving:
            self.registration.is_registered = False
            await self._registration_socket.serve()
