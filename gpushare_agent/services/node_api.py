"""`/api/v1/node`, `/api/v1/history` and `/api/v1/decisions`: what is known of the node, as JSON for programs.

The format is docs/api.md. Reads only. Whoever reaches the address may read, as with the metrics; a query is read
strictly, so that a misspelt parameter is told and not ignored. The changes as they come are services/live_stream.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from gpushare_agent.model.decision_records import DecisionRecord
from gpushare_agent.services.node_document import NodeSnapshot, node_document
from gpushare_agent.services.web_answers import BadQueryError, Number, Word, bad_query, json_answer, read_query

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.services.web import Handler, Route

MOST_DECISIONS = 500
DECISIONS_UNLESS_ASKED = 50
MOST_NUMBER = 10**15
_NODE: Mapping[str, Number | Word] = {}
_HISTORY: Mapping[str, Number | Word] = {"only": Word(most_characters=10, choices=("cards", "containers"))}
_DECISIONS: Mapping[str, Number | Word] = {
    "namespace": Word(most_characters=63),
    "pod": Word(most_characters=253),
    "limit": Number(default=DECISIONS_UNLESS_ASKED, least=1, most=MOST_DECISIONS),
    "after": Number(default=0, least=0, most=MOST_NUMBER),
    "number": Number(default=0, least=1, most=MOST_NUMBER),
}


class Decisions(Protocol):
    """The last decisions, newest first."""

    def newest(
        self, limit: int, *, namespace: str = "", pod: str = "", after: int = 0
    ) -> tuple[DecisionRecord, ...]: ...


class NodeApi:
    """`snapshot` and `history` are asked anew for each request."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], NodeSnapshot],
        history: Callable[[], Mapping[str, Any]],
        decisions: Decisions,
        kept_decisions: int,
    ) -> None:
        self._snapshot = snapshot
        self._history = history
        self._decisions = decisions
        self._kept_decisions = kept_decisions

    def routes(self) -> list[Route]:
        return [
            ("/api/v1/node", _reading(_NODE, lambda _: node_document(self._snapshot()))),
            ("/api/v1/history", _reading(_HISTORY, self._history_document)),
            ("/api/v1/decisions", _reading(_DECISIONS, self._decisions_document)),
        ]

    def _history_document(self, query: Mapping[str, Any]) -> Mapping[str, Any]:
        document = self._history()
        left_out = {"cards": "containers", "containers": "cards"}.get(query["only"])
        return {name: value for name, value in document.items() if name != left_out}

    def _decisions_document(self, query: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {"namespace": query["namespace"], "pod": query["pod"]}
        if query["number"]:
            found = self._decisions.newest(self._kept_decisions, **named, after=query["number"] - 1)
            return {"decisions": [decision_document(one) for one in found if one.number == query["number"]]}
        found = self._decisions.newest(query["limit"], **named, after=query["after"])
        return {"decisions": [decision_document(one) for one in found]}


def decision_document(record: DecisionRecord) -> dict[str, Any]:
    """The fields of DecisionRecord, enums as their values."""
    return {**asdict(record), "outcome": record.outcome.value}


def _reading(known: Mapping[str, Number | Word], document: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Handler:
    async def show(request: web.Request) -> web.StreamResponse:
        try:
            query = read_query(request.query, known)
        except BadQueryError as error:
            return bad_query(request, error)
        return json_answer(request, document(query))

    return show
