"""Reads volume.conf: which programs and libraries of the driver go into which volume.

The format is gpu-manager's, JSON, described in docs/how-to/driver-volume.md. A mistake is a StartupError that names the
place in the file: a misspelt key that was ignored would show as a missing library weeks later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert

from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.model.errors import StartupError, os_errors_as
from gpushare_agent.core.settings.settings import Settings

USUAL_CONFIG = Path("/etc/gpu-manager/volume.conf")
MAX_BYTES = 1024 * 1024

_FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9_+.-]{0,254}\Z")]
_Names = Annotated[list[_FileName], Meta(max_length=1000)]


class _Components(Struct, forbid_unknown_fields=True):
    libraries: _Names
    binaries: _Names = []


class _Volume(Struct, forbid_unknown_fields=True):
    name: VolumeName
    base: Annotated[str, Meta(pattern=r"^(/|[a-z0-9][a-z0-9._-]*\Z)", max_length=3000)]
    components: _Components
    mode: Literal["ro"] = "ro"  # by rw one container could change the driver of all


class _Document(Struct, forbid_unknown_fields=True):
    volume: Annotated[list[_Volume], Meta(min_length=1)]


def driver_volumes(settings: Settings, *, is_mounted: bool) -> Mapping[VolumeName, DriverVolume]:
    """Those of volume.conf, at its usual place without the setting; none where nothing mounts them, or no file is there.

    Raises:
        StartupError: volume.conf is wrong.
    """
    # The usual place counts on a node with GPUs alone: a simulated node on a developer's machine has no use for its driver.
    is_there = settings.volume_config is not None or (settings.driver == "nvml" and USUAL_CONFIG.exists())
    if not is_mounted or not is_there:
        return {}
    return {volume.name: volume for volume in configured_volumes(settings)}


def untouched_driver(settings: Settings) -> Path | None:
    """The directory of volume origin, which has the driver's own files. Raises StartupError as `read_volume_config`."""
    volumes = configured_volumes(settings)
    return next((volume.directory for volume in volumes if volume.name is VolumeName.ORIGIN), None)


def configured_volumes(settings: Settings) -> tuple[DriverVolume, ...]:
    """Those of volume.conf. Raises StartupError as `read_volume_config`."""
    path = settings.volume_config or USUAL_CONFIG
    # gpu-manager's flag for the containers' directories moves no driver: its mount of that stays where it is.
    return read_volume_config(path, USUAL_CONFIG.parent if path == USUAL_CONFIG else settings.host_directory)


def read_volume_config(path: Path, host_directory: Path = USUAL_CONFIG.parent) -> tuple[DriverVolume, ...]:
    """The volumes in the file's order; a base without / is in `host_directory`.

    Raises:
        StartupError: the file cannot be read, or something in it is not of the format.
    """
    with os_errors_as(
        StartupError, f"volume config {path} cannot be read", otherwise="give another with --volume-config"
    ):
        content = read_regular(path, MAX_BYTES, follow=True)
    try:
        return parse_volumes(json.loads(content.decode("utf-8"), object_pairs_hook=_unique), host_directory)
    except (ValidationError, ValueError, RecursionError) as e:
        raise StartupError(f"volume config {path}: {e}. No volume is changed; correct the file and run again") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys without a word.
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"a key is given twice among {', '.join(sorted(repr(key)[:40] for key in made))}")
    return made


def parse_volumes(raw: object, host_directory: Path = USUAL_CONFIG.parent) -> tuple[DriverVolume, ...]:
    """The volumes of a parsed volume.conf. Raises ValidationError, ValueError."""
    entries = convert(raw, _Document).volume
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("a volume is described twice - at `$.volume`")
    return tuple(
        DriverVolume(
            name=entry.name,
            base=host_directory / _base(entry.base, f"$.volume[{number}].base"),
            binaries=tuple(dict.fromkeys(entry.components.binaries)),
            libraries=tuple(dict.fromkeys(entry.components.libraries)),
        )
        for number, entry in enumerate(entries)
    )


def _base(text: str, place: str) -> Path:
    # Half a character of JSON (\ud800) cannot be a name in a file system.
    if not text.isprintable() or ".." in PurePosixPath(text).parts:
        raise ValueError(f"it may not hold .. or characters that no file name has - at `{place}`")
    if not text.strip("/"):
        raise ValueError(f"the root directory is not allowed; take one such as /etc/gpu-manager/vdriver - at `{place}`")
    return Path("/" + text.strip("/") if text.startswith("/") else text)
