"""Isolation vcuda on a node: the driver volume that its vDevice directories are of use with."""

from __future__ import annotations

from pathlib import Path

import structlog

from gpushare_agent.agent.delivery.volume_config import driver_volumes
from gpushare_agent.agent.delivery.volume_plan import (
    CONTROL_LIBRARY_NAME,
    GPU_CLIENT_NAME,
    LIBCUDA,
    DriverVolume,
    VolumeName,
)
from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)


class VcudaPart(IsolationPart):
    def __init__(self, host: IsolationHost) -> None:
        self._host = host
        self._shared = SharedVolumeCheck(host.volumes.get(VolumeName.SHARED))

    async def check(self) -> None:
        # Simulated GPUs have no driver to mount.
        if self._host.node.settings.driver == "nvml":
            await self._shared.check()

    async def log_contradictions(self) -> None:
        try:
            setting = self._host.node.settings.runtime.cgroup_driver
            difference = await self._host.cgroups.check_driver_in_thread(setting)
        except Unavailable as e:
            # A cgroup root that cannot be read is no reason to refuse shares: the log says it.
            difference = str(e)
        if difference:
            log.warning("cgroup_driver_differs", detail=difference)


build = VcudaPart


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    shared = SharedVolumeCheck(driver_volumes(settings, is_mounted=True).get(VolumeName.SHARED))
    standing = Standing(place=40, because="its control library is installed")
    return NodeProbe(check=shared.check, standing=standing, pods=VDeviceFiles(settings.virtual_manager.path).pod_names)


_CHECK_TIMEOUT_S = 5.0


def loaded_libcuda(volume: DriverVolume) -> Path | None:
    """The file that a 64-bit program in the container loads; None where there is none."""
    try:
        return (volume.directory / "lib64" / f"{LIBCUDA}.1").resolve(strict=True)
    except (OSError, RuntimeError):  # not there, or links that go in a circle
        return None


def missing_control(volume: DriverVolume) -> str | None:
    """Why no container with this volume would get its share; None if one would. Blocks."""
    libcuda = loaded_libcuda(volume)
    if libcuda is None or libcuda.name != CONTROL_LIBRARY_NAME:
        found = f"is {libcuda.name}" if libcuda is not None else "is missing"
        path = volume.directory / "lib64" / f"{LIBCUDA}.1"
        return f"{path} {found} and should be {CONTROL_LIBRARY_NAME}: nothing would limit a container"
    program = volume.directory / "bin" / GPU_CLIENT_NAME
    if not program.is_file():  # the control library runs it at each start of a CUDA program
        return f"{program} is missing: the control library would end every CUDA program"
    return None


class SharedVolumeCheck:
    """Whether containers with a share get the control library and gpu-client from this volume.

    None: volume.conf names none.
    """

    def __init__(self, volume: DriverVolume | None) -> None:
        self._volume = volume
        self._thread = DaemonThread("driver-volume-check", advice="Check the disk of the driver directory.")

    async def check(self) -> None:
        """Raises Unavailable with the remedy."""
        await self._thread.call(self._check, "reading the driver directory", _CHECK_TIMEOUT_S)

    def _check(self) -> None:
        if self._volume is None:
            raise Unavailable(
                f"volume.conf is not set or names no volume {VolumeName.SHARED}, so containers would get the driver without "
                "the control library and use their whole GPUs. Set volume_config (docs/how-to/driver-volume.md) and run "
                "`gpushare-agent driver-volume`, or choose isolation none"
            )
        if missing := missing_control(self._volume):
            raise Unavailable(
                f"{missing}. Run `gpushare-agent driver-volume` on this node (as the agent's init container does)"
            )
