"""Watch streams of the embedded API server.

A watch sends its changes as JSON lines; an object that starts or stops to match its selector is ADDED or DELETED for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import structlog
from aiohttp import web

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api.faults import ApiFaults
from gpushare_agent.sandbox.api.responses import bad_request, query_number, status_body
from gpushare_agent.sandbox.api.selectors import Selector, parse_field_selector, parse_label_selector
from gpushare_agent.sandbox.api.store import KINDS, Change, Expired, ObjectStore, group_version
from gpushare_agent.sandbox.pod_manifest import RawObject

log = structlog.get_logger(__name__)

_WRITE_TIMEOUT_S = 10.0
_DEFAULT_WATCH_S = 3600
TRUE = ("true", "1", "True")


def seen_by(change: Change, selects: Selector) -> tuple[str, RawObject] | None:
    """The event for a watcher with this selector, None for a change that it does not see."""
    was = change.before is not None and selects(change.before)
    if change.after is not None and selects(change.after):
        return ("MODIFIED" if was else "ADDED"), change.after
    if not was or change.before is None:
        return None
    shown = change.after if change.after is not None else change.before
    return "DELETED", shown


def request_selector(request: web.Request) -> Selector:
    try:
        by_fields = parse_field_selector(request.query.get("fieldSelector", ""))
        by_labels = parse_label_selector(request.query.get("labelSelector", ""))
    except Rejected as error:
        bad_request(str(error))
    namespace = request.match_info.get("namespace")
    return lambda raw: by_fields(raw) and by_labels(raw) and namespace in (None, raw["metadata"].get("namespace"))


class Watches:
    """Serves watch requests from the store's history. State owned: none."""

    def __init__(self, store: ObjectStore, faults: ApiFaults, *, bookmark_interval_s: float) -> None:
        self._store = store
        self._faults = faults
        self._bookmark_interval_s = bookmark_interval_s

    async def serve(
        self, request: web.Request, resource: str, selects: Selector, shape: Callable[[RawObject], RawObject]
    ) -> web.StreamResponse:
        """Each object goes out as `shape` makes it. With sendInitialEvents a bookmark ends the objects of the beginning."""
        version = query_number(request, "resourceVersion", 0)
        has_initial = request.query.get("sendInitialEvents") in TRUE
        ends_at = time.monotonic() + query_number(request, "timeoutSeconds", _DEFAULT_WATCH_S)
        stream = _WatchStream(request, resource, shape)
        try:
            await stream.open()
            if version == 0 or has_initial:
                version = self._store.version
                await stream.send([("ADDED", raw) for raw in self._store.all(resource) if selects(raw)])
            if has_initial:
                await stream.send_bookmark(version, {"k8s.io/initial-events-end": "true"})
            await self._follow(stream, resource, selects, version=version, ends_at=ends_at)
        except Expired as error:
            await stream.send_error(status_body(410, "Expired", str(error)))
        except ConnectionError:
            log.debug("watcher_disconnected", resource=resource)
        return stream.response

    async def _follow(
        self, stream: _WatchStream, resource: str, selects: Selector, *, version: int, ends_at: float
    ) -> None:
        """Until the time is up or the server stops. A bookmark comes each interval and at the end, where requested."""
        faults, marked_at, epoch = self._faults, time.monotonic(), self._faults.watch_epoch
        while not faults.is_stopping:
            seen = self._store.signals[resource].count
            if faults.watch_epoch != epoch:
                raise Expired(f"too old resource version: {version} ({self._store.version})")
            changes = [c for c in self._store.changes_since(version) if c.resource == resource]
            version = self._store.version
            await stream.send([event for change in changes if (event := seen_by(change, selects)) is not None])
            now = time.monotonic()
            if now >= ends_at or now >= marked_at + self._bookmark_interval_s:
                await stream.send_bookmark(version)
                marked_at = now
            if now >= ends_at:
                return
            await self._wait(resource, seen, min(ends_at, marked_at + self._bookmark_interval_s) - now)

    async def _wait(self, resource: str, seen: int, limit_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                await self._store.signals[resource].wait(seen)
        except TimeoutError:
            return
        await self._faults.wait_running()


class _WatchStream:
    """One watch response: events as JSON lines."""

    def __init__(self, request: web.Request, resource: str, shape: Callable[[RawObject], RawObject]) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._request = request
        self._shape = shape
        self._type = {"kind": KINDS[resource], "apiVersion": group_version(resource)}
        self._wants_bookmarks = request.query.get("allowWatchBookmarks") in TRUE

    async def open(self) -> None:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._request)

    async def send(self, events: list[tuple[str, RawObject]]) -> None:
        await self._write([(kind, self._shape(raw)) for kind, raw in events])

    async def send_error(self, status: RawObject) -> None:
        await self._write([("ERROR", status)])

    async def send_bookmark(self, version: int, annotations: dict[str, str] | None = None) -> None:
        if self._wants_bookmarks:
            metadata = {"resourceVersion": str(version), "creationTimestamp": None}
            marked = {**metadata, **({"annotations": annotations} if annotations else {})}
            await self._write([("BOOKMARK", {**self._type, "metadata": marked})])

    async def _write(self, events: list[tuple[str, RawObject]]) -> None:
        if events:
            lines = "".join(json.dumps({"type": kind, "object": raw}) + "\n" for kind, raw in events)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self.response.write(lines.encode())
