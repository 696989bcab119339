"""An API server for a few nodes, for their agents and for kubectl: the resources of KINDS (store.py), on a real TCP port.

The kubelet and the scheduler of the embedded node, and tests, use its methods in process (objects.py); the agent speaks HTTP
to it (handlers.py) and needs the server's token (access.py). State owned: the listener and its port. Not for admission
plugins, authorization of single verbs, other resources or paged lists.
"""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from gpushare_agent.model.errors import StartupError
from gpushare_agent.sandbox.api.access import ApiAccess, ServerCertificate, write_kubeconfig
from gpushare_agent.sandbox.api.handlers import ApiHandlers
from gpushare_agent.sandbox.api.objects import ApiObjects
from gpushare_agent.sandbox.api.store import KINDS
from gpushare_agent.sandbox.api.watch import ApiFaults, Watches

HOST = "127.0.0.1"
_MAX_BODY_BYTES = 3 * 2**20


class EmbeddedApiServer(ApiObjects):
    """`async with EmbeddedApiServer() as api:` listens on `api.url`; objects outlive `stop_listening`. Plain HTTP without a
    certificate: for tests, and no kubectl."""

    def __init__(
        self,
        *,
        port: int = 0,
        version: str = "1.36",
        history_limit: int = 2000,
        bookmark_interval_s: float = 60.0,
        seed: int = 0,
        certificate: ServerCertificate | None = None,
    ) -> None:
        super().__init__(version=version, history_limit=history_limit, seed=seed)
        self.port = port
        self.certificate = certificate
        self.access = ApiAccess()
        self.faults = ApiFaults(self.store)
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request that was admitted, in order of arrival."""
        watches = Watches(store=self.store, faults=self.faults, bookmark_interval_s=bookmark_interval_s)
        self._handlers = ApiHandlers(self, watches)
        self._runner: web.AppRunner | None = None
        self._port_holder: socket.socket | None = None
        """Bound and never listening: while the server does not listen, nobody else gets the port."""

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://{HOST}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What a client must send."""
        return self.access.headers

    @property
    def token(self) -> str:
        return self.access.token

    def write_kubeconfig(self, path: Path) -> None:
        """Raises OSError."""
        trusted = self.certificate.certificate if self.certificate is not None else None
        write_kubeconfig(path, self.url, self.token, trusted)

    async def __aenter__(self) -> Self:
        await self.start_listening()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_listening()
        if self._port_holder is not None:
            self._port_holder.close()

    async def start_listening(self) -> None:
        """Listens on the port of the first start. Raises StartupError where the port is in use."""
        self.faults.is_stopping = False
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._admitted])
        self._handlers.add_routes(app, tuple(KINDS))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            self._hold_port()
            context = self.certificate.server_context() if self.certificate is not None else None
            await web.TCPSite(runner, HOST, self.port, reuse_address=True, ssl_context=context).start()
        except OSError as error:
            await runner.cleanup()
            if self._port_holder is not None:
                self._port_holder.close()
            raise StartupError(
                f"the embedded API server cannot listen on {HOST}:{self.port}: {error}; choose another port"
            ) from error
        self._runner = runner

    def _hold_port(self) -> None:
        """Raises OSError where it is in use."""
        if self._port_holder is None:
            self._port_holder = socket.socket()
            self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port_holder.bind((HOST, self.port))
            self.port = self._port_holder.getsockname()[1]

    async def stop_listening(self) -> None:
        """Closes the port and every connection; objects and versions stay."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.faults.is_stopping = True
        self.faults.wake_watches()
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refusal = self.access.refusal(request, self.port)
        if refusal is not None:
            return refusal
        self.requests.append((request.method, request.path))
        failure = await self.faults.before_answer()
        if failure is not None:
            return failure
        response: web.StreamResponse = await handler(request)
        return response
