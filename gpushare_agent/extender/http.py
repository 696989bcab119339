"""The extender's HTTP server: the scheduler's verbs, health, readiness, version, metrics, and what it has reserved.

The paths are gpu-admission's, GPUShare's and kube-scheduler's usual ones. Limits and connections are
kit/http_server.py's: a new connection is always served, however many others are idle. With client authorities, only a client
that shows a certificate of theirs may call the verbs and read the state; a kubelet's probe has none, so health stays open. A
replica that does not lead, or has not listed the cluster since it does, answers 503: the scheduler tries again, and a
Service routes to the other. The webhooks for new pods (claims_webhook.py) are answered by every replica, and with or
without a certificate, by setting.
The server's own certificate is read again when it changes.

A verb's request, in the order of the checks:

| check | answer |
|---|---|
| a body that is compressed, in chunks or too long, by its headers | 415, 411, 413 (kit/http_server.py) |
| no client certificate where one is asked for | 403, before the body is read |
| this replica does not decide | 503, before the body is read and again after it; the connection ends |
| a webhook's body above MAX_REVIEW_BYTES | 413, before it is read |
| as many bodies above SHORT_BYTES as may be are being read, of the verbs and of the webhook each | 503 |
| the body does not come within `body_s`, or not to its end | 408, 400 |
| the body is no request of this verb | the verb's own error (verbs.py) |

A body of any length that is accepted is decoded in some milliseconds (messages.py).

State owned: how many long bodies are being read.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import structlog
from aiohttp import web
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.extender.claims_webhook import ClaimsWebhook
from gpushare_agent.extender.debug import StatePages
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.verbs import ExtenderVerbs, Result, Verb, bad_request
from gpushare_agent.kit.http_server import HttpLimits, HttpServer
from gpushare_agent.kit.tcp_listeners import listen_tcp
from gpushare_agent.model.errors import Corrupt, StartupError, Unavailable

log = structlog.get_logger(__name__)

BACKLOG = 128
IDLE_S = 120.0
"""Longer than the 90 s after which a Go client closes: else it may send a request into a connection that is being closed."""
BODY_S = 10.0
SHORT_BYTES = 512 * 1024
"""The names of 10,000 nodes."""
LONG_AT_ONCE = 8
"""A bound on memory. A scheduler has one filter call under way, so its own requests do not reach it."""
LONG_REVIEWS_AT_ONCE = 4
"""The same for the webhook, which may be open to whoever reaches it, so that they take none of the scheduler's."""
MAX_REVIEW_BYTES = 3 * 1024 * 1024
"""An API server stores a pod of at most 1.5 MiB."""
CERTIFICATE_PERIOD_S = 60.0
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
_JSON = "application/json"
_UNKNOWN_CLIENT = "show a client certificate of the authorities in extender.client_ca\n"


class UnreadError(Exception):
    """The body cannot be read. `status` and text are for the client; its connection is of no use any more."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Tls(Struct, frozen=True, kw_only=True):
    """PEM files. `client_ca` None: clients need no certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class ListenConfig(Struct, frozen=True, kw_only=True):
    """Where to listen, for whom, and how much at most. `shutdown_s`: binds under way may end."""

    addr: str = "127.0.0.1"
    port: int = 3456
    tls: Tls | None = None
    max_body_bytes: int = 8 << 20
    body_s: float = BODY_S
    shutdown_s: float = 5.0
    limits: HttpLimits | None = None
    """None: as for the agent's port, with the two above and IDLE_S."""


class _LongBodies(Struct):
    """Those above SHORT_BYTES that are being read."""

    at_once: int
    most_bytes: int = sys.maxsize
    reading: int = 0


class WebhookVerb:
    """`mutate` and `translate` as verbs of the server. `needs_certificate`: as the scheduler's verbs do."""

    def __init__(self, webhook: ClaimsWebhook, *, needs_certificate: bool) -> None:
        self._webhook = webhook
        self.needs_certificate = needs_certificate

    async def mutate(self, content: bytes) -> Result:
        return await _reviewed(self._webhook.mutate, content)

    async def translate(self, content: bytes) -> Result:
        return await _reviewed(self._webhook.translate, content)


async def _reviewed(webhook: Callable[[bytes], Awaitable[tuple[bytes, str]]], content: bytes) -> Result:
    try:
        body, outcome = await webhook(content)
    except Corrupt as e:
        return bad_request(e)
    return Result(body, outcome)


