"""The sections of settings/tree.py: what the node offers and how it is allocated, its isolations, what watches and shows it,
and the scheduler extender. One list, in the order of the tree; that of NVIDIA's names, which has readers of its own, is
settings/nvidia.py.

The isolations' sections are here and not in their packages, which are above the settings: pydantic needs every section when
it makes the class of the tree. A section that the tree found in a package would be an import that runs back up, unseen by
import-linter, and a field without a type: `settings.mps.pipe_directory` would be Any to mypy.

The extender shares the resources' names and share_policy with the agents: resources.*, gpushare.* and
placement.share_policy. Its defaults of address, quota and labels are gpu-admission's.

Modules with sections have no `from __future__ import annotations`: pydantic would compile each field's type at each start.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpushare_agent.core.model.isolation import AUTO, KIND, ResizeMode
from gpushare_agent.core.model.names import GPU_MODEL_LABEL, MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.settings.isolation_names import isolation_names
from gpushare_agent.core.settings.values import (
    DNS_NAME,
    PLACE,
    Count,
    GivenPath,
    GivenPlace,
    OneOf,
    OptionalPath,
    OptionalPlace,
    ResourceName,
    Seconds,
    Section,
    Texts,
    comma_list,
    matches,
)


class ResourceSettings(Section):
    """Extended resources."""

    enabled: bool = True
    """Offer vcore and vmemory. false: for nodes with NVIDIA's names, GPUShare's or claims alone."""
    vcore: ResourceName = VCORE_RESOURCE
    """Resource for 1/100 of a GPU's compute."""
    vmemory: ResourceName = VMEMORY_RESOURCE
    """Resource for one memory block."""
    memory_block_mib: Count = Field(default=MEMORY_BLOCK_MIB, ge=1, le=65536)
    """Size of a memory block, MiB. Smaller blocks make more device IDs (docs/reference/formats.md)."""
    unified_memory_mib: Count = Field(default=0, ge=0, le=4_194_304)
    """Memory to share of a GPU that uses the host's and whose driver names no size (GB10), MiB. Have the kubelet
    reserve as much (systemReserved). 0: such a GPU is given whole or in replicas."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        # The kubelet knows a plugin by its resource: the second registration would end the first one's stream.
        if self.vcore == self.vmemory:
            raise ValueError(f"vcore and vmemory are both {self.vcore!r}, but must be two resources")
        return self


class GpushareSettings(Section):
    """GPUShare's resource: memory alone."""

    enabled: bool = False
    """Offer it on this node."""
    resource: ResourceName = "aliyun.com/gpu-mem"
    """Resource for one unit of a GPU's memory."""
    unit: Literal["GiB", "MiB"] = "GiB"
    """Size of one unit. MiB makes one device ID for each MiB."""


class KubeletSettings(Section):
    """The kubelet."""

    root_dir: GivenPlace = Path("/var/lib/kubelet")
    """The kubelet's --root-dir; its device plugins are below /var/lib/kubelet all the same."""
    device_plugin_path: GivenPlace = Path("/var/lib/kubelet/device-plugins")
    """Directory of kubelet.sock and of the agent's sockets."""
    pod_resources_socket: OptionalPlace = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Socket of the PodResources API. Empty: pods are identified by the API server alone, and refused where two that
    wait ask for the same."""
    api_address: str = ""
    """Address of the kubelet's HTTPS port, for static pods (docs/how-to/static-pods.md). Empty: static pods with a
    share are refused."""
    api_port: int = Field(default=10250, ge=1, le=65535)
    """Port of that address."""
    api_ca: GivenPath | None = None
    """File with the CA of the kubelet's serving certificate. Empty: the service account's ca.crt."""
    pod_lookup_timeout_s: Seconds = Field(default=2.0, ge=0.1, le=10)
    """How long an admission may take to identify its pod."""


_HandlerPattern = Annotated[
    str, matches(re.compile(r"[a-z0-9*-]{1,63}"), "is no handler of a RuntimeClass such as kata-*")
]
_SANDBOXED = ("gvisor", "gvisor-*", "kata", "kata-*", "runsc", "runsc-*")


class RuntimeSettings(Section):
    """The container runtime and its cgroups."""

    endpoint: str = ""
    """Its socket, for container IDs (isolation vcuda). Empty: the first known one."""
    request_timeout_s: Seconds = Field(default=5.0, ge=0.1, le=120)
    """Time limit of a request to it."""
    sandboxed_handlers: Annotated[tuple[_HandlerPattern, ...], BeforeValidator(comma_list)] = _SANDBOXED
    """Handlers of RuntimeClasses that run containers in a sandbox, * for any text: their pods get whole GPUs, and no
    share that an isolation has to limit."""
    cgroup_driver: Literal["", "cgroupfs", "systemd"] = ""
    """Compared with the cgroup paths at the start; a difference is logged. Empty: not compared."""
    cgroup_root: GivenPath = Path("/sys/fs/cgroup")
    """Mount point of the host's cgroups."""
    proc_root: GivenPath = Path("/proc")
    """A /proc that shows the host's processes."""


