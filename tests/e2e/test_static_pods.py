"""A static pod gets a share, and is one pod for the agent whatever the API server has of it. Needs --static-pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, KubectlError, Object
from tests.e2e.installation import SYSTEM, Installation

pytestmark = pytest.mark.e2e
BLOCK = 256 * 1024 * 1024


class StaticPod:
    """The file of one static pod; `name` is its name in the API server."""

    def __init__(self, cluster: Cluster, folder: Path, namespace: str) -> None:
        self._cluster = cluster
        self._file = folder / f"gpushare-e2e-{cluster.suffix}.yaml"
        self.namespace = namespace
        self.name = f"static-{cluster.node.lower()}"
        self.key = f"{namespace}/{self.name}/main"

    def write(self, core: int, memory: int, *, command: str = "") -> None:
        """At once as a whole: the kubelet watches the folder. JSON is YAML."""
        pod = self._cluster.pod_of("static", self._cluster.container(core, memory, command=command))
        pod["metadata"]["namespace"] = self.namespace
        del pod["spec"]["nodeSelector"]
        hidden = self._file.with_name(f".{self._file.name}")
        hidden.write_text(json.dumps(pod), encoding="utf-8")
        hidden.replace(self._file)

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def mirror(self) -> Object | None:
        return self._cluster.pods(self.namespace).get(self.name)

    def wait_running(self, hash_before: str = "") -> Object:
        """Its mirror pod, once it runs under another hash than that."""

        def poll() -> Object | None:
            pod = self.mirror()
            if pod is None or pod["status"].get("phase") != "Running":
                return None
            return pod if _hash(pod) != hash_before else None

        return self._cluster.wait_for(f"static pod {self.name} runs", poll)


def _hash(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["kubernetes.io/config.mirror"])


@pytest.fixture
def static_pod(cluster: Cluster, namespace: str) -> Iterator[StaticPod]:
    pod = StaticPod(cluster, cluster.path("static-pods"), namespace)
    yield pod
    pod.remove()
    cluster.wait_for("the static pod's mirror pod is gone", lambda: pod.mirror() is None)


@pytest.fixture
def reading(static_pod: StaticPod, installation: Installation) -> Installation:
    """The agent has the right to read the kubelet's list."""
    return _install_reading(installation)


def _install_reading(installation: Installation, **more: Any) -> Installation:
    """With the component for the kubelet's certificate, whoever signed it. Skips where the agent trusts it with neither."""
    for components in (["components/static-pods"], ["components/static-pods", "components/static-pods-self-signed"]):
        installation.install(components=components, **more)
        try:
            found = installation.exec("gpushare-agent", "check", timeout_s=120)
        except KubectlError as error:  # other findings may be errors: the text is the same
            found = str(error)
        if "certificate is not verified" not in found:
            return installation
    pytest.skip("this node's kubelet has no certificate of the cluster's CA, nor its own: docs/how-to/static-pods.md")


def _names_gpu(pod: Object | None, index: int) -> bool:
    annotations = pod["metadata"].get("annotations", {}) if pod else {}
    return bool(annotations.get("tencent.com/predicate-gpu-idx-0") == str(index))


def test_a_static_pod_gets_a_share(cluster: Cluster, reading: Installation, static_pod: StaticPod) -> None:
    """Under the kubelet's UID; its mirror pod is annotated. It keeps it over a restart of the agent, and when the mirror
    pod is deleted by force."""
    static_pod.write(40, 8)
    pod = static_pod.wait_running()
    ((key, share),) = reading.wait_ledger(static_pod.namespace, 1).items()
    assert (key, share[:2]) == (static_pod.key, (40, 8 * BLOCK))
    records = reading.kubelet_records([{"metadata": {"uid": _hash(pod)}}])
    assert set(records) == {_hash(pod)}
    cluster.wait_for("the mirror pod names its GPU", lambda: _names_gpu(static_pod.mirror(), share[2][0]))
    reading.signal()

    def recovered() -> bool:
        try:
            return reading.ledger().get(static_pod.key) == share
        except KubectlError:  # it does not serve yet
            return False

    cluster.wait_for("the new agent has it", recovered)
    cluster.run("-n", static_pod.namespace, "delete", "pod", static_pod.name, "--force", "--grace-period=0")
    cluster.wait_for("the kubelet made another mirror pod", lambda: static_pod.mirror() is not None)
    assert reading.ledger()[static_pod.key] == share


def test_a_changed_file_is_another_pod(cluster: Cluster, reading: Installation, static_pod: StaticPod) -> None:
    """It gets what it asks for now, and the former share is free; a file that is removed frees its own."""
    static_pod.write(40, 8)
    first = static_pod.wait_running()
    static_pod.write(60, 12)
    static_pod.wait_running(_hash(first))
    cluster.wait_for(
        "the second share alone is allocated",
        lambda: [share[:2] for share in reading.ledger().values()] == [(60, 12 * BLOCK)],
    )
    static_pod.remove()
    reading.wait_ledger(static_pod.namespace, 0)


def test_without_the_component_it_is_refused_and_the_log_says_why(
    cluster: Cluster, static_pod: StaticPod, installed: Installation
) -> None:
    """There is no object that could say it."""
    static_pod.write(40, 8)
    cluster.wait_for(
        "the agent's log names the component",
        lambda: "manifests/components/static-pods" in cluster.run("-n", SYSTEM, "logs", installed.agent()),
    )
    assert static_pod.mirror() is None
