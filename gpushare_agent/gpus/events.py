"""What the driver reports of a GPU between two looks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpushare_agent.model.names import GpuUuid


class GpuEventKind(StrEnum):
    XID = "xid"
    DOUBLE_BIT_ECC = "double-bit-ecc"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvent:
    """`uuid` is None where the driver did not say which GPU. `xid` is the number in NVIDIA's catalogue of Xid errors, 0 for
    events of another kind."""

    kind: GpuEventKind
    uuid: GpuUuid | None
    xid: int = 0
