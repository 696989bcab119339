"""What the project ships is what an API server takes: strict decoding, defaulting, validation, admission."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, KubectlError
from tests.e2e.installation import MANIFESTS, SYSTEM, Installation

pytestmark = pytest.mark.e2e
BEHIND = {"driver-container": ["vcuda"], "prune-driver-volume": ["vcuda"]}
"""The components that a component's own text says it is to be listed behind."""
KUSTOMIZATIONS = sorted(
    str(path.parent.relative_to(MANIFESTS))
    for path in MANIFESTS.rglob("kustomization.yaml")
    if "kind: Kustomization" in path.read_text(encoding="utf-8")
)
COMPONENTS = sorted(
    path.parent.relative_to(MANIFESTS)
    for path in MANIFESTS.rglob("kustomization.yaml")
    if "kind: Component" in path.read_text(encoding="utf-8")
)
SAMPLES = sorted((MANIFESTS / "samples").glob("*.yaml"))


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_an_api_server_takes_a_kustomization(cluster: Cluster, installed: Installation, folder: str) -> None:
    """Each folder that `kubectl apply -k` is for, beside what is installed."""
    dry_run(cluster, cluster.run("kustomize", str(MANIFESTS / folder)))


@pytest.mark.parametrize("path", COMPONENTS, ids=str)
def test_an_api_server_takes_a_component(cluster: Cluster, installed: Installation, path: Path) -> None:
    """Each with the kustomization that it is for, and those components that it must stand behind."""
    top = path.parts[: path.parts.index("components")]
    before = [str(path.with_name(name)) for name in BEHIND.get(path.name, [])]
    text = installed.render(str(Path(*top)) if top else "base", components=[*before, str(path)])
    dry_run(cluster, text)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_an_api_server_takes_a_sample(cluster: Cluster, namespace: str, path: Path) -> None:
    """The pods of the guide."""
    assert "server dry run" in cluster.run("apply", "--dry-run=server", "-n", namespace, "-f", str(path))


def dry_run(cluster: Cluster, rendered: str) -> None:
    """As one would apply it; the Job of `check` has no name before it is created."""
    rendered = rendered.replace("NODE-TO-CHECK", cluster.node)
    verb = "create" if "generateName:" in rendered else "apply"
    try:
        shown = cluster.run(verb, "--dry-run=server", "--validate=strict", "-f", "-", stdin=rendered)
    except KubectlError as error:
        if "no matches for kind" in str(error):
            pytest.skip(f"the cluster lacks a kind: {error}"[:300])
        raise
    assert "server dry run" in shown
    assert SYSTEM in rendered or "resize" in rendered
