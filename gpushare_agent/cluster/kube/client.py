"""What the agent asks of the API server, as raw JSON. Sessions, credentials and errors: session.py, configuration.py.

All methods raise Unavailable (try again), NotFound, Conflict (read again), Rejected (do not retry) or Corrupt. All are
bounded in time and size, and may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

from gpushare_agent.cluster.kube.configuration import find_configuration
from gpushare_agent.cluster.kube.session import (
    AGENT_RIGHTS,
    MERGE_PATCH,
    KubeSession,
    Request,
    TooLong,
    error_for_status,
    excerpt,
    renamed,
)
from gpushare_agent.model.errors import Conflict, Corrupt, Rejected, Unavailable
from gpushare_agent.model.names import PodUid

if TYPE_CHECKING:
    from aiohttp import ClientResponse

T = TypeVar("T")

PAGE_SIZES = (500, 50, 5, 1)
"""Objects in one page, the next smaller where a page is too long: a pod has up to 1.5 MiB."""
PAGED_TRIES = 3
MAX_LINE_BYTES = 2 << 20
"""One watch event is one line: an object of at most 1.5 MiB and its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeTimeouts:
    """`watch_s` is what the server is asked for; `watch_idle_s` ends a watch on which not even a bookmark (one a minute)
    came, for a half-open connection looks exactly like that."""

    connect_s: float = 5.0
    request_s: float = 15.0
    list_s: float = 60.0
    watch_s: float = 290.0
    watch_idle_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLimits:
    """A list of the watch cache that is longer than `list_bytes` is read in pages of at most `page_bytes`.

    Reading an answer takes about four times its size for a moment. 250 pods of 20 KiB, which is much, are 5 MiB.
    """

    list_bytes: int = 16 << 20
    page_bytes: int = 8 << 20
    page_sizes: tuple[int, ...] = PAGE_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page(Generic[T]):
    items: list[T]
    version: str
    token: str
    """Where the next page begins, empty on the last."""


def open_kube_api(
    *,
    kubeconfig: Path | None,
    timeouts: KubeTimeouts | None = None,
    limits: ListLimits | None = None,
    cure: str = AGENT_RIGHTS,
) -> AbstractAsyncContextManager[KubeApi]:
    """The API server named by the kubeconfig, else the pod's own cluster, else $KUBECONFIG. Connects on first use. `cure`
    ends the message where the credentials are not accepted or do not suffice.

    Entering raises StartupError where there is no usable configuration, Unavailable where credentials are not there yet.
    """
    return _open_kube_api(kubeconfig, timeouts or KubeTimeouts(), limits or ListLimits(), cure)


@asynccontextmanager
async def _open_kube_api(
    kubeconfig: Path | None, timeouts: KubeTimeouts, limits: ListLimits, cure: str
) -> AsyncIterator[KubeApi]:
    async with open_kube_session(kubeconfig, timeouts, cure) as session:
        yield KubeApi(session, timeouts, limits)


@asynccontextmanager
async def open_kube_session(kubeconfig: Path | None, timeouts: KubeTimeouts, cure: str) -> AsyncIterator[KubeSession]:
    """What a client of the API server is made of. Raises as `open_kube_api`."""
    source = find_configuration(kubeconfig, os.environ)
    session = KubeSession(source, connect_s=timeouts.connect_s, cure=cure)
    try:
        await session.open()
        yield session
    finally:
        await session.close()


