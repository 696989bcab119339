"""Settings per node: the node's label is switched during a burst of pods."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from tests.e2e.cluster import Cluster, Object, manifest, message_of
from tests.e2e.installation import CHECKPOINT, SYSTEM, Installation

PODS = 50
LABEL = "gpushare-agent/config"
RESOURCE = "nvidia.com/gpu"
pytestmark = pytest.mark.e2e


def _configuration(replicas: int) -> str:
    return json.dumps({"nvidia": {"enabled": True, "replicas": [f"*={replicas}"]}})


@pytest.fixture
def configured(cluster: Cluster, installation: Installation) -> Iterator[Installation]:
    """Three configurations, 16 replicas of each GPU, 8 and whole GPUs, and the node has the first."""
    installation.remove()
    files = {
        "sixteen": _configuration(16),
        "eight": _configuration(8),
        "whole": json.dumps({"nvidia": {"enabled": True}}),
        "broken": "nvidia: {enabled: perhaps}",
    }
    cluster.run("label", "node", cluster.node, f"{LABEL}=sixteen", "--overwrite")
    cluster.apply(manifest("v1", "Namespace", SYSTEM))
    cluster.apply(manifest("v1", "ConfigMap", "gpushare-agent-nodes", data=files), namespace=SYSTEM)
    installation.install(components=["components/node-configuration"])
    yield installation
    installation.remove()
    cluster.run("label", "node", cluster.node, f"{LABEL}-")


def _wait_offered(cluster: Cluster, number: int) -> None:
    cluster.wait_for(
        f"{number} of {RESOURCE}", lambda: cluster.node_object()["status"]["capacity"].get(RESOURCE) == str(number)
    )


def _gpus(installation: Installation) -> int:
    """By the agent: the node's status may still say what was left of them a test before."""
    return len(installation.view()["gpus"])


def _pod(cluster: Cluster, name: str) -> Object:
    container = cluster.container()
    container["resources"] = {"limits": {RESOURCE: "1"}}
    return cluster.pod_of(name, container)


def _units(installation: Installation, pods: dict[str, Object]) -> dict[str, str]:
    """The pod's device ID, `8f3e2b1c-2/16`, by the kubelet's checkpoint."""
    names = {pod["metadata"]["uid"]: name for name, pod in pods.items()}
    entries = json.loads(installation.exec("cat", CHECKPOINT))["Data"]["PodDeviceEntries"]
    found = [entry for entry in entries if entry["PodUID"] in names and entry["ResourceName"] == RESOURCE]
    return {names[entry["PodUID"]]: ids[0] for entry in found for ids in entry["DeviceIDs"].values()}


def test_the_nodes_label_is_switched_during_a_burst_and_no_pod_is_rejected(
    cluster: Cluster, configured: Installation, namespace: str
) -> None:
    """Each pod is on the terms of its time, no GPU is given twice, nothing registers anew. A configuration that cannot be
    used changes nothing, and an Event on the Node says so."""
    gpus, registered = _gpus(configured), configured.metric("gpushare_registrations_total")
    _wait_offered(cluster, 16 * gpus)
    names = [f"burst-{number}" for number in range(PODS)]
    cluster.apply(*(_pod(cluster, name) for name in names[: PODS // 2]), namespace=namespace)
    cluster.wait_for(
        "the first is admitted", lambda: any(pod["status"].get("startTime") for pod in cluster.pods(namespace).values())
    )
    cluster.run("label", "node", cluster.node, f"{LABEL}=eight", "--overwrite")
    cluster.apply(*(_pod(cluster, name) for name in names[PODS // 2 :]), namespace=namespace)
    cluster.wait_for(
        "all of them admitted or rejected",
        lambda: "Pending" not in cluster.phases(namespace),
        deadline_s=600,
    )
    pods = cluster.pods(namespace)
    assert not {name: message_of(pod) for name, pod in pods.items() if pod["status"]["phase"] == "Failed"}

    units = _units(configured, pods)
    decided = [one["pod"] for one in configured.view("decisions")["decisions"] if one["namespace"] == namespace][::-1]
    terms = [int(units[name].rpartition("/")[2]) for name in decided]
    assert len(terms) == PODS and set(terms) == {16, 8}
    assert terms == sorted(terms, reverse=True), "a pod on the terms of before, after one on the new terms"
    used: Counter[str] = Counter()
    for unit in units.values():
        used[unit.partition("-")[0]] += Fraction(1, int(unit.rpartition("/")[2]))  # type: ignore[assignment]
    assert max(used.values()) <= 1
    assert configured.metric("gpushare_registrations_total") == registered

    cluster.run("label", "node", cluster.node, f"{LABEL}=broken", "--overwrite")
    cluster.wait_for(
        "an Event on the Node",
        lambda: cluster.items("events", "-n", "default", "--field-selector", "reason=NodeConfigurationRefused"),
    )
    assert configured.metric("gpushare_node_configuration_refused") == 1
    cluster.start(namespace, _pod(cluster, "after"))
    assert _units(configured, cluster.pods(namespace))["after"].endswith("/8")


def test_a_switch_to_fewer_units_rejects_no_pod_where_the_node_is_cordoned_for_it(
    cluster: Cluster, configured: Installation, namespace: str
) -> None:
    """As docs/how-to/configure-single-nodes.md has it: else the scheduler binds more pods than the kubelet takes. A replica
    stays in use, so its GPU is no whole one."""
    gpus = _gpus(configured)
    _wait_offered(cluster, 16 * gpus)
    cluster.start(namespace, _pod(cluster, "before"))
    taints = cluster.node_object()["spec"].get("taints", [])
    burst = [_pod(cluster, f"burst-{number}") for number in range(2 * gpus)]
    for pod in burst:  # those of the other tests tolerate a cordon
        pod["spec"]["tolerations"] = [{"key": taint["key"], "operator": "Exists"} for taint in taints]
    cluster.run("cordon", cluster.node)
    try:
        cluster.run("label", "node", cluster.node, f"{LABEL}=whole", "--overwrite")
        cluster.apply(*burst, namespace=namespace)
        cluster.wait_for(
            "whole GPUs, and the replica that is in use",
            lambda: cluster.node_object()["status"]["allocatable"].get(RESOURCE) == str(gpus),
        )
    finally:
        cluster.run("uncordon", cluster.node)

    cluster.wait_for("each whole GPU is in use", lambda: cluster.phases(namespace).count("Running") >= gpus)
    assert Counter(cluster.phases(namespace)) == {"Running": gpus, "Pending": gpus + 1}
