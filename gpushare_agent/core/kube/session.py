"""Requests to the API server: credentials, limits, HTTP status and errors, pages and watches, all in this place.

No models of the library: they cost 25 times the time, and its Watch loops hot on an empty or broken stream. With
`_preload_content=False` the library checks no status, so this module does. It owns the HTTP client, and replaces it
(at most once in RELOAD_INTERVAL_S) when the server no longer accepts our credentials: tokens and certificates rotate.

Objects of lists and watches are undecoded JSON. Protocol: Kubernetes API concepts, "Efficient detection of changes" and
"Retrieving large results sets in chunks".
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog
from msgspec import Raw, Struct, field
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.kit.json_schema import decoded, decoded_or
from gpushare_agent.core.kit.tcp_listeners import host_port
from gpushare_agent.core.kube.configuration import ConfigurationSource, open_api_client
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.pods import version_number

if TYPE_CHECKING:
    from aiohttp import ClientResponse

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_OBJECT_BYTES = 4 << 20
"""etcd holds at most 1.5 MiB of an object."""
MAX_STATUS_BYTES = 64 << 10
"""A proxy's page of HTML need not be read to its end."""
RELOAD_INTERVAL_S = 30.0
MAX_RETRY_AFTER_S = 60.0
MERGE_PATCH = "application/merge-patch+json"
AGENT_RIGHTS = "check the agent's service account and its ClusterRole"
NO_ANSWER = "the API server did not answer in time"
"""The text for `bounded` around several requests: each request itself says what it was about."""


class TooLong(Corrupt):
    """The answer is longer than the caller allows: ask for less."""


class WentBack(Conflict):
    """The server lacks a version that it gave: its etcd was restored from a backup, and counts on from there."""


class NotServed(NotFound):
    """404 without a Status, as from a load balancer: it does not say that the object is gone."""


class Throttled(Unavailable):
    """The server has too much to do (HTTP 429) and did nothing: come back after `retry_after_s`."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Request(Struct, frozen=True, kw_only=True):
    """`what` completes the sentence "cannot …" and names the thing. `query` is in the order sent; `body` is what msgspec
    writes as a JSON object."""

    what: str
    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: object = None
    content_type: str = "application/json"


class Status(Struct):
    """meta/v1 Status, the API server's answer where it did not do as it was asked."""

    code: int = 0
    message: str = ""


class _AnyObject(Struct):
    pass


STATUS, _ANY_OBJECT = Decoder(Status), Decoder(_AnyObject)


