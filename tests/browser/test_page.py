"""The dashboard in a real browser over a sample node: reading it by keyboard and by ear, its colours, its economy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.sample_node import SampleNode, uid_of, uuid_of
from gpushare_agent.agent.isolation.kept import Kept, NotKept
from gpushare_agent.agent.observability.node_snapshot import ContainerFacts, NodeSnapshot
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.usage import SmSource
from tests.browser.support_browser import WHY_NOT, Browser, open_browser
from tests.kit.support_http import free_port
from tests.observability.support_usage import divided_node, on_demand_node
from tests.observability.support_web import FakeHistory, ServedNode, served_node

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

ACCESSIBILITY = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
TAB, ENTER, SPACE, RIGHT = "\ue004", "\ue007", " ", "\ue014"
ILL = "Xid 79: the GPU has fallen off the bus"
NAMED_ROLES = frozenset(
    ["button", "checkbox", "radio", "searchbox", "link", "image", "img", "meter", "region", "table", "article"]
)


def varied_node(containers: int = 12) -> SampleNode:
    """A GPU of each state, and processes of nobody."""
    return SampleNode(
        gpus=4, containers=containers, unhealthy={2: ILL}, cordoned={1: "fan is noisy"}, unattributed={0: 2}
    )


@asynccontextmanager
async def opened(node: SampleNode, *, width: int = 1280, **media: str) -> AsyncIterator[tuple[Browser, ServedNode]]:
    """The page, drawn, with two decisions; the browser's log must be empty at the end."""
    async with served_node(node) as served, open_browser(width=width) as browser:
        served.decisions.add(node.decision(1))
        served.decisions.add(node.decision(2, refused=True))
        await browser.prefer(**media)
        await browser.open(served.url)
        await drawn(browser)
        await browser.script(ACCESSIBILITY)
        yield browser, served
        problems = [entry["message"] for entry in await browser.log()]
        assert not problems, problems


async def drawn(browser: Browser) -> None:
    await browser.wait(
        "document.body.dataset.ready !== undefined && document.querySelectorAll('.curve-sm').length >= 0"
    )


async def open_all_details(browser: Browser) -> None:
    """And the first row of the containers."""
    await browser.script("for (const one of document.querySelectorAll('details')) one.open = true")
    await browser.click(".opener")
    await browser.wait("document.querySelectorAll('.processes li, .changes li').length > 1")
    await browser.wait("document.querySelectorAll('.decision-body tbody tr').length >= 8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_has_contrast(scheme: str) -> None:
    """At least 4.5 to 1 for text and 3 to 1 for marks, computed from what the browser drew, with everything unfolded."""
    async with opened(varied_node(containers=40), prefers_color_scheme=scheme) as (browser, _):
        await open_all_details(browser)
        ground = await browser.script("return getComputedStyle(document.body).backgroundColor")
        assert (float(ground.split("(")[1].split()[0]) < 0.5) is (scheme == "dark"), ground
        assert await browser.script("return lowContrast()") == []
        assert await browser.script("return faintMarks()") == []
        # A check that finds nothing must be able to find something.
        await browser.script(
            "document.querySelector('h1').style.color = getComputedStyle(document.body).backgroundColor"
        )
        [found] = await browser.script("return lowContrast()")
        assert "node-of-4" in found


async def test_what_is_chosen_is_seen_in_forced_colours() -> None:
    """There the system replaces all grounds by one, but of what keeps its own."""
    async with opened(varied_node(), forced_colors="active") as (browser, _):
        kept = "(one) => [one.previousElementSibling.checked, getComputedStyle(one).forcedColorAdjust === 'none']"
        for name in ("theme", "span"):
            found = await browser.script(
                f"return [...document.querySelectorAll('input[name={name}] + span')].map({kept})"
            )
            assert sorted(map(tuple, found)) == [(False, False)] * (len(found) - 1) + [(True, True)], name


async def test_everything_has_a_name() -> None:
    """Whatever a screen reader announces as a control, a picture, a meter, a table or a region has a name."""
    async with opened(varied_node()) as (browser, _):
        await open_all_details(browser)
        assert await browser.script("return unlabelled()") == []
        assert await browser.script("return landmarks()") == []
        tree = (await browser.cdp("Accessibility.getFullAXTree"))["nodes"]
    shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in NAMED_ROLES]
    nameless = [node["role"]["value"] for node in shown if not node.get("name", {}).get("value", "").strip()]
    assert nameless == []
    assert {"button", "checkbox", "radio", "searchbox", "image", "meter", "region", "table"} <= {
        node["role"]["value"] for node in shown
    }


