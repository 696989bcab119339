"""`gpushare-agent sandbox`: the agent on an embedded node, for a person to try or for a script to check.

The arguments, and the commands for a sandbox that runs already; apps/sandbox_run.py runs one. Exit codes: 0 done, 1 not
every pod runs or a part failed, 2 a manifest or a setting is wrong; `exec` ends as its command does (sandbox_exec.py).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpushare_agent.apps import sandbox_run
from gpushare_agent.apps.sandbox_exec import add_exec_arguments, become, exec_request, split_inner_command
from gpushare_agent.sandbox.api_server import KUBERNETES_VERSIONS
from gpushare_agent.sandbox.control import Answer, ask
from gpushare_agent.sandbox.manifests import SAMPLE_SETS, ManifestError, read_manifests, sample_manifests
from gpushare_agent.sandbox.node import NodePaths
from gpushare_agent.sandbox.node_view import print_document
from gpushare_agent.sandbox.state_directory import default_state_directory
from gpushare_agent.settings import load_settings

__all__ = ["add_arguments", "run", "split_inner_command"]

_SETTINGS_OPTIONS = ("cards", "topology", "card_memory_mib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cards", metavar="N", help="simulated cards (default 8, or one for each memory size)")
    add("--topology", metavar="FILE", help="text of `nvidia-smi topo -m` that gives the cards and their links")
    add("--card-memory-mib", metavar="M[,M...]", help="memory of the cards, MiB: one value, or one for each")
    add(
        "--apply",
        metavar="FILE|DIR",
        action="append",
        type=Path,
        default=[],
        help="Pod manifests, created in file order; - is standard input",
    )
    add("--samples", choices=SAMPLE_SETS, help="sample pods; fitting leaves out the one that cannot run (default: all, "
        "with --apply none)")  # fmt: skip
    add("--once", action="store_true", help="wait until every pod is settled, print, clean up; exit 0 if all of them are "
        "Running or Succeeded, else 1 (with the sample pod that cannot fit: 1)")  # fmt: skip
    add("--format", choices=("table", "json"), default="table", help="what --once and status print to standard output; "
        "progress goes to standard error then (%(default)s)")  # fmt: skip
    add(
        "--state-dir",
        metavar="DIR",
        type=Path,
        default=default_state_directory(),
        help="sockets and files (%(default)s)",
    )
    add("--port", metavar="PORT", type=int, help="the agent's web port (default 5678; 0 takes a free one)")
    add("--kubelet-version", choices=KUBERNETES_VERSIONS, default="1.36", help="whose behaviour to show (%(default)s)")
    _add_commands(parser)


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands for a sandbox that runs")
    apply = commands.add_parser("apply", help="create the pods of a manifest")
    apply.add_argument("-f", "--file", dest="files", metavar="FILE|DIR", action="append", type=Path, required=True,
        help="Pod manifests; a directory's files by name; - is standard input; again for more")  # fmt: skip
    delete = commands.add_parser("delete", help="delete pods")
    delete.add_argument("names", metavar="NAME", nargs="+", help="a pod's name, or NAMESPACE/NAME")
    delete.add_argument("-n", "--namespace", default="default", help="of the pods (%(default)s)")
    add_exec_arguments(commands.add_parser("exec", help="run one more process in a container"))
    commands.add_parser("restart-kubelet", help="stop and start the embedded kubelet; containers run on")
    commands.add_parser("kill-agent", help="SIGKILL the agent; the sandbox starts it again")
    commands.add_parser("status", help="print cards and pods")
    for command in commands.choices.values():
        command.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help="of the running sandbox")
    commands.choices["status"].add_argument("--format", choices=("table", "json"), default=argparse.SUPPRESS,
        help="table for people, json for scripts (table)")  # fmt: skip


async def run(args: argparse.Namespace, extra_agent_flags: list[str], inner_command: Sequence[str] = ()) -> int:
    """Returns the exit code; `exec` does not return where it works. Raises AgentError for what a person must change.

    `inner_command` is what sandbox_exec.split_inner_command set apart.
    """
    try:
        if args.command is not None:
            return await _run_command(args, extra_agent_flags, inner_command)
        manifests = read_manifests(args.apply)
        manifests += sample_manifests(args.samples or ("none" if args.apply else "all"))
        plan = sandbox_run.Plan(
            state=args.state_dir, kubelet_version=args.kubelet_version, flags=tuple(_agent_flags(args, extra_agent_flags)),
            manifests=tuple(manifests), is_once=args.once, form=args.format,
        )  # fmt: skip
        return await sandbox_run.run(plan)
    except ManifestError as error:
        _complain(str(error))
        return 2


def _complain(text: str) -> None:
    print(f"gpushare-agent sandbox: {text}", file=sys.stderr)


def _agent_flags(args: argparse.Namespace, extra: list[str]) -> list[str]:
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name in _SETTINGS_OPTIONS
        if (value := getattr(args, name)) is not None
    ]
    if args.port is not None:
        flags.append(f"--web.port={args.port or _free_port()}")
    return [*flags, *_implied_cards(args, extra), *extra]


def _implied_cards(args: argparse.Namespace, extra: list[str]) -> list[str]:
    """Several memory sizes are as many cards, where nothing else says how many there are."""
    count = len((args.card_memory_mib or "").split(","))
    if count == 1 or args.cards is not None or args.topology is not None:
        return []
    sources = load_settings(extra, os.environ).sources
    is_said = any(sources[name] != "default" for name in ("simulated.cards", "simulated.topology"))
    return [] if is_said else [f"--cards={count}"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- a command for a running sandbox ---


async def _run_command(args: argparse.Namespace, extra: list[str], inner_command: Sequence[str]) -> int:
    if extra:
        raise ManifestError(f"unknown arguments for {args.command}: {' '.join(extra)}")
    request: dict[str, Any] = {"command": args.command}
    if args.command == "apply":
        request["pods"] = [manifest.raw for manifest in read_manifests(args.files)]
    elif args.command == "delete":
        request |= {"names": args.names, "namespace": args.namespace}
    elif args.command == "exec":
        if not inner_command:
            raise ManifestError("exec: no command: say what to run behind the pod's name, such as `exec POD -- sh`")
        request = exec_request(args)
    answer: Answer = await ask(NodePaths(state=args.state_dir.absolute()).control_socket, request)
    if args.command == "status" and answer["ok"]:
        print_document(answer["document"], args.format)
    for line in answer["lines"]:
        print(line, flush=True)  # before the complaints, where both go to one place
    for error in answer["errors"]:
        _complain(error)
    if args.command == "exec" and answer["ok"]:
        for note in answer["notes"]:
            print(note, file=sys.stderr)
        return become(inner_command, answer["env"])
    return 0 if answer["ok"] else 1
