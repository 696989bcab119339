"""The documents agree with the code."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpushare_agent import __version__
from gpushare_agent.cli.main import COMMANDS
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.isolation.decisions.kept import NOT_KEPT_TEXTS
from gpushare_agent.model.errors import RefusalReason
from gpushare_agent.model.usage import GpuSample
from gpushare_agent.observability.attribution import AllocatedContainers, join_usage
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.observability.metrics.node import node_series
from gpushare_agent.observability.metrics.text import NodePage
from gpushare_agent.settings.reference import markdown
from gpushare_agent.settings.settings import Settings
from gpushare_agent.settings.sources import read_flags
from tests.support_core import mig_instance
from tests.support_usage import UUIDS, allocation, driver_sample, facts, id_of, key_of, owner, process, snapshot

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
]

COMMAND = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s {}"


def test_the_settings_document_is_the_generated_one() -> None:
    """docs/reference/settings.md is `gpushare-agent config --output markdown`, character by character."""
    assert (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8") == markdown()


def test_the_readme_begins_with_three_sentences_and_the_two_commands() -> None:
    """Each command is one line in a block of its own; .ci/run runs the second one word for word."""
    first = README.split("\n\n")[1]
    assert len(re.findall(r"[.](?:\s|$)", first)) == 3
    blocks = re.findall(r"^```\n(.*?)\n```$", README, flags=re.M | re.S)
    assert blocks[:2] == [COMMAND.format("sandbox"), COMMAND.format("tests")]
    assert COMMAND.format("tests") in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_every_command_is_in_the_reference() -> None:
    """No command is unknown to a reader."""
    text = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert re.search(rf"`gpushare-agent {command.name}[ `]", text), command.name


@pytest.mark.parametrize("document", OWN_DOCUMENTS)
def test_every_flag_that_a_document_names_exists(document: str) -> None:
    """A flag of the agent in backquotes, with or without a value, is one that the agent takes."""
    text = (ROOT / document).read_text(encoding="utf-8")
    others = {"--once", "--all-nodes", "--help", "--output", "--config", "--v", "--log-dir", "--logtostderr"}
    for flag in re.findall(r"`(--[a-z][a-z.-]*)", text):
        if flag not in others:
            assert read_flags([f"{flag}=x"]).values, flag


@pytest.mark.parametrize(
    "document",
    [
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "charts/gpushare-agent/README.md"),
        *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
    ],
)
def test_every_relative_link_leads_somewhere(document: str) -> None:
    """Links inside the repository name files that exist."""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def full_metrics() -> str:
    """Every event has happened once and the driver reports everything, so that every series is there."""
    metrics = AgentMetrics()
    metrics.know_resources(["r"])
    metrics.know_gpus([UUIDS[0]], 0)
    metrics.gpu_event("xid", 79, is_ignored=False)
    metrics.driver_error("timeout")
    metrics.show_pod_event_age(lambda: 1.0)
    metrics.show_mps(lambda: True)
    metrics.show_node_configuration(lambda: False)
    reported: dict[str, Any] = {
        field.name: 1 for field in fields(GpuSample) if "|" in str(field.type) and field.name != "processes"
    }
    one = replace(process(10), encoder_ratio=0.0, decoder_ratio=0.0)
    sample = GpuSample(**{**reported, "uuid": UUIDS[0], "throttle_reasons": (), "processes": (one,)})
    allocated = allocation(key_of(1))
    holders = AllocatedContainers(gpus={allocated.key: allocated.gpus}, by_id={id_of(1): allocated.key})
    usage = join_usage(driver_sample(sample), {10: owner(1)}, holders, sampled_at=1.0)
    shown = snapshot(facts(allocated), usage=usage)
    first, second = shown.inventory.gpus
    with_instance = replace(shown.inventory, gpus=(first, replace(second, mig=mig_instance(1, 0, 0).mig)))
    shown = replace(shown, inventory=with_instance)
    metrics.show_node(NodePage(lambda: node_series(shown), max_age_s=1.0))
    return metrics.exposition("")[1].decode()


def test_the_metrics_document_lists_every_metric_with_its_type_and_labels() -> None:
    """No more, no fewer, and no family is without a series to read the labels from."""
    expected: dict[str, tuple[str, list[str]]] = {}
    for family in text_string_to_metric_families(full_metrics()):
        if family.name.startswith("process_"):
            continue
        assert family.samples, f"nothing has happened yet for {family.name}"
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        expected[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels)
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([a-z_, ]*)\| ", text, flags=re.M)
    assert {name: (kind, sorted(labels.replace(",", " ").split())) for name, kind, labels in rows} == expected
    assert len(rows) == len(expected)


def test_the_metrics_document_names_every_reason_of_a_refusal() -> None:
    """They are labels that somebody alerts on."""
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert all(f"`{reason.value}`" in text for reason in RefusalReason)


def test_the_isolation_document_has_every_term_of_what_is_not_kept() -> None:
    """In the words that the agent uses."""
    text = (ROOT / "docs/explanation/isolation.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|$", text.split("## What is kept, and by whom")[1], flags=re.M)
    )
    assert rows == {term.value: words for term, words in NOT_KEPT_TEXTS.items()}


def test_the_isolation_document_has_a_row_for_each_isolation() -> None:
    """A new one needs what it enforces and what it requires."""
    text = (ROOT / "docs/explanation/isolation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^[|] `([a-z+-]+)`(?: .the default.)? [|]", text, flags=re.M)
    assert [name for name in rows if name in set(ISOLATIONS)] == list(ISOLATIONS)
    assert f"`{Settings().isolation}` (the default)" in text


def test_the_reference_lists_every_component_of_the_manifests() -> None:
    """One that nobody mentions is not found."""
    text = (ROOT / "docs/reference/components.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "manifests/components").iterdir())


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


def test_the_readme_leads_to_every_document() -> None:
    """A document that nothing links is not found."""
    for path in [p for folder in ("explanation", "reference") for p in (ROOT / "docs" / folder).glob("*.md")]:
        assert f"](docs/{path.parent.name}/{path.name})" in README, path.name


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    """`nox -s docs` finds a page that is missing there as well, but needs packages for it."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = [name for name in re.findall(r"(\S+\.md)$", nav, flags=re.M) if (ROOT / "docs" / name).exists()]
    assert sorted(named) == sorted(str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md"))


def test_the_readmes_pod_is_the_sample() -> None:
    """The one that a reader copies is the one that the tests check."""
    block = re.findall(r"^```yaml\n(.*?)^```$", README, flags=re.M | re.S)[0]
    sample = (ROOT / "manifests/samples/share.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(block) == yaml.safe_load(sample)


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