async def test_a_bar_has_its_numbers_as_text() -> None:
    """Each share with its pod, its limit and its use, and what is free."""
    async with opened(varied_node(containers=4)) as (browser, _):
        compute, memory = await browser.script(
            "return [...document.querySelectorAll('.gpu .bar')].slice(0, 2).map((bar) => bar.ariaLabel)"
        )
    assert compute.startswith("GPU cores: 5/100 allocated")
    assert "1: team-a/inference-000 (main), " in compute
    assert "/5 GPU cores" in compute
    assert compute.endswith("Free: 95 GPU cores.")
    assert "Free: 76 GiB. Processes of no container here: 800 MiB." in memory


async def test_the_keyboard_reaches_everything_in_order() -> None:
    """Tab walks through every link, button, field and fold in the page's order, and each shows that it has the focus."""
    async with opened(varied_node(containers=8)) as (browser, _):
        expected = await browser.script("return stops()")
        seen, unmarked = [], []
        for _ in expected:
            await browser.press(TAB)
            name, outline = await browser.script(
                "const one = document.activeElement, shown = one.type === 'radio' ? one.nextElementSibling : one;"
                "const style = getComputedStyle(shown);"
                "return [nameOf(one), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2]"
            )
            seen.append(name)
            if not outline:
                unmarked.append(name)
        assert seen == expected
        assert len(expected) > 20
        assert unmarked == []


async def test_the_keyboard_works_everything() -> None:
    """Skip link, theme, sorting, filter, folds: with keys alone."""
    async with opened(varied_node(containers=8)) as (browser, _):
        await browser.press(TAB, ENTER)
        assert await browser.script("return document.activeElement.id") == "containers"

        await browser.of("input[name=theme]", "focus()")
        await browser.press(RIGHT, RIGHT)
        assert await browser.script("return document.documentElement.dataset.theme") == "dark"
        assert await browser.script("return getComputedStyle(document.documentElement).colorScheme") == "dark"

        await browser.of("th.col-gpu button", "focus()")
        await browser.press(ENTER, ENTER)
        assert await browser.of("th.col-gpu", "ariaSort") == "descending"
        order = await browser.each("tbody .col-gpu", "textContent")
        assert order[:8] == ["GPU 3"] * 2 + ["GPU 2"] * 2 + ["GPU 1"] * 2 + ["GPU 0"] * 2

        await browser.of("#filter", "focus()")
        await browser.press(*"gpu 2")
        assert await browser.of("#containers-count", "textContent") == "2 of 8 containers"

        await browser.of("#only-refused", "focus()")
        await browser.press(SPACE)
        assert await browser.count("#decisions > li") == 1
        await browser.of("#decisions summary", "focus()")
        await browser.press(ENTER)
        await browser.wait("document.querySelectorAll('#decisions tbody tr').length === 4")
        rows = await browser.each("#decisions tbody tr", "textContent")
        assert rows[0] == "GPU 040/10019.5 of 80 GiBlacks 60 cores"


async def test_the_chosen_theme_is_kept_and_wins_over_the_systems() -> None:
    """After a reload too; System gives it back."""
    async with opened(varied_node(), prefers_color_scheme="light") as (browser, served):
        await browser.click("input[value=dark] + span")
        await browser.open(served.url)
        await drawn(browser)
        assert await browser.script("return document.documentElement.dataset.theme") == "dark"
        await browser.click("input[value=system] + span")
        assert await browser.script("return document.documentElement.dataset.theme ?? null") is None


