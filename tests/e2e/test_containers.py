"""Init containers and sidecars: the kubelet hands an init container's devices on to those after it, without a call."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import CORE, Cluster
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e


def test_init_containers_sidecars_and_main_containers_have_their_shares(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """All in one pod; the sidecar and one main container get devices that the init container had."""
    pod = cluster.pod_of(
        "mixed",
        cluster.container(20, 4, name="main"),
        cluster.container(10, 2, name="second"),
        initContainers=[
            cluster.container(20, 4, name="init", command="env"),
            cluster.container(10, 2, name="sidecar", restartPolicy="Always"),
        ],
    )
    cluster.start(namespace, pod)
    ledger = installed.wait_ledger(namespace, 3)
    assert {key.rsplit("/")[-1]: one[0] for key, one in ledger.items()} == {"main": 20, "second": 10, "sidecar": 10}
    seen = cluster.run("logs", "mixed", "-c", "init", "-n", namespace)
    assert cluster.runtime_class is not None or "NVIDIA_VISIBLE_DEVICES=GPU-" in seen
    (records,) = installed.kubelet_records([cluster.pods(namespace)["mixed"]]).values()
    assert len(set(records[CORE])) <= 2


def test_an_init_container_alone_gives_its_share_back(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """The main container asks for none; the init container's share is free for another pod once it has ended."""
    whole = installed.gpus() * 100
    pod = cluster.pod_of(
        "early", cluster.container(), initContainers=[cluster.container(whole, name="init", command="true")]
    )
    cluster.start(namespace, pod)
    assert f"{namespace}/early/main" not in installed.ledger()
    cluster.run("delete", "pod", "early", "-n", namespace)
    cluster.start(namespace, cluster.pod("next", whole))
    installed.wait_ledger(namespace, 1)


def test_a_container_that_dies_starts_again_with_its_share(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """The kubelet calls PreStartContainer alone, no Allocate."""
    crash = cluster.container(
        30, 4, command="env | grep NVIDIA_VISIBLE; [ -e /state/seen ] || { touch /state/seen; exit 1; }; sleep 3600"
    )
    crash["volumeMounts"] = [{"name": "state", "mountPath": "/state"}]
    cluster.apply(cluster.pod_of("crash", crash, volumes=[{"name": "state", "emptyDir": {}}]), namespace=namespace)

    def restarted() -> bool:
        (status,) = cluster.pods(namespace)["crash"]["status"].get("containerStatuses") or [{}]
        return status.get("restartCount") == 1 and "running" in status["state"]

    cluster.wait_for("the second start", restarted)
    before, after = (cluster.run("logs", "crash", "-n", namespace, *which) for which in (["--previous"], []))
    assert before == after
    assert [one[:1] for one in installed.wait_ledger(namespace, 1).values()] == [(30,)]
