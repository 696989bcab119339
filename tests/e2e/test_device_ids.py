"""Device IDs are short, for kubelets from 1.36 on write each into the pod's status."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster, Object
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e
SHORT_ID = re.compile(r"[0-9a-f]{8,}-[0-9]+")


def _entries(pod: Object) -> list[Object]:
    """What the kubelet wrote of the pod's devices."""
    return [
        device
        for container in pod["status"].get("containerStatuses", [])
        for resource in container.get("allocatedResourcesStatus", [])
        for device in resource["resources"]
    ]


def _size(entries: list[Object]) -> int:
    """As JSON, with the comma behind each."""
    return sum(len(json.dumps(entry, separators=(",", ":"))) + 1 for entry in entries)


def _start_with_entries(cluster: Cluster, namespace: str, pod: Object, number: int) -> list[Object]:
    """Skips where the kubelet writes none."""
    cluster.start(namespace, pod)
    name = pod["metadata"]["name"]
    version = cluster.node_object()["status"]["nodeInfo"]["kubeletVersion"]
    if tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < (1, 36):
        pytest.skip(f"kubelet {version} writes no device IDs into a pod's status")
    return cluster.wait_for(
        f"{number} device IDs in the pod's status",
        lambda: found if len(found := _entries(cluster.pods(namespace)[name])) == number else None,
    )


def test_a_share_adds_fifty_bytes_for_each_device_to_the_pods_status(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Each ID is the first digits of its GPU's UUID and a number."""
    entries = _start_with_entries(cluster, namespace, cluster.pod("share", 30, 40), 70)
    assert all(SHORT_ID.fullmatch(entry["resourceID"]) for entry in entries)
    assert _size(entries) <= 70 * 50


def test_the_metric_is_the_size_of_the_largest_pods_status(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Of a pod with all that the node offers; `check` shows the same number, and warns of small blocks."""
    offered = installed.offered()
    pod = cluster.pod("all", offered[CORE], offered[MEMORY])
    entries = _start_with_entries(cluster, namespace, pod, sum(offered.values()))
    assert _size(entries) == installed.metric("gpushare_pod_status_max_bytes")
    assert f"has {_size(entries)} bytes of device IDs" in installed.check()
    memory = sum(gpu["memory"]["capacity_bytes"] for gpu in installed.view()["gpus"]) >> 20
    block = next(size for size in (1 << exponent for exponent in range(16, -1, -1)) if memory // size * 48 > 2**19)
    assert "bytes of device IDs, more than 524288" in installed.check(f"--resources.memory-block-mib={block}")
