"""The whole agent on the embedded node: the display socket, /graph and /usage, and the debug pages tell of a real pod."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpclib.client import Channel

from gpushare_agent.core.kit.sockets import connectable_path, is_served
from gpushare_agent.core.wire.display import GpuDisplayStub, UsageResponse
from gpushare_agent.core.wire.google.protobuf import Empty
from tests.agent.support_agent import InnerAgent, open_agent, poll_until
from tests.sandbox.support_sandbox import container, open_test_node, pod


async def _json(agent: InnerAgent, path: str) -> Any:
    status, text = await agent.page(path)
    assert status == 200, path
    return json.loads(text)


async def _usages(path: Path) -> UsageResponse:
    with connectable_path(path) as name:
        channel = Channel(path=name)
        try:
            return await GpuDisplayStub(channel).print_usages(Empty())
        finally:
            channel.close()


async def test_a_pod_shows_on_the_display_the_web_port_and_the_debug_pages() -> None:
    """The same pod, by UID, with what it asked for, its user and its cluster; its secrets on none of them."""
    async with open_test_node() as node, open_agent(node) as agent:
        asked = container(cores=30, blocks=8)
        asked["env"] = [{"name": "SUBMITTER", "value": "ann"}, {"name": "PASSWORD", "value": "hunter-2"}]
        raw = pod("train", asked)
        raw["metadata"]["annotations"] = {"clusterName": "blue", "note": "hunter-2"}
        await node.start_pods(raw)
        uid = node.uid_of("train")

        display = agent.parts.observability.display
        assert display is not None
        await poll_until(
            lambda: is_served(display.path) and agent.parts.node.pods.get(uid) is not None, "the display serves"
        )
        stat = (await _usages(node.paths.display_socket)).usage[uid]
        assert (stat.project, stat.user, stat.cluster) == ("default", "ann", "blue")
        assert (round(stat.spec["main"].gpu, 3), stat.spec["main"].mem) == (0.3, 2048.0)
        assert len(stat.stat["main"].dev) == 1

        assert (await _json(agent, "/usage"))["usage"][uid]["spec"] == {"main": {"gpu": 0.3, "mem": 2048.0}}
        graph = (await _json(agent, "/graph"))["graph"]
        assert graph.count("allocatableCores: 70,") == 1
        assert graph.startswith("ROOT:")

        (held,) = (await _json(agent, "/debug/allocations"))["allocations"]
        assert (held["pod"], len(held["devices"]["vcore"])) == ("train", 1)
        pods = await _json(agent, "/debug/pods")
        assert [row["name"] for row in pods["pods"]] == ["train"]
        assert "hunter-2" not in json.dumps(pods)
        assert (await _json(agent, "/debug/settings"))["settings"]["node_name"]["value"] == node.name
    assert not node.paths.display_socket.exists()


async def test_the_agent_runs_without_display() -> None:
    """It is off where its setting is empty."""
    async with open_test_node() as node, open_agent(node, "--display.socket=") as agent:
        assert agent.parts.observability.display is None
        assert not node.paths.display_socket.exists()
