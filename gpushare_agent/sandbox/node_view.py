"""The report for people: tables for a terminal, lines for a pipe. Reads the document of node_report only.

The live view is node_live_view.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpushare_agent.model.names import CORES_PER_CARD
from gpushare_agent.sandbox.manifests import EXPECTATION_ANNOTATION

_PHASE_STYLES = {
    "Running": "green",
    "Succeeded": "cyan",
    "Pending": "yellow",
    "Failed": "red",
    "Terminating": "magenta",
}
_PIPE_WIDTH = 160
_NARROW = 100
"""Below this width a card's name would take the place of what changes."""


def card_text(container: dict[str, Any]) -> str:
    return ",".join(map(str, container["cards"])) or "-"


def health_text(card: dict[str, Any]) -> Text:
    """With the driver's reason for a card that is not well."""
    text = ": ".join(filter(None, (card["health"], card["health_reason"])))
    return Text(text, style="" if card["health"] == "Healthy" else "red")


def card_use(card: dict[str, Any]) -> tuple[str, str]:
    """Cores and memory, each used and whole."""
    return (
        f"{card['cores_allocated']} / {CORES_PER_CARD}",
        f"{card['memory_mib_allocated']} / {card['memory_mib']}",
    )


def status_of(pod: dict[str, Any]) -> Text:
    word = "Terminating" if pod["is_terminating"] else pod["phase"]
    return Text(word, style=_PHASE_STYLES.get(word, ""))


def cards_table(document: dict[str, Any], *, is_narrow: bool) -> Table:
    table = Table(title=f"Cards of {document['node']['name']}", title_justify="left")
    names = ("card", *(() if is_narrow else ("name",)), "NUMA", "cores used", "memory used MiB", "health")
    for column in names:
        table.add_column(column, justify="left" if column in ("name", "health") else "right")
    for card in document["node"]["cards"]:
        numa = "-" if card["numa"] is None else str(card["numa"])
        name = () if is_narrow else (card["name"],)
        table.add_row(str(card["index"]), *name, numa, *card_use(card), health_text(card))
    return table


def pods_table(document: dict[str, Any]) -> Table:
    table = Table(title="Pods", title_justify="left")
    for column in ("pod", "phase", "container", "cores", "memory blocks", "cards"):
        table.add_column(column, justify="right" if column in ("cores", "memory blocks") else "left")
    table.add_column("reason", overflow="fold", ratio=1)
    for pod in document["pods"]:
        for position, container in enumerate(pod["containers"]):
            is_first = position == 0
            phase = status_of(pod)
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


def print_document(document: dict[str, Any], form: str) -> None:
    """`form` is "json" or "table". Wide enough for whole reasons where no terminal sets the width."""
    if form == "json":
        print(json.dumps(document, indent=2))
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, highlight=False)
    console.print(cards_table(document, is_narrow=console.width < _NARROW), pods_table(document))


def pod_line(pod: dict[str, Any]) -> str:
    """One pod in one line, for a log or a pipe."""
    containers = "; ".join(
        f"{c['name']}: {c['vcore']} cores, {c['vmemory']} blocks on card {card_text(c)}" for c in pod["containers"]
    )
    reason = reason_text(pod)
    return f"pod {pod['namespace']}/{pod['name']} {status_of(pod)} [{containers}]{f' - {reason}' if reason else ''}"
