"""The settings tree: the settings of the node as a whole, and the sections.

The sections are in sections.py, nvidia.py and node_configuration.py. The text below a setting has the unit, the meaning of
None or empty, and the reason for the default. `Settings()` reads neither the environment nor the command line:
settings/settings.py gives it the sources for flags, variables and files. settings/reference.py makes `--help` and
docs/reference/settings.md. The flag names of gpu-manager (docs/how-to/migrate-from-gpu-manager.md) are `ALIASES` of
these names.
"""

import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gpushare_agent.core.model.isolation import DeviceListStrategy, Sharing, isolation_parts
from gpushare_agent.core.model.names import GPUSHARE_COUNT_RESOURCE
from gpushare_agent.core.settings import sections
from gpushare_agent.core.settings.node_configuration import NodeConfigurationSettings
from gpushare_agent.core.settings.nvidia import NvidiaSettings
from gpushare_agent.core.settings.values import (
    DNS_NAME,
    GivenPath,
    OptionalPath,
    OptionalPlace,
    Seconds,
    Texts,
    comma_list,
    pairs_of,
)

ENVIRONMENT_PREFIX = "GPUSHARE_"
_DEFAULTS: Any = {}
"""The default of a section. pydantic makes the section from it with the tree's validator: sections that are made here would
each need a validator of their own at the start (a third of the time that the tree takes)."""
SOURCES = "_sources"
"""The argument of `Settings` with the sources to merge, the first of them winning."""
ALIASES = {
    "hostname-override": "node_name",
    "sample-period": "sample_period_s",
    "gpus": "simulated.gpus",
    "gpu-memory-mib": "simulated.gpu_memory_mib",
    "topology": "simulated.topology",
    "device-plugin-path": "kubelet.device_plugin_path",
    "allocation-check-period": "allocation.check_period_s",
    "virtual-manager-path": "virtual_manager.path",
    "container-runtime-endpoint": "runtime.endpoint",
    "runtime-request-timeout": "runtime.request_timeout_s",
    "cgroup-driver": "runtime.cgroup_driver",
    "mps-pipe": "mps.pipe_directory",
    "query-addr": "web.addr",
    "query-port": "web.port",
}
"""Flag name -> dotted key, in addition to the flag that every key has: gpu-manager's and GPUShare's names, and short
ones."""


