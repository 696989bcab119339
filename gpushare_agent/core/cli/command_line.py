"""The common parts of the command lines: the table of commands, their parsers, errors as lines, exit codes.

`commands.py` and `kubectl/view_commands.py` define the commands. One `Command` is the source of the parser, of `--help`
and of shell completion (cli/completion.py). No state.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import errno
import gc
import io
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from gpushare_agent import __version__
from gpushare_agent.core.cli.interrupts import INTERRUPTED, raise_error
from gpushare_agent.core.kit.daemon_thread import Loop
from gpushare_agent.core.kit.logs import setup_logging, write_stderr
from gpushare_agent.core.kit.near_names import did_you_mean, nearest
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.reference import Key, all_keys, help_text, select_keys
from gpushare_agent.core.settings.settings import LoadedSettings, Settings, SettingsError, load_settings
from gpushare_agent.core.settings.sources import split_flags

PROGRAM, KUBECTL = "gpushare-agent", "kubectl gpushare"
ALL_SETTINGS = ("*",)
AGENT_NAMESPACE = "gpushare-system"
"""Namespace of the agents' pods in the manifests; --agent-namespace names another."""
Form = Literal["table", "wide", "json", "yaml"]
Sort = Literal["gpu", "sm", "memory", "cores"]
SORTS: tuple[Sort, ...] = ("gpu", "sm", "memory", "cores")
"""Orders of `top`."""
COMPLETION_VARIABLE = "_ARGCOMPLETE"
"""argcomplete's shell code sets it when it asks the program for completions."""
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a descriptor, which have no file's name. Files and sockets have adapters, which rename their errors."""
_UNPRINTABLE = {"\n": "\n", "\t": " "}
_STAND_INS = str.maketrans("…–—µ·°↑↓█▉▊▋▌▍▎▏▁▂▃▄▅▆▇", ".--u. ^v####----__..---")
_ENCODING_ERRORS = "gpushare-stand-ins"
"""Name of the error handler of both standard streams."""


Argument = Callable[[Any], object]
"""Adds an option, or several, to a parser or to a group of one."""


def arg(usage: str, text: str, **fields: Any) -> Argument:
    """An option as the help has it, `-w --watch SECONDS`, or an argument, `pod POD`; `fields` are those of `add_argument`.
    An option without a placeholder and choices is true or false; any other is a text, empty where it is left out."""
    words = usage.split()
    names = [word for word in words if word.startswith("-")] or words[:1]
    if words != names:
        fields["metavar"] = words[-1]
    elif words[0].startswith("-") and fields.keys().isdisjoint({"choices", "action"}):
        fields["action"] = "store_true"
    if fields.keys().isdisjoint({"action", "choices", "type"}):
        fields.setdefault("default", "")
    return lambda parser: parser.add_argument(*names, help=text, **fields)


def one_of(*arguments: Argument) -> Argument:
    """At most one of them may be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def lazy(name: str) -> Callable[..., Any]:
    """MODULE:FUNCTION in gpushare_agent, imported when it is called: the way to the first registration is short of time."""

    def call(*arguments: Any, **fields: Any) -> Any:
        module, _, function = name.partition(":")
        found = getattr(import_module(f"gpushare_agent.{module}"), function)
        raise_error()
        return found(*arguments, **fields)

    call.__qualname__ = name
    return call


def number(least: float, most: float, unit: str = "") -> Callable[[str], float]:
    """The type of an option. NaN, which compares with nothing, is refused too."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}{unit}")
        return value

    return read


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of an option. int() would take signs, blanks and digits of other scripts."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


def add_output(parser: argparse.ArgumentParser, *, default: str = "table") -> None:
    """`-o`, with the same forms in every command."""
    text = "table for people, wide with more columns, json or yaml for programs (table)"
    parser.add_argument("-o", "--output", choices=get_args(Form), default=default, help=text)


