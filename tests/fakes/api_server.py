"""The fake API server is the sandbox's own, with faults on request, and a client of it over HTTP.

A `Behaviour` answers one request instead of the server. `lists` and `watches` (of all pods) and `others` are scripts of
behaviours: each request takes the next one, and the last one stays; an empty script leaves the request to the server.
`answers` go before them, by path. `faults` are taken one by each write that no script answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from gpushare_agent.sandbox.api.access import ServerCertificate
from gpushare_agent.sandbox.api.kinds import KINDS
from gpushare_agent.sandbox.api.responses import RefusedRequest
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.api.store import ObjectKey, key_of
from tests.support_deadline import DEADLINE_S, Changes

PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
DATA = Path(__file__).parents[1] / "data"
CERTIFICATE = ServerCertificate(certificate=DATA / "kube-ca.pem", key=DATA / "kube-server.key")
"""Vouches for itself."""

Raw = dict[str, Any]


# --- a client ---


class Client:
    def __init__(self, api: EmbeddedApiServer, session: aiohttp.ClientSession) -> None:
        self.api = api
        self.session = session

    async def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Any:
        """Status and JSON body."""
        text = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if text is not None else {}
        async with self.session.request(
            method, self.api.url + path, data=text, headers=headers, params=query
        ) as answer:
            return answer.status, await answer.json()

    @asynccontextmanager
    async def watch(self, path: str = "/api/v1/pods", **query: str) -> AsyncIterator[Watch]:
        async with self.session.get(self.api.url + path, params={"watch": "true", **query}) as answer:
            assert answer.status == 200
            yield Watch(answer)


class Watch:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(DEADLINE_S):
            event = json.loads(await self._answer.content.readline())
        return event["type"], event["object"]

    async def rest(self) -> list[tuple[str, dict[str, Any]]]:
        async with asyncio.timeout(DEADLINE_S):
            events = [json.loads(line) async for line in self._answer.content]
        return [(e["type"], e["object"]) for e in events]


@asynccontextmanager
async def open_client(**settings: Any) -> AsyncIterator[Client]:
    async with (
        EmbeddedApiServer(**settings) as api,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), headers=api.headers) as session,
    ):
        yield Client(api, session)


# --- behaviours ---


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: Any

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"


Behaviour = Callable[["FakeApiServer", Seen, web.Request], Awaitable[web.StreamResponse]]


def answers(
    status: int, body: Any, content_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> Behaviour:
    """One whole answer; `body` is sent as JSON unless it is bytes."""

    async def behave(_server: FakeApiServer, _seen: Seen, _request: web.Request) -> web.StreamResponse:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=status, body=content, content_type=content_type, headers=headers)

    return behave


def raw_status(code: int, message: str = "on request") -> Raw:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


answers_gone = answers(410, raw_status(410, "too old resource version"))
answers_html_502 = answers(502, b"<html><h1>Bad Gateway</h1></html>", "text/html")
answers_garbage = answers(200, b"\x00\xff{ not json")


async def lists_pods(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
    """The pods that the server is to list now."""
    body = {"kind": "PodList", "items": server.listed, "metadata": {"resourceVersion": server.listed_version}}
    return await answers(200, body)(server, seen, request)


async def until_client_leaves() -> NoReturn:
    """aiohttp cancels the handler then."""
    while True:
        await asyncio.Event().wait()


async def stalls_before_headers(_server: FakeApiServer, _seen: Seen, _request: web.Request) -> web.StreamResponse:
    await until_client_leaves()


async def stalls_after_headers(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
    await _open_stream(request)
    await until_client_leaves()


async def resets(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
    """The connection ends without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def ends_empty(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
    """A watch that is over as soon as it began."""
    return await _open_stream(request)


def streams(*events: Raw, then: str = "stays") -> Behaviour:
    """Sends the events; `then` is stays (silent), ends (cleanly), cuts (inside a line) or drops (inside a chunk)."""

    async def behave(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
        response = await _open_stream(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        if then == "stays":
            await until_client_leaves()
        elif then == "cuts":
            await response.write(b'{"type": "ADDED", "object": {"meta')
        elif then == "drops":
            assert request.transport is not None
            request.transport.write(b'ff\r\n{"type": ')
            request.transport.close()
        return response

    return behave


def streams_bytes(content: bytes) -> Behaviour:
    async def behave(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
        response = await _open_stream(request)
        await response.write(content)
        return response

    return behave


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


# --- the server ---

GOOD = "good"
FAULTS = ("409", "429", "500", "500-done", "half", "half-done", "silent", "silent-done", "late")
"""Not carried out, but for -done; `late` is carried out, by `carry_out_late`, after the client was cut off. `half` is an
answer that breaks off where nothing says so."""


@dataclass
class Script:
    """What a `FakeApiServer` does instead of its own."""

    answers: dict[str, Any] = field(default_factory=dict)
    """By path: a `Behaviour`, an object, bytes, or a status and one of these."""
    lists: list[Behaviour] = field(default_factory=list)
    watches: list[Behaviour] = field(default_factory=list)
    others: list[Behaviour] = field(default_factory=list)

    def behaviour(self, request: Seen) -> Behaviour | None:
        if request.path in self.answers:
            found = self.answers[request.path]
            return found if callable(found) else answers(*(found if isinstance(found, tuple) else (200, found)))
        listing = self.watches if request.is_watch else self.lists
        script = listing if request.path == "/api/v1/pods" else self.others
        return script.pop(0) if len(script) > 1 else next(iter(script), None)


class FakeApiServer(EmbeddedApiServer):
    """Records what it was asked in `seen`; `wait_for` waits until that satisfies a condition. Asks nobody for a token.

    `put`, `change`, `remove` work in process, on objects by kind and "namespace/name". Stricter than the sandbox's: a write
    that replaces an object or binds a pod names what it is based on.
    """

    def __init__(self, script: Script | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.script = script or Script()
        self.listed: list[Raw] = []
        self.listed_version = "100"
        """What `lists_pods` answers."""
        self.seen: list[Seen] = []
        self.faults: list[str] = []
        self.retry_after = "0"
        self.page = 2
        """So many objects at most of a list that is asked for in pages."""
        self._is_down = False
        self._changed = Changes()
        self._late: list[Callable[[], Awaitable[web.StreamResponse]]] = []
        self._rest: dict[str, Raw] = {}
        self._open: dict[int, web.Request] = {}
        """By id: requests are equal where their attributes are."""

    # --- in process ---

    @property
    def objects(self) -> dict[str, dict[str, Raw]]:
        return {kind: {"/".join(filter(None, key_of(raw))): raw for raw in self.store.all(kind)} for kind in KINDS}

    def put(self, kind: str, raw: Raw) -> Raw:
        """As it is, with a new version and some UID: nothing else is checked or completed."""
        raw = {**raw, "metadata": {"uid": f"uid-{raw['metadata']['name']}", **raw["metadata"]}}
        is_known = self.store.find(kind, key_of(raw)) is not None
        made = self.store.replace(kind, raw) if is_known else self.store.add(kind, raw)
        self._changed.set()
        return made

    def change(self, kind: str, key: str, change: Callable[[Raw], None]) -> Raw:
        raw: Raw = json.loads(json.dumps(self.store.get(kind, _key(key))))
        change(raw)
        return self.put(kind, raw)

    def remove(self, kind: str, key: str) -> None:
        self.store.remove(kind, _key(key))
        self._changed.set()

    def mute(self, is_mute: bool) -> None:
        """Watches send nothing, for now."""
        (self.running.clear if is_mute else self.running.set)()

    @property
    def is_down(self) -> bool:
        """While it is, each request is cut off without an answer, one that is open at once."""
        return self._is_down

    @is_down.setter
    def is_down(self, is_down: bool) -> None:
        self._is_down = is_down
        # Only those of requests: an idle connection of the client's pool outlives a short outage.
        for request in list(self._open.values()) if is_down else ():
            if request.transport is not None:
                request.transport.abort()

    async def carry_out_late(self) -> None:
        """What was cut off is done now, as far as its preconditions still hold."""
        late, self._late = self._late, []
        for act in late:
            with suppress(RefusedRequest):
                await act()

    async def wait(self, condition: Callable[[], object]) -> None:
        """Until it holds after some request or change."""
        await self._changed.until(condition)

    async def wait_for(self, condition: Callable[[Sequence[Seen]], object]) -> None:
        await self.wait(lambda: condition(self.seen))

    async def wait_hung_up(self) -> None:
        """Wait until no request is open; a silent watch ends only when the client closes it."""
        await self.wait(lambda: not self._open)

    async def wait_watches(self, count: int) -> list[Seen]:
        await self.wait_for(lambda requests: sum(request.is_watch for request in requests) >= count)
        return [request for request in self.seen if request.is_watch]

    # --- over HTTP ---

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        content = await request.read()
        body = json.loads(content) if content else None
        seen = Seen(request.method, request.path, dict(request.query), request.headers, body)
        self.seen.append(seen)
        self.requests.append((seen.method, seen.path))
        self._open[id(request)] = request
        self._changed.set()
        try:
            if self._is_down:
                return await resets(self, seen, request)
            if (behaviour := self.script.behaviour(seen)) is not None:
                return await behaviour(self, seen, request)
            if seen.method != "GET":
                return await self._write(seen, request, handler)
            response: web.StreamResponse = await handler(request)
            return self._paged(seen, response) if "limit" in seen.query and not seen.is_watch else response
        except RefusedRequest as refusal:
            return refusal.response()
        finally:
            del self._open[id(request)]
            self._changed.set()

    async def _write(self, seen: Seen, request: web.Request, handler: Any) -> web.StreamResponse:
        async def act() -> web.StreamResponse:
            _check_basis(seen)
            response: web.StreamResponse = await handler(request)
            return response

        fault, _, when = (self.faults.pop(0) if self.faults else GOOD).partition("-")
        if fault == GOOD:
            return await act()
        if fault == "late":
            self._late.append(act)
        if when == "done":
            with suppress(RefusedRequest):
                await act()
            self._changed.set()
        if fault in ("late", "silent"):
            return await resets(self, seen, request)
        if fault == "half":
            return await answers(200, b'{"metadata": {"name": "\xc3')(self, seen, request)
        refuse = answers(int(fault), raw_status(int(fault)), headers={"Retry-After": self.retry_after})
        return await refuse(self, seen, request)

    def _paged(self, seen: Seen, response: web.StreamResponse) -> web.StreamResponse:
        """Every page is of the first one's version, as with a real one: what comes meanwhile is watched, not lost."""
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        listed = self._rest[seen.query["continue"]] if "continue" in seen.query else json.loads(response.body)
        size, items = min(int(seen.query["limit"]), self.page), listed["items"]
        metadata = listed["metadata"]
        if items[size:]:
            token = str(len(self._rest))
            self._rest[token] = {**listed, "items": items[size:]}
            metadata = {**metadata, "continue": token}
        return web.json_response({**listed, "items": items[:size], "metadata": metadata})


def _check_basis(seen: Seen) -> None:
    metadata = (seen.body or {}).get("metadata") or {}
    basis = {"PUT": "resourceVersion", "POST": "uid"}.get(seen.method, "")
    if (seen.method == "PUT" or seen.path.endswith("/binding")) and not metadata.get(basis):
        raise RefusedRequest(409, "Conflict", f"the object names no {basis}")


def _key(text: str) -> ObjectKey:
    namespace, _, name = text.rpartition("/")
    return namespace, name


@asynccontextmanager
async def fake_api(
    *, pods: Sequence[Raw] = (), version: str = "100", tls: ServerCertificate | None = None, **script: Any
) -> AsyncIterator[FakeApiServer]:
    """A server with nothing but a script: lists these pods, leaves watches silent, and answers the rest with {}."""
    usual = {"lists": [lists_pods], "watches": [stalls_after_headers], "others": [answers(200, {})]}
    server = FakeApiServer(Script(**(usual | script)), certificate=tls)
    server.listed, server.listed_version = list(pods), version
    async with server:
        yield server


@asynccontextmanager
async def json_server(given: Mapping[str, Any] | None = None) -> AsyncIterator[FakeApiServer]:
    """Plays an agent, or an API server for a command that only reads: answers by path, and 404 to anything else."""
    nothing = [answers(404, {"message": "nothing here"})]
    script = Script(answers=dict(given or {}), lists=nothing, watches=nothing, others=nothing)
    async with FakeApiServer(script) as server:
        yield server