@pytest.mark.parametrize("width", [360, 800, 900, 1280, 1400, 1920])
async def test_nothing_is_wider_than_the_window(width: int) -> None:
    """The page itself never scrolls sideways, and no text of a GPU is cut off."""
    async with opened(varied_node(containers=40), width=width) as (browser, _):
        await open_all_details(browser)
        assert await browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
        cut = await browser.script(
            "return [...document.querySelectorAll('.gpu, .tile, .panel')].filter((one) =>"
            " one.scrollWidth > one.clientWidth + 1).map(nameOf)"
        )
        assert cut == []


@pytest.mark.parametrize("width", [400, 740, 800, 1060, 1280, 1400])
async def test_each_width_shows_everything(width: int) -> None:
    """Rows of tiles are full and even, the table and the topology are not clipped, no name is cut, and the state stays in
    sight.
    """
    async with opened(SampleNode(gpus=8, containers=12), width=width) as (browser, _):
        tiles = await browser.each(".tile", "getBoundingClientRect().top")
        assert len({tiles.count(top) for top in tiles}) == 1
        for part in ("strong", ".quiet", ".gauge"):
            heights = await browser.each(
                f".tile {part}",
                "getBoundingClientRect().top - one.closest('.tile').getBoundingClientRect().top",
            )
            assert max(heights) - min(heights) < 1, (part, heights)
        clipped = await browser.script(
            "return [...document.querySelectorAll('#containers-table, #topology, #topology > *, .gpu-name, .legend-name')]"
            ".filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map(nameOf)"
        )
        assert clipped == []
        await browser.script("scrollTo(0, document.documentElement.scrollHeight)")
        assert await browser.wait("scrollY > 300")
        assert await browser.of("#live", "getBoundingClientRect().top") >= 0


async def test_a_narrow_window_has_the_topology_as_a_list() -> None:
    """Every GPU under its switches, and what is wrong with it."""
    async with opened(varied_node(), width=400) as (browser, _):
        assert not await browser.of("svg.topology", "checkVisibility()")
        lines = (await browser.of(".outline", "innerText")).splitlines()
        assert [line for line in lines if line.startswith("GPU")] == [
            "GPU 0",
            "GPU 1 ‖ cordoned",
            "GPU 2 ✕ unhealthy",
            "GPU 3",
        ]


async def test_a_free_gpu_takes_little_room() -> None:
    """It is drawn smaller, behind those in use, without bars and curves, and grows once a container has some of it."""
    node = SampleNode(gpus=16, containers=2)
    async with opened(node, width=1400) as (browser, _):
        assert await browser.each("#gpus h3", "textContent") == ["GPU 0", "GPU 1"]
        assert await browser.count("#gpus-free h3") == 14
        free_text = await browser.of("#gpus-free", "innerText")
        assert free_text.count("Free: 100 GPU cores") == 14
        used, free = await browser.script(
            "return ['#gpus', '#gpus-free'].map((one) => document.querySelector(`${one} .gpu`).offsetHeight)"
        )
        assert free < used / 2
        node.containers = 3
        await browser.wait("document.querySelectorAll('#gpus h3').length === 3")


async def test_a_filter_without_a_match_is_answered() -> None:
    """With what was looked for; the table comes back with the text gone."""
    async with opened(varied_node()) as (browser, _):
        await browser.of("#filter", "focus()")
        await browser.press(*"<b>x")
        text = await browser.of("#containers-unmatched", "innerText")
        assert text == "No container has “<b>x” in its pod, namespace, GPU, isolation or state."
        assert not await browser.of("#containers-table", "checkVisibility()")
        await browser.press(*["\ue003"] * 4)
        assert await browser.of("#containers-table", "checkVisibility()")
        assert not await browser.of("#containers-unmatched", "checkVisibility()")


async def test_a_container_on_a_failed_gpu_is_marked() -> None:
    """In its row, in words and colour, from the moment on which the GPU fails until it is back."""
    node = SampleNode(gpus=2, containers=2)
    states = (
        "[...document.querySelectorAll('tbody .state')].map((one) => `${one.textContent} ${one.dataset.kind}`).join()"
    )
    async with opened(node) as (browser, _):
        assert await browser.script(f"return {states}") == "Running good,Running good"
        node.unhealthy[1] = ILL
        await browser.wait(f"{states} === 'Running good,Running, GPU 1 unhealthy bad'")
        node.unhealthy.clear()
        await browser.wait(f"{states} === 'Running good,Running good'")


