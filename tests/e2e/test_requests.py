"""What a container asks for is what it gets, or the pod says why not."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster, Object, manifest, message_of
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e


def test_a_whole_gpu_is_shared_with_nobody(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """It comes with all its memory; a share goes to another GPU."""
    needs_gpus(installed, 2)
    cluster.start(namespace, cluster.pod("whole", 100), cluster.pod("share", 1, 1))
    ledger = installed.wait_ledger(namespace, 2)
    (whole,), (share,) = (ledger[f"{namespace}/{pod}/main"][2] for pod in ("whole", "share"))
    assert whole != share
    gpu = installed.view()["gpus"][whole]
    assert gpu["memory"]["allocated_bytes"] == gpu["memory"]["capacity_bytes"]


def test_two_whole_gpus_are_two(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """All units of both, by the kubelet's records."""
    needs_gpus(installed, 2)
    cluster.start(namespace, cluster.pod("pair", 200))
    (gpus,) = (one[2] for one in installed.wait_ledger(namespace, 1).values())
    assert len(set(gpus)) == 2
    (records,) = installed.kubelet_records([cluster.pods(namespace)["pair"]]).values()
    assert sorted(Counter(records[CORE]).values()) == [100, 100]


@pytest.mark.parametrize(
    ("core", "memory", "text"),
    [
        pytest.param(150, 0, "whole GPUs", id="a GPU and a half"),
        pytest.param(0, 1, "vcuda-core", id="memory without cores"),
        pytest.param(1, 0, "vcuda-memory", id="cores without memory"),
        pytest.param(1, None, "memory", id="more memory than a GPU has"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    cluster: Cluster, installed: Installation, namespace: str, core: int, memory: int | None, text: str
) -> None:
    """In the pod's status and in an Event, which both name the container. Nothing stays allocated."""
    needs_gpus(installed, 2)
    if memory is None:
        memory = installed.offered()[MEMORY] // installed.gpus() + 1
    cluster.apply(cluster.pod("invalid", core, memory), namespace=namespace)
    cluster.wait_phase(namespace, "invalid", phase="Failed")
    pod = cluster.pods(namespace)["invalid"]
    assert pod["status"]["reason"] == "UnexpectedAdmissionError"
    assert text in message_of(pod)
    assert f"pod {namespace}/invalid, container main" in message_of(pod)

    def reasons() -> set[str]:
        return {event["reason"] for event in cluster.items("events", "-n", namespace) if text in event["message"]}

    cluster.wait_for("the agent's Event beside the kubelet's", lambda: len(reasons()) == 2)
    assert not installed.wait_ledger(namespace, 0)


def test_a_limited_share_is_not_given_to_a_sandbox(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """By the handler of the pod's RuntimeClass and not by its name; a whole GPU is given."""
    needs_gpus(installed, 2)
    if installed.view()["agent"]["isolation"] == "none":
        pytest.skip("the isolation of the run's overlay limits nothing")
    handlers = {f"plain-{namespace}": "kata-e2e", f"kata-{namespace}": "runc"}
    cluster.apply(
        *(manifest("node.k8s.io/v1", "RuntimeClass", name, handler=handler) for name, handler in handlers.items())
    )
    try:
        sandboxed, misnamed = handlers
        pods = [
            cluster.pod("share", 1, 1, runtimeClassName=sandboxed),
            cluster.pod("whole", 100, runtimeClassName=sandboxed),
            cluster.pod("misnamed", 1, 1, runtimeClassName=misnamed),
        ]
        cluster.apply(*pods, namespace=namespace)
        cluster.wait_phase(namespace, "share", phase="Failed")
        assert "has the handler kata-e2e" in message_of(cluster.pods(namespace)["share"])
        assert set(installed.wait_ledger(namespace, 2)) == {f"{namespace}/{pod}/main" for pod in ("whole", "misnamed")}
    finally:
        cluster.delete_pods(namespace)
        cluster.run("delete", "runtimeclass", *handlers)


def test_hamis_case_of_overcommit(cluster: Cluster, installed: Installation, namespace: str) -> None:
    assert_waits_while_it_asks_for_more_than_is_free(cluster, installed, namespace, CORE, of_gpu=100, counted=CORE)


def assert_waits_while_it_asks_for_more_than_is_free(
    cluster: Cluster, installed: Installation, namespace: str, asked: str, *, of_gpu: int = 1, counted: str
) -> None:
    """HAMi's e2e case "create overcommit pods": a pod of three containers, of a GPU each, with two GPUs free. It is Pending,
    not refused, the scheduler's reason names the resource that is `counted`, and it starts when there are enough."""
    needs_gpus(installed, 3)
    gpus = len(installed.view()["gpus"])

    def container(name: str, number: int) -> Object:
        return cluster.container(name=name, resources={"limits": {asked: number * of_gpu}})

    cluster.start(namespace, cluster.pod_of("holder", container("main", gpus - 2)))
    cluster.apply(cluster.pod_of("more", *(container(f"c{index}", 1) for index in range(3))), namespace=namespace)

    def waits() -> bool:
        pod = cluster.pods(namespace)["more"]
        assert pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]
        return any(f"Insufficient {counted}" in one.get("message", "") for one in pod["status"].get("conditions", ()))

    cluster.wait_for("the scheduler's reason", waits)
    cluster.run("delete", "pod", "holder", "-n", namespace)
    cluster.wait_phase(namespace, "more")
    installed.wait_ledger(namespace, 3)


def test_an_init_container_alone_gives_its_share_back(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """The main container asks for none; the share is free for another pod once the init container has ended."""
    whole = installed.gpus() * 100
    pod = cluster.pod_of(
        "early", cluster.container(), initContainers=[cluster.container(whole, name="init", command="true")]
    )
    cluster.start(namespace, pod)
    assert f"{namespace}/early/main" not in installed.ledger()
    cluster.run("delete", "pod", "early", "-n", namespace)
    cluster.start(namespace, cluster.pod("next", whole))
    installed.wait_ledger(namespace, 1)


def needs_gpus(installed: Installation, number: int) -> None:
    if installed.gpus() < number:
        pytest.skip(f"needs {number} GPUs on the node, which has {installed.gpus()}")
