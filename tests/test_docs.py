"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpushare_agent import __version__
from gpushare_agent.cli import COMMANDS
from gpushare_agent.settings_reference import all_keys, markdown, text_of
from gpushare_agent.settings_sources import read_flags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_DOCUMENTS = ["README.md", "CHANGELOG.md", "docs/settings.md", "docs/formats.md", "docs/glossary.md"]

COMMAND = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s {}"


def test_the_settings_document_is_the_generated_one() -> None:
    """docs/settings.md is `gpushare-agent config --output markdown`, character by character."""
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == markdown()


def test_the_readme_begins_with_three_sentences_and_the_two_commands() -> None:
    """Each command is one line in a block of its own; .ci/run runs the second one word for word."""
    first = README.split("\n\n")[1]
    assert len(re.findall(r"[.](?:\s|$)", first)) == 3
    blocks = re.findall(r"^```\n(.*?)\n```$", README, flags=re.M | re.S)
    assert blocks[:2] == [COMMAND.format("sandbox"), COMMAND.format("tests")]
    assert COMMAND.format("tests") in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_readme_settings_table_tells_the_flags_and_defaults_of_the_code() -> None:
    """Every row's key exists, its flag sets that key, and its default is the code's."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| `--([a-z.-]+)` \| `([^`]*)` \|", README, flags=re.M)
    assert len(rows) >= 8
    keys = {key.name: key for key in all_keys()}
    for name, flag, default in rows:
        assert flag in keys[name].flag_names
        assert text_of(keys[name].default) == default


def test_every_command_is_in_the_readme() -> None:
    """No command is unknown to a reader."""
    for command in COMMANDS:
        assert f"`gpushare-agent {command.name}`" in README


@pytest.mark.parametrize("document", OWN_DOCUMENTS)
def test_every_flag_that_a_document_names_exists(document: str) -> None:
    """A flag of the agent in backquotes, with or without a value, is one that the agent takes."""
    text = (ROOT / document).read_text(encoding="utf-8")
    others = {"--once", "--help", "--output", "--config", "--v", "--log-dir", "--logtostderr"}
    for flag in re.findall(r"`(--[a-z][a-z.-]*)", text):
        if flag not in others:
            assert read_flags([f"{flag}=x"]).given, flag


@pytest.mark.parametrize("document", OWN_DOCUMENTS)
def test_every_relative_link_leads_somewhere(document: str) -> None:
    """Links inside the repository name files that exist."""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_documents_name_this_version() -> None:
    """Changelog, image and manifests agree with the package."""
    for path in ("CHANGELOG.md", "README.md", "Containerfile", "manifests/base/kustomization.yaml"):
        assert __version__ in (ROOT / path).read_text(encoding="utf-8"), path