class KubeSession:
    """Sends requests with the present credentials. Open with `open`, close with `close`. `advice` is what to do where
    they are not accepted or do not suffice."""

    def __init__(self, source: ConfigurationSource, *, connect_s: float, advice: str = AGENT_RIGHTS) -> None:
        self._source = source
        self._advice = advice
        self._connect_s = connect_s
        self._client: Any = None
        # The former client: a watch may still read from it.
        self._retired: Any = None
        self._reload_lock = asyncio.Lock()
        self._loaded_at = float("-inf")

    async def open(self) -> None:
        self._client = await open_api_client(self._source)
        self._loaded_at = time.monotonic()

    async def close(self) -> None:
        for client in (self._client, self._retired):
            if client is not None:
                await client.close()
        self._client = self._retired = None

    @property
    def through(self) -> str:
        """Names the proxy in a message; empty without one."""
        return str(self._client.through) if self._client is not None else ""

    async def fetch(
        self, request: Request, decoder: Decoder[T], *, timeout_s: float, limit_bytes: int = MAX_OBJECT_BYTES
    ) -> T:
        """The answer, read by the schema. Raises every error of `renamed`, TooLong, and Corrupt where it does not match the
        schema."""
        return self._decoded(decoder, await self._content(request, timeout_s, limit_bytes), request)

    async def fetch_object(self, request: Request, *, timeout_s: float, limit_bytes: int = MAX_OBJECT_BYTES) -> Raw:
        """The answer, a JSON object for a reader that knows its schema. Raises as `fetch`."""
        content = await self._content(request, timeout_s, limit_bytes)
        self._decoded(_ANY_OBJECT, content, request)
        return Raw(content)

    async def _content(self, request: Request, timeout_s: float, limit_bytes: int) -> bytearray:
        with renamed(request.what, self.through):
            async with asyncio.timeout(timeout_s), self.stream(request) as response:
                return await _read_bounded(response, request.what, limit_bytes)

    def _decoded(self, decoder: Decoder[T], content: bytearray, request: Request) -> T:
        try:
            return decoded(decoder, content, f"cannot {request.what}: the API server's answer")
        except Corrupt as e:
            raise Corrupt(f"{e} ({excerpt(content)})") from e

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ClientResponse]:
        """The response with its status checked and its body unread. Runs under the caller's `renamed` and timeout."""
        client = self._client
        response = await self._send(request)
        try:
            # Once: tokens and client certificates are renewed while the process runs. Of many requests that fail at once one
            # reloads, and the others find another client than they began with.
            if response.status == 401 and (await self._reload() or self._client is not client):
                response.close()
                response = await self._send(request)
            if not 200 <= response.status < 300:
                # Inside `try`: the error's text is read from the response before it is closed.
                raise await _status_error(response, request.what, self._advice, self.through)
            yield response
        finally:
            response.close()

    async def _send(self, request: Request) -> ClientResponse:
        from aiohttp import ClientSSLError, ClientTimeout

        client = self._client
        if client is None:
            raise Unavailable(f"cannot {request.what}: the connection to the API server is closed")
        headers = {"Accept": "application/json", "Content-Type": request.content_type, "User-Agent": "gpushare-agent"}
        # Without aiohttp's `deflate`, by which an agent behind the proxy would take this for a browser (web/debug_guard.py).
        headers["Accept-Encoding"] = "gzip"
        # The library's own way to the credentials; it may ask an exec plugin.
        await client.update_params_for_auth(headers, [], ["BearerToken"])
        if headers.get("authorization") is None:
            headers.pop("authorization", None)
        else:
            headers["authorization"] = headers["authorization"].strip()  # token files end in a newline at times
        try:
            response: ClientResponse = await client.request(
                request.method,
                client.configuration.host + request.path,
                query_params=list(request.query),
                headers=headers,
                # The library takes no text: it writes JSON itself, of what it gets.
                body=json.loads(msgspec.json.encode(request.body)) if request.body is not None else None,
                _preload_content=False,
                _request_timeout=ClientTimeout(total=None, sock_connect=self._connect_s),
            )
        except ClientSSLError:
            await self._reload()  # a renewed certificate authority or client certificate serves the caller's next try
            raise
        return response

    async def _reload(self) -> bool:
        """Load the credentials again; False where that was tried a moment ago or does not work."""
        async with self._reload_lock:
            if time.monotonic() - self._loaded_at < RELOAD_INTERVAL_S:
                return False
            # Before the load: a plugin that fails must not be started by each request.
            self._loaded_at = time.monotonic()
            try:
                fresh = await open_api_client(self._source)
            except AgentError as e:
                log.warning("kube_credentials_not_reloaded", source=str(self._source), error=str(e))
                return False
            # The old one may carry a watch: it is closed at the next reload.
            retired, self._retired, self._client = self._retired, self._client, fresh
            if retired is not None:
                await retired.close()
            log.info("kube_credentials_reloaded", source=str(self._source))
            return True


