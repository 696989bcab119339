"""Isolation mps: `edits` is what a container gets, `control` asks the control daemon; `supervision` and `daemon` run it for
`gpushare-agent mps`."""

from __future__ import annotations

from gpushare_agent.isolation.mps.edits import ISOLATION

__all__ = ["ISOLATION"]
