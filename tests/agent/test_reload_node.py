"""What an agent that reads its settings again (SIGHUP) still knows: what it counted, what it decided, what was used."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from aiohttp import ClientSession

from gpushare_agent.sandbox.node import EmbeddedNode
from tests.support_agent import DEADLINE_S, log_lines, open_child, poll_until, wait_registered, wait_running
from tests.support_sandbox import container, open_test_node, pod

ADMITTED = 'gpushare_admissions_total{outcome="allocated",reason="",resource="tencent.com/vcuda-core"}'


async def _life(node: EmbeddedNode, number: int) -> str:
    """The address of the agent's web port in its life of this number, from 1 on."""
    await poll_until(lambda: len(log_lines(node, "web_listening")) >= number, "the web port")
    return f"http://127.0.0.1:{log_lines(node, 'web_listening')[number - 1]['port']}"


async def _get(url: str) -> Any:
    async with asyncio.timeout(DEADLINE_S), ClientSession() as session, session.get(url) as answer:
        return await answer.json() if "/api/" in url else await answer.text()


async def _admitted(url: str) -> list[str]:
    return [line for line in (await _get(f"{url}/metrics")).splitlines() if line.startswith(ADMITTED)]


async def test_a_reload_keeps_counters_decisions_and_history() -> None:
    """Counters do not go back, numbers of decisions go on, and the curves have the points from before."""
    async with open_test_node() as node, open_child(node, "--sample-period-s=0.1") as child:
        url = await _life(node, 1)
        node.api.create_pod(pod("before", container(cores=30, blocks=10)))
        await wait_running(node, "before")
        admitted = await _admitted(url)
        assert admitted == [f"{ADMITTED} 1.0"]
        while (history := await _get(f"{url}/api/v1/history?only=cards"))["at"] is None:
            await asyncio.sleep(0.05)
        child.send_signal(signal.SIGHUP)
        url = await _life(node, 2)
        # The kubelet may not have seen the end of the first life's streams yet: what it shows counts once both came anew.
        await poll_until(lambda: len(log_lines(node, "device_plugin_registered")) >= 4, "both registered again")
        await wait_registered(node)
        assert await _admitted(url) == admitted
        assert (await _get(f"{url}/api/v1/history?only=cards"))["at"] >= history["at"]
        node.api.create_pod(pod("after", container(cores=30, blocks=10)))
        await wait_running(node, "before", "after")
        found = (await _get(f"{url}/api/v1/decisions"))["decisions"]
        assert [(one["number"], one["pod"]) for one in found] == [(2, "after"), (1, "before")]