@contextmanager
def renamed(what: str, through: str = "") -> Iterator[None]:
    """Rename foreign errors, once, for the caller's next move. `through` names the proxy, of which the fault may be.

    Raises:
        NotFound, Conflict, Rejected, Unavailable: by HTTP status; Unavailable also for connections and timeouts.
        Corrupt: a line longer than the limit.
    """
    from aiohttp import ClientConnectorError, ClientError, ClientResponseError
    from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
    from kubernetes_asyncio.config.config_exception import ConfigException

    try:
        yield
    except LineTooLong as e:
        raise Corrupt(f"cannot {what}: a line of the answer is longer than allowed") from e
    except TimeoutError as e:
        raise Unavailable(f"cannot {what}: {NO_ANSWER}{through}") from e
    except ConfigException as e:
        raise Unavailable(f"cannot {what}: the credentials cannot be read: {e}") from e
    except RuntimeError as e:
        # aiohttp raises this for a session that was closed: the agent is shutting down while an admission still asks.
        if "closed" not in str(e):
            raise
        raise Unavailable(f"cannot {what}: the connection to the API server is being closed") from e
    except ClientConnectorError as e:
        reason = "refused" if isinstance(e.os_error, ConnectionRefusedError) else str(e.os_error.strerror or e.os_error)
        where = through or f" at {host_port(e.host, e.port)}"
        raise Unavailable(
            f"cannot {what}: no connection to the API server{where}: {reason}; check that it runs, its address and its"
            " certificate authority"
        ) from e
    except ClientResponseError as e:  # a proxy refuses, or it is no HTTP; the error's own text has the proxy's password
        whom, answer = through or " to the API server", " ".join(e.message.split())
        raise Unavailable(f"cannot {what}: no connection{whom}: it answered {e.status} {answer}") from e
    except (ClientError, HttpProcessingError, OSError, ValueError) as e:
        raise Unavailable(f"cannot {what}: {e or type(e).__name__}{through}") from e


async def _read_bounded(response: ClientResponse, what: str, limit_bytes: int) -> bytearray:
    content = bytearray()
    async for part in response.content.iter_any():
        # Counted as it comes: a Content-Length may be missing, or wrong.
        content += part
        if len(content) > limit_bytes:
            raise TooLong(f"cannot {what}: the API server's answer is longer than {limit_bytes} bytes")
    return content


async def _status_error(response: ClientResponse, what: str, advice: str, through: str) -> AgentError:
    """The error that a refused request becomes; the server's own message is in it."""
    from aiohttp import ClientError

    # A Status may have the message twice, the second time in its causes. A body that breaks off must not hide the HTTP
    # status, which is known.
    content = bytearray()
    with suppress(ClientError):
        while len(content) < MAX_STATUS_BYTES and (part := await response.content.read(MAX_STATUS_BYTES)):
            content += part
    said = decoded_or(STATUS, content, Status).message[:500]  # empty where this is none
    error = error_for_status(response.status, what, said or f"{excerpt(content)}{through}", advice=advice)
    if isinstance(error, NotFound) and not said:
        return NotServed(str(error))
    if response.status == 429:
        return Throttled(str(error), _retry_after_s(response.headers.get("Retry-After", "")))
    return error


def _retry_after_s(text: str) -> float:
    """Seconds as the API server writes them; 1 where it does not, and no more than a caller would wait for."""
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() and len(text) < 6 else 1.0


def error_for_status(status: int, what: str, message: str, *, advice: str = AGENT_RIGHTS) -> AgentError:
    text = f"cannot {what}: the API server answered {status}: {message or 'no text'}"
    if status == 404:
        return NotFound(text)
    # 410: the version is too old. In both cases the caller reads again.
    if status in (409, 410):
        return Conflict(text)
    if status in (401, 403):
        return Rejected(f"{text}; {advice}")
    if status in (400, 405, 413, 415, 422):
        return Rejected(text)
    # 429, 5xx, and whatever is not known: trying again does no harm.
    return Unavailable(text)


def excerpt(content: bytes | bytearray) -> str:
    """The first words of what a server sent, printable on one line."""
    return " ".join(content[:160].decode("utf-8", "replace").split())


# --- lists and watches ---

PAGE_SIZES = (500, 50, 5, 1)
"""Objects in one page, the next smaller where a page is too long: a pod has up to 1.5 MiB."""
_FROM_CACHE = ("resourceVersion", "0")
"""Whatever the watch cache has, without a read of etcd. It ignores the page's limit, so the answer comes whole."""
PAGED_TRIES = 3
MAX_LINE_BYTES = 2 << 20
"""One watch event is one line: an object of at most 1.5 MiB and its frame."""


