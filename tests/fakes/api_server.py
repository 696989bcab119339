"""The fake API server is the sandbox's own; here is a client of it over HTTP, as one of a real API server would be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.support_deadline import DEADLINE_S

PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class Client:
    def __init__(self, api: EmbeddedApiServer, session: aiohttp.ClientSession) -> None:
        self.api = api
        self.session = session

    async def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Any:
        """Status and JSON body."""
        text = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if text is not None else {}
        async with self.session.request(
            method, self.api.url + path, data=text, headers=headers, params=query
        ) as answer:
            return answer.status, await answer.json()

    @asynccontextmanager
    async def watch(self, path: str = "/api/v1/pods", **query: str) -> AsyncIterator[Watch]:
        async with self.session.get(self.api.url + path, params={"watch": "true", **query}) as answer:
            assert answer.status == 200
            yield Watch(answer)


class Watch:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(DEADLINE_S):
            event = json.loads(await self._answer.content.readline())
        return event["type"], event["object"]

    async def rest(self) -> list[tuple[str, dict[str, Any]]]:
        async with asyncio.timeout(DEADLINE_S):
            events = [json.loads(line) async for line in self._answer.content]
        return [(e["type"], e["object"]) for e in events]


@asynccontextmanager
async def open_client(**settings: Any) -> AsyncIterator[Client]:
    async with (
        EmbeddedApiServer(**settings) as api,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), headers=api.headers) as session,
    ):
        yield Client(api, session)
