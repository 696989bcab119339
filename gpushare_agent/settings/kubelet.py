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
        description="Directory of kubelet.sock and of the agent's own sockets. The default is the kubelet's own.",
    )
    pod_resources_socket: GivenPath = Field(
        default=Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="Socket of the PodResources API, which matches an Allocate to its pod. The default is the kubelet's.",
    )
    api_address: str = Field(
        default="",
        description="Address of the kubelet's HTTPS port on this node, of which static pods are read: they are admitted"
        " before the API server knows them. Empty: none is read, and static pods that ask for a share are refused. The"
        " component static-pods sets it, with the right that it needs.",
    )
    api_port: int = Field(default=10250, ge=1, le=65535, description="The kubelet's HTTPS port.")
    api_ca: GivenPath | None = Field(
        default=None,
        description="File of the certificate authority that signed the kubelet's serving certificate. Unset: the service"
        " account's ca.crt. The certificate is always verified, for the agent's token is sent to who has it.",
    )
    allow_unsupported: bool = Field(
        default=False,
        description="Run with kubelets older than 1.30, whose PodResources cannot be read during an admission."
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
        description="How long to repeat the lookup while two pods remain possible, seconds, before the call is refused.",
    )


class RuntimeSettings(Section):
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
        description="Time limit of one request to the runtime, seconds. Used with isolation vcuda.",
    )
    cgroup_driver: Literal["", "cgroupfs", "systemd"] = Field(
        default="",
        description="Not needed: the paths show it. If set, it is compared with them at the start, and a disagreement is"
        " logged.",
    )
    cgroup_root: GivenPath = Field(default=Path("/sys/fs/cgroup"), description="Where the host's cgroups are mounted.")
    proc_root: GivenPath = Field(
        default=Path("/proc"),
        description="The /proc that shows the host's processes: the pod's own where it has the host's PID namespace.",
    )
