"""kit/report_once.py: a condition is reported when it begins, changes and ends, and memory is bounded."""

from __future__ import annotations

from gpushare_agent.kit.report_once import ReportOnce


def test_a_condition_is_reported_when_it_begins_changes_and_ends() -> None:
    """A repetition is not."""
    reports = ReportOnce()
    assert [reports.is_new(reason) for reason in ("away", "away", "denied", "denied")] == [True, False, True, False]
    assert (reports.is_over(), reports.is_over()) == (True, False)
    assert reports.is_new("denied")


def test_subjects_are_apart_and_the_oldest_is_forgotten() -> None:
    """Whoever invents subjects cannot make the memory grow."""
    reports = ReportOnce(capacity=2)
    assert [reports.is_new("away", pod) for pod in ("a", "b", "a", "c", "a")] == [True, True, False, True, True]
    assert not reports.is_over("b")
