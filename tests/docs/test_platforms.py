"""docs/how-to/platforms.md agrees with what the chart and the manifests make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.agent.runtime.node_probes import RUNTIME_SOCKETS
from gpushare_agent.core.settings.reference import all_keys
from tests.docs.policies_page import ABOUT_RESOURCES, RULES, containers, pods, refused
from tests.manifests.support_chart import ALL_PODS, CHART, chart_objects, pods_of, template
from tests.manifests.support_manifests import MANIFESTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/platforms.md").read_text(encoding="utf-8")
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
MIRROR = "mirror.example"
GOOD: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "containers": [
        {
            "name": "one",
            "readinessProbe": {},
            "resources": {"requests": {"cpu": "1", "memory": "1"}, "limits": {"cpu": "1", "memory": "1"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
}
BAD: dict[str, dict[str, Any]] = {
    "disallow-host-path": {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]},
    "disallow-host-namespaces": {"hostPID": True},
    "require-run-as-nonroot": {"securityContext": {"runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}},
    "disallow-capabilities": {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
    "disallow-capabilities-strict": {"capabilities": {"drop": ["ALL"], "add": ["SETUID"]}},
    "disallow-privileged-containers": {"privileged": True},
    "restrict-seccomp-strict": {"securityContext": {"runAsNonRoot": True}},
    "restrict-apparmor-profiles": {"appArmorProfile": {"type": "Unconfined"}},
    "disallow-selinux": {"seLinuxOptions": {"type": "spc_t"}},
    "require-ro-rootfs": {"readOnlyRootFilesystem": False},
    "require-requests-limits": {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1", "memory": "1"}}},
    "–": {"resources": {"requests": {"cpu": "1", "memory": "1"}, "limits": {"memory": "1"}}},
    "require-pod-probes": {"readinessProbe": None},
}
"""By each rule's first policy what makes the good pod one that it refuses: of the pod, its container, or security."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0].partition(",")[0])
def test_a_rule_refuses_what_it_is_about_and_no_other_does(rule: Any) -> None:
    """But for the strict rule of capabilities, which refuses what the other one does, too."""
    assert not rule[2](GOOD)
    name = rule[0].partition(",")[0]
    others = [one for one in RULES if one[2](_worse(BAD[name])) and one is not rule]
    assert rule[2](_worse(BAD[name]))
    assert [one[0] for one in others] == (["disallow-capabilities-strict"] if name == "disallow-capabilities" else [])


def _worse(change: dict[str, Any]) -> dict[str, Any]:
    [(key, value)] = change.items()
    [good] = GOOD["containers"]
    if key in GOOD or key == "hostPID":
        return GOOD | change
    if key in good:
        kept = {name: one for name, one in good.items() if name != key}
        return GOOD | {"containers": [kept | ({} if value is None else change)]}
    return GOOD | {"containers": [good | {"securityContext": good["securityContext"] | change}]}


def test_the_extender_needs_no_exception_of_the_restricted_standard() -> None:
    """Nor does the second scheduler; both may run where the namespace enforces it."""
    found = [one for one in pods() if one[0] in ("gpushare-agent-extender", "gpushare-scheduler")]
    assert len(found) == 2
    assert [rule[0] for rule in RULES if rule[0] not in ABOUT_RESOURCES and refused(rule, found)] == []


def test_every_workload_of_the_manifests_is_among_the_pods_of_the_list() -> None:
    """A new one is asked for its exceptions, too. Static pods pass no admission."""
    kinds = ("DaemonSet", "Deployment", "Job")
    made = {
        one["metadata"]["name"]
        for path in MANIFESTS.rglob("*.yaml")
        if not {"samples", "check-simulated"} & set(path.parts)
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if one and one.get("kind") in kinds and one["metadata"].get("name")
    }
    assert made == {name for name, _, _ in pods()}


def test_the_page_names_every_image_that_a_cluster_or_a_build_pulls() -> None:
    """Those of the manifests by the name that the chart's values have, and the base of the build."""
    named = {
        found.partition(":")[0]
        for path in MANIFESTS.rglob("*.yaml")
        if "samples" not in path.parts
        for found in re.findall(r"^ +image: (\S+)$", path.read_text(encoding="utf-8"), flags=re.M)
    }
    based = set(re.findall(r"^ARG \w+_IMAGE=([^$\s]+)$", CONTAINERFILE, flags=re.M))
    assert named == {"gpushare-agent", "registry.k8s.io/kube-scheduler"} and len(based) == 1
    assert [image for image in named | based if f"`{image}" not in PAGE] == []


