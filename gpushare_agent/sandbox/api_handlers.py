"""HTTP of the embedded API server: paths, verbs, Status bodies and watch streams as clients expect them.

Holds no state; the objects are the store's, the rules of pods the server's methods.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import structlog
from aiohttp import web

from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Rejected
from gpushare_agent.sandbox import api_patch
from gpushare_agent.sandbox.api_discovery import discovery
from gpushare_agent.sandbox.api_selectors import Selector, parse_field_selector, seen_by
from gpushare_agent.sandbox.api_store import (
    CLUSTER_WIDE,
    KINDS,
    AlreadyExists,
    Expired,
    ObjectKey,
    RawObject,
    base_path,
    group_version,
)
from gpushare_agent.sandbox.pod_manifest import timestamp

if TYPE_CHECKING:
    from gpushare_agent.sandbox.api_server import EmbeddedApiServer

log = structlog.get_logger(__name__)

_WRITE_TIMEOUT_S = 10.0
_DEFAULT_WATCH_S = 3600.0
_PATCH_TYPES = (api_patch.MERGE, api_patch.STRATEGIC, api_patch.JSON_PATCH)
_REASONS: tuple[tuple[type[AgentError], int, str], ...] = (
    (NotFound, 404, "NotFound"),
    (AlreadyExists, 409, "AlreadyExists"),
    (Expired, 410, "Expired"),
    (Conflict, 409, "Conflict"),
    (Rejected, 422, "Invalid"),
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _status_body(code: int, reason: str, message: str, details: dict[str, str] | None = None) -> RawObject:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
    }
    return {**body, **({"details": details} if details else {}), "code": code}


def _constant(document: RawObject) -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.json_response(document)

    return handle


def _bad_request(message: str) -> NoReturn:
    raise web.HTTPBadRequest(text=json.dumps(_status_body(400, "BadRequest", message)), content_type="application/json")


class ApiHandlers:
    """One handler per verb, bound to a resource when the routes are made."""

    def __init__(self, server: EmbeddedApiServer) -> None:
        self._server = server
        self._store = server.store

    def add_routes(self, app: web.Application, resources: tuple[str, ...]) -> None:
        for resource in resources:
            prefix = base_path(resource)
            everywhere = f"{prefix}/{resource}"
            base = everywhere if resource in CLUSTER_WIDE else f"{prefix}/namespaces/{{namespace}}/{resource}"
            for path in {everywhere, base}:
                app.router.add_get(path, self._bound(self._list, resource))
            app.router.add_post(base, self._bound(self._create, resource))
            app.router.add_get(f"{base}/{{name}}", self._bound(self._get, resource))
            app.router.add_delete(f"{base}/{{name}}", self._bound(self._delete, resource))
            for suffix in ("", "/status"):
                app.router.add_patch(f"{base}/{{name}}{suffix}", self._bound(self._patch, resource))
                app.router.add_put(f"{base}/{{name}}{suffix}", self._bound(self._put, resource))
        app.router.add_post("/api/v1/namespaces/{namespace}/pods/{name}/binding", self._bound(self._bind, "pods"))
        for path, document in discovery(resources).items():
            app.router.add_get(path, _constant(document))
        app.router.add_get("/version", self._version)
        for path in ("/healthz", "/livez", "/readyz"):
            app.router.add_get(path, self._healthy)
        reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        app.router.add_post(reviews, self._access_review)

    @staticmethod
    def status_response(code: int, reason: str, message: str, details: dict[str, str] | None = None) -> web.Response:
        return web.json_response(_status_body(code, reason, message, details), status=code)

    def _bound(self, verb: Callable[[web.Request, str], Awaitable[web.StreamResponse]], resource: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await verb(request, resource)
            except AgentError as error:
                code, reason = next((c, r) for kind, c, r in _REASONS if isinstance(error, kind))
                details = {"name": request.match_info.get("name", ""), "kind": resource}
                return self.status_response(code, reason, str(error), details)

        return handle

    async def _healthy(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        major, minor, _ = self._server.release.removeprefix("v").split(".")
        return web.json_response(
            {"major": major, "minor": minor, "gitVersion": self._server.release, "platform": "linux/amd64"}
        )

    async def _access_review(self, request: web.Request) -> web.StreamResponse:
        review = await _json_body(request)
        return web.json_response({**review, "status": {"allowed": True, "reason": "embedded node"}}, status=201)

    # --- reading ---

    async def _get(self, request: web.Request, resource: str) -> web.StreamResponse:
        return web.json_response(self._store.get(resource, _key(request, resource)))

    async def _list(self, request: web.Request, resource: str) -> web.StreamResponse:
        selects = _selector(request)
        if request.query.get("watch") in ("true", "1", "True"):
            return await self._watch(request, resource, selects)
        items = [raw for raw in self._store.all(resource) if selects(raw)]
        body = {
            "kind": f"{KINDS[resource]}List", "apiVersion": group_version(resource),
            "metadata": {"resourceVersion": str(self._store.version)}, "items": items,
        }  # fmt: skip
        return web.json_response(body)

    async def _watch(self, request: web.Request, resource: str, selects: Selector) -> web.StreamResponse:
        version = _number(request, "resourceVersion", 0)
        ends_at = time.monotonic() + _number(request, "timeoutSeconds", int(_DEFAULT_WATCH_S))
        stream = _WatchStream(request, resource)
        try:
            await self._stream(stream, resource, selects, version=version, ends_at=ends_at)
        except ConnectionError:  # the watcher has just gone
            log.debug("watcher_gone", resource=resource)
        return stream.response

    async def _stream(
        self, stream: _WatchStream, resource: str, selects: Selector, *, version: int, ends_at: float
    ) -> None:
        await stream.open()
        if version == 0:
            version = self._store.version
            await stream.send([("ADDED", raw) for raw in self._store.all(resource) if selects(raw)])
        epoch = self._server.watch_epoch
        try:
            await self._follow(stream, resource, selects, version=version, ends_at=ends_at, epoch=epoch)
        except Expired as error:
            await stream.send([("ERROR", _status_body(410, "Expired", str(error)))])

    async def _follow(
        self, stream: _WatchStream, resource: str, selects: Selector, *, version: int, ends_at: float, epoch: int
    ) -> None:
        """Until the time is up or the server stops. A bookmark comes each interval and at the end, where asked for."""
        server, marked_at = self._server, time.monotonic()
        while not server.is_stopping:
            seen = self._store.signals[resource].count
            if server.watch_epoch != epoch:
                raise Expired(f"too old resource version: {version} ({self._store.version})")
            changes = [c for c in self._store.changes_since(version) if c.resource == resource]
            version = self._store.version
            await stream.send([event for change in changes if (event := seen_by(change, selects)) is not None])
            now = time.monotonic()
            if now >= ends_at or now >= marked_at + server.bookmark_interval_s:
                await stream.send_bookmark(version)
                marked_at = now
            if now >= ends_at:
                return
            await _wait(server, resource, seen, min(ends_at, marked_at + server.bookmark_interval_s) - now)

    # --- writing ---

    async def _create(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw, namespace = await _json_body(request), request.match_info.get("namespace", "")
        if resource == "pods":
            if (raw.get("metadata") or {}).get("namespace", namespace) != namespace:
                _bad_request("the namespace of the provided object does not match the namespace sent on the request")
            return web.json_response(self._server.create_pod(raw, namespace), status=201)
        return web.json_response(self._store.add(resource, _named(raw, resource, namespace)), status=201)

    async def _bind(self, request: web.Request, _resource: str) -> web.StreamResponse:
        """A Binding. Its metadata names the pod, may insist on a UID and a version, and brings annotations."""
        raw, key = await _json_body(request), _key(request, "pods")
        target, metadata = raw.get("target") or {}, raw.get("metadata") or {}
        annotations = metadata.get("annotations") or {} if isinstance(metadata, dict) else None
        if not isinstance(target, dict) or not _is_text_map(annotations):
            _bad_request("the object provided is unrecognized: a Binding has objects in metadata, annotations, target")
        if (metadata.get("namespace") or key[0], metadata.get("name") or key[1]) != key:
            _bad_request("the name or namespace in the URL does not match that in the Binding object")
        node_name = target.get("name")
        if not isinstance(node_name, str) or not node_name:
            raise Rejected("target.name: Required value: the Binding names no node")
        self._server.bind_pod(
            *key, node_name, uid=str(metadata.get("uid") or ""), annotations=annotations,
            resource_version=str(metadata.get("resourceVersion") or ""),
        )  # fmt: skip
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return web.json_response(done, status=201)

    async def _delete(self, request: web.Request, resource: str) -> web.StreamResponse:
        key = _key(request, resource)
        options = await _json_body(request) if request.can_read_body else {}
        if resource != "pods":
            return web.json_response(self._store.remove(resource, key))
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        conditions = options.get("preconditions") or {}
        deleted = self._server.delete_pod(
            *key, grace_period_s=None if grace is None else int(grace), uid=conditions.get("uid") or "",
            resource_version=conditions.get("resourceVersion") or "",
        )  # fmt: skip
        return web.json_response(deleted)

    async def _patch(self, request: web.Request, resource: str) -> web.StreamResponse:
        content_type = request.content_type
        if content_type not in _PATCH_TYPES:
            message = f"the body was in an unknown format; accepted media types: {', '.join(_PATCH_TYPES)}"
            return self.status_response(415, "UnsupportedMediaType", message)
        old = self._store.get(resource, _key(request, resource))
        new = api_patch.patched(old, await _json_body(request, of=(dict, list)), content_type)
        return self._replaced(request, resource, old, new)

    async def _put(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw = await _json_body(request)
        return self._replaced(request, resource, self._store.get(resource, _key(request, resource)), raw)

    def _replaced(self, request: web.Request, resource: str, old: RawObject, new: RawObject) -> web.StreamResponse:
        """Keeps what the addressed subresource does not own; a resourceVersion or UID in the body must be the current."""
        metadata, known = new.get("metadata") or {}, old["metadata"]
        for field in ("resourceVersion", "uid"):
            if metadata.get(field, known[field]) != known[field]:
                raise Conflict(
                    f'Operation cannot be fulfilled on {resource} "{known["name"]}": the object has been modified; '
                    "please apply your changes to the latest version and try again"
                )
        fixed = {
            k: known[k] for k in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp") if k in known
        }
        kept = {"metadata": {**metadata, **fixed}}
        if request.path.endswith("/status"):
            kept["spec"] = old.get("spec", {})
        elif resource in ("pods", "nodes"):
            kept["status"] = old.get("status", {})
        if resource == "pods" and new.get("spec") != old["spec"]:
            raise Rejected(
                f'Pod "{known["name"]}" is invalid: spec: Forbidden: pod updates may not change these fields'
            )
        return web.json_response(self._store.replace(resource, {**new, **kept}))


class _WatchStream:
    """One watch response: events as JSON lines."""

    def __init__(self, request: web.Request, resource: str) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._request = request
        self._type = {"kind": KINDS[resource], "apiVersion": group_version(resource)}
        self._wants_bookmarks = request.query.get("allowWatchBookmarks") in ("true", "1", "True")

    async def open(self) -> None:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._request)

    async def send(self, events: list[tuple[str, RawObject]]) -> None:
        if events:
            lines = "".join(json.dumps({"type": kind, "object": raw}) + "\n" for kind, raw in events)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self.response.write(lines.encode())

    async def send_bookmark(self, version: int) -> None:
        if self._wants_bookmarks:
            metadata = {"resourceVersion": str(version), "creationTimestamp": None}
            await self.send([("BOOKMARK", {**self._type, "metadata": metadata})])


async def _wait(server: EmbeddedApiServer, resource: str, seen: int, limit_s: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, limit_s)):
            await server.store.signals[resource].wait(seen)
    except TimeoutError:
        return
    await server.wait_running()


async def _json_body(request: web.Request, of: tuple[type, ...] = (dict,)) -> Any:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        _bad_request(f"the object provided is unrecognized: {error}")
    if not isinstance(body, of):
        _bad_request(f"the object provided is unrecognized: expected a JSON object, got {type(body).__name__}")
    return body


def _is_text_map(given: object) -> TypeGuard[dict[str, str]]:
    return isinstance(given, dict) and all(isinstance(value, str) for value in given.values())


def _named(raw: RawObject, resource: str, namespace: str) -> RawObject:
    given = raw.get("metadata") or {}
    name = given.get("name") or (f"{given['generateName']}{uuid.uuid4().hex[:5]}" if given.get("generateName") else "")
    if not name:
        raise Rejected("metadata.name: Required value: name or generateName is required")
    identity = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if resource not in CLUSTER_WIDE:
        identity["namespace"] = namespace
    kind = {"apiVersion": group_version(resource), "kind": KINDS[resource]}
    return {**kind, **raw, "metadata": {**given, **identity}}


def _key(request: web.Request, resource: str) -> ObjectKey:
    return ("" if resource in CLUSTER_WIDE else request.match_info["namespace"]), request.match_info["name"]


def _selector(request: web.Request) -> Selector:
    if request.query.get("labelSelector"):
        _bad_request("the embedded API server supports no labelSelector")
    try:
        chosen = parse_field_selector(request.query.get("fieldSelector", ""))
    except Rejected as error:
        _bad_request(str(error))
    namespace = request.match_info.get("namespace")
    return lambda raw: chosen(raw) and namespace in (None, raw["metadata"].get("namespace"))


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if text and not text.isdigit():
        _bad_request(f"invalid {name}: {text!r}")
    return int(text) if text else default
