"""NVIDIA's GpuConfig and MigDeviceConfig: what is read of it, and with which words the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.core.claims.gpu_config import MpsLimits, ShareConfig, read_gpu_config
from gpushare_agent.core.model.errors import Corrupt
from tests.support_json import undecoded


def read(sharing: object = None, **changes: Any) -> ShareConfig:
    raw = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **changes}
    config, of_instances = read_gpu_config(undecoded(raw if sharing is None else {**raw, "sharing": sharing}))
    assert of_instances is (raw["kind"] == "MigDeviceConfig")
    return config


def test_what_is_read() -> None:
    assert read() == ShareConfig()
    assert read({"strategy": "TimeSlicing"}) == ShareConfig(isolation="none")
    assert read({"strategy": "TimeSlicing"}, kind="MigDeviceConfig") == ShareConfig(isolation="none")
    assert read({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}) == ShareConfig(
        isolation="none"
    )
    assert read({"strategy": "MPS"}) == ShareConfig(isolation="mps", mps=MpsLimits())
    mps = {
        "defaultActiveThreadPercentage": 25,
        "defaultPinnedDeviceMemoryLimit": "1536Ki",
        "defaultPerDevicePinnedMemoryLimit": {"GPU-1": "2Gi", "0": 1048576},
        "multiUser": False,
    }
    expected = MpsLimits(thread_percentage=25, memory_mib=1, memory_mib_of=(("GPU-1", 2048), ("0", 1)))
    assert read({"strategy": "MPS", "mpsConfig": mps}) == ShareConfig(isolation="mps", mps=expected)


def test_a_limit_of_a_gpu_counts_before_that_of_all() -> None:
    uuids = ["GPU-b", "GPU-a"]
    limits = MpsLimits(memory_mib=1, memory_mib_of=(("0", 2),))
    assert [limits.memory_of(uuid, uuids) for uuid in uuids] == [1, 2], "places are in the order of the UUIDs"
    assert MpsLimits().memory_of("GPU-a", uuids) is None


@pytest.mark.parametrize(
    ("sharing", "changes", "words"),
    [
        (None, {"kind": "VfioDeviceConfig"}, "not passed through"),
        ({"strategy": "TimeSlicing", "mpsConfig": {}}, {"kind": "MigDeviceConfig"}, "MigDeviceConfig has"),
        (None, {"kind": "ComputeDomainChannelConfig"}, "compute domains"),
        (None, {"kind": ["GpuConfig"]}, "this driver reads resource.nvidia.com/v1beta1 GpuConfig"),
        (None, {"apiVersion": "resource.nvidia.com/v1"}, "this driver reads resource.nvidia.com/v1beta1 GpuConfig"),
        (None, {"unknown": 1}, "unknown"),
        ({}, {}, "strategy"),
        ({"strategy": "Other"}, {}, "Other"),
        ({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Eternal"}}, {}, "Eternal"),
        ({"strategy": "TimeSlicing", "mpsConfig": {}}, {}, "and an mpsConfig"),
        ({"strategy": "MPS", "timeSlicingConfig": {}}, {}, "and a timeSlicingConfig"),
        ({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 0}}, {}, ">= 1"),
        ({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "1023Ki"}}, {}, "below 1Mi"),
        ({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "much"}}, {}, "no Kubernetes quantity"),
        ({"strategy": "MPS", "mpsConfig": {"defaultPerDevicePinnedMemoryLimit": {"0": "0"}}}, {}, "below 1Mi"),
        ({"strategy": "MPS", "mpsConfig": {"multiUser": True}}, {}, "multiUser"),
    ],
)
def test_what_cannot_be_done_is_named(sharing: object, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Corrupt, match=words):
        read(sharing, **changes)
