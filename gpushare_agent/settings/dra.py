"""Settings of Dynamic Resource Allocation; a section of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gpushare_agent.settings.values import GivenPath, Seconds, Section, comma_list


class DraSettings(Section):
    """The second front end: GPUs that pods get by ResourceClaims."""

    gpus: Annotated[tuple[str, ...], BeforeValidator(comma_list)] = Field(
        default=(),
        description="GPUs that are offered by ResourceClaims and by no device plugin, comma list: all, indexes, UUIDs, or"
        " the models' names as nvidia-smi has them. Empty: none, and the agent registers no DRA driver. A GPU in use changes"
        " sides when it is free.",
    )
    order: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="In which order GPUs are published: the scheduler takes the first that fits. binpack: the fullest"
        " first. spread: the emptiest first.",
    )
    taint_effect: Literal["NoSchedule", "NoExecute"] = Field(
        default="NoSchedule",
        description="Effect of the taint on an unhealthy or cordoned GPU. NoExecute: its pods are evicted too.",
    )
    prepare_wait_s: Seconds = Field(
        default=40.0,
        ge=0,
        le=44,
        description="How long a claim waits for what will come soon, seconds: after an error the kubelet tries again only"
        " after 60 to 90 s. Its own limit is 45 s.",
    )
    wake_pods: bool = Field(
        default=True,
        description="Touch the annotation gpushare-agent/claims-retry-at of pods whose claims the kubelet could not"
        " prepare, so that it tries again at once.",
    )
    registry_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/plugins_registry"),
        description="Directory in which the kubelet looks for plugins. The default is the kubelet's own.",
    )
    plugin_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/plugins/gpushare-agent"), description="Directory of the agent's own DRA socket."
    )
    cdi_directory: GivenPath = Field(
        default=Path("/var/run/cdi"),
        description="Directory of the CDI specs of claims: one that the container runtime reads.",
    )
    record_directory: GivenPath = Field(
        default=Path("/var/lib/gpushare-agent/claims"),
        description="Where prepared claims are recorded, a file each: only the agent knows how to end them.",
    )
