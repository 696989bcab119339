"""The kubelet's records of device allocations as values, and the reader of one of them, its device-manager checkpoint.

PodResources, the other record, is read by kubelet/pod_resources.py. The checkpoint, `kubelet_internal_checkpoint` in the
device-plugin directory, names the pod UID, which PodResources does not, and has the ordinary init containers, which
PodResources leaves out. It keeps entries of ended pods until the next Allocate, so it is never used alone where PodResources
answers. It is never written.

Format: docs/reference/formats.md, section 3. DeviceIDs is a map from NUMA node to IDs.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, json
from msgspec.structs import replace

from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.protobuf import decode_container_answer
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.model.allocations import gpu_names
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Corrupt, Unavailable, os_errors_as
from gpushare_agent.core.model.names import (
    ENV_GPUSHARE_INDEX,
    ENV_VISIBLE_DEVICES,
    VDEVICE_DIRECTORY,
    PodUid,
    read_former_id,
)
from gpushare_agent.core.settings.settings import Settings


class ListedContainer(Struct, frozen=True, kw_only=True):
    """`devices` maps resource name to the IDs, the several entries of one resource merged."""

    name: str
    devices: Mapping[str, frozenset[str]]


class ListedPod(Struct, frozen=True, kw_only=True):
    """A pod in a PodResources answer. Ordinary init containers are never listed; sidecars are, from 1.30 on."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...]


class CheckpointEntry(Struct, frozen=True, kw_only=True):
    """One entry of kubelet_internal_checkpoint: it has the UID but not the name, and may be stale. `gpu_names` is what the
    plugin's answer, which the container gets again at each start, names GPUs by; of a container of another program also what
    that program's own record says, and its index (NO_GPU: none). `vdevice` is the directory of the host that it has at
    /etc/vcuda by that answer, empty where none."""

    pod_uid: PodUid
    container: str
    resource: str
    device_ids: frozenset[str]
    gpu_names: frozenset[str] = frozenset()
    vdevice: str = ""


FILE_NAME = "kubelet_internal_checkpoint"
MAX_BYTES = 64 * 1024 * 1024
NO_GPU = "-1"
_NAMED = 3
READ_TIMEOUT_S = 1.0
"""The file is read in milliseconds; a stalled disk must not stall the start, an admission or the shutdown."""


