"""What is known of a GPU besides its own data: events of the driver, the health state, and what is saved over a restart.

The transitions are in health.py; the owner is gpus/inventory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.names import GpuUuid


class GpuEventKind(StrEnum):
    XID = "xid"
    DOUBLE_BIT_ECC = "double-bit-ecc"


class GpuEvent(Struct, frozen=True, kw_only=True):
    """`uuid` is None where the driver does not name the GPU. `xid` is the number in NVIDIA's catalogue of Xid errors, 0 for
    events of another kind. `gi` and `ci` are the MIG instance's IDs, None where it is of the whole GPU."""

    kind: GpuEventKind
    uuid: GpuUuid | None
    xid: int = 0
    gi: int | None = None
    ci: int | None = None

    def is_of(self, gpu: Gpu) -> bool:
        """Whether it is of this GPU, or of this MIG instance or the GPU that it is a part of."""
        if gpu.mig is None or self.uuid != gpu.mig.parent:
            return self.uuid == gpu.uuid
        return self.gi in (None, gpu.mig.gi) and self.ci in (None, gpu.mig.ci)


class HealthState(StrEnum):
    """One GPU's state. A cordon is not a state: a GPU in any state may be cordoned."""

    HEALTHY = "healthy"
    LOST = "lost"
    PROBING = "probing"
    NEEDS_RESET = "needs-reset"


class GpuHealth(Struct, frozen=True, kw_only=True):
    """`cause` is the error that made it unhealthy, empty while healthy. Times are of the monotonic clock, in seconds.

    `passes` counts consecutive polls that found the GPU usable; a poll counts from `probe_at` on. `relapses` counts
    consecutive failures soon after a recovery. `cordon` is the operator's reason, None where the GPU is in service.
    """

    state: HealthState = HealthState.HEALTHY
    cause: str = ""
    passes: int = 0
    probe_at: float | None = None
    relapses: int = 0
    recovered_at: float | None = None
    cordon: str | None = None


class SavedHealth(Struct, frozen=True, kw_only=True):
    """Saved over a restart of the agent: cordons with their reasons, and GPUs that wait for a reset, with the cause."""

    cordons: Mapping[GpuUuid, str]
    waits: Mapping[GpuUuid, str]


NOTHING_SAVED = SavedHealth(cordons={}, waits={})
