"""An API server for a few nodes, for their agents and for kubectl: the resources of KINDS (store.py), on a real TCP port,
at the paths and with the verbs that clients expect.

The kubelet and the scheduler of the embedded node, and tests, use its methods in process (objects.py); the agent speaks
HTTP to it and needs the server's token (access.py); watch streams are watch.py's. State owned: the listener and its port.
Not for admission plugins, authorization of single verbs, other resources or paged lists.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

from aiohttp import web
from multidict import CIMultiDict

from gpushare_agent.model.errors import AgentError, Rejected, StartupError
from gpushare_agent.sandbox.api import patch
from gpushare_agent.sandbox.api.access import ApiAccess, ServerCertificate, write_kubeconfig
from gpushare_agent.sandbox.api.kubectl import discovery, table
from gpushare_agent.sandbox.api.objects import LASTING_NAMESPACES, ApiObjects
from gpushare_agent.sandbox.api.pod_subresources import INSTEAD_OF_EXEC
from gpushare_agent.sandbox.api.responses import (
    bad_request,
    check_sections,
    error_response,
    json_body,
    read_body,
    status_response,
)
from gpushare_agent.sandbox.api.store import CLUSTER_WIDE, KINDS, SCALABLE, ObjectKey, base_path, group_version
from gpushare_agent.sandbox.api.validation import unknown_fields, updated
from gpushare_agent.sandbox.api.watch import TRUE, ApiFaults, Watches, request_selector
from gpushare_agent.sandbox.pod_manifest import RawObject, is_mirror
from gpushare_agent.settings.yaml import UnreadableYaml, parse_yaml

HOST = "127.0.0.1"
_MAX_BODY_BYTES = 3 * 2**20


class EmbeddedApiServer(ApiObjects):
    """`async with EmbeddedApiServer() as api:` listens on `api.url`; objects outlive `stop_listening`. Plain HTTP without
    a certificate: for tests, and no kubectl."""

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
        # The routes are made at each start: an aiohttp application serves once.
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
        # Only here: between stop and start the port stays this server's.
        if self._port_holder is not None:
            self._port_holder.close()

    async def start_listening(self) -> None:
        """Listens on the port of the first start. Raises StartupError where the port is in use."""
        # A server that was stopped before: its watches ended by this.
        self.faults.is_stopping = False
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._admitted])
        self._handlers.add_routes(app, tuple(KINDS))
        # Handlers are cancelled with their client: a watch would wait for the next change.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            self._hold_port()
            context = self.certificate.server_context() if self.certificate is not None else None
            # SO_REUSEADDR: the port is bound by its holder, which never listens.
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
        # Aborted, for tests of outages: a client must see the connection break.
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refusal = self.access.refusal(request, self.port)
        if refusal is not None:
            return refusal
        # After the refusals, before the faults: tests count what a client has asked for.
        self.requests.append((request.method, request.path))
        # For all requests alike, in process nobody is delayed.
        failure = await self.faults.before_answer()
        if failure is not None:
            return failure
        response: web.StreamResponse = await handler(request)
        return response


# --- the handlers of HTTP ---

_TABLE = re.compile(r"application/json;as=Table;v=v1(?=[;,]|$)")
"""In an Accept header of kubectl."""
_ALL = ["*"]
_REVIEWS: dict[str, RawObject] = {
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {"allowed": True, "reason": "embedded node"},
    "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews": {
        "resourceRules": [{"verbs": _ALL, "apiGroups": _ALL, "resources": _ALL}],
        "nonResourceRules": [{"verbs": _ALL, "nonResourceURLs": _ALL}],
        "incomplete": False,
    },
    "/apis/authentication.k8s.io/v1/selfsubjectreviews": {
        "userInfo": {"username": "sandbox", "groups": ["system:authenticated"]}
    },
}
"""The status of each review: who has the token may do everything."""
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
            # A set: of cluster-wide resources both are one.
            for path in {everywhere, base}:
                app.router.add_get(path, self._bound(self._list, resource))
            app.router.add_post(base, self._bound(self._create, resource))
            app.router.add_get(f"{base}/{{name}}", self._bound(self._get, resource))
            app.router.add_delete(f"{base}/{{name}}", self._bound(self._delete, resource))
            for suffix in ("", "/status"):
                app.router.add_patch(f"{base}/{{name}}{suffix}", self._bound(self._patch, resource))
                app.router.add_put(f"{base}/{{name}}{suffix}", self._bound(self._put, resource))
        for resource in SCALABLE:
            path = f"{base_path(resource)}/namespaces/{{namespace}}/{resource}/{{name}}/scale"
            for method in ("GET", "PUT", "PATCH"):
                app.router.add_route(method, path, self._bound(self._scale, resource))
        pod = "/api/v1/namespaces/{namespace}/pods/{name}"
        app.router.add_post(f"{pod}/binding", self._bound(self._bind, "pods"))
        app.router.add_post(f"{pod}/eviction", self._bound(self._evict, "pods"))
        app.router.add_get(f"{pod}/proxy{{path:(/.*)?}}", self._objects.agents.proxy)
        app.router.add_get(f"{pod}/log", self._bound(self._log, "pods"))
        for part in ("exec", "attach", "portforward"):
            # Any method: clients open streams by GET or POST, and should read why there is none.
            app.router.add_route("*", f"{pod}/{part}", self._bound(self._no_stream, "pods"))
        for path, document in discovery(resources).items():
            app.router.add_get(path, _constant(document))
        app.router.add_get("/openapi/v2", self._openapi_v2)
        app.router.add_get("/version", self._version)
        for path in ("/healthz", "/livez", "/readyz"):
            app.router.add_get(path, self._healthy)
        for path in _REVIEWS:
            app.router.add_post(path, self._review)

    def _bound(self, verb: Callable[[web.Request, str], Awaitable[web.StreamResponse]], resource: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await verb(request, resource)
            except AgentError as error:
                return await error_response(error, resource, request)
            # JSON of some thousand levels parses, and then ends in whatever walks it.
            except RecursionError:
                bad_request("the object provided is unrecognized: it is nested too deeply")

        return handle

    async def _healthy(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _openapi_v2(self, _request: web.Request) -> web.StreamResponse:
        """An empty document, in protobuf: kubectl asks it for a kind that is not in v3, and says then that there is
        none."""
        return web.Response(body=b"", content_type="application/com.github.proto-openapi.spec.v2.v1.0+protobuf")

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        # kubectl compares it with its own version and warns.
        major, minor, _ = self._objects.release.removeprefix("v").split(".")
        return web.json_response(
            {"major": major, "minor": minor, "gitVersion": self._objects.release, "platform": "linux/amd64"}
        )

    async def _review(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({**await json_body(request), "status": _REVIEWS[request.path]}, status=201)

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
        # A watch is a list with a parameter; the selector is that of both.
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

    async def _log(self, request: web.Request, resource: str) -> web.StreamResponse:
        return await self._objects.logs.serve(request, self._store.get(resource, _key(request, resource)))

    async def _no_stream(self, request: web.Request, resource: str) -> web.StreamResponse:
        """exec, attach and port-forward: a container of the sandbox is a process of this machine."""
        pod = self._store.get(resource, _key(request, resource))
        part = request.path.rpartition("/")[2].replace("portf", "port-f")
        # Each has another way that works here.
        if part == "port-forward":
            instead = "Connect to the same port of localhost"
        elif is_mirror(pod):
            instead = f"Its agents too: {INSTEAD_OF_EXEC}"
        else:
            metadata = pod["metadata"]
            namespace = "" if metadata["namespace"] == "default" else f" -n {metadata['namespace']}"
            instead = f"For a command in one: gpushare-agent sandbox exec{namespace} {metadata['name']} -- COMMAND"
        bad_request(
            f"the sandbox has no {part}: its containers are processes of this machine, with its files and ports. {instead}"
        )

    async def _scale(self, request: web.Request, resource: str) -> web.StreamResponse:
        """The Scale of autoscaling/v1: the number of replicas alone."""
        raw = self._store.get(resource, _key(request, resource))
        if request.method != "GET":
            body = await json_body(request)
            # Nothing else of a Scale can be written.
            spec = {"replicas": (body.get("spec") or {}).get("replicas")}
            # Read again: others may have written it while the body arrived.
            raw = self._store.get(resource, _key(request, resource))
            new = patch.patched(raw, {"spec": spec}, patch.MERGE)
            raw = self._store.replace(resource, updated(resource, raw, new))
        identity = {k: v for k, v in raw["metadata"].items() if k in ("name", "namespace", "uid", "resourceVersion")}
        return web.json_response({
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": identity,
            "spec": {"replicas": raw["spec"]["replicas"]},
            "status": {"replicas": (raw.get("status") or {}).get("replicas", 0)},
        })  # fmt: skip

    # --- writing ---

    async def _create(self, request: web.Request, resource: str) -> web.StreamResponse:
        raw, namespace = await json_body(request), request.match_info.get("namespace", "")
        # Before the dry run, which is asked for just these.
        warnings = await self._checked_fields(request, resource, raw)
        if resource == "pods" and (raw.get("metadata") or {}).get("namespace", namespace) != namespace:
            bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if request.query.get("dryRun"):
            return web.json_response(raw, status=201, headers=warnings)
        return web.json_response(self._objects.create(resource, raw, namespace), status=201, headers=warnings)

    async def _checked_fields(self, request: web.Request, resource: str, raw: RawObject) -> CIMultiDict[str]:
        """A value of a type that its field cannot have is refused; an unknown field as the client asks by fieldValidation:
        refused, ignored, or named in a header that warns, as claims are where no agent offers any GPU."""
        cannot = f'{KINDS[resource]} in version "{group_version(resource)}" cannot be handled as a {KINDS[resource]}: '
        try:
            # The first object of a kind imports its models: 60 ms.
            found = await asyncio.to_thread(unknown_fields, raw, KINDS[resource])
        except Rejected as error:
            bad_request(f"{cannot}{error}")
        mode = request.query.get("fieldValidation", "Warn")
        if found and mode == "Strict":
            bad_request(f"{cannot}strict decoding error: {', '.join(found)}")
        shown = [*(found if mode == "Warn" else []), *filter(None, [self._objects.claims_remedy(resource, raw)])]
        # A header with a line break would be two: the text is escaped as JSON has it.
        return CIMultiDict(("Warning", f'299 - "{json.dumps(text)[1:-1]}"') for text in shown)

    async def _bind(self, request: web.Request, _resource: str) -> web.StreamResponse:
        """A Binding. Its metadata names the pod, may insist on a UID and a version, and brings annotations."""
        raw, key = await json_body(request), _key(request, "pods")
        target, metadata = raw.get("target") or {}, raw.get("metadata") or {}
        annotations = metadata.get("annotations") or {} if isinstance(metadata, dict) else None
        if not isinstance(target, dict) or not _is_text_map(annotations):
            bad_request("the object provided is unrecognized: a Binding has objects in metadata, annotations, target")
        # A Binding that names another pod than its address is a mistake that must not bind either.
        if (metadata.get("namespace") or key[0], metadata.get("name") or key[1]) != key:
            bad_request("the name or namespace in the URL does not match that in the Binding object")
        node_name = target.get("name")
        if not isinstance(node_name, str) or not node_name:
            raise Rejected("target.name: Required value: the Binding names no node")
        self._objects.bind_pod(
            *key, node_name, uid=str(metadata.get("uid") or ""), annotations=annotations,
            resource_version=str(metadata.get("resourceVersion") or ""),
        )  # fmt: skip
        return _success()

    async def _delete(self, request: web.Request, resource: str) -> web.StreamResponse:
        key = _key(request, resource)
        # kubectl sends DeleteOptions as a body, others as parameters.
        options = await json_body(request) if request.can_read_body else {}
        if resource == "namespaces" and key[1] in LASTING_NAMESPACES:
            message = f'namespaces "{key[1]}" is forbidden: this namespace may not be deleted'
            return status_response(403, "Forbidden", message)
        if options.get("dryRun"):
            return web.json_response(self._store.get(resource, key))
        # Other kinds have no grace period here, and no preconditions.
        if resource != "pods":
            return web.json_response(self._objects.delete(resource, key))
        return web.json_response(self._delete_pod(request, key, options))

    async def _evict(self, request: web.Request, resource: str) -> web.StreamResponse:
        """There is no PodDisruptionBudget that could forbid it."""
        options = (await json_body(request)).get("deleteOptions") or {}
        if not isinstance(options, dict):
            bad_request("the object provided is unrecognized: deleteOptions must be an object")
        key = _key(request, resource)
        if options.get("dryRun"):
            self._store.get(resource, key)
        else:
            self._delete_pod(request, key, options)
        return _success()

    def _delete_pod(self, request: web.Request, key: ObjectKey, options: Mapping[str, Any]) -> RawObject:
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        conditions = options.get("preconditions") or {}
        if not isinstance(conditions, dict) or re.fullmatch("None|-?[0-9]{1,9}", str(grace)) is None:
            bad_request("the object provided is unrecognized: preconditions are an object, gracePeriodSeconds a number")
        return self._objects.delete_pod(
            *key, grace_period_s=None if grace is None else int(grace), uid=conditions.get("uid") or "",
            resource_version=conditions.get("resourceVersion") or "",
        )  # fmt: skip

    async def _patch(self, request: web.Request, resource: str) -> web.StreamResponse:
        content_type = request.content_type
        # Of the four patch types the only one whose body is YAML.
        if content_type == patch.APPLY:
            return await self._apply(request, resource)
        if content_type not in _PATCH_TYPES:
            message = f"the body was in an unknown format; accepted media types: {', '.join(_PATCH_TYPES)}"
            return status_response(415, "UnsupportedMediaType", message)
        body = await json_body(request, of=(dict, list))
        return await self._written(request, resource, lambda old: patch.patched(old, body, content_type))

    async def _apply(self, request: web.Request, resource: str) -> web.StreamResponse:
        """Server-side apply: an object that is not there is created."""
        try:
            raw: Any = await asyncio.to_thread(parse_yaml, await read_body(request))
        except UnreadableYaml as error:
            bad_request(f"error decoding YAML: {error}")
        namespace, name = key = _key(request, resource)
        check_sections(raw)
        if (raw.get("metadata") or {}).get("name") != name:
            bad_request("the object provided is unrecognized: an object with the name of the URL is needed")
        warnings = await self._checked_fields(request, resource, raw)
        # After the await above: another client may have created it meanwhile.
        is_there, manager = self._store.find(resource, key) is not None, request.query.get("fieldManager", "")
        if request.query.get("dryRun"):
            return web.json_response(raw, headers=warnings)
        made = self._objects.apply(resource, raw, namespace, manager)
        return web.json_response(made, status=200 if is_there else 201, headers=warnings)

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
        new = updated(resource, old, change(old), is_status=request.path.endswith("/status"))
        if not request.query.get("dryRun"):
            new = self._store.replace(resource, new)
        return web.json_response(new, headers=warnings)


def _success() -> web.Response:
    done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
    return web.json_response(done, status=201)


def _is_text_map(given: object) -> TypeGuard[dict[str, str]]:
    return isinstance(given, dict) and all(isinstance(value, str) for value in given.values())


def _key(request: web.Request, resource: str) -> ObjectKey:
    return ("" if resource in CLUSTER_WIDE else request.match_info["namespace"]), request.match_info["name"]
