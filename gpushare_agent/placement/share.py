"""A share of one GPU: the fullest GPU that still fits (binpack), or the emptiest (spread)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpushare_agent.placement.request import GpuRequest, GpuState

SharePolicy = Literal["binpack", "spread"]


def has_room(gpu: GpuState, request: GpuRequest) -> bool:
    return gpu.healthy and gpu.free_cores >= request.cores and gpu.free_blocks >= request.blocks


def choose_share(fitting: Sequence[GpuState], share_policy: SharePolicy) -> GpuState:
    """The GPU of a non-empty list that the policy prefers: by free cores, then by free memory, then by index."""
    sign = 1 if share_policy == "binpack" else -1
    return min(fitting, key=lambda gpu: (sign * gpu.free_cores, sign * gpu.free_blocks, gpu.index))