class PlacementSettings(Section):
    """Which GPU a container gets."""

    share_policy: Literal["binpack", "spread"] = "binpack"
    """binpack: shares go to the fullest GPU that fits. spread: to the emptiest."""


class AllocationSettings(Section):
    """How allocations are checked and freed."""

    check_period_s: Seconds = Field(default=30.0, ge=0.05, le=3600)
    """Period of comparing allocations with the kubelet's list."""
    cleanup_rejected_pods: bool = True
    """Delete pods rejected at admission that a controller replaces."""


class ResizeSettings(Section):
    """Live resize (docs/explanation/resize.md)."""

    mode: ResizeMode = ResizeMode.DISABLED
    """disabled: shares keep what was allocated. within-request: at most their request. free-capacity: also what is free
    on their GPU; needs manifests/resize."""


_Shares = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # as YAML reads `4`
    matches(re.compile("memory|unlimited|[1-9][0-9]{0,2}"), "is no memory, unlimited, or a number from 1 to 999"),
]


class DraSettings(Section):
    """GPUs by ResourceClaims (Dynamic Resource Allocation)."""

    gpus: Texts = ()
    """GPUs offered by ResourceClaims and by no device plugin: all, indexes, UUIDs or models."""
    order: Literal["binpack", "spread"] = "binpack"
    """The scheduler takes the first GPU that fits. binpack: the fullest is first. spread: the emptiest."""
    taint_effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"
    """Taint of an unhealthy or cordoned GPU. NoExecute evicts its pods."""
    nvidia_names: bool = False
    """Serve claims written for NVIDIA's DRA driver: its attributes and GpuConfig; cores default to 0."""
    consumable_shares: _Shares = "memory"
    """Size of a claim that names no memory, as by that option of NVIDIA's driver. memory: all of it. With nvidia_names
    also unlimited: nothing; a number: one of so many shares; both without limits."""

    @model_validator(mode="after")
    def _has_shares_by_nvidias_names(self) -> Self:
        # Without them a claim that names nothing takes all cores: there would be nothing to share.
        if self.consumable_shares != "memory" and not self.nvidia_names:
            raise ValueError(f"consumable_shares is {self.consumable_shares}, which needs nvidia_names")
        return self


class MigSettings(Section):
    """MIG instances that are made for ResourceClaims."""

    on_demand: Texts = ()
    """The GPUs in MIG mode for it: all, indexes, UUIDs or models."""
    idle_s: Seconds = Field(default=600.0, ge=0, le=31_536_000)
    """How long an instance is kept that no claim has any more."""


_MOST_SIMULATED = 64


