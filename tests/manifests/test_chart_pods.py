"""The pods of every rendering of the chart: each container has resources, and what a cluster asks of pods can be set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.policies_page import ABOUT_RESOURCES, RULES
from tests.manifests.support_chart import ALL_PODS, NAMESPACE, ON, Spec, chart_objects, pods_of
from tests.manifests.support_manifests import MANIFESTS, by_name
from tests.manifests.test_chart import CASES

KEYS = {
    "gpushare-agent": "agent",
    "gpushare-check": "agent",
    "gpushare-driver-devices": "driverDevices",
    "gpushare-mps": "mpsDaemon",
    "gpushare-agent-extender": "extender",
    "gpushare-scheduler": "scheduler",
}
"""Object -> the key of the value `pods` that changes its pod. The pod of `helm test` is the agent's."""


def _containers(pod: Spec) -> Iterator[tuple[str, Spec]]:
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            yield kind, container


@pytest.mark.parametrize("name", CASES)
def test_every_container_asks_for_cpu_and_memory_and_extender_and_scheduler_are_restricted(
    name: str, tmp_path: Path
) -> None:
    """Policies refuse others, and a node without requests is filled too far. By Kubernetes' Pod Security Standard
    `restricted`, whatever else is chosen."""
    for owner, pod in pods_of(chart_objects(CASES[name][0], tmp_path)):
        for _, container in _containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), (owner, container["name"])
        if KEYS[owner] not in ("extender", "scheduler"):
            continue
        assert [rule[0] for rule in RULES if rule[0] not in ABOUT_RESOURCES and rule[2](pod)] == []
        assert all("hostPort" not in port for _, container in _containers(pod) for port in container["ports"])


@pytest.mark.parametrize("values", ALL_PODS, ids=["mps-and-extender", "driver-from-host", "vcuda"])
def test_the_resources_of_every_container_can_be_set(values: Spec, tmp_path: Path) -> None:
    """What they had otherwise is kept, the limit of the agent's own driver too."""
    before = dict(pods_of(chart_objects(values, tmp_path)))
    limits = {"cpu": "2", "memory": "3Gi"}
    patches: dict[str, Spec] = {}
    for name, pod in before.items():
        for kind, container in _containers(pod):
            if name != "gpushare-check":
                one = {"name": container["name"], "resources": {"limits": limits}}
                patches.setdefault(KEYS[name], {}).setdefault(kind, []).append(one)
    after = dict(pods_of(chart_objects(values | {"pods": patches}, tmp_path)))
    assert after.keys() == before.keys()
    for name, pod in after.items():
        for kind, container in _containers(pod):
            was = by_name(before[name][kind])[container["name"]]
            assert container["resources"]["limits"] == was["resources"].get("limits", {}) | limits
            assert container["resources"]["requests"] == was["resources"]["requests"]
            assert {**container, "resources": 0} == {**was, "resources": 0}


@pytest.mark.parametrize("given", ["", "gpus"])
def test_one_priority_class_is_every_pods(given: str, tmp_path: Path) -> None:
    """Where quotas or policies keep the system's classes for others. `helm test` has none, and by default there are two."""
    values = ALL_PODS[0]
    found = dict(pods_of(chart_objects(values | {"priorityClassName": given}, tmp_path)))
    assert {pod.get("priorityClassName", "") for name, pod in found.items() if name != "gpushare-check"} == {given}
    default = dict(pods_of(chart_objects(values, tmp_path)))
    assert {name: pod.get("priorityClassName") for name, pod in default.items()} == {
        "gpushare-agent": "system-node-critical",
        "gpushare-mps": "system-node-critical",
        "gpushare-agent-extender": "system-cluster-critical",
        "gpushare-scheduler": "system-cluster-critical",
        "gpushare-check": None,
    }


def test_the_guides_quota_has_every_priority_class(tmp_path: Path) -> None:
    """Where a cluster admits pods of the system's classes only in namespaces with a ResourceQuota of them."""
    guide = (MANIFESTS.parent / "docs/how-to/install.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n( *apiVersion: v1\n *kind: ResourceQuota\n.*?)```", guide, re.S)
    ((scope,),) = [yaml.safe_load(text)["spec"]["scopeSelector"]["matchExpressions"]]
    pods = [
        pod for values in ALL_PODS for name, pod in pods_of(chart_objects(values, tmp_path)) if name != "gpushare-check"
    ]
    assert {pod["priorityClassName"] for pod in pods} == set(scope["values"])


