"""Watch streams of the embedded API server, and their selectors.

A watch sends its changes as JSON lines; an object that starts or stops to match its selector is ADDED or DELETED for it.
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

from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.sandbox.api.kinds import Kind
from gpushare_agent.sandbox.api.responses import RefusedRequest, bad_request, query_number
from gpushare_agent.sandbox.api.store import Change, Expired, ObjectStore
from gpushare_agent.sandbox.pod_manifest import RawObject, at

log = structlog.get_logger(__name__)


# --- selectors ---

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
    for part in filter(None, map(str.strip, text.split(","))):
        match = _FIELD.fullmatch(part)
        if match is None:
            raise Rejected(f"unable to parse field selector term {part!r}: expected path=value or path!=value")
        terms.append((match["path"], match["operator"] != "!=", match["value"]))
    return lambda raw: all((str(at(raw, path, "")) == value) is expected for path, expected, value in terms)


def parse_label_selector(text: str) -> Selector:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, joined by commas. Raises Rejected."""
    terms: list[tuple[str, bool, frozenset[str] | None]] = []
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        # The end of an empty match: the loop would stay where it is.
        if match is None or match.end() == position or (match["absent"] and (match["operator"] or match["set"])):
            raise Rejected(f"unable to parse label selector {text!r:.200}: found {text[position : position + 40]!r}")
        listed = match["value"] if match["operator"] else match["values"]
        is_expected = not match["absent"] and match["operator"] != "!=" and match["set"] != "notin"
        values = None if listed is None else frozenset(value.strip() for value in listed.split(","))
        terms.append((match["key"], is_expected, values))
        position = match.end()

    def selects(raw: RawObject) -> bool:
        labels: Mapping[str, str] = raw["metadata"].get("labels") or {}
        return all(
            (key in labels if values is None else labels.get(key) in values) is expected
            for key, expected, values in terms
        )

    return selects


def request_selector(request: web.Request) -> Selector:
    try:
        by_fields = parse_field_selector(request.query.get("fieldSelector", ""))
        by_labels = parse_label_selector(request.query.get("labelSelector", ""))
    except Rejected as error:
        bad_request(str(error))
    namespace = request.match_info.get("namespace")
    return lambda raw: by_fields(raw) and by_labels(raw) and namespace in (None, raw["metadata"].get("namespace"))


# --- streams ---

_WRITE_TIMEOUT_S = 10.0
_DEFAULT_WATCH_S = 3600
TRUE = ("true", "1", "True")


def seen_by(change: Change, selects: Selector) -> tuple[str, RawObject] | None:
    """The event for a watcher with this selector, None for a change that it does not see."""
    # An object that begins or ends to match the selector is added or deleted for this watcher.
    was = change.before is not None and selects(change.before)
    if change.after is not None and selects(change.after):
        return ("MODIFIED" if was else "ADDED"), change.after
    shown = change.after or change.before
    return ("DELETED", shown) if was and shown is not None else None


class Watch:
    """Answers one watch request from the store's history. Each object goes out as `shape` makes it."""

    def __init__(
        self, request: web.Request, kind: Kind, store: ObjectStore, shape: Callable[[RawObject], RawObject]
    ) -> None:
        self._request = request
        self._kind = kind
        self._store = store
        self._shape = shape
        self._version = query_number(request, "resourceVersion", 0)
        self._ends_at = time.monotonic() + query_number(request, "timeoutSeconds", _DEFAULT_WATCH_S)
        self._response = web.StreamResponse(headers={"Content-Type": "application/json"})

    async def serve(self, selects: Selector, bookmark_interval_s: float, running: asyncio.Event) -> web.StreamResponse:
        """Sends nothing while it is not `running`. With sendInitialEvents a bookmark ends the objects of the beginning."""
        has_initial = self._request.query.get("sendInitialEvents") in TRUE
        try:
            # Headers first: a client must know that the watch stands, though nothing changes.
            self._response.enable_chunked_encoding()
            await self._response.prepare(self._request)
            if self._version == 0 or has_initial:  # 0, or none: any state will do, and all objects come first
                self._version = self._store.version
                objects = self._store.all(self._kind.resource)
                await self._send(*(("ADDED", self._shape(raw)) for raw in objects if selects(raw)))
            if has_initial:
                await self._send_bookmark(annotations={"k8s.io/initial-events-end": "true"})
            await self._follow(selects, bookmark_interval_s, running)
        # In the stream, because the response has begun with 200. A real one does the same.
        except Expired as error:
            await self._send(("ERROR", RefusedRequest(410, "Expired", str(error)).status))
        except ConnectionError:
            log.debug("watcher_disconnected", resource=self._kind.resource)
        return self._response

    async def _follow(self, selects: Selector, bookmark_interval_s: float, running: asyncio.Event) -> None:
        """Sends changes until the time is up. A bookmark comes each interval and at the end, where requested."""
        resource, signal, marked_at = self._kind.resource, self._store.signals[self._kind.resource], time.monotonic()
        while True:
            # The count before the changes: one that comes while they are sent ends the wait at once.
            seen = signal.count
            changes = [c for c in self._store.changes_since(self._version) if c.resource == resource]
            # Of all resources: a watch of few changes must not lag behind the history for it.
            self._version = self._store.version
            events = filter(None, (seen_by(change, selects) for change in changes))
            await self._send(*((kind, self._shape(raw)) for kind, raw in events))
            now = time.monotonic()
            # At the end in any case: the client goes on from there without a list.
            if now >= min(self._ends_at, marked_at + bookmark_interval_s):
                await self._send_bookmark()
                marked_at = now
            if now >= self._ends_at:
                return
            await signal.wait(seen, min(self._ends_at, marked_at + bookmark_interval_s) - now)
            if signal.count != seen:
                await running.wait()

    async def _send_bookmark(self, **metadata: Any) -> None:
        if self._request.query.get("allowWatchBookmarks") in TRUE:
            metadata = {"resourceVersion": str(self._version), "creationTimestamp": None, **metadata}
            kind = {"kind": self._kind.name, "apiVersion": self._kind.group_version}
            await self._send(("BOOKMARK", {**kind, "metadata": metadata}))

    async def _send(self, *events: tuple[str, RawObject]) -> None:
        if events:
            lines = "".join(json.dumps({"type": kind, "object": raw}) + "\n" for kind, raw in events)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self._response.write(lines.encode())
