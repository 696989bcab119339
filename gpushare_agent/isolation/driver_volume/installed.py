"""The driver version of an installed driver volume, read from its names alone: for the agent, which installs nothing."""

from __future__ import annotations

from gpushare_agent.isolation.driver_volume.plan import driver_version, driver_version_text
from gpushare_agent.isolation.driver_volume.values import DriverVolume


def installed_driver_version(volume: DriverVolume) -> tuple[int, ...] | None:
    """The driver version of the volume in force; None if there is none, or its libcuda's name does not tell."""
    return max((version for name in _names(volume) if (version := driver_version(name)) is not None), default=None)


def installed_driver_text(volume: DriverVolume) -> str:
    """The same for a person, as the file's name writes it, such as 535.104.05; empty where it is not known."""
    return driver_version_text(_names(volume))


def _names(volume: DriverVolume) -> list[str]:
    try:
        return [path.name for path in (volume.directory / "lib64").iterdir()]
    except OSError:
        return []
