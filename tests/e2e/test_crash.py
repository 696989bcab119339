"""The agent is killed while pods start. The kubelet rejects pods until it is back: what controllers lose is replaced."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster, Object
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


def _workload(cluster: Cluster, kind: str) -> Object:
    template = {"metadata": {"labels": {"app": "burst"}}, "spec": cluster.pod_spec(cluster.container(5, 2))}
    selector = {"matchLabels": {"app": "burst"}}
    spec: Object = {"template": template}
    if kind == "Job":
        template["spec"]["containers"][0]["command"] = ["true"]
        template["spec"]["restartPolicy"] = "Never"
        spec |= {"completions": REPLICAS, "parallelism": REPLICAS, "backoffLimit": 1000}
    elif kind == "StatefulSet":
        spec |= {"replicas": REPLICAS, "selector": selector, "serviceName": "burst", "podManagementPolicy": "Parallel"}
    else:
        spec |= {"replicas": REPLICAS, "selector": selector}
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "burst"}, "spec": spec}


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "Job"])
def test_a_controllers_pods_are_replaced_after_the_agent_was_killed(
    cluster: Cluster, installed: Installation, namespace: str, kind: str
) -> None:
    """All are there in the end, each with its share once; rejected ones are cleaned up."""
    cluster.apply(_workload(cluster, kind), namespace=namespace)
    cluster.wait_for("the first pods are admitted", lambda: _phases(cluster, namespace) & {"Running", "Succeeded"})
    installed.signal()
    if kind == "Job":

        def is_complete() -> bool:
            return bool(cluster.get("job", "burst", "-n", namespace)["status"].get("succeeded") == REPLICAS)

        cluster.wait_for("the job is complete", is_complete)
        return
    path = kind.lower()

    def is_ready() -> bool:
        return bool(cluster.get(path, "burst", "-n", namespace)["status"].get("readyReplicas") == REPLICAS)

    cluster.wait_for("all replicas run", is_ready)
    cluster.wait_for("no rejected pod is left", lambda: _phases(cluster, namespace) == {"Running"})
    ledger = installed.wait_ledger(namespace, REPLICAS)
    assert {cores for cores, _, _ in ledger.values()} == {5}


def _phases(cluster: Cluster, namespace: str) -> set[str]:
    return {pod["status"].get("phase", "") for pod in cluster.pods(namespace).values()}
