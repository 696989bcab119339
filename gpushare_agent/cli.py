"""The command line: argv and environment → settings → an app → an exit code.

Exit codes: 0 done, 1 it could not be done, 2 the command line, a variable or the settings file is wrong, 130 interrupted.
Each command imports its app only when it runs: the way from process start to registration stays short.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import gc
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpushare_agent import __version__
from gpushare_agent.kit.log_writer import say
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings import LoadedSettings, Settings, SettingsError, load_settings
from gpushare_agent.settings_reference import help_text
from gpushare_agent.settings_sources import split_flags

PROGRAM = "gpushare-agent"
_INTERRUPTED = 130
_DRIVER_VOLUME_SETTINGS = f"""\
settings that it uses, each also a variable and a key of the YAML file:
  --volume-config                  what to collect, and where the volumes go
  --driver-volume.root             where the host's file system is
  --driver-volume.control-library  the library that limits shares

All other settings are accepted too; `{PROGRAM} run --help` explains them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word of the command line. `run` gets the arguments behind it and returns the exit code."""

    name: str
    summary: str
    run: Callable[[Sequence[str], Mapping[str, str]], int]


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command and returns the exit code. A mistake of the user ends in one line each, never in a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments, os.environ if environ is None else environ)
        sys.stdout.flush()
    except SystemExit as end:  # argparse ends so, after its own message
        return end.code if isinstance(end.code, int) else 0
    except SettingsError as error:
        return _complain(error.problems, 2)
    except AgentError as error:
        return _complain([str(error)], 1)
    except BaseExceptionGroup as group:  # a TaskGroup's: the agent's own errors are for a person, the rest are bugs
        ours, bugs = group.split(AgentError)
        if bugs is not None or ours is None:
            raise
        return _complain([str(error) for error in _leaves(ours)], 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        gc.enable()
    return code


def _run_app(app: Coroutine[Any, Any, int]) -> int:
    """Everything is imported: what exists now lives as long as the process, so no collection needs to look at it again."""
    gc.freeze()
    gc.enable()
    return asyncio.run(app)


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        say(f"{PROGRAM}: {problem}\n")
    return code


def _leaves(group: BaseExceptionGroup[AgentError]) -> list[AgentError]:
    found: list[AgentError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _dispatch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    by_name = {command.name: command for command in COMMANDS}
    word = argv[0] if argv else ""
    if word in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if word == "--version":
        word = "version"
    if word in by_name:
        return by_name[word].run(argv[1:], environ)
    if not word:
        print(_overview(), file=sys.stderr)
        return 2
    near = difflib.get_close_matches(word, sorted(by_name), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    if word.startswith("-"):
        return _complain(
            [f"{word}: a command comes first, such as `{PROGRAM} run {word}`; the commands: {', '.join(by_name)}"], 2
        )
    return _complain([f"{word!r} is no command{hint}; the commands are {', '.join(by_name)}"], 2)


def _overview() -> str:
    lines = [
        f"{PROGRAM} {__version__}: lets pods share the NVIDIA GPUs of a Kubernetes node.",
        "",
        f"usage: {PROGRAM} COMMAND [FLAGS]",
        "",
        *(f"  {command.name:<13} {command.summary}" for command in COMMANDS),
        "",
        f"`{PROGRAM} COMMAND --help` tells more; `{PROGRAM} run --help` explains every setting.",
    ]
    return "\n".join(lines)


def _parser(name: str, description: str, argv: Sequence[str]) -> argparse.ArgumentParser:
    """A command's parser. The settings' help is long and only built for who asks."""
    asked = "-h" in argv or "--help" in argv
    epilog = "Settings, each also a variable and a key of the YAML file (flag > variable > file > default):\n\n"
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=description,
        epilog=epilog + help_text() if asked else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and what is left for the settings. A name that both have is the command's."""
    own = frozenset(parser._option_string_actions)
    mine, others = split_flags(argv, leave=own)
    options, unknown = parser.parse_known_args(others)
    return options, [*mine, *unknown]


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    _, flags = _parse(
        _parser("run", "Runs the node agent until SIGTERM or SIGINT. SIGHUP reads the settings again.", argv), argv
    )

    def reload() -> Settings:
        settings = load_settings(flags, environ).settings
        setup_logging(settings.log.level, settings.log.format)
        return settings

    settings = reload()
    from gpushare_agent.apps import node_agent

    return _run_app(node_agent.run(settings, reload=reload))


