"""The commands that show nodes to an operator: top, inspect, explain, defragment, and the page of all nodes.

`gpushare-agent` on a node asks the agent of that node. `kubectl gpushare` has the same commands, options and output, and
goes through the API server. docs/reference/cli.md has the formats, and the rights that a user of the plugin needs.
"""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from msgspec.structs import replace

from gpushare_agent.core.cli.command_line import (
    AGENT_NAMESPACE,
    SORTS,
    Argument,
    Command,
    add_output,
    arg,
    lazy,
    number,
    one_of,
    whole_number,
)

_CLUSTER_SETTINGS = ("kubeconfig", "context")
_SUMS_SETTINGS = ("resources", "gpushare")
_PLUGIN_NOTE = """\
The cluster is that of $KUBECONFIG or ~/.kube/config, its current context; --kubeconfig and --context name others.
docs/reference/cli.md lists the rights that you need."""


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


def _namespace(of_which: str, all_of: str) -> Argument:
    return one_of(arg("-n --namespace NS", of_which), arg("-A --all-namespaces", all_of))


_AGENT_NAMESPACE = arg(
    "--agent-namespace NS", "where the agents' pods are; empty: anywhere (%(default)s)", default=AGENT_NAMESPACE
)
_SERVER = arg("--server URL", "the agent's address (default: this host, and web.port)", type=server_url)
_CONTAINERS = _namespace("only the containers of this namespace", "those of all (the default)")


def view_commands(*, is_plugin: bool) -> tuple[Command, ...]:
    """The commands as one of the two programs has them."""
    # A person's machine has no agent, so web.addr and web.port say nothing there.
    agent_settings = _CLUSTER_SETTINGS if is_plugin else (*_CLUSTER_SETTINGS, "web")
    whose = (*(() if is_plugin else (_SERVER,)), arg("--node NODE", "whose agent to ask, through the API server"))
    node = (arg("node_name NODE", "the same as --node NODE", nargs="?"), *whose)
    others = (_AGENT_NAMESPACE, add_output)
    all_nodes = () if is_plugin else (arg("--all-nodes", "every node of the cluster, by the API server"),)
    commands = (
        Command(
            name="top",
            summary="live table of a node's GPUs, their containers and their use; the key ? lists the keys",
            run=lazy("kubectl.top:run"),
            examples=("top gpu-1", "top gpu-1 -n research") if is_plugin else ("top", "top --once -o json"),
            arguments=(
                arg("--once", "print one table and end, as without a terminal"),
                arg(
                    "--interval S",
                    "seconds between polls (%(default)g)",
                    type=number(0.1, 3600, " seconds"),
                    default=1.0,
                ),
                arg("--sort", "what comes first: the highest, or by GPU (gpu)", choices=SORTS, default="gpu"),
                _CONTAINERS,
                one_of(*node),
                *others,
            ),
            settings=agent_settings,
        ),
        Command(
            name="inspect",
            summary="allocated and total cores and memory of every GPU, of this node or of all",
            run=lazy("kubectl.inspect:run"),
            examples=("inspect -d", "inspect gpu-1" if is_plugin else "inspect --all-nodes"),
            arguments=(
                arg("-d --details", "list the containers as well"),
                _CONTAINERS,
                one_of(*all_nodes, *node),
                *others,
            ),
            settings=(*agent_settings, *_SUMS_SETTINGS),
        ),
        Command(
            name="explain",
            summary="why a pod got its GPU, was refused, or waits",
            description="Prints why the containers of a pod got their GPUs, or why they were refused, GPU by GPU."
            + (" Of a pod that waits: the smallest changes that would let it start now." if is_plugin else ""),
            run=lazy("kubectl.explain:run"),
            examples=(
                "explain train-0 -n research",
                *(() if is_plugin else ("explain research/train-0 -c main -o json",)),
            ),
            arguments=(
                arg("pod POD", "its name, or NAMESPACE/NAME"),
                _namespace(
                    f"of the pod ({'default' if is_plugin else 'any; with --node: default'})",
                    "the pod of this name in any namespace",
                ),
                arg("-c --container NAME", "only this container of it"),
                one_of(*whose),
                *others,
            ),
            settings=agent_settings,
        ),
        Command(
            name="defragment",
            summary="which few pods would have to move for GPUs to become whole; it moves none",
            run=lazy("kubectl.defragment:run"),
            examples=("defragment --dry-run --gpus 4",),
            arguments=(
                arg("--dry-run", "required: it only advises"),
                arg("--gpus N", "as few moves as make N GPUs whole (all)", type=whole_number(1, 1_000_000)),
                add_output,
            ),
            settings=(*_CLUSTER_SETTINGS, *_SUMS_SETTINGS),
        ),
        Command(
            name="dashboard",
            summary="a web page of all nodes and of the pods that wait",
            description="Serves a page on this machine's loopback address until Ctrl-C: all nodes, their GPUs, the pods on "
            "them, and why pods wait. It has your own rights.",
            run=lazy("kubectl.dashboard:run"),
            examples=("dashboard",),
            arguments=(
                arg("--port PORT", "0: any free one (%(default)s)", type=whole_number(0, 65535), default=5680),
                _AGENT_NAMESPACE,
            ),
            settings=(*_CLUSTER_SETTINGS, *_SUMS_SETTINGS),
        ),
    )
    return tuple(replace(one, help_note=_PLUGIN_NOTE if is_plugin else "") for one in commands)
