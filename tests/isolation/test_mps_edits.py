"""What a container gets under isolation mps, computed from its own share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation import GpuShare, IsolationConfig
from gpushare_agent.agent.isolation.mps.edits import edit_mps
from gpushare_agent.core.model.allocations import ContainerEdits, ContainerMount
from gpushare_agent.core.model.errors import RefusalReason, Refused
from tests.isolation.support_requests import GPUS, MPS, request
from tests.support_core import isolation_config

MOUNTS = (
    ContainerMount(host_path="/root/nvidia-mps", container_path="/root/nvidia-mps", read_only=False),
    ContainerMount(host_path="/dev/shm", container_path="/dev/shm", read_only=False),
)


def env_of(cores: int = 30, memory_mib: int = 6144, **changes: Any) -> dict[str, str]:
    found = edit_mps(request(cores, memory_mib, **changes))
    assert isinstance(found, ContainerEdits)
    return dict(found.env)


def with_settings(**changes: object) -> IsolationConfig:
    return isolation_config(mps=MPS.model_copy(update=changes))


@pytest.mark.parametrize(("core_limit", "percentage"), [(0, "30"), (60, "60"), (100, "100"), (20, "30"), (250, "100")])
def test_an_elastic_ceiling_raises_the_percentage(core_limit: int, percentage: str) -> None:
    """A bound of MPS is fixed at a process's start, so it cannot follow the load; it never falls below the cores."""
    assert env_of(core_limit=core_limit)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage


@pytest.mark.parametrize(
    ("memory_mib", "percentage"), [(6144, "25"), (24576, "100"), (1, "1"), (245, "1"), (8191, "33")]
)
def test_memory_alone_gives_the_same_part_of_the_compute(memory_mib: int, percentage: str) -> None:
    """100 times asked by GPU, rounded down, but never to zero, which would be no bound."""
    assert env_of(cores=0, memory_mib=memory_mib)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage


def test_gpushares_variables_count_in_the_nodes_unit_and_at_least_one() -> None:
    """Programs divide CONTAINER by DEV. The GPU is named by its index."""
    found = env_of(memory_mib=256, pod_memory_mib=256)
    assert (found["ALIYUN_COM_GPU_MEM_CONTAINER"], found["ALIYUN_COM_GPU_MEM_POD"]) == ("1", "1")
    found = env_of(memory_unit_mib=1, gpus=GPUS[1:2], pod_memory_mib=8192)
    names = ("CONTAINER", "DEV", "IDX", "POD")
    assert [found[f"ALIYUN_COM_GPU_MEM_{name}"] for name in names] == ["6144", "24576", "1", "8192"]


def test_whole_gpus_in_exclusive_mode_go_through_the_daemon_without_limits() -> None:
    """There only the MPS server may hold a GPU."""
    found = edit_mps(request(200, 0, is_whole=True, gpus=GPUS[:2], config=with_settings(exclusive_process=True)))
    env = (("CUDA_MPS_PIPE_DIRECTORY", "/root/nvidia-mps"), ("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1"))
    assert found == ContainerEdits(env=env, mounts=MOUNTS)


def test_shares_of_several_gpus_have_a_limit_each_and_the_least_percentage() -> None:
    """By a claim: MPS has one percentage for all GPUs of a process."""
    shares = (GpuShare(gpu=GPUS[0], cores=40, memory_mib=2048), GpuShare(gpu=GPUS[1], cores=25, memory_mib=6144))
    found = edit_mps(request(shares=shares))
    assert isinstance(found, ContainerEdits)
    assert dict(found.env) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M,1=6144M",
        "CUDA_MPS_PIPE_DIRECTORY": "/root/nvidia-mps",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_mib": 0}, "asks for no memory"),
        ({"cores": 0, "memory_mib": 0}, "asks for no memory"),
        ({"memory_mib": 24577}, "24577 MiB, and GPU 0 has 24576 MiB"),
        ({"gpus": (replace(GPUS[0], memory_mib=0),)}, "GPU 0 has 0 MiB"),
        ({"gpus": ()}, "names no GPU"),
        ({"cores": -1}, "-1 cores"),
        ({"cores": 101}, "101 cores"),
        ({"config": with_settings(pipe_directory=Path("nvidia-mps"))}, "absolute"),
        ({"config": with_settings(shm_directory=Path("shm"))}, "absolute"),
    ],
)
def test_what_mps_cannot_keep_is_refused(changes: dict[str, Any], words: str) -> None:
    """A limit of zero would be no limit; the text names the container and what was wrong."""
    found = edit_mps(request(**changes))
    assert isinstance(found, Refused) and found.reason is RefusalReason.INVALID_REQUEST
    assert words in found.detail and "container" in found.detail
