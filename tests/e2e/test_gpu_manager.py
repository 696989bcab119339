"""gpu-manager's DaemonSet with nothing changed but the image, and on a node without GPUs the flag for simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import CORE, DEADLINE_S, Cluster, KubectlError, Object, manifest, read_unix
from tests.e2e.installation import NODE_LABEL, SYSTEM, Installation, in_place_of, is_ready

pytestmark = pytest.mark.e2e
NAMESPACE, NAME = "kube-system", "gpu-manager-daemonset"
LABELS = {"name": "gpu-manager-ds"}
MOUNTS = {
    "device-plugin": ("/var/lib/kubelet/device-plugins", "/var/lib/kubelet/device-plugins", "Directory"),
    "vdriver": ("/etc/gpu-manager/vdriver", "/etc/gpu-manager/vdriver", "DirectoryOrCreate"),
    "vmdata": ("/etc/gpu-manager/vm", "/etc/gpu-manager/vm", "DirectoryOrCreate"),
    "log": ("/var/log/gpu-manager", "/etc/gpu-manager/log", "DirectoryOrCreate"),
    "checkpoint": ("/etc/gpu-manager/checkpoint", "/etc/gpu-manager/checkpoint", "DirectoryOrCreate"),
    "run-dir": ("/var/run", "/var/run", "Directory"),
    "cgroup": ("/sys/fs/cgroup", "/sys/fs/cgroup", "Directory"),
    "usr-directory": ("/usr/local/host", "/usr", "Directory"),
}
"""Volume: where in the container, where on the host, its type. gpu-manager v1.1.5, gpu-manager.yaml."""
READ_ONLY = ("cgroup", "usr-directory")


def objects(image: str, extra_flags: str) -> list[Object]:
    """Account, binding, DaemonSet and Service by the fields of gpu-manager's v1.1.5; it pulls always, which the image of a
    test cannot be."""
    account = {"name": "gpu-manager", "namespace": NAMESPACE}
    container = {
        "name": "gpu-manager",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"privileged": True},
        "ports": [{"containerPort": 5678}],
        "volumeMounts": [
            {"name": name, "mountPath": inside, **({"readOnly": True} if name in READ_ONLY else {})}
            for name, (inside, _, _) in MOUNTS.items()
        ],
        "env": [
            {"name": "LOG_LEVEL", "value": "4"},
            {"name": "EXTRA_FLAGS", "value": extra_flags},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
    }
    spec = {
        "serviceAccount": "gpu-manager",
        "tolerations": [
            {"key": "CriticalAddonsOnly", "operator": "Exists"},
            {"key": CORE, "operator": "Exists", "effect": "NoSchedule"},
        ],
        "priorityClassName": "system-node-critical",
        "nodeSelector": {NODE_LABEL: "enable"},
        "hostPID": True,
        "containers": [container],
        "volumes": [
            {"name": name, "hostPath": {"type": kind, "path": path}} for name, (_, path, kind) in MOUNTS.items()
        ],
    }
    metadata = {"annotations": {"scheduler.alpha.kubernetes.io/critical-pod": ""}, "labels": LABELS}
    daemon_set = {
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": metadata, "spec": spec},
    }
    ports = [{"name": "metrics", "port": 5678, "protocol": "TCP", "targetPort": 5678}]
    service = {"clusterIP": "None", "ports": ports, "selector": LABELS}
    group = "rbac.authorization.k8s.io"
    return [
        manifest("v1", "ServiceAccount", account),
        manifest(
            f"{group}/v1", "ClusterRoleBinding", "gpu-manager-role",
            roleRef={"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
            subjects=[{"kind": "ServiceAccount", **account}],
        ),
        manifest("apps/v1", "DaemonSet", {"name": NAME, "namespace": NAMESPACE}, spec=daemon_set),
        manifest("v1", "Service", {"name": "gpu-manager-metric", "namespace": NAMESPACE}, spec=service),
    ]  # fmt: skip


@pytest.fixture
def gpu_manager(cluster: Cluster, installation: Installation) -> Iterator[str]:
    """The name of its pod, which serves."""
    flags = "--logtostderr=false" + (" --driver=simulated" if "simulated" in installation.overlay else "")
    with running(cluster, installation, objects(installation.image, flags)) as name:
        yield name


@contextmanager
def running(cluster: Cluster, installation: Installation, found: list[Object]) -> Iterator[str]:
    """The name of its pod."""
    with in_place_of(installation, found, f"{NODE_LABEL}=enable"):
        yield wait_serving(cluster)


def wait_serving(cluster: Cluster) -> str:
    def poll() -> str | None:
        offered = int(cluster.node_object()["status"]["allocatable"].get(CORE, "0"))
        pods = cluster.pods(NAMESPACE, selector="name=gpu-manager-ds")
        ready = [name for name, pod in pods.items() if is_ready(pod)]
        if not offered or len(ready) != 1:
            return None
        try:
            answer(cluster, ready[0], "version")
        except KubectlError:  # it does not listen yet; the node still offers what another pod did
            return None
        return ready[0]

    return cluster.wait_for("gpu-manager's DaemonSet offers its resources", poll)


def answer(cluster: Cluster, pod: str, path: str) -> str:
    return read_unix(cluster.api, f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:5678/proxy/{path}").decode()


def test_gpu_managers_daemonset_serves_with_this_image(cluster: Cluster, gpu_manager: str, namespace: str) -> None:
    """Pods one after another, as many at once as differ, run; tools find what they read; another pod of the DaemonSet knows
    them; and each mount that it lacks is named in the log."""
    names = [f"share-{number}" for number in range(6)]
    cluster.start(namespace, cluster.pod(names[0], 10, 4))
    cluster.start(namespace, cluster.pod(names[1], 10, 4))
    cluster.start(namespace, *(cluster.pod(name, 10 + n, 4 + n) for n, name in enumerate(names[2:], start=1)))
    annotations = [pod["metadata"]["annotations"] for pod in cluster.pods(namespace).values()]
    assert {one.get("tencent.com/gpu-assigned") for one in annotations} == {"true"}
    assert 'container_request_gpu_utilization{container_name="main"' in answer(cluster, gpu_manager, "metric")
    assert len(json.loads(answer(cluster, gpu_manager, "api/v1/node"))["containers"]) == len(names)
    assert "ROOT" in json.loads(answer(cluster, gpu_manager, "graph"))["graph"]
    exec_ = ("-n", NAMESPACE, "exec", gpu_manager, "--")
    cluster.run(*exec_, "test", "-S", "/var/run/gpu-manager.sock")
    logged = [json.loads(line) for line in cluster.run("-n", NAMESPACE, "logs", gpu_manager).splitlines()]
    missing = {one["mount"] for one in logged if one["event"] == "mount_missing"}
    assert missing == {"/var/lib/kubelet/pod-resources", "/var/lib/gpushare-agent"}
    assert [one for one in logged if one["level"] == "error"] == []
    cluster.run("-n", NAMESPACE, "delete", "pod", gpu_manager, timeout_s=DEADLINE_S)
    again = wait_serving(cluster)

    def knows_them() -> bool:
        return len(json.loads(answer(cluster, again, "api/v1/node"))["containers"]) == len(names)

    cluster.wait_for("the next pod knows them", knows_them)
    cluster.start(namespace, cluster.pod("share-after", 10, 4))


def test_the_base_has_what_gpu_managers_users_know(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """A directory for each container below /etc/gpu-manager/vm with its vDevice socket; metrics by both names; /debug, which
    answers the pod alone, also what gpu-manager's profiles were asked for."""
    cluster.start(namespace, cluster.pod("share", 10, 4))
    uid = cluster.pods(namespace)["share"]["metadata"]["uid"]
    found = installed.exec("find", f"/etc/gpu-manager/vm/{uid}", "-name", "vcuda.sock", "-type", "s").splitlines()
    assert len(found) == 1
    inside = ("-n", namespace, "exec", "share", "--")
    cluster.run(*inside, "test", "-S", "/etc/vcuda/vcuda.sock")
    base = f"/api/v1/namespaces/{SYSTEM}/pods/{installed.agent()}:5678/proxy"
    for path, former in (("metric", True), ("metrics", False)):
        text = read_unix(cluster.api, f"{base}/{path}")
        assert (
            b"gpushare_container_memory_limit_bytes{" in text and (b"container_request_gpu_memory{" in text) is former
        )
    with pytest.raises(KubectlError, match="port-forward"):
        read_unix(cluster.api, f"{base}/debug/pprof/")
    program = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
    assert "tasks at" in installed.exec("python", "-c", program, "http://localhost:5678/debug/pprof/goroutine")
