"""gpu-manager's extra-config file: further device nodes for every container that gets a GPU.

Format: `{"default": {"devices": ["/dev/…"]}}` (docs/formats.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from gpushare_agent.model.errors import StartupError

log = structlog.get_logger(__name__)

MAX_BYTES = 1024 * 1024
MAX_DEVICES = 256


def read_extra_devices(path: Path | None) -> tuple[str, ...]:
    """The device nodes of the file, in its order; none without a file. Raises StartupError for a bad one."""
    if path is None:
        return ()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StartupError(
                f"extra config {path} is larger than {MAX_BYTES} bytes; it should list a few device nodes"
            )
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise StartupError(f"extra config {path} cannot be read: {e}. Mend it or leave out --extra-config") from e
    default = raw.get("default") if isinstance(raw, dict) else None
    devices = default.get("devices", []) if isinstance(default, dict) else None
    if not isinstance(devices, list) or len(devices) > MAX_DEVICES or not all(map(_is_device, devices)):
        raise StartupError(
            f'extra config {path} is not of the form {{"default": {{"devices": ["/dev/…"]}}}} with paths below /dev'
        )
    for device in devices:
        if not Path(device).exists():
            log.warning("extra_device_missing", device=device, then="containers that get it cannot start")
    return tuple(dict.fromkeys(devices))


def _is_device(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/dev/") and ".." not in value.split("/") and "\0" not in value
