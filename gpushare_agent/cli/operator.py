"""The commands that show the node to an operator: top, inspect, graph, explain.

`gpushare-agent` on a node asks the agent of that node. `kubectl gpushare` has the same commands, options and output, and
goes through the API server. docs/cli.md has the formats, and the rights that a user of the plugin needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gpushare_agent.cli.line import PROGRAM, Command, make_parser, parse, run_app
from gpushare_agent.kit.logs import setup_logging
from gpushare_agent.settings.settings import Settings, load_settings

if TYPE_CHECKING:
    from gpushare_agent.cli.agent_addresses import Where

KUBECTL = "kubectl gpushare"
AGENT_NAMESPACE = "gpushare-system"
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0

_PLUGIN_SETTINGS = f"""\
The cluster is that of $KUBECONFIG or ~/.kube/config, its current context; --kubeconfig FILE names another file. All settings
of `{PROGRAM} run --help` are accepted too, such as --resources.vcore where the resources have other names.
docs/cli.md lists the rights that you need."""


def operator_commands(*, is_plugin: bool) -> tuple[Command, ...]:
    """As they are for one of the two programs."""
    made = (
        ("top", "live table of the GPUs, their containers and what they use", _top, _top_arguments),
        ("inspect", "allocated and total of every GPU, of this node or of all", _inspect, _inspect_arguments),
        ("graph", "how the GPUs are connected, and what is free on each", _graph, _where_arguments),
        ("explain", "why a pod got its GPU, or why it was refused", _explain, _explain_arguments),
    )
    return tuple(
        Command(
            name=name,
            summary=summary,
            run=partial(run, is_plugin=is_plugin),
            add_arguments=partial(arguments, is_plugin=is_plugin),
        )
        for name, summary, run, arguments in made
    )


def _where_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    add = parser.add_argument
    if is_plugin:
        add("--node", metavar="NODE", default="", help="whose agent to ask, through the API server")
    else:
        add("--server", metavar="URL", default="", help="the agent's address (default: this host, and web.port)")
        add("--node", metavar="NODE", default="", help="ask another node's agent, through the API server")
    add(
        "--agent-namespace",
        metavar="NS",
        default=AGENT_NAMESPACE,
        help="where the agents' pods are, with --node; empty: anywhere (%(default)s)",
    )
    add(
        "-o",
        "--output",
        choices=("table", "json", "yaml"),
        default="table",
        help="table for people, json and yaml for programs (%(default)s)",
    )


def _top_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    parser.add_argument("--once", action="store_true", help="print one table and end; so does anything but a terminal")
    parser.add_argument(
        "--interval", metavar="S", type=_interval_s, default=1.0, help="time between two looks, seconds (%(default)g)"
    )
    _where_arguments(parser, is_plugin=is_plugin)


def _interval_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is not between {_MIN_INTERVAL_S:g} and {_MAX_INTERVAL_S:g} seconds")
    return seconds


def _inspect_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    if is_plugin:
        parser.set_defaults(all_nodes=False)
    else:
        parser.add_argument("--all-nodes", action="store_true", help="every node of the cluster, by the API server")
    parser.add_argument("-d", "--details", action="store_true", help="list the containers as well")
    _where_arguments(parser, is_plugin=is_plugin)


def _explain_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    parser.add_argument("pod", metavar="POD", help="its name, or NAMESPACE/NAME")
    usual = "default" if is_plugin else "any; with --node: default"
    parser.add_argument("-n", "--namespace", metavar="NS", default="", help=f"of the pod ({usual})")
    parser.add_argument("-c", "--container", metavar="NAME", default="", help="only this container of it")
    _where_arguments(parser, is_plugin=is_plugin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Purpose:
    """What a command's help says, for both programs. Examples lack the program's name."""

    name: str
    text: str
    examples: Sequence[str]
    plugin_examples: Sequence[str]
    arguments: Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    options: argparse.Namespace
    settings: Settings
    where: Where


def _start(purpose: _Purpose, argv: Sequence[str], environ: Mapping[str, str], *, is_plugin: bool) -> _Started:
    """Reads the command line and the settings. Raises SettingsError, SystemExit."""
    program = KUBECTL if is_plugin else PROGRAM
    examples = [f"{program} {line}" for line in (purpose.plugin_examples if is_plugin else purpose.examples)]
    parser = make_parser(purpose.name, purpose.text, argv, examples=examples, program=program)
    if is_plugin and parser.epilog:
        parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in examples), "", _PLUGIN_SETTINGS])
    purpose.arguments(parser, is_plugin=is_plugin)
    options, flags = parse(parser, argv)
    settings = load_settings(flags, environ).settings
    setup_logging("error", settings.log.format)  # the output says it all
    from gpushare_agent.cli.agent_addresses import Where

    where = Where(
        server=getattr(options, "server", ""),
        node=options.node,
        is_remote=is_plugin,
        agent_namespace=options.agent_namespace,
    )
    return _Started(options=options, settings=settings, where=where)


_TOP = _Purpose(
    name="top",
    text="Shows the GPUs of a node, below each its containers, and what they use of it. Keys: q ends, j and k scroll.",
    examples=("top", "top --once -o json"),
    plugin_examples=("top --node gpu-1",),
    arguments=_top_arguments,
)
_INSPECT = _Purpose(
    name="inspect",
    text="Tells allocated and total cores and memory of every GPU, per node and in all.",
    examples=("inspect -d", "inspect --all-nodes"),
    plugin_examples=("inspect -d", "inspect --node gpu-1"),
    arguments=_inspect_arguments,
)
_GRAPH = _Purpose(
    name="graph",
    text="Draws how the GPUs of a node are connected, with what is free on each.",
    examples=("graph",),
    plugin_examples=("graph --node gpu-1",),
    arguments=_where_arguments,
)
_EXPLAIN = _Purpose(
    name="explain",
    text="Tells why the containers of a pod got their GPUs, or why they were refused, GPU by GPU.",
    examples=("explain train-0 -n research", "explain research/train-0 -c main -o json"),
    plugin_examples=("explain train-0 -n research",),
    arguments=_explain_arguments,
)


def _top(argv: Sequence[str], environ: Mapping[str, str], *, is_plugin: bool) -> int:
    started = _start(_TOP, argv, environ, is_plugin=is_plugin)
    from gpushare_agent.cli import top

    options = started.options
    return run_app(
        top.run(started.settings, started.where, once=options.once, interval_s=options.interval, form=options.output)
    )


def _inspect(argv: Sequence[str], environ: Mapping[str, str], *, is_plugin: bool) -> int:
    started = _start(_INSPECT, argv, environ, is_plugin=is_plugin)
    from gpushare_agent.cli import inspect

    options, where = started.options, started.where
    is_all = options.all_nodes or (is_plugin and not where.node)
    return run_app(
        inspect.run(started.settings, where, is_all_nodes=is_all, with_details=options.details, form=options.output)
    )


def _graph(argv: Sequence[str], environ: Mapping[str, str], *, is_plugin: bool) -> int:
    started = _start(_GRAPH, argv, environ, is_plugin=is_plugin)
    from gpushare_agent.cli import graph

    return run_app(graph.run(started.settings, started.where, form=started.options.output))


def _explain(argv: Sequence[str], environ: Mapping[str, str], *, is_plugin: bool) -> int:
    started = _start(_EXPLAIN, argv, environ, is_plugin=is_plugin)
    from gpushare_agent.cli import explain

    options = started.options
    namespace, slash, pod = options.pod.rpartition("/")
    asked = explain.Asked(pod=pod, namespace=namespace if slash else options.namespace, container=options.container)
    return run_app(explain.run(started.settings, started.where, asked, form=options.output))
