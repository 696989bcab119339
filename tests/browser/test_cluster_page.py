"""The page of all nodes in a real browser, with its whole server and an API server's protocol behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.browser.support_browser import WHY_NOT, Browser, open_browser
from tests.cli.support_cluster_page import HOSTILE, served_cluster
from tests.extender.support_extender import FakeCluster, raw_pod

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

ACCESSIBILITY = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
TAB, ENTER = "\ue004", "\ue007"


@asynccontextmanager
async def opened(*, width: int = 1280, **media: str) -> AsyncIterator[tuple[Browser, FakeCluster]]:
    async with served_cluster() as (url, cluster), open_browser(width=width) as browser:
        await browser.prefer(**media)
        await browser.open(url)
        await browser.wait(
            "document.querySelectorAll('.node').length === 3 && document.querySelectorAll('.waits').length === 2"
        )
        await browser.script(ACCESSIBILITY)
        yield browser, cluster
        problems = [entry["message"] for entry in await browser.log()]
        assert not problems, problems


async def open_all(browser: Browser) -> None:
    await browser.script("for (const one of document.querySelectorAll('details')) one.open = true")
    await browser.wait("document.querySelectorAll('#waiting tbody tr').length === 2 * (8 + 8 + 2 + 3)")
    await browser.wait("document.querySelectorAll('#nodes tbody tr').length === 18")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 900, 1400])
async def test_it_is_whole_readable_and_named(width: int, scheme: str) -> None:
    """Nothing is wider than the window, every text has contrast, and whatever a screen reader announces has a name."""
    async with opened(width=width, prefers_color_scheme=scheme) as (browser, _):
        await open_all(browser)
        assert await browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert await browser.script("return lowContrast()") == []
        assert await browser.script("return unlabelled()") == []
        tiles = await browser.script(
            "return [...document.querySelectorAll('.tile')].map((one) => one.getBoundingClientRect().top)"
        )
        assert len({tiles.count(top) for top in tiles}) == 1
        clipped = await browser.script(
            "return [...document.querySelectorAll('.scrolling, .panel')]"
            ".filter((one) => one.scrollWidth > one.clientWidth + 1)"
        )
        assert clipped == []
        await browser.script("scrollTo(0, document.documentElement.scrollHeight)")
        assert await browser.script("return document.querySelector('#live').getBoundingClientRect().top") >= 0


async def test_nodes_and_their_gpus() -> None:
    """A node opens to its GPUs with the pods on each; what is out of service is said, and sums are of all nodes."""
    async with opened() as (browser, _):
        await open_all(browser)
        tiles = await browser.script("return [...document.querySelectorAll('.tile')].map((one) => one.textContent)")
        assert tiles[:4] == ["Nodes3", "GPUs181 unhealthy, 1 cordoned", "Pods with GPUs3", "Waiting pods2"]
        rows = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
        first = (await browser.script(rows, "[data-node='gpu-1'] tbody tr"))[0]
        assert "80/100 cores" in first and "6 of 16 GiB" in first
        assert "team-a/one: 30 GPU cores, 2 GiB" in first and "team-a/two: 50 GPU cores, 4 GiB" in first
        ill = await browser.script(rows, "[data-node='gpu-3'] tbody .badge")
        assert ill == ["✕ Unhealthy", "‖ Cordoned: fan is noisy"]


async def test_the_namespace_and_the_text_filter() -> None:
    """Both leave the nodes that have something of it, and say so where none has."""
    async with opened() as (browser, _):
        await browser.script(
            "const one = document.querySelector('#namespace'); one.value = 'team-a'; one.dispatchEvent(new Event('change'))"
        )
        assert await browser.script(
            "return [...document.querySelectorAll('.node-name')].map((one) => one.textContent)"
        ) == ["gpu-1"]
        assert await browser.script("return document.querySelector('#waiting-empty').innerText") == (
            "No pod of namespace team-a waits for GPUs."
        )
        assert await browser.script("return document.querySelector('#nodes-count').textContent") == "1 of 3 nodes"
        await browser.script("document.querySelector('#filter').focus()")
        await browser.press(*"zz")
        assert await browser.script("return document.querySelector('#nodes-empty').innerText") == (
            "No node with a pod of namespace team-a has “zz” in its name, GPU model or pods."
        )


async def test_why_a_pod_waits_gpu_by_gpu() -> None:
    """By keyboard: what the scheduler wrote, as text and cut, and what each GPU lacks."""
    async with opened() as (browser, _):
        await browser.script("document.querySelector(\"[data-uid='uid-needs-much'] summary\").focus()")
        mark = "return getComputedStyle(document.querySelector('.waits .decision-name'), '::before').content"
        assert "▸" in await browser.script(mark)
        await browser.press(ENTER)
        await browser.wait("document.querySelectorAll(\"[data-uid='uid-needs-much'] tbody tr\").length === 21")
        text = await browser.script("return document.querySelector(\"[data-uid='uid-needs-much']\").innerText")
        assert "team-b/needs-much" in text and "20 GPU cores, 16.3 GiB" in text
        assert f"The scheduler: 0/3 nodes are available: {HOSTILE}" in text and "x" * 1001 not in text
        assert "too small, with 16 GiB in all" in text and "out of service" in text
        assert await browser.script("return document.querySelectorAll('main img').length") == 0


async def test_it_follows_the_cluster() -> None:
    """A pod that is bound leaves the waiting ones and stands on its node, while the page is open."""
    async with opened() as (browser, cluster):
        cluster.put("pods", raw_pod("needs-much", (20, 65), namespace="team-b", node="gpu-2"))
        await browser.wait("document.querySelectorAll('.waits').length === 1")
        await browser.wait("document.querySelector(\"[data-node='gpu-2']\").textContent.includes('2 pods')")


async def test_a_lost_server_is_reported() -> None:
    """With the time since; what was seen stays."""
    async with open_browser() as browser:
        async with served_cluster() as (url, _):
            await browser.open(url)
            await browser.wait("document.querySelectorAll('.node').length === 3")
        await browser.wait("document.querySelector('#live').textContent.includes('No contact for')")
        assert await browser.script("return document.querySelectorAll('.node').length") == 3
