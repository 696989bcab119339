"""Pods and nodes as users of GPUShare and of HAMi have them: docs/how-to/serve-gpu-mem.md, migrate-from-hami.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import CORE, Cluster, KubectlError, Object, manifest
from tests.e2e.extender import open_extender
from tests.e2e.installation import NODE_LABEL, SYSTEM, Installation
from tests.e2e.test_requests import assert_waits_while_it_asks_for_more_than_is_free

pytestmark = pytest.mark.e2e
GIB = 1 << 30
GPUSHARE_LABEL = "gpushare"


@pytest.fixture
def gpu_mem(cluster: Cluster, installation: Installation) -> Iterator[Installation]:
    """The node has GPUShare's label alone."""
    installation.install(components=["components/gpushare"])
    cluster.run("label", "node", cluster.node, f"{GPUSHARE_LABEL}=true", f"{NODE_LABEL}-")
    yield installation
    cluster.run("label", "node", cluster.node, f"{GPUSHARE_LABEL}-", f"{NODE_LABEL}=enable")


def binpack(cluster: Cluster, replicas: int = 3, units: int = 2) -> tuple[Object, Object]:
    """demo/binpack-1 of gpushare-device-plugin: a headless Service and a StatefulSet. Its image is not on every node, and
    Kubernetes 1.16 removed its apps/v1beta1."""
    name = "binpack-1"
    labels = {"app": name}
    container = cluster.container(name=name, resources={"limits": {"aliyun.com/gpu-mem": units}})
    service = {"ports": [{"port": 80, "name": "web"}], "clusterIP": "None", "selector": labels}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "serviceName": name, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": name, "labels": labels}
    return manifest("v1", "Service", metadata, spec=service), manifest("apps/v1", "StatefulSet", metadata, spec=spec)


def test_gpushares_demo_runs_on_a_node_with_its_label(cluster: Cluster, gpu_mem: Installation, namespace: str) -> None:
    """Three pods on one GPU, which they find in GPUShare's variables, and its tools in the annotations and the capacity."""
    cluster.apply(*binpack(cluster), namespace=namespace)
    names = [f"binpack-1-{number}" for number in range(3)]
    ledger = gpu_mem.wait_ledger(namespace, 3)
    cluster.wait_phase(namespace, *names)
    assert {(memory, gpus) for _, memory, gpus in ledger.values()} == {(2 * GIB, (0,))}
    environment = cluster.environment(namespace, "binpack-1-0", "binpack-1")
    found = {name: value for name, value in environment.items() if name.startswith("ALIYUN_COM_GPU_MEM_")}
    size = int(found.pop("ALIYUN_COM_GPU_MEM_DEV"))
    assert found == {
        f"ALIYUN_COM_GPU_MEM_{name}": value for name, value in (("IDX", "0"), ("POD", "2"), ("CONTAINER", "2"))
    }
    status = cluster.node_object()["status"]
    for shown in (status["capacity"], status["allocatable"]):
        assert int(shown["aliyun.com/gpu-mem"]) == size * int(shown["aliyun.com/gpu-count"])
    cluster.wait_gpushare_annotations(namespace)
    daemonset = cluster.get("daemonset", "gpushare-agent", "-n", SYSTEM)
    assert daemonset["status"]["desiredNumberScheduled"] == 1


@pytest.fixture(scope="module")
def webhook(
    installation: Installation, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    installation.install()
    with open_extender(installation, request, tmp_path_factory.mktemp("extender")) as extender:
        extender.install_webhook()
        yield


def test_a_pod_with_hamis_names_gets_its_share(
    cluster: Cluster, installation: Installation, webhook: None, namespace: str
) -> None:
    """In a namespace with the label: memory in blocks, cores as asked; what cannot be had is denied with what to write, and
    a pod with HAMi's own label stays as it is."""
    cluster.run("label", "namespace", namespace, "gpushare-agent/vgpu-names=enabled")

    def pod(name: str, **limits: int) -> Object:
        asked = {f"nvidia.com/{key.replace('_', '-')}": value for key, value in limits.items()}
        return cluster.pod_of(name, cluster.container(resources={"limits": asked}))

    cluster.start(
        namespace, pod("share", gpu=1, gpumem=3000, gpucores=30), pod("memory", gpu=1, gpumem=3000), pod("whole", gpu=1)
    )
    ledger = installation.wait_ledger(namespace, 3)
    found = {name.split("/")[1]: (cores, memory / GIB) for name, (cores, memory, _) in ledger.items()}
    assert (found["share"], found["memory"], found["whole"][0]) == ((30, 3.0), (1, 3.0), 100)
    annotations = cluster.pods(namespace)["memory"]["metadata"]["annotations"]
    assert annotations["tencent.com/vcuda-core-limit"] == "100"
    with pytest.raises(KubectlError, match=r"write nvidia\.com/gpumem, in MiB"):
        cluster.apply(pod("part", gpu=1, gpumem_percentage=50), namespace=namespace)
    dry_run = ("-n", namespace, "apply", "--dry-run=server", "-o", "json", "-f", "-")
    chosen = pod("chosen", gpu=1)
    chosen["metadata"]["annotations"] = {"nvidia.com/use-gputype": "A100"}
    taken = json.loads(cluster.run(*dry_run, stdin=json.dumps(chosen)))
    assert taken["metadata"]["annotations"]["nvidia.com/use-gputype"] == "A100"
    assert taken["spec"]["containers"][0]["resources"]["limits"] == {"tencent.com/vcuda-core": "100"}
    left_alone = pod("other", gpu=1)
    left_alone["metadata"]["labels"] = {"hami.io/webhook": "ignore"}
    (made,) = json.loads(cluster.run(*dry_run, stdin=json.dumps(left_alone)))["spec"]["containers"]
    assert made["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    cluster.delete_pods(namespace)


def test_hamis_case_of_overcommit_by_its_own_names(
    cluster: Cluster, installation: Installation, webhook: None, namespace: str
) -> None:
    cluster.run("label", "namespace", namespace, "gpushare-agent/vgpu-names=enabled")
    assert_waits_while_it_asks_for_more_than_is_free(cluster, installation, namespace, "nvidia.com/gpu", counted=CORE)
    cluster.delete_pods(namespace)
