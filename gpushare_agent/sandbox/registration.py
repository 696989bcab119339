"""The embedded kubelet's Registration service: it dials back while the plugin waits for the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler

from gpushare_agent.sandbox.plugin_endpoint import PluginCallError, PluginEndpoint
from gpushare_agent.wire.v1beta1 import RegisterRequest

log = structlog.get_logger(__name__)

SUPPORTED_VERSION = "v1beta1"
_RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


class RegistrationService:
    """Hands every connected endpoint to `accept`, which returns before the device stream is opened."""

    def __init__(self, directory: Path, accept: Callable[[PluginEndpoint], None]) -> None:
        self._directory = directory
        self._accept = accept

    def __mapping__(self) -> dict[str, Handler]:
        return {"/v1beta1.Registration/Register": Handler(self._register, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _register(self, stream: Any) -> None:
        request = RegisterRequest.parse(await stream.recv_message() or b"")
        if request.version != SUPPORTED_VERSION:
            raise GRPCError(
                Status.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{SUPPORTED_VERSION}"]',
            )
        if not _RESOURCE_NAME.fullmatch(request.resource_name):
            raise GRPCError(Status.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid')
        try:
            endpoint = await PluginEndpoint.dial(request.resource_name, self._directory / request.endpoint)
        except PluginCallError as error:
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        log.info("plugin_registered", resource=request.resource_name, endpoint=request.endpoint)
        await stream.send_message(b"")
        self._accept(endpoint)
