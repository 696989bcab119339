"""The page of all nodes in a real browser, with its whole server and an API server's protocol behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpushare_agent.core.kube.client import open_kube_api
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.kubectl.dashboard import ClusterPage
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from tests.agent.support_agent import open_agent
from tests.browser.support_browser import WHY_NOT, Browser, open_browser
from tests.cli.support_cluster_page import (
    HOSTILE,
    Agents,
    answering_agents,
    out_of_service,
    served_cluster,
    uses,
    waiting,
)
from tests.cluster.support_kube import running
from tests.extender.support_extender import FakeCluster, eventually, raw_node, raw_pod
from tests.fakes.api_server import raw_status
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


TILES = "return [...document.querySelectorAll('.node')].map((one) => one.dataset.node)"
ROWS = (
    "return [...document.querySelectorAll('.of-namespaces tbody tr')].map((row) =>"
    " [...row.children].map((cell) => cell.innerText.trim()))"
)
LONG = "row remapping failed, and NVLink 3 is inactive, and retired pages are pending; " * 3


async def assert_readable(browser: Browser) -> None:
    """Nothing is wider than the window, every text has contrast, and whatever a screen reader announces has a name."""
    await browser.script(ACCESSIBILITY)
    assert await browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert [one for one in await browser.script("return lowContrast()") if "only" not in one] == []
    assert await browser.script("return [...unlabelled(), ...landmarks(), ...faintMarks()]") == []


async def choose(browser: Browser, name: str, value: str) -> None:
    await browser.script(
        "const one = document.getElementById(arguments[0]); one.value = arguments[1];"
        " one.dispatchEvent(new Event('change'))",
        name,
        value,
    )


@asynccontextmanager
async def busy(*, width: int = 1280, **media: str) -> AsyncIterator[tuple[Browser, FakeCluster, Agents, str]]:
    """Of the three nodes two agents answer: gpu-1 says that half is in use, gpu-3 that nothing is."""
    async with served_cluster() as (url, cluster), answering_agents(cluster, "gpu-1", "gpu-2", "gpu-3") as agents:
        agents.documents["gpu-1"] = uses("gpu-1", dict.fromkeys(range(8), 0.5), team_a=0.4, team_b=None)
        agents.documents["gpu-3"] = uses("gpu-3", {0: 0.0, 1: 0.0})
        cluster.holds("gpu-2", ("uid-three", 0, 100, 64))
        cluster.put_quota({"team-a": {"vcore": 100}, "batch": {"quota": {}}})
        async with open_browser(width=width, height=2000) as browser:
            await browser.prefer(**media)
            await browser.open(url)
            await browser.wait("document.querySelector(\"[data-node='gpu-1']\").innerText.includes('50 % in use')")
            await browser.wait("document.querySelector(\"[data-node='gpu-2']\").innerText.includes('use not known')")
            yield browser, cluster, agents, url


async def test_use_is_there_without_opening_a_node() -> None:
    """What an agent does not answer is not known and said; numbers that cannot be are cut or left out."""
    async with busy() as (browser, _, agents, _):
        strip = "return document.querySelector(\"[data-node='gpu-1'] .strip\").ariaLabel"
        assert (await browser.script(strip)).startswith("GPU 0: 80/100 allocated, 50 % in use; GPU 1: 0/100")
        await browser.wait("document.querySelectorAll('.of-namespaces tbody tr').length === 3")
        await browser.wait(
            "document.querySelector('#totals-count').textContent.includes('without 1 of 2 nodes, which have not answered')"
        )
        lies = uses("gpu-1", {0: 9.5, 1: -1, 2: 0.5}, team_a=1e9, x_y=0.5)
        lies["gpus"][2]["usage"] = {"sm_ratio": "all", "memory_used_bytes": 1 << 62}
        agents.documents["gpu-1"] = {**lies, "mig_gpus": [{"index": 1, "name": HOSTILE, "texts": ["x" * 100_000]}]}
        agents.documents["gpu-3"] |= {"at": 1000, "agent": {"sampled_at": 100 * 9}}
        await browser.script("document.querySelector(\"[data-node='gpu-1'] details\").open = true")
        await browser.wait("document.querySelector(\"[data-node='gpu-1'] ul.quiet\").innerText.includes('xxx')")
        row = "return document.querySelectorAll(\"[data-node='gpu-1'] tbody tr\")[arguments[0]].innerText"
        assert "100 % in use" in await browser.script(row, 0)
        assert "in use" not in await browser.script(row, 1)
        assert "16 GiB in use" in await browser.script(row, 2) and "% in use" not in await browser.script(row, 2)
        assert (
            len(await browser.script("return document.querySelector(\"[data-node='gpu-1'] ul.quiet\").innerText")) < 700
        )
        assert await browser.count("main img") == 0
        agents.documents["gpu-2"] = {**uses("gpu-2", {0: 0.5}), "containers": [None]}
        await browser.script("window.now = Date.now; Date.now = () => window.now() + 31000")
        await browser.wait(
            "document.querySelector(\"[data-node='gpu-2'] .node-body\").textContent.includes('another form')"
        )
        await browser.script("Date.now = window.now")
        # What was sampled long ago says how long.
        await browser.wait(
            "document.querySelector(\"[data-node='gpu-3']\").innerText.includes('0 % in use (1 min ago)')"
        )
        assert await browser.count(".node[data-stale]") == 1
        for width, scheme in ((375, "dark"), (1024, "light"), (1920, "dark")):
            await browser.size(width, 2000)
            await browser.prefer(prefers_color_scheme=scheme)
            await assert_readable(browser)


async def test_few_agents_are_asked_at_once_and_none_while_nobody_looks() -> None:
    """Those that have answered make room for the next."""
    names = [f"node-{number:02}" for number in range(20)]
    async with (
        served_cluster([raw_node(name) for name in names], [waiting("w", (900, 0))]) as (url, cluster),
        answering_agents(cluster, *names) as agents,
        open_browser(height=3000) as browser,
    ):
        agents.documents = {name: uses(name, {0: 0.5}) for name in names}
        agents.answer.clear()
        await browser.open(url)
        await eventually(lambda: len(agents.asked) == 4)
        await browser.wait("document.querySelectorAll('.node').length === 20")
        # The browser tells which are in sight with a frame: all others wait for their turn by now.
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done)))"
        await browser.script(f"return new Promise((done) => {frames})")
        await browser.script(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true}); const asks = fetch;"
            " window.asked = 0; window.fetch = (path, ...how) => { window.asked += /^nodes/.test(path);"
            " return asks(path, ...how); }"
        )
        agents.answer.set()
        await browser.wait(
            "[...document.querySelectorAll('.node')].filter((one) => /in use/.test(one.innerText)).length === 4"
        )
        assert await browser.script("return window.asked") == 0
        await browser.script("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        await browser.wait(
            "[...document.querySelectorAll('.node')].filter((one) => /in use/.test(one.innerText)).length === 20"
        )
        assert sorted(agents.asked) == names and agents.most == 4


async def test_agents_that_hang_leave_the_others_their_turn() -> None:
    """Those that did not answer last time take half of the turns at most."""
    names = [f"node-{number}" for number in range(6)]
    silent = names[:4]
    async with (
        served_cluster([raw_node(name) for name in names], [waiting("w", (900, 0))]) as (url, cluster),
        answering_agents(cluster, *names) as agents,
        open_browser(height=3000) as browser,
    ):
        agents.documents = {name: uses(name, {0: 0.5}) for name in names[4:]}
        await browser.open(url)
        for words, count in (("use not known", 4), ("% in use", 2)):
            shown = (
                "[...document.querySelectorAll('.node')].filter((one) => one.innerText.includes(arguments[0])).length"
            )
            await browser.wait(f"{shown} === arguments[1]", words, count)
        agents.silent = silent
        agents.answer.clear()
        agents.asked.clear()
        await browser.script("const now = Date.now; Date.now = () => now() + 60000")
        await eventually(lambda: set(agents.asked) >= set(names[4:]) and len({*silent} & {*agents.asked}) == 2)


async def test_the_order_and_the_kinds_of_nodes() -> None:
    """Each order puts the most first; a kind leaves the nodes of it, and says so where there are none."""
    async with busy() as (browser, cluster, _, _):
        cluster.change("pods", "team-b/needs-much", lambda raw: raw["status"].update(nominatedNodeName="gpu-2"))
        await browser.wait("document.querySelector(\"[data-node='gpu-2']\").innerText.includes('1 pod waits for it')")
        for order, first in (
            ("name", "gpu-1"), ("free", "gpu-1"), ("allocated", "gpu-2"),
            ("use", "gpu-1"), ("state", "gpu-3"), ("waiting", "gpu-2"),
        ):  # fmt: skip
            await choose(browser, "order", order)
            assert (await browser.script(TILES))[0] == first, order
        await choose(browser, "kind", "problems")
        assert await browser.script(TILES) == ["gpu-3"]
        await choose(browser, "kind", "free")
        assert sorted(await browser.script(TILES)) == ["gpu-1", "gpu-2"]
        await choose(browser, "kind", "problems")
        await choose(browser, "namespace", "team-a")
        empty = "return document.querySelector('#nodes-empty').innerText"
        assert await browser.script(empty) == "No node with a problem with a pod of namespace team-a."


async def test_the_totals_of_namespaces_and_their_quota() -> None:
    """Allocated, in use and of the quota; also without pods; sorted by keyboard; unknown where it cannot be read, or
    as compute under MPS."""
    async with busy() as (browser, cluster, _, url):
        await browser.wait("document.querySelector('.of-namespaces tbody')?.innerText.includes('40')")
        assert await browser.script(ROWS) == [
            ["batch", "0", "0", "0", "–", "0 GiB", "–", "0 %no GPUs, none allowed"],
            ["team-a", "2", "0", "80", "40", "6 GiB", "1 GiB", "80 %80 of 100 vcore"],
            ["team-b", "1", "2", "100", "–", "16 GiB", "1 GiB", "no limit"],
        ]
        await browser.script("document.querySelectorAll('.of-namespaces thead button')[7].focus()")
        await browser.press(ENTER)
        assert [row[0] for row in await browser.script(ROWS)] == ["team-a", "batch", "team-b"]
        sorted_by = "return document.querySelector('.of-namespaces [aria-sort=descending]').innerText"
        assert "Quota used" in await browser.script(sorted_by)
    async with served_cluster() as (url, cluster), open_browser() as browser:
        cluster.script.answers["/api/v1/namespaces/kube-system/configmaps"] = (403, raw_status(403, "no right"))
        await browser.open(url)
        await browser.wait(
            "document.querySelector('#totals-count').textContent.includes('quota not known: cannot list')"
        )
        assert {row[7] for row in await browser.script(ROWS)} == {"not known"}


async def test_a_long_reason_has_three_lines_until_it_is_opened() -> None:
    """By keyboard; a screen reader has all of it. What is read again closes nothing."""
    node = out_of_service(raw_node("gpu-1"))
    annotations = node["metadata"]["annotations"]
    annotations[GPUS_ANNOTATION] = annotations[GPUS_ANNOTATION].replace("Xid 79 (GPU has fallen off the bus)", LONG)
    async with served_cluster([node], [waiting("w", (900, 0))]) as (url, cluster), open_browser(width=375) as browser:
        await browser.open(url)
        await browser.wait("document.querySelector('.node')")
        await browser.click(".node summary")
        height = (
            "const one = document.querySelector('summary.reason > span');"
            " return one.offsetHeight / parseFloat(getComputedStyle(one).lineHeight)"
        )
        await browser.wait("document.querySelector('summary.reason > span')?.offsetHeight")
        assert round(await browser.script(height), 1) == 3
        assert (await browser.of("summary.reason", "textContent")) == LONG[:256]
        await browser.of("summary.reason", "focus()")
        await browser.press(ENTER)
        await browser.wait("document.querySelector('[open] > summary.reason')")
        assert await browser.script(height) > 3.5
        cluster.change("nodes", "gpu-1", lambda raw: raw.setdefault("spec", {}).update(unschedulable=True))
        await browser.wait("document.querySelector('.node .badges').innerText.includes('Node cordoned')")
        assert await browser.script("return document.activeElement.matches('[open] > summary.reason')")
        await assert_readable(browser)


@pytest.mark.parametrize("width", [375, 1024])
async def test_the_head_covers_nothing_that_has_the_focus(width: int) -> None:
    """Going backwards from the end, whatever the head says; in a low window the head does not stay at all."""
    async with opened(width=width) as (browser, _):
        await open_all(browser)
        await browser.size(width, 600)
        await browser.script(
            "document.querySelector('#live').textContent = 'Stale: API server silent for 12 min '.repeat(3)"
        )
        await browser.script("scrollTo(0, 1e6); [...document.querySelectorAll('footer a')].at(-1).focus()")
        covered = (
            "const head = [...document.querySelectorAll('.top, .status')].find((one) => one.getClientRects().length"
            " && getComputedStyle(one).position === 'sticky'), one = document.activeElement;"
            " const [{top, height}, {bottom}] = [one.getBoundingClientRect(), head.getBoundingClientRect()];"
            " const isExempt = head.contains(one) || one.matches('.skip, body') || height > innerHeight - bottom;"
            " return isExempt || top >= bottom ? '' : `${nameOf(one)} ${top} ${bottom}`"
        )
        steps = len(await browser.script("return stops()"))
        for _ in range(steps):
            assert await browser.script(covered) == ""
            await browser.press_with_shift(TAB)
        await browser.size(width, 400)
        heads = "return [...document.querySelectorAll('.top, .status')].map((one) => getComputedStyle(one).position)"
        assert "sticky" not in await browser.script(heads)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_colour_of_a_pod_can_be_seen(scheme: str) -> None:
    """Its edge on the bar and on its own ground, and text on it."""
    async with opened(prefers_color_scheme=scheme) as (browser, _):
        await browser.script(
            "const bar = document.body.appendChild(document.createElement('div')); bar.className = 'bar';"
            " for (let hue = 0; hue < 24; hue += 1) {"
            " const share = bar.appendChild(document.createElement('div')); share.className = `share hue-${hue}`;"
            " share.style.setProperty('--size', 0.04); share.append(document.createElement('i'), 'text');"
            " share.firstChild.className = 'fill'; }"
        )
        await assert_readable(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 740, 900, 1024, 1920])
async def test_it_is_whole_readable_and_named(width: int, scheme: str) -> None:
    """Nothing is wider than the window, every text has contrast, and whatever a screen reader announces has a name."""
    async with opened(width=width, prefers_color_scheme=scheme) as (browser, _):
        await open_all(browser)
        await assert_readable(browser)
        thin = await browser.script(
            "return [...document.querySelectorAll('th, td, caption:not(.unseen)')].filter((one) => one.innerText.length > 12"
            " && one.checkVisibility() && one.clientWidth < 100).map((one) => one.innerText)"
        )
        assert thin == []
        # A short name has one line, also next to two badges.
        name = "const one = document.querySelector(\"[data-node='gpu-3'] .node-name\"), style = getComputedStyle(one);"
        assert await browser.script(f"{name} return one.clientHeight < 1.9 * parseFloat(style.lineHeight)")
        # The arrow of a column's order stands next to its name, and the filter next to the choices.
        assert await browser.of("[aria-sort=ascending] button", "offsetHeight") < 30
        if width >= 900:
            tops = await browser.each(".choices > *", "getBoundingClientRect().top")
            assert max(tops) - min(tops) < 10
        tiles = await browser.each(".tile", "getBoundingClientRect().top")
        assert len({tiles.count(top) for top in tiles}) == 1
        clipped = await browser.script(
            "return [...document.querySelectorAll('.scrolling, .panel')]"
            ".filter((one) => one.scrollWidth > one.clientWidth + 1)"
        )
        assert clipped == []
        await browser.script("scrollTo(0, document.documentElement.scrollHeight)")
        assert await browser.of("#live", "getBoundingClientRect().top") >= 0


async def test_nodes_and_their_gpus() -> None:
    """A node opens to its GPUs with the pods on each; what is out of service is said, and sums are of all nodes."""
    async with opened() as (browser, _):
        await open_all(browser)
        tiles = await browser.each(".tile", "textContent")
        assert tiles[:4] == ["Nodes3", "GPUs181 unhealthy, 1 cordoned", "Pods with GPUs3", "Waiting pods2"]
        rows = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
        first = (await browser.script(rows, "[data-node='gpu-1'] tbody tr"))[0]
        assert "80/100 allocated" in first and "6 of 16 GiB" in first
        assert "team-a/one: 30 GPU cores, 2 GiB" in first and "team-a/two: 50 GPU cores, 4 GiB" in first
        ill = await browser.script(rows, "[data-node='gpu-3'] tbody .badge")
        assert ill == ["✕ Unhealthy", "‖ Cordoned"]
        assert await browser.script(rows, "[data-node='gpu-3'] tbody .reason") == [
            "Xid 79 (GPU has fallen off the bus)",
            "fan is noisy",
        ]
        assert "Xid 79 (GPU has fallen off the bus)" in (await browser.script(rows, "[data-node='gpu-3'] tbody tr"))[0]
        assert await browser.script(rows, "[data-node='gpu-3'] summary .badge") == [
            "✕ 1 GPU unhealthy",
            "‖ 1 GPU cordoned",
        ]


async def test_a_narrow_page_keeps_names_whole_and_texts_straight() -> None:
    """Badges leave a short name its line, and no mark of a GPU's name turns the numbers behind it around."""
    node = out_of_service(raw_node("bad-1"))
    reported = json.loads(node["metadata"]["annotations"][GPUS_ANNOTATION])
    for gpu in reported["gpus"]:
        gpu["name"] = "\u202egpu\u2066"
    node["metadata"]["annotations"][GPUS_ANNOTATION] = json.dumps(reported)
    async with served_cluster([node], [waiting("w", (1, 1))]) as (url, _), open_browser(width=320) as browser:
        await browser.open(url)
        await browser.wait("document.querySelector('.node')")
        size = "const one = document.querySelector('.node-name'); return [one.offsetHeight, getComputedStyle(one).fontSize]"
        height, font = await browser.script(size)
        assert height < 2 * float(font.removesuffix("px"))
        facts = await browser.of(".node summary > .quiet", "textContent")
        assert facts.startswith("2 × \ufffdgpu\ufffd · 0/200 allocated")