class Settings(BaseSettings):
    """The root of the tree: what concerns the node as a whole, and one section per concern."""

    model_config = SettingsConfigDict(frozen=True, defer_build=True)

    config: OptionalPath = None
    """YAML file with settings."""
    node_name: str = ""
    """Name of this node in the API server. Empty: the variable NODE_NAME, else the host's name."""
    node_labels: Annotated[dict[str, str], BeforeValidator(pairs_of)] = Field(default_factory=dict)
    """Further labels for the node."""
    root: GivenPath = Path("/")
    """Root of the node's directories that no setting names, such as ROOT/etc/gpu-manager/vm."""
    driver: Annotated[Literal["nvml", "simulated"], BeforeValidator(lambda v: "nvml" if v == "nvidia" else v)] = "nvml"
    """NVML (also named nvidia), or simulated GPUs."""
    isolation: sections.NodeIsolation = "gpushare"
    """What limits a share (docs/explanation/isolation.md). auto: the agent chooses at its start."""
    isolations_allowed: Annotated[tuple[sections.AllowedIsolation, ...], BeforeValidator(comma_list)] = ()
    """Isolations that a pod may choose by the annotation tencent.com/gpu-isolation."""
    device_list_strategy: Annotated[tuple[DeviceListStrategy, ...], BeforeValidator(comma_list)] = Field(
        default=(DeviceListStrategy.ENVVAR, DeviceListStrategy.DEVICE_NODES), min_length=1
    )
    """How containers get their GPUs (docs/reference/device-lists.md)."""
    excluded_gpus: Texts = ()
    """GPUs that are not offered: indexes, UUIDs, models or patterns such as *T400*."""
    fail_on_init_error: bool = True
    """Exit when the driver cannot be read at start. false: try again every 30 s."""
    share_mode: bool = True
    """Allow shares. false: whole GPUs only."""
    extra_config: OptionalPath = None
    """JSON file with device nodes for every container: {"default": {"devices": ["/dev/..."]}}."""
    volume_config: OptionalPath = None
    """gpu-manager's volume.conf (docs/how-to/driver-volume.md), for isolation vcuda. Empty:
    /etc/gpu-manager/volume.conf."""
    kubeconfig: OptionalPath = None
    """Kubeconfig. Empty: the pod's service account, else the user's default file."""
    context: str = ""
    """Context of the kubeconfig, for the commands that show nodes. Empty: its current one."""
    state_directory: OptionalPlace = Path("/var/lib/gpushare-agent")
    """Keeps cordons, pending resets, resized shares, claims and a day of use over a restart. Empty: nothing is kept, and no
    claims."""
    sample_period_s: Seconds = Field(default=1.0, ge=0.05, le=3600)
    """Period of sampling the use of GPUs."""
    node_configuration: NodeConfigurationSettings = _DEFAULTS
    simulated: sections.SimulatedSettings = _DEFAULTS
    resources: sections.ResourceSettings = _DEFAULTS
    kubelet: sections.KubeletSettings = _DEFAULTS
    placement: sections.PlacementSettings = _DEFAULTS
    allocation: sections.AllocationSettings = _DEFAULTS
    resize: sections.ResizeSettings = _DEFAULTS
    virtual_manager: sections.VirtualManagerSettings = _DEFAULTS
    driver_volume: sections.DriverVolumeSettings = _DEFAULTS
    mps: sections.MpsSettings = _DEFAULTS
    libgpushare: sections.LibgpushareSettings = _DEFAULTS
    driver_limits: sections.DriverLimitsSettings = _DEFAULTS
    cdi: sections.CdiSettings = _DEFAULTS
    gpushare: sections.GpushareSettings = _DEFAULTS
    nvidia: NvidiaSettings = _DEFAULTS
    dra: sections.DraSettings = _DEFAULTS
    mig: sections.MigSettings = _DEFAULTS
    runtime: sections.RuntimeSettings = _DEFAULTS
    web: sections.WebSettings = _DEFAULTS
    health: sections.HealthSettings = _DEFAULTS
    usage: sections.UsageSettings = _DEFAULTS
    facts: sections.FactsSettings = _DEFAULTS
    control: sections.ControlSettings = _DEFAULTS
    display: sections.DisplaySettings = _DEFAULTS
    extender: sections.ExtenderSettings = _DEFAULTS
    log: sections.LogSettings = _DEFAULTS

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: Any, **built_in: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources in the argument `SOURCES`; without it the arguments alone: `Settings()` reads no environment."""
        arguments = built_in["init_settings"]
        return tuple(arguments.init_kwargs.get(SOURCES, (arguments,)))

    @property
    def isolations_in_use(self) -> frozenset[str]:
        """The node's own isolation, those that pods may choose, and MPS where it limits replicas of GPUs."""
        # Replicas under MPS need its daemon on nodes whose own isolation is another.
        by_mps = self.nvidia.enabled and self.nvidia.replicas and self.nvidia.sharing is Sharing.MPS
        return frozenset({self.isolation, *self.isolations_allowed, *([Sharing.MPS.isolation] if by_mps else [])})

    @property
    def host_directory(self) -> Path:
        """The one of the containers' files, the driver's volumes and gpu-manager's checkpoint: /etc/gpu-manager."""
        return self.virtual_manager.path.parent

    @property
    def claim_directory(self) -> Path | None:
        """The directory of the records of prepared claims."""
        return self.state_directory and self.state_directory / "claims"

    @property
    def has_claims(self) -> bool:
        """Pods can get GPUs of this node by ResourceClaims."""
        return bool(self.dra.gpus or self.mig.on_demand)

    @property
    def isolation_parts_in_use(self) -> frozenset[str]:
        """The same, with the parts instead of combinations."""
        return frozenset(part for name in self.isolations_in_use for part in isolation_parts(name))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = {self.resources.vcore, self.resources.vmemory, self.gpushare.resource, GPUSHARE_COUNT_RESOURCE}
        if len(names) < 4:
            raise ValueError("the names of gpushare and of resources must all differ")
        if not (self.resources.enabled or self.gpushare.enabled or self.nvidia.enabled or self.has_claims):
            raise ValueError(
                "resources.enabled is false, and nothing else is offered: set gpushare.enabled, nvidia.enabled, dra.gpus or"
                " mig.on_demand"
            )
        if self.has_claims and self.state_directory is None:
            raise ValueError("dra.gpus and mig.on_demand need state_directory, which keeps the claims over a restart")
        if self.nvidia.enabled and (taken := sorted(names.intersection(self.nvidia.resource_names))):
            raise ValueError(f"nvidia and another section both have the resource {taken[0]}")
        # One replica of a GPU is the whole GPU, which share_mode=false allows.
        if self.nvidia.enabled and not self.share_mode and any(count > 1 for _, count in self.nvidia.replica_counts):
            raise ValueError("nvidia.replicas lets containers share GPUs, which share_mode=false forbids")
        return self

    @field_validator("node_name")
    @classmethod
    def _name_this_node(cls, value: str) -> str:
        if not value:
            # The kubelet writes its Node's name in lower case, whatever the host is called.
            return socket.gethostname().lower()
        if not DNS_NAME.fullmatch(value):
            raise ValueError("is no node name (small letters, digits, - and .)")
        return value
