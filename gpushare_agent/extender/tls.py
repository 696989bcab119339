"""TLS of the extender's server: its certificate, read again when it changes, and its clients' authorities. No state."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.model.errors import StartupError

log = structlog.get_logger(__name__)

CERTIFICATE_PERIOD_S = 60.0


class Tls(Struct, frozen=True, kw_only=True):
    """PEM files. `client_ca` None: clients need no certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


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
        if now == seen or now is None:
            continue
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as e:
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
