"""Settings of what the node offers and how it is allocated; sections of settings/tree.py.

The extended resources (gpu-manager's and GPUShare's), the kubelet, the container runtime and the cgroups on the node, the
placement and the stored allocations, Dynamic Resource Allocation, and GPUs that are simulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpushare_agent.model.isolation import ResizeMode
from gpushare_agent.model.names import MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.settings.values import (
    Count,
    GivenPath,
    OptionalPath,
    ResourceName,
    Seconds,
    Section,
    Texts,
    comma_list,
)


class ResourceSettings(Section):
    """The extended resources that the node offers."""

    enabled: bool = Field(
        default=True,
        description="Offer vcore and vmemory. false: for nodes that serve NVIDIA's names, GPUShare's or claims alone.",
    )
    vcore: ResourceName = Field(
        default=VCORE_RESOURCE,
        description="Resource with the unit 1/100 of a GPU's compute.",
    )
    vmemory: ResourceName = Field(
        default=VMEMORY_RESOURCE,
        description="Resource with the unit one memory block.",
    )
    memory_block_mib: Count = Field(
        default=MEMORY_BLOCK_MIB,
        ge=1,
        le=65536,
        description="Size of one memory block, MiB. Smaller blocks make more device IDs (docs/reference/formats.md).",
    )

    @model_validator(mode="after")
    def _differ(self) -> Self:
        # The kubelet knows a plugin by its resource: the second registration would end the first one's stream.
        if self.vcore == self.vmemory:
            raise ValueError(f"vcore and vmemory are both {self.vcore!r}, but must be two resources")
        return self


class GpushareSettings(Section):
    """GPUShare's resource, memory alone, beside vcore and vmemory."""

    enabled: bool = Field(default=False, description="Offer GPUShare's resource on this node.")
    resource: ResourceName = Field(
        default="aliyun.com/gpu-mem", description="Resource with the unit one unit of a GPU's memory."
    )
    count_resource: ResourceName = Field(
        default="aliyun.com/gpu-count",
        description="Capacity of the node with its number of GPUs.",
    )
    unit: Literal["GiB", "MiB"] = Field(
        default="GiB", description="Size of one unit. MiB makes one device ID for each MiB."
    )


class KubeletSettings(Section):
    """The kubelet's sockets and its HTTPS port, and the time limits of admissions."""

    device_plugin_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/device-plugins"),
        description="Directory of kubelet.sock and of the agent's sockets.",
    )
    pod_resources_socket: OptionalPath = Field(
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="Socket of the PodResources API. Empty: pods are identified by the API server alone, and refused where"
        " two that wait ask for the same.",
    )
    api_address: str = Field(
        default="",
        description="Address of the kubelet's HTTPS port, from which static pods are read (docs/how-to/static-pods.md). "
        "Empty: static pods with a share are refused.",
    )
    api_port: int = Field(default=10250, ge=1, le=65535, description="The kubelet's HTTPS port.")
    api_ca: GivenPath | None = Field(
        default=None,
        description="CA of the kubelet's serving certificate, a file. Empty: the service account's ca.crt.",
    )
    pod_lookup_timeout_s: Seconds = Field(
        default=2.0,
        ge=0.1,
        le=10,
        description="How long an admission may take to identify its pod.",
    )
    look_again_s: Seconds = Field(
        default=0.4,
        ge=0,
        le=5,
        description="How long the lookup is repeated while two pods are possible.",
    )


class RuntimeSettings(Section):
    """The container runtime and its cgroups."""

    endpoint: str = Field(
        default="",
        description="Socket of the container runtime, for container IDs (isolation vcuda). Empty: the first known one.",
    )
    request_timeout_s: Seconds = Field(
        default=5.0,
        ge=0.1,
        le=120,
        description="Time limit of one request to the runtime (isolation vcuda).",
    )
    cgroup_driver: Literal["", "cgroupfs", "systemd"] = Field(
        default="",
        description="Compared with the cgroup paths at the start; a difference is logged. Empty: not compared.",
    )
    cgroup_root: GivenPath = Field(default=Path("/sys/fs/cgroup"), description="Mount point of the host's cgroups.")
    proc_root: GivenPath = Field(
        default=Path("/proc"),
        description="A /proc that shows the host's processes.",
    )


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


class DraSettings(Section):
    """Dynamic Resource Allocation: GPUs that pods get by ResourceClaims."""

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
    nvidia_names: bool = Field(
        default=False,
        description="Serve claims written for NVIDIA's DRA driver: its attributes and its GpuConfig; cores default to 0.",
    )
    consumable_shares: str = Field(
        default="memory",
        pattern="memory|unlimited|[1-9][0-9]{0,2}",
        description="What a claim takes that names no memory, as by that option of NVIDIA's driver; memory: all of it. "
        "unlimited: nothing; a number: one of so many shares of a GPU; both without limits, and with nvidia_names alone.",
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

    @model_validator(mode="after")
    def _has_shares_by_nvidias_names(self) -> Self:
        # Without them a claim that names nothing takes all cores: there would be nothing to share.
        if self.consumable_shares != "memory" and not self.nvidia_names:
            raise ValueError(f"consumable_shares is {self.consumable_shares}, which needs nvidia_names")
        return self


class SimulatedSettings(Section):
    """GPUs without hardware (driver simulated)."""

    cards: Count = Field(default=8, ge=1, le=64, description="GPUs to simulate. With a topology file its rows count.")
    card_memory_mib: Annotated[tuple[Annotated[Count, Field(ge=1, le=4_194_304)], ...], BeforeValidator(comma_list)] = (
        Field(
            default=(24576,),
            min_length=1,
            max_length=64,
            description="Memory of the GPUs, MiB: one value for all, or one for each GPU.",
        )
    )
    topology: OptionalPath = Field(
        default=None,
        description="File with the text of `nvidia-smi topo -m`. Empty: a plain layout.",
    )
    card_name: str = Field(
        default="",
        max_length=96,
        description="The GPUs' product name. Empty: by the memory of each, such as NVIDIA Simulated 24GB.",
    )
    device_nodes: bool = Field(
        default=False,
        description="Give containers /dev/nvidia0… of simulated GPUs: a real runtime needs nodes that exist.",
    )
    faults: OptionalPath = Field(
        default=None,
        description="JSON file that makes simulated GPUs fail (docs/reference/sandbox.md). Empty: none.",
    )
    usage: OptionalPath = Field(
        default=None,
        description="JSON file with the use of simulated GPUs by processes (docs/reference/sandbox.md). Empty: they idle.",
    )

    @model_validator(mode="after")
    def _has_one_memory_per_gpu(self) -> Self:
        sizes = len(self.card_memory_mib)
        # With a topology file only the file knows how many GPUs there are.
        if self.topology is None and sizes not in (1, self.cards):
            raise ValueError(f"card_memory_mib has {sizes} values for {self.cards} GPUs; give one, or one for each GPU")
        return self