class SimulatedSettings(Section):
    """GPUs without hardware (driver simulated)."""

    gpus: Count = Field(default=8, ge=1, le=_MOST_SIMULATED)
    """Number of GPUs, unless a topology file or several memories say it."""
    gpu_memory_mib: Annotated[tuple[Annotated[Count, Field(ge=1, le=4_194_304)], ...], BeforeValidator(comma_list)] = (
        Field(default=(24576,), min_length=1, max_length=_MOST_SIMULATED)
    )
    """Memory, MiB: one value, or one for each GPU."""
    topology: OptionalPath = None
    """File with the text of `nvidia-smi topo -m`. Empty: a plain layout."""
    gpu_name: str = Field(default="", max_length=96)
    """Product name. Empty: by the memory, such as NVIDIA Simulated 24GB."""
    device_nodes: bool = False
    """Give containers /dev/nvidia0…: a real runtime needs nodes that exist."""
    faults: OptionalPath = None
    """JSON file that makes GPUs fail (docs/reference/sandbox.md)."""
    usage: OptionalPath = None
    """JSON file with the use by processes (docs/reference/sandbox.md). Empty: GPUs idle."""

    @model_validator(mode="before")
    @classmethod
    def _count_memories(cls, given: Any) -> Any:
        sizes: Any = comma_list(given.get("gpu_memory_mib")) if isinstance(given, dict) and "gpus" not in given else ()
        several = isinstance(sizes, list | tuple) and 1 < len(sizes) <= _MOST_SIMULATED and not given.get("topology")
        return {**given, "gpus": len(sizes)} if several else given

    @model_validator(mode="after")
    def _has_one_memory_per_gpu(self) -> Self:
        sizes = len(self.gpu_memory_mib)
        # With a topology file only the file knows how many GPUs there are.
        if self.topology is None and sizes not in (1, self.gpus):
            raise ValueError(f"gpu_memory_mib has {sizes} values for {self.gpus} GPUs; give one, or one for each GPU")
        return self


AllowedIsolation = Annotated[str, OneOf(isolation_names)]
NodeIsolation = Annotated[str, OneOf(lambda: (*isolation_names(), AUTO))]


class VirtualManagerSettings(Section):
    """The vDevice directories of containers (isolations gpushare and vcuda)."""

    path: GivenPlace = Path("/etc/gpu-manager/vm")
    """The directory that they are in."""


class DriverVolumeSettings(Section):
    """The driver's files for containers (command driver-volume)."""

    root: GivenPath = Path("/")
    """Root of the host as this process sees it, such as /host."""
    control_library: GivenPath = Path("/usr/lib64/libcuda-control.so")
    """vcuda's library, as this process sees it."""
    gpu_client: GivenPath = Path("/opt/gpushare-agent/bin/gpu-client")
    """The program gpu-client, as this process sees it."""
    mount: bool = False
    """Mount volume origin under other isolations than vcuda, too: for nodes without NVIDIA's container runtime."""


class MpsSettings(Section):
    """NVIDIA MPS (isolation mps, command mps)."""

    pipe_directory: GivenPlace = Path("/run/gpushare-mps/pipe")
    """CUDA_MPS_PIPE_DIRECTORY of the daemon on the host, the same in containers; its logs are in `log` next to it."""
    shm_directory: GivenPath = Path("/dev/shm")  # noqa: S108 - the shared memory itself, which MPS needs, not a temporary file
    """The daemon's /dev/shm on the host."""
    control: GivenPath = Path("nvidia-cuda-mps-control")
    """The control program: a path, or a name in PATH."""
    probe_period_s: Seconds = Field(default=5.0, ge=0.1, le=3600)
    """Period of probing the daemon."""
    max_clients: Count = Field(default=48, ge=1, le=4096)
    """Most shares of one GPU. MPS serves 48 clients."""
    default_active_thread_percentage: Count = Field(default=100, ge=1, le=100)
    """Compute of a client without a limit of its own, percent (command mps)."""
    exclusive_process: bool = False
    """Set the GPUs' compute mode to EXCLUSIVE_PROCESS (command mps): every program on them goes through MPS."""
    multi_user: bool = False
    """Serve the clients of all users by one server, which runs as root (command mps): Volta or later. Else one user at a
    time."""
    drain_timeout_s: Seconds = Field(default=30.0, ge=0, le=3600)
    """How long the command mps waits for clients at its end."""


