"""`gpushare-agent inspect`: what is allocated of every GPU, of one node by its agent or of all by the API server.

The agent's ledger is the truth about its node. Over all nodes the sums come from what each agent reports of it on the
node's object (cluster_nodes.py), never from a pod's annotations, which any tenant can write.

The document's format is docs/reference/cli.md; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypedDict, cast

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import KUBECTL, Invocation
from gpushare_agent.core.cli.render_text import (
    CORES_COLUMN,
    MEMORY_COLUMN,
    PIPE_WIDTH,
    allocated_line,
    counted,
    gib,
    gpu_label,
    gpus_in_words,
    grid,
    health_reasons,
    health_style,
    health_word,
    in_namespace,
    is_given_whole,
    part_of,
    plain,
    print_as,
    sums,
)
from gpushare_agent.core.model.gpus import HOST_MEMORY_TEXTS
from gpushare_agent.core.node_report.documents import Cores, GpuDocument, Memory, NodeDocument, ReportedGpu
from gpushare_agent.kubectl.agent_client import node_of, open_agent, read_node
from gpushare_agent.kubectl.cluster_nodes import NO_NODE, InspectedNode, inspected_container, open_cluster, read_cluster

SCHEMA = 2


class Totals(TypedDict):
    gpus: int
    gpus_healthy: int
    cores: Cores
    memory: Memory


class Uncharged(TypedDict):
    """The containers that are charged to no GPU."""

    containers: int
    cores: int
    memory_bytes: int


class SummedNode(InspectedNode):
    unplaced: Uncharged
    totals: Totals


class InspectionDocument(TypedDict):
    schema: int
    nodes: list[SummedNode]
    totals: Totals


def inspection_document(nodes: Sequence[InspectedNode]) -> InspectionDocument:
    """The document of `inspect`: the nodes, with the sums of each and of all."""
    return {
        "schema": SCHEMA,
        "nodes": [{**node, "unplaced": _uncharged(node), "totals": _totals(node["gpus"])} for node in nodes],
        "totals": _totals([gpu for node in nodes for gpu in node["gpus"]]),
    }


def _uncharged(node: InspectedNode) -> Uncharged:
    uncharged = [container for container in node["containers"] if not container["gpus"]]
    return {
        "containers": len(uncharged),
        "cores": sum(container["cores"] for container in uncharged),
        "memory_bytes": sum(container["memory_bytes"] for container in uncharged),
    }


def _totals(gpus: Sequence[ReportedGpu]) -> Totals:
    cores, memory = sums(gpus)
    healthy = sum(gpu["is_healthy"] for gpu in gpus)
    return {"gpus": len(gpus), "gpus_healthy": healthy, "cores": cores, "memory": memory}


def inspection_tables(
    document: InspectionDocument, *, with_details: bool, is_wide: bool = False, width: int = PIPE_WIDTH
) -> list[RenderableType]:
    """The tables, made from the document, so that both forms agree. `is_wide` adds the UUIDs. On a terminal, which is
    `width` wide, reasons are lines of their own: a last column would break their words."""
    nodes = document["nodes"]
    is_column = width == PIPE_WIDTH
    parts: list[RenderableType] = [_gpus_table(nodes, is_wide=is_wide, with_reasons=is_column)]
    if not is_column:
        parts += [
            Text(f"{plain(node['node'])} GPU {gpu_label(gpu)}: {plain('; '.join(reasons))}", style="yellow")
            for node in nodes
            for gpu in node["gpus"]
            if (reasons := health_reasons(gpu))
        ]
    if with_details:
        parts += [Text(""), _containers_table(nodes)]
    remarks = [
        Text(f"{plain(node['node'])}: {plain(node['remark'])}", style="yellow") for node in nodes if node["remark"]
    ]
    remarks += [
        Text(f"{plain(node['node'])} GPU {', '.join(labels)}: {text}", style="yellow")
        for node in nodes
        for kind, (text, _) in HOST_MEMORY_TEXTS.items()
        if (labels := [gpu_label(gpu) for gpu in node["gpus"] if gpu.get("host_memory") == kind])
    ]
    remarks += [
        Text(f"{plain(node['node'])} GPU {gpu['index']} ({plain(gpu['name'])}, {health_word(gpu)}): {plain(said)}")
        for node in nodes
        for gpu in node["mig_gpus"]
        if (said := "; ".join([*health_reasons(gpu), *gpu.get("texts", ("MIG on demand",))]))
    ]
    uncharged = [_uncharged_line(node, with_details) for node in nodes if node["unplaced"]["containers"]]
    return [*parts, Text(""), *remarks, *uncharged, _cluster_line(document)]


def _gpus_table(nodes: Sequence[SummedNode], *, is_wide: bool, with_reasons: bool) -> RenderableType:
    uuid = ("UUID",) if is_wide else ()
    columns = ["NODE", "GPU", "NAME", *uuid, "HEALTH", CORES_COLUMN, MEMORY_COLUMN, "REASON"]
    rows: list[list[str | Text]] = []
    for node in nodes:
        for position, gpu in enumerate(node["gpus"]):
            name = node["node"] if position == 0 else ""
            reason = "; ".join(health_reasons(gpu))
            more = [gpu["uuid"]] if is_wide else []
            health = Text(word := health_word(gpu), style=health_style(word))
            cores, memory = _amounts(gpu)
            cores = "whole" if is_given_whole(gpu) else cores
            rows.append([name, gpu_label(gpu), gpu["name"] or "-", *more, health, cores, memory, reason])
        cores, memory = _amounts(node["totals"])
        # Where no GPU's row names the node, only the row of sums does.
        whose = "" if node["gpus"] else node["node"]
        rows.append(
            [whose, "all", "", *("" for _ in uuid), "", Text(cores, style="bold"), Text(memory, style="bold"), ""]
        )
    # The last column is the reason: where all GPUs are in service it would only make lines longer.
    if not (with_reasons and any(row[-1] for row in rows)):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return grid(columns, rows, right=("GPU", CORES_COLUMN, MEMORY_COLUMN))


def _amounts(sums: ReportedGpu | Totals) -> tuple[str, str]:
    """Allocated and total, GPU cores and GiB."""
    cores, memory = sums["cores"], sums["memory"]
    return (
        part_of(cores["allocated"], cores["capacity"]),
        part_of(memory["allocated_bytes"], memory["capacity_bytes"], gib),
    )


def _containers_table(nodes: Sequence[SummedNode]) -> RenderableType:
    if not any(node["containers"] for node in nodes):
        return Text("no containers to show")
    labels = {(node["node"], gpu["index"]): gpu_label(gpu) for node in nodes for gpu in node["gpus"]}
    columns = ("NODE", "GPU", "NAMESPACE", "POD", "CONTAINER", CORES_COLUMN, MEMORY_COLUMN, "REMARK")
    rows = [
        (
            node["node"],
            ",".join(labels.get((node["node"], index), str(index)) for index in container["gpus"]) or "-",
            container["namespace"],
            container["pod"],
            container["container"],
            str(container["cores"]),
            gib(container["memory_bytes"]),
            container["remark"],
        )
        for node in nodes
        for container in node["containers"]
    ]
    return grid(columns, rows, right=("GPU", CORES_COLUMN, MEMORY_COLUMN))


def _uncharged_line(node: SummedNode, with_details: bool) -> Text:
    uncharged = node["unplaced"]
    number, verb = (counted(uncharged["containers"], "container"), "is" if uncharged["containers"] == 1 else "are")
    hint = "" if with_details else "; -d lists them"
    return Text(
        f"{plain(node['node'])}: {number} with {uncharged['cores']} GPU cores and {gib(uncharged['memory_bytes'])} GiB "
        f"{verb} charged to no GPU{hint}",
        style="yellow",
    )


def _cluster_line(document: InspectionDocument) -> Text:
    totals, number = document["totals"], len(document["nodes"])
    where = f"in {number} nodes" if number != 1 else "of the node"
    gpus, more = gpus_in_words([(node["gpus"], node["mig_gpus"]) for node in document["nodes"]])
    allocated = allocated_line(totals["cores"], totals["memory"])
    return Text(f"{gpus} {where}{more}: {allocated}", style="bold")


async def run(call: Invocation) -> int:
    """Raises AgentError."""
    options, settings, node = call.options, call.settings(), node_of(call)
    # On a person's own machine no node is the obvious one; on a node it is this node.
    if (call.program == KUBECTL and not node) or getattr(options, "all_nodes", False):
        async with open_cluster(settings) as api:
            nodes = await read_cluster(api, settings)
    else:
        async with open_agent(call, settings, node) as agent:
            nodes = [node_of_document(await read_node(agent))]
    document = inspection_document(nodes)
    for one in document["nodes"]:
        # After the sums, which are of the whole node whatever namespace is shown.
        one["containers"] = in_namespace(one["containers"], options.namespace)
    is_wide = options.output == "wide"
    show = partial(inspection_tables, document, with_details=options.details, is_wide=is_wide)
    print_as(options.output, document, lambda width: show(width=width) if nodes else [Text(NO_NODE)])
    return 0


def reported_part(gpu: GpuDocument) -> ReportedGpu:
    """The part of an agent's GPU that `inspect` shows: everything but its use."""
    return cast("ReportedGpu", {name: gpu[name] for name in ReportedGpu.__annotations__ if name in gpu})  # type: ignore[literal-required]


def node_of_document(document: NodeDocument) -> InspectedNode:
    """One node as its agent shows it."""
    return {
        "node": document["node"],
        "remark": "",
        "gpus": [reported_part(gpu) for gpu in document["gpus"]],
        "mig_gpus": [*document["mig_gpus"]],
        "containers": [
            inspected_container(
                *(one["namespace"], one["pod"], one["container"]),
                gpus=[gpu["index"] for gpu in one["gpus"]],
                # Not the compute that comes with GPUShare's memory.
                size=(one["cores"] if one["allocated"]["cores"] else 0, one["memory_bytes"]),
            )
            for one in document["containers"]
        ],
    }
