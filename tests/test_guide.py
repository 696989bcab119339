"""The user guide names pages, commands, files, settings and reasons that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpushare_agent.cli import COMMANDS
from gpushare_agent.model.errors import RefusalReason
from gpushare_agent.settings_reference import all_keys

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs/guide"
PAGES = sorted(GUIDE.glob("*.md"))
OWN_KUSTOMIZATION = "manifests/own"
"""What install.md has the reader make."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_page_is_listed_and_begins_with_its_task() -> None:
    """The index leaves none out."""
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", text_of(GUIDE / "README.md")))
    assert listed == {page.name for page in PAGES} - {"README.md"}
    assert all(text_of(page).startswith("# ") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    """Files that exist, and headings that are in them."""
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", text_of(page))):
        path = page.parent / target
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", text_of(path), flags=re.M)
            assert heading in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_commands_files_and_settings_exist(page: Path) -> None:
    """Whoever types a line of the guide gets no usage error."""
    text = text_of(page)
    commands = {command.name for command in COMMANDS}
    for name in re.findall(r"(?:-- |bin/|`|^)gpushare-agent ([a-z-]+)", text, flags=re.M):
        assert name in commands, name
    for path in re.findall(r"\b(manifests/[A-Za-z0-9_./-]*[A-Za-z0-9_-])", text):
        assert path.startswith(OWN_KUSTOMIZATION) or (ROOT / path).exists(), path
    keys = {key.name for key in all_keys()}
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", text):
        assert name in keys or name.endswith((".md", ".yaml", ".json", ".so")), name


def test_every_reason_of_a_refusal_is_explained() -> None:
    """The Event shows the same word."""
    text = text_of(GUIDE / "find-out-why-refused.md")
    rows = re.findall(r"^\| (`[A-Z][^|]*) \|", text, flags=re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(reason.value for reason in RefusalReason)
