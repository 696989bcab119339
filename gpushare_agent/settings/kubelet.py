"""Settings of the kubelet, the container runtime and the cgroups on the node; sections of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gpushare_agent.settings.values import GivenPath, Seconds, Section


class KubeletSettings(Section):
    """The kubelet's sockets and its HTTPS port, and the time limits of admissions."""

    device_plugin_path: GivenPath = Field(
        default=Path("/var/lib/kubelet/device-plugins"),
        description="Directory of kubelet.sock and of the agent's sockets.",
    )
    pod_resources_socket: GivenPath = Field(
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="Socket of the PodResources API.",
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
    allow_unsupported: bool = Field(
        default=False,
        description="Run with kubelets older than 1.30: pods are identified by the API server alone.",
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
