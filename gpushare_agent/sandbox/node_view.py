"""The report for people: tables for a terminal, lines for a pipe. Reads the document of node_report only."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpushare_agent.sandbox.manifests import EXPECTATION_ANNOTATION

_PHASE_STYLES = {"Running": "green", "Succeeded": "cyan", "Pending": "yellow", "Failed": "red"}
_CORES = 100
_PIPE_WIDTH = 160


def card_text(container: dict[str, Any]) -> str:
    return ",".join(map(str, container["cards"])) or "-"


def cards_table(document: dict[str, Any], block_mib: int) -> Table:
    table = Table(title=f"Cards of {document['node']['name']}", title_justify="left")
    for column in ("card", "name", "memory MiB", "NUMA", "cores used", "memory used MiB", "health"):
        table.add_column(column, justify="left" if column in ("name", "health") else "right")
    for card in document["node"]["cards"]:
        numa = "-" if card["numa"] is None else str(card["numa"])
        used = f"{card['cores_allocated']} / {_CORES}"
        memory = f"{card['memory_blocks_allocated'] * block_mib} / {card['memory_mib']}"
        if card["cores_allocated"] >= _CORES and not card["memory_blocks_allocated"]:
            memory = "with the cores"  # a whole card comes with its whole memory, and no block is asked for
        style = "" if card["health"] == "Healthy" else "red"
        values = (str(card["index"]), card["name"], str(card["memory_mib"]), numa, used, memory)
        table.add_row(*values, Text(card["health"], style=style))
    return table


def pods_table(document: dict[str, Any]) -> Table:
    table = Table(title="Pods", title_justify="left")
    for column in ("pod", "phase", "container", "cores", "memory blocks", "cards"):
        table.add_column(column, justify="right" if column in ("cores", "memory blocks") else "left")
    table.add_column("reason", overflow="fold", ratio=1)
    for pod in document["pods"]:
        for position, container in enumerate(pod["containers"]):
            is_first = position == 0
            phase = Text(pod["phase"], style=_PHASE_STYLES.get(pod["phase"], ""))
            name, reason = f"{pod['namespace']}/{pod['name']}", reason_text(pod)
            table.add_row(
                name if is_first else "", phase if is_first else "", container["name"], str(container["vcore"]),
                str(container["vmemory"]), card_text(container), reason if is_first else "",
            )  # fmt: skip
    return table


def reason_text(pod: dict[str, Any]) -> str:
    """Why the pod is where it is, and that it was meant so, where its manifest says so."""
    text = ": ".join(filter(None, (pod["reason"], pod["message"])))
    expected = pod["annotations"].get(EXPECTATION_ANNOTATION)
    return f"{text} (as intended: {expected})" if expected and text else text


def tables(document: dict[str, Any], block_mib: int, notes: list[str]) -> RenderableType:
    return Group(cards_table(document, block_mib), pods_table(document), *(Text(note) for note in notes))


def print_document(document: dict[str, Any], form: str, block_mib: int) -> None:
    """`form` is "json" or "table". Wide enough for whole reasons where no terminal sets the width."""
    if form == "json":
        print(json.dumps(document, indent=2))
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(width=width, highlight=False).print(tables(document, block_mib, []))


def pod_line(pod: dict[str, Any]) -> str:
    """One pod in one line, for a log or a pipe."""
    containers = "; ".join(
        f"{c['name']}: {c['vcore']} cores, {c['vmemory']} blocks on card {card_text(c)}" for c in pod["containers"]
    )
    reason = reason_text(pod)
    return f"pod {pod['namespace']}/{pod['name']} {pod['phase']} [{containers}]{f' - {reason}' if reason else ''}"
