"""Pods that controllers make and make again."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import CORE, Cluster
from tests.e2e.installation import Installation

pytestmark = pytest.mark.e2e


@pytest.mark.smoke
def test_a_statefulsets_pod_of_the_same_name_gets_a_share_of_its_own(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Same name, new UID: it is allocated anew, and of the one before nothing is left, in the ledger or in files."""
    work = cluster.workload("StatefulSet", cluster.container(20, 4), serviceName="work", replicas=1)
    cluster.apply(work, namespace=namespace)
    cluster.wait_phase(namespace, "work-0")
    old = cluster.pods(namespace)["work-0"]["metadata"]["uid"]
    had_files = bool(files_of(installed, old))
    cluster.run("delete", "pod", "work-0", "-n", namespace)
    new = cluster.wait_for("another pod of the name", lambda: _running_other_than(cluster, namespace, old))

    def uids() -> list[str]:
        return [one["pod_uid"] for one in installed.view()["containers"] if one["namespace"] == namespace]

    cluster.wait_for("the ledger has the new pod alone", lambda: uids() == [new])
    records = installed.kubelet_records([cluster.pods(namespace)["work-0"]])
    assert len(records[new][CORE]) == 20
    cluster.wait_for("no file of the old pod", lambda: not files_of(installed, old))
    assert bool(files_of(installed, new)) == had_files


def _running_other_than(cluster: Cluster, namespace: str, uid: str) -> str | None:
    pod = cluster.pods(namespace).get("work-0")
    if pod is None or pod["metadata"]["uid"] == uid or pod["status"]["phase"] != "Running":
        return None
    return str(pod["metadata"]["uid"])


def files_of(installed: Installation, uid: str) -> list[str]:
    """Below the directories that the agent writes, by the pod's UID."""
    program = f"find /etc/gpu-manager /var/lib/gpushare-agent -name '*{uid}*' 2>/dev/null || true"
    return installed.exec("sh", "-c", program).split()


def test_a_deployments_pods_are_replaced_one_by_one(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """A rollout to another template: both generations have their shares meanwhile, and the new one alone at the end."""
    cluster.apply(cluster.workload("Deployment", cluster.container(20, 4), replicas=3), namespace=namespace)
    status = ("rollout", "status", "deployment/work", "-n", namespace, "--timeout=120s")
    cluster.run(*status, timeout_s=130)
    first = set(installed.wait_ledger(namespace, 3))
    cluster.run("rollout", "restart", "deployment/work", "-n", namespace)
    cluster.run(*status, timeout_s=130)
    cluster.wait_for("the first generation is gone", lambda: len(cluster.pods(namespace)) == 3)
    assert not first & set(installed.wait_ledger(namespace, 3))
    assert "Failed" not in cluster.phases(namespace)


def test_a_jobs_pods_give_their_shares_back_when_they_succeed(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """More pods in a row than fit at once; each is Succeeded, none was rejected."""
    gpus = installed.gpus()
    container = cluster.container(*((100 * gpus // 2,) if gpus > 1 else (50, 1)), command="true")
    job = cluster.workload("Job", container, completions=6, parallelism=2, backoffLimit=0)
    cluster.apply(job, namespace=namespace)
    cluster.run("wait", "--for=condition=Complete", "job/work", "-n", namespace, "--timeout=180s", timeout_s=190)
    assert cluster.phases(namespace) == ["Succeeded"] * 6
    assert not installed.wait_ledger(namespace, 0)
