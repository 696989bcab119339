"""The promises of the programs that this one follows, one row each: what became of it, and the test that shows it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gpushare_agent.settings.reference import all_keys
from tests.docs.generated import ROOT, families
from tests.promises.promise import Promise, Verdict
from tests.promises.sources import SOURCES


def rows() -> Iterator[Promise]:
    for promises in SOURCES.values():
        for of_title in promises.values():
            yield from of_title


@cache
def names_in(file: str) -> frozenset[str]:
    """The names behind `::` that pytest gives the tests of a file, without parameters."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{below.name}" for below in node.body if isinstance(below, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


@pytest.mark.parametrize("source", SOURCES)
def test_every_promise_names_a_test_that_exists(source: str) -> None:
    """A row whose test was renamed or went proves nothing; one that is not kept may have none."""
    proofs = {
        row.proof
        for of_title in SOURCES[source].values()
        for row in of_title
        if row.proof or row.verdict is not Verdict.NOT
    }
    split = {proof: proof.partition("::") for proof in proofs}
    lost = {
        proof for proof, (file, _, name) in split.items() if not (ROOT / file).is_file() or name not in names_in(file)
    }
    assert lost == set()


def test_every_row_says_one_thing() -> None:
    """A row twice would let its two verdicts part; a cell with a bar or a line's end would break its table."""
    for source, promises in SOURCES.items():
        named = Counter(row.have for of_title in promises.values() for row in of_title)
        assert [have for have, count in named.items() if count > 1] == [], source
    cells = [cell for row in rows() for cell in (row.source, row.have, row.here)]
    assert [cell for cell in cells if not cell or "\n" in cell or "|" in cell.replace("\\|", "")] == []


def test_every_name_of_ours_in_a_row_exists() -> None:
    """A metric or a setting that was renamed would send its readers into the void."""
    texts = [row.here for row in rows()]
    metrics = {one for text in texts for one in re.findall(r"`(gpushare_(?:card|container)_\w+)`", text)}
    assert metrics <= {family.name for family in families()} and metrics
    settings = {one for text in texts for one in re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]+)?`", text)}
    assert settings <= {key.name for key in all_keys()} and settings


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_its_tables_in_a_page(source: str) -> None:
    """Users look there, not here."""
    pages = [path.read_text(encoding="utf-8") for path in Path(ROOT / "docs").rglob("*.md")]
    assert sum(f"<!-- generated: promises_{source} -->" in page for page in pages) == 1
