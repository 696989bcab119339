"""`python -m tests.browser.screenshots DIRECTORY`: the pictures of the documents: a node's page, the page of all nodes, and
`top`; in two minutes.

The pages show what whole agents answer: real sockets, containers with processes, admissions by the embedded kubelet. Of the
node's page the time is rehearsed: the containers' load and the curves run twenty times as fast until the curves are full.
`top` shows a document that is made up, so its picture is always the same. inputs.json has digests of what the pages'
pictures are made of; tests/docs/test_pictures.py says when they have changed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.report import ReportedNode
from gpushare_agent.sandbox.workload import WorkloadPlayer
from tests.agent.support_agent import InnerAgent, open_agent
from tests.browser.support_browser import Browser, open_browser
from tests.browser.top_picture import top_picture
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod
from tests.sandbox.support_sandbox_cli import ROOT, document_of, live
from tests.support_process import running_process

DIRECTORY = ROOT / "docs" / "screenshots"
INPUTS = "inputs.json"
COMMAND = "python -m tests.browser.screenshots docs/screenshots"
TOPOLOGY = Path(__file__).parent.parent / "data" / "topology" / "v100-x8-cube-mesh.txt"
SPEED = 20
HISTORY_S = 900.0
SAMPLE_S = 0.1
SETTLED_WITHIN_S = 120.0
SETTLES_S = 3.0
"""More than the page of all nodes needs to have read each agent."""
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
CLUSTER = (
    "--node-name=gpu",
    "--nodes=4",
    "--extender",
    "--node-gpus=6x81920,4x24576,4x24576,2x49152",
    "--placement.share-policy=spread",
)
CLUSTER_PODS = (
    ("research", "train-six-gpus", 600, 0, 0.9),
    ("nlp", "chat-70b", 200, 0, 0.7),
    ("nlp", "embedder", 25, 24, 0.5),
    ("nlp", "reranker", 35, 40, 0.8),
    ("vision", "detector", 30, 32, 0.6),
    ("vision", "segmenter", 40, 48, 0.4),
    ("research", "notebook-anna", 50, 64, 0.1),
    ("research", "notebook-ben", 60, 32, 0.0),
    ("batch", "transcode", 60, 16, 0.9),
    ("batch", "etl", 60, 72, 0.3),
)
"""Namespace, name, GPU cores, blocks of memory, and the part of that which each uses."""
CLUSTER_WAITS = ("nlp", "chat-405b", 60, 240, 0.9)
CLUSTER_WIDTH, CLUSTER_HEIGHT = 900, 1600
"""As wide as a document shows it nearly whole."""
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
        # Programs may go on after it; after 79 the GPU has left the bus.
        GpuFaults(node.paths.faults, len(gpus)).report_xid(FAILED_GPU, 48)
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
    await browser.script(WITHOUT_SOCKET)
    picture = await browser.screenshot(most_height=most_height, part=part)
    path.write_bytes(indexed(await browser.script(INDEXED, base64.b64encode(picture).decode())))
    sys.stdout.write(f"{path}: {path.stat().st_size // 1000} kB\n")


WITHOUT_SOCKET = """
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(/ --socket [^` ]+/, "");
"""
"""An agent with the default socket does not name it."""

INDEXED = """
    const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
    return createImageBitmap(new Blob([bytes])).then((picture) => {
      const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
      canvas.drawImage(picture, 0, 0);
      const pixels = new Uint32Array(canvas.getImageData(0, 0, picture.width, picture.height).data.buffer);
      const counts = new Map();
      for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
      const colours = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
      const parts = (colour) => [0, 8, 16].map((shift) => (colour >> shift) & 255);
      const palette = colours.slice(0, 256).map(parts);
      const places = new Map(colours.map((colour, place) => [colour, place < 256 ? place : nearest(parts(colour))]));
      function nearest(colour) {
        const far = palette.map((one) => one.reduce((sum, part, n) => sum + (part - colour[n]) ** 2, 0));
        return far.indexOf(Math.min(...far));
      }
      let text = "";
      for (const pixel of pixels) text += String.fromCharCode(places.get(pixel));
      return { width: picture.width, palette: palette.flat(), places: btoa(text) };
    });
"""
"""A picture in its 256 most frequent colours, the others as the nearest of them: half as large, and no eye sees it."""


def indexed(found: Mapping[str, Any]) -> bytes:
    """As a PNG (ISO/IEC 15948) with a palette."""
    places, width = base64.b64decode(found["places"]), found["width"]
    rows = [b"\0" + places[start : start + width] for start in range(0, len(places), width)]
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", bytes(found["palette"])), (b"IDAT", zlib.compress(b"".join(rows), 9)))
    chunks = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in (*parts, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@asynccontextmanager
async def busy_cluster() -> AsyncIterator[str]:
    """The address of `kubectl gpushare dashboard` on a sandbox with pods on each node, and one that waits."""
    manifests = []
    for namespace, name, cores, blocks, load in (*CLUSTER_PODS, CLUSTER_WAITS):
        asked = container(cores=cores, blocks=blocks) if blocks else container(cores=cores)
        made = pod(name, asked, annotations={"sandbox.gpushare-agent/load": str(load)})
        made["metadata"]["namespace"] = namespace
        manifests.append(made)
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder:
        state, pods = Path(folder) / "s", Path(folder) / "pods.yaml"
        pods.write_text(yaml.safe_dump_all(manifests))
        program = "import sys; from gpushare_agent.__main__ import run_plugin; sys.exit(run_plugin())"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": str(state / "kubeconfig")}
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", program, "dashboard", "--port=0")
        async with live(state, *CLUSTER, "--apply", pods):
            async with asyncio.timeout(SETTLED_WITHIN_S):
                while not state.joinpath("control.sock").exists() or not _is_settled(
                    (await document_of(state))["pods"]
                ):
                    await asyncio.sleep(SAMPLE_S)
            async with running_process(*command, env=environment, stdout=pipe) as page:
                assert page.stdout is not None
                found = re.search(r"http://\S+(?=/)", (await page.stdout.readline()).decode())
                assert found is not None
                yield found[0]


def _is_settled(pods: Sequence[Any]) -> bool:
    """One waits, and says why."""
    phases = sorted(one["phase"] for one in pods if one["phase"] != "Pending" or one["message"])
    return phases == ["Pending"] + ["Running"] * len(CLUSTER_PODS)


OPEN = """
    const name = arguments[0];
    const found = [...document.querySelectorAll("details")].filter((one) => one.textContent.includes(name)).at(-1);
    if (found) found.open = true;
    return Boolean(found) && document.documentElement.scrollHeight;
"""
"""Opens what has this name in it, and nothing around it."""


async def take_cluster(directory: Path) -> None:
    async with busy_cluster() as url, open_browser(width=CLUSTER_WIDTH) as browser:
        await browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        await browser.open(url)
        await browser.wait("document.body.innerText.includes(arguments[0])", CLUSTER_WAITS[1])
        # The use of GPUs comes from the agents, a while after the nodes.
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while not await browser.script(OPEN, CLUSTER_WAITS[1]):
                await asyncio.sleep(SAMPLE_S)
            await asyncio.sleep(SETTLES_S)
        await browser.script("scrollTo(0, 0); document.activeElement.blur()")
        for colours in ("light", "dark"):
            await browser.prefer(prefers_color_scheme=colours, prefers_reduced_motion="reduce")
            await take(browser, directory / f"cluster-{colours}.png", most_height=CLUSTER_HEIGHT)


async def take_node(directory: Path) -> None:
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


PAGES = ROOT / "gpushare_agent" / "core" / "web" / "dashboard"
SCENES: Mapping[str, tuple[str, object]] = {
    "node": ("index.html", (PODS, REFUSED, FAILED_GPU, WIDE, NARROW, NARROW_HEIGHT, MOST_HEIGHT, LAST_ROW_OF_GPUS)),
    "cluster": ("cluster.html", (CLUSTER, CLUSTER_PODS, CLUSTER_WAITS, CLUSTER_WIDTH, CLUSTER_HEIGHT)),
}
"""The page of each, and what is shown on it."""
COMMENTS = {
    ".css": re.compile(r"/\*.*?\*/", re.S),
    ".js": re.compile(r"/\*.*?\*/|^\s*//[^\n]*", re.S | re.M),
    ".html": re.compile(r"<!--.*?-->", re.S),
}


def inputs_of(scene: str) -> dict[str, str]:
    """Digests of what a picture is made of, by name: the page's files without comments and blank lines, and the scene."""
    page, shown = SCENES[scene]
    found, waiting = {"the scene": _digest(repr(shown))}, [page]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = (PAGES / name).read_text(encoding="utf-8")
        waiting += re.findall(r'(?<=dashboard/)[\w.-]+(?=")|(?<=from "\./)[\w.-]+(?=")', text)
        found[name] = _digest("".join(COMMENTS.get(Path(name).suffix, COMMENTS[".html"]).sub("", text).split()))
    return dict(sorted(found.items()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


async def main(directory: Path, scenes: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    inputs = directory / INPUTS
    made = json.loads(inputs.read_text(encoding="utf-8")) if inputs.exists() else {}
    if "top" in scenes:
        (directory / "top.svg").write_text(top_picture(), encoding="utf-8")
    for scene, take_scene in (("node", take_node), ("cluster", take_cluster)):
        if scene in scenes:
            await take_scene(directory)
            made[scene] = inputs_of(scene)
    inputs.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:] or ("top", "node", "cluster")))
