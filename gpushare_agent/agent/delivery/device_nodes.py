"""The device nodes that containers get with the GPUs' own: the driver's control nodes, and those of the extra-config file.

Format of gpu-manager's extra-config file: `{"default": {"devices": ["/dev/…"]}}` (docs/reference/formats.md); as there, what
is left out or null names none. State owned, by `ControlNodes`: which nodes were missing at the last check, for the log.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import structlog
from msgspec import DecodeError, Struct

from gpushare_agent.agent.delivery.device_lists import CONTROL_NODES
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import StartupError

log = structlog.get_logger(__name__)

MAX_BYTES = 1024 * 1024
MAX_DEVICES = 256


class ControlNodes:
    """The first user of a GPU creates them, perhaps after the agent."""

    def __init__(self) -> None:
        self._absent = ReportOnce()

    def present(self) -> tuple[str, ...]:
        """Those that exist, in the order in which containers get them; with another a container would not start. One stat
        each in devtmpfs, which is memory."""
        found = tuple(path for path in CONTROL_NODES if os.path.exists(path))  # noqa: PTH110 - at each Allocate
        absent = [path for path in CONTROL_NODES if path not in found]
        if not absent:
            self._absent.is_over()
        elif self._absent.is_new(" ".join(absent)):
            log.warning("control_nodes_absent", paths=absent, then="containers get the other ones")
        return found


class _Listed(Struct):
    devices: list[str] | None = None


def read_extra_devices(path: Path | None) -> tuple[str, ...]:
    """The device nodes of the file, in its order; none without a file. Raises StartupError for a bad one."""
    if path is None:
        return ()
    try:
        # Followed: a file of a ConfigMap is a link.
        content = read_regular(path, MAX_BYTES, follow=True)
        found = msgspec.json.decode(content, type=dict[str, _Listed | None] | None) or {}
        listed = found["default"] if found else None  # one that has something, but no `default`, may be misspelt
        devices = (listed.devices if listed is not None else None) or ()
        if len(devices) > MAX_DEVICES or not all(map(_is_device, devices)):
            raise ValueError(f"at most {MAX_DEVICES} paths below /dev")
    except OSError as e:
        raise StartupError(
            f"extra config {path} cannot be read: {e.strerror}. Correct it, or leave out --extra-config"
        ) from e
    except (DecodeError, ValueError, LookupError, RecursionError) as e:
        raise StartupError(
            f'extra config {path} is not of the form {{"default": {{"devices": ["/dev/…"]}}}} with paths below /dev: {e}'
        ) from e
    for device in devices:
        if not Path(device).exists():
            # A warning alone: the node may appear later, with the driver.
            log.warning("extra_device_missing", device=device, then="containers that get it cannot start")
    return tuple(dict.fromkeys(devices))


def _is_device(path: str) -> bool:
    """Half a character, from an escape, is not printable and could not be sent to the kubelet."""
    return path.isprintable() and path.startswith("/dev/") and ".." not in path.split("/")
