"""Parses a settings file: plain YAML without aliases, tags, and duplicate keys.

Aliases are refused because a few lines of them unfold into gigabytes; a duplicate key is refused because YAML takes
the last one silently.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class UnreadableYaml(Exception):  # noqa: N818 - names what is wrong with the file
    """One line: what is wrong and where."""


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave the parser untyped
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableYaml(
                "aliases are not allowed" + (f" (line {event.start_mark.line + 1})" if event.start_mark else "")
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            name = str(key_node.value)
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key {name!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(content: bytes) -> dict[object, object]:
    """The file's mapping; an empty file is an empty one.

    Raises:
        UnreadableYaml: not YAML, no mapping, nested too deeply, or one of the things refused above.
    """
    try:
        tree = yaml.load(content, _PlainLoader)  # noqa: S506 - the loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UnreadableYaml(f"{error.problem}{where}") from error
    except yaml.reader.ReaderError as error:
        raise UnreadableYaml(f"it is no text: {error.reason} at byte {error.position}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UnreadableYaml(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise UnreadableYaml("it is nested too deeply") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UnreadableYaml(f"it is a {type(tree).__name__}, but must be a mapping such as `web: {{port: 5678}}`")
    return tree
