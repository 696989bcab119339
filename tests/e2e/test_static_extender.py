"""The extender as gpu-admission ran: the documented static pod of a control plane node, and a real kube-scheduler whose
configuration is gpu-admission's, or GPUShare's. Needs --static-pods, on the control plane node itself.

Kubernetes 1.23 removed policy files: the fields of theirs stand in a KubeSchedulerConfiguration.
"""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import CORE, MEMORY, Cluster, Object, manifest
from tests.e2e.installation import MANIFESTS, SYSTEM, Installation

pytestmark = pytest.mark.e2e
STATIC_POD = MANIFESTS / "extender/static-pod/gpu-admission.yaml"
RBAC, SCHEDULER_RBAC = MANIFESTS / "extender/rbac.yaml", MANIFESTS / "extender/second-scheduler/rbac.yaml"
KUBECONFIG = Path("/etc/kubernetes/kube-scheduler/kubeconfig")
GPU_ADMISSION = {
    "urlPrefix": "http://127.0.0.1:3456/scheduler",
    "filterVerb": "predicates",
    "enableHTTPS": False,
    "nodeCacheCapable": False,
}
"""build/scheduler-policy-config.json of gpu-admission: the filter alone, whole nodes, asked about every pod."""
GPUSHARE = {
    "urlPrefix": "http://127.0.0.1:32766/gpushare-scheduler",
    "filterVerb": "filter",
    "bindVerb": "bind",
    "enableHTTPS": False,
    "nodeCacheCapable": True,
    "managedResources": [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}],
    "ignorable": False,
}
"""config/scheduler-policy-config-v1.28+.yaml of gpushare-scheduler-extender c0b6141; 32766 is its Service's NodePort."""


