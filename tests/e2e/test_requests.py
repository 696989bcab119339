"""What a pod asks for is what it gets, or the refusal says why."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e
BLOCK = 256 * 1024 * 1024


@pytest.mark.smoke
def test_a_share_runs_on_one_gpu(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """The kubelet's records, the agent's ledger and the pod's annotations name the same GPU and the same amounts."""
    cluster.start(namespace, cluster.pod("share", 40, 8))
    ledger = installed.wait_ledger(namespace, 1)
    (core, memory, gpus) = ledger[f"{namespace}/share/main"]
    assert (core, memory, len(gpus)) == (40, 8 * BLOCK, 1)
    pod = cluster.pods(namespace)["share"]
    (records,) = installed.kubelet_records({pod["metadata"]["uid"]}).values()
    uuid = installed.view()["cards"][gpus[0]]["uuid"]
    assert records[CORE] == [uuid] * 40
    assert len(records[MEMORY]) == 8

    def annotated() -> bool:
        found = cluster.pods(namespace)["share"]["metadata"].get("annotations", {})
        return found.get("tencent.com/predicate-gpu-idx-0") == str(gpus[0])

    cluster.wait_for("the pod's annotation names its GPU", annotated)
