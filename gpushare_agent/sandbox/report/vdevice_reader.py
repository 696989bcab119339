"""What a container of the embedded node reads at /etc/vcuda, for the report: its limits and its processes.

The files are read from the host's side of the mount. State owned: each directory's last content, so that drawing a hundred
pods again and again costs two stat calls for each and not two reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpushare_agent.isolation.vcuda.client import read_vdevice
from gpushare_agent.isolation.vcuda.format import CONFIG_NAME, PIDS_NAME
from gpushare_agent.kit.sockets import FileIdentity, file_identity
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.names import MIB

_KEPT_AT_MOST = 2048

_Identities = tuple[FileIdentity | None, FileIdentity | None]


class VDeviceReader:
    """`read` as often as you like."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_Identities, dict[str, Any] | None]] = {}

    def read(self, directory: Path) -> dict[str, Any] | None:
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


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        found = read_vdevice(directory)
    except AgentError:
        return None
    return {
        "cores": found.config.utilization,
        "memory_mib": found.config.memory_bytes // MIB,
        "core_limit": found.config.limit,
        "is_limited": found.config.enable,
        "pids": list(found.pids),
    }