HEALTH = """return [...document.querySelectorAll('article.gpu')].map((gpu) => ['.badge', '.reason'].map((kind) =>
  [...gpu.querySelectorAll(kind)].filter((one) => one.checkVisibility()).map((one) => one.textContent)))"""
HUES = """return Object.fromEntries([...document.querySelectorAll('tbody tr[data-key]')].map((row) =>
  [row.dataset.key, row.className]))"""
SHARES_OF_GPUS = """return [...document.querySelectorAll('article.gpu')].map((gpu) =>
  [...gpu.querySelector('.bar').querySelectorAll('.share:not(.other)')].map((share) => share.className))"""


async def test_a_cordon_is_no_fault() -> None:
    """It has its own badge, its reason and its count; a GPU that is ill besides shows both."""
    node = SampleNode(gpus=4, containers=0, unhealthy={2: ILL, 3: ILL}, cordoned={0: "fan is noisy", 1: "", 3: "smoke"})
    async with opened(node) as (browser, _):
        assert await browser.script(HEALTH) == [
            [["‖ Cordoned"], ["Cordoned: fan is noisy"]],
            [["‖ Cordoned"], ["Cordoned: no reason given"]],
            [["✕ Unhealthy"], [ILL]],
            [["✕ Unhealthy", "‖ Cordoned"], [ILL, "Cordoned: smoke"]],
        ]
        assert await browser.each(".gpu-free", "textContent") == [
            "Not offered: cordoned",
            "Not offered: cordoned",
            "Not offered: unhealthy",
            "Not offered: unhealthy, cordoned",
        ]
        kinds = await browser.each("article.gpu, .topology .leaf", "dataset.kind")
        assert kinds == ["warn", "warn", "bad", "bad"] * 2
        tile = await browser.of(".tile", "textContent")
        assert tile == "GPUs42 unhealthy, 3 cordoned"
        assert await browser.script("return document.title") == "(2 unhealthy) node-of-4: GPUs"
        node.unhealthy.clear()  # Cordoned GPUs alone make nothing unhealthy.
        await browser.wait("document.title === 'node-of-4: GPUs'")
        assert await browser.of(".tile", "textContent") == "GPUs43 cordoned"


async def test_a_container_has_the_colour_of_its_pod() -> None:
    """It stays when later ones come, and after a reload; no two pods of a GPU have the same."""
    node = SampleNode(gpus=2, containers=3)
    async with opened(node) as (browser, served):
        first = await browser.script(HUES)
        node.containers = 16
        await browser.wait("document.querySelectorAll('tbody tr[data-key]').length === 16")
        assert (await browser.script(HUES)).items() >= first.items()
        for hues in await browser.script(SHARES_OF_GPUS):
            assert len(set(hues)) == len(hues) == 8
        grown, gpus = await browser.script(HUES), await browser.script(SHARES_OF_GPUS)
        await browser.open(served.url)
        await drawn(browser)
        assert await browser.script(HUES) == grown
        assert await browser.script(SHARES_OF_GPUS) == gpus
    assert len(set(grown.values())) > 8


class PodOfTwo(SampleNode):
    """The second container of GPU 0 belongs to the pod of the first one."""

    def snapshot(self) -> NodeSnapshot:
        made = super().snapshot()
        facts = list(made.containers)
        key = ContainerKey(uid_of(0), "sidecar")
        changed = replace(facts[self.gpus].allocation, key=key, namespace="team-a", pod_name="inference-000")
        facts[self.gpus] = replace(facts[self.gpus], allocation=changed)
        return replace(made, containers=facts)


