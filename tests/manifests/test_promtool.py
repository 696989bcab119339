"""`promtool check metrics` has nothing to say about a full node's scrape."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from aiohttp import ClientSession

from tests.agent.support_agent import open_agent, poll_until
from tests.docs.generated import full_metrics
from tests.sandbox.support_sandbox import container, open_test_node, pod
from tests.support_process import output_of

PROMTOOL = shutil.which("promtool")
COMPLAINTS_ABOUT_GPU_MANAGERS_NAMES = {
    # Its users' dashboards ask for this name, which it gave to a gauge.
    'container_gpu_memory_total non-counter metrics should not have "_total" suffix',
}

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")


async def complaints(text: str) -> tuple[int, set[str]]:
    """promtool's exit code and lines, without those that are known."""
    assert PROMTOOL is not None
    code, out, err = await output_of(PROMTOOL, "check", "metrics", stdin=asyncio.subprocess.PIPE, given=text.encode())
    said = {line for line in (out + err).decode().splitlines() if line.strip()}
    # dcgm-exporter's label is modelName.
    theirs = {line for line in said if line.startswith("DCGM_") and "camelCase" in line}
    return code, said - COMPLAINTS_ABOUT_GPU_MANAGERS_NAMES - theirs


async def test_the_scrape_of_an_embedded_node_is_clean() -> None:
    """Pods with shares, a whole GPU and a refusal, GPUs that are used: nothing to say."""
    async with (
        open_test_node() as node,
        open_agent(node, "--sample-period-s=0.05", "--simulated.gpus=3", "--isolations-allowed=vcuda,none") as agent,
    ):
        for name, one in (
            ("a", container(cores=30, blocks=8)),
            ("b", container(cores=50, blocks=16)),
            ("whole", container(cores=100)),
        ):
            node.api.create_pod(pod(name, one))
        await node.wait_running("a", "b", "whole")
        await node.settle_pod(pod("refused", container(cores=10)))
        pid = node.kubelet.runtime.living(node.uid_of("a"))[0].pid
        used = [{"pid": who, "gpu": gpu, "sm": 0.5, "memory_bytes": 2**30} for gpu in range(3) for who in (pid, 1)]
        node.paths.usage.write_text(json.dumps({"processes": used}))
        await poll_until(
            lambda: (
                agent.parts.observability.usage.current is not None
                and len(agent.parts.observability.usage.current.unattributed) == 3
            ),
            "use",
        )
        async with ClientSession() as session:
            port = await agent.parts.observability.web.wait_listening()
            async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                text = await response.text()
    assert 'gpushare_container_memory_used_bytes{container="main",gpu="' in text
    assert await complaints(text) in ((0, set()), (3, set()))


async def test_the_check_finds_what_is_wrong() -> None:
    """A gauge that is called a total is told: the check above can fail."""
    code, said = await complaints("# HELP x_total X.\n# TYPE x_total gauge\nx_total 1\n")
    assert code == 3
    assert said == {'x_total non-counter metrics should not have "_total" suffix'}


async def test_every_series_that_there_can_be_is_clean() -> None:
    """Those too that the embedded node never shows: NVLink, ECC, Xid errors, MPS."""
    assert (await complaints(full_metrics()))[1] == set()
