"""Isolation driver: `edits` is what a container gets, `limits` keeps the driver's memory limits of the cgroups of containers
with a share."""

from __future__ import annotations

from gpushare_agent.isolation.driver.edits import ISOLATION

__all__ = ["ISOLATION"]
