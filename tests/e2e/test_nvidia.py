"""Pods that ask for nvidia.com/gpu as NVIDIA documents them, and a node that leaves NVIDIA's plugin while they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Object, manifest
from tests.e2e.installation import SYSTEM, Installation, with_variables
from tests.e2e.test_requests import assert_waits_while_it_asks_for_more_than_is_free

pytestmark = pytest.mark.e2e

GPU = "nvidia.com/gpu"
STAND_IN = Path(__file__).with_name("nvidia_plugin.py")
REPLICAS = """
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""
"""NVIDIA's example of time slicing."""
FAULTS = "/run/gpushare-agent/faults.json"
"""In the agent's container: gone with its pod."""


def asking(cluster: Cluster, name: str, number: int, resource: str = GPU) -> Object:
    """NVIDIA's example pod: a limit and nothing else of ours, which writes what it sees."""
    pod = cluster.pod(name)
    (container,) = pod["spec"]["containers"]
    container["resources"] = {"limits": {resource: number}}
    container["command"] = ["sh", "-c", f"echo $NVIDIA_VISIBLE_DEVICES; {container['command'][-1]}"]
    return pod


def visible(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """The GPUs that the container was started with."""
    return cluster.wait_for("the pod's log", lambda: cluster.run("logs", "-n", namespace, name).strip()).split(",")


def offered(cluster: Cluster, resource: str = GPU) -> int:
    return int(cluster.node_object()["status"]["allocatable"].get(resource, "0"))


def started(cluster: Cluster, namespace: str) -> dict[str, list[str]]:
    """pod -> when its containers started, and how often."""
    return {
        name: [f"{one['restartCount']} {one['state']}" for one in pod["status"]["containerStatuses"]]
        for name, pod in cluster.pods(namespace).items()
    }


def test_nvidias_example_pods(cluster: Cluster, installation: Installation, namespace: str) -> None:
    """One GPU, two GPUs, and shares beside them, unchanged; no GPU is given twice, and none is left over."""
    installation.install(components=["components/nvidia"])
    total = len(installation.view()["gpus"])
    # The node still shows what an earlier agent offered: other replicas are another number.
    cluster.wait_for("each GPU is offered once", lambda: offered(cluster) == total)
    cluster.start(namespace, asking(cluster, "one", 1), asking(cluster, "two", 2), cluster.pod("share", 30, 4))
    one, two = (visible(cluster, namespace, name) for name in ("one", "two"))
    assert len({*one, *two}) == 3 and all(gpu.startswith("GPU-") for gpu in one + two)
    (shared,) = installation.wait_ledger(namespace, 3)[f"{namespace}/share/main"][2]
    cards = {gpu["uuid"]: gpu["index"] for gpu in installation.view()["gpus"]}
    assert shared not in {cards[gpu] for gpu in one + two}
    cluster.wait_for("the GPU of the share is withheld", lambda: offered(cluster) == total - 1)


def test_hamis_case_of_overcommit_by_nvidias_name(cluster: Cluster, installation: Installation, namespace: str) -> None:
    installation.install(components=["components/nvidia"])
    total = len(installation.view()["gpus"])
    cluster.wait_for("each GPU is offered once", lambda: offered(cluster) == total)
    assert_waits_while_it_asks_for_more_than_is_free(cluster, installation, namespace, GPU, counted=GPU)


def test_nvidias_example_of_time_slicing(cluster: Cluster, installation: Installation, namespace: str) -> None:
    """The plugin's file as it is: four replicas of each GPU, by variables of its chart too."""
    installation.remove()
    cluster.apply(manifest("v1", "Namespace", SYSTEM))
    cluster.apply(manifest("v1", "ConfigMap", "nvidia-plugin-config", data={"config.yaml": REPLICAS}), namespace=SYSTEM)
    chart = with_variables({"FAIL_ON_INIT_ERROR": "true", "MPS_ROOT": "/run/nvidia/mps"})
    installation.apply(installation.kustomization(components=["components/nvidia-config"], patches=[chart]))
    gpus = len(installation.view()["gpus"])
    cluster.wait_for("four replicas of each GPU", lambda: offered(cluster) == 4 * gpus)
    cluster.start(namespace, *(asking(cluster, f"replica-{number}", 1) for number in range(6)))
    seen = [gpu for number in range(6) for gpu in visible(cluster, namespace, f"replica-{number}")]
    assert len(seen) == 6 and len(set(seen)) >= min(gpus, 2)
    shown = installation.exec("gpushare-agent", "config")
    assert "sharing.timeSlicing.resources.replicas" in shown and "nvidia.replicas=nvidia.com/gpu=4" in shown


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_node_is_moved_from_nvidias_plugin_while_pods_run(
    cluster: Cluster, installation: Installation, namespace: str, replicas: int
) -> None:
    """Their containers go on and keep their GPUs, which no new pod gets while they run, and gets after."""
    patches = [with_variables({"GPUSHARE_NVIDIA__REPLICAS": f"*={replicas}"})] if replicas > 1 else []
    installation.install(components=["components/nvidia"], patches=patches)
    gpus = [gpu["uuid"] for gpu in installation.view()["gpus"]]
    installation.remove()
    cluster.wait_for("the agent's resource is gone", lambda: not offered(cluster))
    run_stand_in(cluster, installation, namespace, replicas, gpus)
    cluster.wait_for("the plugin's resource", lambda: offered(cluster) == replicas * len(gpus))
    cluster.start(namespace, asking(cluster, "before-1", 1), asking(cluster, "before-2", 2 if replicas == 1 else 1))
    held = [gpu for name in ("before-1", "before-2") for gpu in visible(cluster, namespace, name)]
    cluster.run("delete", "pod", "nvidia-plugin", "-n", namespace, "--wait")
    running = started(cluster, namespace)

    installation.install(components=["components/nvidia"], patches=patches)
    installation.wait_ledger(namespace, 2)
    free = cluster.wait_for("what is left is offered", lambda: number_free(cluster, installation, replicas * len(gpus)))
    assert started(cluster, namespace) == running
    names = [f"after-{number}" for number in range(free - (3 if replicas == 1 else 2))]
    cluster.start(namespace, *(asking(cluster, name, 1) for name in names))
    seen = [gpu for name in names for gpu in visible(cluster, namespace, name)]
    both = held + seen
    assert len(both) == replicas * len(gpus) and all(both.count(gpu) == replicas for gpu in gpus)
    assert {name: one for name, one in started(cluster, namespace).items() if name in running} == running


def divide(installation: Installation, mig: dict[str, list[str]]) -> None:
    """Has simulated GPUs, by index, divided into instances of these profiles."""
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    installation.exec("python", "-c", program, FAULTS, json.dumps({"mig": mig}))


def test_mig_instances_are_given_and_followed(cluster: Cluster, installation: Installation, namespace: str) -> None:
    """Strategy mixed: each pod has an instance of the profile that it asks for. Instances that are made are offered, one
    that is removed is not, and pods of others run on. The node's labels follow, and are gone when they are switched off."""
    variables = {"GPUSHARE_NVIDIA__MIG_STRATEGY": "mixed", "GPUSHARE_SIMULATED__FAULTS": FAULTS}
    labelled = variables | {"GPUSHARE_NVIDIA__LABELS": "true"}
    installation.install(components=["components/nvidia"], patches=[with_variables(labelled)])
    gpus = len(installation.view()["gpus"])
    if gpus < 2:
        pytest.skip("the overlay has fewer than two simulated GPUs")
    divide(installation, {"0": ["1g.10gb", "1g.10gb", "2g.20gb"]})
    small, middle, large = (f"nvidia.com/mig-{profile}" for profile in ("1g.10gb", "2g.20gb", "3g.20gb"))
    cluster.wait_for("the instances", lambda: (offered(cluster, small), offered(cluster, middle)) == (2, 1))
    cluster.wait_for("the others are whole", lambda: offered(cluster) == gpus - 1)
    cluster.start(namespace, *(asking(cluster, name, 1, small) for name in ("small-1", "small-2")))
    seen = {one for name in ("small-1", "small-2") for one in visible(cluster, namespace, name)}

    def profile(uuid: str) -> str:
        return next(gpu["mig"]["profile"] for gpu in installation.view()["gpus"] if gpu["uuid"] == uuid)

    assert len(seen) == 2 and set(map(profile, seen)) == {"1g.10gb"}
    labels = cluster.wait_for("the labels", lambda: counted(cluster))
    assert labels == {f"{small}.count": "2", f"{middle}.count": "1", f"{GPU}.count": str(gpus)}

    running = started(cluster, namespace)
    divide(installation, {"0": ["1g.10gb", "1g.10gb"], "1": ["3g.20gb"]})
    cluster.wait_for("the new instance", lambda: (offered(cluster, large), offered(cluster, middle)) == (1, 0))
    cluster.start(namespace, asking(cluster, "large", 1, large))
    (given,) = visible(cluster, namespace, "large")
    assert installation.wait_ledger(namespace, 3)
    assert profile(given) == "3g.20gb"
    assert {name: one for name, one in started(cluster, namespace).items() if name in running} == running
    cluster.wait_for(
        "the labels follow", lambda: f"{large}.count" in counted(cluster) and f"{middle}.count" not in counted(cluster)
    )

    installation.change(components=["components/nvidia"], patches=[with_variables(variables)])
    cluster.wait_for("the labels are gone", lambda: not counted(cluster))


def counted(cluster: Cluster) -> dict[str, str]:
    """Labels of GPU Feature Discovery that say how many there are."""
    labels = cluster.node_object()["metadata"]["labels"]
    return {name: n for name, n in labels.items() if name.startswith("nvidia.com/") and name.endswith(".count")}


def number_free(cluster: Cluster, installation: Installation, total: int) -> int | None:
    found = offered(cluster)
    return found if found == total else None


def run_stand_in(cluster: Cluster, installation: Installation, namespace: str, replicas: int, gpus: list[str]) -> None:
    """In a pod of the agent's image, with the kubelet's directory."""
    source = manifest("v1", "ConfigMap", "stand-in", data={"p.py": STAND_IN.read_text()})
    container = {
        "name": "main", "image": installation.image, "imagePullPolicy": "IfNotPresent", "securityContext": {"runAsUser": 0},
        "command": ["/opt/gpushare-agent/bin/python", "/source/p.py", str(replicas), *gpus],
        "volumeMounts": [
            {"name": "source", "mountPath": "/source"}, {"name": "kubelet", "mountPath": "/var/lib/kubelet/device-plugins"},
        ],
    }  # fmt: skip
    volumes = [
        {"name": "source", "configMap": {"name": "stand-in"}},
        {"name": "kubelet", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}},
    ]
    cluster.apply(source, namespace=namespace)
    cluster.start(namespace, cluster.pod_of("nvidia-plugin", container, volumes=volumes))
