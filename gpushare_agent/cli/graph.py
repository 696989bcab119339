"""`gpushare-agent graph`: how the node's GPUs are connected, and what is free on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from rich.text import Text

from gpushare_agent.cli.agent_client import open_agent, read_node, target_of
from gpushare_agent.cli.command_line import Invocation
from gpushare_agent.cli.inspect import reported_part
from gpushare_agent.cli.render_text import gib, gpu_label, health_line, is_cordoned, is_given_whole, plain, print_as
from gpushare_agent.model import gpus as model
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.gpus import LinkKind
from gpushare_agent.observability.documents import Branch, GpuDocument, NodeDocument, ReportedGpu
from gpushare_agent.placement.topology import render_tree

SCHEMA = 2
_MAX_DEPTH = 16
_KINDS = {"X": LinkKind.SELF, "NV": LinkKind.NVLINK} | {kind.name: kind for kind in LinkKind if kind > LinkKind.NVLINK}


async def run(call: Invocation) -> int:
    """Raises AgentError."""
    form = call.options.output
    async with open_agent(call.settings(), target_of(call)) as agent:
        document = graph_document(await read_node(agent))
    # Not wrapped: a broken line would break the branches that are drawn in it.
    tree = Text(tree_text(document, is_wide=form == "wide"), no_wrap=True, overflow="ignore")
    print_as(form, document, lambda _width: [tree])
    return 0


class GraphDocument(TypedDict):
    schema: int
    node: str
    tree: Branch
    links: Sequence[Sequence[str]]
    gpus: list[ReportedGpu]


def graph_document(node: NodeDocument) -> GraphDocument:
    """The part of the node's document that concerns the tree. Nothing is free on a GPU that is not in service."""
    return {
        "schema": SCHEMA,
        "node": node["node"],
        "tree": node["topology"]["tree"],
        "links": node["topology"]["links"],
        "gpus": [_gpu(gpu) for gpu in node["gpus"]],
    }


def _gpu(gpu: GpuDocument) -> ReportedGpu:
    cores, memory = gpu["cores"], gpu["memory"]
    # Room on a GPU out of service is offered to no pod.
    is_usable = gpu["is_healthy"] and not is_cordoned(gpu)
    free_bytes = max(0, memory["capacity_bytes"] - memory["allocated_bytes"]) if is_usable else 0
    return {
        **reported_part(gpu),
        "cores": {**cores, "free": max(0, cores["capacity"] - cores["allocated"]) if is_usable else 0},
        "memory": {**memory, "free_bytes": free_bytes},
    }


def tree_text(document: GraphDocument, *, is_wide: bool = False) -> str:
    """A line for each branch and GPU: `GPU0 NVIDIA H100, free 60/100 GPU cores, 20/24 GiB`. Raises Corrupt."""
    notes = {gpu["index"]: _note(gpu) + (f", {plain(gpu['uuid'])}" if is_wide else "") for gpu in document["gpus"]}
    labels = {gpu["index"]: gpu_label(gpu) for gpu in document["gpus"]}
    return render_tree(_read_branch(document["tree"], _MAX_DEPTH), notes, labels)


def _note(gpu: ReportedGpu) -> str:
    cores, memory = gpu["cores"], gpu["memory"]
    health = health_line(gpu)
    free_cores = "" if is_given_whole(gpu) else f"{cores['free']}/{cores['capacity']} GPU cores, "
    free = f"free {free_cores}{gib(memory['free_bytes'])}/{gib(memory['capacity_bytes'])} GiB"
    free += ", given whole" if is_given_whole(gpu) else ""
    return f"{plain(gpu['name'])}, {free}{'' if health == 'Healthy' else f', {health}'}"


def _read_branch(raw: Branch, depth: int) -> model.Branch:
    kind = _KINDS.get(raw["kind"])
    # The tree comes from elsewhere: `render_tree` calls itself for each level.
    if kind is None or depth == 0:
        raise Corrupt(
            f"cannot draw the topology: the agent's tree has a branch {plain(raw['kind'])!r} that this program does not"
            " know; use the gpushare-agent of the agent's own version"
        )
    return model.Branch(
        kind=kind, gpus=tuple(raw["gpus"]), children=tuple(_read_branch(child, depth - 1) for child in raw["children"])
    )
