"""The probes of `gpushare-agent check` for isolation vcuda: those of the vDevice directories, and the driver that containers
get to see.

Without the control library instead of libcuda everything runs, and nothing limits a container to its share: these
findings show that before a pod does.
"""

from __future__ import annotations

import asyncio

from gpushare_agent.agent.delivery.host_libraries import plan_of
from gpushare_agent.agent.delivery.volume_config import USUAL_CONFIG, configured_volumes
from gpushare_agent.agent.delivery.volume_directory import installed_driver_text
from gpushare_agent.agent.delivery.volume_plan import (
    CONTROL_LIBRARY_NAME,
    DriverVolume,
    VolumeName,
)
from gpushare_agent.agent.isolation.check import CheckProbe, OpenDriver
from gpushare_agent.agent.isolation.vcuda.part import loaded_libcuda, missing_control
from gpushare_agent.agent.isolation.vdevice.check import vdevice_probes
from gpushare_agent.core.model.errors import AgentError, StartupError
from gpushare_agent.core.model.finding import Finding, error, ok, warning
from gpushare_agent.core.settings.settings import Settings

PLAN_TIMEOUT_S = 15.0
"""A driver that is not installed yet is searched in all of the host's libraries."""
_NOT_ENFORCED = "shares are refused: nothing would limit a container"
_INSTALL = (
    "run `gpushare-agent driver-volume` on this node (as the agent's init container does) after each driver update"
)


async def check_driver_directory(settings: Settings) -> list[Finding]:
    """What volume.conf names is installed, and the control library is in libcuda's place."""
    if settings.volume_config is None:
        return [_no_config(settings)]
    try:
        volumes = await asyncio.to_thread(configured_volumes, settings)
    except StartupError as failure:
        remedy = (
            "mount or repair the file (docs/how-to/driver-volume.md); it cannot be left out: without it "
            + _NOT_ENFORCED
        )
        return [error("driver directory", str(failure), remedy)]
    if settings.driver == "simulated":
        return [ok("driver directory", f"{settings.volume_config} is right; simulated GPUs need no driver files")]
    findings = [await asyncio.to_thread(_volume_finding, settings, volume) for volume in volumes]
    if VolumeName.SHARED not in {volume.name for volume in volumes}:
        detail = f"{settings.volume_config} has no volume {VolumeName.SHARED}: {_NOT_ENFORCED}"
        findings.append(
            warning("driver directory", detail, f"describe it there (docs/how-to/driver-volume.md); {_INSTALL}")
        )
    return findings


def _no_config(settings: Settings) -> Finding:
    if settings.driver == "simulated":
        return ok("driver directory", "not needed for simulated GPUs")
    is_there = USUAL_CONFIG.exists()
    detail = f"no volume.conf is set, so containers get no driver directory: {_NOT_ENFORCED}"
    remedy = f"set --volume-config={USUAL_CONFIG}" + (
        ", which is there" if is_there else " (docs/how-to/driver-volume.md)"
    )
    return warning("driver directory", detail, f"{remedy}; {_INSTALL}; isolation none says that it is meant so")


def _volume_finding(settings: Settings, volume: DriverVolume) -> Finding:
    what, name = "driver directory", f"volume {volume.name.value} at {volume.directory}"
    libcuda = loaded_libcuda(volume)
    if libcuda is None:
        return _not_installed(settings, volume, name)
    version = installed_driver_text(volume) or "of an unknown version"
    is_controlled = libcuda.name == CONTROL_LIBRARY_NAME
    if (is_controlled or volume.name is VolumeName.SHARED) and (missing := missing_control(volume)):
        return warning(what, f"{name}: {missing}, so shares are refused", _INSTALL)
    return ok(what, f"{name}: driver {version}" + (f", behind {CONTROL_LIBRARY_NAME}" if is_controlled else ""))


def _not_installed(settings: Settings, volume: DriverVolume, name: str) -> Finding:
    detail, remedy = f"{name}: not installed, containers would find no libcuda there", _INSTALL
    try:
        # Only to say whether the command would succeed from here.
        plan_of(settings, volume)
    except AgentError as failure:
        return warning(
            "driver directory", f"{detail}; nor can it be made from here: {failure}", f"repair that, then {remedy}"
        )
    return warning("driver directory", detail, remedy)


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    driver_directory = CheckProbe(name="driver directory", run=check_driver_directory, timeout_s=PLAN_TIMEOUT_S)
    return (*vdevice_probes(), driver_directory)
