"""Shell completion: from the parsers and the settings to words, and from these to scripts for bash, zsh and fish.

A script is complete in itself: pressing Tab starts no process. It is made from the same parsers that read the command line,
so that it offers what they take; after an update it is to be printed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gpushare_agent.settings.reference import Key, all_keys, allowed_text, kind_word

_PATH_WORDS = ("FILE", "DIR", "PATH")
_LIST_OF = "a comma list of "


class Value(Enum):
    """Whether an option has a value. An optional one only follows "="."""

    NONE = "none"
    OPTIONAL = "optional"
    TEXT = "text"
    PATH = "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option with all its names, dashes included."""

    names: tuple[str, ...]
    about: str
    value: Value
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A command, or a command of a command. `choices` are what its positional arguments may be."""

    name: str
    about: str
    options: tuple[Option, ...]
    choices: tuple[str, ...] = ()
    words: tuple[Word, ...] = ()
    takes_settings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An executable and its commands."""

    name: str
    words: tuple[Word, ...]


def word_of(name: str, about: str, parser: argparse.ArgumentParser, *, takes_settings: bool) -> Word:
    """What a parser takes."""
    options: list[Option] = []
    choices: list[str] = []
    words: list[Word] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += _words_of(action)
        elif action.option_strings:
            options.append(_option(action))
        else:
            choices += map(str, action.choices or ())
    return Word(
        name=name,
        about=about,
        options=tuple(options),
        choices=tuple(choices),
        words=tuple(words),
        takes_settings=takes_settings,
    )


def _words_of(action: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[Word]:
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    return [word_of(name, helps.get(name, ""), parser, takes_settings=False) for name, parser in action.choices.items()]


def _option(action: argparse.Action) -> Option:
    placeholder = action.metavar if isinstance(action.metavar, str) else ""
    is_path = action.type is Path or any(word in placeholder for word in _PATH_WORDS)
    value = Value.PATH if is_path else Value.TEXT
    if action.nargs == 0:
        value = Value.NONE
    elif action.nargs == "?":
        value = Value.OPTIONAL
    about = (action.help or "") % {**vars(action), "prog": ""} if action.help else ""
    return Option(
        names=tuple(action.option_strings), about=about, value=value, choices=tuple(map(str, action.choices or ()))
    )


def setting_options() -> tuple[Option, ...]:
    """Every setting's flag and its aliases."""
    return tuple(_setting(key) for key in all_keys())


def _setting(key: Key) -> Option:
    placeholder, allowed = kind_word(key), allowed_text(key)
    choices: Iterable[str] = ()
    value = Value.TEXT
    if key.is_boolean:
        value, choices = Value.OPTIONAL, ("true", "false")
    elif "|" in placeholder:
        choices = placeholder.split("|")
    elif "PATH" in placeholder:
        value = Value.PATH
    elif allowed.startswith(_LIST_OF):
        choices = allowed.removeprefix(_LIST_OF).split(", ")
    names = tuple(f"--{name}" for name in (key.flag, *key.aliases))
    return Option(names=names, about=key.field.description or "", value=value, choices=tuple(choices))


def script(shell: str, programs: Sequence[Program]) -> str:
    """For `bash`, `zsh` or `fish`."""
    from gpushare_agent.cli import completion_bash, completion_fish, completion_zsh

    made = {"bash": completion_bash.script, "zsh": completion_zsh.script, "fish": completion_fish.script}
    return made[shell](programs, setting_options())


def offered(program: Program, words: Sequence[str]) -> list[str]:
    """What the last of the words may become, for who asks a program and not a script. `words` are those behind the
    program's name; a value behind "=" comes with its flag."""
    before, last = words[:-1], words[-1] if words else ""
    if not before:
        return _beginning([*(word.name for word in program.words), "--help", "--version"], last)
    word = next((word for word in program.words if word.name == before[0]), None)
    if word is None:
        return []
    known = [*word.options, *(setting_options() if word.takes_settings else ())]
    flag, equals, _ = last.partition("=")
    if equals:
        choices = next((option.choices for option in known if flag in option.names), ())
        return _beginning([f"{flag}={choice}" for choice in choices], last)
    asked = next((option for option in known if before[-1] in option.names), None)
    if asked is not None and asked.value in (Value.TEXT, Value.PATH):
        return _beginning(asked.choices, last)
    if last.startswith("-"):
        return _beginning([name for option in known for name in option.names], last)
    return _beginning(word.choices, last)


def _beginning(choices: Iterable[str], start: str) -> list[str]:
    return [choice for choice in choices if choice.startswith(start)]


def first_sentence(text: str, limit: int = 90) -> str:
    """What fits beside a word."""
    sentence = " ".join(text.split()).split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= limit else sentence[: limit - 1].rstrip() + "…"