class KubeletCheckpoint:
    """The checkpoint below one device-plugin directory; and `former`, gpu-manager's own, for containers whose GPUs the
    kubelet's does not name."""

    def __init__(self, directory: Path, ids: DeviceIds, former: Path | None = None) -> None:
        self._path = directory / FILE_NAME
        self._former = former
        self._ids = ids
        self._thread = DaemonThread("kubelet-checkpoint", advice="Check the disk; the file is read again when needed.")

    async def read(self, without: Collection[PodUid] = ()) -> Sequence[CheckpointEntry]:
        """All entries in file order, `without` those of these pods, their device IDs as they are written.

        Raises:
            Unavailable: no such file, not readable, or not within a second.
            Corrupt: not the format.
        """
        what = f"reading the kubelet checkpoint {self._path}"
        read = partial(read_checkpoint, self._path, self._former, without)
        return await self._thread.call(read, what, READ_TIMEOUT_S)

    def ours(self, entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        """Those that are not of other plugins, with the devices that their IDs name. In the loop's thread, to which `ids`
        belongs, and longer than the reading: so only of the pods that are asked about."""
        held = ((entry, self._ids.read_held(entry.resource, entry.device_ids)) for entry in entries)
        return [replace(e, device_ids=ids) for e, ids in held if ids or e.gpu_names or e.vdevice]


def read_checkpoint(
    path: Path, former: Path | None = None, without: Collection[PodUid] = ()
) -> Sequence[CheckpointEntry]:
    """Read and check the file, as `KubeletCheckpoint.read`. Raises Unavailable, Corrupt."""
    data = _read_json(path)
    try:
        # An entry takes ten times as long as its JSON: of a full node's, those that nobody asks about are not made.
        entries = [_entry(raw) for raw in data["Data"]["PodDeviceEntries"] or [] if raw["PodUID"] not in without]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Corrupt(f"kubelet checkpoint {path} is not in the known format: {e!r}") from e
    lacking = {(e.pod_uid, e.container) for e in entries if is_former(e.device_ids)}
    lacking -= {(e.pod_uid, e.container) for e in entries if e.gpu_names}
    nodes = _gpu_managers(former) if lacking and former is not None else {}
    found = {key: nodes[key] for key in lacking & nodes.keys()}
    return [replace(e, gpu_names=found.get((e.pod_uid, e.container), e.gpu_names)) for e in entries]


def gpu_managers_checkpoint(settings: Settings) -> Path:
    """Where gpu-manager's manifest has it, next to the directory that this agent shares with it."""
    return settings.host_directory / "checkpoint" / "gpumanager_internal_checkpoint"


LEFT_REMEDY = "drain the node, or set the earlier directory until they have ended"


def vdevices(entries: Iterable[CheckpointEntry]) -> dict[str, str]:
    """The vDevice directory, on the host, of each container to which this agent or an earlier one gave it."""
    ours = (one for one in entries if one.vdevice and not is_former(one.device_ids))
    return {f"container {one.container} of pod {one.pod_uid}": one.vdevice for one in ours}


def describe_left(vdevices: Mapping[str, str], directory: Path) -> str:
    """Which of these are not in `directory`, empty if all are: the setting was changed while they ran. Such containers keep
    their limits, but the kubelet names the same directory at each of their starts."""
    left = {name: path for name, path in sorted(vdevices.items()) if not Path(path).is_relative_to(directory)}
    if not left:
        return ""
    names, more = list(left)[:_NAMED], f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    return (
        f"the files of {', '.join(names)}{more} are in {Path(left[names[0]]).parent.parent}, where this agent keeps none"
        f" (setting virtual_manager.path: {directory})"
    )


def is_former(device_ids: Collection[str]) -> bool:
    """A program whose place this agent takes has named the devices."""
    return read_former_id(next(iter(device_ids), "")) is not None


def _gpu_managers(path: Path) -> dict[tuple[str, str], frozenset[str]]:
    """The device nodes by pod UID and container of gpu-manager's own checkpoint: `PodCache` and `Info` in
    pkg/services/allocator/cache/cache.go, `checkpointFileName` in allocator/nvidia/allocator.go. One that cannot be read
    says nothing."""
    try:
        return {
            (uid, container): gpu_names("", (), map(str, info["Devices"] or ()))
            for uid, containers in _read_json(path)["PodGPUMapping"].items()
            for container, info in containers.items()
        }
    except (Unavailable, Corrupt, KeyError, TypeError, AttributeError):
        return {}


def _read_json(path: Path) -> Any:
    """Raises Unavailable, Corrupt."""
    with os_errors_as(Unavailable, f"kubelet checkpoint {path} cannot be read"):
        text = read_regular(path, MAX_BYTES, follow=True)
    try:
        # The checksum next to it is of the kubelet's Go values, which no other program can form: a torn file fails as JSON.
        # Not by the standard library, which reads half of a surrogate pair: nothing can encode it.
        return json.decode(text)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"kubelet checkpoint {path} is not in the known format: {e!r}") from e


def _entry(raw: dict[str, object]) -> CheckpointEntry:
    raw_ids = raw["DeviceIDs"]
    if not isinstance(raw_ids, dict):
        raise TypeError(f"DeviceIDs of {raw['PodUID']!r} is {type(raw_ids).__name__}")
    ids: set[str] = set()
    # Only the IDs count here: which NUMA node they are on is known from the GPU.
    for group in raw_ids.values():
        if group is not None and not isinstance(group, list):
            raise TypeError(f"DeviceIDs of {raw['PodUID']!r} is {type(group).__name__}")
        ids.update(str(device) for device in group or ())
    try:
        env, mounts, nodes = decode_container_answer(base64.b64decode(str(raw.get("AllocResp") or ""), validate=True))
    except ValueError:
        env, mounts, nodes = {}, {}, []  # of an answer that is none nothing is known
    return CheckpointEntry(
        pod_uid=PodUid(str(raw["PodUID"])),
        container=str(raw["ContainerName"]),
        resource=str(raw["ResourceName"]),
        device_ids=frozenset(ids),
        gpu_names=_gpu_names(env, mounts, nodes, is_former=is_former(ids)),
        vdevice=mounts.get(VDEVICE_DIRECTORY, ""),
    )


def _gpu_names(
    env: Mapping[str, str], mounts: Collection[str], nodes: Collection[str], *, is_former: bool
) -> frozenset[str]:
    """Of a ContainerAllocateResponse. gpu-manager answers device nodes and UUIDs (`allocateOne` in
    pkg/services/allocator/nvidia/allocator.go); GPUShare's plugin a UUID, or the index, which is -1 where no GPU was found
    (`Allocate` in pkg/gpu/nvidia/allocate.go)."""
    index = env.get(ENV_GPUSHARE_INDEX, "") if is_former else ""
    named = gpu_names(f"{env.get(ENV_VISIBLE_DEVICES, '')},{index}", mounts, nodes)
    return named or frozenset((NO_GPU,) if index == NO_GPU else ())
