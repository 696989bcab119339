"""Allocated and total of every GPU, per node and for the cluster. Pure: sums in, a document or tables out.

The document's format is docs/reference/cli.md; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.render_text import (
    MIB,
    counted,
    gpu_label,
    grid,
    health_reasons,
    health_style,
    health_word,
    out_of_service,
    part_of,
    plain,
)
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.observability.inspection import ContainerSums, GpuSums, NodeSums

SCHEMA = 1


def inspection_document(nodes: Sequence[NodeSums]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "nodes": [_node_document(node) for node in nodes],
        "totals": _totals([gpu for node in nodes for gpu in node.gpus]),
    }


def _node_document(node: NodeSums) -> dict[str, Any]:
    return {
        "node": node.node,
        "remark": node.remark,
        "cards": [_gpu_document(gpu) for gpu in node.gpus],
        "containers": [_container_document(container) for container in node.containers],
        "unplaced": {
            "containers": len(node.unplaced),
            "cores": sum(container.cores for container in node.unplaced),
            "memory_bytes": sum(container.memory_bytes for container in node.unplaced),
        },
        "totals": _totals(node.gpus),
    }


def _gpu_document(sums: GpuSums) -> dict[str, Any]:
    gpu = sums.gpu
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        **({"mig": {"label": gpu.label}} if gpu.label else {}),
        "is_healthy": gpu.is_healthy,
        "health_reason": sums.health_reason,
        "cordoned": gpu.cordoned or None,
        "cores": {"allocated": sums.cores_allocated, "capacity": CORES_PER_GPU},
        "memory": {"allocated_bytes": sums.memory_allocated_bytes, "capacity_bytes": gpu.memory_bytes},
    }


def _container_document(container: ContainerSums) -> dict[str, Any]:
    return {
        "namespace": container.namespace,
        "pod": container.pod,
        "container": container.container,
        "cards": list(container.gpus),
        "cores": container.cores,
        "memory_bytes": container.memory_bytes,
        "remark": container.remark,
    }


def _totals(gpus: Sequence[GpuSums]) -> dict[str, Any]:
    return {
        "cards": len(gpus),
        "cards_healthy": sum(1 for sums in gpus if sums.gpu.is_healthy),
        "cores": {
            "allocated": sum(sums.cores_allocated for sums in gpus),
            "capacity": len(gpus) * CORES_PER_GPU,
        },
        "memory": {
            "allocated_bytes": sum(sums.memory_allocated_bytes for sums in gpus),
            "capacity_bytes": sum(sums.gpu.memory_bytes for sums in gpus),
        },
    }


def inspection_tables(document: dict[str, Any], *, with_details: bool) -> list[RenderableType]:
    """From the document, so that both forms agree."""
    nodes = document["nodes"]
    parts: list[RenderableType] = [_gpus_table(nodes)]
    if with_details:
        parts += [Text(""), _containers_table(nodes)]
    remarks = [
        Text(f"{plain(node['node'])}: {plain(node['remark'])}", style="yellow") for node in nodes if node["remark"]
    ]
    unplaced = [_unplaced_line(node, with_details) for node in nodes if node["unplaced"]["containers"]]
    return [*parts, Text(""), *remarks, *unplaced, _cluster_line(document)]


def _gpus_table(nodes: Sequence[dict[str, Any]]) -> RenderableType:
    columns = ["NODE", "GPU", "NAME", "HEALTH", "CORES", "MEMORY MiB", "REASON"]
    rows: list[list[str | Text]] = []
    for node in nodes:
        for position, gpu in enumerate(node["cards"]):
            name = node["node"] if position == 0 else ""
            reason = "; ".join(health_reasons(gpu))
            rows.append([name, gpu_label(gpu), gpu["name"] or "-", _health(gpu), *_amounts(gpu), reason])
        cores, memory = _amounts(node["totals"])
        whose = "" if node["cards"] else node["node"]
        rows.append([whose, "all", "", "", Text(cores, style="bold"), Text(memory, style="bold"), ""])
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return grid(columns, rows, right=("GPU", "CORES", "MEMORY MiB"))


def _health(gpu: dict[str, Any]) -> Text:
    word = health_word(gpu)
    return Text(word, style=health_style(word))


def _amounts(sums: dict[str, Any]) -> tuple[str, str]:
    """Allocated and total, cores and MiB."""
    cores, memory = sums["cores"], sums["memory"]
    return (
        part_of(cores["allocated"], cores["capacity"]),
        part_of(memory["allocated_bytes"] / MIB, memory["capacity_bytes"] / MIB),
    )


def _containers_table(nodes: Sequence[dict[str, Any]]) -> RenderableType:
    columns = ("NODE", "GPU", "NAMESPACE", "POD", "CONTAINER", "CORES", "MEMORY MiB", "REMARK")
    rows = [
        (
            node["node"],
            ",".join(map(str, container["cards"])) or "-",
            container["namespace"],
            container["pod"],
            container["container"],
            str(container["cores"]),
            f"{container['memory_bytes'] / MIB:.0f}",
            container["remark"],
        )
        for node in nodes
        for container in node["containers"]
    ]
    return grid(columns, rows, right=("GPU", "CORES", "MEMORY MiB"))


def _unplaced_line(node: dict[str, Any], with_details: bool) -> Text:
    unplaced = node["unplaced"]
    number, verb = (counted(unplaced["containers"], "container"), "is" if unplaced["containers"] == 1 else "are")
    hint = "" if with_details else "; -d lists them"
    return Text(
        f"{plain(node['node'])}: {number} with {unplaced['cores']} cores and {unplaced['memory_bytes'] / MIB:.0f} MiB "
        f"{verb} charged to no GPU{hint}",
        style="yellow",
    )


def _cluster_line(document: dict[str, Any]) -> Text:
    totals, number = document["totals"], len(document["nodes"])
    cores, memory = _amounts(totals)
    where = f"in {number} nodes" if number != 1 else "of the node"
    health = out_of_service([gpu for node in document["nodes"] for gpu in node["cards"]])
    return Text(
        f"allocated of {counted(totals['cards'], 'GPU')} {where}{health}: cores {cores}, memory {memory} MiB",
        style="bold",
    )
