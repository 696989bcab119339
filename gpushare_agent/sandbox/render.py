"""The sandbox's report for people: each node as `top` shows it, and the pods. Pure, from sandbox/report.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.cli.render_text import PHASE_STYLES, PIPE_WIDTH, grid, plain, print_as
from gpushare_agent.kubectl.render_top import Choice, node_tables
from gpushare_agent.sandbox.manifests import EXPECTATION_ANNOTATION
from gpushare_agent.sandbox.report import PodRow, SandboxDocument


def status_of(pod: PodRow) -> Text:
    word = "Terminating" if pod["is_terminating"] else pod["phase"]
    return Text(word, style=PHASE_STYLES.get(word, ""))


def node_parts(node: Any, width: int) -> list[RenderableType]:
    """The node as `top` shows it, where its agent has answered."""
    if "agent" not in node:
        return [Text(f"{plain(node['name'])}: its agent has not answered yet", style="yellow")]
    # A pipe has no use for bars.
    parts = [*node_tables(node, width, Choice(has_bars=width != PIPE_WIDTH))]
    if not node["is_offered"]:
        parts.append(Text("its agent offers no GPU to the kubelet at the moment", style="yellow"))
    return parts


def address_lines(node: Mapping[str, Any]) -> list[Text]:
    """The addresses of the node's agent, below its GPUs."""
    found = [f"{name.replace('_', ' ')} {where}" for name, where in node["addresses"].items() if where]
    return [Text("  ".join(found), no_wrap=True, overflow="fold")] if found else []


def pods_parts(document: SandboxDocument) -> list[RenderableType]:
    """The pods with their phases; below the table their reasons, which have the whole width there."""
    places = ("NODE",) if len(document["nodes"]) > 1 else ()
    rows = [(name_of(pod), status_of(pod), *([pod["node"] or "-"] if places else ())) for pod in document["pods"]]
    reasons = [(name_of(pod), reason_text(pod)) for pod in document["pods"]]
    lines = [Text(f"{name}: {plain(reason)}", style="yellow") for name, reason in reasons if reason]
    return [grid(("POD", "PHASE", *places), rows), *lines]


def name_of(pod: PodRow) -> str:
    return f"{pod['namespace']}/{pod['name']}"


def reason_text(pod: PodRow) -> str:
    """Why the pod is in its phase, and that its manifest expects that."""
    text = ": ".join(filter(None, (pod["reason"], pod["message"])))
    expected = pod["annotations"].get(EXPECTATION_ANNOTATION)
    # A sample that cannot fit shows a refusal. A person who tries the sandbox should not take it for a fault.
    return f"{text} (as intended: {expected})" if expected and text else text


def report_tables(document: SandboxDocument, width: int, *, has_addresses: bool = False) -> Group:
    """`has_addresses`: the addresses of its agent stand below the GPUs of each node."""
    parts: list[RenderableType] = []
    for node in document["nodes"]:
        parts += node_parts(node, width)
        parts += address_lines(node) if has_addresses else ()
        parts.append(Text(""))
    return Group(*parts, *pods_parts(document))


def print_document(document: SandboxDocument, form: Form, *, has_addresses: bool = False) -> None:
    """The report in that form."""
    print_as(form, document, lambda width: [report_tables(document, width, has_addresses=has_addresses)])


def pod_line(pod: PodRow, *, has_node: bool = False) -> str:
    """One pod in one line, for a log or a pipe, with its node where there are several. Without use: it always changes."""
    gpus = "; ".join(f"{one['name']}: GPU {','.join(map(str, one['gpus'])) or '-'}" for one in pod["containers"])
    reason = reason_text(pod)
    place = f" on {pod['node']}" if has_node and pod["node"] else ""
    return f"pod {name_of(pod)} {status_of(pod)}{place} [{gpus}]{f' - {reason}' if reason else ''}"
