"""Settings of placement and of the stored allocations; sections of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gpushare_agent.settings.values import Count, GivenPath, Seconds, Section


class PlacementSettings(Section):
    """Which GPU a container gets."""

    share_policy: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="Shares go to the fullest GPU that fits (binpack: whole GPUs stay free) or the emptiest (spread).",
    )


class AllocationSettings(Section):
    """How allocations are checked and freed."""

    check_period_s: Seconds = Field(
        default=30.0,
        ge=0.05,
        le=3600,
        description="How often allocations are compared with what the kubelet lists, seconds.",
    )
    checkpoint_path: GivenPath = Field(
        default=Path("/etc/gpu-manager/checkpoint"),
        description="Accepted for gpu-manager's manifests and not used: the kubelet's own checkpoint is the state.",
    )
    cleanup_rejected_pods: bool = Field(
        default=True,
        description="Delete pods rejected at admission whose controller replaces them, ten times a second otherwise.",
    )
    cleanup_per_minute: Count = Field(
        default=30,
        ge=1,
        le=6000,
        description="Most rejected pods deleted per minute: a bound on the load of the API server.",
    )
