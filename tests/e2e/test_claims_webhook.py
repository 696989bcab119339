"""Pods with old limits run by ResourceClaims, installed by docs/how-to/turn-limits-into-claims.md. As test_claims.py;
without a kube-proxy the API server needs --enable-aggregator-routing to reach the webhook."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, ENV_VISIBLE_DEVICES
from tests.e2e.cluster import CORE, Cluster, KubectlError, Object, manifest
from tests.e2e.extender import open_extender
from tests.e2e.installation import Installation, with_variables

pytestmark = pytest.mark.e2e
CLAIMED = 2
"""GPUs that are for claims; the others stay the device plugins'."""
OWN = {ENV_VISIBLE_DEVICES, "HOSTNAME"}
"""Variables whose values are each pod's own."""


@pytest.fixture(scope="module")
def webhook(
    installation: Installation, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    installation.cluster.needs_claims()
    variables = {"GPUSHARE_DRA__GPUS": ",".join(map(str, range(CLAIMED)))}
    installation.install(components=["components/dra"], patches=[with_variables(variables)])
    with open_extender(installation, request, tmp_path_factory.mktemp("extender")) as extender:
        extender.install_webhook()
        yield


@pytest.fixture
def asking(cluster: Cluster, webhook: None, namespace: str) -> str:
    cluster.run("label", "namespace", namespace, "gpushare-agent/claims=enabled")
    return namespace


def templates(cluster: Cluster, namespace: str) -> list[Object]:
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
    return list(cluster.read(path)["items"])


def old_pod(cluster: Cluster, name: str) -> Object:
    """As people have them: an init container that asks for as much, an elastic ceiling."""
    pod = cluster.pod_of(
        name,
        cluster.container(40, 16, name="a"),
        cluster.container(20, 4, name="b"),
        initContainers=[cluster.container(20, 4, name="init", command="true")],
    )
    pod["metadata"]["annotations"] = {CORE_LIMIT_ANNOTATION: "60"}
    return pod


def test_an_old_pod_gets_by_a_claim_what_the_device_plugin_gives_it(
    cluster: Cluster, installation: Installation, asking: str
) -> None:
    """The same manifest in two namespaces: one asks for claims, the other does not."""
    plain = f"{asking}-plain"
    labels = cluster.get("namespace", asking)["metadata"]["labels"]
    kept = {name: value for name, value in labels.items() if name.startswith("gpushare-e2e")}
    cluster.apply(manifest("v1", "Namespace", {"name": plain, "labels": kept}))
    cluster.wait_for("its account", lambda: cluster.read(f"/api/v1/namespaces/{plain}/serviceaccounts")["items"])
    for namespace in (asking, plain):
        cluster.start(namespace, old_pod(cluster, "old"))
    spec, old_spec = (cluster.pods(namespace)["old"]["spec"] for namespace in (asking, plain))
    assert [one["name"] for one in spec["resourceClaims"]] == ["gpushare-0", "gpushare-1"]
    assert CORE in old_spec["containers"][0]["resources"]["limits"] and "resourceClaims" not in old_spec
    assert len(templates(cluster, asking)) == 2 and not templates(cluster, plain)
    booked = {gpu["uuid"]: gpu["index"] for gpu in installation.view()["gpus"]}
    for container in ("a", "b"):
        by_claim, by_plugin = (cluster.environment(namespace, "old", container) for namespace in (asking, plain))
        assert by_plugin.keys() <= by_claim.keys()
        different = {name for name, value in by_plugin.items() if by_claim[name] != value}
        assert different <= OWN, "a claim sets these, and what would lift its limits"
        assert booked[by_claim[ENV_VISIBLE_DEVICES]] < CLAIMED <= booked[by_plugin[ENV_VISIBLE_DEVICES]]
    for namespace in (asking, plain):
        cluster.delete_pods(namespace)
    cluster.run("delete", "namespace", plain, "--wait=false")


def test_a_dry_run_and_a_denied_pod_create_nothing(cluster: Cluster, asking: str) -> None:
    """The denial has the agents' own sentence."""
    pod = json.dumps(old_pod(cluster, "old"))
    cluster.run("-n", asking, "apply", "--dry-run=server", "-f", "-", stdin=pod)
    with pytest.raises(KubectlError, match="the next valid numbers of cores are 100 and 200"):
        cluster.apply(cluster.pod("wrong", 150, 4), namespace=asking)
    assert not templates(cluster, asking) and not cluster.pods(asking)
