"""The extender's HTTP server: the scheduler's verbs, health, readiness, version, metrics, and what it has reserved.

The paths are gpu-admission's and kube-scheduler's usual ones. Who is let in is web_door.py's, how bodies are read
extender_bodies.py's: a newcomer always gets in, whatever others leave open. With client authorities, only who shows a
certificate of theirs may ask the verbs and the state; a kubelet's probe has none, so health stays open. A replica that does
not lead, or has not listed the cluster since it does, answers 503: the scheduler tries again, and a Service routes to the
other. The state is the listening sockets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import structlog

from gpushare_agent import __version__
from gpushare_agent.extender.bodies import READ_TIMEOUT_S, Bodies, UnreadError
from gpushare_agent.extender.debug import StatePages
from gpushare_agent.extender.messages import (
    FilterAnswer,
    NodesArgs,
    binding_result,
    filter_result,
    host_priorities,
    parse_bind_args,
    parse_nodes_args,
    parse_preempt_args,
    preemption_result,
)
from gpushare_agent.extender.tls import Tls, keep_certificate, tls_context
from gpushare_agent.extender.verbs import Extender
from gpushare_agent.kit.tcp_listeners import close_all, listen_tcp
from gpushare_agent.model.errors import Corrupt, StartupError, Unavailable
from gpushare_agent.model.resources import ResourceNames

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.observability.http.limiter import Door

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 256
"""All of them may be one peer's: a scheduler binds many pods at once. Who comes then pushes out one that idles."""
BACKLOG = 128
KEEPALIVE_S = 120.0
"""Longer than the 90 s after which a Go client closes: else it may send a request into a connection that is being closed."""
SHUTDOWN_TIMEOUT_S = 5.0
"""Binds under way may end."""
_JSON = "application/json"


