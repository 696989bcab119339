"""`python -m tests.browser.screenshots DIRECTORY`: the dashboard's pictures for the documents, made of the embedded node.

Everything shown is the whole agent's: real sockets, containers with processes, admissions by the embedded kubelet. Only the
time is rehearsed: the containers' load and the curves run forty times as fast until the curves are full. Where pngquant is
installed, the pictures are made smaller by it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.report import ReportedNode
from gpushare_agent.sandbox.workload import WorkloadPlayer
from tests.agent.support_agent import InnerAgent, open_agent
from tests.browser.support_browser import Browser, open_browser
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod

TOPOLOGY = Path(__file__).parent.parent / "data" / "topology" / "v100-x8-cube-mesh.txt"
SPEED = 40
HISTORY_S = 900.0
SAMPLE_S = 0.1
PODS = (
    ("research", "train-two-gpus", 200, 0),
    ("nlp", "chat-70b", 100, 0),
    ("vision", "detector", 30, 32),
    ("vision", "segmenter", 40, 48),
    ("nlp", "embedder", 25, 24),
    ("nlp", "reranker", 35, 40),
    ("research", "notebook-anna", 50, 64),
    ("research", "notebook-ben", 40, 32),
    ("batch", "transcode", 20, 16),
    ("batch", "etl", 60, 72),
)
REFUSED = ("research", "train-one-more", 100, 0)
FAILED_GPU = 7
WIDE, NARROW, NARROW_HEIGHT = 1440, 360, 1500
MOST_HEIGHT = 2600
LAST_ROW_OF_GPUS = """
    const boxes = [...document.querySelectorAll("#gpus > *")].map((one) => one.getBoundingClientRect());
    const row = boxes.filter((box) => box.top === boxes.at(-1).top), edge = 12;
    const [left, top] = [row[0].left + scrollX - edge, row[0].top + scrollY - edge];
    return {x: left, y: top, width: row.at(-1).right - row[0].left + 2 * edge, height: row[0].height + 2 * edge};
"""
"""What README.md shows: with the GPU that failed."""
ROWS = "document.querySelectorAll('.containers tbody tr').length >= arguments[0]"


@asynccontextmanager
async def busy_node() -> AsyncIterator[tuple[NodeUnderTest, InnerAgent]]:
    """A node with running pods, a refused one and an ill GPU, whose curves are full."""
    flags = (
        f"--simulated.topology={TOPOLOGY}",
        "--simulated.gpu-name=Tesla V100-SXM2-32GB",
        "--simulated.gpu-memory-mib=32768",
        "--placement.share-policy=spread",
        f"--sample-period-s={SAMPLE_S}",
        f"--usage.idle-period-s={SAMPLE_S}",  # nobody reads before the picture is taken
        f"--usage.history-s={HISTORY_S}",
    )
    async with open_test_node(node_name="gpu-node-1") as node, open_agent(node, *flags) as agent:
        for namespace, name, cores, blocks in (*PODS, REFUSED):
            node.api.create_pod(pod(name, container(cores=cores, blocks=blocks)), namespace)
            await node.wait_until(lambda key=(namespace, name): _phase(node, *key), f"{name} to be settled")
        gpus = agent.parts.node.inventory.current.gpus
        started_at = time.time()

        def rehearsed_time() -> float:
            return started_at + (time.time() - started_at) * SPEED

        agent.parts.observability.usage_history.clock = rehearsed_time
        shown = ReportedNode(node=node, gpus=gpus, names=ResourceNames(vcore=CORE, vmemory=MEMORY))
        player = WorkloadPlayer(shown, node.paths.usage, clock=rehearsed_time)
        while rehearsed_time() - started_at < HISTORY_S * 0.93:
            player.play()
            await asyncio.sleep(SAMPLE_S)
        agent.parts.observability.usage_history.clock = lambda: rehearsed_at
        rehearsed_at = rehearsed_time()
        GpuFaults(node.paths.faults, len(gpus)).report_xid(FAILED_GPU, 79)
        yield node, agent


def _phase(node: NodeUnderTest, namespace: str, name: str) -> bool:
    phase = (node.api.find_pod(namespace, name) or {}).get("status", {}).get("phase")
    return phase in ("Running", "Failed")


async def take(
    browser: Browser, path: Path, *, most_height: int = MOST_HEIGHT, part: dict[str, float] | None = None
) -> None:
    await browser.script(
        "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    )
    path.write_bytes(await browser.screenshot(most_height=most_height, part=part))
    if (tool := shutil.which("pngquant")) is not None:
        shrink = await asyncio.create_subprocess_exec(
            tool, "--force", "--speed=1", "--quality=60-95", "--output", str(path), str(path)
        )
        await shrink.wait()
    sys.stdout.write(f"{path}: {path.stat().st_size // 1000} KB\n")


async def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    async with busy_node() as (_, agent), open_browser(width=WIDE) as browser:
        await browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        await browser.open(f"http://127.0.0.1:{await agent.parts.observability.web.wait_listening()}")
        await browser.wait(ROWS, len(PODS))
        await browser.wait("document.querySelector('.curve-sm').getAttribute('d')")
        await browser.wait("document.querySelector('.badge[data-kind=bad]')")
        await browser.click("li:has([data-kind=bad]) summary")
        await browser.wait("document.querySelectorAll('.decisions tbody tr').length >= 8")
        await browser.script("scrollTo(0, 0); document.activeElement.blur()")
        for colours in ("light", "dark"):
            await browser.prefer(prefers_color_scheme=colours, prefers_reduced_motion="reduce")
            await take(browser, directory / f"dashboard-{colours}.png")
            await take(browser, directory / f"gpus-{colours}.png", part=await browser.script(LAST_ROW_OF_GPUS))
        await browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        await browser.size(NARROW, NARROW_HEIGHT)
        await take(browser, directory / "dashboard-narrow.png", most_height=NARROW_HEIGHT)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
