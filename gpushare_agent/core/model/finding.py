"""The finding of a probe of `gpushare-agent check`. Pure."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


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
