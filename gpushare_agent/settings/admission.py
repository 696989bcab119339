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


class ResizeSettings(Section):
    """Live resize: the annotation gpushare-agent/resize of running pods (docs/explanation/resize.md)."""

    mode: ResizeMode = Field(
        default=ResizeMode.DISABLED,
        description="disabled: shares keep what was allocated, for a tenant who may edit his pods would otherwise escape the"
        " ResourceQuota. within-request: a share may shrink, and grow back up to its request. free-capacity: it may grow"
        " as far as its GPU has free capacity; only with an admission policy for the annotation.",
    )
    state_file: OptionalPath = Field(
        default=Path("/var/lib/gpushare-agent/resize.json"),
        description="File that preserves the resized shares over a restart of the agent. Empty: they have what was allocated"
        " until the API server answers, and what was lent to them may be allocated again meanwhile.",
    )
