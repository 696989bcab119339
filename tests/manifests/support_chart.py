"""Renders the Helm chart for tests, and brings its objects and kustomize's into one form."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.support_manifests import MANIFESTS, kustomized

CHART = MANIFESTS.parent / "charts/gpushare-agent"
NAMESPACE = "gpushare-system"
RELEASE = "gpushare-agent"
HELM_LABELS = {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/instance"}
ORDERED_BY = {"env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Lists whose order means nothing, which kustomize and the chart build in different ones."""
Objects = dict[tuple[str, str], dict[str, Any]]
Spec = dict[str, Any]
ON = {"enabled": True}
SCHEDULER = {"scheduler": {"enabled": True, "image": {"tag": "v1.33.4"}}}
ALL_PODS: list[Spec] = [
    {"isolation": "mps", "extender": {"enabled": True, **SCHEDULER}},
    {"deviceListStrategy": "cdi-cri", "driverFromHost": ON},
    {"isolation": "vcuda", "vcuda": {"pruneDriverVolume": True}},
]
"""Values that have every pod and init container between them."""


def helm(*arguments: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Helm of the variable HELM or of the PATH. Skips the test where there is none."""
    program = os.environ.get("HELM") or shutil.which("helm")
    if not program:
        pytest.skip("helm is not installed, and the variable HELM names none")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def template(
    values: dict[str, Any], folder: Path, *flags: str, namespace: str = NAMESPACE
) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values over the chart's, and these flags; `folder` takes the file of the values."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return helm("template", RELEASE, CHART, "-n", namespace, "-f", file, *flags)


def chart_objects(values: dict[str, Any], folder: Path, *flags: str, namespace: str = NAMESPACE) -> Objects:
    """What `helm install` creates, hooks too."""
    done = template(values, folder, *flags, namespace=namespace)
    assert done.returncode == 0, done.stderr
    return _by_key(yaml.safe_load_all(done.stdout))


def kustomize_objects(
    folder: Path, *resources: str, components: Iterable[str] = (), namespace: str = NAMESPACE
) -> Objects:
    """What `kubectl apply -k` creates of a user's kustomization, but the namespace, which Helm makes by a flag."""
    changes = {} if namespace == NAMESPACE else {"namespace": namespace}
    objects = _by_key(kustomized(folder, resources, components, **changes))
    del objects["ConfigMap", "gpushare-agent-check"], objects["Namespace", namespace]
    return objects


def pods_of(objects: Objects) -> Iterator[tuple[str, Spec]]:
    """By the object's name."""
    for (kind, name), one in objects.items():
        if kind in ("DaemonSet", "Deployment", "Job"):
            yield name, one["spec"]["template"]["spec"]
        elif kind == "Pod":
            yield name, one["spec"]


def _by_key(objects: Iterable[dict[str, Any]]) -> Objects:
    found = [_plain(one) for one in objects if one]
    result = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(result) == len(found)
    return result


def _plain(one: dict[str, Any]) -> dict[str, Any]:
    """Without Helm's labels and checksum, ConfigMaps without kustomize's hash, texts in YAML read, lists in order."""
    metadata: dict[str, Any] = one["metadata"]
    labels = {key: value for key, value in metadata.pop("labels", {}).items() if key not in HELM_LABELS}
    metadata |= {"labels": labels} if labels else {}
    if one["kind"] == "ConfigMap":
        metadata["name"] = _without_hash(metadata["name"])
        one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
    template = one.get("spec", {}).get("template") if isinstance(one.get("spec"), dict) else None
    if template:
        annotations = template["metadata"].get("annotations", {})
        annotations.pop("checksum/settings", None)
        if not annotations:
            template["metadata"].pop("annotations", None)
        for volume in template["spec"].get("volumes", ()):
            if "configMap" in volume:
                volume["configMap"]["name"] = _without_hash(volume["configMap"]["name"])
    return _ordered(one)


def _without_hash(name: str) -> str:
    start, _, end = name.rpartition("-")
    return start if len(end) == 10 and end.isalnum() else name


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(one) for one in value]
    if not isinstance(value, dict):
        return value
    result = {key: _ordered(one) for key, one in value.items() if one != [] or key in ("drop", "apiGroups")}
    for key, by in ORDERED_BY.items():
        if key in result:
            result[key] = sorted(result[key], key=lambda one: one[by])
    return result
