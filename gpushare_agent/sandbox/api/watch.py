"""Watch streams of the embedded API server, their selectors, and the faults that tests inject into requests and watches.

A watch sends its changes as JSON lines; an object that starts or stops to match its selector is ADDED or DELETED for it.
State owned: what is injected at the moment.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from aiohttp import web
from msgspec import Struct

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api.responses import bad_request, query_number, status_body, status_response
from gpushare_agent.sandbox.api.store import KINDS, Change, Expired, ObjectStore, group_version
from gpushare_agent.sandbox.pod_manifest import RawObject


class ApiFaults:
    """Failed requests, stalls and expired watches."""

    def __init__(self, store: ObjectStore) -> None:
        self.watch_epoch = 0
        self.is_stopping = False
        self._store = store
        self._failures: list[int] = []
        self._running = asyncio.Event()
        self._running.set()

    def fail_next(self, count: int, status: int) -> None:
        """The next `count` requests are answered with this HTTP status."""
        self._failures.extend([status] * count)

    def stall(self) -> None:
        """Requests are accepted and not answered from now on, and open watches send nothing."""
        self._running.clear()

    def unstall(self) -> None:
        """Delayed requests are answered now."""
        self._running.set()
        self.wake_watches()

    def expire_watches(self) -> None:
        """Ends every open watch with a 410 Gone event."""
        self.watch_epoch += 1
        self.wake_watches()

    def wake_watches(self) -> None:
        # A watch waits for changes of its resource: without this it would notice at its next bookmark.
        for signal in (*self._store.signals.values(), self._store.signal):
            signal.notify()

    async def wait_running(self) -> None:
        await self._running.wait()

    async def before_answer(self) -> web.Response | None:
        """Waits while stalled; the response in place of the answer where the request is to fail."""
        # First: a stalled server answers nothing, not even the faults that are due.
        await self.wait_running()
        if not self._failures:
            return None
        return status_response(self._failures.pop(0), "InternalError", "an injected fault of the embedded API server")


Selector = Callable[[RawObject], bool]

_FIELD = re.compile(r"(?P<path>[A-Za-z0-9_.]+)\s*(?P<operator>==|!=|=)\s*(?P<value>.*)")
_LABEL = re.compile(  # possessive throughout: its time grows with the length of the text
    r"\s*+(?:(?P<absent>!)\s*+)?(?P<key>[A-Za-z0-9_./-]++)"
    r"(?:\s*+(?P<operator>==|!=|=)\s*+(?P<value>[\w.-]*+)|\s++(?P<set>in|notin)\s*+\((?P<values>[\w.,\s-]*+)\))?+"
    r"\s*+(?:,|$)"
)


def parse_field_selector(text: str) -> Selector:
    """An absent field counts as empty. Raises Rejected for a term that is not `path=value` or `path!=value`."""
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _FIELD.fullmatch(part)
        if match is None:
            raise Rejected(f"unable to parse field selector term {part!r}: expected path=value or path!=value")
        terms.append((match["path"], match["operator"] != "!=", match["value"]))
    return lambda raw: all((_field(raw, path) == value) is expected for path, expected, value in terms)


def _field(raw: RawObject, path: str) -> str:
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def parse_label_selector(text: str) -> Selector:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, joined by commas. Raises Rejected."""
    terms: list[tuple[str, bool, frozenset[str] | None]] = []
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        # The end of an empty match: the loop would stay where it is.
        if match is None or match.end() == position or (match["absent"] and (match["operator"] or match["set"])):
            raise Rejected(f"unable to parse label selector {text!r:.200}: found {text[position : position + 40]!r}")
        if match["operator"] is not None:
            terms.append((match["key"], match["operator"] != "!=", frozenset({match["value"]})))
        elif match["set"] is not None:
            values = frozenset(value.strip() for value in match["values"].split(","))
            terms.append((match["key"], match["set"] == "in", values))
        else:
            terms.append((match["key"], match["absent"] is None, None))
        position = match.end()
    return lambda raw: _has_labels(raw, terms)


def _has_labels(raw: RawObject, terms: list[tuple[str, bool, frozenset[str] | None]]) -> bool:
    labels: Mapping[str, str] = raw["metadata"].get("labels") or {}
    return all(
        (key in labels if values is None else labels.get(key) in values) is expected for key, expected, values in terms
    )


log = structlog.get_logger(__name__)

_WRITE_TIMEOUT_S = 10.0
_DEFAULT_WATCH_S = 3600
TRUE = ("true", "1", "True")


def seen_by(change: Change, selects: Selector) -> tuple[str, RawObject] | None:
    """The event for a watcher with this selector, None for a change that it does not see."""
    # An object that begins or ends to match the selector is added or deleted for this watcher.
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


class Watches(Struct, frozen=True, kw_only=True, eq=False):
    """Serves watch requests from the store's history. State owned: none."""

    store: ObjectStore
    faults: ApiFaults
    bookmark_interval_s: float

    async def serve(
        self, request: web.Request, resource: str, selects: Selector, shape: Callable[[RawObject], RawObject]
    ) -> web.StreamResponse:
        """Each object goes out as `shape` makes it. With sendInitialEvents a bookmark ends the objects of the
        beginning."""
        version = query_number(request, "resourceVersion", 0)
        has_initial = request.query.get("sendInitialEvents") in TRUE
        ends_at = time.monotonic() + query_number(request, "timeoutSeconds", _DEFAULT_WATCH_S)
        stream = _WatchStream(request, resource, shape)
        try:
            # Headers first: a client must know that the watch stands, though nothing changes.
            await stream.open()
            if version == 0 or has_initial:  # 0, or none: any state will do, and the stream begins with all objects
                version = self.store.version
                await stream.send([("ADDED", raw) for raw in self.store.all(resource) if selects(raw)])
            if has_initial:
                await stream.send_bookmark(version, {"k8s.io/initial-events-end": "true"})
            await self._follow(stream, resource, selects, version=version, ends_at=ends_at)
        # In the stream, for the response has begun with 200: so a real one does it.
        except Expired as error:
            await stream.send_error(status_body(410, "Expired", str(error)))
        except ConnectionError:
            log.debug("watcher_disconnected", resource=resource)
        return stream.response

    async def _follow(
        self, stream: _WatchStream, resource: str, selects: Selector, *, version: int, ends_at: float
    ) -> None:
        """Sends changes until the time is up or the server stops. A bookmark comes each interval and at the end, where
        requested."""
        faults, marked_at, epoch = self.faults, time.monotonic(), self.faults.watch_epoch
        while not faults.is_stopping:
            # The count before the changes: one that comes while they are sent ends the wait at once.
            seen = self.store.signals[resource].count
            # Injected: every watch that was open then ends as one that lags too far behind.
            if faults.watch_epoch != epoch:
                raise Expired(f"too old resource version: {version} ({self.store.version})")
            changes = [c for c in self.store.changes_since(version) if c.resource == resource]
            # Of all resources: a watch of few changes must not lag behind the history for it.
            version = self.store.version
            await stream.send([event for change in changes if (event := seen_by(change, selects)) is not None])
            now = time.monotonic()
            # At the end in any case: the client goes on from there without a list.
            if now >= ends_at or now >= marked_at + self.bookmark_interval_s:
                await stream.send_bookmark(version)
                marked_at = now
            if now >= ends_at:
                return
            await self._wait(resource, seen, min(ends_at, marked_at + self.bookmark_interval_s) - now)

    async def _wait(self, resource: str, seen: int, limit_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                await self.store.signals[resource].wait(seen)
        except TimeoutError:
            return
        await self.faults.wait_running()


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
