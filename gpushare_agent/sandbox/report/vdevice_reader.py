"""What a container of the embedded node reads at /etc/vcuda, for the report: its limits and its processes.

The files are read from the host's side of the mount. State owned: each directory's last content, so that drawing a hundred
pods again and again costs two stat calls for each and not two reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from gpushare_agent.isolation.vdevice.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    decode_config,
    decode_pids,
)
from gpushare_agent.kit.regular_file import read_regular
from gpushare_agent.kit.sockets import FileIdentity, file_identity
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import MIB

_KEPT_AT_MOST = 2048

_Identities = tuple[FileIdentity | None, FileIdentity | None]


class VDevice(TypedDict):
    """The limits as the container reads them."""

    cores: int
    memory_mib: int
    core_limit: int
    is_limited: bool
    pids: list[int]


class VDeviceReader:
    """`read` as often as you like."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_Identities, VDevice | None]] = {}

    def read(self, directory: Path) -> VDevice | None:
        """The document's "vdevice" of the container whose directory this is; None where a file is missing or torn."""
        seen = file_identity(directory / CONFIG_NAME), file_identity(directory / PIDS_NAME)
        if None in seen:
            self._known.pop(directory, None)
            return None
        known = self._known.get(directory)
        if known is None or known[0] != seen:  # taken before reading: what changes meanwhile is read the next time
            known = self._known[directory] = (seen, _read(directory))
            while len(self._known) > _KEPT_AT_MOST:
                del self._known[next(iter(self._known))]
        return known[1]


def _read(directory: Path) -> VDevice | None:
    try:
        config = decode_config(read_regular(directory / CONFIG_NAME, CONFIG_BYTES + 1))
        pids = decode_pids(read_regular(directory / PIDS_NAME, 4 * MAX_PIDS + 1))
    except (OSError, Corrupt):
        return None
    return {
        "cores": config.utilization,
        "memory_mib": config.memory_bytes // MIB,
        "core_limit": config.limit,
        "is_limited": config.enable,
        "pids": list(pids),
    }
