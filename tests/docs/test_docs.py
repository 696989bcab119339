"""The documents agree with the code."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.agent.admission.part import HANDOVER_WAIT_S
from gpushare_agent.agent.commands import driver_devices
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.kept import NOT_KEPT_TEXTS
from gpushare_agent.core.model.allocations import ClaimRef, ClaimShare
from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.core.model.gpu_health import HealthState
from gpushare_agent.core.model.mig import MigPlace
from gpushare_agent.core.model.names import GPUSHARE_COUNT_RESOURCE, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.settings.former_flags import FORMER_FLAGS
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.core.settings.sources import read_flags
from tests.docs.generated import families, outdated
from tests.observability.support_usage import allocation, facts, key_of, snapshot
from tests.support_json import written_node

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "docs/reference/settings.md",
    "docs/reference/formats.md",
    "docs/reference/glossary.md",
    "docs/reference/metrics.md",
    "docs/how-to/migrate-from-gpu-manager.md",
    "docs/how-to/migrate-from-hami.md",
    "docs/how-to/serve-gpu-mem.md",
]

COMMAND = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s {}"


def test_the_generated_pages_are_what_the_code_makes() -> None:
    """Settings, metrics, commands, the chart's values; `nox -s pages -- --write` writes them."""
    assert outdated() == []


def test_the_readme_begins_with_the_two_commands() -> None:
    """Each command is one line in a block of its own; .ci/run runs both word for word."""
    blocks = re.findall(r"^```\n(.*?)\n```$", README, flags=re.M | re.S)
    assert blocks[:2] == [COMMAND.format("sandbox"), COMMAND.format("tests")]
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert all(f"='{command}'\n" in run for command in blocks[:2])


@pytest.mark.parametrize("document", OWN_DOCUMENTS)
def test_every_flag_that_a_document_names_exists(document: str) -> None:
    """A flag of the agent in backquotes, with or without a value, is one that the agent takes."""
    text = (ROOT / document).read_text(encoding="utf-8")
    others = {"--once", "--all-nodes", "--help", "--output", "--config", "--version"}
    for flag in re.findall(r"`(--[a-z][a-zA-Z.-]*)", text):
        if flag not in others and flag[2:] not in FORMER_FLAGS:
            assert read_flags([f"{flag}=x"]).values, flag


