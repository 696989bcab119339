"""The dashboard of a whole agent on the embedded node: what the browser shows is what is in the JSON behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.sample_node import SampleNode
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.sandbox.pod_manifest import LOAD_ANNOTATION
from gpushare_agent.sandbox.report import ReportedNode
from gpushare_agent.sandbox.workload import WorkloadPlayer
from tests.agent.support_agent import InnerAgent, open_agent, write_faults
from tests.browser.support_browser import WHY_NOT, Browser, get_json, open_browser
from tests.observability.support_web import served_node
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

TOPOLOGY = Path(__file__).parent.parent / "data" / "topology" / "v100-x8-cube-mesh.txt"
LOAD = 0.5
DOWN, ENTER, RIGHT = "\ue015", "\ue007", "\ue014"
GIB = 1024**3

GPUS = """return [...document.querySelectorAll('article.gpu')].map((gpu) => ({
  uuid: gpu.dataset.uuid,
  title: gpu.querySelector('h3').textContent,
  badge: gpu.querySelector('.badge').textContent,
  reason: gpu.querySelector('.reason').hidden ? '' : gpu.querySelector('.reason').textContent,
  values: [...gpu.querySelectorAll('.measure-value')].map((one) => one.textContent),
  shares: [...gpu.querySelectorAll('.bar')].map((bar) => [...bar.querySelectorAll('.share:not(.other)')].map((share) => ({
    size: share.getBoundingClientRect().width / (bar.getBoundingClientRect().width - 4),
    used: share.querySelector('.fill').getBoundingClientRect().width / share.getBoundingClientRect().width,
    pod: share.querySelector('.share-name').textContent,
  }))),
}))"""
ROWS = """return [...document.querySelectorAll('.containers tbody tr')].map((row) =>
  Object.fromEntries([...row.children].map((cell) => [cell.dataset.label, cell.textContent])))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A node with its agent, what its containers use, and a browser that shows it."""

    node: NodeUnderTest
    agent: InnerAgent
    player: WorkloadPlayer
    browser: Browser
    url: str

    async def create(self, name: str, *, cores: int, blocks: int = 0) -> None:
        self.node.api.create_pod(
            pod(name, container(cores=cores, blocks=blocks), annotations={LOAD_ANNOTATION: str(LOAD)})
        )
        await self.node.wait_running(name)

    async def document(self) -> dict[str, Any]:
        document: dict[str, Any] = await get_json(f"{self.url}/api/v1/node")
        return document

    async def wait_row(self, name: str, *, is_there: bool = True) -> None:
        await self.browser.wait(
            "[...document.querySelectorAll('.containers tbody .col-pod')].some((one) => one.textContent === arguments[0])"
            " === arguments[1]",
            name,
            is_there,
        )


@asynccontextmanager
async def open_scene(*flags: str) -> AsyncIterator[Scene]:
    async with (
        open_test_node() as node,
        open_agent(node, "--sample-period-s=0.1", f"--simulated.topology={TOPOLOGY}", *flags) as agent,
        open_browser(width=1440) as browser,
    ):
        shown = ReportedNode(
            node=node,
            gpus=agent.parts.node.inventory.current.gpus,
            names=ResourceNames(vcore=CORE, vmemory=MEMORY),
        )
        url = f"http://127.0.0.1:{await agent.parts.observability.web.wait_listening()}"
        await browser.prefer(prefers_reduced_motion="reduce")
        await browser.open(url)
        await browser.wait("document.body.dataset.ready !== undefined")
        yield Scene(node=node, agent=agent, player=WorkloadPlayer(shown, node.paths.usage), browser=browser, url=url)
        assert [entry["message"] for entry in await browser.log()] == []


async def test_what_is_shown_is_what_is_in_the_json() -> None:
    """GPUs, the size and use of each share, the rows of the table, and a refusal with its reason and candidates."""
    async with open_scene() as scene:
        await scene.create("whole", cores=100)
        await scene.create("pair", cores=200)
        for number, (cores, blocks) in enumerate([(60, 16), (60, 32), (60, 4), (10, 8)]):
            await scene.create(f"share-{number}", cores=cores, blocks=blocks)
        refusal = await scene.node.settle_pod(pod("much-too-much", container(cores=300)))
        scene.player.play()
        browser = scene.browser
        await browser.wait("document.querySelectorAll('.containers tbody tr').length === 6")
        await browser.wait("document.querySelector('.outcome[data-kind=bad]')")
        await browser.wait(
            "[...document.querySelectorAll('.containers tbody .col-compute')]"
            ".every((one) => parseFloat(one.textContent) > 0)"
        )
        document = await scene.document()
        gpus, rows = await browser.script(GPUS), await browser.script(ROWS)

        gpus.sort(key=lambda one: int(one["title"].split()[1]))  # those in use stand before the free ones
        assert [(one["uuid"], one["title"]) for one in gpus] == [
            (gpu["uuid"], f"GPU {gpu['index']}") for gpu in document["gpus"]
        ]
        for shown, gpu in zip(gpus, document["gpus"], strict=True):
            assert shown["badge"] == "✓ Healthy"
            assert shown["values"][0].startswith(f"{gpu['cores']['allocated']}/100 allocated · ")
            assert shown["values"][0].endswith(f" · {round(gpu['usage']['sm_ratio'] * 100)} % in use")
            own = [
                (one["pod"], allocated)
                for one in document["containers"]
                for allocated in one["gpus"]
                if allocated["uuid"] == gpu["uuid"]
            ]
            for bar, limit, whole, used, factor in (
                (shown["shares"][0], "cores", 100, "sm_ratio", 100),
                (shown["shares"][1], "memory_bytes", gpu["memory"]["capacity_bytes"], "memory_bytes", 1),
            ):
                assert [share["pod"] for share in bar] == [name for name, _ in own]
                for share, (_, allocated) in zip(bar, own, strict=True):
                    assert share["size"] == pytest.approx(allocated[limit] / whole, abs=0.02)
                    assert share["used"] == pytest.approx(
                        allocated["usage"][used] * factor / allocated[limit], abs=0.02
                    )
                    assert allocated["usage"][used] > 0

        assert [row["Pod"] for row in rows] == ["pair", "share-0", "share-1", "share-2", "share-3", "whole"]
        for row, one in zip(rows, document["containers"], strict=True):
            used = sum(allocated["usage"]["sm_ratio"] for allocated in one["gpus"]) * 100
            assert row["Namespace"] == "default"
            assert row["GPU"] == ", ".join(f"GPU {allocated['index']}" for allocated in one["gpus"])
            assert row["GPU cores"] == str(one["cores"])
            assert float(row["GPU cores in use"].split("/")[0]) == pytest.approx(used, abs=0.5)
            assert float(row["Memory"].split()[0]) == pytest.approx(one["memory_bytes"] / GIB, abs=0.01)
            assert row["State"] == "Running"

        [decision] = (await get_json(f"{scene.url}/api/v1/decisions?pod=much-too-much&namespace=default"))["decisions"]
        assert decision["explanation"].rstrip(".") in refusal
        await browser.click("li:has([data-kind=bad]) summary")
        await browser.wait("document.querySelectorAll('.decisions tbody tr').length === 8")
        text = await browser.of("li:has([data-kind=bad])", "innerText")
        assert "✕ Refused" in text and "default/much-too-much" in text and decision["reason"] in text
        assert decision["explanation"] in text
        assert all(candidate["verdict"] in text for candidate in decision["candidates"])


async def test_the_page_follows_the_node() -> None:
    """A pod that ends leaves its row and its GPU; a GPU that is lost is shown with the reason, and comes back."""
    async with open_scene() as scene:
        await scene.create("stays", cores=30, blocks=8)
        await scene.create("goes", cores=40, blocks=8)
        await scene.wait_row("goes")
        await scene.browser.wait(
            "[...document.querySelectorAll('.bar .share-name')].filter((one) => one.textContent === 'goes').length === 2"
        )
        await scene.node.remove_pod("goes")
        await scene.wait_row("goes", is_there=False)
        await scene.wait_row("stays")
        assert "goes" not in await scene.browser.of("#gpus", "textContent")

        write_faults(scene.node.paths.faults, lost={"6": "GPU is lost"})
        await scene.browser.wait("document.querySelectorAll('.badge[data-kind=bad]').length === 1")
        [ill] = [gpu for gpu in await scene.browser.script(GPUS) if gpu["badge"] != "✓ Healthy"]
        assert ill["title"] == "GPU 6"
        [reason] = [gpu["health_reason"] for gpu in (await scene.document())["gpus"] if gpu["index"] == 6]
        assert reason and reason in ill["reason"]
        assert await scene.browser.script("return document.title") == "(1 unhealthy) node-a: GPUs"
        await scene.browser.wait(
            "document.querySelector('article.gpu[data-kind=bad] .stats').textContent"
            ".startsWith('No use is known while the GPU is lost')"
        )


async def test_an_opened_row_has_the_containers_processes_and_its_curve() -> None:
    """Which are asked for then alone; with the keyboard, which goes from row to row by its arrows."""
    async with open_scene() as scene:
        for name in ("first", "second"):
            await scene.create(name, cores=30, blocks=8)
            await scene.wait_row(name)
        scene.player.play()
        browser = scene.browser
        await browser.wait(
            "[...document.querySelectorAll('.containers tbody .col-compute')]"
            ".every((one) => parseFloat(one.textContent) > 0)"
        )
        asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes(arguments[0])).length"
        assert await browser.script(f"return {asked}", "processes=true") == 0
        await browser.of(".opener", "focus()")
        await browser.press(DOWN, ENTER)
        text = await browser.wait("document.querySelector('.processes li')?.textContent")
        containers = (await get_json(f"{scene.url}/api/v1/node?processes=true"))["containers"]
        [process] = containers[1]["gpus"][0]["usage"]["processes"]
        inner = process["pid_in_container"] or f"{process['pid']} of the host"
        assert text.startswith(f"PID {inner}: {process['command'] or 'not known'}, 1 GiB, SM ")
        assert await browser.script(f"return {asked}", "processes=true") == 1
        assert await browser.script("return document.activeElement.ariaExpanded") == "true"
        await browser.wait(
            "document.querySelector('.opened .curve').ariaLabel?.includes('cores of its share use: now')"
        )
        before = await browser.of(".opened", "previousElementSibling.textContent")
        assert "second" in before
        await browser.press(ENTER)
        await browser.wait("!document.querySelector('.opened')")
        assert await browser.script("return document.activeElement.textContent") == "second"


async def test_the_curves_show_the_day_where_that_is_chosen() -> None:
    """With the keyboard, and remembered by the browser."""
    async with open_scene() as scene:
        await scene.create("share", cores=30, blocks=8)
        browser = scene.browser
        label = "document.querySelector('#gpus .curve').ariaLabel"
        await browser.wait(f"{label}?.startsWith('Last 15 minutes. SM use: now')")
        past = scene.agent.parts.observability.past
        past.day.fold(past.recent)
        await browser.of("input[name=span]", "focus()")
        await browser.press(RIGHT)
        await browser.wait(f"{label}?.startsWith('Last 24 hours. SM use: now')")
        assert await browser.of(".ticks-x", "textContent") == "−24 h168now"
        await browser.open(scene.url)
        await browser.wait(f"{label}?.startsWith('Last 24 hours. SM use: now')")


async def test_a_gpu_has_its_changes_and_a_new_agent_still_has_them(tmp_path: Path) -> None:
    """The reasons in words, newest first; asked for when they are opened, and again when the state changes."""
    async with open_scene(f"--state-directory={tmp_path}") as scene:
        browser = scene.browser
        listed = "[...document.querySelectorAll('[id=gpu-6]')][0].closest('.gpu').querySelector('.changes')"
        await browser.script(f"{listed}.open = true")
        await browser.wait(f"{listed}.querySelector('li')?.textContent === 'None is known'")
        write_faults(scene.node.paths.faults, lost={"6": "GPU is lost"})
        await browser.wait(f"{listed}.textContent.includes('Unhealthy: GPU is lost')")
        write_faults(scene.node.paths.faults)
        known = await get_json(f"{scene.url}/api/v1/changes")
    async with open_scene(f"--state-directory={tmp_path}") as scene:
        [uuid] = known["changes"]
        changes: list[dict[str, Any]] = []
        while not changes:
            changes = (await get_json(f"{scene.url}/api/v1/changes"))["changes"].get(uuid, [])
        assert changes[-1] == known["changes"][uuid][-1]


@pytest.mark.parametrize(
    ("gpus", "width", "columns"),
    [(1, 1920, 1), (2, 1920, 2), (3, 1920, 2), (8, 1024, 3), (8, 1280, 4), (16, 1920, 4), (4, 375, 1)],
)
async def test_so_many_columns_have_the_gpus(gpus: int, width: int, columns: int) -> None:
    """And the whole width."""
    async with served_node(SampleNode(gpus=gpus, containers=gpus)) as served, open_browser(width=width) as browser:
        await browser.open(served.url)
        await browser.wait("document.body.dataset.ready !== undefined")
        await browser.script("document.querySelector('#compact').checked && document.querySelector('#compact').click()")
        row, *boxes = await browser.script(
            "return ['#gpus', '#gpus > article'].flatMap((one) => [...document.querySelectorAll(one)])"
            ".map((one) => one.getBoundingClientRect())"
        )
        assert (len(boxes), len({box["left"] for box in boxes})) == (gpus, columns)
        assert sum(box["width"] for box in boxes[:columns]) > 0.95 * row["width"]
        assert await browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0


async def test_each_row_says_who_keeps_the_share_and_what_is_not_kept() -> None:
    """In words, where it is not the isolation alone. What nobody keeps stands out; a whole GPU needs no one."""
    async with open_scene("--isolation=vcuda", "--isolations-allowed=none,mps") as scene:
        await scene.create("share", cores=30, blocks=8)
        await scene.create("whole", cores=100)
        free = pod("free", container(cores=30, blocks=8), annotations={ISOLATION_ANNOTATION: "none"})
        scene.node.api.create_pod(free)
        for name in ("share", "whole", "free"):
            await scene.wait_row(name)
        reads = """return Object.fromEntries([...document.querySelectorAll('.containers tbody tr')].map((row) => {
            const cell = row.querySelector('.col-isolation'), by = cell.querySelector('.kept');
            return [row.querySelector('.col-pod').textContent,
              [by.textContent, by.dataset.state ?? '']];
        }))"""
        assert await scene.browser.script(reads) == {
            "share": ["", ""],
            "whole": ["", ""],
            "free": ["memory: nobody, compute: nobody", "warn"],
        }
        listed = await scene.browser.script(
            "return [...document.querySelectorAll('#not-limited details')].map((one) => one.textContent).join()"
        )
        texts = (await scene.document())["agent"]["not_kept_texts"]
        assert texts["pools"] in listed
        assert listed.startswith("vcuda: ") and listed.count("in 1 container") == 1
        assert "Memory is limited by vcuda, compute by vcuda. Not limited: " in listed
        # Nobody runs an MPS daemon here, so the agent has never been Ready.
        notices = await scene.browser.script(
            "return [...document.querySelectorAll('.notice')].map((one) => [one.dataset.kind, one.textContent])"
        )
        assert [(kind, text.partition(": ")[0]) for kind, text in notices] == [
            ("bad", "Not ready"),
            ("warn", "Shares of isolation mps are refused"),
        ]


async def test_the_head_has_the_state_of_the_agent() -> None:
    """Node, version, driver, isolation, readiness with its reasons, and whether what is seen is live."""
    async with open_scene("--isolation=none") as scene:
        document = await scene.document()
        await scene.browser.wait("document.querySelector('#live').textContent === '● Live'")
        await scene.browser.wait("document.querySelector('#ready').textContent === '✓ Ready'")
        texts = await scene.browser.script(
            "return ['#node-name', '#node-facts'].map((id) => document.querySelector(id).textContent)"
        )
        assert texts[0] == document["node"] == "node-a"
        assert document["agent"]["version"] in texts[1]
        assert "isolation none" in texts[1] and "simulated GPUs" in texts[1]
        await scene.node.kubelet.stop()
        await scene.browser.wait("document.querySelector('#ready').textContent === '✕ Not ready'")
        reasons = (await scene.document())["agent"]["not_ready"]
        await scene.browser.wait(
            "[...document.querySelectorAll('.notice')].map((one) => one.textContent).join() === arguments[0]",
            ",".join(f"Not ready: {reason}." for reason in reasons),
        )
        await scene.node.kubelet.start()
        await scene.node.wait_until(scene.agent.parts.kubelet.registrar.all_registered.is_set, "registered")
