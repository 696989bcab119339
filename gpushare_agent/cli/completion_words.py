"""`gpushare-agent completion bash|zsh|fish`: prints the shell's script, made from the tables of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpushare_agent.cli.line import PROGRAM, Command, CommandLine, make_parser

if TYPE_CHECKING:
    from gpushare_agent.cli import completion

SHELLS = ("bash", "zsh", "fish")


def completion_command(lines: Callable[[], Sequence[CommandLine]]) -> Command:
    """`lines` are the programs to complete, asked for when the command runs: it is itself a part of one of them."""

    def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
        parser = make_parser("completion", "Prints a script that makes a shell complete commands and flags.", ())
        parser.epilog = f"example:\n  source <({PROGRAM} completion bash)\n"
        _arguments(parser)
        shell = parser.parse_args(argv).shell
        from gpushare_agent.cli import completion

        print(completion.script(shell, [program_of(line) for line in lines()]), end="")
        return 0

    return Command(
        name="completion",
        summary="print a script that makes your shell complete commands and flags",
        run=run,
        add_arguments=_arguments,
        takes_settings=False,
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def program_of(line: CommandLine) -> completion.Program:
    """The executable's words, from its commands' parsers."""
    from gpushare_agent.cli import completion

    words = tuple(_word(command) for command in line.commands)
    return completion.Program(name=line.program.replace(" ", "-"), words=words)


def _word(command: Command) -> completion.Word:
    from gpushare_agent.cli import completion

    parser = argparse.ArgumentParser(prog=command.name)
    command.add_arguments(parser)
    return completion.word_of(command.name, command.summary, parser, takes_settings=command.takes_settings)
