"""One device plugin on its socket in the kubelet's directory.

kubelet/registration.py registers it. State owned: the server and the identity of its socket file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gpushare_agent.kit.grpc_server import GrpcServer
from gpushare_agent.kit.sockets import FileIdentity, bind_unix_socket, file_identity, remove_socket
from gpushare_agent.kubelet.device_plugin import FAST_DECODERS, DevicePlugin
from gpushare_agent.kubelet.handover import Handover
from gpushare_agent.model.errors import Unavailable

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = structlog.get_logger(__name__)

_SOCKET_MODE = 0o600
"""The kubelet runs as root, or as the agent's own user in a sandbox."""
_STREAMS_END_S = 0.05
"""Between ending the streams and closing: time for their last frames to leave."""


class PluginEndpoint:
    """Serves `plugin`, and `handover` beside it, at `device_plugin_path`/`socket_name`. One caller at a time."""

    def __init__(
        self, *, device_plugin_path: Path, socket_name: str, plugin: DevicePlugin, handover: Handover | None = None
    ) -> None:
        self.socket_name = socket_name
        self.plugin = plugin
        self._handlers: Sequence[IServable] = [plugin] if handover is None else [plugin, handover]
        self.path = device_plugin_path / socket_name
        self._server: GrpcServer | None = None
        self._identity: FileIdentity | None = None

    @property
    def resource(self) -> str:
        return self.plugin.resource

    @property
    def is_serving(self) -> bool:
        """The server runs, and the socket at the path is its own."""
        return self._server is not None and self._identity == file_identity(self.path)

    @property
    def connections(self) -> int:
        """The kubelet's, and those of agents that ask for the handover."""
        return self._server.connections if self._server is not None else 0

    @property
    def is_replaced(self) -> bool:
        """The server runs, but another file is at its path."""
        return self._server is not None and file_identity(self.path) not in (None, self._identity)

    async def serve(self) -> None:
        """Serves at the path, anew if need be; a socket that is there is replaced.

        Raises Unavailable: the directory is missing or not writable, or a file that is no socket is at the path.
        """
        await self.stop()
        try:
            sock = bind_unix_socket(self.path, mode=_SOCKET_MODE)
        except OSError as e:
            raise Unavailable(
                f"serving {self.resource} at {self.path} failed: {e}; it is tried again. Check that the kubelet's "
                f"device-plugin directory (kubelet.device_plugin_path) exists and can be written to"
            ) from e
        self._identity = file_identity(self.path)
        self._server = GrpcServer(self._handlers, decoders=FAST_DECODERS)
        try:
            await self._server.serve(sock)
        except BaseException:
            remove_socket(self.path, self._identity)
            self._server = None
            raise
        log.info("device_plugin_serving", resource=self.resource, socket=str(self.path))

    async def stop(self) -> None:
        """Ends the streams, closes the connections, and removes the socket if it still is ours. Takes at most 0.6 s."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            if self.plugin.open_streams:
                self.plugin.end_streams()
                await asyncio.sleep(_STREAMS_END_S)
        finally:  # also when cancelled: an open socket must not outlive its endpoint
            try:
                await server.stop()
            finally:
                remove_socket(self.path, self._identity)
