"""What the agent knows of a GPU's health beyond the driver's last look: states, and what outlives the agent.

The rules are gpus/health.py; the owner is gpus/inventory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpushare_agent.model.names import GpuUuid


class HealthState(StrEnum):
    """One GPU's state. A cordon is no state: any GPU may be cordoned besides."""

    HEALTHY = "healthy"
    LOST = "lost"
    PROBING = "probing"
    NEEDS_RESET = "needs-reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """`cause` tells what happened, empty while healthy. Times are the agent's monotonic clock, in seconds.

    `passes` are looks in a row that found the GPU well; one counts from `probe_at` on. `relapses` is how often it fell ill
    soon after it had recovered, without a pause. `cordon` is the operator's reason, None where the GPU is in service.
    """

    state: HealthState = HealthState.HEALTHY
    cause: str = ""
    passes: int = 0
    probe_at: float | None = None
    relapses: int = 0
    recovered_at: float | None = None
    cordon: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHealth:
    """What is remembered over a restart of the agent: cordons and their reasons, GPUs that wait for a reset and why."""

    cordons: Mapping[GpuUuid, str]
    waits: Mapping[GpuUuid, str]


NOTHING_KEPT = KeptHealth(cordons={}, waits={})
