"""The settings as a list of keys, and what people read about them: `--help`, docs/settings.md, what a key allows.

Everything here is derived from settings/tree.py; a setting needs no line of its own in this file.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpushare_agent.settings.tree import ALIASES, Settings

ENVIRONMENT_PREFIX = "GPUSHARE_"
_ROOT_TITLE = "The node."


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting: `name` is dotted (`web.port`), `flag` and `aliases` lack the leading dashes, `section` is a title."""

    name: str
    section: str
    field: FieldInfo
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag_names(self) -> tuple[str, ...]:
        """Every accepted flag. A dot may be written as a dash: --web.port, --web-port."""
        return tuple(dict.fromkeys((self.flag, self.flag.replace(".", "-"), *self.aliases)))

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.replace(".", "__").upper()

    @property
    def is_boolean(self) -> bool:
        return self.field.annotation is bool

    @property
    def default(self) -> object:
        return self.field.get_default(call_default_factory=True)


@cache
def all_keys() -> tuple[Key, ...]:
    """Every setting, in the order of the tree."""
    return tuple(_keys_of(Settings, "", _ROOT_TITLE))


def _keys_of(model: type[BaseModel], prefix: str, section: str) -> list[Key]:
    plain: list[Key] = []
    nested: list[Key] = []
    for name, field in model.model_fields.items():
        dotted = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested += _keys_of(field.annotation, dotted + ".", (field.annotation.__doc__ or dotted).strip())
        else:
            aliases = tuple(alias for alias, key in ALIASES.items() if key == dotted)
            plain.append(Key(name=dotted, section=section, field=field, aliases=aliases))
    return plain + nested


def text_of(value: object) -> str:
    """A value as one would write it in a flag."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return str(value)


def allowed_text(key: Key) -> str:
    """What a key takes, for error messages and the help."""
    kind = key.field.annotation
    if get_origin(kind) is Literal:
        words = [repr(word) if word == "" else str(word) for word in get_args(kind)]
        return "one of " + ", ".join(words)
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number" + _bounds(key.field.metadata)
    if kind is float and not key.name.endswith("_s"):
        return "a number" + _bounds(key.field.metadata)
    if kind is float:
        return "seconds" + _bounds(key.field.metadata) + ", such as 2, 0.5, 500ms or 1m30s"
    if words := _words(kind):
        return "one of " + ", ".join(words)
    if get_origin(kind) is tuple:
        item = _item(kind)
        if words := _words(item):
            return "a comma list of " + ", ".join(words)
        if item is Path:
            return "a path, or a comma list of them"
        return "a whole number" + _bounds(_item_metadata(kind)) + ", or a comma list of them"
    if get_origin(kind) is dict:
        return "pairs such as zone=a,rack=7"
    if kind is Path or Path in get_args(kind):
        return "a path"
    return "text"


def _words(kind: Any) -> list[str]:
    """The values of an enumeration."""
    return [str(word.value) for word in kind] if isinstance(kind, type) and issubclass(kind, StrEnum) else []


def _item(kind: Any) -> Any:
    item = get_args(kind)[0]
    return get_args(item)[0] if get_origin(item) is Annotated else item


def _item_metadata(kind: Any) -> list[Any]:
    item = get_args(kind)[0]
    found: list[Any] = []
    for part in get_args(item)[1:] if get_origin(item) is Annotated else ():
        found += part.metadata if isinstance(part, FieldInfo) else [part]
    return found


def _bounds(metadata: list[Any]) -> str:
    low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in metadata if isinstance(item, Le)), None)
    return "" if low is None or high is None else f" from {low} to {high}"


def kind_word(key: Key) -> str:
    """The placeholder for a value in the help."""
    kind = key.field.annotation
    if get_origin(kind) is Literal:
        return "|".join(word for word in get_args(kind) if word)
    if words := _words(kind):
        return "|".join(words)
    if get_origin(kind) is tuple and (_words(_item(kind)) or _item(kind) is Path):
        return "PATH[,PATH…]" if _item(kind) is Path else "NAME[,NAME…]"
    if get_origin(kind) in (Union, UnionType) or kind is Path:
        return "PATH"
    if kind is float and not key.name.endswith("_s"):
        return "NUMBER"
    names: dict[object, str] = {bool: "true|false", int: "N", float: "SECONDS", tuple: "N[,N…]", dict: "K=V[,K=V…]"}
    return names.get(get_origin(kind) or kind, "TEXT")


def help_text(width: int = 100) -> str:
    """The settings part of `--help`: grouped, with units, allowed values, defaults and variables."""
    lines: list[str] = []
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines += ["", section.rstrip(".") + ":"]
        spellings = ", ".join("--" + name for name in (key.flag, *key.aliases))
        lines.append(f"  {spellings} {kind_word(key)}")
        facts = f"{key.field.description} [{_default_text(key)}; {key.variable}]"
        lines += textwrap.wrap(
            facts,
            width,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines).strip("\n")


def _default_text(key: Key) -> str:
    limits = _bounds(key.field.metadata)
    return f"default {text_of(key.default) or 'empty'}{';' + limits if limits else ''}"


def markdown() -> str:
    """docs/settings.md, whole."""
    lines = [_MARKDOWN_HEAD.strip()]
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines += [
                "",
                f"## {section.rstrip('.')}",
                "",
                "| key | flags | default | allowed | meaning |",
                "|---|---|---|---|---|",
            ]
        flags = "<br>".join(f"`--{name}`" for name in (key.flag, *key.aliases))
        default = f"`{text_of(key.default)}`" if text_of(key.default) else "empty"
        allowed, meaning = (text.replace("|", "\\|") for text in (allowed_text(key), key.field.description or ""))
        lines.append(f"| `{key.name}` | {flags} | {default} | {allowed} | {meaning} |")
    return "\n".join(lines) + "\n"


_MARKDOWN_HEAD = f"""
# Settings

Generated by `gpushare-agent config --output markdown`; do not edit.

A setting can be given as a flag, as an environment variable, or in a YAML file (`--config FILE` or
`{ENVIRONMENT_PREFIX}CONFIG`). A flag beats a variable, a variable beats the file, the file beats the default.
`gpushare-agent config` prints what is in effect and where each value came from.

- The **flag** of `web.port` is `--web.port 5678` or `--web.port=5678`; `--web-port` is the same. A flag given twice counts
  the last time. A true-or-false flag may stand alone: `--share-mode` is `--share-mode=true`.
- The **variable** is `{ENVIRONMENT_PREFIX}` and the key in capitals, a dot written as two underscores:
  `{ENVIRONMENT_PREFIX}WEB__PORT`.
- The **file** nests at the dots: `web: {{port: 5678}}`. Anchors, aliases and keys given twice are refused.
- Durations are seconds (`2`, `0.5`) or a number with a unit (`500ms`, `1m30s`).

An unknown name or a bad value ends the program with exit code 2 and one line for each mistake.
"""

__all__ = ["ENVIRONMENT_PREFIX", "Key", "all_keys", "allowed_text", "help_text", "markdown", "text_of"]
