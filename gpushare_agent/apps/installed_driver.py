"""The driver version of an installed driver volume, read from its names alone: for the agent, which installs nothing."""

from __future__ import annotations

from gpushare_agent.decisions.driver_volume import driver_version
from gpushare_agent.model.driver_volumes import DriverVolume


def installed_driver_version(volume: DriverVolume) -> tuple[int, ...] | None:
    """The driver version of the volume in force; None if there is none, or its libcuda's name does not tell."""
    try:
        names = [path.name for path in (volume.directory / "lib64").iterdir()]
    except OSError:
        return None
    return max((version for name in names if (version := driver_version(name)) is not None), default=None)