class CountsRequests(Protocol):
    def request(self, verb: str, outcome: str, duration_s: float) -> None: ...

    def exposition(self, accept: str) -> tuple[str, bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDoor:
    """Where to listen, for whom, and how much at most."""

    addr: str = "127.0.0.1"
    port: int = 3456
    tls: Tls | None = None
    max_body_bytes: int = 8 << 20
    read_timeout_s: float = READ_TIMEOUT_S
    connections: int = MAX_CONNECTIONS
    headers_within_s: float = 10.0
    handshake_s: float = 5.0
    idle_s: float = KEEPALIVE_S
    look_period_s: float = 1.0
    shutdown_s: float = SHUTDOWN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class _Result:
    """What a verb answers: a body for status 200, or an error's text for another."""

    body: bytes
    outcome: str = "ok"
    status: int = 200


Verb = Callable[[bytes], Awaitable[_Result]]


class ExtenderVerbs:
    """From a request's bytes to an answer's."""

    def __init__(self, extender: Extender, names: ResourceNames) -> None:
        self._extender = extender
        self._names = names

    async def filter(self, content: bytes) -> _Result:
        args: NodesArgs | None = None
        try:
            args = parse_nodes_args(content, self._names)
            answer = await self._extender.filter(args)
        except Corrupt as e:
            return _Result(filter_result(FilterAnswer(failed={}, unresolvable={}, error=str(e)), None), "bad")
        return _Result(filter_result(answer, args), "error" if answer.error else "ok")

    async def prioritize(self, content: bytes) -> _Result:
        """HostPriorityList has no place for an error."""
        try:
            return _Result(host_priorities(self._extender.prioritize(parse_nodes_args(content, self._names))))
        except Corrupt as e:
            return _Result(f"{e}\n".encode(), "bad", 400)

    async def bind(self, content: bytes) -> _Result:
        try:
            error = await self._extender.bind(parse_bind_args(content))
        except Corrupt as e:
            return _Result(binding_result(str(e)), "bad")
        return _Result(binding_result(error), "error" if error else "ok")

    async def preempt(self, content: bytes) -> _Result:
        """ExtenderPreemptionResult has no place for an error."""
        try:
            args = parse_preempt_args(content, self._names)
        except Corrupt as e:
            return _Result(f"{e}\n".encode(), "bad", 400)
        return _Result(preemption_result(self._extender.preempt(args), args.violations))


class ExtenderWeb:
    """`run` once. `ready` returns why the verbs are not answered now, nothing when they are; `warm` why this replica could
    not take over at once, which is what /readyz tells."""

    def __init__(
        self,
        *,
        door: WebDoor,
        verbs: ExtenderVerbs,
        metrics: CountsRequests,
        ready: Callable[[], Sequence[str]],
        warm: Callable[[], Sequence[str]],
        pages: StatePages,
    ) -> None:
        self._door = door
        self._verbs = verbs
        self._metrics = metrics
        self._ready = ready
        self._warm = warm
        self._pages = pages
        self._bodies = Bodies(most_bytes=door.max_body_bytes, within_s=door.read_timeout_s)
        self._is_listening = asyncio.Event()
        self.bound_port = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; the port."""
        await self._is_listening.wait()
        return self.bound_port

    async def run(self) -> NoReturn:
        """Serve until cancelled; requests under way may end.

        Raises:
            StartupError: the address or the certificate cannot be used.
        """
        tls = self._door.tls
        context = tls_context(tls) if tls is not None else None
        async with self._serving(context) as door, asyncio.TaskGroup() as group:
            if context is not None and tls is not None:
                group.create_task(keep_certificate(context, tls), name="certificate")
            await door.run()
        raise AssertionError("unreachable: the door is open until it is cancelled")

    @asynccontextmanager
    async def _serving(self, context: ssl.SSLContext | None) -> AsyncIterator[Door]:
        from aiohttp import web

        from gpushare_agent.observability.http.limiter import Door, DoorLimits, note_request

        app = web.Application(client_max_size=self._door.max_body_bytes, middlewares=[note_request])
        app.add_routes(self._routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._door.shutdown_s)
        limits = DoorLimits(
            connections=self._door.connections,
            per_peer=self._door.connections,
            headers_within_s=self._door.headers_within_s,
            idle_s=self._door.idle_s,
            look_period_s=self._door.look_period_s,
            handshake_s=self._door.handshake_s,
        )
        try:
            listeners = await listen_tcp(self._door.addr, self._door.port, backlog=BACKLOG)
        except Unavailable as e:
            raise StartupError(f"{e}; choose another extender.addr or extender.port, or end the other program") from e
        try:
            await runner.setup()
            self.bound_port = listeners[0].getsockname()[1]
            self._is_listening.set()
            log.info("extender_listening", addr=self._door.addr, port=self.bound_port, is_tls=context is not None)
            yield Door(runner, listeners, limits, name="extender", tls=context)
        finally:
            self._is_listening.clear()
            close_all(listeners)
            await runner.cleanup()

    def _routes(self) -> list[web.AbstractRouteDef]:
        from aiohttp import web

        verbs = self._verbs
        return [
            web.post("/scheduler/filter", self._verb("filter", verbs.filter)),
            web.post("/scheduler/predicates", self._verb("filter", verbs.filter)),
            web.post("/scheduler/priorities", self._verb("prioritize", verbs.prioritize)),
            web.post("/scheduler/prioritize", self._verb("prioritize", verbs.prioritize)),
            web.post("/scheduler/bind", self._verb("bind", verbs.bind)),
            web.post("/scheduler/preemption", self._verb("preempt", verbs.preempt)),
            web.get("/debug/state", self._show_state),
            web.get("/version", self._show_version),
            web.get("/healthz", self._show_health),
            web.get("/readyz", self._show_readiness),
            web.get("/metrics", self._show_metrics),
        ]

    def _verb(self, name: str, verb: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        from aiohttp import web

        async def answer(request: web.Request) -> web.Response:
            if not self._is_known(request):
                return web.Response(
                    status=403, text="show a client certificate of the authorities in extender.client_ca\n"
                )
            if reasons := self._ready():  # before the body, which may be long
                return self._unready(name, reasons)
            try:
                content = await self._bodies.read(request)
            except UnreadError as e:
                self._metrics.request(name, "bad", 0.0)
                unread = web.Response(status=e.status, text=f"{e}\n")
                unread.force_close()
                return unread
            if reasons := self._ready():
                return self._unready(name, reasons)
            began_at = time.monotonic()
            result = await verb(content)
            self._metrics.request(name, result.outcome, time.monotonic() - began_at)
            kind = _JSON if result.status == 200 else "text/plain"
            return web.Response(status=result.status, body=result.body, content_type=kind)

        return answer

    def _is_known(self, request: web.Request) -> bool:
        """The TLS layer has checked any certificate that was shown."""
        if self._door.tls is None or self._door.tls.client_ca is None:
            return True
        return request.transport is not None and bool(request.transport.get_extra_info("peercert"))

    def _unready(self, verb: str, reasons: Sequence[str]) -> web.Response:
        """The connection ends with it: a Service chooses a replica for each connection, and kube-scheduler would keep this
        one, to a former leader, as long as it asks."""
        self._metrics.request(verb, "unready", 0.0)
        answer = _unavailable(reasons)
        answer.force_close()
        return answer

    async def _show_state(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if not self._is_known(request):
            return web.Response(status=403, text="show a client certificate of the authorities in extender.client_ca\n")
        return await self._pages.show(request)

    async def _show_version(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=json.dumps({"version": __version__}) + "\n", content_type=_JSON)

    async def _show_health(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        reasons = self._warm()
        return _unavailable(reasons) if reasons else web.Response(text="ok\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        from aiohttp import web

        content_type, text = self._metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})


def _unavailable(reasons: Sequence[str]) -> web.Response:
    from aiohttp import web

    return web.Response(status=503, text="".join(f"{reason}\n" for reason in reasons))