class ExtenderWeb(Struct, kw_only=True, eq=False):
    """`run` once. `ready` returns why the verbs are not answered now, nothing when they are; `warm` why this replica could
    not take over at once, which is what /readyz answers."""

    config: ListenConfig
    verbs: ExtenderVerbs
    metrics: ExtenderMetrics
    ready: Callable[[], Sequence[str]]
    warm: Callable[[], Sequence[str]]
    pages: StatePages
    webhook: WebhookVerb | None = None
    _long_bodies: _LongBodies = field(default_factory=lambda: _LongBodies(LONG_AT_ONCE))
    _long_reviews: _LongBodies = field(default_factory=lambda: _LongBodies(LONG_REVIEWS_AT_ONCE, MAX_REVIEW_BYTES))
    _is_listening: asyncio.Event = field(default_factory=asyncio.Event)
    bound_port: int = 0

    async def wait_listening(self) -> int:
        """Wait until requests are served; the port."""
        await self._is_listening.wait()
        return self.bound_port

    async def run(self) -> NoReturn:
        """Serve until cancelled; requests under way may end.

        Raises:
            StartupError: the address or the certificate cannot be used.
        """
        config = self.config
        # Before the port is taken: a process that cannot serve must not look as if it listened.
        context = tls_context(config.tls) if config.tls is not None else None
        server = HttpServer("extender", self._routes(), limits=self._limits(), tls=context)
        try:
            listeners = await listen_tcp(config.addr, config.port, backlog=BACKLOG)
        except Unavailable as e:
            raise StartupError(f"{e}; choose another extender.addr or extender.port, or end the other program") from e
        # Port 0 has the system choose one, for tests and for processes side by side.
        self.bound_port = listeners[0].getsockname()[1]
        self._is_listening.set()
        log.info("extender_listening", addr=config.addr, port=self.bound_port, is_tls=context is not None)
        try:
            async with asyncio.TaskGroup() as group:
                if context is not None and config.tls is not None:
                    # Beside the server, so that it ends with it; a failure of the one ends the other.
                    group.create_task(reload_certificate(context, config.tls), name="certificate")
                await server.serve(listeners)
        finally:
            self._is_listening.clear()
        # For the type: `serve` returns only by an exception.
        raise AssertionError("unreachable: the server serves until it is cancelled")

    def _limits(self) -> HttpLimits:
        config = self.config
        return replace(
            config.limits or HttpLimits(idle_s=IDLE_S),
            body_bytes=config.max_body_bytes,
            shutdown_s=config.shutdown_s,
            cancels_handlers=False,  # a bind goes on, whether or not the scheduler still waits for it
        )

    def _routes(self) -> list[web.AbstractRouteDef]:
        verbs = self.verbs
        webhook = self.webhook
        of_webhook = []
        if webhook is not None:
            is_open = not webhook.needs_certificate

            def answered(verb: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
                # No condition of leadership: what becomes of a pod needs nothing that only a leader knows.
                return self._verb("mutate", verb, self._long_reviews, is_open=is_open, ready=lambda: ())

            # Without the setting the paths are not there, so that a webhook configuration left behind fails visibly.
            of_webhook = [
                web.post("/mutate-pods", answered(webhook.mutate)),
                web.post("/translate-pods", answered(webhook.translate)),
            ]
        return [
            *of_webhook,
            web.post("/scheduler/filter", self._verb("filter", verbs.filter)),
            # gpu-admission's path; `filter` is the usual one. The same of `priorities`.
            web.post("/scheduler/predicates", self._verb("filter", verbs.filter)),
            web.post("/scheduler/priorities", self._verb("prioritize", verbs.prioritize)),
            web.post("/scheduler/prioritize", self._verb("prioritize", verbs.prioritize)),
            web.post("/scheduler/bind", self._verb("bind", verbs.bind)),
            web.post("/scheduler/preemption", self._verb("preempt", verbs.preempt)),
            # GPUShare's: a scheduler's configuration for it needs another address alone.
            web.post("/gpushare-scheduler/filter", self._verb("filter", verbs.filter)),
            web.post("/gpushare-scheduler/bind", self._verb("bind", verbs.bind)),
            web.get("/gpushare-scheduler/inspect", self._for_known(self.pages.inspect)),
            web.get("/gpushare-scheduler/inspect/{node}", self._for_known(self.pages.inspect)),
            web.get("/debug/state", self._for_known(self.pages.show)),
            web.get("/version", self._show_version),
            web.get("/healthz", self._show_health),
            web.get("/readyz", self._show_readiness),
            web.get("/metrics", self._show_metrics),
        ]

    def _verb(
        self,
        name: str,
        verb: Verb,
        long_bodies: _LongBodies | None = None,
        *,
        is_open: bool = False,
        ready: Callable[[], Sequence[str]] | None = None,
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`is_open`: for clients without a certificate too. `ready`: in the place of the server's own."""
        not_ready, bound = ready or self.ready, long_bodies or self._long_bodies

        async def answer(request: web.Request) -> web.Response:
            if not is_open and not self._is_known(request):
                return web.Response(status=403, text=_UNKNOWN_CLIENT)
            if reasons := not_ready():  # before the body, which may be long
                return self._unready(name, reasons)
            try:
                content = await self._body(request, bound)
            except UnreadError as e:
                self.metrics.request(name, "bad", 0.0)
                unread = web.Response(status=e.status, text=f"{e}\n")
                # What is left of the body would be read as the next request.
                unread.force_close()
                return unread
            # The lease may have been lost while the body came: no decision after that.
            if reasons := not_ready():
                return self._unready(name, reasons)
            # Without the time that the client took to send it.
            began_at = time.monotonic()
            result = await verb(content)
            self.metrics.request(name, result.outcome, time.monotonic() - began_at)
            kind = _JSON if result.status == 200 else "text/plain"
            return web.Response(status=result.status, body=result.body, content_type=kind)

        return answer

    async def _body(self, request: web.Request, bound: _LongBodies) -> bytes:
        """The whole body. Raises UnreadError."""
        # kit/http_server.py has refused chunked bodies, so the header says how long it will be.
        length = request.content_length or 0
        if length <= SHORT_BYTES:
            return await self._content(request)
        if length > bound.most_bytes:
            raise UnreadError(413, f"a request of {length} bytes; at most {bound.most_bytes} are read here")
        # Refused rather than queued: a queue of long bodies is the memory that this bounds.
        if bound.reading >= bound.at_once:
            raise UnreadError(503, f"{bound.at_once} long requests are being read already; try again")
        bound.reading += 1
        try:
            return await self._content(request)
        finally:
            bound.reading -= 1

    async def _content(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.config.body_s):
                return await request.read()
        except TimeoutError as e:
            raise UnreadError(408, f"no whole request within {self.config.body_s:g} s") from e
        except (OSError, web.PayloadAccessError, web.RequestPayloadError) as e:
            raise UnreadError(400, f"the request did not come to its end: {e or type(e).__name__}") from e

    def _is_known(self, request: web.Request) -> bool:
        """The TLS layer has checked any certificate that was shown."""
        # Without authorities whoever reaches the port is the scheduler; the default address is 127.0.0.1.
        if self.config.tls is None or self.config.tls.client_ca is None:
            return True
        return request.transport is not None and bool(request.transport.get_extra_info("peercert"))

    def _unready(self, verb: str, reasons: Sequence[str]) -> web.Response:
        """The connection ends with it: a Service chooses a replica for each connection, and kube-scheduler would keep this
        one, to a former leader, as long as it asks."""
        self.metrics.request(verb, "unready", 0.0)
        answer = _unavailable(reasons)
        answer.force_close()
        return answer

    def _for_known(self, page: Page) -> Page:
        async def show(request: web.Request) -> web.StreamResponse:
            if not self._is_known(request):
                # As for the verbs: the state names pods of every namespace.
                return web.Response(status=403, text=_UNKNOWN_CLIENT)
            return await page(request)

        return show

    async def _show_version(self, _request: web.Request) -> web.Response:
        return web.Response(text=json.dumps({"version": __version__}) + "\n", content_type=_JSON)

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        # Not `ready`: a Deployment's update waits for readiness of all replicas, and only one leads.
        reasons = self.warm()
        return _unavailable(reasons) if reasons else web.Response(text="ok\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        content_type, text = self.metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})


def _unavailable(reasons: Sequence[str]) -> web.Response:
    return web.Response(status=503, text="".join(f"{reason}\n" for reason in reasons))


# --- TLS ---


def tls_context(tls: Tls) -> ssl.SSLContext:
    """A client that shows a certificate has it checked; which requests need one is the server's decision.

    Raises:
        StartupError: a file cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            # Optional in TLS, for a kubelet's probe of health has no certificate; the verbs ask for it themselves.
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as e:
        raise StartupError(
            f"cannot serve HTTPS with {tls.cert} and {tls.key}: {e}; check extender.tls_cert, extender.tls_key and "
            "extender.client_ca"
        ) from e
    return context


async def reload_certificate(context: ssl.SSLContext, tls: Tls, *, period_s: float = CERTIFICATE_PERIOD_S) -> NoReturn:
    """Certificates are renewed in place: new connections use the new one. The authorities are read only at the start."""
    seen = _stamps(tls)
    while True:
        await asyncio.sleep(period_s)
        now = _stamps(tls)
        # None: a file is not there at this moment; the certificate in use stays.
        if now == seen or now is None:
            continue
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as e:
            # `seen` stays, so it is tried again: certificate and key may be of two versions for a moment.
            log.warning(
                "certificate_not_reloaded", cert=str(tls.cert), error=str(e), then="the former one stays in use"
            )
            continue
        seen = now
        log.info("certificate_reloaded", cert=str(tls.cert))


def _stamps(tls: Tls) -> tuple[int, int] | None:
    try:
        return tls.cert.stat().st_mtime_ns, tls.key.stat().st_mtime_ns
    except OSError:
        return None
