"""What is left after the steps of docs/how-to/uninstall.md is what that page names, and running pods go on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cluster import CORE, DEADLINE_S, MEMORY, Cluster, KubectlError, Object
from tests.e2e.installation import Installation
from tests.e2e.release import open_release

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs/how-to/uninstall.md"
KUBELET_GRACE_S = 300.0
"""endpointStopGracePeriod of the kubelet: a plugin that is away for longer does not come back."""
OURS = re.compile(r"gpushare|gpu-manager|tencent|vcuda|vcore|vmemory|gpumem", re.I)


def test_after_the_removal_only_what_the_guide_names_is_left(
    cluster: Cluster, installation: Installation, installed: Installation, namespace: str
) -> None:
    """Of objects, of the node's labels and annotations, of files on the node, and of its resources. A pod with a share runs
    on."""
    _nothing_else_is_left(cluster, installation, namespace, installation.remove)
    status = cluster.node_object()["status"]
    cluster.wait_for(
        "the kubelet no longer counts the resources",
        lambda: {cluster.node_object()["status"]["capacity"].get(name) for name in (CORE, MEMORY)} == {"0"},
        deadline_s=KUBELET_GRACE_S + DEADLINE_S,
    )
    (command,) = re.findall(r"kubectl patch node NODE (.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    cluster.run("patch", "node", cluster.node, *shlex.split(command))
    gone = {name for name in status["capacity"] if OURS.search(name)}
    assert gone >= {CORE, MEMORY}

    def are_gone() -> bool:
        """Also from what is allocatable, which the kubelet works out: it has seen the patch and adds nothing."""
        status = cluster.node_object()["status"]
        return not gone & {*status["capacity"], *status["allocatable"]}

    cluster.wait_for("the node has none of the resources", are_gone)


def test_after_the_removal_of_a_release_only_what_the_guide_names_is_left(
    cluster: Cluster, installation: Installation, namespace: str, tmp_path: Path
) -> None:
    """Likewise with Helm."""
    with open_release(cluster, installation, tmp_path) as release:
        _nothing_else_is_left(cluster, installation, namespace, release.remove)


def _nothing_else_is_left(
    cluster: Cluster, installation: Installation, namespace: str, remove: Callable[[], None]
) -> None:
    cluster.start(namespace, cluster.pod("share", 30, 4))
    container = _container(cluster, namespace)
    remove()
    assert _objects(cluster, namespace) == []
    node = cluster.node_object()["metadata"]
    assert not [key for key in {**node.get("labels", {}), **node.get("annotations", {})} if OURS.search(key)]

    documented = set(re.findall(r"`(/[a-z0-9/.-]+)`", PAGE.read_text(encoding="utf-8")))
    unnamed = [one for one in _files(cluster, namespace) if not any(one.startswith(path) for path in documented)]
    assert unnamed == []
    cluster.wait_for("the node offers nothing", lambda: not any(installation.offered().values()))
    assert _container(cluster, namespace) == container


def _container(cluster: Cluster, namespace: str) -> tuple[str, int, bool]:
    (status,) = cluster.pods(namespace)["share"]["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"], "running" in status["state"]


def _objects(cluster: Cluster, namespace: str) -> list[str]:
    """Of every kind that can be listed, those with a name of ours: neither the test's own nor Events, which expire."""
    kinds = cluster.run("api-resources", "--verbs=list,get", "-o", "name").split()
    wanted = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
    template = '{range .items[*]}{.kind} {.metadata.namespace} {.metadata.name}{"\\n"}{end}'
    shown = cluster.run("get", wanted, "-A", "--ignore-not-found", "-o", f"jsonpath={template}", timeout_s=120)
    return [line for line in shown.splitlines() if OURS.search(line) and "gpushare-e2e" not in line]


def _files(cluster: Cluster, namespace: str) -> list[str]:
    """Paths of the node with a name of ours, seen by a pod."""
    find = "cd /host; find etc var/lib run opt -xdev -maxdepth 4 2>/dev/null; true"
    container: Object = cluster.container(command=find) | {
        "volumeMounts": [{"name": "host", "mountPath": "/host", "readOnly": True}]
    }
    volumes = [{"name": "host", "hostPath": {"path": "/"}}]
    pod = cluster.pod_of("files", container, volumes=volumes, restartPolicy="Never")
    try:
        cluster.apply(pod, namespace=namespace)
    except KubectlError as error:
        pytest.skip(f"the cluster lets no pod see the node's files: {error}")
    cluster.wait_phase(namespace, "files", phase="Succeeded")
    lines = cluster.run("logs", "files", "-n", namespace).splitlines()
    assert "etc" in lines
    return [f"/{line}" for line in lines if OURS.search(line)]
