"""NVIDIA MPS: each process of the container gets its own bound on compute and memory from the control daemon.

Source: docs/reference/formats.md, section 7; NVIDIA's documents on the Multi-Process Service for the variables. A container
on whole GPUs has none of them, so that its processes reach the GPU without the daemon. Only where the GPUs are in compute
mode EXCLUSIVE_PROCESS do they need it too, because there only one process, the MPS server, may open a GPU: then they get the
connection to the daemon and no limits.
"""

from __future__ import annotations

from fractions import Fraction

from gpushare_agent.agent.isolation.kept import Kept, NotKept
from gpushare_agent.agent.isolation.request import GpuShare, Isolation, IsolationRequest, refused_share
from gpushare_agent.core.model.allocations import ContainerEdits, ContainerMount
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    ENV_GPUSHARE_CONTAINER,
    ENV_GPUSHARE_GPU,
    ENV_GPUSHARE_INDEX,
    ENV_GPUSHARE_POD,
)
from gpushare_agent.core.model.resources import cores_of_part
from gpushare_agent.core.settings.sections import MpsSettings

ENV_PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
ENV_THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ENV_MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
ENV_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where MPS clients look for the server's shared memory


def edit_mps(request: IsolationRequest) -> ContainerEdits | Refused:
    """Environment and mounts from the container's own share; Refused for what MPS cannot enforce."""
    mps = request.config.settings.mps
    # They reach the GPU without the daemon, and its end does not concern them.
    if request.is_whole and not mps.exclusive_process:
        return ContainerEdits()
    # They become the paths of mounts, which must be absolute.
    if not mps.pipe_directory.is_absolute() or not mps.shm_directory.is_absolute():
        return _refused(request, "the node's settings mps.pipe_directory and mps.shm_directory must be absolute paths")
    if request.is_whole:
        return ContainerEdits(env=tuple(sorted(_connection(request, mps).items())), mounts=_mounts(mps))
    if (refused := _unenforceable(request)) is not None:
        return refused
    env = _connection(request, mps)
    # GPUShare's variables know one GPU alone.
    if len(request.shares) == 1:
        env |= _gpushare(request, request.gpus[0])
    # MPS has one percentage for all GPUs of a process: the least keeps each share.
    env[ENV_THREAD_PERCENTAGE] = str(min(_percentage(share, request.core_limit) for share in request.shares))
    limits = [share.gpu.memory_mib if share.is_whole else share.memory_mib for share in request.shares]
    env[ENV_MEMORY_LIMIT] = ",".join(f"{ordinal}={mib}M" for ordinal, mib in enumerate(limits))
    return ContainerEdits(env=tuple(sorted(env.items())), mounts=_mounts(mps))


def _unenforceable(request: IsolationRequest) -> Refused | None:
    """Refuses a share that MPS cannot enforce: a limit of zero would be no limit."""
    if not request.shares:
        return _refused(request, "it names no GPU")
    for share in request.shares:
        if share.is_whole:
            continue
        if not 0 <= share.cores <= CORES_PER_GPU:
            return _refused(request, f"{share.cores} cores are no share of a GPU")
        if share.memory_mib <= 0:
            return _refused(request, "it asks for no memory, and MPS takes a limit of 0 MiB for none at all")
        # A limit above the GPU's memory would be none.
        if share.memory_mib > share.gpu.memory_mib:
            gpu = share.gpu
            return _refused(
                request, f"it asks for {share.memory_mib} MiB, and GPU {gpu.label} has {gpu.memory_mib} MiB"
            )
    return None


def _percentage(share: GpuShare, core_limit: int) -> int:
    """The cores, raised to an elastic ceiling: MPS fixes a bound when a process starts, so it cannot follow the GPU's
    load. A request for memory alone gets the same part of the GPU's compute as of its memory."""
    if share.cores > 0:
        return max(share.cores, min(core_limit, CORES_PER_GPU))
    return cores_of_part(Fraction(share.memory_mib, share.gpu.memory_mib))


def _connection(request: IsolationRequest, mps: MpsSettings) -> dict[str, str]:
    """The variables that say where the daemon is, and which GPUs, by UUID: numbers would mean the server's own order."""
    return {
        ENV_PIPE_DIRECTORY: str(mps.pipe_directory),
        ENV_CUDA_VISIBLE_DEVICES: ",".join(gpu.uuid for gpu in request.gpus),
    }


def _gpushare(request: IsolationRequest, gpu: Gpu) -> dict[str, str]:
    """GPUShare's variables in whole units, at least one: programs divide CONTAINER by DEV for the part of the memory that
    they may take."""
    unit = request.memory_unit_mib
    return {
        ENV_GPUSHARE_INDEX: str(gpu.number),
        ENV_GPUSHARE_POD: str(max(1, max(request.pod_memory_mib, request.memory_mib) // unit)),
        ENV_GPUSHARE_CONTAINER: str(max(1, request.memory_mib // unit)),
        ENV_GPUSHARE_GPU: str(max(1, gpu.memory_mib // unit)),
    }


def _mounts(mps: MpsSettings) -> tuple[ContainerMount, ...]:
    """Writable both: clients write to the pipes, and make files in the shared memory."""
    pipe = str(mps.pipe_directory)
    return (
        ContainerMount(host_path=pipe, container_path=pipe, read_only=False),
        ContainerMount(host_path=str(mps.shm_directory), container_path=SHARED_MEMORY, read_only=False),
    )


def _refused(request: IsolationRequest, why: str) -> Refused:
    return refused_share(request, "mps", why, "; change what the pod asks for, or the node's settings")


ISOLATION = Isolation(
    name="mps",
    edit=edit_mps,
    keeps=Kept(memory_by="mps", compute_by="mps", not_kept=(NotKept.BYPASS, NotKept.PER_PROCESS)),
    why_not_in_mig="each instance needs an MPS control daemon of its own, and the node's is for its undivided GPUs",
)
