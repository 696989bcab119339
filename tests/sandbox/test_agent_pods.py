"""The agents of a sandbox as pods: found, asked and read as on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gpushare_agent.core.cli.command_line import AGENT_NAMESPACE, KUBECTL, Invocation
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.kubectl.agent_client import open_agent
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from tests.fakes.api_server import PODS, Client, open_client
from tests.sandbox.support_sandbox import pod

AGENTS = "/api/v1/namespaces/gpushare-system/pods"


@asynccontextmanager
async def open_agent_server(seen: list[web.Request]) -> AsyncIterator[str]:
    """A web server in an agent's place, which keeps the requests."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"asked": request.path_qs})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def call_by(program: str) -> Invocation:
    options = argparse.Namespace(agent_namespace=AGENT_NAMESPACE)
    return Invocation(program=program, options=options, flags=(), rest=(), environ={})


async def test_a_person_finds_the_agent_of_a_node_and_asks_it(short_dir: Path) -> None:
    """As `top --node` and `kubectl gpushare` do: by label and node, through the proxy, with the query; the token of the API
    server stays there."""
    seen: list[web.Request] = []
    async with open_client() as client, open_agent_server(seen) as url:
        client.api.add_agent("desk", AgentServer(url=url, log=short_dir / "agent.log"))
        client.api.write_kubeconfig(short_dir / "kubeconfig")
        settings = load_settings(["--kubeconfig", str(short_dir / "kubeconfig")], {}).settings
        for node, program in (("desk", "gpushare-agent"), ("", KUBECTL)):
            async with open_agent(call_by(program), settings, node) as agent:
                assert await agent.get("/api/v1/node", {"a": "b c"}) == {"asked": "/api/v1/node?a=b+c"}
        with pytest.raises(AgentError, match="no agent runs on node other"):
            async with open_agent(call_by(KUBECTL), settings, "other"):
                pass
    assert all("Authorization" not in request.headers for request in seen)


async def test_only_agents_are_asked_by_proxy() -> None:
    """Not any port of this machine: 400 for other pods and names; 503 while the agent is away."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        client.api.add_agent("desk", AgentServer(url="http://127.0.0.1:1", log=Path("/none")))
        assert (await client.call("GET", f"{PODS}/a:22/proxy/"))[0] == 400
        assert (await client.call("GET", f"{PODS}/gpushare-agent-desk/proxy/x"))[0] == 400
        async with client.session.get(f"{client.api.url}{AGENTS}/gpushare-agent-desk:22/proxy/x") as answer:
            assert answer.status == 503


async def log_of(client: Client, **query: str) -> tuple[int, str]:
    async with client.session.get(f"{client.api.url}{AGENTS}/gpushare-agent-desk/log", params=query) as answer:
        return answer.status, await answer.text()


async def test_the_log_of_an_agent_is_read_whole_or_its_end(short_dir: Path) -> None:
    """Empty before the first line; by lines from the end, and by bytes from the beginning."""
    log = short_dir / "agent.log"
    async with open_client() as client:
        client.api.add_agent("desk", AgentServer(url="http://127.0.0.1:1", log=log))
        assert await log_of(client) == (200, "")
        log.write_text("one\ntwo\nthree")
        assert await log_of(client) == (200, "one\ntwo\nthree")
        assert await log_of(client, tailLines="2") == (200, "two\nthree")
        assert await log_of(client, tailLines="0") == (200, "")
        assert await log_of(client, limitBytes="5") == (200, "one\nt")
        assert (await log_of(client, previous="true"))[0] == 400
        assert (await log_of(client, container="other"))[0] == 400


async def test_an_agents_pod_is_no_kubelets_and_comes_back(short_dir: Path) -> None:
    """As a mirror pod on a cluster: who deletes it gets another, of another UID."""
    async with open_client() as client:
        first = client.api.add_agent("desk", AgentServer(url="http://127.0.0.1:1", log=short_dir / "agent.log"))
        assert client.api.pods_by_node.of("desk") == []
        assert (await client.call("DELETE", f"{AGENTS}/gpushare-agent-desk"))[0] == 200
        [second] = client.api.pods()
        assert second["metadata"]["name"] == first["metadata"]["name"]
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
