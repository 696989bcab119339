"""The input and the interface of every isolation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from gpushare_agent.agent.isolation.kept import NOTHING_KEPT, Kept, kept_together
from gpushare_agent.core.model.allocations import ContainerEdits, ContainerMount, merged
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu, KernelModule
from gpushare_agent.core.model.names import ENV_LIBRARY_PATH, LIBRARY_DIRECTORY, PodUid, touches
from gpushare_agent.core.model.pods import ContainerSpec

if TYPE_CHECKING:  # it takes pydantic
    from gpushare_agent.core.settings.settings import Settings


class IsolationConfig(Struct, frozen=True, kw_only=True):
    """What isolations need of the node: its settings, and the host's directories of the driver's files for shares and for
    whole GPUs (None: no driver directory is configured, and none is mounted)."""

    settings: Settings
    shared_driver: Path | None = None
    whole_driver: Path | None = None


def mounted_driver(container: ContainerSpec, directory: Path) -> ContainerEdits:
    """A driver directory, and the search path to it."""
    libraries = [f"{LIBRARY_DIRECTORY}/lib64"]
    # gpu-manager's variable for images with 32-bit programs.
    if container.env.get("compat32", "").lower() == "true":
        libraries.append(f"{LIBRARY_DIRECTORY}/lib")
    # The link to the version in force, not its target: the kubelet keeps this answer for restarts.
    mount = ContainerMount(host_path=str(directory), container_path=LIBRARY_DIRECTORY)
    return ContainerEdits(env=((ENV_LIBRARY_PATH, ":".join(libraries)),), mounts=(mount,))


class GpuShare(Struct, frozen=True, kw_only=True):
    """What a container has of one GPU. `cores` are percent of it, 0 for a request for memory alone; `memory_mib` is 0 where
    it has the whole GPU and requested no memory."""

    gpu: Gpu
    cores: int
    memory_mib: int
    is_whole: bool = False


class IsolationRequest(Struct, frozen=True, kw_only=True):
    """One container and its allocation, in order of the GPUs' index, as the container sees them.

    `core_limit` is the elastic ceiling or 0; `pod_memory_mib` what all main containers of its pod request. Of a
    ResourceClaim, `pod_uid` is the claim's and `container` stands for all that use the same requests of it.

    `container.name` and `pod_uid` come from the API server, which admits only DNS labels and UUIDs; they are
    checked again before a directory is named after them.
    """

    pod_uid: PodUid
    container: ContainerSpec
    shares: tuple[GpuShare, ...]
    config: IsolationConfig
    core_limit: int = 0
    pod_memory_mib: int = 0
    memory_unit_mib: int = 1024
    """The unit of GPUShare's variables."""
    handlers: tuple[str, ...] = ()
    """Those of the RuntimeClasses of its pod, of a claim's pods."""

    @property
    def vdevice_directory(self) -> Path:
        """The container's own on the host, which isolation/vdevice makes."""
        return self.config.settings.virtual_manager.path / self.pod_uid / self.container.name

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(share.gpu for share in self.shares)

    @property
    def cores(self) -> int:
        """Percent of one GPU, of all GPUs together."""
        return sum(share.cores for share in self.shares)

    @property
    def memory_mib(self) -> int:
        return sum(share.memory_mib for share in self.shares)

    @property
    def is_whole(self) -> bool:
        """Whole GPUs alone: nothing is limited."""
        return bool(self.shares) and all(share.is_whole for share in self.shares)


class ClaimUse(Struct, frozen=True, kw_only=True):
    """Who uses one share of a ResourceClaim. `together` are the containers of one pod that do at the same time; `who` names
    them, or several pods; `remedy` is another choice of the isolation. `owner` is the pod for which alone the claim was
    made, None also where another one uses it; `is_owner_known` whether its containers are known."""

    isolation: str
    together: tuple[str, ...]
    is_shared: bool
    who: str
    owner: str | None
    is_owner_known: bool
    remedy: str
    config: IsolationConfig
    module: KernelModule | None


class Follows(Enum):
    """Who follows a change of a share's limit after its container was created; in the order of how many do."""

    NOBODY = auto()
    NEW_PROCESSES = auto()
    """Processes that start after it. Running ones may keep the previous limit."""
    RUNNING_PROCESSES = auto()

    @property
    def can_change(self) -> bool:
        return self is not Follows.NOBODY

    @property
    def is_live(self) -> bool:
        return self is Follows.RUNNING_PROCESSES


