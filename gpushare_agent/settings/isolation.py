"""Settings of the isolations, the driver's files and the device lists; sections of settings/tree.py.

They are here and not in the packages of the isolations, which are above the settings: pydantic needs every section when
it makes the class of the tree. A section that the tree found in a package would be an import that runs back up, unseen by
import-linter, and a field without a type: `settings.mps.pipe_directory` would be Any to mypy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from gpushare_agent.model.isolation import AUTO, is_kind
from gpushare_agent.settings.isolation_names import isolation_names
from gpushare_agent.settings.values import Count, GivenPath, OneOf, Seconds, Section, comma_list

AllowedIsolation = Annotated[str, OneOf(isolation_names)]
NodeIsolation = Annotated[str, OneOf(lambda: (*isolation_names(), AUTO))]


class VirtualManagerSettings(Section):
    """The directories that sharing containers get mounted."""

    path: GivenPath = Field(
        default=Path("/etc/gpu-manager/vm"),
        description="Directory of the containers' vDevice directories (isolations gpushare and vcuda).",
    )


class DriverVolumeSettings(Section):
    """The driver's libraries and programs that containers get mounted (command driver-volume)."""

    root: GivenPath = Field(
        default=Path("/"),
        description="Root of the host's file system as this process sees it, such as /host.",
    )
    control_library: GivenPath = Field(
        default=Path("/usr/lib64/libcuda-control.so"),
        description="The library that limits shares (vcuda-control), as this process sees it.",
    )
    gpu_client: GivenPath = Field(
        default=Path("/opt/gpushare-agent/bin/gpu-client"),
        description="The program gpu-client, as this process sees it.",
    )
    mount: bool = Field(
        default=False,
        description="Mount volume origin into containers under isolations other than vcuda, too: for nodes without NVIDIA's"
        " container runtime.",
    )


class MpsSettings(Section):
    """NVIDIA MPS (isolation mps, command mps)."""

    pipe_directory: GivenPath = Field(
        default=Path("/run/gpushare-mps/pipe"),
        description="The MPS daemon's CUDA_MPS_PIPE_DIRECTORY on the host, the same in containers.",
    )
    shm_directory: GivenPath = Field(
        default=Path("/dev/shm"),  # noqa: S108 - the shared memory itself, which MPS needs, not a temporary file
        description="The daemon's /dev/shm on the host.",
    )
    log_directory: GivenPath = Field(
        default=Path("/run/gpushare-mps/log"), description="Directory of the daemon's logs (command mps)."
    )
    control: GivenPath = Field(
        default=Path("nvidia-cuda-mps-control"),
        description="The control program: a path, or a name in PATH.",
    )
    probe_period_s: Seconds = Field(default=5.0, ge=0.1, le=3600, description="Period of probing the daemon.")
    command_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=120, description="Time limit of one command to the daemon."
    )
    max_clients: Count = Field(
        default=48, ge=1, le=4096, description="Most sharing containers of one GPU. MPS serves 48 clients a GPU."
    )
    default_active_thread_percentage: Count = Field(
        default=100, ge=1, le=100,
        description="Compute of a client without a limit of its own, percent (command mps).",
    )  # fmt: skip
    exclusive_process: bool = Field(
        default=False,
        description="Set the GPUs' compute mode to EXCLUSIVE_PROCESS (command mps): every program on them goes through MPS.",
    )
    drain_timeout_s: Seconds = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="How long the command mps waits for clients at its end.",
    )


class LibgpushareSettings(Section):
    """libgpushare, the project's own library (isolation gpushare)."""

    library: GivenPath = Field(
        default=Path("/usr/local/gpushare/libgpushare.so"),
        description="libgpushare.so as this process sees it; it is copied to libgpushare.directory.",
    )
    directory: GivenPath = Field(
        default=Path("/etc/gpu-manager/vdriver/gpushare"),
        description="Directory on the host from which containers get the library, not mounted noexec.",
    )
    probe: bool = Field(
        default=True,
        description="Prove at the start, for two seconds of a GPU that nobody uses, that the library limits under this"
        " driver. Where it does not its shares are refused.",
    )


class DriverLimitsSettings(Section):
    """The driver's own memory limits (isolation driver, also in gpushare+driver and mps+driver)."""

    set_by_agent: bool = Field(
        default=False,
        description="The agent sets the driver's memory limits (component driver-limits). false: NVIDIA's container "
        "toolkit 1.20.1 does.",
    )


class CdiSettings(Section):
    """Container Device Interface (strategies cdi-annotations and cdi-cri, command cdi)."""

    kind: str = Field(
        default="nvidia.com/gpu", description="Vendor and class of CDI names; a device is <kind>=<GPU UUID>."
    )
    spec_directories: Annotated[tuple[GivenPath, ...], BeforeValidator(comma_list)] = Field(
        default=(Path("/etc/cdi"), Path("/var/run/cdi")),
        min_length=1,
        description="Directories of CDI specs; the agent writes its own into the last.",
    )

    @field_validator("kind")
    @classmethod
    def _is_kind(cls, value: str) -> str:
        if not is_kind(value):
            raise ValueError("is no CDI kind such as nvidia.com/gpu")
        return value
