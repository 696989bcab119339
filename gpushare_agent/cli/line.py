"""What the command lines have in common: a table of commands, their parsers, errors as lines, exit codes.

A command's parser is made from its `add_arguments`, for the command itself and for shell completion
(cli/completion_words.py). No command is defined here; cli/main.py has those of the node, cli/operator.py those that
show it.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import gc
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpushare_agent import __version__
from gpushare_agent.kit.log_writer import write_stderr
from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings.reference import all_keys, help_text
from gpushare_agent.settings.settings import SettingsError
from gpushare_agent.settings.sources import split_flags

PROGRAM = "gpushare-agent"
_INTERRUPTED = 130
_UNPRINTABLE = {"\n": "\n", "\t": " "}


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a command without options of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word of the command line. `run` gets the arguments behind it and returns the exit code.

    `add_arguments` gives a parser the command's own options; `takes_settings` tells that it takes every setting's flag.
    """

    name: str
    summary: str
    run: Callable[[Sequence[str], Mapping[str, str]], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    takes_settings: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program: its name, what it is for, its commands in the order in which its help lists them, a last line of help."""

    program: str
    purpose: str
    commands: Sequence[Command]
    more: str

    def main(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs one command and returns the exit code. A user's mistake ends in one line each, never in a traceback."""
        try:
            code = self._dispatch(argv, environ)
            sys.stdout.flush()
        except SystemExit as end:  # argparse ends so, after its own message
            return end.code if isinstance(end.code, int) else 0
        except SettingsError as error:
            return self._complain(error.problems, 2)
        except AgentError as error:
            return self._complain([str(error)], 1)
        except BaseExceptionGroup as group:  # a TaskGroup's: the agent's own errors are for a person, the rest are bugs
            ours, bugs = group.split(AgentError)
            if bugs is not None or ours is None:
                raise
            return self._complain([str(error) for error in _leaves(ours)], 1)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BrokenPipeError:  # the reader (`| head`) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        finally:
            gc.enable()
        return code

    def _dispatch(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        by_name = {command.name: command for command in self.commands}
        word = argv[0] if argv else ""
        if word in ("-h", "--help", "help"):
            print(self._overview())
            return 0
        if word == "--version":
            word = "version"
        if word in by_name:
            return by_name[word].run(argv[1:], environ)
        if not word:
            print(self._overview(), file=sys.stderr)
            return 2
        near = difflib.get_close_matches(word, sorted(by_name), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(by_name)
        if word.startswith("-"):
            first = self.commands[0].name
            return self._complain(
                [f"{word}: a command comes first, such as `{self.program} {first} {word}`; the commands: {known}"], 2
            )
        return self._complain([f"{word!r} is no command{hint}; the commands are {known}"], 2)

    def _overview(self) -> str:
        lines = [
            f"{self.program} {__version__}: {self.purpose}",
            "",
            f"usage: {self.program} COMMAND [FLAGS]",
            "",
            *(f"  {command.name:<14} {command.summary}" for command in self.commands),
            "",
            self.more,
        ]
        return "\n".join(lines)

    def _complain(self, problems: Sequence[str], code: int) -> int:
        """What a server or a file said may be part of a problem: no control character of theirs reaches the terminal."""
        for problem in problems:
            shown = "".join(
                letter if letter.isprintable() else _UNPRINTABLE.get(letter, "\ufffd") for letter in problem
            )
            write_stderr(f"{self.program}: {shown}\n")
        return code


def run_app(app: Coroutine[Any, Any, int]) -> int:
    """Everything is imported: what exists now lives as long as the process, so no collection needs to look at it again."""
    gc.freeze()
    gc.enable()
    return asyncio.run(app)


def make_parser(
    name: str,
    description: str,
    argv: Sequence[str],
    *,
    examples: Sequence[str] = (),
    program: str = PROGRAM,
    has_all_settings: bool = False,
) -> argparse.ArgumentParser:
    """A command's parser. `examples` are whole lines; the settings are told as groups, or every one of them, which is long
    and only built for who asks."""
    asked = "-h" in argv or "--help" in argv
    shown = "".join(f"\n  {line}" for line in examples)
    head = f"example{'s' if len(examples) > 1 else ''}:{shown}\n\n" if examples else ""
    settings = _all_settings() if has_all_settings else _setting_groups()
    return argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=description,
        epilog=head + settings if asked else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _all_settings() -> str:
    return (
        "Settings, each also a variable and a key of the YAML file (flag > variable > file > default):\n\n"
        + help_text()
    )


def _setting_groups() -> str:
    """One line for each group: what a reader needs to know where to look."""
    groups = {key.section: key.flag.partition(".")[0] + ".…" if "." in key.flag else "…" for key in all_keys()}
    lines = [f"  {f'--{flags}':<20} {section.rstrip('.')}" for section, flags in groups.items()]
    tail = textwrap.fill(
        f"`{PROGRAM} run --help` and docs/settings.md explain each one; `{PROGRAM} config` prints what is in effect.",
        100,
    )
    return "\n".join(
        [
            "settings, all of them accepted here (flag > variable GPUSHARE_… > YAML file of --config > default):",
            *lines,
            tail,
        ]
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and what is left for the settings. A name that both have is the command's."""
    own = frozenset(parser._option_string_actions)
    mine, others = split_flags(argv, leave=own)
    options, unknown = parser.parse_known_args(others)
    return options, [*mine, *unknown]


def _leaves(group: BaseExceptionGroup[AgentError]) -> list[AgentError]:
    found: list[AgentError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
