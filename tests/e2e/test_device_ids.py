"""Device IDs are short, for kubelets from 1.36 on write each into the pod's status. Those of earlier builds count on."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster, KubectlError, Object
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
    assert f"has {_size(entries)} bytes of device IDs" in _check(installed)
    memory = sum(gpu["memory"]["capacity_bytes"] for gpu in installed.view()["gpus"]) >> 20
    block = next(size for size in (1 << exponent for exponent in range(16, -1, -1)) if memory // size * 48 > 2**19)
    assert "bytes of device IDs, more than 524288" in _check(installed, f"--resources.memory-block-mib={block}")


def _check(installed: Installation, *arguments: str) -> str:
    try:
        return installed.exec("gpushare-agent", "check", *arguments, timeout_s=120)
    except KubectlError as error:  # of other findings: the text is the same
        return str(error)


@pytest.fixture
def image_before(request: pytest.FixtureRequest) -> str:
    image = request.config.getoption("--image-before")
    if image is None:
        pytest.skip("--image-before names no image of a build with long device IDs")
    return str(image)


@pytest.fixture
def before(installation: Installation, image_before: str) -> Installation:
    """The earlier build is installed."""
    installation.install(image=image_before)
    return installation


def _allocated(cluster: Cluster, installed: Installation, namespace: str) -> dict[str, Counter[str]]:
    """resource -> units of each GPU that living pods have by the kubelet's records: none over what a GPU has."""
    pods = cluster.pods(namespace).values()
    records = installed.kubelet_records(pod for pod in pods if pod["status"]["phase"] != "Failed")
    found = {
        resource: Counter(gpu for pod in records.values() for gpu in pod.get(resource, ()))
        for resource in (CORE, MEMORY)
    }
    assert all(number <= 100 for number in found[CORE].values()), found
    return found


def test_an_upgrade_keeps_what_pods_hold_under_long_ids(cluster: Cluster, before: Installation, namespace: str) -> None:
    """On a full node: the containers run on, nothing more fits, and what they leave is given out again under short IDs."""
    number = before.gpus()
    names = [f"whole-{index}" for index in range(number - 1)]
    cluster.start(
        namespace,
        *(cluster.pod(name, 100) for name in names),
        *(cluster.pod(f"share-{index}", 50, 8) for index in range(2)),
    )
    ledger = before.wait_ledger(namespace, number + 1)
    containers = _container_ids(cluster, namespace)
    before.change()
    assert before.wait_ledger(namespace, number + 1) == ledger
    assert _container_ids(cluster, namespace) == containers
    assert _allocated(cluster, before, namespace)[CORE].total() == 100 * number
    forced = cluster.pod("more", 10, 1)
    forced["spec"]["nodeName"] = cluster.node
    cluster.apply(forced, namespace=namespace)
    cluster.wait_phase(namespace, "more", phase="Failed")
    cluster.run("delete", "pod", "-n", namespace, "more", "share-0", names[0])
    cluster.start(namespace, cluster.pod("next", 100), cluster.pod("next-share", 50, 8))
    assert _allocated(cluster, before, namespace)[CORE].total() == 100 * number
    cluster.delete_pods(namespace)
    cluster.start(namespace, *(cluster.pod(name, 100) for name in (*names, "last")))
    assert _allocated(cluster, before, namespace)[CORE] == dict.fromkeys(
        (gpu["uuid"] for gpu in before.view()["gpus"]), 100
    )


def _container_ids(cluster: Cluster, namespace: str) -> set[str]:
    return {pod["status"]["containerStatuses"][0]["containerID"] for pod in cluster.pods(namespace).values()}


def test_an_upgrade_in_a_burst_gives_nothing_out_twice(cluster: Cluster, before: Installation, namespace: str) -> None:
    """The build with long IDs knows no handover: its end disconnects its successor, and pods are rejected at that moment."""
    names = [f"burst-{index}" for index in range(30)]
    cluster.apply(*(cluster.pod(name, 5, 2) for name in names[:15]), namespace=namespace)
    before.start_change()
    cluster.apply(*(cluster.pod(name, 5, 2) for name in names[15:]), namespace=namespace)
    before.wait_ready()

    def phases() -> dict[str, str]:
        return {name: pod["status"]["phase"] for name, pod in cluster.pods(namespace).items()}

    cluster.wait_for("the end of the earlier agent", lambda: len(before.agents()) == 1)
    cluster.wait_for("all of them run or are rejected", lambda: "Pending" not in phases().values())
    running = [name for name, phase in phases().items() if phase == "Running"]
    before.wait_ledger(namespace, len(running))
    assert _allocated(cluster, before, namespace)[CORE].total() == 5 * len(running)


def test_on_a_drained_node_the_earlier_build_comes_back(
    cluster: Cluster, before: Installation, image_before: str, namespace: str
) -> None:
    """As docs/how-to/upgrade.md has it; nothing that the later one wrote is in its way."""
    before.change()
    cluster.start(namespace, cluster.pod("later", 40, 8))
    cluster.delete_pods(namespace)
    before.change(image=image_before)
    cluster.start(namespace, cluster.pod("earlier", 40, 8))
    before.wait_ledger(namespace, 1)
