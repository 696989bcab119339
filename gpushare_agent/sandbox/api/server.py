"""An API server for the agents of a few nodes and for kubectl. It serves the kinds of kinds.py on a real TCP port, at
the paths and with the verbs that clients expect.

The kubelet and the scheduler of the embedded node, and tests, use its methods in process (objects.py); the agent speaks
HTTP to it and needs the server's token (access.py); watch streams are watch.py's. State owned: the listener and its port.
Not for admission plugins, authorization of single verbs, other resources or paged lists.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeGuard

from aiohttp import web
from multidict import CIMultiDict

from gpushare_agent.core.model.errors import AgentError, Rejected, StartupError
from gpushare_agent.core.settings.yaml import UnreadableYaml, parse_yaml
from gpushare_agent.sandbox.api import patch
from gpushare_agent.sandbox.api.access import ServerCertificate, check_access, write_kubeconfig
from gpushare_agent.sandbox.api.kinds import KINDS, Kind
from gpushare_agent.sandbox.api.kubectl import discovery, table
from gpushare_agent.sandbox.api.objects import LASTING_NAMESPACES, ApiObjects
from gpushare_agent.sandbox.api.pod_subresources import INSTEAD_OF_EXEC
from gpushare_agent.sandbox.api.responses import (
    RefusedRequest,
    bad_request,
    check_sections,
    json_body,
    read_body,
    refusal_for,
)
from gpushare_agent.sandbox.api.store import ObjectKey
from gpushare_agent.sandbox.api.validation import unknown_fields, updated
from gpushare_agent.sandbox.api.watch import TRUE, Watch, request_selector
from gpushare_agent.sandbox.held_port import HOST, hold_port
from gpushare_agent.sandbox.pod_manifest import RawObject, is_mirror

_MAX_BODY_BYTES = 3 * 2**20


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

Verb = Callable[[web.Request, Kind], Awaitable[web.StreamResponse]]


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
        certificate: ServerCertificate | None = None,
    ) -> None:
        super().__init__(version=version, history_limit=history_limit)
        self.port = port
        self.certificate = certificate
        self.token = secrets.token_urlsafe(32)
        self.headers = {"Authorization": f"Bearer {self.token}"}
        """What a client must send."""
        self.running = asyncio.Event()
        """While it is cleared, requests are accepted and not answered, and open watches send nothing."""
        self.running.set()
        self.bookmark_interval_s = bookmark_interval_s
        self.requests = deque[tuple[str, str]](maxlen=10_000)
        """Method and path of the newest requests that were admitted, in order of arrival."""
        self._runner: web.AppRunner | None = None
        self._port_holder: socket.socket | None = None
        """While the server does not listen, nobody else gets the port."""

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://{HOST}:{self.port}"

    def write_kubeconfig(self, path: Path) -> None:
        """Raises OSError."""
        trusted = self.certificate.certificate if self.certificate is not None else None
        write_kubeconfig(path, self.url, self.token, trusted)

    async def __aenter__(self) -> Self:
        await self.start_listening()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_listening()
        # Only here: between stop and start the port stays this server's.
        if self._port_holder is not None:
            self._port_holder.close()

    async def start_listening(self) -> None:
        """Listens on the port of the first start. Raises StartupError where the port is in use."""
        # At each start: an aiohttp application serves once.
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._admitted])
        self._add_routes(app)
        # Handlers are cancelled with their client: a watch would wait for the next change.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            if self._port_holder is None:
                self._port_holder = hold_port(self.port)
                self.port = self._port_holder.getsockname()[1]
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

    async def stop_listening(self) -> None:
        """Closes the port and every connection; objects and versions stay."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        # Aborted, for tests of outages: a client must see the connection break.
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            check_access(request, self.port, self.headers["Authorization"])
            # After the refusals, before the wait: tests count what a client has asked for.
            self.requests.append((request.method, request.path))
            # For all requests alike, in process nobody is delayed.
            await self.running.wait()
            response: web.StreamResponse = await handler(request)
            return response
        except RefusedRequest as refusal:
            return refusal.response()

    # --- requests: one handler for each verb, bound to a resource when the routes are made ---

    def _add_routes(self, app: web.Application) -> None:
        """Each address of a kind has the verbs of this table."""
        on_object: dict[str, Verb] = {"PATCH": self._patch, "PUT": self._put}
        for kind in KINDS.values():
            everywhere = f"{kind.base_path}/{kind.resource}"
            base = f"{kind.base_path}/namespaces/{{namespace}}/{kind.resource}" if kind.is_namespaced else everywhere
            one = f"{base}/{{name}}"
            verbs: dict[str, dict[str, Verb]] = {
                everywhere: {"GET": self._list},
                base: {"GET": self._list, "POST": self._create},
                one: {"GET": self._get, "DELETE": self._delete, **on_object},
                f"{one}/status": on_object,
            }
            if "scale" in kind.marks:
                verbs[f"{one}/scale"] = dict.fromkeys(("GET", "PUT", "PATCH"), self._scale)
            if kind.resource == "pods":
                verbs |= {f"{one}/binding": {"POST": self._bind}, f"{one}/eviction": {"POST": self._evict}}
                verbs[f"{one}/log"] = {"GET": self._log}
                # Any method: clients open streams by GET or POST, and should read why there is none.
                verbs |= {f"{one}/{part}": {"*": self._no_stream} for part in ("exec", "attach", "portforward")}
                app.router.add_get(f"{one}/proxy{{path:(/.*)?}}", self.subresources.proxy)
            for path, methods in verbs.items():
                for method, verb in methods.items():
                    app.router.add_route(method, path, partial(self._handle, verb, kind))
        # kubectl compares it with its own version and warns.
        release = self.behaviour.release
        major, minor, _ = release.removeprefix("v").split(".")
        version = {"major": major, "minor": minor, "gitVersion": release, "platform": "linux/amd64"}
        constants = {
            **{path: ("application/json", json.dumps(document)) for path, document in discovery().items()},
            # Empty, in protobuf: kubectl asks it for a kind that is not in v3, and says then that there is none.
            "/openapi/v2": ("application/com.github.proto-openapi.spec.v2.v1.0+protobuf", ""),
            "/version": ("application/json", json.dumps(version)),
            **dict.fromkeys(("/healthz", "/livez", "/readyz"), ("text/plain", "ok")),
        }
        for path, (content_type, text) in constants.items():
            app.router.add_get(path, partial(_constant, content_type, text))
        for path in _REVIEWS:
            app.router.add_post(path, self._review)

    async def _handle(self, verb: Verb, kind: Kind, request: web.Request) -> web.StreamResponse:
        try:
            return await verb(request, kind)
        except AgentError as error:
            raise await refusal_for(error, kind, request) from error
        # JSON of some thousand levels parses, and then ends in whatever walks it.
        except RecursionError:
            bad_request("the object provided is unrecognized: it is nested too deeply")

    async def _review(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({**await json_body(request), "status": _REVIEWS[request.path]}, status=201)

    # --- reading ---

    async def _get(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        return web.json_response(_shape(request, kind)(self.store.get(kind.resource, _key(request, kind))))

    async def _list(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        selects = request_selector(request)
        # A watch is a list with a parameter; the selector is that of both.
        if request.query.get("watch") in TRUE:
            watch = Watch(request, kind, self.store, _shape(request, kind))
            return await watch.serve(selects, self.bookmark_interval_s, self.running)
        items, version = filter(selects, self.store.all(kind.resource)), str(self.store.version)
        if _TABLE.search(request.headers.get("Accept", "")):
            return web.json_response(table(kind.resource, items, version, _included(request)))
        listed = {"kind": f"{kind.name}List", "apiVersion": kind.group_version, "items": list(items)}
        return web.json_response({**listed, "metadata": {"resourceVersion": version}})

    async def _log(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        return await self.subresources.log(request, self.store.get(kind.resource, _key(request, kind)))

    async def _no_stream(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """exec, attach and port-forward: a container of the sandbox is a process of this machine."""
        pod = self.store.get(kind.resource, _key(request, kind))
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

    async def _scale(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """The Scale of autoscaling/v1: the number of replicas alone."""
        key = _key(request, kind)
        raw = self.store.get(kind.resource, key)
        if request.method != "GET":
            # Nothing else of a Scale can be written.
            spec = {"replicas": ((await json_body(request)).get("spec") or {}).get("replicas")}
            # Read again: others may have written it while the body arrived.
            raw = self.store.get(kind.resource, key)
            new = updated(kind.resource, raw, patch.patched(raw, {"spec": spec}, patch.MERGE))
            raw = self.store.replace(kind.resource, new)
        identity = {k: v for k, v in raw["metadata"].items() if k in ("name", "namespace", "uid", "resourceVersion")}
        return web.json_response({
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": identity,
            "spec": {"replicas": raw["spec"]["replicas"]},
            "status": {"replicas": (raw.get("status") or {}).get("replicas", 0)},
        })  # fmt: skip

    # --- writing ---

    async def _create(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        raw, namespace = await json_body(request), request.match_info.get("namespace", "")
        # Before the dry run, which is asked for just these.
        warnings = await self._checked_fields(request, kind, raw)
        if kind.is_namespaced and ((raw.get("metadata") or {}).get("namespace") or namespace) != namespace:
            bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if not request.query.get("dryRun"):
            raw = self.create(kind.resource, raw, namespace)
        return web.json_response(raw, status=201, headers=warnings)

    async def _checked_fields(self, request: web.Request, kind: Kind, raw: RawObject) -> CIMultiDict[str]:
        """A value of a type that its field cannot have is refused. An unknown field is refused, ignored or named in a
        warning header, as the client asks by fieldValidation. Claims get such a header if no agent offers any GPU."""
        cannot = f'{kind.name} in version "{kind.group_version}" cannot be handled as a {kind.name}: '
        try:
            # The first object of a kind imports its models: 60 ms.
            found = await asyncio.to_thread(unknown_fields, raw, kind.name)
        except Rejected as error:
            bad_request(f"{cannot}{error}")
        mode = request.query.get("fieldValidation", "Warn")
        if found and mode == "Strict":
            bad_request(f"{cannot}strict decoding error: {', '.join(found)}")
        remedy = self.claims_remedy(kind.resource, raw)
        shown = [*(found if mode == "Warn" else ()), *([remedy] if remedy else ())]
        # A header with a line break would be two: the text is escaped as JSON has it.
        return CIMultiDict(("Warning", f'299 - "{json.dumps(text)[1:-1]}"') for text in shown)

    async def _bind(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """A Binding. Its metadata names the pod, may insist on a UID and a version, and brings annotations."""
        raw, key = await json_body(request), _key(request, kind)
        target, metadata = raw.get("target") or {}, raw.get("metadata") or {}
        annotations = metadata.get("annotations") or {}
        if not isinstance(target, dict) or not _is_text_map(annotations):
            bad_request("the object provided is unrecognized: a Binding has objects in metadata, annotations, target")
        # A Binding that names another pod than its address is a mistake that must not bind either.
        if (metadata.get("namespace") or key[0], metadata.get("name") or key[1]) != key:
            bad_request("the name or namespace in the URL does not match that in the Binding object")
        node_name = target.get("name")
        if not isinstance(node_name, str) or not node_name:
            raise Rejected("target.name: Required value: the Binding names no node")
        self.bind_pod(
            *key, node_name, uid=str(metadata.get("uid") or ""), annotations=annotations,
            resource_version=str(metadata.get("resourceVersion") or ""),
        )  # fmt: skip
        return _success()

    async def _delete(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        key = _key(request, kind)
        # kubectl sends DeleteOptions as a body, others as parameters.
        options = await json_body(request) if request.can_read_body else {}
        if kind.name == "Namespace" and key[1] in LASTING_NAMESPACES:
            message = f'namespaces "{key[1]}" is forbidden: this namespace may not be deleted'
            raise RefusedRequest(403, "Forbidden", message)
        if options.get("dryRun"):
            return web.json_response(self.store.get(kind.resource, key))
        # Other kinds have no grace period here, and no preconditions.
        if kind.name != "Pod":
            return web.json_response(self.delete(kind.resource, key))
        return web.json_response(self._delete_pod(request, key, options))

    async def _evict(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """There is no PodDisruptionBudget that could forbid it."""
        options = (await json_body(request)).get("deleteOptions") or {}
        if not isinstance(options, dict):
            bad_request("the object provided is unrecognized: deleteOptions must be an object")
        key = _key(request, kind)
        if options.get("dryRun"):
            self.store.get(kind.resource, key)
        else:
            self._delete_pod(request, key, options)
        return _success()

    def _delete_pod(self, request: web.Request, key: ObjectKey, options: Mapping[str, Any]) -> RawObject:
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        conditions = options.get("preconditions") or {}
        if not isinstance(conditions, dict) or re.fullmatch("None|-?[0-9]{1,9}", str(grace)) is None:
            bad_request("the object provided is unrecognized: preconditions are an object, gracePeriodSeconds a number")
        return self.delete_pod(
            *key, grace_period_s=None if grace is None else int(grace), uid=conditions.get("uid") or "",
            resource_version=conditions.get("resourceVersion") or "",
        )  # fmt: skip

    async def _patch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        content_type = request.content_type
        # The only one of the four patch types with a YAML body.
        if content_type == patch.APPLY:
            return await self._apply(request, kind)
        if content_type not in _PATCH_TYPES:
            message = f"the body was in an unknown format; accepted media types: {', '.join(_PATCH_TYPES)}"
            raise RefusedRequest(415, "UnsupportedMediaType", message)
        body = await json_body(request, of=(dict, list))
        return await self._written(request, kind, lambda old: patch.patched(old, body, content_type))

    async def _apply(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """Server-side apply: an object that is not there is created."""
        try:
            raw: Any = await asyncio.to_thread(parse_yaml, await read_body(request))
        except UnreadableYaml as error:
            bad_request(f"error decoding YAML: {error}")
        namespace, name = key = _key(request, kind)
        check_sections(raw)
        if (raw.get("metadata") or {}).get("name") != name:
            bad_request("the object provided is unrecognized: an object with the name of the URL is needed")
        warnings = await self._checked_fields(request, kind, raw)
        # After the await above: another client may have created it meanwhile.
        is_there = self.store.find(kind.resource, key) is not None
        if request.query.get("dryRun"):
            return web.json_response(raw, headers=warnings)
        made = self.apply(kind.resource, raw, namespace, request.query.get("fieldManager", ""))
        return web.json_response(made, status=200 if is_there else 201, headers=warnings)

    async def _put(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        raw = await json_body(request)
        return await self._written(request, kind, lambda _: raw)

    async def _written(
        self, request: web.Request, kind: Kind, change: Callable[[RawObject], RawObject]
    ) -> web.StreamResponse:
        """The change is made once more after the check of its fields, which may take a while: others write meanwhile."""
        key = _key(request, kind)
        warnings = await self._checked_fields(request, kind, change(self.store.get(kind.resource, key)))
        old = self.store.get(kind.resource, key)
        new = updated(kind.resource, old, change(old), is_status=request.path.endswith("/status"))
        if not request.query.get("dryRun"):
            new = self.store.replace(kind.resource, new)
        return web.json_response(new, headers=warnings)


async def _constant(content_type: str, text: str, _request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=content_type)


def _shape(request: web.Request, kind: Kind) -> Callable[[RawObject], RawObject]:
    """The answer for an object: itself, or a table of one row."""
    if not _TABLE.search(request.headers.get("Accept", "")):
        return lambda raw: raw
    return lambda raw: table(kind.resource, [raw], raw["metadata"]["resourceVersion"], _included(request))


def _included(request: web.Request) -> str:
    return request.query.get("includeObject", "Metadata")


def _success() -> web.Response:
    done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
    return web.json_response(done, status=201)


def _is_text_map(given: object) -> TypeGuard[dict[str, str]]:
    return isinstance(given, dict) and all(isinstance(value, str) for value in given.values())


def _key(request: web.Request, kind: Kind) -> ObjectKey:
    return (request.match_info["namespace"] if kind.is_namespaced else ""), request.match_info["name"]