async def test_containers_of_one_pod_on_a_gpu_are_reported_apart() -> None:
    """By their names, in the bars and in the list; the others have the pod's name alone."""
    async with opened(PodOfTwo(gpus=2, containers=6)) as (browser, _):
        names = "return [...document.querySelectorAll('article.gpu')].map((gpu) => arguments[0].map((kind) =>"
        names += " [...gpu.querySelectorAll(kind)].map((one) => one.textContent)))"
        of_two = ["inference-000/main", "inference-000/sidecar", "inference-004"]
        alone = ["inference-005", "inference-001", "inference-003"]  # team-a, team-b, team-d
        assert await browser.script(names, [".share-name", ".legend-name"]) == [
            [of_two * 2, of_two],
            [alone * 2, alone],
        ]


async def test_unattributed_texts_stay_texts() -> None:
    """Markup in a reason or a name is shown as it is written, and makes no element."""
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    node = varied_node()
    node.unhealthy[0] = hostile
    node.cordoned[3] = hostile
    async with opened(node) as (browser, _):
        shown = await browser.each(".reason", "textContent")
        assert hostile in shown and f"Cordoned: {hostile}" in shown
        assert await browser.count("main img, main script") == 0
        assert "owned" not in await browser.script("return document.title")


async def test_one_change_touches_one_row() -> None:
    """Of 200 containers whose use stands still, the one that changes is redrawn, and nothing is made anew."""
    node = SampleNode(gpus=16, containers=200)
    async with opened(node) as (browser, _):
        await browser.wait("document.querySelectorAll('tbody tr').length >= 200")
        await browser.script(
            "window.touched = new Set(); window.made = 0;"
            "new MutationObserver((all) => { for (const one of all) {"
            " const row = (one.target.closest ? one.target : one.target.parentElement).closest('tr');"
            " if (row) touched.add(row.dataset.key);"
            " if (one.type === 'childList') made += [...one.addedNodes].filter((node) => node.nodeType === 1).length; } })"
            ".observe(document.querySelector('main'),"
            " {subtree: true, childList: true, attributes: true, characterData: true})"
        )
        node.excess = {7: 0.9}
        key = f"{uid_of(7)}/main"
        await browser.wait("touched.has(arguments[0])", key)
        assert await browser.script("return [[...touched], made]") == [[key], 0]


class _Changed(SampleNode):
    """A SampleNode of which `change` makes another."""

    change: Callable[[NodeSnapshot], NodeSnapshot] = staticmethod(lambda found: found)

    def snapshot(self) -> NodeSnapshot:
        return self.change(super().snapshot())


async def test_why_a_container_does_not_run_is_its_state() -> None:
    """In the kubelet's word, while its pod is Running."""
    reasons = {"inference-000": "CrashLoopBackOff", "inference-001": "ContainerCreating", "inference-002": "Completed"}

    def crash(found: NodeSnapshot) -> NodeSnapshot:
        def changed(one: ContainerFacts) -> ContainerFacts:
            if one.pod is None or one.pod.name not in reasons:
                return one
            return replace(one, pod=replace(one.pod, running=frozenset(), not_running={"main": reasons[one.pod.name]}))

        return replace(found, containers=[changed(one) for one in found.containers])

    node = _Changed(gpus=1, containers=4)
    node.change = crash
    async with opened(node) as (browser, _):
        states = (
            "return [...document.querySelectorAll('tbody .state')].map((one) => [one.textContent, one.dataset.kind])"
        )
        assert await browser.script(states) == [
            ["CrashLoopBackOff", "bad"],
            ["ContainerCreating", "warn"],
            ["Completed", ""],
            ["Running", "good"],
        ]


async def test_compute_that_mps_hides_is_said_to_be_not_known() -> None:
    """Next to a memory that is known, and with the reason where the pointer rests."""

    def by_mps(found: NodeSnapshot) -> NodeSnapshot:
        assert found.usage is not None
        uses = found.usage.containers.items()
        hidden = {key: replace(use, sm_ratio=None, sm_source=SmSource.MPS) for key, use in uses}
        return replace(found, usage=replace(found.usage, containers=hidden))

    node = _Changed(gpus=1, containers=1)
    node.change = by_mps
    async with opened(node) as (browser, _):
        cell = "document.querySelector('tbody td.col-compute')"
        await browser.wait(f"{cell}.textContent.includes('not known: MPS')")
        assert "process of their server" in await browser.script(f"return {cell}.title")
        assert await browser.script("return unlabelled()") == []
        assert await browser.script("return lowContrast()") == []