def _config(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("config", "Prints the settings in effect and where each came from.", argv)
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "yaml", "markdown"),
        default="table",
        help="table for people, json with sources, yaml as a settings file, markdown for the reference of all settings",
    )
    options, flags = _parse(parser, argv)
    from gpushare_agent.apps import show_settings

    loaded: LoadedSettings = load_settings(flags, environ)
    print(show_settings.render(loaded, options.output), end="")
    return 0


def _check(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("check", "Tells what of this node is in place for the agent, and the cure for what is not.", argv)
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text for people, or one JSON document"
    )
    options, flags = _parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the report says it all
    from gpushare_agent.apps import node_check

    return _run_app(node_check.run(settings, output=options.output))


def _driver_volume(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("driver-volume", "Collects the driver's libraries and programs for containers to mount.", ())
    parser.epilog = _DRIVER_VOLUME_SETTINGS
    parser.add_argument("--check", action="store_true", help="tell what would be done, and change nothing")
    parser.add_argument("--prune", action="store_true", help="remove old versions that no container has mounted")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text for people, or one JSON document"
    )
    options, flags = _parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging(settings.log.level, settings.log.format)
    from gpushare_agent.apps import driver_volume

    return driver_volume.run(settings, check=options.check, prune=options.prune, output=options.output)


def _cdi(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from gpushare_agent.apps import cdi

    parser = _parser("cdi", "Names the node's cards for container runtimes by CDI, and tells who names them.", argv)
    cdi.add_arguments(parser)
    options, flags = _parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the report says it all
    return _run_app(cdi.run(settings, action=options.action, check=options.check, output=options.output))


def _vdevice(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Needs no settings: it runs inside a container that has a share."""
    from gpushare_agent import vdevice_client

    return vdevice_client.run(argv, environ, program=f"{PROGRAM} vdevice")


def _mps(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("mps", "Keeps NVIDIA's MPS control daemon on this node until SIGTERM or SIGINT.", argv)
    parser.add_argument("--check", action="store_true", help="ask the daemon once, whoever keeps it: 0 when it serves")
    options, flags = _parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error" if options.check else settings.log.level, settings.log.format)
    from gpushare_agent.apps import mps_supervisor

    return _run_app(mps_supervisor.check(settings) if options.check else mps_supervisor.run(settings))


def _sandbox(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from gpushare_agent.apps import sandbox

    words, inner_command = sandbox.split_inner_command(argv)
    parser = _parser("sandbox", "Runs the agent on an embedded node: no cluster, no GPU, no root.", words)
    sandbox.add_arguments(parser)
    options, flags = _parse(parser, words)
    return _run_app(sandbox.run(options, flags, inner_command))


def _version(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    _parser("version", "Prints the version.", ()).parse_args(argv)
    print(f"{PROGRAM} {__version__}")
    return 0


COMMANDS = (
    Command(name="run", summary="run the node agent", run=_run),
    Command(name="config", summary="print the settings in effect and where each came from", run=_config),
    Command(name="check", summary="tell what of this node is in place, and the cure for what is not", run=_check),
    Command(name="driver-volume", summary="collect the driver's files for containers to mount", run=_driver_volume),
    Command(name="cdi", summary="name the cards for container runtimes by CDI, and tell who names them", run=_cdi),
    Command(name="vdevice", summary="inside a container: register, and print its limits and PIDs", run=_vdevice),
    Command(name="mps", summary="keep NVIDIA's MPS control daemon on this node", run=_mps),
    Command(name="sandbox", summary="try the agent on an embedded node, without a cluster or a GPU", run=_sandbox),
    Command(name="version", summary="print the version", run=_version),
)
