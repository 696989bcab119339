"""Reads the manifests for tests, and applies patches as kustomize does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.core.settings.settings import Settings, load_settings
from gpushare_agent.sandbox.api import patch as api_patch

MANIFESTS = Path(__file__).parents[2] / "manifests"
SETTINGS_DIRECTORY = Path("/etc/gpushare-agent")


def documents(path: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((MANIFESTS / path).read_text(encoding="utf-8")) if item]


def rendered(path: Path | str) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` sends. Skips the test where kubectl is not installed."""
    return [item for item in yaml.safe_load_all(_rendered_text(MANIFESTS / path)) if item]


def kustomized(
    folder: Path, resources: Iterable[str], components: Iterable[str] = (), **fields: Any
) -> list[dict[str, Any]]:
    """The objects of a user's kustomization in `folder`, of resources and components below manifests/, with more fields.
    Without the namespace that kustomize gives to kinds that it does not know; the API server removes it."""
    above = Path(os.path.relpath(MANIFESTS, folder))
    text = {
        "resources": [f"{above}/{one}" for one in resources],
        "components": [f"{above}/{one}" for one in components],
        **fields,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    found = rendered(folder)
    for one in found:
        if one["kind"].startswith("ValidatingAdmissionPolicy") or one["kind"] == "DeviceClass":
            one["metadata"].pop("namespace", None)
    return found


@cache
def _rendered_text(directory: Path) -> bytes:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    found = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr.decode()
    return found.stdout


def daemon_set() -> dict[str, Any]:
    (found,) = documents("base/daemonset.yaml")
    return found


def pod_spec() -> dict[str, Any]:
    return daemon_set()["spec"]["template"]["spec"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: str(item.get("value", "a-node")) for item in container["env"] if "$patch" not in item}


def deployed() -> Settings:
    """The settings file as the pods see it, with volume.conf at its place beside it."""
    return load_settings([], {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}).settings


def in_sources(path: Path) -> Path:
    """The file of this repository that the ConfigMap shows at `path`."""
    assert path.parent == SETTINGS_DIRECTORY
    return MANIFESTS / "base" / path.name


def host_mounts(container: dict[str, Any], spec: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """mountPath -> the mount, with the host's path under `host`."""
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    return {Path(m["mountPath"]): m | {"host": host[m["name"]]} for m in container["volumeMounts"] if m["name"] in host}


def mount_of(path: Path, mounts: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    return next(mounts[parent] for parent in (path, *path.parents) if parent in mounts)


def by_name(items: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """After a strategic merge, which is what a patch of a kustomization is."""
    return api_patch.patched(base, patch, api_patch.STRATEGIC)


def patched(*files: str) -> dict[str, Any]:
    """The DaemonSet's pod after the patches."""
    found = daemon_set()
    for file in files:
        (patch,) = documents(file)
        found = merged(found, patch)
    return found["spec"]["template"]["spec"]


def effective_settings(spec: dict[str, Any]) -> Settings:
    """The settings of the agent's container: its variables over the file."""
    (container,) = spec["containers"]
    environ = variables(container) | {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}
    return load_settings(container.get("args", []), environ).settings


def volumes_are_those_mounted(spec: dict[str, Any]) -> bool:
    containers = (*spec.get("initContainers", []), *spec["containers"])
    return {v["name"] for v in spec["volumes"]} == {m["name"] for c in containers for m in c["volumeMounts"]}
