#!/usr/bin/env python3
"""The table of values in charts/gpushare-agent/README.md, made from values.yaml: `--write` puts it there. A test compares.

A value's text is the comment right above it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "gpushare-agent"
README = CHART / "README.md"
BEGIN, END = "<!-- made by charts/values_table.py -->\n", "<!-- end -->\n"
WHOLE = {"resources", "updateStrategy", "nodeSelector"}
"""Maps that are Kubernetes' own: a row each."""
_KEY = re.compile(r"( *)([A-Za-z]+):.*")


def comments(text: str) -> dict[str, str]:
    """Dotted name -> the comment right above it."""
    found: dict[str, str] = {}
    path, comment = list[str](), list[str]()
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("# "))
            continue
        if key := _KEY.fullmatch(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            found[".".join(path)] = " ".join(comment)
        comment = []
    return found


def defaults(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and default, in the order of the file."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from defaults(value, f"{above}{key}.")
        else:
            yield above + key, value


def rows() -> Iterator[tuple[str, str, str]]:
    """Dotted name, default as YAML, text."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    texts = comments(text)
    for name, value in defaults(yaml.safe_load(text)):
        shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
        linked = re.sub(r"docs/([a-z-]+/([a-z-]+\.md))", r"[\2](../../docs/\1)", texts[name])
        yield name, f"`{shown.removesuffix('...').strip()}`", linked


def table() -> str:
    lines = ["| value | default | |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {text} |" for name, default, text in rows()]
    return "\n".join(lines) + "\n"


def readme_with_table(text: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} has not both lines {BEGIN!r} and {END!r}")
    return before + begin + "\n" + table() + "\n" + end + after


if __name__ == "__main__":
    changed = readme_with_table(README.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        README.write_text(changed, encoding="utf-8")
    else:
        sys.stdout.write(table())
