"""Field selectors and watch streams of the embedded API server.

A watch sends its changes as JSON lines; an object that starts or stops to match its selector is ADDED or DELETED for it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api.faults import ApiFaults
from gpushare_agent.sandbox.api.responses import bad_request, query_number, status_body
from gpushare_agent.sandbox.api.store import KINDS, Change, Expired, ObjectStore, group_version
from gpushare_agent.sandbox.pod_manifest import RawObject

log = structlog.get_logger(__name__)

_WRITE_TIMEOUT_S = 10.0
_DEFAULT_WATCH_S = 3600

Selector = Callable[[RawObject], bool]

_TERM = re.compile(r"(?P<path>[A-Za-z0-9_.]+)\s*(?P<operator>==|!=|=)\s*(?P<value>.*)")


def _field(raw: RawObject, path: str) -> str:
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def parse_field_selector(text: str) -> Selector:
    """An absent field counts as empty. Raises Rejected for a term that is not `path=value` or `path!=value`."""
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _TERM.fullmatch(part)
        if match is None:
            raise Rejected(f"unable to parse field selector term {part!r}: expected path=value or path!=value")
        terms.append((match["path"], match["operator"] != "!=", match["value"]))
    return lambda raw: all((_field(raw, path) == value) is wanted for path, wanted, value in terms)


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
    if request.query.get("labelSelector"):
        bad_request("the embedded API server supports no labelSelector")
    try:
        chosen = parse_field_selector(request.query.get("fieldSelector", ""))
    except Rejected as error:
        bad_request(str(error))
    namespace = request.match_info.get("namespace")
    return lambda raw: chosen(raw) and namespace in (None, raw["metadata"].get("namespace"))


class Watches:
    """Serves watch requests from the store's history. State owned: none."""

    def __init__(self, store: ObjectStore, faults: ApiFaults, *, bookmark_interval_s: float) -> None:
        self._store = store
        self._faults = faults
        self._bookmark_interval_s = bookmark_interval_s

    async def serve(self, request: web.Request, resource: str, selects: Selector) -> web.StreamResponse:
        version = query_number(request, "resourceVersion", 0)
        ends_at = time.monotonic() + query_number(request, "timeoutSeconds", _DEFAULT_WATCH_S)
        stream = _WatchStream(request, resource)
        try:
            await stream.open()
            if version == 0:
                version = self._store.version
                await stream.send([("ADDED", raw) for raw in self._store.all(resource) if selects(raw)])
            await self._follow(stream, resource, selects, version=version, ends_at=ends_at)
        except Expired as error:
            await stream.send([("ERROR", status_body(410, "Expired", str(error)))])
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
