"""The extender's HTTP server: the scheduler's verbs, health, readiness, version, metrics, and what it has reserved.

The paths are gpu-admission's, GPUShare's and kube-scheduler's usual ones. Limits and connections are
core/kit/http_server.py's: a new connection is always served, however many others are idle. With client authorities, only a
client that shows a certificate of theirs may call the verbs and read the state; a kubelet's probe has none, so health stays
open. A replica that does not lead, or has not listed the cluster since it does, answers 503: the scheduler tries again, and
a Service routes to the other. The webhooks for new pods (claims_webhook.py) are answered by every replica, and with or
without a certificate, by setting. The server's own certificate is read again when it changes.

A verb's request, in the order of the checks:

| check | answer |
|---|---|
| a body that is compressed, in chunks or too long, by its headers | 415, 411, 413 (core/kit/http_server.py) |
| no client certificate where one is asked for | 403, before the body is read |
| this replica does not decide | 503, before the body is read and again after it; the connection ends |
| a webhook's body above MAX_REVIEW_BYTES | 413, before it is read |
| LONG_AT_ONCE bodies above SHORT_BYTES are being read already (for the webhook LONG_REVIEWS_AT_ONCE) | 503 |
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
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
from aiohttp import web
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.core.kit.http_server import HttpLimits, HttpServer
from gpushare_agent.core.kit.tcp_listeners import listen_tcp
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.core.settings.sections import ExtenderSettings
from gpushare_agent.extender.bind import BIND_TIMEOUT_S
from gpushare_agent.extender.claims_webhook import ClaimsWebhook
from gpushare_agent.extender.debug import StatePages
from gpushare_agent.extender.messages import Verb
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.verbs import Extender

log = structlog.get_logger(__name__)

BACKLOG = 128
IDLE_S = 120.0
"""Longer than the 90 s after which a Go client closes: else it may send a request into a connection that is being closed."""
BODY_S = 10.0
MAX_BODY_BYTES = 8 * 1024 * 1024
"""A whole node object has 10 to 20 KiB."""
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
    """The request is not answered. `status` and text are for the client, `outcome` for the metric; the connection cannot be
    used any more."""

    def __init__(self, status: int, text: str, outcome: str = "bad") -> None:
        super().__init__(text)
        self.status = status
        self.outcome = outcome


class _LongBodies(Struct):
    """The bodies above SHORT_BYTES that are being read."""

    at_once: int
    most_bytes: int = sys.maxsize
    reading: int = 0


class ExtenderWeb(Struct, kw_only=True, eq=False):
    """`run` once. `ready` returns why the verbs are not answered now, nothing when they are; `warm` why this replica could
    not take over at once, which is what /readyz answers."""

    settings: ExtenderSettings
    verbs: Extender
    metrics: ExtenderMetrics
    ready: Callable[[], Sequence[str]]
    warm: Callable[[], Sequence[str]]
    pages: StatePages
    webhook: ClaimsWebhook | None = None
    is_webhook_open: bool = False
    """For clients without a certificate, too."""
    body_s: float = BODY_S
    limits: HttpLimits = HttpLimits(idle_s=IDLE_S)
    """Those of any port of the program, with IDLE_S; `run` sets the ones of bodies, handlers and the end."""
    bind_s: float = BIND_TIMEOUT_S
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
        settings, context = self.settings, None
        # Before the port is taken: a process that cannot serve must not look as if it listened.
        if settings.tls_cert is not None and settings.tls_key is not None:
            context = tls_context(settings.tls_cert, settings.tls_key, settings.client_ca)
        limits = replace(
            self.limits,
            body_bytes=MAX_BODY_BYTES,
            shutdown_s=self.bind_s + 1,  # a bind that began with the last request ends by its own limit
            cancels_handlers=False,  # a bind goes on, whether or not the scheduler still waits for it
        )
        server = HttpServer("extender", self._routes(), limits=limits, tls=context)
        try:
            listeners = await listen_tcp(settings.addr, settings.port, backlog=BACKLOG)
        except Unavailable as e:
            raise StartupError(f"{e}; choose another extender.addr or extender.port, or end the other program") from e
        # With port 0 the system chooses one, for tests and for several processes on a host.
        self.bound_port = listeners[0].getsockname()[1]
        self._is_listening.set()
        log.info("extender_listening", addr=settings.addr or "*", port=self.bound_port, is_tls=context is not None)
        try:
            async with asyncio.TaskGroup() as group:
                if context is not None and settings.tls_cert is not None and settings.tls_key is not None:
                    # Next to the server, so that it ends with it; a failure of the one ends the other.
                    renewal = reload_certificate(context, settings.tls_cert, settings.tls_key)
                    group.create_task(renewal, name="certificate")
                await server.serve(listeners)
        finally:
            self._is_listening.clear()
        # For the type: `serve` returns only by an exception.
        raise AssertionError("unreachable: the server serves until it is cancelled")

    def _routes(self) -> list[web.AbstractRouteDef]:
        verbs = self.verbs
        webhook = self.webhook
        of_webhook = []
        # Without the setting the paths are not there, so that a webhook configuration left behind fails visibly.
        if webhook is not None:
            review = partial(
                self._verb, "mutate", long_bodies=self._long_reviews, is_open=self.is_webhook_open, ready=tuple
            )
            of_webhook = [
                web.post("/mutate-pods", review(webhook.mutate)),
                web.post("/translate-pods", review(webhook.translate)),
            ]
        return [
            *of_webhook,
            web.post("/scheduler/filter", self._verb("filter", verbs.filter)),
            # gpu-admission's path; `filter` is the usual one. The same for `priorities`.
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
        """`is_open`: for clients without a certificate too. `ready`: instead of the server's own, where no condition of
        leadership is needed: what becomes of a pod needs nothing that only a leader knows."""
        not_ready, bound = ready or self.ready, long_bodies or self._long_bodies

        async def answer(request: web.Request) -> web.Response:
            if not is_open and not self._is_known(request):
                return web.Response(status=403, text=_UNKNOWN_CLIENT)
            try:
                # Before the body, which may be long, and after it, because the lease may have been lost meanwhile.
                _check_ready(not_ready())
                content = await self._body(request, bound)
                _check_ready(not_ready())
            except UnreadError as e:
                self.metrics.request(name, e.outcome, 0.0)
                unread = web.Response(status=e.status, text=f"{e}\n")
                # The rest of the body would be read as the next request; and a Service chooses a replica for each
                # connection: kube-scheduler would keep this one, to a former leader, as long as it asks.
                unread.force_close()
                return unread
            # Without the time that the client took to send it.
            began_at = time.monotonic()
            result = await verb(content)
            self.metrics.request(name, result.outcome, time.monotonic() - began_at)
            kind = _JSON if result.status == 200 else "text/plain"
            return web.Response(status=result.status, body=result.body, content_type=kind)

        return answer

    async def _body(self, request: web.Request, bound: _LongBodies) -> bytes:
        """The whole body. Raises UnreadError."""
        # core/kit/http_server.py has refused chunked bodies, so the header says how long it will be.
        length = request.content_length or 0
        is_long = length > SHORT_BYTES
        if is_long and length > bound.most_bytes:
            raise UnreadError(413, f"a request of {length} bytes; at most {bound.most_bytes} are read here")
        # Refused rather than queued: a queue of long bodies is the memory that this bounds.
        if is_long and bound.reading >= bound.at_once:
            raise UnreadError(503, f"{bound.at_once} long requests are being read already; try again")
        bound.reading += is_long
        try:
            async with asyncio.timeout(self.body_s):
                return await request.read()
        except TimeoutError as e:
            raise UnreadError(408, f"no whole request within {self.body_s:g} s") from e
        except (OSError, web.PayloadAccessError, web.RequestPayloadError) as e:
            raise UnreadError(400, f"the request did not come to its end: {e or type(e).__name__}") from e
        finally:
            bound.reading -= is_long

    def _is_known(self, request: web.Request) -> bool:
        """The TLS layer has checked any certificate that was shown."""
        # Without authorities, anybody who reaches the port counts as the scheduler; the default address is 127.0.0.1.
        if self.settings.client_ca is None:
            return True
        return request.transport is not None and bool(request.transport.get_extra_info("peercert"))

    def _for_known(self, page: Page) -> Page:
        async def show(request: web.Request) -> web.StreamResponse:
            # As for the verbs: the state names pods of every namespace.
            return await page(request) if self._is_known(request) else web.Response(status=403, text=_UNKNOWN_CLIENT)

        return show

    async def _show_version(self, _request: web.Request) -> web.Response:
        return web.Response(text=json.dumps({"version": __version__}) + "\n", content_type=_JSON)

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        # Not `ready`: a Deployment's update waits for readiness of all replicas, and only one leads.
        reasons = self.warm()
        return web.Response(status=503 if reasons else 200, text="\n".join(reasons or ["ok"]) + "\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        content_type, text = self.metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})


def _check_ready(reasons: Sequence[str]) -> None:
    if reasons:
        raise UnreadError(503, "\n".join(reasons), "unready")


# --- TLS ---


def tls_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """PEM files; without authorities clients need no certificate. One that a client shows is checked; which requests need
    one is the server's decision.

    Raises:
        StartupError: a file cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # kube-scheduler resumes no session, and opens a connection for every bind while two others are under way: tickets are
    # half of the server's work in a handshake (measured).
    context.num_tickets = 0
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            # Optional in TLS, because a kubelet's health probe has no certificate; the verbs ask for it themselves.
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as e:
        raise StartupError(
            f"cannot serve HTTPS with {cert} and {key}: {e}; check extender.tls_cert, extender.tls_key and "
            "extender.client_ca"
        ) from e
    return context


async def reload_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> NoReturn:
    """Certificates are renewed in place: new connections use the new one. The authorities are read only at the start."""
    seen = _stamps(cert, key)
    while True:
        await asyncio.sleep(CERTIFICATE_PERIOD_S)
        now = _stamps(cert, key)
        # None: a file is not there at this moment; the certificate in use stays.
        if now == seen or now is None:
            continue
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as e:
            # `seen` stays, so it is tried again: certificate and key may be of two versions for a moment.
            log.warning("certificate_not_reloaded", cert=str(cert), error=str(e), then="the former one stays in use")
            continue
        seen = now
        log.info("certificate_reloaded", cert=str(cert))


def _stamps(cert: Path, key: Path) -> tuple[int, int] | None:
    try:
        return cert.stat().st_mtime_ns, key.stat().st_mtime_ns
    except OSError:
        return None
