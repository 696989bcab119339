"""YAML of CDI specs as strings, lists and mappings, nothing else. Pure; imported only where there is such a file."""

from __future__ import annotations

from typing import Any

import yaml

from gpushare_agent.core.kit.shallow_yaml import ShallowScanner


class _PlainLoader(ShallowScanner, yaml.BaseLoader):
    """No tags and no aliases, with which a few hundred bytes make gigabytes.

    The loader of pure Python: the one in C overflows its stack on deep nesting, which kills the process.
    """

    alias_error: Exception

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise self.alias_error
        return super().compose_node(parent, index)


def parse_yaml(content: bytes, alias_error: Exception) -> Any:
    """Raises `alias_error` for aliases; ValueError for what is no YAML, TypeError, OverflowError, RecursionError."""
    try:
        loader = _PlainLoader(content)
        loader.alias_error = alias_error
        return loader.get_single_data()
    except yaml.YAMLError as e:
        raise ValueError(str(e)) from e
