"""Shell completion by argcomplete: the shells' scripts, and the answer to one press of Tab.

The script is a few lines of argcomplete's; on Tab it runs the program with the variable `_ARGCOMPLETE`. The program then
builds the parser of the command that is typed, so that the answer is always that of the installed version. kubectl asks
`kubectl_complete-gpushare` instead of a script (kubectl/plugin.py). No state.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from itertools import count

from argcomplete.completers import ChoicesCompleter
from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from gpushare_agent.core.cli.command_line import CommandLine
from gpushare_agent.core.settings.reference import select_keys


def script(shell: str, lines: Sequence[CommandLine]) -> str:
    """The script that the shell sources."""
    return shellcode([line.program.replace(" ", "-") for line in lines], shell=shell)


def answer_shell(line: CommandLine) -> int:
    """Writes the completions to the descriptor that the script opened. Does not return: argcomplete ends the process."""
    # Up to the cursor: a command behind it has not been chosen yet.
    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    CompletionFinder()(_parser(line, typed[1:]), always_complete_options=False)
    return 0


def completions(line: CommandLine, words: Sequence[str]) -> list[str]:
    """The possible completions of the last of `words`, which follow the program's name. No names of files."""
    *before, last = words or [""]
    flag, equals, _ = last.partition("=")
    if last.startswith("-") and equals:  # argcomplete expects the option itself before a value behind "="
        before.append(flag)
    typed = " ".join([*before, last])
    finder = CompletionFinder(
        _parser(line, words), always_complete_options=False, default_completer=ChoicesCompleter({}), append_space=False
    )
    # readline's protocol: the state counts up until there is no further match.
    matches = iter(partial(next, map(partial(finder.rl_complete, typed), count())), None)
    # argcomplete answers with the whole line, kubectl wants the last word.
    return [match[len(typed) - len(last) :] for match in matches]


def _parser(line: CommandLine, words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, and the options of the one that is typed: importing the options of all would take seconds."""
    parser = argparse.ArgumentParser(prog=line.program, allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    for command in line.commands:
        one = commands.add_parser(
            command.name, help=command.summary, conflict_handler="resolve", allow_abbrev=False, add_help=True
        )
        # Only the command that is typed: the options of others are not offered behind it.
        if command.name in words[:1]:
            if command.settings is not None:
                _add_settings(one, command.settings)
            command.add_arguments(one)  # after the settings: an option that both have is the command's
    return parser


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Those that its `--help` lists."""
    for key in select_keys(["config", *names]):
        flags = [f"--{name}" for name in (key.flag, *key.aliases)]
        # The first sentence; zsh and fish show it in one line. argparse formats its help by %.
        about = key.description.partition(". ")[0].replace("%", "%%")
        action = parser.add_argument(*flags, nargs="?" if key.is_boolean else None, help=about)
        if choices := dict.fromkeys(key.kind.choices, ""):  # no `choices=`, which would refuse a comma list of them
            action.completer = ChoicesCompleter(choices)  # type: ignore[attr-defined]  # argcomplete's attribute
