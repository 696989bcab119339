"""The real isolation libraries, on the fake driver, in containers: what each of them keeps. `nox -s isolation`."""

from __future__ import annotations

import pytest

from tests.real_isolation.checks import CHECKS, Check
from tests.real_isolation.conftest import NodeOf, case
from tests.real_isolation.measure import MEASURED, measure

CASES = [
    case(isolation, check, name=f"{isolation}: {check.name}", is_smoke=isolation in check.smoke)
    for isolation, pids in sorted({(isolation, check.pids) for check in CHECKS for isolation in check.expected})
    for check in CHECKS
    if isolation in check.expected and check.pids == pids
]
"""Of one isolation and one PID behaviour together: they share a node."""


@pytest.mark.parametrize(("isolation", "check"), CASES)
def test_an_isolation_keeps_what_is_said(
    isolation: str, check: Check, node_of: NodeOf, request: pytest.FixtureRequest
) -> None:
    """As checks.py has it: a change in either direction fails."""
    node = node_of(isolation, check.pids)
    found = measure(node, check)
    if found.verdict != check.expected[isolation] and check.launch:
        found = measure(node, check)  # a machine that is loaded for a moment keeps a program from its GPU
    request.config.stash[MEASURED][check.name, isolation] = found
    assert found.verdict == check.expected[isolation], f"{found.number}; {found.error}"
