"""The static pods, from the kubelet's own list of pods (`/pods` of its HTTPS port).

A static pod is admitted before it has an object in the API server, and one that is rejected never gets one: no other API
that is on by default has its UID and its spec. The right is `get` of `nodes/pods` (kubelets from 1.33 on).

The service account's token is sent to the kubelet only once its certificate is verified: for the address that was
connected, or for the node's name, which is all that a kubelet's self-signed certificate has.

The answer has every pod of the node: bounded, and parsed pod by pod, so that no list blocks the event loop. State owned: the
last answer, for calls that waited for one another.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Raw, Struct
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import NULL, decoded, decoded_or, texts
from gpushare_agent.core.kit.supervision import bounded
from gpushare_agent.core.kit.tcp_listeners import host_port
from gpushare_agent.core.model.errors import Corrupt, Rejected, Unavailable

if TYPE_CHECKING:
    from aiohttp import ClientResponse

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_BYTES = 16 << 20
"""250 pods of 16 KiB are 4 MiB; kubelets from 1.36 on write each device ID into a pod's status, about 100 bytes."""
SLICE_S = 0.005
"""So long the parser keeps the event loop."""
_OF_ANOTHER_HOST = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
REMEDY = "see docs/how-to/static-pods.md"


class StaticPods:
    """`ca_file` None: the service account's."""

    def __init__(
        self,
        *,
        address: str,
        port: int,
        ca_file: Path | None,
        node_name: str,
        service_account: Path = SERVICE_ACCOUNT,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._url = f"https://{host_port(address, port)}/pods"
        self._node_name = node_name
        self._ca_file = ca_file or service_account / "ca.crt"
        self._token_file = service_account / "token"
        self._max_bytes = max_bytes
        self._lock = asyncio.Lock()
        self._last: tuple[float, Sequence[Raw]] = (float("-inf"), ())

    async def read(self, *, timeout_s: float) -> Sequence[Raw]:
        """The static pods as undecoded JSON; an answer that was asked for after this call began also serves.

        Raises:
            Unavailable: no answer within `timeout_s`, no verified connection, or the token or CA cannot be read.
            Rejected: the kubelet does not let us read it.
            Corrupt: the answer is no list of pods, or too long.
        """
        called_at = time.monotonic()
        late = f"cannot read {self._url}: no answer within {timeout_s:g} s; {REMEDY}"
        async with bounded(timeout_s, late), self._lock:
            # An answer that was asked for before this call may be older than what the caller has just seen.
            if self._last[0] < called_at:
                began_at = time.monotonic()
                self._last = (began_at, await self._read())
            return self._last[1]

    async def _read(self) -> Sequence[Raw]:
        try:
            context, token = await asyncio.to_thread(self._credentials)
        except (OSError, ValueError) as e:
            raise Unavailable(f"cannot read {self._url}: {self._ca_file}, {self._token_file}: {e}; {REMEDY}") from e
        content = await self._get(context, token)
        return await _static_pods(content, self._url)

    def _credentials(self) -> tuple[ssl.SSLContext, str]:
        """Read for each request: tokens rotate, and requests are rare."""
        import aiohttp  # noqa: F401 - here, in a thread: it takes 0.2 s

        context = ssl.create_default_context(cafile=str(self._ca_file))
        return context, self._token_file.read_text(encoding="ascii").strip()

    async def _get(self, context: ssl.SSLContext, token: str) -> bytearray:
        from aiohttp import ClientConnectorCertificateError, ClientError, ClientSession, TCPConnector

        async with ClientSession(connector=TCPConnector(ssl=context), auto_decompress=False) as session:
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Accept-Encoding": "identity"}
            get = partial(session.get, self._url, headers=headers, allow_redirects=False)
            try:
                try:
                    async with get() as response:
                        return await self._content(response)
                except ClientConnectorCertificateError as e:
                    # A kubelet's serving certificate names the node and not always its address: the chain must hold,
                    # the name may be the node's.
                    if getattr(e.certificate_error, "verify_code", None) not in _OF_ANOTHER_HOST:
                        raise
                async with get(server_hostname=self._node_name) as response:
                    return await self._content(response)
            except ClientConnectorCertificateError as e:
                raise Unavailable(
                    f"cannot read {self._url}: the kubelet's certificate is not verified by {self._ca_file}: "
                    f"{e.certificate_error}; name its CA in kubelet.api_ca, {REMEDY}"
                ) from e
            except (ClientError, OSError, ValueError) as e:
                raise Unavailable(f"cannot read {self._url}: {e or type(e).__name__}; {REMEDY}") from e

    async def _content(self, response: ClientResponse) -> bytearray:
        if response.status in (401, 403):
            text = (await response.content.read(512)).decode("utf-8", "replace").strip()
            why = "the agent's service account needs get of nodes/pods"
            if response.status == 401:
                why = "it does not accept the agent's token, which it has the API server verify"
            raise Rejected(f"cannot read {self._url}: the kubelet answered {response.status}: {text}; {why}, {REMEDY}")
        if response.status != 200:
            raise Unavailable(f"cannot read {self._url}: the kubelet answered {response.status}")
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            # Checked while it comes: Content-Length is the sender's word, and chunked answers have none.
            if len(content) > self._max_bytes:
                raise Corrupt(f"cannot read {self._url}: the answer is longer than {self._max_bytes} bytes")
        return content


async def _static_pods(content: bytearray, url: str) -> Sequence[Raw]:
    """The static pods of a PodList. Raises Corrupt."""
    listed = decoded(_PODS, content, f"cannot read {url}: the answer")
    found, slice_began = [], time.monotonic()
    for raw in listed.items or ():
        if _is_static(raw):
            found.append(raw)
        # A node has hundreds of pods, and admissions must not wait for their decoding.
        if time.monotonic() - slice_began >= SLICE_S:
            await asyncio.sleep(0)
            slice_began = time.monotonic()
    return found


def _is_static(raw: Raw) -> bool:
    """The kubelet writes where it has a pod from; it lists no mirror pods."""
    source = texts(decoded_or(_POD, raw, _Pod).metadata.annotations).get("kubernetes.io/config.source")
    return source in ("file", "http")


class _PodList(Struct):
    items: list[Raw] | None


class _Meta(Struct, frozen=True):
    annotations: Raw = NULL


class _Pod(Struct, frozen=True):
    metadata: _Meta = _Meta()


_PODS, _POD = Decoder(_PodList), Decoder(_Pod)
