"""Reads volume.conf: which programs and libraries of the driver go into which volume.

The format is gpu-manager's, JSON, described in docs/how-to/driver-volume.md. A mistake is a StartupError that names the
place in the file: a misspelt key that was ignored would show as a missing library weeks later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpushare_agent.isolation import isolations_in_use
from gpushare_agent.isolation.driver_volume.plan import DriverVolume, VolumeName
from gpushare_agent.kit.regular_file import read_regular
from gpushare_agent.model.errors import StartupError
from gpushare_agent.model.isolation import AUTO
from gpushare_agent.settings.settings import Settings

USUAL_CONFIG = Path("/etc/gpu-manager/volume.conf")
MAX_BYTES = 1024 * 1024
MAX_NAMES = 1000

_FILE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_+.-]{0,254}", re.ASCII)


class VolumeConfigError(Exception):
    """A mistake in volume.conf: where in the file, and what is wrong there."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason)


def driver_volumes(settings: Settings) -> Mapping[VolumeName, DriverVolume]:
    """Those of volume.conf, at its usual place without the setting; none where nothing mounts them, or no file is there.

    Raises:
        StartupError: volume.conf is wrong.
    """
    # `auto` may choose vcuda, which depends on whether there is a volume.
    if AUTO not in settings.isolations_in_use and not _are_mounted(settings):
        return {}
    # The usual place counts on a node with GPUs alone: a simulated node on a developer's machine has no use for its driver.
    if settings.volume_config is None and (settings.driver != "nvml" or not USUAL_CONFIG.exists()):
        return {}
    return {volume.name: volume for volume in read_volume_config(settings.volume_config or USUAL_CONFIG)}


def untouched_driver_directory(settings: Settings) -> Path | None:
    """The directory of volume origin, for a CDI spec; None where an isolation mounts a directory of its own choice.

    CDI's mount would take the place of the isolation's: a share under vcuda would get the libraries without limits.
    Raises StartupError where volume.conf is wrong.
    """
    if settings.volume_config is None or _are_mounted(settings):
        return None
    return untouched_driver(settings)


def untouched_driver(settings: Settings) -> Path | None:
    """The directory of volume origin, which has the driver's own files. Raises StartupError as `read_volume_config`."""
    volumes = read_volume_config(settings.volume_config or USUAL_CONFIG)
    return next((volume.directory for volume in volumes if volume.name is VolumeName.ORIGIN), None)


def _are_mounted(settings: Settings) -> bool:
    return settings.driver_volume.mount or any(isolation.mounts_driver for isolation in isolations_in_use(settings))


def read_volume_config(path: Path) -> tuple[DriverVolume, ...]:
    """The volumes in the file's order.

    Raises:
        StartupError: the file cannot be read, or something in it is not of the format.
    """
    try:
        content = read_regular(path, MAX_BYTES + 1, follow=True)
        if len(content) > MAX_BYTES:
            raise VolumeConfigError("", f"it is larger than {MAX_BYTES} bytes")
        return parse_volumes(json.loads(content.decode("utf-8"), object_pairs_hook=_unique))
    except OSError as e:
        raise StartupError(
            f"volume config {path} cannot be read: {e.strerror or e}. Give another place with --volume-config"
        ) from e
    except (VolumeConfigError, ValueError, RecursionError) as e:
        raise StartupError(f"volume config {path}: {e}. No volume is changed; correct the file and run again") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys without a word.
    made = dict(pairs)
    if len(made) < len(pairs):
        raise VolumeConfigError("", f"a key is given twice among {', '.join(sorted(repr(key)[:40] for key in made))}")
    return made


def parse_volumes(raw: object) -> tuple[DriverVolume, ...]:
    """The volumes of a parsed volume.conf. Raises VolumeConfigError."""
    entries = _list(_object(raw, "", {"volume"})["volume"], "volume")
    volumes = tuple(_volume(entry, f"volume[{number}]") for number, entry in enumerate(entries))
    names = [volume.name for volume in volumes]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise VolumeConfigError(f"volume[{number}].name", f"{name.value!r} is described twice")
    if not volumes:
        raise VolumeConfigError("volume", "it is empty, but there should be a volume nvidia or origin")
    return volumes


def _volume(raw: object, place: str) -> DriverVolume:
    entry = _object(raw, place, {"name", "base", "mode", "components"}, optional={"mode"})
    name, mode = entry["name"], entry.get("mode", "ro")
    if name not in list(VolumeName):
        raise VolumeConfigError(
            f"{place}.name", f"{_shown(name)} is no volume; there are nvidia (for shares) and origin"
        )
    # By rw one container could change the driver of all.
    if mode != "ro":
        raise VolumeConfigError(
            f"{place}.mode", f"{_shown(mode)} is not allowed: containers get the driver read-only, 'ro'"
        )
    components = _object(entry["components"], f"{place}.components", {"binaries", "libraries"}, optional={"binaries"})
    return DriverVolume(
        name=VolumeName(str(name)),
        base=_base(entry["base"], f"{place}.base"),
        binaries=_names(components.get("binaries", []), f"{place}.components.binaries"),
        libraries=_names(components["libraries"], f"{place}.components.libraries"),
    )


def _object(
    raw: object, place: str, keys: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise VolumeConfigError(place, f"{_shown(raw)} is no object with {', '.join(sorted(keys))}")
    # A misspelt key is an error: ignored, it would be a missing library in containers weeks later.
    for key in sorted(raw):
        if key not in keys:
            raise VolumeConfigError(
                f"{place}.{key[:80]}".lstrip("."), f"this key is unknown; there are {', '.join(sorted(keys))}"
            )
    for key in sorted(keys - optional):
        if key not in raw:
            raise VolumeConfigError(f"{place}.{key}".lstrip("."), "this key is missing")
    return raw


def _list(raw: object, place: str) -> list[Any]:
    if not isinstance(raw, list):
        raise VolumeConfigError(place, f"{_shown(raw)} is no list")
    if len(raw) > MAX_NAMES:
        raise VolumeConfigError(place, f"it has {len(raw)} entries, and may have {MAX_NAMES}")
    return raw


def _names(raw: object, place: str) -> tuple[str, ...]:
    for number, name in enumerate(_list(raw, place)):
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise VolumeConfigError(
                f"{place}[{number}]", f"{_shown(name)} is no file name, as nvidia-smi or libcuda.so is"
            )
    return tuple(dict.fromkeys(raw if isinstance(raw, list) else ()))


def _base(raw: object, place: str) -> Path:
    if not isinstance(raw, str) or not raw.startswith("/") or len(raw.encode(errors="replace")) > 3000:
        raise VolumeConfigError(place, f"{_shown(raw)} is no absolute path")
    # Half a character of JSON (\ud800) cannot be a name in a file system.
    if "\0" in raw or ".." in PurePosixPath(raw).parts or any(0xD800 <= ord(character) <= 0xDFFF for character in raw):
        raise VolumeConfigError(place, f"{_shown(raw)} may not hold .. or characters that no file name has")
    if not raw.strip("/"):
        raise VolumeConfigError(place, "the root directory is not allowed; take one such as /etc/gpu-manager/vdriver")
    return Path("/" + raw.strip("/"))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