class KubeTimeouts(Struct, frozen=True, kw_only=True):
    """`watch_s` is what the server is asked for; `watch_idle_s` ends a watch on which not even a bookmark (one a minute)
    came, because a half-open connection looks exactly like that. Some servers send none."""

    connect_s: float = 5.0
    request_s: float = 15.0
    list_s: float = 60.0
    watch_s: float = 290.0
    watch_idle_s: float = 120.0


class ListLimits(Struct, frozen=True, kw_only=True):
    """A list of the watch cache that is longer than `list_bytes` is read in pages of at most `page_bytes`.

    Reading an answer takes about four times its size for a moment. 250 pods of 20 KiB, which is much, are 5 MiB.
    """

    list_bytes: int = 16 << 20
    page_bytes: int = 8 << 20
    page_sizes: tuple[int, ...] = PAGE_SIZES


class Watched(Struct, frozen=True, kw_only=True):
    """A kind of objects, or some of them. `what` completes "list …" and "watch …"; `fields` and `labels` are selectors.

    Lists are consistent reads in pages. With `from_cache` the list is the watch cache's, which may lag and answers whole:
    what hundreds of agents start with must not be read from etcd.
    """

    what: str
    path: str
    fields: str = ""
    labels: str = ""
    from_cache: bool = False

    def request(self, verb: str) -> Request:
        selectors = (("fieldSelector", self.fields), ("labelSelector", self.labels))
        query = tuple((name, value) for name, value in selectors if value)
        return Request(what=f"{verb} {self.what}", method="GET", path=self.path, query=query)


class _ListMeta(Struct, rename="camel"):
    resource_version: str = ""
    token: str | None = field(name="continue", default=None)


class _Page(Struct):
    metadata: _ListMeta
    items: list[Raw] | None = None
    """Servers send null for an empty list at times."""


class WatchEvent(Struct):
    """One line of a watch."""

    type: str
    object: Raw


_PAGE, _EVENT = Decoder(_Page), Decoder(WatchEvent)


