"""The agent is killed while pods start. The kubelet rejects pods until it is back: what controllers lose is replaced."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e
REPLICAS = 20


UNCOMPILED = """
import os, sys, gpushare_agent.agent.program
found = [one.__spec__.cached for one in sys.modules.values() if getattr(one, "__spec__", None) and one.__spec__.cached]
print(*(one for one in found if not os.path.exists(one)))
"""


def test_a_start_compiles_nothing(installed: Installation) -> None:
    """The image has the bytecode of every module: without that of Python's own library a start takes twice as long."""
    assert installed.exec("python", "-c", UNCOMPILED).split() == []


SPECS = {
    "Deployment": {"replicas": REPLICAS},
    "StatefulSet": {"replicas": REPLICAS, "serviceName": "work", "podManagementPolicy": "Parallel"},
    "Job": {"completions": REPLICAS, "parallelism": REPLICAS, "backoffLimit": 1000},
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_controllers_pods_are_replaced_after_the_agent_was_killed(
    cluster: Cluster, installed: Installation, namespace: str, kind: str
) -> None:
    """All are there in the end, each with its share once; rejected ones are cleaned up."""
    container = cluster.container(5, 2, command="true" if kind == "Job" else "")
    cluster.apply(cluster.workload(kind, container, **SPECS[kind]), namespace=namespace)
    cluster.wait_for("the first are admitted", lambda: {"Running", "Succeeded"} & {*cluster.phases(namespace)})
    installed.signal()
    field = "succeeded" if kind == "Job" else "readyReplicas"

    def is_complete() -> bool:
        return bool(cluster.get(kind.lower(), "work", "-n", namespace)["status"].get(field) == REPLICAS)

    cluster.wait_for("all replicas run, or have", is_complete)
    if kind == "Job":
        return
    cluster.wait_for("no rejected pod is left", lambda: {*cluster.phases(namespace)} == {"Running"})
    ledger = installed.wait_ledger(namespace, REPLICAS)
    assert {cores for cores, _, _ in ledger.values()} == {5}
