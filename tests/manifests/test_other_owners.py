"""Tools that apply the objects in their own way: Flux, Rancher, Argo CD, and a second owner by server-side apply."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.support_chart import CHART, helm, template
from tests.manifests.support_manifests import MANIFESTS
from tests.manifests.test_chart import CASES

LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def _copy_of_chart(folder: Path, *, version: str | None = None, with_links: bool = True) -> Path:
    """The chart in a repository of its own; without the link, as Flux' and Rancher's copies have it."""
    chart = folder / "repository/charts/gpushare-agent"
    shutil.copytree(CHART, chart, symlinks=True)
    if with_links:
        shutil.copytree(MANIFESTS, folder / "repository/manifests")
    else:
        (chart / "manifests").unlink()
    if version:
        text = re.sub(r"^version: \S+", f"version: {version}", (chart / "Chart.yaml").read_text(), flags=re.M)
        (chart / "Chart.yaml").write_text(text)
    return chart


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("2.0.0-alpha.1+13071af9d2c3", "gpushare-agent-2.0.0-alpha.1_13071af9d2c3"),
        (f"2.0.0+{'a' * 41}.{'b' * 60}", f"gpushare-agent-2.0.0_{'a' * 41}"),
        (f"2.0.0+{'a' * 100}", f"gpushare-agent-2.0.0_{'a' * 42}"),
    ],
)
def test_every_version_makes_a_label(version: str, label: str, tmp_path: Path) -> None:
    """Flux adds the commit or the digest behind a plus sign, which no label may have."""
    done = helm("template", "r", _copy_of_chart(tmp_path, version=version))
    assert done.returncode == 0, done.stderr
    for one in yaml.safe_load_all(done.stdout):
        assert one["metadata"]["labels"]["helm.sh/chart"] == label
        assert all(LABEL_VALUE.fullmatch(value) for value in one["metadata"]["labels"].values())


def test_a_chart_without_its_link_says_what_to_install(tmp_path: Path) -> None:
    """It names the link, and who leaves it out."""
    done = helm("template", "r", _copy_of_chart(tmp_path, with_links=False))
    assert done.returncode != 0
    for said in ("manifests is a symbolic link", "Flux, Rancher", "helm package charts/gpushare-agent", "install.md"):
        assert said in done.stderr
    guide = (MANIFESTS.parent / "docs/how-to/install.md").read_text(encoding="utf-8")
    assert "helm package charts/gpushare-agent" in guide


def test_the_manifests_say_what_an_api_server_would_add() -> None:
    """Every file, also what no component of the chart has."""
    files = [path for path in MANIFESTS.rglob("*.yaml") if path.parent.name != "monitoring"]
    assert len(files) > 50
    for path in files:
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            assert list(_left_to_the_server(one, str(path.relative_to(MANIFESTS)))) == []


@pytest.mark.parametrize("name", CASES)
def test_the_chart_says_what_an_api_server_would_add(name: str, tmp_path: Path) -> None:
    """Its own objects too: those of values."""
    for one in yaml.safe_load_all(template(CASES[name][0], tmp_path).stdout):
        assert list(_left_to_the_server(one, one["kind"])) == []


ATOMIC = {
    "fieldRef": {"apiVersion"},
    "matchConstraints": {"matchPolicy", "namespaceSelector", "objectSelector"},
    "resourceRules": {"scope"},
    "excludeResourceRules": {"scope"},
    "rules": {"scope"},
    "webhooks": {"matchPolicy", "namespaceSelector", "objectSelector", "timeoutSeconds", "reinvocationPolicy"},
    "service": {"port", "path"},
    "relabelings": {"action"},
    "metricRelabelings": {"action"},
}
"""Field -> what API servers, or Prometheus' CustomResourceDefinitions, write into it where it is missing. They take it as
one value: an owner that applies it without them is in conflict with the owner before, and a tool that compares shows a
difference that never ends."""


def _left_to_the_server(value: Any, path: str) -> Iterator[str]:
    """Where a default of such a field is missing."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _left_to_the_server(one, f"{path}[{number}]")
    if not isinstance(value, dict):
        return
    for field, below in value.items():
        for one in below if isinstance(below, list) else [below]:
            is_rule_of_rbac_or_alerts = field == "rules" and "operations" not in one
            if field in ATOMIC and isinstance(one, dict) and not is_rule_of_rbac_or_alerts:
                yield from (f"{path}.{field}.{missing}" for missing in ATOMIC[field] - one.keys())
            if field == "ports" and isinstance(one, dict) and value.get("from") is not None and "protocol" not in one:
                yield f"{path}.ports.protocol"
        yield from _left_to_the_server(below, f"{path}.{field}")


def test_a_missing_default_is_found() -> None:
    """In the form in which the manifests once had them."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    constraints = {"resourceRules": [rule], "matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}}
    for value, missing in (
        ({"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, [".valueFrom.fieldRef.apiVersion"]),
        ({"matchConstraints": constraints}, [".matchConstraints.resourceRules.scope"]),
        ({"matchConstraints": constraints | {"resourceRules": [rule | {"scope": "*"}]}}, []),
        ({"ingress": [{"from": [], "ports": [{"port": 1}]}]}, [".ingress[0].ports.protocol"]),
        ({"rules": [{"verbs": ["get"]}]}, []),
    ):
        assert list(_left_to_the_server(value, "")) == missing
