"""The live stream of a whole agent: what an admission tells its readers, and that readers do not hold up its end."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import ClientResponse, ClientSession

from tests.support_agent import DEADLINE_S, log_lines, open_agent, open_child, wait_running, wait_until
from tests.support_sandbox import container, open_test_node, pod


async def next_event(answer: ClientResponse) -> tuple[str, dict[str, Any]]:
    fields: dict[str, str] = {}
    async with asyncio.timeout(DEADLINE_S):
        while line := (await answer.content.readline()).decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
    return fields["event"], json.loads(fields["data"])


async def test_an_admission_is_reported_with_its_container_and_its_decision() -> None:
    """The document first, then the container, its GPU's sums and why it is there."""
    async with open_test_node() as node, open_agent(node) as agent, ClientSession(read_bufsize=2**20) as session:
        port = await agent.parts.observability.web.wait_listening()
        async with session.get(f"http://127.0.0.1:{port}/api/v1/stream") as answer:
            name, document = await next_event(answer)
            assert (name, document["containers"]) == ("node", [])
            node.api.create_pod(pod("told", container(cores=30, blocks=8)))
            await wait_running(node, "told")
            found: dict[str, Any] = {}
            while not {"cards", "containers", "decisions"} <= set(found):
                found |= (await next_event(answer))[1]
        uid = node.api.pod("default", "told")["metadata"]["uid"]
        assert list(found["containers"]) == [f"{uid}/main"]
        assert [one["pod"] for one in found["decisions"]] == ["told"]
        [held] = found["containers"][f"{uid}/main"]["cards"]
        assert found["cards"][held["uuid"]]["cores"]["allocated"] == 30


async def test_open_streams_do_not_hold_up_the_end() -> None:
    """SIGTERM ends the agent and every stream, also with readers that go on reading."""
    async with open_test_node() as node, open_child(node) as child, AsyncExitStack() as stack:
        await wait_until(node, lambda: log_lines(node, "web_listening"), "the web address")
        [line] = log_lines(node, "web_listening")
        session = await stack.enter_async_context(ClientSession(read_bufsize=2**20))
        url = f"http://127.0.0.1:{line['port']}/api/v1/stream"
        answers = [await stack.enter_async_context(session.get(url)) for _ in range(5)]
        for answer in answers:
            assert (await next_event(answer))[0] == "node"
        child.terminate()
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 0
        for answer in answers:
            async with asyncio.timeout(DEADLINE_S):
                await answer.read()
