"""`gpushare-agent sandbox exec`: this process enters a container of the sandbox and becomes the command.

Exit codes: the command's own; 1 it cannot run there, 126 it is not executable, 127 it was not found.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""As a shell ends where it cannot run a command."""

_LONE_OPTIONS = frozenset({"--once", "--help", "--stdin", "--tty", "-h", "-i", "-t"})
"""Of the sandbox and of exec: those without a value."""


def add_exec_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpushare-agent sandbox exec [-n NAMESPACE] [-c CONTAINER] POD [--] COMMAND [ARGUMENT...]"
    add = parser.add_argument
    add("pod", metavar="POD", help="its name, or NAMESPACE/NAME")
    add("-c", "--container", help="default: the pod's first main container")
    add("-n", "--namespace", default="default", help="of the pod (%(default)s)")
    add("-i", "--stdin", action="store_true", help="as with kubectl; the command has this terminal anyway")
    add("-t", "--tty", action="store_true", help="likewise")


def split_inner_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the sandbox, and those of the command that `exec` is to run: none of these is an option of ours.

    The command begins behind `--`, or with the first word behind the pod's name.
    """
    words: list[int] = []  # where those stand that are neither options nor their values
    position = 0
    while position < len(argv) and len(words) < 3:
        word = argv[position]
        if word == "--" and words:
            return list(argv[:position]), list(argv[position + 1 :])
        if not word.startswith("-") or word == "-":
            words.append(position)
            if argv[words[0]] != "exec":
                return list(argv), []
        position += 2 if _wants_value(word) and argv[position + 1 : position + 2] != ["--"] else 1
    if len(words) < 3:
        return list(argv), []
    return list(argv[: words[2]]), list(argv[words[2] :])


def _wants_value(word: str) -> bool:
    """Whether the next word belongs to this one: not in `--name=value`, `-cvalue`, `-it`."""
    is_whole = "=" not in word if word.startswith("--") else len(word) == 2
    return word.startswith("-") and is_whole and word not in _LONE_OPTIONS


def become(command: Sequence[str], inside: Mapping[str, str]) -> int:
    """Replaces this process by the command, with the container's environment. Returns, with an exit code, only where that
    fails."""
    environment = _environment(inside, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - what the person asks for, as it stands
    except (FileNotFoundError, NotADirectoryError):
        print(f"gpushare-agent sandbox: {command[0]}: command not found", file=sys.stderr)
        return NOT_FOUND
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"gpushare-agent sandbox: {command[0]}: cannot be run: {reason}", file=sys.stderr)
        return NOT_EXECUTABLE


def _environment(inside: Mapping[str, str], caller: Mapping[str, str]) -> dict[str, str]:
    """The container's, the caller's terminal, and at the end of PATH where `gpushare-agent` is installed."""
    terminal = {"TERM": caller["TERM"]} if "TERM" in caller else {}
    scripts = sysconfig.get_path("scripts")
    places = (inside.get("PATH") or os.defpath).split(os.pathsep)
    path = os.pathsep.join(places if scripts in places else [*places, scripts])
    return {**terminal, **inside, "PATH": path}
