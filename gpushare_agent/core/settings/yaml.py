"""Parses a settings file, YAML or JSON: plain, without aliases, tags, and duplicate keys.

Aliases are refused because a few lines of them unfold into gigabytes; a duplicate key is refused because YAML takes
the last one silently. A scalar means what YAML 1.2's core schema says (yaml.org/spec/1.2.2, section 10.3), which is what
JSON has too: `yes`, `12:30` and a date are texts, and octal is `0o17`. A number has at most 40 characters.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from gpushare_agent.core.kit.shallow_yaml import ShallowLoader

_MAX_NUMBER_CHARS = 40
"""Python shows no integer of more than 4,300 digits, and a message about it would fail."""
_MAX_BYTES = 256 * 1024
"""The reader in Python takes 8.3 s of processor time for a mebibyte of short values, and 1.8 s for this (measured)."""


class UnreadableYaml(Exception):  # noqa: N818 - names what is wrong with the file
    """One line: what is wrong and where."""


class _PlainLoader(ShallowLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - as in the class above it, whose are YAML 1.1's

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave the parser untyped
        where = f" (line {event.start_mark.line + 1})" if event.start_mark else ""
        # Before the node is made: what aliases stand for must not be built at all.
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableYaml(f"aliases are not allowed{where}")
        if event.tag is not None:
            raise UnreadableYaml(f"tags are not allowed{where}")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        return node

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        problem = ""
        if node.tag in (_INTEGER, _FLOAT) and len(node.value) > _MAX_NUMBER_CHARS:
            problem = f"a number has {len(node.value)} characters, {_MAX_NUMBER_CHARS} are read"
        try:  # JSON writes a character outside the first plane as two escapes
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            problem = "a text has half of a character, written as an escape"
        if "\0" in node.value:
            problem = "a text has the character 0, which no path or name may have"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            name = str(key_node.value)
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key {name!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(name)
        # Compared as texts: `1` and `"1"` would be two keys for YAML and one setting for us.
        return super().construct_mapping(node, deep=deep)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    return int(node.value, base)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """Infinity and NaN, too: whoever wants a number refuses them with the setting's name."""
    # YAML writes .inf and .nan, Python inf and nan.
    return float(node.value.replace(".", "", 1) if node.value[-1] in "fFnN" else node.value)


_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_CORE = (
    ("tag:yaml.org,2002:null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INTEGER, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Tag, pattern, and what a scalar of it begins with; the first match counts."""
for _tag, _pattern, _firsts in _CORE:
    # \Z, because $ would let a line's end follow.
    _PlainLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _firsts)
_PlainLoader.add_constructor(_INTEGER, _integer)
_PlainLoader.add_constructor(_FLOAT, _float)


def parse_yaml(content: bytes) -> dict[object, object]:
    """The file's mapping; an empty file is an empty one.

    Raises:
        UnreadableYaml: not YAML, no mapping, nested too deeply, one of the things refused above, or whatever else the
            library does not get through.
    """
    if len(content) > _MAX_BYTES:
        raise UnreadableYaml(f"it is of {len(content)} bytes, {_MAX_BYTES} are read")
    if content.lstrip().startswith(b"{"):
        content = content.replace(b"\t", b" ")  # JSON may be indented by tabs, YAML may not
    try:
        tree = yaml.load(content, _PlainLoader)  # noqa: S506 - the loader is a SafeLoader
    except UnreadableYaml:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UnreadableYaml(f"{error.problem}{where}") from error
    except yaml.reader.ReaderError as error:
        raise UnreadableYaml(f"it is no text: {error.reason} at byte {error.position}") from error
    # The parser goes down one call for each level, so a few kilobytes of brackets reach Python's limit.
    except RecursionError as error:
        raise UnreadableYaml("it is nested too deeply") from error
    except Exception as error:  # a file that a person wrote must not end the agent, whatever it holds
        raise UnreadableYaml(" ".join(str(error).split()) or type(error).__name__) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UnreadableYaml(f"it is a {type(tree).__name__}, but must be a mapping such as `web: {{port: 5678}}`")
    return tree
