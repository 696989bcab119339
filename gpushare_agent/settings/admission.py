"""Settings of placement and of the stored allocations; sections of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gpushare_agent.model.isolation import ResizeMode
from gpushare_agent.settings.values import Count, GivenPath, OptionalPath, Seconds, Section


class PlacementSettings(Section):
    """Which GPU a container gets."""

    share_policy: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="Shares go to the fullest GPU that fits (binpack) or to the emptiest (spread).",
    )


class AllocationSettings(Section):
    """How allocations are checked and freed."""

    check_period_s: Seconds = Field(
        default=30.0,
        ge=0.05,
        le=3600,
        description="Period of comparing allocations with the kubelet's list.",
    )
    checkpoint_path: GivenPath = Field(
        default=Path("/etc/gpu-manager/checkpoint"),
        description="gpu-manager's; no effect.",
    )
    cleanup_rejected_pods: bool = Field(
        default=True,
        description="Delete pods rejected at admission that a controller replaces.",
    )
    cleanup_per_minute: Count = Field(
        default=30,
        ge=1,
        le=6000,
        description="Most rejected pods deleted per minute.",
    )


class ResizeSettings(Section):
    """Live resize: the annotation gpushare-agent/resize of running pods (docs/explanation/resize.md)."""

    mode: ResizeMode = Field(
        default=ResizeMode.DISABLED,
        description="disabled: shares keep what was allocated. within-request: at most their request. free-capacity: also"
        " their GPU's free capacity; needs manifests/resize.",
    )
    state_file: OptionalPath = Field(
        default=Path("/var/lib/gpushare-agent/resize.json"),
        description="File that keeps resized shares over a restart. Empty: none.",
    )