class LibgpushareSettings(Section):
    """libgpushare (isolation gpushare)."""

    library: GivenPath = Path("/usr/local/gpushare/libgpushare.so")
    """libgpushare.so as this process sees it, which copies it to libgpushare.directory."""
    directory: GivenPlace = Path("/etc/gpu-manager/vdriver/gpushare")
    """Directory on the host, not mounted noexec, from which containers get it."""
    probe: bool = True
    """Try at the start, for two seconds on an unused GPU, whether the library limits under this driver; else its shares
    are refused."""
    unlimited: Literal["warn", "end"] = "warn"
    """Processes that the library does not limit. warn: an Event, a metric and an alert name their container. end: they
    are also killed (component end-unlimited)."""


class DriverLimitsSettings(Section):
    """The driver's own memory limits (isolations with driver)."""

    set_by_agent: bool = False
    """The agent sets them (component driver-limits). false: NVIDIA's container toolkit 1.20.1 does."""


class CdiSettings(Section):
    """Container Device Interface (strategies cdi-annotations and cdi-cri, command cdi)."""

    kind: Annotated[str, matches(KIND, "is no CDI kind such as nvidia.com/gpu")] = "nvidia.com/gpu"
    """Vendor and class of CDI names, VENDOR/CLASS=UUID."""
    spec_directories: Annotated[tuple[GivenPath, ...], BeforeValidator(comma_list), PLACE] = Field(
        default=(Path("/etc/cdi"), Path("/var/run/cdi")), min_length=1
    )
    """Directories of CDI specs; the agent writes into the last."""


Xids = Annotated[tuple[Annotated[Count, Field(ge=1, le=100_000)], ...], BeforeValidator(comma_list)]


class LogSettings(Section):
    """Logs, which go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """json: one object a line. console: text. auto: console on a terminal, else json."""


class WebSettings(Section):
    """The HTTP server."""

    addr: str = Field(default="localhost", max_length=253)
    """Address to listen on. Empty: every address, which lets Prometheus and probes in."""
    port: Count = Field(default=5678, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    all_series: bool = False
    """Show all series of a container at /metrics, too, not at /metric alone (docs/reference/metrics.md)."""
    dcgm_names: bool = False
    """Show GPUs also by the names, labels and units of NVIDIA's dcgm-exporter (docs/reference/metrics.md)."""
    debug_token_file: OptionalPath = None
    """File with the token that callers of /debug send as `Authorization: Bearer`. Empty: only this host is answered
    there."""


class HealthSettings(Section):
    """Health of the GPUs."""

    check_period_s: Seconds = Field(default=5.0, ge=0.05, le=3600)
    """Period of reading the GPUs' state."""
    # NVIDIA's device plugin ignores the same: errors of a program, not of the GPU.
    ignored_xids: Xids = (13, 31, 43, 45, 68, 109)
    """Xid errors that leave a GPU Healthy."""
    reset_xids: Xids = (48, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143)
    """Xid errors after which a GPU stays Unhealthy until it is reset or uncordoned."""
    recovery_probes: Count = Field(default=3, ge=1, le=100)
    """Probes in a row that an Unhealthy GPU must pass to be Healthy again."""
    recovery_period_s: Seconds = Field(default=10.0, ge=0.05, le=3600)
    """Time between two of them, doubled each time the GPU becomes Unhealthy again."""


class UsageSettings(Section):
    """History of use."""

    history_s: Seconds = Field(default=900.0, ge=10, le=86400)
    """Length of the history."""
    idle_period_s: Seconds = Field(default=60.0, ge=0, le=3600)
    """Period of sampling while nothing reads the use. 0: always sample_period_s."""


