"""The settings as a list of keys, and what people read about them: `--help`, what a key allows.

Everything here is derived from settings/tree.py; a setting needs no line of its own in this file.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Le
from msgspec import Struct
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpushare_agent.core.settings.tree import ALIASES, ENVIRONMENT_PREFIX, Settings
from gpushare_agent.core.settings.values import OneOf

_ROOT_TITLE = "The node."
TEXT, TEXTS = "text", "a comma list"
"""The values of a text and of a list of texts; their validators say more."""


class Kind(Struct, frozen=True, kw_only=True):
    """The values of a setting: the help's placeholder, the sentence of errors and docs, and the words that shells
    complete."""

    placeholder: str
    allowed: str
    choices: tuple[str, ...] = ()


class Key(Struct, frozen=True, kw_only=True):
    """One setting: `name` is dotted (`web.port`), `flag` and `aliases` lack the leading dashes, `section` is a title."""

    name: str
    section: str
    model: type[BaseModel]
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

    @property
    def description(self) -> str:
        """The text below the field: the unit, the meaning of None or empty, and the reason for the default."""
        return _descriptions(self.model.__module__)[self.model.__name__, self.name.rpartition(".")[2]]

    @property
    def kind(self) -> Kind:
        return _kind(self.field.annotation, self.field.metadata, is_duration=self.name.endswith("_s"))


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
            plain.append(Key(name=dotted, section=section, model=model, field=field, aliases=aliases))
    # Keys of the section itself first: in a help text or a file they would else stand in the last subsection.
    return plain + nested


@cache
def _descriptions(module: str) -> dict[tuple[str, str], str]:
    """The text below each class and field of a module. pydantic's `use_attribute_docstrings` would read the
    source at each start; here only help, completion and the reference do."""
    found = {}
    classes = [one for one in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(one, ast.ClassDef)]
    for section in classes:
        for field, text in pairwise(section.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(description))):
                    found[section.name, name] = " ".join(description.split())
    return found


def text_of(value: object) -> str:
    """A value as it is written in a flag."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # Without a .0 that nobody has written.
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return str(value)


def select_keys(names: Sequence[str]) -> tuple[Key, ...]:
    """The settings of these sections (`web`) and keys (`control.socket`), in the tree's order; `*` means all settings."""
    return tuple(key for key in all_keys() if "*" in names or key.name in names or key.name.partition(".")[0] in names)


def _kind(annotation: Any, metadata: Sequence[Any], *, is_duration: bool) -> Kind:
    if words := _words(annotation, metadata):
        shown = ", ".join(word or repr(word) for word in words)
        choices = tuple(filter(None, words))
        return Kind(placeholder="|".join(choices), allowed=f"one of {shown}", choices=choices)
    if annotation is bool:
        return Kind(placeholder="true|false", allowed="true or false", choices=("true", "false"))
    # Three states; a flag alone can say two of them: empty leaves the choice to another setting.
    if annotation == bool | None:
        return Kind(placeholder="true|false", allowed="true, false or empty", choices=("true", "false"))
    if annotation is int:
        return Kind(placeholder="N", allowed=f"a whole number{_bounds(metadata)}")
    if annotation is float and is_duration:
        return Kind(placeholder="SECONDS", allowed=f"seconds{_bounds(metadata)}, such as 2, 0.5, 500ms or 1m30s")
    if annotation is float:
        return Kind(placeholder="NUMBER", allowed=f"a number{_bounds(metadata)}")
    if get_origin(annotation) is tuple:
        return _list_kind(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return Kind(placeholder="K=V[,K=V…]", allowed="pairs such as zone=a,rack=7")
    if annotation is Path or Path in get_args(annotation):
        return Kind(placeholder="PATH", allowed="a path")
    return Kind(placeholder="TEXT", allowed=TEXT)


def _list_kind(item: Any) -> Kind:
    """A comma list, by the type of its items."""
    plain, *metadata = get_args(item) if get_origin(item) is Annotated else (item,)
    if words := _words(plain, metadata):
        return Kind(placeholder="NAME[,NAME…]", allowed=f"a comma list of {', '.join(words)}", choices=words)
    if plain is Path:
        return Kind(placeholder="PATH[,PATH…]", allowed="a path, or a comma list of them")
    if plain is str:
        return Kind(placeholder="TEXT[,TEXT…]", allowed=TEXTS)
    # pydantic keeps bounds in a field of its own when a validator stands next to them.
    bounds = [limit for part in metadata for limit in (part.metadata if isinstance(part, FieldInfo) else [part])]
    return Kind(placeholder="N[,N…]", allowed=f"a whole number{_bounds(bounds)}, or a comma list of them")


def _words(annotation: Any, metadata: Sequence[Any]) -> tuple[str, ...]:
    """The values of an enumeration, a Literal or `OneOf`; empty for any other type."""
    # Asked first: the type next to it is a plain text.
    if found := next((one.words() for one in metadata if isinstance(one, OneOf)), ()):
        return found
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    is_enumeration = isinstance(annotation, type) and issubclass(annotation, StrEnum)
    return tuple(str(word.value) for word in annotation) if is_enumeration else ()


def _bounds(metadata: Sequence[Any]) -> str:
    low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in metadata if isinstance(item, Le)), None)
    return "" if low is None or high is None else f" from {low} to {high}"


def help_text(keys: Sequence[Key]) -> str:
    """The settings part of `--help`: grouped, with units, allowed values, defaults and variables."""
    lines: list[str] = []
    section = ""
    for key in keys:
        if key.section != section:
            section = key.section
            lines += ["", section.rstrip(".") + ":"]
        spellings = ", ".join("--" + name for name in (key.flag, *key.aliases))
        lines.append(f"  {spellings} {key.kind.placeholder}")
        limits = _bounds(key.field.metadata)
        default = f"default {text_of(key.default) or 'empty'}{';' + limits if limits else ''}"
        facts = f"{key.description} [{default}; {key.variable}]"
        lines += textwrap.wrap(
            facts,
            100,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            # Flags and names of files stay whole, to be copied.
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines).strip("\n")
