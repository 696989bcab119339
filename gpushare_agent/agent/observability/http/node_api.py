"""`/api/v1/node`, `/history`, `/changes` and `/decisions`: what is known of the node, as JSON for programs.

The format is docs/reference/api.md. Reads only. Any client that reaches the address may read, as with the metrics; a query
is read strictly, so that a misspelt parameter is an error. No answer keeps the loop for longer than some milliseconds: a
long one is encoded in slices, and once for all requests. A client that has the node's present document gets no body.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, to_builtins

from gpushare_agent.agent.admission.outcomes import DecisionLog
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, node_document
from gpushare_agent.agent.observability.saved_past import SavedPast
from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.core.kit.http_answers import (
    BadQueryError,
    JsonBody,
    Number,
    Word,
    bad_query,
    encode,
    join_in_slices,
    read_query,
)
from gpushare_agent.core.model.decision_records import DecisionRecord
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.usage import ProcessFacts
from gpushare_agent.core.node_report.documents import NodeDocument

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.core.kit.http_answers import Handler, Route

MOST_DECISIONS = 500
DECISIONS_UNLESS_ASKED = 50
MOST_NUMBER = 10**15
MOST_KEPT_BYTES = 4 * 1024 * 1024
"""A longer history is encoded again for each request."""
_NODE: Mapping[str, Number | Word] = {"processes": Word(most_characters=5, choices=("true", "false"))}
_HISTORY: Mapping[str, Number | Word] = {
    "only": Word(most_characters=10, choices=("gpus", "containers")),
    "container": Word(most_characters=320),
    "span": Word(most_characters=3, choices=("day",)),
}
_CHANGES: Mapping[str, Number | Word] = {}
_DECISIONS: Mapping[str, Number | Word] = {
    "namespace": Word(most_characters=63),
    "pod": Word(most_characters=253),
    "limit": Number(default=DECISIONS_UNLESS_ASKED, least=1, most=MOST_DECISIONS),
    "after": Number(default=0, least=0, most=MOST_NUMBER),
    "number": Number(default=0, least=1, most=MOST_NUMBER),
}


class NodeApi(Struct, kw_only=True, eq=False):
    """`snapshot` is read for each request. State owned: the last answers, while they are current, and the JSON of the
    decisions that were requested last."""

    snapshot: Callable[[], NodeSnapshot]
    history: UsageHistory
    past: SavedPast
    decisions: DecisionLog
    kept_decisions: int
    describe: Callable[[Collection[int], float], Awaitable[Mapping[int, ProcessFacts]]] | None = None
    """What is known of processes that began before a moment of CLOCK_BOOTTIME. Raises Unavailable."""
    _node: dict[bool, tuple[NodeSnapshot, JsonBody]] = field(default_factory=dict)
    _curves: dict[tuple[str, str], tuple[object, JsonBody]] = field(default_factory=dict)
    _encoded: dict[int, tuple[DecisionRecord, bytes]] = field(default_factory=dict)

    def routes(self) -> list[Route]:
        return [
            ("/api/v1/node", _reading(_NODE, self._node_body)),
            ("/api/v1/history", _reading(_HISTORY, self._history_body)),
            ("/api/v1/changes", _reading(_CHANGES, self._changes_body)),
            ("/api/v1/decisions", _reading(_DECISIONS, self._decisions_body)),
        ]

    async def _node_body(self, query: Mapping[str, Any]) -> JsonBody:
        snapshot, has_processes = self.snapshot(), query["processes"] == "true"
        # SnapshotCache hands out the same one until a round or a change, so one document serves all readers of it.
        known = self._node.get(has_processes)
        if known is None or known[0] is not snapshot:
            described = await self._described(snapshot) if has_processes else None
            document = node_document(snapshot, described)
            await asyncio.sleep(0)  # each half of the work takes tens of milliseconds for thousands of processes
            known = snapshot, _node_answer(document)
            # The other kind's, which nobody may ask for again, is not kept beyond its moment.
            self._node = {is_of: one for is_of, one in self._node.items() if one[0] is snapshot} | {
                has_processes: known
            }
        return known[1]

    async def _described(self, snapshot: NodeSnapshot) -> Mapping[int, ProcessFacts]:
        if self.describe is None or snapshot.usage is None:
            return {}
        try:
            return await self.describe(snapshot.pids, snapshot.usage.sampled_boot_s)
        except Unavailable:  # names are a help: the document is shown without them
            return {}

    async def _history_body(self, query: Mapping[str, Any]) -> JsonBody:
        only, span, container = query["only"], query["span"], query["container"]
        history = self.past.day if span else self.history
        # One container's is asked for rarely, and not kept. The day moves on also without a new point.
        asked, version = (span, only), (history.version, history.now())
        known = None if container else self._curves.get(asked)
        if known is not None and known[0] == version:
            return known[1]
        pieces = history.pieces(gpus=only != "containers", containers=only != "gpus", container=container)
        body = JsonBody(await join_in_slices(pieces))
        if not container:
            # Before the length is known: a history that has grown past the limit must not leave its former body behind.
            self._curves.pop(asked, None)
            if len(body.text) <= MOST_KEPT_BYTES:
                self._curves[asked] = version, body
        return body

    async def _changes_body(self, _query: Mapping[str, Any]) -> JsonBody:
        pieces = (encode({uuid: found})[1:-1] for uuid, found in self.past.changes.newest().items())
        return JsonBody(b'{"changes":{' + await join_in_slices(pieces, b",") + b"}}")

    async def _decisions_body(self, query: Mapping[str, Any]) -> JsonBody:
        named = {"namespace": query["namespace"], "pod": query["pod"]}
        if query["number"]:
            # The log has no index; its numbers grow, so all from this one on contain it.
            newer = self.decisions.newest(self.kept_decisions, **named, after=query["number"] - 1)
            found: Sequence[DecisionRecord] = [one for one in newer if one.number == query["number"]]
        else:
            found = self.decisions.newest(query["limit"], **named, after=query["after"])
        return JsonBody(b'{"decisions":[' + await join_in_slices(self._decision_pieces(found)) + b"]}")

    def _decision_pieces(self, records: Sequence[DecisionRecord]) -> Iterator[bytes]:
        for index, record in enumerate(records):
            # The page polls the newest decisions every two seconds, and hardly any is new.
            known = self._encoded.get(record.number)
            if known is None or known[0] is not record:
                known = self._encoded[record.number] = record, encode(to_builtins(record))
                if len(self._encoded) > MOST_DECISIONS:
                    # The oldest: a dictionary keeps the order of insertion.
                    del self._encoded[next(iter(self._encoded))]
            yield b"," + known[1] if index else known[1]


def _node_answer(document: NodeDocument) -> JsonBody:
    """Its tag covers everything but `at`, the time of the request."""
    fields = to_builtins(document)
    # With `at` in it the tag would change each second, and no poll be answered 304.
    at = encode(fields.pop("at"))
    rest = encode(fields)
    return JsonBody(b'{"at":' + at + b"," + rest[1:], tag=hashlib.blake2b(rest, digest_size=16).hexdigest())


def _reading(known: Mapping[str, Number | Word], make: Callable[[Mapping[str, Any]], Awaitable[JsonBody]]) -> Handler:
    async def show(request: web.Request) -> web.StreamResponse:
        try:
            query = read_query(request.query, known)
        except BadQueryError as error:
            return bad_query(request, error)
        return await (await make(query)).answer(request)

    return show
