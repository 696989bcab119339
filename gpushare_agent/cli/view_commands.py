"""The commands that show nodes to an operator: top, inspect, graph, explain, defragment, and the page of all nodes.

`gpushare-agent` on a node asks the agent of that node. `kubectl gpushare` has the same commands, options and output, and
goes through the API server. docs/reference/cli.md has the formats, and the rights that a user of the plugin needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpushare_agent.cli.command_line import AGENT_NAMESPACE, SORTS, Command, Invocation, add_output, run_app

if TYPE_CHECKING:
    from gpushare_agent.cli.agent_client import AgentTarget

KUBECTL = "kubectl gpushare"
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0
_MAX_GPUS = 1_000_000
_SUMS_SETTINGS = ("resources", "gpushare")

_PLUGIN_NOTE = """\
The cluster is that of $KUBECONFIG or ~/.kube/config, its current context; --kubeconfig and --context name others.
docs/reference/cli.md lists the rights that you need."""


def view_commands(*, is_plugin: bool) -> tuple[Command, ...]:
    """The commands as one of the two programs has them."""

    def command(
        name: str,
        summary: str,
        description: str,
        run: Callable[[Invocation, AgentTarget], int],
        arguments: Callable[..., None],
        examples: tuple[str, ...],
        settings: tuple[str, ...] = (),
    ) -> Command:
        return Command(
            name=name,
            summary=summary,
            description=description,
            run=lambda call: run(call, _target(call, is_plugin=is_plugin)),
            examples=examples,
            add_arguments=partial(arguments, is_plugin=is_plugin),
            # A person's machine has no agent, so web.addr and web.port say nothing there.
            settings=("kubeconfig", "context", *(() if is_plugin else ("web",)), *settings),
            help_note=_PLUGIN_NOTE if is_plugin else "",
        )

    return (
        command(
            "top",
            "live table of the GPUs, their containers and their usage",
            "Shows the GPUs of a node, below each its containers and their usage. The key ? lists the keys.",
            _top,
            _top_arguments,
            ("top gpu-1", "top gpu-1 -n research") if is_plugin else ("top", "top --once -o json"),
        ),
        command(
            "inspect",
            "allocated and total of every GPU, of this node or of all",
            "Prints allocated and total cores and memory of every GPU, per node and in all.",
            _inspect,
            _inspect_arguments,
            ("inspect -d", "inspect gpu-1" if is_plugin else "inspect --all-nodes"),
            _SUMS_SETTINGS,
        ),
        command(
            "graph",
            "how the GPUs are connected, and what is free on each",
            "Draws how the GPUs of a node are connected, with what is free on each.",
            _graph,
            _node_arguments,
            ("graph gpu-1" if is_plugin else "graph",),
        ),
        command(
            "explain",
            "why a pod got its GPU, was refused, or waits",
            "Prints why the containers of a pod got their GPUs, or why they were refused, GPU by GPU."
            + (" Of a pod that waits: the smallest changes that would let it start now." if is_plugin else ""),
            _explain,
            _explain_arguments,
            ("explain train-0 -n research", *(() if is_plugin else ("explain research/train-0 -c main -o json",))),
        ),
        _defragment_command(is_plugin=is_plugin),
        _dashboard_command(is_plugin=is_plugin),
    )


def _defragment_command(*, is_plugin: bool) -> Command:
    return Command(
        name="defragment",
        summary="which few pods would have to move for GPUs to become whole",
        description="Advises which few pods would have to move for GPUs to become whole again. It moves none.",
        run=_defragment,
        examples=("defragment --dry-run --gpus 4",),
        add_arguments=_defragment_arguments,
        settings=("kubeconfig", "context", *_SUMS_SETTINGS),
        help_note=_PLUGIN_NOTE if is_plugin else "",
    )


def _defragment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="required: it only advises")
    parser.add_argument("--gpus", metavar="N", type=_number_of_gpus, help="as few moves as make N GPUs whole (all)")
    add_output(parser)


def _number_of_gpus(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MAX_GPUS:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to {_MAX_GPUS}")
    return int(text)


def _defragment(call: Invocation) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import defragment

    return run_app(defragment.run(settings, is_dry_run=options.dry_run, most=options.gpus, form=options.output))


def _dashboard_command(*, is_plugin: bool) -> Command:
    return Command(
        name="dashboard",
        summary="a web page of all nodes and of the pods that wait",
        description="Serves a page of all nodes on this machine's loopback address until Ctrl-C: their GPUs, the pods "
        "on them, and why pods wait, GPU by GPU. It reads nodes and pods with your own rights.",
        run=_dashboard,
        examples=("dashboard",),
        add_arguments=_dashboard_arguments,
        settings=("kubeconfig", "context", *_SUMS_SETTINGS),
        help_note=_PLUGIN_NOTE if is_plugin else "",
    )


def _dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=5680, help="port of localhost, 0 for a free one (%(default)s)")
    _agent_namespace_argument(parser, "whose GPUs' use is shown")


def _port(text: str) -> int:
    # int() would take signs and blanks.
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def _dashboard(call: Invocation) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import dashboard

    return run_app(dashboard.run(settings, port=options.port, agent_namespace=options.agent_namespace))


def _target_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    add = parser.add_argument
    if is_plugin:
        add("--node", metavar="NODE", default="", help="whose agent to ask, through the API server")
    else:
        add(
            "--server",
            metavar="URL",
            type=server_url,
            help="the agent's address (default: this host, and web.port)",
        )
        add("--node", metavar="NODE", default="", help="ask another node's agent, through the API server")
    _agent_namespace_argument(parser, "with --node")
    add_output(parser)


def _agent_namespace_argument(parser: argparse.ArgumentParser, when: str) -> None:
    parser.add_argument(
        "--agent-namespace",
        metavar="NS",
        default=AGENT_NAMESPACE,
        help=f"where the agents' pods are, {when}; empty: anywhere (%(default)s)",
    )


def _node_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    parser.add_argument("node_name", metavar="NODE", nargs="?", default="", help="the same as --node NODE")
    _target_arguments(parser, is_plugin=is_plugin)


def _namespace_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-n", "--namespace", metavar="NS", default="", help="only the containers of this namespace")
    which.add_argument("-A", "--all-namespaces", action="store_true", help="those of all (the default)")


def server_url(text: str) -> str:
    """The URL without its last slash: a path is put behind it."""
    remedy = "give one such as http://localhost:5678"
    try:
        parts = urlsplit(text)
        _ = parts.port  # urlsplit itself takes any port; this raises for one that is no number up to 65535
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"--server {text[:200]!r} is no URL: {e}; {remedy}") from e
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"--server {text[:200]!r} is no URL of an agent; {remedy}")
    return text.rstrip("/")


def _top_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    parser.add_argument(
        "--once", action="store_true", help="print one table and end; without a terminal it is always so"
    )
    parser.add_argument(
        "--interval", metavar="S", type=_interval_s, default=1.0, help="time between two polls, seconds (%(default)g)"
    )
    parser.add_argument("--sort", choices=SORTS, default="gpu", help="what comes first: the highest, or by GPU (gpu)")
    _namespace_arguments(parser)
    _node_arguments(parser, is_plugin=is_plugin)


def _interval_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Also refuses NaN, which compares with nothing.
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is not between {_MIN_INTERVAL_S:g} and {_MAX_INTERVAL_S:g} seconds")
    return seconds


def _inspect_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    if not is_plugin:
        parser.add_argument("--all-nodes", action="store_true", help="every node of the cluster, by the API server")
    parser.add_argument("-d", "--details", action="store_true", help="list the containers as well")
    _namespace_arguments(parser)
    _node_arguments(parser, is_plugin=is_plugin)


def _explain_arguments(parser: argparse.ArgumentParser, *, is_plugin: bool) -> None:
    parser.add_argument("pod", metavar="POD", help="its name, or NAMESPACE/NAME")
    usual = "default" if is_plugin else "any; with --node: default"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-n", "--namespace", metavar="NS", default="", help=f"of the pod ({usual})")
    which.add_argument("-A", "--all-namespaces", action="store_true", help="the pod of this name in any namespace")
    parser.add_argument("-c", "--container", metavar="NAME", default="", help="only this container of it")
    _target_arguments(parser, is_plugin=is_plugin)


def _target(call: Invocation, *, is_plugin: bool) -> AgentTarget:
    from gpushare_agent.cli.agent_client import AgentTarget

    return AgentTarget(
        # kubectl gpushare has no --server, and not every command a node beside --node.
        server=getattr(call.options, "server", None) or "",
        node=call.options.node or getattr(call.options, "node_name", ""),
        is_remote=is_plugin,
        agent_namespace=call.options.agent_namespace,
    )


def _top(call: Invocation, target: AgentTarget) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import top

    return run_app(
        top.run(
            settings,
            target,
            once=options.once,
            interval_s=options.interval,
            namespace=options.namespace,
            sort=options.sort,
            form=options.output,
        )
    )


def _inspect(call: Invocation, target: AgentTarget) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import inspect

    # On a person's own machine no node is the obvious one; on a node it is this node.
    is_all = (target.is_remote and not target.node) or getattr(options, "all_nodes", False)
    return run_app(
        inspect.run(
            settings,
            target,
            is_all_nodes=is_all,
            with_details=options.details,
            namespace=options.namespace,
            form=options.output,
        )
    )


def _graph(call: Invocation, target: AgentTarget) -> int:
    settings = call.settings(log_level="error")
    from gpushare_agent.cli import graph

    return run_app(graph.run(settings, target, form=call.options.output))


def _explain(call: Invocation, target: AgentTarget) -> int:
    settings, options = call.settings(log_level="error"), call.options
    from gpushare_agent.cli import explain

    namespace, slash, pod = options.pod.rpartition("/")
    if namespace in ("pod", "pods", "po"):  # kubectl's TYPE/NAME
        namespace, slash = "", ""
    query = explain.PodQuery(
        pod=pod,
        namespace=namespace if slash else options.namespace,
        container=options.container,
        is_any_namespace=options.all_namespaces,
    )
    return run_app(explain.run(settings, target, query, form=options.output))
