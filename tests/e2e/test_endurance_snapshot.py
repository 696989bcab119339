"""What a snapshot of an endurance run calls wrong (endurance_snapshot.py): of a share by the plugins, and of a claim."""

from __future__ import annotations

from typing import Any

from tests.e2e.cluster import CORE, Object
from tests.e2e.endurance_snapshot import Snapshot


def pod(name: str, *uses: Object, **metadata: str) -> Object:
    containers = [{"name": f"main-{n}", "resources": {"claims": [use]} if use else {}} for n, use in enumerate(uses)]
    return {"metadata": {"uid": name, **metadata}, "spec": {"containers": containers}, "status": {"phase": "Running"}}


def entry(name: str, *devices: str) -> Object:
    return {"PodUID": name, "ResourceName": CORE, "DeviceIDs": {"0": list(devices)}}


def line(container: str, gpus: str) -> str:
    return f'[pod/{container}] {{"gpus": "{gpus}", "checks": 3, "wrong": []}}\n'


def snapshot(**changed: Any) -> Snapshot:
    """Nothing is wrong with it but what is `changed`."""
    results = [{"request": "a", "device": "gpu-1"}, {"request": "b", "device": "gpu-2"}]
    claim = {"status": {"allocation": {"devices": {"results": results}}, "reservedFor": [{"name": "claim"}]}}
    holder = {"namespace": "ns", "pod": "share", "container": "main-0", "gpus": [{"uuid": "GPU-0"}]}
    use = {"cores": {"capacity": 100, "allocated": 100}, "memory": {"capacity_bytes": 9, "allocated_bytes": 9}}
    values = {
        "namespace": "ns",
        "view": {"containers": [holder, holder | {"namespace": "other"}], "gpus": [{"uuid": "GPU-0", **use}]},
        "entries": [entry("share", "x-0", "x-1"), entry("ended", "x-0")],
        "claims": [claim],
        "pods": {
            "share": pod("share", {}),
            "claim": pod("claim", {"name": "gpu", "request": "a"}, {"name": "gpu", "request": "b"}),
            "ended": pod("ended", deletionTimestamp="2025-01-01T00:00:00Z"),
        },
        "logs": line("share/main-0", "GPU-0") + line("claim/main-0", "GPU-1") + line("claim/main-1", "GPU-2"),
        "uuids": {f"gpu-{index}": f"GPU-{index}" for index in range(3)},
    }
    return Snapshot(**values | changed)


def test_what_is_as_it_should_be() -> None:
    found = snapshot()
    assert (list(found.wrong()), list(found.over())) == ([], [])
    assert found.given() == {"share/main-0": {"GPU-0"}, "claim/main-0": {"GPU-1"}, "claim/main-1": {"GPU-2"}}
    assert found.said()["share/main-0"]["checks"] == 3


def test_a_container_that_sees_another_gpu_than_its_own() -> None:
    logs = line("share/main-0", "GPU-1") + line("claim/main-0", "GPU-1,GPU-2")
    assert list(snapshot(logs=logs).wrong()) == [
        "share/main-0 sees GPU-1, given is ['GPU-0']",
        "claim/main-0 sees GPU-1,GPU-2, given is ['GPU-1']",
    ]


def test_a_device_of_two_pods() -> None:
    entries = [entry("share", "x-0", "x-1"), entry("claim", "x-1")]
    assert list(snapshot(entries=entries).wrong()) == ["x-1 is of share and of claim"]


def test_a_gpu_over_its_capacity() -> None:
    use = {"cores": {"capacity": 100, "allocated": 101}, "memory": {"capacity_bytes": 9, "allocated_bytes": 10}}
    assert len(list(snapshot(view={"containers": [], "gpus": [{"uuid": "GPU-0", **use}]}).over())) == 2
