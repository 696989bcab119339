"""The settings tree: every setting's name, type, bounds, default and description.

What it is not: the reading of flags, variables and files is settings/sources.py, the text of `--help` and docs/settings.md
is settings/reference.py. A description tells the unit, what None or empty means, and why this default. `Settings()`
reads neither the environment nor the command line, so that a test or an embedding program gets what it asks for.
The flag names of gpu-manager (docs/formats.md, section 1) are `ALIASES` of these names.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gpushare_agent.model.isolation import DeviceListStrategy, IsolationName
from gpushare_agent.model.names import MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.settings.extender import ExtenderSettings
from gpushare_agent.settings.isolation import CdiSettings, GpushareSettings, HamiCoreSettings, MpsSettings
from gpushare_agent.settings.observation import (
    ControlSettings,
    DebugSettings,
    DecisionSettings,
    DisplaySettings,
    FactsSettings,
    HealthSettings,
    UsageSettings,
)
from gpushare_agent.settings.values import Count, GivenPath, OptionalPath, Seconds, comma_list, pairs_of, resource_name

ALIASES = {
    "hostname-override": "node_name",
    "sample-period": "sample_period_s",
    "wait-timeout": "wait_timeout_s",
    "cards": "simulated.cards",
    "card-memory-mib": "simulated.card_memory_mib",
    "topology": "simulated.topology",
    "device-plugin-path": "kubelet.device_plugin_path",
    "allocation-check-period": "allocation.check_period_s",
    "checkpoint-path": "allocation.checkpoint_path",
    "virtual-manager-path": "virtual_manager.path",
    "container-runtime-endpoint": "runtime.endpoint",
    "runtime-request-timeout": "runtime.request_timeout_s",
    "cgroup-driver": "runtime.cgroup_driver",
    "mps-pipe": "mps.pipe_directory",
    "query-addr": "web.addr",
    "query-port": "web.port",
}
"""Flag name -> dotted key, beside the flag that every key has: gpu-manager's and GPUShare's names, and short ones."""

_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class SimulatedSettings(_Section):
    """GPUs without hardware (driver simulated)."""

    cards: Count = Field(
        default=8, ge=1, le=64, description="GPUs to simulate. A topology file overrules it with its rows."
    )
    card_memory_mib: Annotated[tuple[Annotated[Count, Field(ge=1, le=4_194_304)], ...], BeforeValidator(comma_list)] = (
        Field(
            default=(24576,),
            min_length=1,
            max_length=64,
            description="Memory of the GPUs, MiB: one value for all, or a comma list with one for each GPU.",
        )
    )
    topology: OptionalPath = Field(
        default=None,
        description="File with the text of `nvidia-smi topo -m`. Empty: a plain layout of the simulation's own.",
    )
    card_name: str = Field(
        default="NVIDIA Simulated 24GB",
        min_length=1,
        max_length=96,
        description="The GPUs' product name, as NVML would say it.",
    )
    device_nodes: bool = Field(
        default=False,
        description="Give containers the device nodes /dev/nvidia0… of simulated GPUs. A real runtime cannot start a"
        " container whose device nodes do not exist, so only the embedded node wants this.",
    )
    faults: OptionalPath = Field(
        default=None,
        description="JSON file that makes simulated GPUs fail while it exists, to rehearse it:"
        ' {"lost": {"0": "reason"}} or {"all_lost": "reason"}. Empty: none.',
    )
    usage: OptionalPath = Field(
        default=None,
        description="JSON file that tells what processes use of simulated GPUs (docs/sandbox.md). Empty: they idle.",
    )


class ResourceSettings(_Section):
    """The extended resources that the node offers."""

    vcore: str = Field(
        default=VCORE_RESOURCE,
        description="Resource whose unit is 1/100 of a GPU's compute. The default is gpu-manager's, for its manifests.",
    )
    vmemory: str = Field(
        default=VMEMORY_RESOURCE,
        description="Resource whose unit is one memory block. The default is gpu-manager's, for its manifests.",
    )
    memory_block_mib: Count = Field(
        default=MEMORY_BLOCK_MIB,
        ge=1,
        le=65536,
        description="Size of one memory block, MiB. Smaller blocks mean more device IDs: the kubelet takes 4 MiB of them.",
    )

    @field_validator("vcore", "vmemory")
    @classmethod
    def _is_resource_name(cls, value: str) -> str:
        return resource_name(value)

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.vcore == self.vmemory:
            raise ValueError(f"vcore and vmemory are both {self.vcore!r}, but must be two resources")
        return self


class KubeletSettings(_Section):
    """Where the kubelet is and how it is asked."""

    device_plugin_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/device-plugins"),
        description="Directory of kubelet.sock and of the agent's own sockets. The default is the kubelet's own.",
    )
    pod_resources_socket: GivenPath = Field(
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="Socket of the PodResources API, which tells whom an Allocate is for. The default is the kubelet's own.",
    )
    allow_unsupported: bool = Field(
        default=False,
        description="Run with kubelets older than 1.30, whose PodResources cannot be asked during an admission."
        " Pods are then identified by the API server's list alone and refused where two would fit.",
    )
    pod_lookup_timeout_s: Seconds = Field(
        default=2.0,
        ge=0.1,
        le=10,
        description="How long an admission may take to find its pod, seconds. The whole node waits meanwhile.",
    )
    look_again_s: Seconds = Field(
        default=0.4,
        ge=0,
        le=5,
        description="How long to look again where two pods remain possible, seconds, before the call is refused.",
    )


class PlacementSettings(_Section):
    """Which GPU a container gets."""

    share_policy: Literal["binpack", "spread"] = Field(
        default="binpack",
        description="Shares go to the fullest GPU that fits (binpack: whole GPUs stay free) or the emptiest (spread).",
    )


class AllocationSettings(_Section):
    """What the agent remembers and frees."""

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


class VirtualManagerSettings(_Section):
    """The directories that sharing containers get mounted."""

    path: GivenPath = Field(
        default=Path("/etc/gpu-manager/vm"),
        description="Directory with one directory per pod and container, as gpu-manager keeps it. Used with"
        " isolation vcuda.",
    )


class DriverVolumeSettings(_Section):
    """The driver's libraries and programs that containers get mounted (command driver-volume)."""

    root: GivenPath = Field(
        default=Path("/"),
        description="Where the host's file system is. In a pod the place of its mount, such as /host; with the driver in a"
        " container of its own, that container's root, such as /run/nvidia/driver.",
    )
    control_library: GivenPath = Field(
        default=Path("/usr/lib64/libcuda-control.so"),
        description="The library that limits shares (vcuda-control), as this process sees it, not below root. The default is"
        " its place in gpu-manager's image.",
    )


