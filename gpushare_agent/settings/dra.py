"""Settings of Dynamic Resource Allocation; a section of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gpushare_agent.settings.values import GivenPath, Seconds, Section, Texts


class DraSettings(Section):
    """The second front end: GPUs that pods get by ResourceClaims."""

    gpus: Texts = Field(
        default=(),
        description="GPUs offered by ResourceClaims and by no device plugin: all, indexes, UUIDs or models. Empty: none.",
    )
    order: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="Order of the GPUs, of which the scheduler takes the first that fits. binpack: the fullest first. "
        "spread: the emptiest first.",
    )
    taint_effect: Literal["NoSchedule", "NoExecute"] = Field(
        default="NoSchedule",
        description="Taint of an unhealthy or cordoned GPU. NoExecute evicts its pods.",
    )
    prepare_wait_s: Seconds = Field(
        default=40.0,
        ge=0,
        le=44,
        description="How long preparing a claim waits for what is missing. The kubelet's limit is 45 s.",
    )
    wake_pods: bool = Field(
        default=True,
        description="Patch pods whose claims could not be prepared: the kubelet tries again at once.",
    )
    registry_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/plugins_registry"),
        description="Directory in which the kubelet finds plugins.",
    )
    plugin_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/plugins/gpushare-agent"), description="Directory of the agent's DRA socket."
    )
    cdi_directory: GivenPath = Field(
        default=Path("/var/run/cdi"),
        description="Directory of the claims' CDI specs; the container runtime must read it.",
    )
    record_directory: GivenPath = Field(
        default=Path("/var/lib/gpushare-agent/claims"),
        description="Directory of the records of prepared claims.",
    )