class KubeLists:
    """The base of the API clients: what reads many objects."""

    def __init__(self, session: KubeSession, timeouts: KubeTimeouts, limits: ListLimits) -> None:
        self._session = session
        self._timeouts = timeouts
        self._limits = limits

    async def list_all(self, watched: Watched, read: Callable[[Raw], T | None]) -> tuple[list[T], str]:
        """The results of `read` for each object, called as its page comes (None is left out), and the version to watch from.

        Where the server cannot go on with a list, the list starts over: `read` may see an object twice.
        """
        request = watched.request("list")
        if watched.from_cache:
            with suppress(TooLong):  # left before going on: the error's frames keep what was read alive
                items, version, _ = await self._one_page(request, read, _FROM_CACHE)
                return items, version
        # A list of the cache that was too long for one answer has the whole time once more.
        ends_at = time.monotonic() + self._timeouts.list_s
        for _ in range(PAGED_TRIES - 1):
            with suppress(Conflict):  # the place to go on from is compacted away: start over
                return await self._pages(request, read, ends_at)
        # The last try raises what the others would have met.
        return await self._pages(request, read, ends_at)

    async def _pages(self, request: Request, read: Callable[[Raw], T | None], ends_at: float) -> tuple[list[T], str]:
        items: list[T] = []
        sizes, token = list(self._limits.page_sizes), ""
        while True:
            place = (("limit", str(sizes[0])), *((("continue", token),) if token else ()))
            page_request = replace(request, query=(*request.query, *place))
            # One time for all pages: a server that gives each of them slowly must not take hours.
            left_s = max(ends_at - time.monotonic(), 0.0)
            try:
                page, version, token = await self._page(
                    page_request, read, timeout_s=left_s, limit_bytes=self._limits.page_bytes
                )
            except TooLong:
                if len(sizes) == 1:
                    raise
                # The same place once more with fewer objects; the smaller size stays, because large objects come together.
                del sizes[0]
                continue
            items += page
            if not token:
                return items, version

    async def _one_page(
        self, request: Request, read: Callable[[Raw], T | None], query: tuple[str, str]
    ) -> tuple[list[T], str, str]:
        request = replace(request, query=(*request.query, query))
        list_s, list_bytes = self._timeouts.list_s, self._limits.list_bytes
        return await self._page(request, read, timeout_s=list_s, limit_bytes=list_bytes)

    async def _page(
        self, request: Request, read: Callable[[Raw], T | None], *, timeout_s: float, limit_bytes: int
    ) -> tuple[list[T], str, str]:
        """The objects, the version, and where the next page begins, empty on the last."""
        page = await self._session.fetch(request, _PAGE, timeout_s=timeout_s, limit_bytes=limit_bytes)
        # Without a version there is nothing to watch from: some proxy has answered, not an API server.
        if not page.metadata.resource_version:
            raise Corrupt(f"cannot {request.what}: the answer is no list with a resourceVersion")
        items = [item for raw in page.items or () if (item := read(raw)) is not None]
        return items, page.metadata.resource_version, page.metadata.token or ""

    @asynccontextmanager
    async def watch_all(self, watched: Watched, resource_version: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Events of the types ADDED, MODIFIED, DELETED and BOOKMARK, from after `resource_version`.

        The iterator ends when the server ends the watch, or when nothing comes and the server has the version. Entering or
        iterating raises Conflict where the version is too old (HTTP or ERROR event 410), WentBack where nothing comes and it
        lacks the version, Unavailable for a cut line, Corrupt for a line that is no event.
        """
        request = watched.request("watch")
        # Jittered, so that the agents of a cluster do not all come back in one second.
        watch_s = int(self._timeouts.watch_s * random.uniform(1.0, 1.1))  # noqa: S311 - spreads load, no secret
        query = (
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(watch_s, 1))),
        )
        stream = self._session.stream(replace(request, query=(*request.query, *query)))
        with renamed(request.what, self._session.through):
            async with asyncio.timeout(self._timeouts.request_s):
                # By hand: the timeout is for the headers alone, the stream lasts for minutes.
                response = await stream.__aenter__()
        try:
            async with aclosing(self._events(response, watched, resource_version)) as events:
                yield events
        finally:
            await stream.__aexit__(None, None, None)

    async def _has(self, watched: Watched, version: str) -> bool:
        """Whether the server is known to have this version or a later one, by lists that are as short as can be."""
        request = watched.request("list")
        # The watch cache's version shows what the server has, not what it lacks: of one that has lost etcd it stays behind.
        for short in (_FROM_CACHE, ("limit", "1"))[not watched.from_cache :]:
            _, newest, _ = await self._one_page(request, lambda _: None, short)
            if 0 < version_number(version) <= version_number(newest):
                return True
        return False

    async def _events(
        self, response: ClientResponse, watched: Watched, version: str
    ) -> AsyncGenerator[WatchEvent, None]:
        what = watched.request("watch").what
        # Once for all events: what they cost comes with every change of a pod.
        with renamed(what, self._session.through):
            while True:
                try:
                    async with asyncio.timeout(self._timeouts.watch_idle_s):
                        line = await response.content.readuntil(b"\n", max_size=MAX_LINE_BYTES)
                except TimeoutError as e:
                    # Some servers send no bookmarks. But so a server answers for hours that does not have the version yet,
                    # because its etcd was restored from a backup (seen on Kubernetes 1.36).
                    if await self._has(watched, version):
                        return
                    raise WentBack(f"cannot {what}: not even a bookmark came in time{self._session.through}") from e
                if not line:
                    return
                # The event may be half an object: the watch begins again after the last whole one.
                if not line.endswith(b"\n"):
                    raise Unavailable(f"cannot {what}: the stream ended inside a line")
                if line.strip():
                    yield _event(line, what)


def _event(line: bytes, what: str) -> WatchEvent:
    try:
        event = decoded(_EVENT, line, "it")
    except Corrupt as e:
        raise Corrupt(f"cannot {what}: a line of the stream is no event ({excerpt(line)})") from e
    # The status of a stream is sent before its errors are known, so they come as events.
    if event.type == "ERROR":
        status = decoded_or(STATUS, event.object, Status)
        raise error_for_status(status.code or 500, what, status.message[:500])
    return event