async def test_the_namespace_and_the_text_filter() -> None:
    """Both leave the nodes that have something of it, and say so where none has."""
    async with opened() as (browser, _):
        await choose(browser, "namespace", "team-a")
        assert await browser.each(".node-name", "textContent") == ["gpu-1"]
        assert await browser.of("#waiting-empty", "innerText") == ("No pod of namespace team-a waits for GPUs.")
        assert await browser.of("#nodes-count", "textContent") == "1 of 3 nodes"
        await browser.of("#filter", "focus()")
        await browser.press(*"zz")
        assert await browser.of("#nodes-empty", "innerText") == (
            "No node with a pod of namespace team-a has “zz” in its name, GPU model or pods."
        )


async def test_why_a_pod_waits_gpu_by_gpu() -> None:
    """By keyboard: what the scheduler wrote, as text and cut, and what each GPU lacks."""
    async with opened() as (browser, _):
        await browser.script("document.querySelector(\"[data-uid='uid-needs-much'] summary\").focus()")
        mark = "return getComputedStyle(document.querySelector('.waits .decision-name'), '::before').content"
        assert "▸" in await browser.script(mark)
        row = await browser.script("return document.querySelector(\"[data-uid='uid-needs-much'] summary\").innerText")
        assert "Waiting 2 h" in row and "Write tencent.com/vcuda-memory: 64 (16 GiB) or less." in row
        await browser.press(ENTER)
        await browser.wait("document.querySelectorAll(\"[data-uid='uid-needs-much'] tbody tr\").length === 21")
        text = await browser.script("return document.querySelector(\"[data-uid='uid-needs-much']\").innerText")
        assert "team-b/needs-much" in text and "20 GPU cores, 16.3 GiB" in text
        assert f"The scheduler: 0/3 nodes are available: {HOSTILE}" in text and "x" * 1001 not in text
        assert "too small, with 16 GiB in all" in text and "out of service" in text
        assert await browser.count("main img") == 0


