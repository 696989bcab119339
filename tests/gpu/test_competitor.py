"""What HAMi-core's containers have that the agent did not answer."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.competitor import HamiCore
from bench.gpu.container import PRELOAD_PATH
from bench.gpu.sandbox import PodShare


def test_a_container_has_the_library_its_limits_and_a_region_of_its_own(tmp_path: Path) -> None:
    competitor = HamiCore(tmp_path / "libvgpu.so", tmp_path / "own")
    answered = {"env": {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, "mounts": [], "devices": []}
    found = competitor.limit(PodShare(name="a", cores=30, memory_mib=2560), answered)
    limits = {name: found["env"][name] for name in ("CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_SM_LIMIT")}
    assert limits == {"CUDA_DEVICE_MEMORY_LIMIT_0": "2560m", "CUDA_DEVICE_SM_LIMIT": "30"}
    assert found["env"]["NVIDIA_VISIBLE_DEVICES"] == "GPU-1" and answered["mounts"] == []
    places = {mount["container_path"]: Path(mount["host_path"]) for mount in found["mounts"]}
    assert places[PRELOAD_PATH].read_text().strip() in places
    region = places[found["env"]["CUDA_DEVICE_MEMORY_SHARED_CACHE"]]
    assert region.stat().st_mode & 0o777 == 0o666
    region.write_text("of a program that has ended")
    competitor.limit(PodShare(name="a", cores=30, memory_mib=2560), answered)
    assert region.read_text() == ""
