"""The report of `gpushare-agent check` in both forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from gpushare_agent.model.finding import Finding, Level


def as_text(findings: Sequence[Finding]) -> str:
    """A line each: level, what, detail, cure; then a line that counts."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = [
        f"{finding.level:<7}  {finding.what:<{width}}  {finding.detail}"
        + (f"  -> {finding.cure}" if finding.cure else "")
        for finding in findings
    ]
    return "\n".join([*(" ".join(line.splitlines()) for line in lines), _summary(findings)])


def _summary(findings: Sequence[Finding]) -> str:
    errors, warnings = _count(findings, Level.ERROR), _count(findings, Level.WARNING)
    return f"This node is {'not ' if errors else ''}ready: errors {errors}, warnings {warnings}."


def report_document(node_name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "node": node_name,
        "errors": _count(findings, Level.ERROR),
        "warnings": _count(findings, Level.WARNING),
        "findings": [to_builtins(finding) for finding in findings],
    }


def _count(findings: Sequence[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)
