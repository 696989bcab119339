"""Settings of the isolations, the driver's files and the device lists; sections of settings/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from gpushare_agent.model.cdi import is_kind
from gpushare_agent.model.isolation import CorePolicy
from gpushare_agent.settings.values import Count, GivenPath, Seconds, Section, comma_list


class VirtualManagerSettings(Section):
    """The directories that sharing containers get mounted."""

    path: GivenPath = Field(
        default=Path("/etc/gpu-manager/vm"),
        description="Directory with one directory per pod and container, in gpu-manager's layout. Used with"
        " isolation vcuda.",
    )


class DriverVolumeSettings(Section):
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
    gpu_client: GivenPath = Field(
        default=Path("/opt/gpushare-agent/bin/gpu-client"),
        description="The program that the control library runs at each start of a CUDA program, as this process sees it. The"
        " default is its place in this project's image; its source is native/gpu-client.c.",
    )


class MpsSettings(Section):
    """NVIDIA MPS (isolation mps, command mps)."""

    pipe_directory: GivenPath = Field(
        default=Path("/run/gpushare-mps/pipe"),
        description="Where the MPS control daemon has its pipes, on the host; containers get it mounted at the same path."
        " Set it to the daemon's CUDA_MPS_PIPE_DIRECTORY where you run the daemon yourself.",
    )
    shm_directory: GivenPath = Field(
        default=Path("/dev/shm"),  # noqa: S108 - the shared memory itself, which MPS needs, not a temporary file
        description="The daemon's /dev/shm on the host; containers get it as theirs. The default is right for a daemon that"
        " runs on the host; one in a container has a directory of its own.",
    )
    log_directory: GivenPath = Field(
        default=Path("/run/gpushare-mps/log"), description="Where a daemon started by the command mps writes its logs."
    )
    control: GivenPath = Field(
        default=Path("nvidia-cuda-mps-control"),
        description="The control program: a path, or a name that is searched in PATH.",
    )
    probe_period_s: Seconds = Field(
        default=5.0, ge=0.1, le=3600, description="Time between two probes of the daemon, seconds."
    )
    command_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=120, description="Longest wait for the answer to one command, seconds."
    )
    max_clients: Count = Field(
        default=48, ge=1, le=4096, description="Most sharing containers of one GPU. MPS serves 48 clients a GPU."
    )
    default_active_thread_percentage: Count = Field(
        default=100, ge=1, le=100,
        description="What a client without a limit of its own may use, percent; set by the command mps when it starts the"
        " daemon.",
    )  # fmt: skip
    exclusive_process: bool = Field(
        default=False,
        description="Let the command mps set the GPUs' compute mode to EXCLUSIVE_PROCESS, so that nobody uses them beside"
        " the MPS server; whole GPUs then go through it too, without limits. Off: the mode stays as it is.",
    )
    drain_timeout_s: Seconds = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="How long the command mps waits for clients at its end, seconds.",
    )


class HamiCoreSettings(Section):
    """HAMi-core's libvgpu.so (isolation hami-core)."""

    library: GivenPath = Field(
        default=Path("/usr/local/vgpu/libvgpu.so"),
        description="Where the library comes from, as this process sees it; the default is its place in the agent's image."
        " It is copied to hami_core.directory, from which sharing containers get it.",
    )
    directory: GivenPath = Field(
        default=Path("/etc/gpu-manager/hami-core"),
        description="Directory on the host of the library's copy, the preload file and each container's own cache directory."
        " Not on a file system mounted noexec.",
    )
    memory_scaling: float = Field(
        default=1.0, ge=1.0, le=16.0, allow_inf_nan=False,
        description="What a container may allocate is its share times this, at most the GPU's memory. Above 1 memory is"
        " oversubscribed.",
    )  # fmt: skip
    core_scaling: float = Field(
        default=1.0, ge=1.0, le=100.0, allow_inf_nan=False,
        description="What a container may compute is its share times this, at most 100 percent. Above 1 compute is"
        " oversubscribed.",
    )  # fmt: skip
    core_policy: CorePolicy = Field(
        default="default",
        description="Whether compute is limited, HAMi's GPU_CORE_UTILIZATION_POLICY. default: yes. force: yes, even where a"
        " container's processes switched it off in their cache file. disable: memory alone is limited.",
    )
    allow_opt_out: bool = Field(
        default=False,
        description="Let a container with a share go without the library and its limits by CUDA_DISABLE_CONTROL=true in its"
        " spec, and without the limit of compute by GPU_CORE_UTILIZATION_POLICY=disable, as under HAMi. Off: the first"
        " changes nothing, and the second is refused.",
    )


class DriverLimitsSettings(Section):
    """The driver's own memory limits (isolation driver, also in hami-core+driver and mps+driver)."""

    set_by_agent: bool = Field(
        default=False,
        description="The agent sets the limits itself, which takes root, SYS_ADMIN and the host's cgroups writable"
        " (manifests/components/driver-limits). false: NVIDIA's container toolkit 1.20.1 or later does, and the agent"
        " checks that it did.",
    )


class CdiSettings(Section):
    """Container Device Interface (strategies cdi-annotations and cdi-cri, command cdi)."""

    kind: str = Field(
        default="nvidia.com/gpu", description="Vendor and class of the devices' names; a device is <kind>=<GPU UUID>."
    )
    spec_directories: Annotated[tuple[GivenPath, ...], BeforeValidator(comma_list)] = Field(
        default=(Path("/etc/cdi"), Path("/var/run/cdi")),
        min_length=1,
        description="Where specs are searched, comma list; the last one is where the agent writes its own if nobody else's"
        " names the GPUs.",
    )

    @field_validator("kind")
    @classmethod
    def _is_kind(cls, value: str) -> str:
        if not is_kind(value):
            raise ValueError("is no CDI kind such as nvidia.com/gpu")
        return value
