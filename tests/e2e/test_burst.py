"""Many pods at once: each is admitted, and no GPU has more than it can."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster, message_of
from tests.e2e.installation import Installation

PODS = 60
pytestmark = [pytest.mark.e2e, pytest.mark.smoke]


TOO_SLOW = "did not answer within"
"""Of the refusal where the kubelet does not answer in time: 1 or 2 of 60 pods at a load of 45 to 130 on two cores."""


def test_a_burst_of_pods_is_admitted_without_a_rejection(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Each runs; by the kubelet's own records no GPU is over its capacity, and the agent's ledger says the same."""
    number = min(PODS, cluster.free_pods() - 5)
    offered, gpus = installed.offered(), installed.gpus()
    # Three quarters of the node: amounts that divide a GPU, so that all of them fit.
    core, memory = max(1, 600 * gpus // 8 // number), max(1, offered[MEMORY] * 3 // 4 // number)
    names = [f"burst-{index}" for index in range(number)]
    cluster.apply(*(cluster.pod(name, core, memory) for name in names), namespace=namespace)
    cluster.wait_for(
        "all of them admitted or rejected", lambda: "Pending" not in cluster.phases(namespace), deadline_s=600
    )
    rejected = {
        name: message_of(pod) for name, pod in cluster.pods(namespace).items() if pod["status"]["phase"] == "Failed"
    }
    if rejected and all(TOO_SLOW in message for message in rejected.values()):
        pytest.skip(f"the node is too busy: {len(rejected)} rejected, for its kubelet did not answer the agent in time")
    assert not rejected
    cluster.wait_phase(namespace, *names, deadline_s=600)

    ledger = installed.wait_ledger(namespace, number)
    pods = cluster.pods(namespace)
    records = installed.kubelet_records(list(pods.values()))
    indexes = {gpu["uuid"]: gpu["index"] for gpu in installed.view()["gpus"]}
    used: Counter[str] = Counter()
    used_memory: Counter[str] = Counter()
    for name, pod in pods.items():
        found = records[pod["metadata"]["uid"]]
        (uuid,) = set(found[CORE])
        assert ledger[f"{namespace}/{name}/main"][2] == (indexes[uuid],)
        used[uuid] += len(found[CORE])
        used_memory[uuid] += len(found[MEMORY])
    assert used.total() == number * core
    assert max(used.values()) <= 100
    assert max(used_memory.values()) <= offered[MEMORY] // gpus