def test_a_pods_place_and_security_can_be_set(tmp_path: Path) -> None:
    """Maps are merged, lists without names replaced. It goes before every other value."""
    tolerations = [{"key": "infra", "operator": "Exists"}]
    terms = [{"matchExpressions": [{"key": "infra", "operator": "Exists"}]}]
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    selinux = {"level": "s0:c1,c2", "type": "own_t"}
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy.test:3128"}
    values = {
        "priorityClassName": "gpus",
        "pods": {
            "extender": {
                "priorityClassName": "infra",
                "nodeSelector": {"infra": "yes"},
                "tolerations": tolerations,
                "affinity": {"nodeAffinity": node_affinity},
                "securityContext": {"runAsUser": 1234, "seLinuxOptions": selinux},
                "containers": [
                    {"name": "extender", "env": [proxy], "securityContext": {"appArmorProfile": {"type": "Unconfined"}}}
                ],
            },
            "agent": {"securityContext": {"seLinuxOptions": selinux}},
        },
    }
    changed, plain = (dict(pods_of(chart_objects({**ALL_PODS[0], **one}, tmp_path))) for one in (values, {}))
    extender, before = changed["gpushare-agent-extender"], plain["gpushare-agent-extender"]
    assert extender["priorityClassName"] == "infra"
    assert extender["nodeSelector"] == {"kubernetes.io/os": "linux", "infra": "yes"}
    assert extender["tolerations"] == tolerations
    assert extender["affinity"] == before["affinity"] | {"nodeAffinity": node_affinity}
    assert extender["securityContext"] == before["securityContext"] | {"runAsUser": 1234, "seLinuxOptions": selinux}
    (container,), (was,) = extender["containers"], before["containers"]
    assert container["securityContext"] == was["securityContext"] | {"appArmorProfile": {"type": "Unconfined"}}
    assert container["env"] == sorted([*was["env"], proxy], key=lambda one: str(one["name"]))
    assert changed["gpushare-scheduler"]["tolerations"] == plain["gpushare-scheduler"]["tolerations"]
    for name in ("gpushare-agent", "gpushare-check"):
        assert changed[name]["securityContext"] == {"seLinuxOptions": selinux}


def test_an_empty_list_takes_no_named_item_away(tmp_path: Path) -> None:
    """As kustomize has it; of what has no names, such as tolerations, it leaves nothing."""
    nothing = {"env": [], "volumeMounts": []}
    pods: dict[str, Spec] = {"agent": {"containers": [], "initContainers": [], "volumes": [], "tolerations": []}}
    pods |= {"extender": {"containers": [{"name": "extender", **nothing}]}}
    changed, plain = (dict(pods_of(chart_objects({**ALL_PODS[0], **one}, tmp_path))) for one in ({"pods": pods}, {}))
    assert plain["gpushare-agent"].pop("tolerations") and "tolerations" not in changed["gpushare-agent"]
    del changed["gpushare-check"], plain["gpushare-check"]
    assert changed == plain


def test_the_second_schedulers_image_may_have_a_digest(tmp_path: Path) -> None:
    """As the agent's."""
    image = {"repository": "mirror.test/kube-scheduler", "tag": "v1.33.4", "digest": f"sha256:{'0' * 64}"}
    scheduler = {"enabled": True, "scheduler": {"enabled": True, "image": image}}
    pod = dict(pods_of(chart_objects({"extender": scheduler}, tmp_path)))["gpushare-scheduler"]
    assert pod["containers"][0]["image"] == f"mirror.test/kube-scheduler@{image['digest']}"


@pytest.mark.parametrize("values", ALL_PODS, ids=["mps-and-extender", "driver-from-host", "vcuda"])
def test_openshifts_constraints_fit_every_pod(values: Spec, tmp_path: Path) -> None:
    """A pod with the host's paths has an account that may use `privileged`; every other one fits restricted-v2, which gives
    users and groups from the namespace's range and refuses fixed ones."""
    objects = chart_objects(values | {"openshift": ON}, tmp_path)
    binding = objects["RoleBinding", "gpushare-agent-privileged"]
    assert binding["roleRef"]["name"] == "system:openshift:scc:privileged"
    assert {one["namespace"] for one in binding["subjects"]} == {NAMESPACE}
    privileged = {one["name"] for one in binding["subjects"]}
    for name, pod in pods_of(objects):
        account = pod.get("serviceAccountName", "default")
        if any("hostPath" in volume for volume in pod["volumes"]):
            assert account in privileged, name
            assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
            assert ("mps" not in name and "devices" not in name) or pod["automountServiceAccountToken"] is False
        else:
            assert account not in privileged, name
            assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
            contexts = [container["securityContext"] for _, container in _containers(pod)]
            assert not any({"runAsUser", "runAsGroup"} & context.keys() for context in contexts)
