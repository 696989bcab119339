"""A pod's annotations follow from the ledger, whatever happened to the agent."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e
INDEX = "tencent.com/predicate-gpu-idx-0"
ASSIGNED = "tencent.com/gpu-assigned"


def test_an_agent_that_starts_writes_what_the_last_one_did_not(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """A pod with an allocation and without its annotations gets them: as after an agent that died between the two."""
    cluster.start(namespace, cluster.pod("share", 40, 8))
    ((_, _, gpus),) = installed.wait_ledger(namespace, 1).values()

    def annotated() -> bool:
        found = cluster.pods(namespace)["share"]["metadata"].get("annotations", {})
        return (found.get(INDEX), found.get(ASSIGNED)) == (str(gpus[0]), "true")

    cluster.wait_for("the pod's annotations name its GPU", annotated)
    cluster.run("-n", namespace, "annotate", "pod", "share", f"{INDEX}-", f"{ASSIGNED}-")
    installed.signal()
    cluster.wait_for("they do again", annotated)
