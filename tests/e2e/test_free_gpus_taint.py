"""Pods without GPUs and the real kube-scheduler: kept off a node with free GPUs by the agent's taint, never waiting for it.

Beside the node there is an object of another one, with little CPU and no kubelet: pods are bound to it, none runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpushare_agent.agent.cluster.free_gpus_taint import EFFECT, KEY
from tests.e2e.cluster import Cluster, Object
from tests.e2e.installation import Installation, with_variables

pytestmark = pytest.mark.e2e
OTHER = "gpushare-e2e-without-gpus"
OTHERS_LABEL = "gpushare-agent-e2e/pods-without-gpus"
ON = {"patches": [with_variables({"GPUSHARE_FACTS__TAINT_ABOVE": "0.5"})]}


@pytest.fixture
def other(cluster: Cluster) -> Iterator[None]:
    """A node of one CPU without GPUs, half of it in use: kube-scheduler likes the real one better."""
    cluster.make_node({"name": OTHER, "labels": {OTHERS_LABEL: "true"}}, {"cpu": "1", "memory": "1Gi", "pods": "20"})
    cluster.run("label", "node", cluster.node, f"{OTHERS_LABEL}=true", "--overwrite")
    yield
    cluster.run("delete", "node", OTHER)
    cluster.run("label", "node", cluster.node, f"{OTHERS_LABEL}-")


def _pod(cluster: Cluster, name: str, cpu: str, **more: Any) -> Object:
    """It may go to either of the two, which have taints of the cluster's own, but feels the agent's."""
    container = cluster.container()
    container["resources"] = {"requests": {"cpu": cpu}}
    keys = {taint["key"] for taint in cluster.node_object()["spec"].get("taints", [])} - {KEY}
    keys |= {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    tolerations = [{"key": key, "operator": "Exists"} for key in sorted(keys)]
    return cluster.pod_of(name, container, nodeSelector={OTHERS_LABEL: "true"}, tolerations=tolerations, **more)


def _has_taint(cluster: Cluster) -> bool:
    taints = cluster.node_object()["spec"].get("taints", [])
    return {"key": KEY, "effect": EFFECT} in [{"key": one["key"], "effect": one["effect"]} for one in taints]


def test_pods_without_gpus_go_elsewhere_while_gpus_are_free_and_never_wait(
    cluster: Cluster, installed: Installation, namespace: str, other: None
) -> None:
    """Without the taint the real node, which has more free CPU, gets them; it goes when the GPUs are in use."""
    assert not _has_taint(cluster)
    assert cluster.bound(namespace, _pod(cluster, "filler", "500m", nodeName=OTHER)) == [OTHER]
    assert cluster.bound(namespace, _pod(cluster, "before", "50m")) == [cluster.node]
    try:
        installed.change(**ON)
        cluster.wait_for("the taint", lambda: _has_taint(cluster))
        kept_off = [_pod(cluster, f"kept-off-{number}", "50m") for number in range(3)]
        assert cluster.bound(namespace, *kept_off) == [OTHER] * 3
        assert cluster.bound(namespace, _pod(cluster, "too-large-for-the-other", "600m")) == [cluster.node]

        gpus = installed.gpus()
        cluster.start(namespace, *(cluster.pod(f"gpu-{number}", 100, 0) for number in range(gpus)))
        cluster.wait_for("no taint on a node whose GPUs are in use", lambda: not _has_taint(cluster))
        assert cluster.bound(namespace, _pod(cluster, "after", "50m")) == [cluster.node]
    finally:
        cluster.force_delete_pods(namespace)
        installed.change()
        cluster.wait_for("no taint where it is switched off", lambda: not _has_taint(cluster))
