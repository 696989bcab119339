"""Any answer that passes the check can be shown: each value of real answers is replaced by odd ones, in turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from msgspec import to_builtins
from rich.console import Console

from gpushare_agent.core.cli.command_line import SORTS
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.node_report.documents import DecisionsDocument, NodeDocument, check_document
from gpushare_agent.kubectl.explain import decision_parts, newest_of_containers
from gpushare_agent.kubectl.inspect import inspection_document, inspection_tables, node_of_document
from gpushare_agent.kubectl.render_top import Choice, heading, top_lines, top_table
from tests.cli.support_cli import busy_node, decision

ABSENT = object()
ODD_VALUES = (ABSENT, None, "odd", "", -1, 0, 1.5, True, 10**30, float("nan"), float("inf"), [], [[]], {}, {"odd": 1})
Path = tuple[str | int, ...]


def paths_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every value below, of a list its first."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


def changed(document: dict[str, Any], paths: Iterable[Path], odd: Any) -> dict[str, Any]:
    made = copy.deepcopy(document)
    for path in paths:
        place: Any = made
        for key in path[:-1]:
            place = place[key]
        if odd is ABSENT:
            del place[path[-1]]
        else:
            place[path[-1]] = odd
    return made


def print_to_nowhere(*parts: Any) -> None:
    console = Console(width=100)
    with console.capture():
        console.print(*parts)


def is_taken(answer: dict[str, Any], shape: type[Any]) -> bool:
    try:
        check_document(shape, answer, "a test")
    except Corrupt:
        return False
    return True


def show_node(answer: dict[str, Any]) -> None:
    node = check_document(NodeDocument, answer, "a test")
    for sort in SORTS:
        choice = Choice(sort=sort, has_processes=True)
        lines = top_lines(node, 100, choice)
    header, rows = top_table(lines, 100, choice)
    print_to_nowhere(*heading(node, 100), header, *rows)
    print_to_nowhere(*inspection_tables(inspection_document([node_of_document(node)]), with_details=True, is_wide=True))


def show_decisions(answer: dict[str, Any]) -> None:
    for one in newest_of_containers(check_document(DecisionsDocument, answer, "a test")["decisions"], ""):
        print_to_nowhere(*decision_parts(one, 100))


def node_answer() -> dict[str, Any]:
    """One GPU, one container."""
    document = json.loads(json.dumps(busy_node()))
    document |= {"gpus": document["gpus"][:1], "containers": document["containers"][-1:]}
    document["gpus"][0]["mig"] = {"label": "0:1", "profile": "1g.10gb", "parent": "GPU-0", "gpu_instance": 1}
    return document | {"topology": {**document["topology"], "links": [["X", "NV4"], ["NV4", "X"]]}}


def decisions_answer() -> dict[str, Any]:
    return json.loads(json.dumps({"decisions": [to_builtins(decision()), to_builtins(decision(2))]}))


@pytest.mark.parametrize(
    ("answer", "shape", "show", "is_read", "is_not"),
    [
        (node_answer(), NodeDocument, show_node, ("gpus", 0, "cores", "capacity"), ("containers", 0, "kept")),
        (
            decisions_answer(),
            DecisionsDocument,
            show_decisions,
            ("decisions", 0, "asked"),
            ("decisions", 0, "candidates", 0, "uuid"),
        ),
    ],
    ids=["node", "decisions"],
)
def test_an_answer_is_refused_or_shown(
    answer: dict[str, Any], shape: type[Any], show: Callable[[dict[str, Any]], None], is_read: Path, is_not: Path
) -> None:
    """What no command reads is never refused, and may be odd all at once."""

    def require_shown(paths: Iterable[Path], odd: Any) -> None:
        try:
            show(changed(answer, paths, odd))
        except Exception as error:
            raise AssertionError(f"{paths} as {odd!r}") from error

    unread: list[Path] = []
    for path in paths_in(answer):
        if any(path[: len(outer)] == outer for outer in unread):
            continue
        taken = [odd for odd in ODD_VALUES if is_taken(changed(answer, [path], odd), shape)]
        if len(taken) == len(ODD_VALUES):
            unread.append(path)
        else:
            for odd in taken:
                require_shown([path], odd)
    assert is_read not in unread and is_not in unread
    for odd in ODD_VALUES:
        require_shown(unread, odd)


def test_fields_of_a_newer_agent_are_kept() -> None:
    """`-o json` prints them."""
    answer = node_answer()
    answer["gpus"][0]["of_a_newer_agent"] = 1
    assert check_document(NodeDocument, answer, "a test")["gpus"][0] == answer["gpus"][0]
