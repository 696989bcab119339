"""GPUShare's DaemonSet and account with nothing changed but the image, and on a node without GPUs a simulated driver."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import DEADLINE_S, Cluster, KubectlError, Object, manifest
from tests.e2e.installation import Installation, in_place_of

pytestmark = pytest.mark.e2e
NAMESPACE, NAME, ACCOUNT = "kube-system", "gpushare-device-plugin-ds", "gpushare-device-plugin"
LABEL, RESOURCE = "gpushare", "aliyun.com/gpu-mem"
PLUGINS = "/var/lib/kubelet/device-plugins"
RULES = {
    "nodes nodes/proxy": "get list watch",
    "events": "create patch",
    "pods": "update patch get list watch",
    "nodes/status": "patch update",
}
READ_LEDGER = """
import json, urllib.request
found = json.load(urllib.request.urlopen("http://127.0.0.1:5678/api/v1/node"))["containers"]
print(json.dumps({one["pod"]: [one["memory_bytes"], [gpu["index"] for gpu in one["gpus"]]] for one in found}))
"""


def objects(image: str, *, is_simulated: bool) -> list[Object]:
    """By the fields of device-plugin-ds.yaml and device-plugin-rbac.yaml of gpushare-device-plugin 45fb8b8. Kubernetes 1.16
    removed its extensions/v1beta1, whose selector was the template's labels."""
    account = {"name": ACCOUNT, "namespace": NAMESPACE}
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": of.split(), "verbs": verbs.split()} for of, verbs in RULES.items()]
    env: list[Object] = [
        {"name": "KUBECONFIG", "value": "/etc/kubernetes/kubelet.conf"},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    size = {"memory": "300Mi", "cpu": "1"}
    container = {
        "name": "gpushare",
        "image": image,
        "command": [f"{ACCOUNT}-v2", "-logtostderr", "--v=5", "--memory-unit=GiB"],
        "resources": {"limits": size, "requests": size},
        "env": [*env, *([{"name": "GPUSHARE_DRIVER", "value": "simulated"}] if is_simulated else [])],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "device-plugin", "mountPath": PLUGINS}],
    }
    labels = {"component": ACCOUNT, "app": "gpushare", "name": NAME}
    spec = {
        "serviceAccount": ACCOUNT,
        "hostNetwork": True,
        "nodeSelector": {LABEL: "true"},
        "containers": [container],
        "volumes": [{"name": "device-plugin", "hostPath": {"path": PLUGINS}}],
    }
    annotations = {"scheduler.alpha.kubernetes.io/critical-pod": ""}
    template = {"metadata": {"annotations": annotations, "labels": labels}, "spec": spec}
    role = {"kind": "ClusterRole", "name": ACCOUNT}
    return [
        manifest("v1", "ServiceAccount", account),
        manifest(f"{group}/v1", "ClusterRole", ACCOUNT, rules=rules),
        manifest(
            f"{group}/v1", "ClusterRoleBinding", ACCOUNT,
            roleRef={"apiGroup": group, **role}, subjects=[{"kind": "ServiceAccount", **account}],
        ),
        manifest(
            "apps/v1", "DaemonSet", {"name": NAME, "namespace": NAMESPACE},
            spec={"selector": {"matchLabels": labels}, "template": template},
        ),
    ]  # fmt: skip


@pytest.fixture
def plugin(cluster: Cluster, installation: Installation) -> Iterator[str]:
    """The name of its pod, which serves."""
    found = objects(installation.image, is_simulated="simulated" in installation.overlay)
    with in_place_of(installation, found, f"{LABEL}=true"):
        yield wait_serving(cluster)


def wait_serving(cluster: Cluster, but: str = "") -> str:
    def poll() -> str | None:
        offered = int(cluster.node_object()["status"]["allocatable"].get(RESOURCE, "0"))
        pods = cluster.pods(NAMESPACE, selector=f"name={NAME}")
        running = [name for name, pod in pods.items() if "deletionTimestamp" not in pod["metadata"] and name != but]
        return running[0] if offered and len(running) == 1 else None

    return cluster.wait_for("GPUShare's DaemonSet offers its resource", poll)


def ledger(cluster: Cluster, plugin: str) -> dict[str, list[object]]:
    """By pod: bytes, and the indexes of the GPUs. Empty where it does not serve yet."""
    try:
        text = cluster.run("-n", NAMESPACE, "exec", plugin, "--", "python", "-c", READ_LEDGER)
    except KubectlError:
        return {}
    found: dict[str, list[object]] = json.loads(text)
    return found


def test_gpushares_daemonset_serves_with_this_image(cluster: Cluster, plugin: str, namespace: str) -> None:
    """Pods get memory of one GPU with GPUShare's variables and annotations, with what its account may do; the next pod of
    the DaemonSet knows them; and each mount and right that it lacks is named in the log."""

    def pod(name: str, units: int) -> Object:
        return cluster.pod_of(name, cluster.container(resources={"limits": {RESOURCE: units}}))

    shares = {}
    for number, units in enumerate((2, 2, 3)):
        cluster.start(namespace, pod(f"share-{number}", units))
        shares[f"share-{number}"] = [units << 30, [0]]
    assert ledger(cluster, plugin) == shares
    wanted = {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_CONTAINER": "3"}
    assert wanted.items() <= cluster.environment(namespace, "share-2").items()
    status = cluster.node_object()["status"]
    assert int(status["allocatable"]["aliyun.com/gpu-count"]) >= 1
    cluster.wait_gpushare_annotations(namespace)
    logged = [json.loads(line) for line in cluster.run("-n", NAMESPACE, "logs", plugin).splitlines()]
    missing = {one.get("mount", one.get("right")) for one in logged if one["event"].endswith("_missing")}
    mounts = {"/var/lib/kubelet/pod-resources", "/var/lib/gpushare-agent", "/etc/gpu-manager"}
    assert missing == mounts | {"patch nodes", "delete pods"}
    assert [one for one in logged if one["level"] == "error"] == []
    cluster.run("-n", NAMESPACE, "delete", "pod", plugin, timeout_s=DEADLINE_S)
    again = wait_serving(cluster, but=plugin)
    cluster.wait_for("the next pod knows them", lambda: ledger(cluster, again) == shares)
    cluster.start(namespace, pod("share-after", 1))
