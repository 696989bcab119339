"""The chart on a cluster: installed, tested and upgraded with Helm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM, Installation
from tests.e2e.release import Release, open_release
from tests.e2e.test_manifests import dry_run
from tests.e2e.test_upgrade import without_rejection
from tests.manifests.support_chart import template

pytestmark = pytest.mark.e2e


@pytest.fixture
def release(cluster: Cluster, installation: Installation, tmp_path: Path) -> Iterator[Release]:
    """In the place of the run's own installation."""
    with open_release(cluster, installation, tmp_path) as release:
        yield release


def test_a_release_serves_shares_and_passes_its_own_test(
    cluster: Cluster, installation: Installation, release: Release, namespace: str
) -> None:
    """`helm test` checks the node with the agent's own rights and mounts."""
    cluster.start(namespace, cluster.pod("share", 40, 8))
    ((cores, _, gpus),) = installation.wait_ledger(namespace, 1).values()
    assert (cores, len(gpus)) == (40, 1)
    assert "errors 0" in release.test()


def test_an_api_server_takes_all_that_the_chart_can_install(
    cluster: Cluster, installed: Installation, tmp_path: Path
) -> None:
    """Strict decoding, validation and admission, as for the kustomizations; Prometheus' own kinds aside."""
    on = {"enabled": True}
    webhook = {"annotations": {"cert-manager.io/inject-ca-from": "gpushare-system/gpushare-extender"}, **on}
    reached = {"extraFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], **on}
    choices = {"isolation": "mps", "dra": {"wholeGpus": on, **on}, "gpuMem": on, "staticPods": on, "networkPolicy": on}
    choices |= {"displaySocket": on, "runtimeSocket": on, "resizePolicy": on, "config": {"map": {"own": {}}}}
    choices |= {"extender": {"networkPolicy": reached, "scheduler": on, "claimsWebhook": webhook, **on}}
    choices |= {"runtimeClassName": ""}  # the pod of helm test would be refused where there is no RuntimeClass nvidia
    done = template(choices, tmp_path)
    assert done.returncode == 0, done.stderr
    dry_run(cluster, done.stdout)


def test_another_owner_has_no_conflict_and_changes_nothing(cluster: Cluster, release: Release) -> None:
    """Server-side apply, which Argo CD can do, takes some fields as one value, with their defaults in them."""
    on = {"enabled": True}
    webhook = {"annotations": {"cert-manager.io/inject-ca-from": f"{SYSTEM}/gpushare-extender"}, **on}
    reached = {"extraFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], **on}
    release.upgrade(
        extender={"scheduler": on, "claimsWebhook": webhook, "networkPolicy": reached, **on},
        **dict.fromkeys(("resizePolicy", "networkPolicy", "staticPods", "gpuMem", "openshift"), on),
    )
    text = release.rendered()
    before = _objects(cluster, text)
    for _ in range(2):
        cluster.run("apply", "--server-side", "--field-manager=another", "-f", "-", stdin=text)
        cluster.run("diff", "--server-side", "--field-manager=another", "-f", "-", stdin=text)
        release.upgrade()
        assert _objects(cluster, text) == before


def _objects(cluster: Cluster, text: str) -> dict[tuple[str, str], Any]:
    """As the cluster has them, without what it writes itself and who owns what; without the pod of `helm test`."""
    found = {}
    for one in yaml.safe_load_all(text):
        if "helm.sh/hook" not in one["metadata"].get("annotations", {}):
            flags = [f"--namespace={one['metadata']['namespace']}"] if "namespace" in one["metadata"] else []
            kind = f"{one['kind']}.{one['apiVersion'].partition('/')[0]}" if "/" in one["apiVersion"] else one["kind"]
            live = cluster.get(kind, one["metadata"]["name"], *flags)
            metadata = {key: live["metadata"].get(key) for key in ("labels", "generation")}
            found[one["kind"], one["metadata"]["name"]] = {**live, "metadata": metadata, "status": None}
    return found


def test_an_upgrade_with_a_changed_value_rejects_no_pod(
    cluster: Cluster, installation: Installation, release: Release, namespace: str
) -> None:
    """The changed settings roll the DaemonSet, and the agents hand over in the middle of a burst."""
    before = set(installation.agents())
    without_rejection(cluster, installation, namespace, lambda: release.upgrade(logLevel="debug"))
    assert before.isdisjoint(installation.agents())
    text = cluster.get("configmap", "gpushare-agent", "-n", SYSTEM)["data"]["settings.yaml"]
    assert "level: debug" in text
