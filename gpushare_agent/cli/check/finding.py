"""What `gpushare-agent check` found: one value per finding, and the report in both forms."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, to_builtins


class Level(StrEnum):
    """error: the agent will not work; warning: it will, without something."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(Struct, frozen=True, kw_only=True):
    """`what` is the subject, `detail` the observation, `cure` what to do (empty when ok)."""

    level: Level
    what: str
    detail: str
    cure: str = ""


def ok(what: str, detail: str) -> Finding:
    return Finding(level=Level.OK, what=what, detail=detail)


def warning(what: str, detail: str, cure: str) -> Finding:
    return Finding(level=Level.WARNING, what=what, detail=detail, cure=cure)


def error(what: str, detail: str, cure: str) -> Finding:
    return Finding(level=Level.ERROR, what=what, detail=detail, cure=cure)


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
