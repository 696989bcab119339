"""A user's kustomization may change the namespace, the names and the labels of everything: all references still fit.

kustomize rewrites references that it knows, and no text: not in a policy's expression, not in a settings file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.support_manifests import MANIFESTS, documents, kustomized

Objects = list[dict[str, Any]]
RESOURCES = ["base", "extender", "extender/second-scheduler", "resize", "mps-daemon", "check"]
NOT_TOGETHER = {
    "dra-whole-gpus",
    "static-pods-self-signed",
    "without-cleanup",
    "without-node-facts",
    "driver-container",
}
COMPONENTS = [
    str(path.parent.relative_to(MANIFESTS))
    for path in sorted(MANIFESTS.glob("**/components/*/kustomization.yaml"))
    if path.parent.name not in {*NOT_TOGETHER, "without-tls"}
]
NAMESPACE = {"namespace": "gpu-team"}
NAMES = {"namePrefix": "team-", "nameSuffix": "-x"}
LABELS = {"team": "gpu", "app.kubernetes.io/part-of": "platform"}
VARIANTS: dict[str, dict[str, Any]] = {
    "namespace": NAMESPACE,
    "names": NAMES,
    "both": {**NAMESPACE, **NAMES},
    "commonLabels": {"commonLabels": LABELS},
    "labels": {"labels": [{"pairs": LABELS, "includeSelectors": True}]},
    "labels-of-templates": {"labels": [{"pairs": LABELS, "includeTemplates": True}]},
}


@pytest.fixture(scope="module", params=VARIANTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Everything that can be installed at once, by one kustomization."""
    folder = tmp_path_factory.mktemp("own")
    return kustomized(folder, RESOURCES, COMPONENTS, **VARIANTS[request.param])


def of_kind(found: Objects, *kinds: str) -> Objects:
    return [one for one in found if one["kind"] in kinds]


