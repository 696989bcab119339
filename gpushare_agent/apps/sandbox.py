"""`gpushare-agent sandbox`: the agent on an embedded node, for a person to try or for a script to check.

Composition and printing only; the parts are in gpushare_agent/sandbox. Exit codes: 0 done, 1 not every pod runs or a part
failed, 2 a manifest is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from gpushare_agent.apps.node_parts import open_driver
from gpushare_agent.kit.supervision import forever, stop_task
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.api_server import KUBERNETES_VERSIONS
from gpushare_agent.sandbox.control import Answer, ask, open_control
from gpushare_agent.sandbox.kubelet_boot import KubeletTimes
from gpushare_agent.sandbox.manifests import SAMPLE_SETS, Manifest, ManifestError, read_manifests, sample_manifests
from gpushare_agent.sandbox.node import NodePaths, open_embedded_node
from gpushare_agent.sandbox.node_report import ReportedNode
from gpushare_agent.sandbox.node_view import pod_line, print_tables, reason_text, tables
from gpushare_agent.sandbox.state_directory import default_state_directory, owned_state_directory
from gpushare_agent.sandbox.workbench import Workbench
from gpushare_agent.settings import LoadedSettings, load_settings

_SETTLE_TIMEOUT_S = 60.0
_INTERRUPTED = 130
_SETTINGS_OPTIONS = ("cards", "topology", "card_memory_mib")
_NODE_NAME = "sandbox"
_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cards", metavar="N", help="simulated cards (default 8)")
    add("--topology", metavar="FILE", help="text of `nvidia-smi topo -m` that gives the cards and their links")
    add("--card-memory-mib", metavar="M[,M...]", help="memory of the cards, MiB: one value, or one for each")
    add("--apply", metavar="FILE|DIR", action="append", type=Path, default=[], help="Pod manifests, created in file order")
    add("--samples", choices=SAMPLE_SETS, help="sample pods; fitting leaves out the one that cannot run (default: all, "
        "with --apply none)")  # fmt: skip
    add("--once", action="store_true", help="wait until every pod is settled, print, clean up; exit 0 if all of them are "
        "Running or Succeeded, else 1 (with the sample pod that cannot fit: 1)")  # fmt: skip
    add("--format", choices=("table", "json"), default="table", help="what --once and status print")
    add("--state-dir", metavar="DIR", type=Path, default=default_state_directory(), help="sockets and files (%(default)s)")
    add("--port", metavar="PORT", type=int, help="the agent's web port (default 5678; 0 takes a free one)")
    add("--kubelet-version", choices=KUBERNETES_VERSIONS, default="1.36", help="whose behaviour to show (%(default)s)")
    _add_commands(parser)


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands for a sandbox that runs")
    apply = commands.add_parser("apply", help="create the pods of a manifest")
    apply.add_argument("-f", "--file", dest="files", metavar="FILE|DIR", action="append", type=Path, required=True)
    delete = commands.add_parser("delete", help="delete a pod")
    delete.add_argument("name")
    delete.add_argument("-n", "--namespace", default="default")
    commands.add_parser("restart-kubelet", help="stop and start the embedded kubelet; containers run on")
    commands.add_parser("kill-agent", help="SIGKILL the agent; the sandbox starts it again")
    commands.add_parser("status", help="print cards and pods")
    for command in commands.choices.values():
        command.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help="of the running sandbox")
    commands.choices["status"].add_argument("--format", choices=("table", "json"), default=argparse.SUPPRESS)


async def run(args: argparse.Namespace, extra_agent_flags: list[str]) -> int:
    """Returns the exit code. Raises AgentError for what a person must change."""
    try:
        if args.command is not None:
            return await _run_command(args, extra_agent_flags)
        manifests = read_manifests(args.apply)
        manifests += sample_manifests(args.samples or ("none" if args.apply else "all"))
        return await _run_sandbox(args, _agent_flags(args, extra_agent_flags), manifests)
    except ManifestError as error:
        print(f"gpushare-agent sandbox: {error}", file=sys.stderr)
        return 2


def _agent_flags(args: argparse.Namespace, extra: list[str]) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name in _SETTINGS_OPTIONS if (value := getattr(args, name)) is not None]
    if args.port is not None:
        flags.append(f"--web.port={args.port or _free_port()}")
    return [*flags, *extra]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- a command for a running sandbox ---


async def _run_command(args: argparse.Namespace, extra: list[str]) -> int:
    if extra:
        raise ManifestError(f"unknown arguments for {args.command}: {' '.join(extra)}")
    request: dict[str, Any] = {"command": args.command}
    if args.command == "apply":
        request["pods"] = [manifest.raw for manifest in read_manifests(args.files)]
    elif args.command == "delete":
        request |= {"name": args.name, "namespace": args.namespace}
    answer: Answer = await ask(NodePaths(state=args.state_dir.absolute()).control_socket, request)
    if args.command == "status" and answer["ok"]:
        _print_document(answer["document"], args.format, answer["memory_block_mib"])
    for line in answer["lines"]:
        print(line, file=sys.stdout if answer["ok"] else sys.stderr)
    return 0 if answer["ok"] else 1


def _print_document(document: dict[str, Any], form: str, block_mib: int) -> None:
    if form == "json":
        print(json.dumps(document, indent=2))
    else:
        print_tables(document, block_mib)


# --- the sandbox itself ---


async def _run_sandbox(args: argparse.Namespace, flags: list[str], manifests: list[Manifest]) -> int:
    tell = _teller(sys.stderr if args.once or args.format == "json" else sys.stdout)
    name = _node_name(load_settings(flags, os.environ))
    stop = _stop_on_signals()
    with owned_state_directory(args.state_dir) as paths:
        async with open_embedded_node(
            paths.state, node_name=name, kubelet_version=args.kubelet_version, times=_TIMES
        ) as node:
            arguments = [*node.agent_arguments(), *flags]
            settings = load_settings(arguments, os.environ).settings
            inventory = await open_driver(settings).read()
            resources = settings.resources
            shown = ReportedNode(node=node, cards=inventory.cards, vcore=resources.vcore, vmemory=resources.vmemory)
            bench = Workbench(shown=shown, agent=AgentProcess(arguments, paths.agent_log, tell))
            address = f"http://{settings.web.addr}:{settings.web.port}"
            tell(f"embedded node {name} (kubelet {args.kubelet_version}) in {paths.state}: pretended containers, {settings.driver} "
                 f"cards; API server {node.api.url}, web {address}, agent's log {paths.agent_log}")  # fmt: skip
            async with _running_agent(bench, resources.memory_block_mib):
                view = _View(bench, resources.memory_block_mib, tell, [f"web {address}", *_advice(args)])
                return await (_once(args, view, manifests, stop) if args.once else _live(view, manifests, stop))


def _node_name(loaded: LoadedSettings) -> str:
    """The agent's node name where a person has given one; the host's name would say nothing here."""
    is_given = loaded.sources["node_name"].startswith(("flag", "variable GPUSHARE", "file"))
    return loaded.settings.node_name if is_given else _NODE_NAME


def _teller(stream: Any) -> Callable[[str], None]:
    def tell(text: str) -> None:
        print(text, file=stream, flush=True)

    return tell


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


def _advice(args: argparse.Namespace) -> list[str]:
    where = "" if args.state_dir == default_state_directory() else f" --state-dir {args.state_dir}"
    commands = ("apply -f FILE", "delete NAME", "restart-kubelet", "kill-agent", "status")
    return [
        "from another terminal: " + ", ".join(f"`gpushare-agent sandbox {command}{where}`" for command in commands),
        "Ctrl-C ends the sandbox and removes everything",
    ]


@asynccontextmanager
async def _running_agent(bench: Workbench, block_mib: int) -> AsyncIterator[None]:
    async def handle(request: dict[str, Any]) -> Answer:
        return {**await bench.handle(request), "memory_block_mib": block_mib}

    async with (
        open_control(bench.shown.node.paths.control_socket, handle),
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(forever("agent process", bench.agent.run), name="agent-process")
        try:
            yield
        finally:
            await stop_task(task)


class _View:
    """What one run of the sandbox shows, and how."""

    def __init__(self, bench: Workbench, block_mib: int, tell: Callable[[str], None], notes: list[str]) -> None:
        self.bench = bench
        self.block_mib = block_mib
        self.tell = tell
        self.notes = notes

    async def create(self, manifests: list[Manifest], stop: asyncio.Event) -> None:
        """When the agent has registered; until then the scheduler would turn every pod away."""
        signal_ = self.bench.shown.node.signal
        waiting = asyncio.Event()
        if not stop.is_set() and not await self.bench.wait_registered():
            self.tell("the agent has not registered; its pods will stay Pending. See the agent's log")
        waiting.set()
        signal_.notify()
        for name in self.bench.create(manifests):
            self.tell(f"pod {name} created")
