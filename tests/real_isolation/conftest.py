"""The options and the table of `nox -s isolation`; the node of each check, which checks of the same isolation share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.native.build import CannotBuildError
from tests.real_isolation.checks import CHECKS
from tests.real_isolation.libraries import LIBRARIES, Libraries
from tests.real_isolation.library_table import ROWS
from tests.real_isolation.measure import MEASURED
from tests.real_isolation.support_isolation import Built, IsolationNode, build_all, open_node, why_not

NodeOf = Callable[[str, str], IsolationNode]
BUDGET = pytest.StashKey[dict[tuple[str, str], str]]()
"""Of the error budget, by kernel with library and by number of multiprocessors."""
CELLS = pytest.StashKey[dict[tuple[str, str], str]]()
"""Of the table of libraries, by row and library."""


def case(*values: object, name: str, is_smoke: bool) -> object:
    """A parameter set of a cell."""
    return pytest.param(*values, id=name, marks=[pytest.mark.isolation] + [pytest.mark.smoke] * is_smoke)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isolation")
    group.addoption(
        "--smoke", action="store_true", help="the few checks that show whether the default isolation keeps anything"
    )
    group.addoption(
        "--error-budget", action="store_true", help="also each library's error of compute, some ten minutes"
    )
    group.addoption("--table", metavar="FILE", type=Path, help="write the measured table to FILE, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = {}
    config.stash[CELLS] = {}
    config.stash[BUDGET] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--smoke"):
        left_out = [
            item for item in items if item.get_closest_marker("isolation") and not item.get_closest_marker("smoke")
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if reason := why_not():
        pytest.skip(reason)
    try:
        return build_all(tmp_path_factory.mktemp("isolation"))
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def libraries(built: Built) -> Libraries:
    return Libraries(built)


@pytest.fixture(scope="session")
def node_of(built: Built) -> Iterator[NodeOf]:
    """A node of an isolation and a PID behaviour; the one before is closed, so checks of one node stand together."""
    open_now: dict[tuple[str, str], IsolationNode] = {}
    with ExitStack() as stack:

        def node_of(isolation: str, pids: str) -> IsolationNode:
            if reason := built.why_not(isolation):
                pytest.skip(reason)
            if (isolation, pids) not in open_now:
                stack.pop_all().close()
                open_now.clear()
                open_now[isolation, pids] = stack.enter_context(
                    open_node(built, isolation, pids=pids, **_driver_of(isolation))
                )
            return open_now[isolation, pids]

        yield node_of


def _driver_of(isolation: str) -> dict[str, object]:
    """The fake driver's settings: one that has limits of memory, where they are measured."""
    return {"driver_version": "615.71", "cuda_version": 13040} if "driver" in isolation.split("+") else {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = {key: f"{one.verdict} ({one.number})" for key, one in config.stash[MEASURED].items()}
    isolations, budget = sorted({isolation for _, isolation in measured}), config.stash[BUDGET]
    tables = {
        "what each isolation keeps": _table(measured, [check.name for check in CHECKS], isolations),
        "what each library keeps": _table(
            config.stash[CELLS], [row.name for row in ROWS], [library.name for library in LIBRARIES]
        ),
        "mean error of compute in points (the largest)": _table(
            budget,
            [f"{kind}: {library.name}" for kind in ("short", "wave") for library in LIBRARIES],
            list(dict.fromkeys(column for _, column in budget)),
        ),
    }
    written = []
    for title, table in tables.items():
        if table:
            terminalreporter.section(title)
            written += ["" for _ in written[:1]] + table
            for line in table:
                terminalreporter.write_line(line)
    path: Path | None = config.getoption("--table")
    if path is not None and written:
        path.write_text("\n".join(written) + "\n", encoding="utf-8")


def _table(cells: Mapping[tuple[str, str], str], names: Iterable[str], columns: Sequence[str]) -> list[str]:
    """As Markdown, with the rows of which a cell was measured, in their order."""
    known = {name for name, _ in cells}
    rows = [[name, *(cells.get((name, one), "") for one in columns)] for name in dict.fromkeys(names) if name in known]
    if not rows:
        return []
    whole = [["", *columns], *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(whole[0]))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in whole]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]
