"""HTTP of the embedded API server: paths and verbs as clients expect them.

Holds no state; the objects and the rules of pods are objects.py's, watch streams watch.py's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeGuard

from aiohttp import web
from multidict import CIMultiDict

from gpushare_agent.model.errors import AgentError, Conflict, Rejected
from gpushare_agent.sandbox.api import patch
from gpushare_agent.sandbox.api.discovery import discovery
from gpushare_agent.sandbox.api.field_validation import unknown_fields
from gpushare_agent.sandbox.api.objects import ApiObjects
from gpushare_agent.sandbox.api.responses import bad_request, error_response, json_body, status_response
from gpushare_agent.sandbox.api.store import CLUSTER_WIDE, KINDS, ObjectKey, base_path, group_version
from gpushare_agent.sandbox.api.tables import table
from gpushare_agent.sandbox.api.watch import TRUE, Watches, request_selector
from gpushare_agent.sandbox.pod_manifest import RawObject, completed_manifest

_TABLE = re.compile(r"application/json;as=Table;v=v1(?=[;,]|$)")
"""In an Accept header of kubectl."""
_PATCH_TYPES = (patch.MERGE, patch.STRATEGIC, patch.JSON_PATCH)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _constant(document: RawObject) -> Handler:
    async def handle(_request: web.Request) -> web.StreamResponse:
        return web.json_response(document)

    return handle


class ApiHandlers:
    """One handler per verb, bound to a resource when the routes are made."""

    def __init__(self, objects: ApiObjects, watches: Watches) -> None:
        self._objects = objects
        self._store = objects.store
        self._watches = watches

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

    def _bound(self, verb: Callable[[web.Request, str], Awaitable[web.StreamResponse]], resource: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await verb(request, resource)
            except AgentError as error:
                return error_response(error, resource, request.match_info.get("name", ""))

        return handle

    async def _healthy(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        major, minor, _ = self._objects.release.removeprefix("v").split(".")
        return web.json_response(
            {"major": major, "minor": minor, "gitVersion": self._objects.release, "platform": "linux/amd64"}
        )

    async def _access_review(self, request: web.Request) -> web.StreamResponse:
        review = await json_body(request)
        return web.json_response({**review, "status": {"allowed": True, "reason": "embedded node"}}, status=201)

    # --- reading ---

    async def _get(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw = self._store.get(resource, _key(request, resource))
        return web.json_response(self._shape(request, resource)(raw))

    def _shape(self, request: web.Request, resource: str) -> Callable[[RawObject], RawObject]:
        """What an object is answered as: itself, or a table of one row."""
        if not _TABLE.search(request.headers.get("Accept", "")):
            return lambda raw: raw
        include = request.query.get("includeObject", "Metadata")
        return lambda raw: table(resource, [raw], raw["metadata"]["resourceVersion"], include)

    async def _list(self, request: web.Request, resource: str) -> web.StreamResponse:
        selects = request_selector(request)
        if request.query.get("watch") in TRUE:
            return await self._watches.serve(request, resource, selects, self._shape(request, resource))
        items = [raw for raw in self._store.all(resource) if selects(raw)]
        if _TABLE.search(request.headers.get("Accept", "")):
            include = request.query.get("includeObject", "Metadata")
            return web.json_response(table(resource, items, str(self._store.version), include))
        body = {
            "kind": f"{KINDS[resource]}List", "apiVersion": group_version(resource),
            "metadata": {"resourceVersion": str(self._store.version)}, "items": items,
        }  # fmt: skip
        return web.json_response(body)

    # --- writing ---

    async def _create(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw, namespace = await json_body(request), request.match_info.get("namespace", "")
        warnings = await self._checked_fields(request, resource, raw)
        if resource == "pods" and (raw.get("metadata") or {}).get("namespace", namespace) != namespace:
            bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if request.query.get("dryRun"):
            return web.json_response(raw, status=201, headers=warnings)
        make = self._objects.create_pod if resource == "pods" else partial(self._objects.create, resource)
        return web.json_response(make(raw, namespace), status=201, headers=warnings)

    async def _checked_fields(self, request: web.Request, resource: str, raw: RawObject) -> CIMultiDict[str]:
        """As the client asks by fieldValidation: unknown fields are refused, or named in headers that warn. kubectl always
        asks; who does not, such as an agent that patches often, is not checked."""
        mode = request.query.get("fieldValidation", "Ignore")
        if mode not in ("Strict", "Warn"):
            return CIMultiDict()
        cannot = f'{KINDS[resource]} in version "{group_version(resource)}" cannot be handled as a {KINDS[resource]}: '
        try:
            found = await asyncio.to_thread(unknown_fields, raw, KINDS[resource])
        except Rejected as error:
            bad_request(f"{cannot}{error}")
        if found and mode == "Strict":
            bad_request(f"{cannot}strict decoding error: {', '.join(found)}")
        return CIMultiDict(("Warning", f'299 - "{json.dumps(text)[1:-1]}"') for text in found)

    async def _bind(self, request: web.Request, _resource: str) -> web.StreamResponse:
        """A Binding. Its metadata names the pod, may insist on a UID and a version, and brings annotations."""
        raw, key = await json_body(request), _key(request, "pods")
        target, metadata = raw.get("target") or {}, raw.get("metadata") or {}
        annotations = metadata.get("annotations") or {} if isinstance(metadata, dict) else None
        if not isinstance(target, dict) or not _is_text_map(annotations):
            bad_request("the object provided is unrecognized: a Binding has objects in metadata, annotations, target")
        if (metadata.get("namespace") or key[0], metadata.get("name") or key[1]) != key:
            bad_request("the name or namespace in the URL does not match that in the Binding object")
        node_name = target.get("name")
        if not isinstance(node_name, str) or not node_name:
            raise Rejected("target.name: Required value: the Binding names no node")
        self._objects.bind_pod(
            *key, node_name, uid=str(metadata.get("uid") or ""), annotations=annotations,
            resource_version=str(metadata.get("resourceVersion") or ""),
        )  # fmt: skip
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return web.json_response(done, status=201)

    async def _delete(self, request: web.Request, resource: str) -> web.StreamResponse:
        key = _key(request, resource)
        options = await json_body(request) if request.can_read_body else {}
        if options.get("dryRun"):
            return web.json_response(self._store.get(resource, key))
        if resource != "pods":
            return web.json_response(self._objects.delete(resource, key))
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        conditions = options.get("preconditions") or {}
        deleted = self._objects.delete_pod(
            *key, grace_period_s=None if grace is None else int(grace), uid=conditions.get("uid") or "",
            resource_version=conditions.get("resourceVersion") or "",
        )  # fmt: skip
        return web.json_response(deleted)

    async def _patch(self, request: web.Request, resource: str) -> web.StreamResponse:
        content_type = request.content_type
        if content_type not in _PATCH_TYPES:
            message = f"the body was in an unknown format; accepted media types: {', '.join(_PATCH_TYPES)}"
            return status_response(415, "UnsupportedMediaType", message)
        body = await json_body(request, of=(dict, list))
        return await self._written(request, resource, lambda old: patch.patched(old, body, content_type))

    async def _put(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw = await json_body(request)
        return await self._written(request, resource, lambda _: raw)

    async def _written(
        self, request: web.Request, resource: str, change: Callable[[RawObject], RawObject]
    ) -> web.StreamResponse:
        """The change is made once more after the check of its fields, which may take a while: others write meanwhile."""
        key = _key(request, resource)
        warnings = await self._checked_fields(request, resource, change(self._store.get(resource, key)))
        old = self._store.get(resource, key)
        new = self._replaced(request, resource, old, change(old))
        if not request.query.get("dryRun"):
            new = self._store.replace(resource, new)
        return web.json_response(new, headers=warnings)

    def _replaced(self, request: web.Request, resource: str, old: RawObject, new: RawObject) -> RawObject:
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
        elif resource in ("pods", "nodes", "resourceclaims"):
            kept["status"] = old.get("status", {})
        if resource == "pods" and not request.path.endswith("/status") and new.get("spec") != old["spec"]:
            if not _is_same_spec(new, old):
                raise Rejected(
                    f'Pod "{known["name"]}" is invalid: spec: Forbidden: pod updates may not change these fields; '
                    "delete the pod and create it again"
                )
            kept["spec"] = old["spec"]
        return {**new, **kept}


def _is_same_spec(new: RawObject, old: RawObject) -> bool:
    """40 and "40" are one quantity: kubectl sends the manifest's words at each apply."""
    try:
        return bool(completed_manifest(new, namespace="", uid="", suffix="")["spec"] == old["spec"])
    except Rejected:
        return False


def _is_text_map(given: object) -> TypeGuard[dict[str, str]]:
    return isinstance(given, dict) and all(isinstance(value, str) for value in given.values())


def _key(request: web.Request, resource: str) -> ObjectKey:
    return ("" if resource in CLUSTER_WIDE else request.match_info["namespace"]), request.match_info["name"]