class RuntimeSettings(_Section):
    """The container runtime and its cgroups."""

    endpoint: str = Field(
        default="",
        description="Socket of the container runtime (CRI), with or without unix://. Empty: the first known one."
        " Used with isolation vcuda, to learn container IDs; where none answers they come from the pods' statuses.",
    )
    request_timeout_s: Seconds = Field(
        default=5.0,
        ge=0.1,
        le=120,
        description="Limit of one question to the runtime, seconds. Used with isolation vcuda.",
    )
    cgroup_driver: Literal["", "cgroupfs", "systemd"] = Field(
        default="",
        description="Never needed: it is seen from the paths themselves. If given, it is compared with them at the start,"
        " and a disagreement is logged.",
    )
    cgroup_root: GivenPath = Field(default=Path("/sys/fs/cgroup"), description="Where the host's cgroups are mounted.")
    proc_root: GivenPath = Field(
        default=Path("/proc"),
        description="The /proc that shows the host's processes: the pod's own where it has the host's PID namespace.",
    )


class WebSettings(_Section):
    """The HTTP endpoints: metrics, health, readiness."""

    addr: str = Field(
        default="localhost",
        min_length=1,
        max_length=253,
        description="Address to listen on. localhost serves this host only; 0.0.0.0 lets Prometheus and probes in.",
    )
    port: Count = Field(default=5678, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")


class LogSettings(_Section):
    """What is logged, always to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="One JSON object a line, or text for people. auto: text on a terminal, JSON elsewhere.",
    )


class Settings(BaseSettings):
    """The root of the tree: what concerns the node as a whole, and one section per concern."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True, case_sensitive=True)

    config: OptionalPath = Field(
        default=None, description="YAML file with settings, nested as in docs/settings.md. Empty: no file."
    )
    node_name: str = Field(
        default="",
        description="Name of this node in the API server. Empty: the variable NODE_NAME, else the host's name.",
    )
    node_labels: Annotated[dict[str, str], BeforeValidator(pairs_of)] = Field(
        default_factory=dict, description="Further labels for the node, k=v,k=v. Empty: none."
    )
    driver: Annotated[Literal["nvml", "simulated"], BeforeValidator(lambda v: "nvml" if v == "nvidia" else v)] = Field(
        default="nvml",
        description="Where GPUs come from: NVML (also called nvidia), or simulated for nodes without any.",
    )
    isolation: IsolationName = Field(
        default=IsolationName.VCUDA,
        description="What keeps a container to its share (docs/isolation.md). vcuda: TKEStack's library in the driver"
        " directory, which reads its limits from /etc/vcuda. mps: NVIDIA MPS. hami-core: HAMi-core's library. none: nothing,"
        " containers see their GPUs and are trusted.",
    )
    isolations_allowed: Annotated[tuple[IsolationName, ...], BeforeValidator(comma_list)] = Field(
        default=(),
        description="Further isolations that a pod may choose with the annotation tencent.com/gpu-isolation, comma list."
        " Empty: none but the node's own.",
    )
    device_list_strategy: Annotated[tuple[DeviceListStrategy, ...], BeforeValidator(comma_list)] = Field(
        default=(DeviceListStrategy.ENVVAR, DeviceListStrategy.DEVICE_NODES),
        min_length=1,
        description="How containers get their GPUs' devices, comma list (docs/device-lists.md): envvar, volume-mounts,"
        " device-nodes, cdi-annotations, cdi-cri.",
    )
    fail_on_init_error: bool = Field(
        default=True,
        description="Exit when the driver cannot be read at start. false: stay, offer no device, look again every 30 s.",
    )
    share_mode: bool = Field(
        default=True, description="Allow several containers on one GPU. false: only whole GPUs are given."
    )
    extra_config: OptionalPath = Field(
        default=None,
        description='JSON file with device nodes for every container, {"default": {"devices": ["/dev/..."]}}. Empty: none.',
    )
    volume_config: OptionalPath = Field(
        default=None,
        description="gpu-manager's volume.conf, the driver files to collect (docs/driver-volume.md). Empty: its place there,"
        " /etc/gpu-manager/volume.conf. Used by `driver-volume`, and with isolation vcuda, which"
        " then mounts the driver directory into containers.",
    )
    kubeconfig: OptionalPath = Field(
        default=None,
        description="Kubeconfig for the API server. Empty: the pod's service account, else the user's default file.",
    )
    sample_period_s: Seconds = Field(default=1.0, ge=0.05, le=3600, description="How often usage is sampled, seconds.")
    wait_timeout_s: Seconds = Field(
        default=60.0,
        ge=0.05,
        le=3600,
        description="Accepted for gpu-manager's manifests and not used: the agent waits as long as it takes.",
    )
    simulated: SimulatedSettings = SimulatedSettings()
    resources: ResourceSettings = ResourceSettings()
    kubelet: KubeletSettings = KubeletSettings()
    placement: PlacementSettings = PlacementSettings()
    allocation: AllocationSettings = AllocationSettings()
    virtual_manager: VirtualManagerSettings = VirtualManagerSettings()
    driver_volume: DriverVolumeSettings = DriverVolumeSettings()
    mps: MpsSettings = MpsSettings()
    hami_core: HamiCoreSettings = HamiCoreSettings()
    cdi: CdiSettings = CdiSettings()
    gpushare: GpushareSettings = GpushareSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    web: WebSettings = WebSettings()
    health: HealthSettings = HealthSettings()
    usage: UsageSettings = UsageSettings()
    decisions: DecisionSettings = DecisionSettings()
    facts: FactsSettings = FactsSettings()
    control: ControlSettings = ControlSettings()
    display: DisplaySettings = DisplaySettings()
    debug: DebugSettings = DebugSettings()
    extender: ExtenderSettings = ExtenderSettings()
    log: LogSettings = LogSettings()

    @property
    def isolations_in_use(self) -> frozenset[IsolationName]:
        """The node's own, and those that pods may choose."""
        return frozenset({self.isolation, *self.isolations_allowed})

    @model_validator(mode="after")
    def _resources_differ(self) -> Self:
        shared, count = self.gpushare.resource, self.gpushare.count_resource
        if len({self.resources.vcore, self.resources.vmemory, shared, count}) < 4:
            raise ValueError("the names of gpushare and of resources must all differ")
        return self

    @field_validator("node_name")
    @classmethod
    def _name_this_node(cls, value: str) -> str:
        if not value:
            return socket.gethostname().lower()
        if not _NODE_NAME.fullmatch(value):
            raise ValueError("is no node name (small letters, digits, - and .)")
        return value

    @field_validator("simulated")
    @classmethod
    def _one_memory_per_gpu(cls, value: SimulatedSettings) -> SimulatedSettings:
        given = len(value.card_memory_mib)
        if value.topology is None and given not in (1, value.cards):
            raise ValueError(
                f"card_memory_mib has {given} values for {value.cards} GPUs; give one, or one for each GPU"
            )
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller gives: load_settings passes the other sources itself, to know which key came from where."""
        return (init_settings,)