@pytest.mark.parametrize("values", ALL_PODS, ids=str)
def test_two_values_move_every_image_of_the_chart_to_a_mirror(values: dict[str, Any], tmp_path: Path) -> None:
    """The page gives both, and the one for the registry's secret."""
    scheduler = (
        {"enabled": False} | values.get("extender", {}).get("scheduler", {}) | {"image": {"repository": f"{MIRROR}/s"}}
    )
    moved = values | {
        "imagePullSecrets": [{"name": "mirror"}],
        "image": {"repository": f"{MIRROR}/a"},
        "extender": values.get("extender", {}) | {"scheduler": scheduler},
    }
    specs = [spec for _, spec in pods_of(chart_objects(moved, tmp_path))]
    assert [spec for spec in specs if spec.get("imagePullSecrets") != moved["imagePullSecrets"]] == []
    images = [one["image"] for spec in specs for one in containers(spec)]
    assert images and [image for image in images if not image.startswith(f"{MIRROR}/")] == []
    assert all(
        f"`{name}`" in PAGE for name in ("image.repository", "extender.scheduler.image.repository", "imagePullSecrets")
    )


def test_every_stage_of_the_image_that_installs_takes_a_mirror() -> None:
    """And each begins with an image that an argument names; the last one, which is shipped, has none of the mirrors."""
    stages = re.split(r"^(?=FROM )", CONTAINERFILE, flags=re.M)[1:]
    names = [stage.partition(" AS ")[2].partition("\n")[0] for stage in stages]
    for stage in stages:
        base = stage.split()[1]
        assert base in ("${PYTHON_IMAGE}", "${VCUDA_IMAGE}", *names[:-1]), base
        fetches = [line for line in re.findall(r"pip install .*", stage) if "--no-index" not in line]
        assert ("ARG PIP_INDEX_URL\n" in stage) == bool(fetches)
        assert ("ARG DEBIAN_MIRROR=" in stage) == ("apt-get" in stage)
    assert "ARG" not in stages[-1]
    assert all(f"--build-arg {name}=" in PAGE for name in ("PYTHON_IMAGE", "PIP_INDEX_URL", "DEBIAN_MIRROR"))


def test_every_value_of_the_chart_that_the_page_names_exists() -> None:
    """`NAME=VALUE`, or a name alone, in backquotes; but for those of the operator's own chart. So do settings."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", PAGE, flags=re.M | re.S)
    named = re.findall(r"`([a-z][A-Za-z]*(?:\.[a-z][A-Za-z]*)*)=[^`]*`|`([a-z]\w*(?:\.[a-z]\w*)+)`", text)
    chosen = {one or other for one, other in named} - OF_OTHERS
    assert len(chosen) > 6
    assert [name for name in sorted(chosen) if not _has(values, name.split("."))] == []
    settings = {name.removeprefix("settings.") for name in chosen if name.startswith("settings.")}
    assert sorted(settings - {key.name for key in all_keys()}) == []


def test_the_runtimes_directories_are_those_in_which_the_agent_looks() -> None:
    """Else the component's mount is of no use."""
    named = set(re.findall(r"`runtimeSocket\.directory=([^`]+)`", PAGE))
    assert len(named) > 2 and named <= {str(path.parent) for path in RUNTIME_SOCKETS}


OF_OTHERS = {
    "devicePlugin.enabled", "driver.enabled", "toolkit.enabled", "toolkit.installDir", "hostPaths.driverInstallDir",
    "nodeStatusExporter.enabled", "driver.kernelModuleConfig", "systemReserved.memory",
    "gke-no-default-nvidia-gpu-device-plugin",
}  # fmt: skip
"""Values of NVIDIA's operator, labels and settings that the page names."""


def _has(values: Any, path: list[str]) -> bool:
    """A map that is empty takes any name: of settings, or of a node's labels."""
    if not path:
        return True
    return isinstance(values, dict) and (not values or (path[0] in values and _has(values[path[0]], path[1:])))


@pytest.mark.parametrize("given", sorted(set(re.findall(r"`([a-z]\w+(?:\.\w+)*=[^`]+)`", PAGE.partition("\n## ")[0]))))
def test_what_a_row_sets_is_rendered(given: str, tmp_path: Path) -> None:
    """By itself, over the chart's defaults."""
    if given.partition("=")[0] in OF_OTHERS:
        pytest.skip("another chart's")
    done = template({}, tmp_path, "--set", given.replace('""', ""))
    assert done.returncode == 0, done.stderr


def test_every_row_has_its_source_or_was_tried() -> None:
    """What nobody tried stands in somebody's document."""
    rows = re.split(r"^- \*\*", PAGE.partition("\n## ")[0], flags=re.M)[1:]
    assert len(rows) > 9
    assert [
        row for row in rows if "https://" not in row and not row.startswith(("kubeadm", "NVIDIA's GPU Operator"))
    ] == []
