"""What has a name for users does not grow unseen: CONTRIBUTING.md has the most of each kind."""

from __future__ import annotations

import re

from tests.docs.surface_page import ROOT, surface


def test_there_is_no_more_to_set_and_read_than_contributing_says() -> None:
    """The last one, of which it says why it came, is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n## Surface\n")[2].partition("\n## ")[0]
    rows = {
        kind: (int(most), last) for kind, most, last in re.findall(r"^\| ([a-z ,]+) \| (\d+) \| `(.+?)`: ", table, re.M)
    }
    found = {kind: names for kind, (_, names) in surface().items()}
    assert found.keys() == rows.keys()
    assert {kind: len(names) for kind, names in found.items() if len(names) > rows[kind][0]} == {}
    assert [kind for kind, (_, last) in rows.items() if last not in found[kind]] == []