async def test_what_an_open_pod_lacks_follows_the_cluster() -> None:
    """Half a minute later, with what changed meanwhile."""
    async with opened() as (browser, cluster):
        pod = "document.querySelector(\"[data-uid='uid-needs-much']\")"
        await browser.script(f"{pod}.querySelector('details').open = true")
        await browser.wait(f"{pod}.innerText.includes('to start')")
        cluster.put_quota({"team-b": {"quota": {}}})
        await browser.script("const now = Date.now; Date.now = () => now() + 31000")
        await browser.wait(f"{pod}.innerText.includes('the quota of namespace team-b allows no GPUs at all')")


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
        await browser.wait("document.querySelector(\"[data-node='gpu-2']\").textContent.includes('2\u00a0pods')")


async def test_the_keyboard_goes_on_where_what_it_was_in_has_gone() -> None:
    """In the next pod or node, or at the heading."""
    focused = "document.activeElement.closest('[data-uid], [data-node], h2')"
    async with opened() as (browser, cluster):
        for gone, after in (("needs-nine", "uid-needs-much"), ("needs-much", "waiting-title")):
            await browser.script("document.querySelector(`[data-uid='uid-${arguments[0]}'] summary`).focus()", gone)
            cluster.remove("pods", f"team-b/{gone}")
            await browser.wait(f"[{focused}?.dataset.uid, {focused}?.id].includes(arguments[0])", after)
        for gone, after in (("gpu-2", "gpu-3"), ("gpu-3", "gpu-1")):
            await browser.script("document.querySelector(`[data-node='${arguments[0]}'] summary`).focus()", gone)
            cluster.remove("nodes", gone)
            await browser.wait(f"{focused}?.dataset.node === arguments[0]", after)


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
        assert await browser.of(".tile", "textContent") == ("Nodes31 not ready, 1 cordoned")
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
        assert "no connection to the API server" in await browser.of("#live", "title")
        assert await browser.count(".node") == 3


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
            colour = "[...document.querySelector('.strip b, .share').classList].find((one) => one.startsWith('hue-'))"
            own = await browser.wait(colour)
            await browser.click(".node summary")
            row = "document.querySelector('.node tbody tr').innerText"
            await browser.wait(f"{row}.includes('0 % in use')")
            text = await browser.script(f"return {row}")
            assert "30/100 allocated" in text and "2 of 24 GiB allocated" in text
            await browser.click(".node-body a")
            await browser.wait("document.querySelector('#ready')?.textContent === '✓ Ready'")
            await browser.wait("document.querySelectorAll('.containers tbody tr').length === 1")
            await browser.wait("document.querySelector('.curve-sm').getAttribute('d') !== null")
            assert await browser.wait(colour) == own
            assert await browser.of("#all-nodes a", "href") == (f"http://localhost:{ports[0]}/")
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
        assert await browser.count(".node") == 3
