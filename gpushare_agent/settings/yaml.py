"""Parses a settings file: plain YAML without aliases, tags, and duplicate keys.

Aliases are refused because a few lines of them unfold into gigabytes; a duplicate key is refused because YAML takes
the last one silently. What comes out is what JSON has too: a date is a text, and a number has at most 40 characters.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_DATE = "tag:yaml.org,2002:timestamp"
_INTEGER = "tag:yaml.org,2002:int"
_MAX_NUMBER_CHARS = 40
"""Python shows no integer of more than 4,300 digits, and a message about it would fail."""


class UnreadableYaml(Exception):  # noqa: N818 - names what is wrong with the file
    """One line: what is wrong and where."""


class _PlainLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the class above it
        first: [(tag, pattern) for tag, pattern in found if tag != _DATE]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave the parser untyped
        where = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableYaml(f"aliases are not allowed{where}")
        if event.tag is not None:
            raise UnreadableYaml(f"tags are not allowed{where}")
        node = super().compose_node(parent, index)
        if node is not None and node.tag == _INTEGER and len(node.value) > _MAX_NUMBER_CHARS:
            raise yaml.MarkedYAMLError(
                problem=f"a number has {len(node.value)} characters, {_MAX_NUMBER_CHARS} are read",
                problem_mark=node.start_mark,
            )
        return node

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
