"""HAMi-core, with which `gpushare` is compared; the agent has no such isolation. Its library is put into containers of a
sandbox under isolation `none`, with the variables that its own device plugin answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.container import PRELOAD_PATH
from bench.gpu.sandbox import PodShare

COMPETITOR = "hami-core"
LIBRARY_NAME = "libvgpu.so"
_DIRECTORY = "/usr/local/vgpu"
_CACHE = f"{_DIRECTORY}/cache/main.cache"


class HamiCore:
    """`directory` is for the preload file, and the region that each container's processes share."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._library = library
        self._directory = directory
        directory.mkdir(exist_ok=True)
        (directory / "ld.so.preload").write_text(f"{_DIRECTORY}/{LIBRARY_NAME}\n")

    def limit(self, share: PodShare, container: dict[str, Any]) -> dict[str, Any]:
        """The container with its library, and the limits of its share."""
        region = self._directory / f"{share.name}.cache"
        region.unlink(missing_ok=True)
        region.touch()
        region.chmod(0o666)
        limits = {
            "CUDA_DEVICE_MEMORY_LIMIT_0": f"{share.memory_mib}m",
            "CUDA_DEVICE_SM_LIMIT": str(share.cores),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": _CACHE,
            "LIBCUDA_LOG_LEVEL": "1",
        }
        mounts = [
            _mount(self._library, f"{_DIRECTORY}/{LIBRARY_NAME}"),
            _mount(self._directory / "ld.so.preload", PRELOAD_PATH),
            _mount(region, _CACHE, read_only=False),
        ]
        return {**container, "env": {**container["env"], **limits}, "mounts": [*container["mounts"], *mounts]}


def _mount(host_path: Path, container_path: str, *, read_only: bool = True) -> dict[str, Any]:
    return {"host_path": str(host_path), "container_path": container_path, "read_only": read_only}