class StaticExtender:
    """`start` as an operator of gpu-admission does: the documented file in the static pod path, and the scheduler."""

    def __init__(self, cluster: Cluster, namespace: str, image: str, scheduler_image: str, folder: Path) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._images = image, scheduler_image
        self._file = folder / f"gpu-admission-{cluster.suffix}.yaml"
        self._name = f"gpu-admission-{cluster.node.lower()}"
        self._url = ""
        self.scheduler = f"scheduler-{secrets.token_hex(3)}"

    def start(self, extender: Object, args: Sequence[str] = ()) -> None:
        """`args` in the place of the static pod's own but for its kubeconfig and its lease."""
        pod = yaml.safe_load(STATIC_POD.read_text(encoding="utf-8"))
        (container,) = pod["spec"]["containers"]
        container["image"], self._url = self._images[0], extender["urlPrefix"].rpartition("/")[0]
        if args:
            of_manifest = [one for one in container["args"] if "kubeconfig" in one or "leader-elect" in one]
            container["args"] = [*of_manifest, *args]
            container["livenessProbe"]["httpGet"]["port"] = int(self._url.rpartition(":")[2])
        hidden = self._file.with_name(f".{self._file.name}")
        hidden.write_text(json.dumps(pod), encoding="utf-8")
        hidden.replace(self._file)
        self._cluster.wait_phase("kube-system", self._name)
        self._start_scheduler(extender)

    def _start_scheduler(self, extender: Object) -> None:
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "profiles": [{"schedulerName": self.scheduler}],
            "extenders": [extender],
        }
        files = {"scheduler.yaml": json.dumps(configuration)}
        mounts = [{"name": "configuration", "mountPath": "/etc/scheduler"}]
        container = {
            "name": "scheduler",
            "image": self._images[1],
            "imagePullPolicy": "IfNotPresent",
            # Without a port of its own: the cluster's scheduler has it on this node.
            "command": ["kube-scheduler", "--config=/etc/scheduler/scheduler.yaml", "--secure-port=0"],
            "volumeMounts": mounts,
        }
        pod = self._cluster.pod_of(
            self.scheduler,
            container,
            hostNetwork=True,
            serviceAccountName="gpushare-scheduler",
            automountServiceAccountToken=True,
            volumes=[{"name": "configuration", "configMap": {"name": self.scheduler}}],
        )
        self._cluster.apply(manifest("v1", "ConfigMap", self.scheduler, data=files), pod, namespace=SYSTEM)
        self._cluster.wait_phase(SYSTEM, self.scheduler)

    def metric(self, sample: str) -> float:
        """At the loopback address, which is the node's: no other host reaches it."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self._url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))

    def remove(self) -> None:
        self._cluster.run("-n", SYSTEM, "delete", "--ignore-not-found", f"pod/{self.scheduler}", f"cm/{self.scheduler}")
        self._file.unlink(missing_ok=True)
        self._cluster.wait_for("the static pod is gone", lambda: self._name not in self._cluster.pods("kube-system"))


@pytest.fixture
def static_extender(
    cluster: Cluster, installation: Installation, namespace: str, request: pytest.FixtureRequest
) -> Iterator[StaticExtender]:
    folder = cluster.path("static-pods")
    if KUBECONFIG.exists():
        pytest.skip(f"the node has a {KUBECONFIG}")
    scheduler_image = request.config.getoption("--scheduler-image")
    if scheduler_image is None:
        pytest.skip("needs --scheduler-image")
    installation.install(components=["components/gpushare"])
    for path in (RBAC, SCHEDULER_RBAC):
        cluster.run("apply", "-f", str(path))
    made = [one for one in (Path("/etc/kubernetes"), KUBECONFIG.parent) if not one.exists()]
    KUBECONFIG.parent.mkdir(parents=True, exist_ok=True)
    KUBECONFIG.write_text(kubeconfig_of(cluster, "gpushare-agent-extender"), encoding="utf-8")
    found = StaticExtender(cluster, namespace, installation.image, scheduler_image, folder)
    try:
        yield found
    finally:
        found.remove()
        KUBECONFIG.unlink()
        for one in reversed(made):
            one.rmdir()
        for path in (RBAC, SCHEDULER_RBAC):
            cluster.run("delete", "--ignore-not-found", "-f", str(path))


def kubeconfig_of(cluster: Cluster, account: str) -> str:
    """With exactly the rights of manifests/extender/rbac.yaml."""
    found = json.loads(cluster.run("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    token = cluster.run("-n", SYSTEM, "create", "token", account, "--duration=1h").strip()
    found["users"] = [{"name": one["name"], "user": {"token": token}} for one in found["users"]]
    return json.dumps(found)


def pod(cluster: Cluster, extender: StaticExtender, name: str, limits: dict[str, int]) -> Object:
    return cluster.pod_of(name, cluster.container(resources={"limits": limits}), schedulerName=extender.scheduler)


def test_gpu_admissions_static_pod_schedules_with_its_policy(
    cluster: Cluster, installation: Installation, static_extender: StaticExtender, namespace: str
) -> None:
    """The file as it is documented: the filter reserves, a scheduler that only filters binds, the agent gives the GPU that
    was chosen. A pod without a share, about which this scheduler asks too, is left alone."""
    static_extender.start(GPU_ADMISSION)
    cluster.start(namespace, pod(cluster, static_extender, "share", {CORE: 30, MEMORY: 4}))
    cluster.start(namespace, pod(cluster, static_extender, "other", {}))
    ((_, _, gpus),) = installation.wait_ledger(namespace, 1).values()
    annotations = cluster.pods(namespace)["share"]["metadata"]["annotations"]
    assert annotations["tencent.com/predicate-node"] == cluster.node
    assert annotations["tencent.com/predicate-gpu-idx-0"] == ",".join(map(str, gpus))
    assert static_extender.metric("gpushare_extender_request_duration_seconds_count") >= 1


def test_gpushares_configuration_schedules_gpu_mem(
    cluster: Cluster, installation: Installation, static_extender: StaticExtender, namespace: str
) -> None:
    """Its verbs and its port, on our extender: it binds, and pods share one GPU."""
    static_extender.start(GPUSHARE, ["--address=127.0.0.1:32766", "--gpushare.enabled"])
    names = ["share-0", "share-1"]
    cluster.start(namespace, *(pod(cluster, static_extender, name, {"aliyun.com/gpu-mem": 3}) for name in names))
    ledger = installation.wait_ledger(namespace, 2)
    assert {(memory, gpus) for _, memory, gpus in ledger.values()} == {(3 << 30, (0,))}
    assert static_extender.metric('gpushare_extender_binds_total{outcome="bound"}') == 2
