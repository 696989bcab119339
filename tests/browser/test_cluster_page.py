"""The page of all nodes in a real browser, with its whole server and an API server's protocol behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpushare_agent.core.kube.client import open_kube_api
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.kubectl.dashboard import ClusterPage
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from tests.agent.support_agent import open_agent
from tests.browser.support_browser import WHY_NOT, Browser, open_browser
from tests.cli.support_cluster_page import HOSTILE, served_cluster, waiting
from tests.cluster.support_kube import running
from tests.extender.support_extender import FakeCluster, raw_pod
from tests.sandbox.support_sandbox import container, open_test_node, pod

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
        # No agent answers in this cluster: the browser reports each open node's.
        problems = [message for message in problems if "/nodes/" not in message]
        assert not problems, problems


async def open_all(browser: Browser) -> None:
    await browser.script("for (const one of document.querySelectorAll('details')) one.open = true")
    await browser.wait("document.querySelectorAll('#waiting tbody tr').length === 2 * (8 + 8 + 2 + 3)")
    await browser.wait("document.querySelectorAll('#nodes tbody tr').length === 18")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 900, 1024, 1920])
async def test_it_is_whole_readable_and_named(width: int, scheme: str) -> None:
    """Nothing is wider than the window, every text has contrast, and whatever a screen reader announces has a name."""
    async with opened(width=width, prefers_color_scheme=scheme) as (browser, _):
        await open_all(browser)
        assert await browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert await browser.script("return lowContrast()") == []
        assert await browser.script("return unlabelled()") == []
        assert await browser.script("return landmarks()") == []
        thin = await browser.script(
            "return [...document.querySelectorAll('th, td, caption')].filter((one) => one.innerText.length > 12"
            " && one.checkVisibility() && one.clientWidth < 100).map((one) => one.innerText)"
        )
        assert thin == []
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
        assert "80/100 allocated" in first and "6 of 16 GiB" in first
        assert "team-a/one: 30 GPU cores, 2 GiB" in first and "team-a/two: 50 GPU cores, 4 GiB" in first
        ill = await browser.script(rows, "[data-node='gpu-3'] tbody .badge")
        assert ill == ["✕ Unhealthy", "‖ Cordoned: fan is noisy"]
        assert "Xid 79 (GPU has fallen off the bus)" in (await browser.script(rows, "[data-node='gpu-3'] tbody tr"))[0]
        assert await browser.script(rows, "[data-node='gpu-3'] summary .badge") == [
            "✕ 1 GPU unhealthy",
            "‖ 1 GPU cordoned",
        ]


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


async def test_a_wrong_request_has_its_remedy_and_no_green_gpu() -> None:
    """What to write is there before the pod is opened, and with it what would let it start now."""
    async with opened() as (browser, cluster):
        mistaken = waiting("bytes", (30, 8))
        mistaken["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-memory"] = "4Gi"
        mistaken["spec"]["containers"][0]["resources"]["requests"]["tencent.com/vcuda-memory"] = "4Gi"
        cluster.put("pods", mistaken)
        for name, words in (
            ("needs-nine", ("900 GPU cores", "Write tencent.com/vcuda-core: 800 or less.", "ask for 700 cores (200 fewer)")),
            ("bytes", ("vcuda-core: 30, tencent.com/vcuda-memory: 4Gi", "Write tencent.com/vcuda-memory: 16 for")),
        ):  # fmt: skip
            entry = f"document.querySelector(\"[data-uid='uid-{name}']\")"
            await browser.wait(f"{entry}?.textContent.includes({json.dumps(words[1])})")
            await browser.click(f"[data-uid='uid-{name}'] summary")
            await browser.wait(f"{entry}.querySelectorAll('tbody tr').length === 21")
            text = await browser.script(f"return {entry}.innerText")
            assert all(one in text for one in words), text
            assert "✓ fits" not in text and "1073741824" not in text
            assert await browser.script(f"return {entry}.querySelectorAll('[data-chosen]').length") == 0


async def test_it_follows_the_cluster() -> None:
    """A pod that is bound leaves the waiting ones and stands on its node, while the page is open."""
    async with opened() as (browser, cluster):
        cluster.put("pods", raw_pod("needs-much", (20, 65), namespace="team-b", node="gpu-2"))
        await browser.wait("document.querySelectorAll('.waits').length === 1")
        await browser.wait("document.querySelector(\"[data-node='gpu-2']\").textContent.includes('2 pods')")


async def test_a_nodes_cordon_and_its_failure_are_marked() -> None:
    """On the node, in the number of nodes, and where a pod waits for it."""
    async with opened() as (browser, cluster):
        cluster.change("nodes", "gpu-1", lambda raw: raw.setdefault("spec", {}).update(unschedulable=True))
        cluster.change(
            "nodes",
            "gpu-2",
            lambda raw: raw["status"].update(conditions=[{"type": "Ready", "status": "Unknown"}]),
        )
        for name, words in (("gpu-1", "‖ Node cordoned"), ("gpu-2", "✕ Node not ready")):
            await browser.wait("document.querySelector(arguments[0]).innerText === arguments[1]",
                               f"[data-node='{name}'] .badge", words)  # fmt: skip
        assert await browser.script("return document.querySelector('.tile').textContent") == (
            "Nodes31 not ready, 1 cordoned"
        )
        cluster.put("pods", waiting("small", (1, 1)))
        await browser.wait("document.querySelector(\"[data-uid='uid-small'] summary\")")
        await browser.click("[data-uid='uid-small'] summary")
        text = "document.querySelector(\"[data-uid='uid-small']\").innerText"
        await browser.wait(f"{text}.includes('gpu-1 the node is cordoned')")
        assert "gpu-2 the node is not ready" in await browser.script(f"return {text}")


async def test_an_api_server_that_ended_is_reported() -> None:
    """Within seconds, with the time since and the reason; what was seen stays."""
    async with opened() as (browser, cluster):
        await browser.wait("document.querySelector('#live').textContent === '● Live'")
        await cluster.stop_listening()
        await browser.wait(
            "document.querySelector('#live').textContent.startsWith('Stale: no answer of the API server')"
        )
        assert "no connection to the API server" in await browser.script("return document.querySelector('#live').title")
        assert await browser.script("return document.querySelectorAll('.node').length") == 3


async def test_a_nodes_use_and_its_dashboard_come_through_the_api_server() -> None:
    """Of an open node: beside what is allocated; its dashboard is a link, and says why it is empty where nothing answers."""
    async with (
        open_test_node() as node,
        open_agent(node, "--sample-period-s=0.1") as agent,
        open_kube_api(kubeconfig=node.paths.kubeconfig) as api,
        open_browser() as browser,
    ):
        port = await agent.parts.observability.web.wait_listening()
        node.api.add_agent(node.name, AgentServer(url=f"http://127.0.0.1:{port}", log=node.paths.agent_log))
        await node.start_pods(pod("share", container(cores=30, blocks=8)))
        page, ports = ClusterPage(Settings(), ResourceNames(), port=0), list[int]()
        async with running(lambda: page.run(api, on_listening=ports.append)):
            await node.wait_until(lambda: bool(ports), "the page listens")
            await browser.open(f"http://localhost:{ports[0]}/")
            await browser.wait("document.querySelector('.node summary')")
            await browser.click(".node summary")
            row = "document.querySelector('.node tbody tr').innerText"
            await browser.wait(f"{row}.includes('0 % in use')")
            text = await browser.script(f"return {row}")
            assert "30/100 allocated" in text and "2 of 24 GiB allocated" in text
            await browser.click(".node-body a")
            await browser.wait("document.querySelector('#ready')?.textContent === '✓ Ready'")
            await browser.wait("document.querySelectorAll('.containers tbody tr').length === 1")
            await browser.wait("document.querySelector('.curve-sm').getAttribute('d') !== null")
            assert await browser.script("return document.querySelector('#all-nodes a').href") == (
                f"http://localhost:{ports[0]}/"
            )
            assert [entry["message"] for entry in await browser.log()] == []
            await browser.open(f"http://localhost:{ports[0]}/nodes/other/")
            await browser.wait(
                "document.querySelector('#node-facts').textContent.includes('no node \"other\" is known')"
            )


async def test_a_lost_server_is_reported() -> None:
    """With the time since; what was seen stays."""
    async with open_browser() as browser:
        async with served_cluster() as (url, _):
            await browser.open(url)
            await browser.wait("document.querySelectorAll('.node').length === 3")
        await browser.wait("document.querySelector('#live').textContent.includes('No contact for')")
        assert await browser.script("return document.querySelectorAll('.node').length") == 3
