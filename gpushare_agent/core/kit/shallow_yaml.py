"""Bounds how deep YAML is nested, for PyYAML's loaders in Python. Imported only where there is YAML. No state."""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 100
"""Levels of flow and block collections together. For each bracket that is not closed the scanner looks at all levels again:
100 kB of `[` took seconds before Python's own limit was reached."""


class ShallowScanner(yaml.scanner.Scanner):
    """The first base of a loader. Raises RecursionError, as the parser does for what is deeper still."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's
        self._require_depth()
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._require_depth()
        return bool(super().add_indent(column))

    def _require_depth(self) -> None:
        if self.flow_level + len(self.indents) > MAX_DEPTH:
            raise RecursionError(f"YAML of more than {MAX_DEPTH} levels")


class ShallowLoader(ShallowScanner, yaml.SafeLoader):
    """For YAML as PyYAML reads it."""