def names(found: Objects, *kinds: str) -> set[tuple[str, str]]:
    """Namespace and name."""
    return {(one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in of_kind(found, *kinds)}


def pods(found: Objects) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each program, and its pods' template."""
    for one in of_kind(found, "DaemonSet", "Deployment", "Job"):
        yield one, one["spec"]["template"]


def test_nothing_is_left_in_another_namespace(tmp_path: Path) -> None:
    """No object, and no text."""
    found = kustomized(tmp_path, RESOURCES, COMPONENTS, **NAMESPACE)
    assert not re.findall(r".{40}(?:gpushare|kube)-system.{20}", str(found))
    assert {one["metadata"].get("namespace", "gpu-team") for one in found} == {"gpu-team"}
    assert [one["metadata"]["name"] for one in of_kind(found, "Namespace")] == ["gpu-team"]


def test_rights_are_bound_to_the_accounts_of_the_pods(found: Objects) -> None:
    """And to roles that exist; Kubernetes' own have `system:` in the name."""
    accounts = {
        (one["metadata"]["namespace"], template["spec"].get("serviceAccountName")) for one, template in pods(found)
    }
    assert {one for one in accounts if one[1]} == names(found, "ServiceAccount")
    for binding in of_kind(found, "RoleBinding", "ClusterRoleBinding"):
        assert {(one["namespace"], one["name"]) for one in binding["subjects"]} <= names(found, "ServiceAccount")
        role, namespace = binding["roleRef"], binding["metadata"].get("namespace", "")
        assert role["name"].startswith("system:") or (namespace, role["name"]) in names(found, role["kind"])


def test_every_policy_is_bound_and_knows_the_agents_account(found: Objects) -> None:
    """A binding without a policy, and a policy that matches nobody, do nothing in silence."""
    bound = {("", one["spec"]["policyName"]) for one in of_kind(found, "ValidatingAdmissionPolicyBinding")}
    assert bound == names(found, "ValidatingAdmissionPolicy")
    patterns = re.findall(r"userInfo\.username\.matches\('([^']*)'\)", str(found).replace("\\'", "'"))
    assert len(patterns) == 2
    for pattern in patterns:
        matched = {
            name
            for namespace, name in names(found, "ServiceAccount")
            if re.search(pattern, f"system:serviceaccount:{namespace}:{name}")
        }
        assert matched == {name for _, name in names(found, "ServiceAccount") if "gpushare-agent" in name}


def test_what_pods_mount_and_webhooks_ask_exists(found: Objects) -> None:
    """But what the user makes: Secrets, and ConfigMaps of his own."""
    made = names(found, "ConfigMap")
    for one, template in pods(found):
        for volume in template["spec"]["volumes"]:
            name = volume.get("configMap", {}).get("name", "")
            assert (
                name in ("", "gpushare-agent-nodes", "nvidia-plugin-config")
                or (one["metadata"]["namespace"], name) in made
            )
    for configuration in of_kind(found, "MutatingWebhookConfiguration"):
        for webhook in configuration["webhooks"]:
            service = webhook["clientConfig"]["service"]
            assert (service["namespace"], service["name"]) in names(found, "Service")


def test_selectors_find_the_pods_that_they_are_for(found: Objects) -> None:
    """Each those of one program, whatever labels are added."""
    labels = [template["metadata"]["labels"] for _, template in pods(found)]
    selectors = [one["spec"]["selector"] for one in of_kind(found, "Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(found, "DaemonSet", "Deployment")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(found, "PodDisruptionBudget", "PodMonitor")]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(found, "NetworkPolicy")]
    assert len(selectors) == 14
    for selector in selectors:
        wanted = {key: value for key, value in selector.items() if key != "gpushare-agent/role"}  # the leader's own
        assert len([one for one in labels if wanted.items() <= one.items()]) == 1, selector


def test_the_extender_lets_a_scheduler_of_another_kustomization_in(tmp_path: Path) -> None:
    """Which has not the labels of this one."""
    folder = "extender/components/network-policy"
    (policy,) = of_kind(kustomized(tmp_path, ["extender"], [folder], commonLabels=LABELS), "NetworkPolicy")
    (own,) = of_kind(documents(f"{folder}/network-policy.yaml"), "NetworkPolicy")
    assert policy["spec"]["ingress"] == own["spec"]["ingress"]


def test_older_programs_know_the_reference_to_a_policy_too() -> None:
    """kubectl before 1.32 does not, so each kustomization with a policy says it, or the base of its components does."""
    (known,) = documents("base/name-references.yaml")
    assert known["nameReference"][0]["fieldSpecs"][0]["path"] == "spec/policyName"
    for path in MANIFESTS.rglob("kustomization.yaml"):
        folder = path.parent
        has_policy = any(
            "ValidatingAdmissionPolicyBinding" in one.read_text(encoding="utf-8")
            for one in folder.glob("*policy*.yaml")
        )
        if ("components" not in folder.parts and has_policy) or folder.name == "base":
            (own,) = documents(f"{folder}/kustomization.yaml")
            assert [documents(f"{folder}/{one}") for one in own["configurations"]] == [[known]]


def test_behind_a_prefix_the_scheduler_asks_the_service_by_its_new_name(tmp_path: Path) -> None:
    """By the lines that the page shows, and a copy of the file."""
    page = (MANIFESTS.parent / "docs/reference/components.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(  configMapGenerator:.*?)\n  ```", page, flags=re.DOTALL)
    text = (MANIFESTS / "extender/second-scheduler/scheduler.yaml").read_text(encoding="utf-8")
    url = "https://team-gpushare-agent-extender-x:3456/scheduler"
    (tmp_path / "scheduler.yaml").write_text(text.replace("https://gpushare-agent-extender:3456/scheduler", url))
    changes = {**NAMESPACE, **NAMES, **yaml.safe_load(block)}
    found = kustomized(tmp_path, RESOURCES, **changes)
    (mounted,) = [
        volume["configMap"]["name"]
        for one, template in pods(found) if one["metadata"]["name"] == "team-gpushare-scheduler-x"
        for volume in template["spec"]["volumes"] if "configMap" in volume
    ]  # fmt: skip
    (settings,) = [one["data"] for one in of_kind(found, "ConfigMap") if one["metadata"]["name"] == mounted]
    (asked,) = yaml.safe_load(settings["scheduler.yaml"])["extenders"]
    host = asked["urlPrefix"].removeprefix("https://").partition(":")[0]
    assert ("gpu-team", host) in names(found, "Service")