class KubeApi:
    """The API server. Holds no state of its own: any number of calls may run at once."""

    def __init__(self, session: KubeSession, timeouts: KubeTimeouts, limits: ListLimits) -> None:
        self._session = session
        self._timeouts = timeouts
        self._limits = limits

    async def list_pods(self, node_name: str, read: Callable[[dict[str, Any]], T | None]) -> tuple[list[T], str]:
        """What `read` makes of the node's pods (None is left out) and the resourceVersion to watch from.

        From the watch cache, so it may lag a little; the cache answers whole. An answer that is too long is read again
        in pages, each of which is let go before the next, so that fat pods do not keep the others from being known.
        """
        what = f"list the pods of node {node_name}"
        selector = ("fieldSelector", f"spec.nodeName={node_name}")
        request = Request(what=what, method="GET", path="/api/v1/pods", query=(selector, ("resourceVersion", "0")))
        with suppress(TooLong):  # left before going on: the error's frames hold what was read
            page = await self._page(request, read, timeout_s=self._timeouts.list_s, limit_bytes=self._limits.list_bytes)
            return page.items, page.version
        return await self._list_paged(replace(request, query=(selector,)), read)

    async def _list_paged(self, request: Request, read: Callable[[dict[str, Any]], T | None]) -> tuple[list[T], str]:
        ends_at = time.monotonic() + self._timeouts.list_s
        for _ in range(PAGED_TRIES - 1):
            with suppress(Conflict):  # the place to go on from is compacted away: start over
                return await self._pages(request, read, ends_at)
        return await self._pages(request, read, ends_at)

    async def _pages(
        self, request: Request, read: Callable[[dict[str, Any]], T | None], ends_at: float
    ) -> tuple[list[T], str]:
        items: list[T] = []
        sizes, token = list(self._limits.page_sizes), ""
        while True:
            place = (("limit", str(sizes[0])), *((("continue", token),) if token else ()))
            left_s = max(ends_at - time.monotonic(), 0.0)
            try:
                page = await self._page(
                    replace(request, query=(*request.query, *place)),
                    read,
                    timeout_s=left_s,
                    limit_bytes=self._limits.page_bytes,
                )
            except TooLong:
                if len(sizes) == 1:
                    raise
                del sizes[0]
                continue
            items += page.items
            token = page.token
            if not token:
                return items, page.version

    async def _page(
        self, request: Request, read: Callable[[dict[str, Any]], T | None], *, timeout_s: float, limit_bytes: int
    ) -> _Page[T]:
        raw_list = await self._session.fetch_json(request, timeout_s=timeout_s, limit_bytes=limit_bytes)
        # Servers send null for an empty list at times.
        raw_pods, raw_metadata = raw_list.get("items") or [], raw_list.get("metadata")
        version, token = (
            (raw_metadata.get("resourceVersion"), raw_metadata.get("continue") or "")
            if isinstance(raw_metadata, dict)
            else (None, "")
        )
        if not isinstance(raw_pods, list) or not isinstance(version, str) or not version or not isinstance(token, str):
            raise Corrupt(f"cannot {request.what}: the answer is no list with a resourceVersion")
        items = [item for raw in raw_pods if isinstance(raw, dict) and (item := read(raw)) is not None]
        return _Page(items=items, version=version, token=token)

    @asynccontextmanager
    async def watch_pods(self, node_name: str, resource_version: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Events {"type", "object"} of ADDED, MODIFIED, DELETED and BOOKMARK, from after `resource_version`.

        The iterator ends when the server ends the watch. Entering or iterating raises Conflict where the version is too
        old (HTTP or ERROR event 410), Unavailable for silence or a cut line, Corrupt for a line that is no event.
        """
        selector = ("fieldSelector", f"spec.nodeName={node_name}")
        request = Request(
            what=f"watch the pods of node {node_name}", method="GET", path="/api/v1/pods", query=(selector,)
        )
        async with self._watch(request, resource_version) as events:
            yield events

    @asynccontextmanager
    async def _watch(self, request: Request, resource_version: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """`request` is that of the list."""
        what = request.what
        watch_s = int(self._timeouts.watch_s * random.uniform(1.0, 1.1))  # noqa: S311 - spreads load, no secret
        query = (
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(watch_s, 1))),
        )
        stream = self._session.stream(replace(request, query=(*request.query, *query)))
        with renamed(what):
            async with asyncio.timeout(self._timeouts.request_s):
                response = await stream.__aenter__()
        try:
            async with aclosing(self._events(response, what)) as events:
                yield events
        finally:
            await stream.__aexit__(None, None, None)

    async def _events(self, response: ClientResponse, what: str) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            with renamed(what):
                async with asyncio.timeout(self._timeouts.watch_idle_s):
                    line = await response.content.readuntil(b"\n", max_size=MAX_LINE_BYTES)
            if not line:
                return
            if not line.endswith(b"\n"):
                raise Unavailable(f"cannot {what}: the stream ended inside a line")
            if line.strip():
                yield _event(line, what)

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float) -> dict[str, Any]:
        request = Request(what=f"get pod {namespace}/{name}", method="GET", path=pod_path(namespace, name))
        return await self._session.fetch_json(request, timeout_s=timeout_s)

    async def patch_pod_annotations(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Set the annotations, remove those that are None. Conflict where another pod bears the name now."""
        request = Request(
            what=f"patch the annotations of pod {namespace}/{name}",
            method="PATCH",
            path=pod_path(namespace, name),
            body={"metadata": {"uid": uid, "annotations": dict(sorted(annotations.items()))}},
            content_type=MERGE_PATCH,
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def delete_pod(self, namespace: str, name: str, uid: PodUid, *, grace_s: int | None = None) -> None:
        """Delete this very pod. Conflict where another pod bears the name now."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        request = Request(
            what=f"delete pod {namespace}/{name}", method="DELETE", path=pod_path(namespace, name), body=body
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def create_event(self, raw: dict[str, Any]) -> None:
        """Create an Event in the namespace that its metadata names."""
        namespace = str(raw.get("metadata", {}).get("namespace", ""))
        request = Request(
            what=f"create an Event in namespace {namespace}",
            method="POST",
            path=f"/api/v1/namespaces/{segment(namespace)}/events",
            body=raw,
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def list_nodes(self, read: Callable[[dict[str, Any]], T | None]) -> list[T]:
        """What `read` makes of every node of the cluster, in pages; None is left out."""
        request = Request(what="list the nodes", method="GET", path="/api/v1/nodes")
        return (await self._list_paged(request, read))[0]

    async def list_all_pods(
        self,
        read: Callable[[dict[str, Any]], T | None],
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
    ) -> list[T]:
        """What `read` makes of the pods of a namespace (empty: of all), in pages; None is left out. `labels` and `fields`
        are selectors. For a person's credentials: the agent itself only lists its node's (`list_pods`)."""
        place = f"namespace {namespace}" if namespace else "all namespaces"
        path = f"/api/v1/namespaces/{segment(namespace)}/pods" if namespace else "/api/v1/pods"
        selectors = (("labelSelector", labels), ("fieldSelector", fields))
        request = Request(
            what=f"list the pods of {place}",
            method="GET",
            path=path,
            query=tuple((name, value) for name, value in selectors if value),
        )
        return (await self._list_paged(request, read))[0]

    async def get_through_pod(
        self, namespace: str, name: str, port: int, path: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """The JSON object that a pod's HTTP server answers at `path`, by way of the API server. Needs the right to get
        pods/proxy."""
        request = Request(
            what=f"read {path} of pod {namespace}/{name} through the API server",
            method="GET",
            path=f"/api/v1/namespaces/{segment(namespace)}/pods/http:{segment(name)}:{port}/proxy{path}",
            query=tuple(sorted(query.items())),
        )
        return await self._session.fetch_json(
            request, timeout_s=self._timeouts.request_s, limit_bytes=self._limits.list_bytes
        )

    async def get_node(self, name: str) -> dict[str, Any]:
        request = Request(what=f"get node {name}", method="GET", path=f"/api/v1/nodes/{segment(name)}")
        return await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def patch_node_metadata(
        self, name: str, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        """Set labels and annotations of the node, remove those that are None, leave all others."""
        metadata = {"labels": dict(sorted(labels.items())), "annotations": dict(sorted(annotations.items()))}
        request = Request(
            what=f"patch the labels and annotations of node {name}",
            method="PATCH",
            path=f"/api/v1/nodes/{segment(name)}",
            body={"metadata": {key: value for key, value in metadata.items() if value}},
            content_type=MERGE_PATCH,
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def patch_node_capacity(self, name: str, resource: str, count: int) -> None:
        """Set one extended resource in the node's capacity; the kubelet takes it over into what can be allocated."""
        request = Request(
            what=f"patch the capacity of node {name}",
            method="PATCH",
            path=f"/api/v1/nodes/{segment(name)}/status",
            body={"status": {"capacity": {resource: str(count)}}},
            content_type=MERGE_PATCH,
        )
        await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)

    async def can_i(self, verb: str, resource: str, namespace: str = "") -> bool:
        """Whether our credentials allow this; `resource` may be "pods" or "pods/status"; no namespace means all."""
        resource_name, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "resource": resource_name, "subresource": subresource, "namespace": namespace}
        request = Request(
            what=f"ask whether we may {verb} {resource}",
            method="POST",
            path="/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
            },
        )
        raw_review = await self._session.fetch_json(request, timeout_s=self._timeouts.request_s)
        raw_status = raw_review.get("status")
        return isinstance(raw_status, dict) and raw_status.get("allowed") is True


def _event(line: bytes, what: str) -> dict[str, Any]:
    try:
        raw_event = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"cannot {what}: a line of the stream is no JSON ({excerpt(line)})") from e
    if not isinstance(raw_event, dict) or not isinstance(raw_event.get("object"), dict):
        raise Corrupt(f"cannot {what}: a line of the stream is no event ({excerpt(line)})")
    if raw_event.get("type") == "ERROR":
        raw_status = raw_event["object"]
        code = raw_status.get("code")
        raise error_for_status(code if isinstance(code, int) else 500, what, str(raw_status.get("message", ""))[:500])
    return raw_event


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(name)}"


def segment(name: str) -> str:
    """One element of a path. Empty, "." and ".." would name another thing than meant."""
    if not name or name in (".", "..") or len(name) > 253:
        raise Rejected(f"cannot ask the API server about {name[:300]!r}: it is no object's name")
    return quote(name, safe="")
