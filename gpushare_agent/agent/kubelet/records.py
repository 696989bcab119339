"""The kubelet's records of device allocations as values, and the reader of one of them, its device-manager checkpoint.

PodResources, the other record, is read by kubelet/pod_resources.py. The checkpoint, `kubelet_internal_checkpoint` in the
device-plugin directory, names the pod UID, which PodResources does not, and has the ordinary init containers, which
PodResources leaves out. It keeps entries of ended pods until the next Allocate, so it is never used alone where PodResources
answers. It is never written.

Format: docs/reference/formats.md, section 3. DeviceIDs is a map from NUMA node to IDs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Corrupt, Unavailable
from gpushare_agent.core.model.names import PodUid


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
    """One entry of kubelet_internal_checkpoint: it has the UID but not the name, and may be stale. `answer` is the plugin's
    ContainerAllocateResponse in base64, which the container gets again at each start."""

    pod_uid: PodUid
    container: str
    resource: str
    device_ids: frozenset[str]
    answer: str = ""


FILE_NAME = "kubelet_internal_checkpoint"
MAX_BYTES = 64 * 1024 * 1024
READ_TIMEOUT_S = 1.0
"""The file is read in milliseconds; a stalled disk must not stall the start, an admission or the shutdown."""


class KubeletCheckpoint:
    """The checkpoint below one device-plugin directory."""

    def __init__(self, directory: Path, ids: DeviceIds) -> None:
        self._path = directory / FILE_NAME
        self._ids = ids
        self._thread = DaemonThread("kubelet-checkpoint", advice="Check the disk; the file is read again when needed.")

    async def read(self) -> Sequence[CheckpointEntry]:
        """All entries, in file order.

        Raises:
            Unavailable: no such file, not readable, or not within a second.
            Corrupt: not the format.
        """
        what = f"reading the kubelet checkpoint {self._path}"
        entries = await self._thread.call(partial(read_checkpoint, self._path), what, READ_TIMEOUT_S)
        return [replace(entry, device_ids=frozenset(self._ids.read(entry.device_ids))) for entry in entries]


def read_checkpoint(path: Path) -> Sequence[CheckpointEntry]:
    """Read and check the file; its device IDs as they are written. Raises Unavailable, Corrupt."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Corrupt(f"kubelet checkpoint {path} is larger than {MAX_BYTES} bytes")
        text = path.read_bytes()
    except OSError as e:
        raise Unavailable(f"kubelet checkpoint {path} cannot be read: {e.strerror}") from e
    try:
        # The checksum next to it is of the kubelet's Go values, which no other program can form: a torn file fails as JSON.
        raw_entries = json.loads(text)["Data"]["PodDeviceEntries"] or []
        return [_entry(raw) for raw in raw_entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
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
    return CheckpointEntry(
        pod_uid=PodUid(str(raw["PodUID"])),
        container=str(raw["ContainerName"]),
        resource=str(raw["ResourceName"]),
        device_ids=frozenset(ids),
        answer=str(raw.get("AllocResp") or ""),
    )
