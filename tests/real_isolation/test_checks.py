"""The real isolation libraries, on the fake driver, in containers: what each of them keeps. `nox -s isolation`."""

from __future__ import annotations

import pytest

from tests.real_isolation.checks import CHECKS, Check
from tests.real_isolation.conftest import NodeOf
from tests.real_isolation.measure import MEASURED, measure


def _cases() -> list[object]:
    """Of one isolation and one PID behaviour together: they share a node."""
    cases = [(isolation, check) for check in CHECKS for isolation in check.expected]
    return [
        pytest.param(
            isolation,
            check,
            id=f"{isolation}: {check.name}",
            marks=[pytest.mark.isolation, *([pytest.mark.smoke] if isolation in check.smoke else [])],
        )
        for isolation, check in sorted(cases, key=lambda case: (case[0], case[1].pids))
    ]


@pytest.mark.parametrize(("isolation", "check"), _cases())
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