async def test_an_old_sample_is_stale_and_nothing_beside_it_ready() -> None:
    node = _Changed(gpus=1, containers=1)
    async with opened(node) as (browser, _):
        assert await browser.of("#ready", "checkVisibility()")

        def old(found: NodeSnapshot) -> NodeSnapshot:
            assert found.usage is not None
            return replace(found, usage=replace(found.usage, sampled_at=found.at - 30))

        node.change = old
        await browser.wait("document.querySelector('#live').textContent.startsWith('Stale: last sample 3')")
        assert not await browser.of("#ready", "checkVisibility()")


@pytest.mark.parametrize(("width", "screens"), [(1920, 1), (1024, 2), (375, 2)])
async def test_many_gpus_leave_the_containers_in_sight(width: int, screens: int) -> None:
    """Without curves and lists, which a choice brings back; so few screens of 1080 pixels above the containers."""
    async with opened(SampleNode(gpus=16, containers=60), width=width) as (browser, _):
        assert await browser.of("#containers", "getBoundingClientRect().top") < screens * 1080
        assert not await browser.of("#gpus .curve", "checkVisibility()")
        await browser.click("#compact")
        assert await browser.of("#gpus .curve", "checkVisibility()")


async def test_what_is_not_limited_is_said_once() -> None:
    """For all containers of which the same is true, in one fold: no row is a stop of the keyboard."""
    kept = Kept(memory_by="vcuda", compute_by="vcuda", not_kept=(NotKept.BYPASS, NotKept.COPIES))

    def limited(found: NodeSnapshot) -> NodeSnapshot:
        return replace(found, containers=[replace(one, kept=kept) for one in found.containers])

    node = _Changed(gpus=2, containers=20)
    node.change = limited
    async with opened(node, width=1920) as (browser, _):
        folds = await browser.each("#not-limited summary", "textContent")
        assert folds == ["vcuda: 2 things not limited in 20 containers"]
        assert await browser.count(".containers tbody summary") == 0


async def test_a_gpu_that_mig_divides_is_its_instances() -> None:
    """As in top: cards, drawing, list and table of the topology have the instances in its place, and one without
    cores is given whole."""
    node = _Changed(gpus=2, containers=0)
    node.change = lambda _: divided_node(shares_in_mig=False)
    async with opened(node, width=1920) as (browser, _):
        for place in (".gpu h3", "svg.topology .leaf text", "#topology tbody th"):
            await browser.wait("document.querySelectorAll(arguments[0]).length === 3", place)
        assert sorted(await browser.each(".gpu h3", "textContent")) == ["GPU 0", "GPU 1:0", "GPU 1:1"]
        assert (await browser.of(".tile", "textContent")).startswith("GPUs2")
        assert await browser.each("svg.topology .leaf text", "textContent") == ["0", "1:0", "1:1"]
        assert await browser.each("#topology tbody th", "textContent") == ["GPU 0", "GPU 1:0", "GPU 1:1"]
        free = "return [...document.querySelectorAll('.gpu')].map((one) => one.querySelector('.gpu-free').textContent)"
        assert (await browser.script(free))[-2:] == ["Given whole", "Free: 24 GiB, given whole"]


async def test_a_gpu_of_instances_on_demand_is_shown_without_any() -> None:
    node = _Changed(gpus=1, containers=0)
    node.change = lambda _: on_demand_node()
    async with opened(node) as (browser, _):
        text = await browser.of("#mig-gpus", "innerText")
        assert (
            text.startswith("GPU 1 (") and "with room for 1 of 2g.20gb, or 4 of 1g.10gb · in use: 1g.10gb at 6" in text
        )


async def test_a_use_over_the_share_is_marked() -> None:
    """Of both resources: in the bars, the list, the meters and in words."""
    node = varied_node(containers=4)
    node.excess = {0: 1.5}
    async with opened(node) as (browser, _):
        assert await browser.count(".share.over") == 2
        assert "over its share" in await browser.of(".legend", "textContent")
        assert await browser.count(".meter[data-over]") == 2