class Invocation(Struct, frozen=True, kw_only=True):
    """One call of a command of `program`: its own options, the settings' flags, what `Command.split_rest` set apart, the
    environment."""

    program: str
    options: argparse.Namespace
    flags: Sequence[str]
    rest: Sequence[str]
    environ: Mapping[str, str]

    def load(self, named: NamedConfiguration | None = None) -> LoadedSettings:
        """Raises SettingsError."""
        return load_settings(self.flags, self.environ, named)

    def settings(self, log_level: str | None = "error") -> Settings:
        """Reads the settings and sets up logging: at the level of the settings with None, else for a command whose output
        has everything already. Raises SettingsError."""
        return self.load_with_logs(log_level).settings

    def load_with_logs(self, log_level: str | None = None) -> LoadedSettings:
        """The same, with the sources."""
        loaded = self.load()
        setup_logging(log_level or loaded.settings.log.level, loaded.settings.log.format)
        return loaded


class Command(Struct, frozen=True, kw_only=True):
    """One subcommand. `run` returns the exit code, or a coroutine that does. `description` begins its help where `summary`
    is too short for that.

    `settings` names the sections (`web`) and keys (`control.socket`) that it reads, which its `--help` lists; the flags of
    all others are accepted too. None: the command takes no setting. `examples` lack the program's name.
    """

    name: str
    summary: str
    run: Callable[[Invocation], int | Coroutine[Any, Any, int]]
    description: str = ""
    examples: Sequence[str] = ()
    arguments: Sequence[Argument] = ()
    settings: Sequence[str] | None = None
    help_note: str = ""
    split_rest: Callable[[Sequence[str]], tuple[Sequence[str], Sequence[str]]] = lambda argv: (argv, ())

    @property
    def about(self) -> str:
        """The sentence with which the help begins."""
        return self.description or f"{self.summary[:1].upper()}{self.summary[1:]}."

    def invoke(self, program: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Parses `argv` and runs the command.

        Raises:
            SystemExit: as argparse does.
            SettingsError, AgentError: for `CommandLine.main` to print; a mistyped option is one.
        """
        code = self.run(self.parse(program, argv, environ))
        return code if isinstance(code, int) else run_app(code)

    def parse(self, program: str, argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
        """An option that both the command and a setting have is the command's. Raises as `invoke` does."""
        words, rest = self.split_rest(argv)
        parser = self._parser(program, with_help="-h" in words or "--help" in words)
        flags, own = (
            ([], words) if self.settings is None else split_flags(words, frozenset(parser._option_string_actions))
        )
        # Before it is parsed: the value of a mistyped option would be taken for a command of the sandbox.
        _refuse_mistyped(parser, own, all_keys() if self.settings is not None else ())
        options, unknown = parser.parse_known_args(own)
        if self.settings is None and unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        # load_settings reports the unknown with the other mistakes.
        return Invocation(program=program, options=options, flags=[*flags, *unknown], rest=rest, environ=environ)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for argument in self.arguments:
            argument(parser)

    def _parser(self, program: str, *, with_help: bool) -> argparse.ArgumentParser:
        """The text about the settings is built only when it is asked for."""
        parser = _Parser(
            prog=f"{program} {self.name}",
            description=self.about,
            epilog=self._epilog(program) if with_help else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviation changes its meaning when an option is added.
            allow_abbrev=False,
        )
        self.add_arguments(parser)
        return parser

    def _epilog(self, program: str) -> str:
        parts: list[str] = []
        if self.examples:
            lines = "".join(f"\n  {program} {line}" for line in self.examples)
            parts.append(f"example{'s' if len(self.examples) > 1 else ''}:{lines}")
        if self.help_note:
            parts.append(self.help_note)
        if self.settings is not None and program == PROGRAM:  # a person with a kubeconfig has no settings of an agent
            parts.append("Settings that it uses (flag > variable > YAML file > default):")
            parts.append(help_text(select_keys(["config", *self.settings])))
            # Those that are not listed are accepted, too: one set of flags may serve several commands.
            if self.settings != ALL_SETTINGS:
                parts.append(
                    f"The flags of all settings work; `{PROGRAM} run --help` and docs/reference/settings.md list them."
                )
        return "\n\n".join(parts)


class _Parser(argparse.ArgumentParser):
    """Those of its subcommands are such parsers too."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
        else:  # argparse ignores what a full disk loses of the help
            file.write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise SettingsError([_no_command(value, list(action.choices))])
        super()._check_value(action, value)


def _no_command(word: str, known: Sequence[str]) -> str:
    return f"{word!r} is no command{did_you_mean(word, known)}; the commands are {', '.join(known)}"


def _refuse_mistyped(parser: argparse.ArgumentParser, words: Sequence[str], settings: Sequence[Key]) -> None:
    """Raises SettingsError where an unknown option is more like one of the command's own than like any setting's flag, of a
    command with commands below also where it is like one."""
    own = _long_options(parser)
    mistyped = [
        name for word in words if word.startswith("--") and (name := word.partition("=")[0]) not in {*own, "--"}
    ]
    # Nearly every call ends here: what follows reads all settings.
    if not mistyped:
        return
    known = {*own, *(f"--{name}" for key in settings for name in key.flag_names)}
    # With commands below, the value of a setting's mistyped flag would be taken for one.
    found = [
        (word, near) for word in mistyped if (near := nearest(word, known)) in own or (near and parser._subparsers)
    ]
    if found:
        raise SettingsError([f"option {word} is unknown (did you mean {near}?); see --help" for word, near in found])


def _long_options(parser: argparse.ArgumentParser) -> set[str]:
    """The parser's long options, and those of its subcommands."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(_long_options(command) for command in action.choices.values()))
        else:
            found.update(name for name in action.option_strings if name.startswith("--"))
    return found


class CommandLine(Struct, frozen=True, kw_only=True):
    """A program: its name, what it is for, its commands in the order in which its help lists them, a last line of help."""

    program: str
    purpose: str
    commands: Sequence[Command]
    more: str

    def main(self, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
        """Runs one command, of the process's own words and variables unless others are given, and returns the exit code. A
        user's mistake ends in one line each, never in a traceback."""
        argv = sys.argv[1:] if argv is None else argv
        if COMPLETION_VARIABLE in (environ := os.environ if environ is None else environ):
            return int(lazy("core.cli.completion:answer_shell")(self))
        _open_missing_streams()
        _print_in_any_encoding()
        try:
            code = self._code_of(argv, environ)
            # Here, so that a full disk or a closed pipe is a failure of this command: Python would report it at its own
            # end with a traceback.
            sys.stdout.flush()
        except (OSError, BaseExceptionGroup) as error:
            if (lost := _output_error(error)) is None:
                raise
            # Python flushes standard output once more when it ends, and would report the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            # A closed pipe: the reader (`| head`) has seen enough.
            told = [] if lost.errno == errno.EPIPE else [f"cannot write to standard output: {lost.strerror}"]
            return self._fail(told, 1)
        finally:
            # __main__.py has switched it off for the imports; a caller in the same process, such as a test, goes on.
            gc.enable()
        return code

    def _code_of(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        try:
            return self._dispatch(argv, environ)
        except SystemExit as end:  # argparse ends so, after its own message
            return end.code if isinstance(end.code, int) else 0
        except SettingsError as error:
            return self._fail(error.problems, 2)
        except AgentError as error:
            return self._fail([str(error)], 1)
        except BaseExceptionGroup as group:  # a TaskGroup's: the agent's own errors are for a person, the rest are bugs
            # With one bug among them the whole group is shown: its traceback is what a developer needs.
            ours, bugs = group.split(AgentError)
            if bugs is not None or ours is None:
                raise
            return self._fail([str(error) for error in _leaves(ours)], 1)
        except (KeyboardInterrupt, asyncio.CancelledError):  # asyncio.run raises either, as the tasks end
            return INTERRUPTED

    def _dispatch(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        by_name = {command.name: command for command in self.commands}
        word = argv[0] if argv else ""
        # `help COMMAND`, as kubectl and git have it.
        if word == "help" and argv[1:2] and argv[1] in by_name:
            return by_name[argv[1]].invoke(self.program, ["--help"], environ)
        if word in ("-h", "--help", "help"):
            print(self._overview())
            return 0
        if word == "--version":
            word = "version"
        if word in by_name:
            return by_name[word].invoke(self.program, argv[1:], environ)
        if not word:
            # Without a command nothing was done: for a script that is an error.
            print(self._overview(), file=sys.stderr)
            return 2
        return self._fail([self._unknown_command(word, list(by_name), argv)], 2)

    def _unknown_command(self, word: str, known: Sequence[str], argv: Sequence[str]) -> str:
        if word.startswith("-"):
            # Flags before the command, as other programs have them: the command may stand further behind.
            meant = next((one for one in argv if one in known), known[0])
            return (
                f"{word}: a command comes first, such as `{self.program} {meant} {word}`;"
                f" the commands: {', '.join(known)}"
            )
        return _no_command(word, known)

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

    def _fail(self, problems: Sequence[str], code: int) -> int:
        """A problem may quote a server or a file: none of their control characters reaches the terminal."""
        for problem in problems:
            shown = "".join(
                letter if letter.isprintable() else _UNPRINTABLE.get(letter, "\ufffd") for letter in problem
            )
            write_stderr(f"{self.program}: {shown}\n")
        return code


def _open_missing_streams() -> None:
    """Python has None for a stream that was closed when it began (`>&-`): then nobody wants what it would take."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - likewise


def _print_in_any_encoding() -> None:
    """A locale, or PYTHONIOENCODING, may lack letters that the output has."""
    codecs.register_error(_ENCODING_ERRORS, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        # A test or an embedding program may have put another object there.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ENCODING_ERRORS)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """One ASCII letter for each letter that cannot be encoded: the columns of a table stay where they are."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end].translate(_STAND_INS)
    return letters.encode("ascii", "replace").decode(), error.end


def runnable() -> str:
    """How a person types this very program in this directory: nox and an environment of a checkout have it on no PATH."""
    path = Path(sys.argv[0]).absolute()
    if path.name != PROGRAM or not path.is_file():
        return f"{shlex.quote(sys.executable)} -m gpushare_agent"
    # A relative path is shorter, and is how the person has called it.
    if path.is_relative_to(Path.cwd()):
        return shlex.quote(str(path.relative_to(Path.cwd())))
    found = shutil.which(path.name)
    # Another one on PATH may be of another version.
    return path.name if found and path.samefile(found) else shlex.quote(str(path))


def print_version(line: str) -> Command:
    """The command `version` of a program."""

    def run(call: Invocation) -> int:
        print(f"{line} {__version__}")
        return 0

    return Command(name="version", summary="print the version", run=run)


def run_app(app: Coroutine[Any, Any, int]) -> int:
    """Runs the app; garbage collection skips what the imports made, which lives as long as the process."""
    # Frozen, they are skipped by each later collection, which holds the event loop.
    gc.freeze()
    gc.enable()
    try:
        raise_error()
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(app)
    finally:
        app.close()  # else Python complains about one that an interrupt kept from its first step


def _output_error(error: BaseException) -> OSError | None:
    """The error of standard output that this is, or that is all this group has but errors of ours."""
    if isinstance(error, BaseExceptionGroup):
        errors = [_output_error(one) for one in error.exceptions if not isinstance(one, AgentError)]
        return next(iter(errors), None) if all(errors) else None
    return error if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None else None


def _leaves(group: BaseExceptionGroup[AgentError]) -> list[AgentError]:
    found: list[AgentError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
