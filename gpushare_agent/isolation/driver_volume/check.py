"""Whether a driver volume on disk would limit the containers that mount it. State owned: none."""

from __future__ import annotations

from pathlib import Path

from gpushare_agent.isolation.driver_volume.plan import LIBCUDA
from gpushare_agent.isolation.driver_volume.values import (
    CONTROL_LIBRARY_NAME,
    GPU_CLIENT_NAME,
    DriverVolume,
    VolumeName,
)
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import Unavailable

_CHECK_TIMEOUT_S = 5.0


def loaded_libcuda(volume: DriverVolume) -> Path | None:
    """The file that a 64-bit program in the container loads; None where there is none."""
    try:
        return (volume.directory / "lib64" / f"{LIBCUDA}.1").resolve(strict=True)
    except (OSError, RuntimeError):  # not there, or links that go in a circle
        return None


def has_gpu_client(volume: DriverVolume) -> bool:
    """Whether the control library finds the program that it runs at each start of a CUDA program."""
    return (volume.directory / "bin" / GPU_CLIENT_NAME).is_file()


class SharedVolumeCheck:
    """Whether containers with a share get the control library and gpu-client from this volume.

    None: volume.conf names none.
    """

    def __init__(self, volume: DriverVolume | None) -> None:
        self._volume = volume
        self._thread = DaemonThread("driver-volume-check", advice="Check the disk of the driver volume.")

    async def check(self) -> None:
        """Raises Unavailable with the cure."""
        await self._thread.call(self._check, "reading the driver volume", _CHECK_TIMEOUT_S)

    def _check(self) -> None:
        if self._volume is None:
            raise Unavailable(
                f"volume.conf is not set or names no volume {VolumeName.SHARED}, so containers would get the driver without "
                "the control library and use their GPUs wholly. Set volume_config (docs/how-to/driver-volume.md) and run "
                "`gpushare-agent driver-volume`, or choose isolation none"
            )
        libcuda = loaded_libcuda(self._volume)
        if libcuda is None or libcuda.name != CONTROL_LIBRARY_NAME:
            found = f"is {libcuda.name}" if libcuda is not None else "is missing"
            raise Unavailable(
                f"{self._volume.directory}/lib64/{LIBCUDA}.1 {found} and should be {CONTROL_LIBRARY_NAME}: nothing would "
                "limit a container. Run `gpushare-agent driver-volume` on this node (as the agent's init container does)"
            )
        if not has_gpu_client(self._volume):
            raise Unavailable(
                f"{self._volume.directory}/bin/{GPU_CLIENT_NAME} is missing: the control library would end every CUDA "
                "program. Run `gpushare-agent driver-volume` on this node (as the agent's init container does)"
            )