async def test_an_empty_node_says_what_to_do() -> None:
    """Without containers the limits to ask for, without GPUs the cure; no table, no drawing."""
    async with opened(SampleNode(gpus=1, containers=0)) as (browser, _):
        text = await browser.of("#containers-empty", "innerText")
        assert "No pod has a share yet." in text
        assert "tencent.com/vcuda-core: 30" in text
        assert "kubectl apply -f manifests/samples/share.yaml" in text
        assert await browser.of("#topology", "innerText") == "One GPU, nothing to draw."
        assert await browser.of("#containers-table", "hidden") is True


async def test_a_lost_connection_is_reported_and_mended() -> None:
    """The page shows it while the agent is away, and shows the new agent's node once it is back."""
    node = varied_node(containers=4)
    async with open_browser() as browser:
        port = free_port()
        async with served_node(node, port=port) as served:
            await browser.open(served.url)
            await drawn(browser)
            await browser.wait("document.querySelector('#live').dataset.state === 'good'")
        await browser.wait("document.querySelector('#live').textContent.includes('No contact for')")
        assert not await browser.of("#ready", "checkVisibility()")
        node.containers = 3
        async with served_node(node, port=port):
            await browser.wait("document.querySelector('#live').dataset.state === 'good'")
            await browser.wait("document.querySelector('#ready').checkVisibility()")
            assert await browser.count("tbody tr[data-key]") == 3


async def test_motion_is_left_out_where_it_is_not_wanted() -> None:
    """Bars glide by default and jump with prefers-reduced-motion."""
    style = "return getComputedStyle(document.querySelector('.fill')).transitionDuration"
    async with opened(varied_node(), prefers_reduced_motion="no-preference") as (browser, _):
        assert await browser.script(style) == "0.5s"
        await browser.prefer(prefers_reduced_motion="reduce")
        assert await browser.script(style) == "0s"


def past_of(ratios: Sequence[float | None], sizes: Sequence[float | None]) -> FakeHistory:
    curve = {"sm_ratio": ratios, "memory_used_bytes": sizes}
    return FakeHistory({"at": None, "step_seconds": 5.0, "gpus": {uuid_of(0): curve}, "containers": {}})


async def test_the_curve_is_the_agents_past() -> None:
    """As many points as the agent keeps, gaps left out, as text."""
    past = past_of([None, 0.5, 1.0, None, 0.25], [None] * 5)
    async with served_node(SampleNode(gpus=1, containers=0), history=past) as served, open_browser() as browser:
        await browser.open(served.url)
        path = await browser.wait("document.querySelector('.curve-sm').getAttribute('d')")
        label = await browser.of(".curve", "ariaLabel")
    assert path.count("M") == 2
    assert path.endswith("300.0 29.5")
    assert label == "Last 15 minutes. SM use: now 25 %, mean 58 %, most 100 %. Memory: not known."


async def test_the_curve_has_scales_and_the_values_under_the_pointer() -> None:
    """Percent at the side, minutes below, and at the pointer the moment with both values."""
    past = past_of([0.25] * 90 + [0.75] * 90, [0] * 180)
    async with served_node(SampleNode(gpus=1, containers=1), history=past) as served, open_browser() as browser:
        await browser.open(served.url)
        await browser.wait("document.querySelector('.curve-sm').getAttribute('d')")
        assert await browser.each(".ticks-y span", "textContent") == ["100 %", "50", "0"]
        assert await browser.each(".ticks-x span", "textContent") == ["−15 min", "10", "5", "now"]
        point = (
            "const box = document.querySelector('.curve').getBoundingClientRect();"
            "document.querySelector('.plot').dispatchEvent(new PointerEvent(arguments[0],"
            " {clientX: box.left + box.width * arguments[1], clientY: box.top + 5}));"
            "return document.querySelector('.curve-values').textContent"
        )
        assert await browser.script(point, "pointermove", 0.3) == "10 min ago: 25 %, memory 0 %"
        assert await browser.script(point, "pointermove", 1) == "now: 75 %, memory 0 %"
        assert await browser.script(point, "pointerleave", 0) == ""