class FactsSettings(Section):
    """Labels and annotations of the Node."""

    is_written: bool = True
    """Write them, which the extender needs. Needs the right to patch nodes."""
    label_prefix: Annotated[str, matches(DNS_NAME, "is no label prefix such as gpushare-agent or nvidia.com")] = (
        "gpushare-agent"
    )
    """Prefix of the labels gpu.product, gpu.memory, gpu.count and so on."""
    taint_above: float = Field(default=1.0, ge=0.0, le=1.0)
    """While more than this part of its GPUs is free, the node has the taint gpushare-agent/free-gpus
    (PreferNoSchedule) against pods without GPUs. 1: never."""


class ControlSettings(Section):
    """The socket of `cordon` and `uncordon`, for root alone."""

    socket: OptionalPlace = Path("/run/gpushare-agent/control.sock")
    """Unix socket. Empty: none."""


class DisplaySettings(Section):
    """gpu-manager's display service."""

    socket: OptionalPlace = Path("/var/run/gpu-manager.sock")
    """Unix socket of display.GPUDisplay. Empty: none."""


_NO_NAME = "is no name of a Kubernetes object (small letters, digits, - and .)"
_Name = Annotated[str, matches(DNS_NAME, _NO_NAME)]
_NameOrEmpty = Annotated[str, matches(re.compile(f"({DNS_NAME.pattern})?"), _NO_NAME)]
_LABEL = re.compile(rf"({DNS_NAME.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_Label = Annotated[str, matches(_LABEL, "is no label such as gaia.tencent.com/gpu-model")]


class ExtenderSettings(Section):
    """The scheduler extender."""

    addr: str = Field(default="127.0.0.1", max_length=253)
    """Address to listen on. Empty: every address."""
    port: Count = Field(default=3456, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    reserve: Literal["bind", "filter"] = "bind"
    """When GPUs are reserved. bind: at the bind. filter: at the filter, for schedulers that bind themselves."""
    node_policy: Literal["fgd", "binpack", "spread"] = "binpack"
    """binpack: pods go to the fullest node that fits. spread: to the emptiest. fgd: to where the fewest free GPUs become
    useless to typical pods (docs/explanation/placement.md)."""
    config: OptionalPath = None
    """gpu-admission's configuration file (JSON), which replaces the next four. Empty:
    /etc/kubernetes/gpu-admission.config, else gpu-quota-admission.config there."""
    quota_name: _Name = "gpuquota"
    """ConfigMap with the namespaces' quota (docs/reference/quota.md)."""
    quota_namespace: _Name = "kube-system"
    """Its namespace."""
    model_label: _Label = GPU_MODEL_LABEL
    """Node label with the GPUs' model, by which quota counts."""
    pool_label: _Label = "gaia.tencent.com/gpu-pool"
    """Node label with the node's pool."""
    tls_cert: OptionalPath = None
    """Certificate chain for HTTPS, PEM; read again when it changes. Empty: HTTP."""
    tls_key: OptionalPath = None
    """Its private key, PEM."""
    client_ca: OptionalPath = None
    """Certificate authorities, PEM, of clients that may call the scheduler's verbs. Empty: every client may."""
    claims_webhook: Literal["off", "open", "certificate"] = "off"
    """Who may call /mutate-pods and /translate-pods (docs/how-to/turn-limits-into-claims.md). open: every client.
    certificate: clients of client_ca. Both need TLS."""
    leader_elect: bool = True
    """Elect a leader by the Lease. false: there must be only one replica."""
    lease_namespace: _NameOrEmpty = ""
    """Namespace of the Lease. Empty: the variable POD_NAMESPACE, else kube-system."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are only of use together")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key: without TLS no client shows a certificate")
        if self.claims_webhook != "off" and self.tls_cert is None:
            raise ValueError("claims_webhook needs tls_cert and tls_key: an API server calls webhooks by HTTPS alone")
        # Without authorities every certificate would be as good as any.
        if self.claims_webhook == "certificate" and self.client_ca is None:
            raise ValueError("claims_webhook certificate needs client_ca: whose certificates are meant?")
        return self