def test_the_api_document_names_every_field() -> None:
    """Of a node with a MIG instance and a share of a claim; a reader meets no field that the page does not explain."""
    ref = ClaimRef(namespace="n", name="c", uid="u")
    claim = ClaimShare(ref=ref, shown_as="c", request="r", isolation="none")
    share = replace(allocation(key_of(1)), claim=claim)
    shown = snapshot(facts(share))
    gpu, *others = shown.inventory.gpus
    place = MigPlace(profile="1g.10gb", parent=gpu.uuid, number=0, parent_index=0, gi=1, ci=2)
    shown = replace(shown, inventory=replace(shown.inventory, gpus=(replace(gpu, mig=place), *others)))
    named = set(re.findall(r"\w+", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")))
    document = written_node(shown)
    document["agent"]["not_kept_texts"] = {}  # by the terms of isolation.md
    assert set(_fields(document)) - named == set()


def _fields(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inside:
        yield from _fields(one)


def test_every_page_that_the_code_names_exists() -> None:
    """An error or a comment that points to a page, or to a section of one, still finds it."""
    named: dict[tuple[str, str], str] = {}
    for folder in ("gpushare_agent", "tests", "manifests", "charts", "bench", "native", ".ci", ".github"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (
                ".py",
                ".yaml",
                ".yml",
                ".json",
                ".c",
                ".sh",
                ".txt",
                ".tpl",
                ".md",
                "",
            ):
                text = path.read_text(encoding="utf-8", errors="replace")
                found = re.findall(r"\b(docs/[A-Za-z0-9/_-]+\.md)(?:, (?:section (\d+)|\"([A-Za-z ]+)\"))?", text)
                named |= {(page, f"{number}. " if number else title): str(path) for page, number, title in found}
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page, _ in named if (ROOT / page).exists()}
    lost = [key for key in named if key[0] not in pages or (key[1] and f"\n## {key[1]}" not in pages[key[0]])]
    assert {key: named[key] for key in lost} == {}
    assert len(pages) > 20


def test_every_module_that_a_document_or_the_code_names_exists() -> None:
    """By its name alone, or by as much of its path as is given; another project's stand behind a version or a URL."""
    files = {str(path.relative_to(ROOT)) for top in TOPS for path in ROOT.glob(f"{top}/**/*.py")} | {"noxfile.py"}
    known = {end for file in files for end in _ends(file)}
    code = [path for path in ROOT.glob("gpushare_agent/**/*.py") if "wire" not in path.parts]
    lost = {
        (str(path.relative_to(ROOT)), name)
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *code]
        for name in re.findall(r"(?<![\w/.<{*-])(?<!\+\+\+ )((?:\w+/)*\w+\.py)\b", path.read_text(encoding="utf-8"))
        if name not in known
    }
    assert lost == set()


TOPS = ("gpushare_agent", "tests", "bench", "native", "manifests", "charts")


def _ends(file: str) -> Iterator[str]:
    """Each way to name it: `a/b/c.py`, `b/c.py`, `c.py`."""
    parts = file.split("/")
    yield from ("/".join(parts[start:]) for start in range(len(parts)))


DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for pages in ("*.md", "charts/*/README.md", "docs/**/*.md") for path in ROOT.glob(pages)
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_inside_the_repository_leads_somewhere(document: str) -> None:
    """Files that exist, and headings that are in them."""
    path = ROOT / document
    links = re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8"))
    for target, _, heading in (link.partition("#") for link in links):
        page = path.parent / target if target else path
        assert page.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
            assert heading in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_metrics_document_lists_every_metric_once() -> None:
    """No family is in no list."""
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"<!--generated:.*?<!--end-->", text, flags=re.S)
    names = [one.name + ("_total" if one.type == "counter" else "") for one in families()]
    assert sorted(re.findall(r"`([A-Za-z_]+)`", "".join(listed))) == sorted(names)


def test_every_state_of_a_gpu_and_every_reason_of_a_refusal_is_explained() -> None:
    """Reasons are labels that somebody alerts on, and Events show the same word; a state is in the node's document."""
    metrics, health, guide = (
        (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        for page in ("reference/metrics", "explanation/health", "how-to/find-out-why-refused")
    )
    assert all(f"`{reason}`" in metrics for reason in RefusalReason)
    rows = re.findall(r"^- ((?:`[A-Z]\w+`(?:, )?)+):", guide, flags=re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(RefusalReason)
    assert re.findall(
        r"^- `([a-z-]+)`: ", health.partition("\n## States\n")[2].partition("\n## ")[0], flags=re.M
    ) == list(HealthState)


def test_the_isolation_document_has_every_term_of_what_is_not_kept() -> None:
    """In the words that the agent uses."""
    text = (ROOT / "docs/explanation/isolation.md").read_text(encoding="utf-8")
    listed = text.split("## What is kept, and by whom")[1]
    found = dict(re.findall(r"^- `([a-z-]+)` \([^)]+\): (.+)$", listed, flags=re.M))
    assert found == {term.value: words for term, words in NOT_KEPT_TEXTS.items()}


def test_the_isolation_document_has_an_item_for_each_isolation() -> None:
    """A new one needs what it enforces and what it requires."""
    text = (ROOT / "docs/explanation/isolation.md").read_text(encoding="utf-8")
    items = re.findall(r"^- `([a-z+-]+)`(?: .the default.)?: ", text, flags=re.M)
    assert [name for name in items if name in set(ISOLATIONS)] == list(ISOLATIONS)
    assert f"`{Settings().isolation}` (the default)" in text


def test_the_guide_to_uninstall_takes_every_resource_from_the_nodes_status() -> None:
    """A merge patch: what is not there, or is another plugin's, is no error."""
    page = (ROOT / "docs/how-to/uninstall.md").read_text(encoding="utf-8")
    (patch,) = re.findall(r"kubectl patch node NODE --subresource=status --type=merge -p '([^']+)'", page)
    gpushare = Settings().gpushare
    offered = {VCORE_RESOURCE, VMEMORY_RESOURCE, gpushare.resource, GPUSHARE_COUNT_RESOURCE, driver_devices.RESOURCE}
    assert json.loads(patch) == {"status": {"capacity": dict.fromkeys(offered)}}


def test_the_timeouts_of_an_upgrade_suffice_for_so_many_nodes_under_load() -> None:
    """The old agent's wait for a moment without admissions, and the start of the new one, on each node."""
    text = (ROOT / "docs/how-to/upgrade.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"\((\d+) nodes: `(\d+)h`, (\d+): `(\d+)h`\).*?\(any number: `(\d+)m`\)", text, re.S)
    some, hours, more, more_hours, minutes = map(int, given)
    for rounds, given_s in ((some, hours * 3600), (more, more_hours * 3600), (10, minutes * 60)):
        assert rounds * (HANDOVER_WAIT_S + 10) <= given_s <= 2 * rounds * (HANDOVER_WAIT_S + 10)
    assert all(one in text for one in ("`helm upgrade --wait`", "`--atomic`", "Flux's HelmRelease", "maxSurge=10%"))


def test_a_contributor_has_the_versions_and_sessions_of_the_project() -> None:
    """pre-commit's ruff is the one of `nox -s lint`, and each session that CONTRIBUTING.md names exists."""
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (ruff,) = re.findall(r'^RUFF = "(.*)"$', noxfile, re.M)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    pinned = [hook["additional_dependencies"] for hook in repository["hooks"] if "ruff" in hook["entry"]]
    assert pinned == [[ruff], [ruff]]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for names in re.findall(r"nox -s ((?:[a-z0-9]+ ?)+)", text) for name in names.split()}
    defined = set(re.findall(r"^def ([a-z0-9]+)\(session", noxfile, re.M))
    assert "tests" in named and named <= defined


def test_docker_leaves_out_what_podman_leaves_out() -> None:
    """Docker does not read .containerignore: both files are the same."""
    assert (ROOT / ".dockerignore").read_bytes() == (ROOT / ".containerignore").read_bytes()


@pytest.mark.parametrize("folder", ["how-to", "reference", "explanation", "tutorial"])
def test_every_page_is_in_an_index(folder: str) -> None:
    """By its folder's, to which docs/README.md leads as README.md leads to that, or in that itself."""
    docs = ROOT / "docs"
    top = _linked(docs / "README.md")
    assert docs / "README.md" in _linked(ROOT / "README.md")
    index = docs / folder / "README.md"
    assert index in top or not index.exists()
    found = _linked(index) | {index} if index.exists() else top
    assert {path for path in (docs / folder).glob("*.md") if path not in found} == set()


def _linked(page: Path) -> set[Path]:
    links = re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links}


WORDS, README_WORDS = 39_800, 700
"""What a reader can be asked to read, generated pages and the bars of tables too: as `wc -w` counts."""


def test_the_documentation_keeps_to_its_words() -> None:
    """A page that grows takes from another."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    words = [len(page.read_text(encoding="utf-8").split()) for page in pages]
    assert words[0] <= README_WORDS
    assert sum(words) <= WORDS


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    """`nox -s docs` finds a page that is missing there as well, but needs packages for it."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    from_outside = re.findall(r'": "(\S+\.md)"', (ROOT / "docs/.hooks.py").read_text(encoding="utf-8"))
    taken = re.findall(r'"docs/(\S+\.md)": "', (ROOT / "docs/.hooks.py").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")} - set(taken)
    assert sorted(re.findall(r"(\S+\.md)$", nav, flags=re.M)) == sorted([*pages, *from_outside])


def test_the_readmes_pod_is_the_sample() -> None:
    """The one that a reader copies is the one that the tests check."""
    block = re.findall(r"^```yaml\n(.*?)^```$", README, flags=re.M | re.S)[0]
    sample = (ROOT / "manifests/samples/share.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(block) == yaml.safe_load(sample)


@pytest.mark.parametrize("repository", ["", "https://forge.example/own/er"])
def test_a_package_index_shows_the_readme_without_links_that_lead_nowhere(repository: str) -> None:
    """It has no other file of the repository. Anchors and addresses stay."""
    pytest.importorskip("hatchling", reason="pip install hatchling, or nox -s tests")
    shown = runpy.run_path(str(ROOT / "hatch_build.py"))["page_of"](README, repository, "v1")
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert ("Every step, also with kustomize: install.md." in shown) == (not repository)
    assert "<picture>" not in shown and "generated" not in shown
    assert (f"]({repository}/blob/v1/docs/how-to/install.md)" in shown) == bool(repository)
    assert (f"]({repository}/raw/v1/docs/screenshots/gpus-light.png)" in shown) == bool(repository)


def test_the_documents_name_this_version() -> None:
    """Changelog, image and manifests agree with the package."""
    for path in (
        "CHANGELOG.md",
        "README.md",
        "Containerfile",
        "manifests/base/kustomization.yaml",
        "manifests/check/kustomization.yaml",
        "manifests/mps-daemon/kustomization.yaml",
    ):
        assert __version__ in (ROOT / path).read_text(encoding="utf-8"), path