class Isolation(Struct, frozen=True, kw_only=True, eq=False):
    """`edit` is pure: the container's edits, or the refusal. `keeps` is what of a share is kept, and by whom.
    `cores_follow` and `memory_follows` are about a live resize; `not_shared` is why those who use a claim's share together
    cannot have it."""

    name: str
    edit: Callable[[IsolationRequest], ContainerEdits | Refused]
    keeps: Kept
    not_shared: Callable[[ClaimUse], Refused | None] = lambda _: None
    cores_follow: Follows = Follows.NOBODY
    memory_follows: Follows = Follows.NOBODY
    why_not_in_mig: str = ""
    """Why it cannot keep a share of a MIG instance, empty if it can. A whole instance needs nothing kept."""
    mounts_vdevice: bool = False
    """Containers get their vDevice directory."""
    mounts_driver: bool = False
    """Containers get the driver's libraries from the driver directory."""
    follows_processes: bool = False
    """The agent has to find the processes of containers: by their IDs, from the container runtime."""
    reads_processes: bool = False
    """What is in the container reads the list of its processes all the time."""

    @property
    def limits(self) -> bool:
        """True if it keeps anything of a share."""
        return self.keeps != NOTHING_KEPT

    def driver_files(self, container: ContainerSpec, config: IsolationConfig) -> ContainerEdits:
        """The driver's own files, where `driver_volume.mount` says so and the isolation mounts none."""
        if config.whole_driver is None or self.mounts_driver or not config.settings.driver_volume.mount:
            return ContainerEdits()
        return mounted_driver(container, config.whole_driver)

    def edits(self, request: IsolationRequest) -> ContainerEdits | Refused:
        """The answer of `edit`, but a refusal for a share of a MIG instance that it cannot keep, and for any that it would
        have to limit in a sandbox."""
        patterns = request.config.settings.runtime.sandboxed_handlers
        found = next((one for one in request.handlers if any(fnmatchcase(one, known) for known in patterns)), "")
        # gVisor is a kernel of its own: its locks, sockets and PIDs do not reach the host (tried with the one of 2022). A
        # virtual machine has no driver of the host.
        if found and self.limits and not request.is_whole:
            return refused_share(
                request,
                self.name,
                f"the RuntimeClass of the pod has the handler {found}, which runs containers in a sandbox, where no limit is"
                " known to hold (setting runtime.sandboxed_handlers)",
                ". Leave runtimeClassName out, or ask for whole GPUs",
            )
        # A whole instance is the hardware's own limit.
        for gpu in (share.gpu for share in request.shares if not share.is_whole):
            has_others = self.limits and gpu.mig is not None and not gpu.mig.has_own_memory
            why = self.why_not_in_mig or ("other compute instances have the same memory" if has_others else "")
            if gpu.mig is not None and why:
                return invalid(
                    f"container {request.container.name} cannot have a share of MIG instance {gpu.label} under isolation"
                    f" {self.name}: {why}. Nothing was allocated; request a whole instance, or a share of a GPU that is not"
                    " MIG-partitioned."
                )
        return self.edit(request)


def invalid(detail: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=detail)


def refused_mounts(container: ContainerSpec, isolation: str, paths: Sequence[str]) -> Refused | None:
    """Refuses a spec with a volume at one of the isolation's own `paths`, below or above it. The pod's mounts come after a
    device plugin's; in a volume above a path its users could lead a directory of that path elsewhere."""
    found = [mount for mount in container.mounts if any(touches(mount, path) for path in paths)]
    if not found:
        return None
    return invalid(
        f"container {container.name} mounts a volume at {', '.join(found)}, by which it could lift the limit of its"
        f" share: isolation {isolation} has its files at {', '.join(sorted(paths))}. Nothing was allocated. Mount the volume"
        " at another path, neither in these nor above them."
    )


def refused_share(request: IsolationRequest, isolation: str, why: str, then: str = "") -> Refused:
    """A share that the isolation cannot enforce; `then` follows after "Nothing was allocated"."""
    return invalid(
        f"container {request.container.name} cannot have its share under isolation {isolation}: {why}."
        f" Nothing was allocated{then}."
    )


def combined(name: str, parts: Sequence[Isolation]) -> Isolation:
    """The edits of all of them; refused if one refuses. The first limits compute, all limit memory."""

    def edit(request: IsolationRequest) -> ContainerEdits | Refused:
        found: list[ContainerEdits] = []
        for part in parts:
            # By `edits` and not `edit`: each part has its own word on MIG.
            edits = part.edits(request)
            if isinstance(edits, Refused):
                return edits
            found.append(edits)
        return merged(*found)

    def not_shared(use: ClaimUse) -> Refused | None:
        return next((refused for part in parts if (refused := part.not_shared(use)) is not None), None)

    return Isolation(
        name=name,
        edit=edit,
        keeps=kept_together([part.keeps for part in parts]),
        not_shared=not_shared,
        # The first limits compute; of memory all must follow, so the least counts.
        cores_follow=parts[0].cores_follow,
        why_not_in_mig=next((part.why_not_in_mig for part in parts if part.why_not_in_mig), ""),
        mounts_vdevice=any(part.mounts_vdevice for part in parts),
        mounts_driver=any(part.mounts_driver for part in parts),
        follows_processes=any(part.follows_processes for part in parts),
        reads_processes=any(part.reads_processes for part in parts),
        memory_follows=min((part.memory_follows for part in parts), key=lambda follows: follows.value),
    )
