"""The manifests agree with the code: settings exist, rights suffice and are no more, samples are pods that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.apps.node_check_api import CLEANUP_RIGHT, NEEDED_RIGHTS
from gpushare_agent.model.names import CORES_PER_CARD, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.settings import Settings, load_settings

MANIFESTS = Path(__file__).parent.parent / "manifests"


def documents(path: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((MANIFESTS / path).read_text(encoding="utf-8")) if item]


def daemon_set() -> dict[str, Any]:
    (found,) = documents("base/daemonset.yaml")
    return found


def pod_spec() -> dict[str, Any]:
    return daemon_set()["spec"]["template"]["spec"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: str(item.get("value", "a-node")) for item in container["env"] if "$patch" not in item}


def rules() -> list[dict[str, Any]]:
    return [rule for item in documents("base/rbac.yaml") if item["kind"] == "ClusterRole" for rule in item["rules"]]


def test_the_daemon_sets_settings_are_accepted_by_the_agent() -> None:
    """Its variables and its settings file load, and the probes reach the port that they set."""
    (container,) = pod_spec()["containers"]
    environ = variables(container)
    assert environ["GPUSHARE_CONFIG"] == "/etc/gpushare-agent/settings.yaml"
    loaded = load_settings(
        container.get("args", []), environ | {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}
    )
    assert loaded.settings.node_name == "a-node"
    assert loaded.settings.web.addr == "0.0.0.0"
    assert container["ports"][0]["containerPort"] == loaded.settings.web.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]


def test_every_path_that_the_agent_uses_is_mounted_from_the_host() -> None:
    """Each directory of the settings lies below a host path, writable where the agent writes."""
    (container,) = pod_spec()["containers"]
    settings = load_settings([], {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}).settings
    host_paths = {volume["name"] for volume in pod_spec()["volumes"] if "hostPath" in volume}
    mounts = {Path(m["mountPath"]): m for m in container["volumeMounts"] if m["name"] in host_paths}

    def mount_of(path: Path) -> dict[str, Any]:
        return next(mounts[parent] for parent in (path, *path.parents) if parent in mounts)

    assert not mount_of(settings.kubelet.device_plugin_path).get("readOnly")
    assert mount_of(settings.kubelet.pod_resources_socket)["readOnly"]
    assert mount_of(settings.runtime.cgroup_root)["readOnly"]
    used = (settings.kubelet.device_plugin_path, settings.kubelet.pod_resources_socket, settings.runtime.cgroup_root)
    assert {mount_of(path)["mountPath"] for path in used} == {str(path) for path in mounts}, "mounted for nothing"
    assert Path("/var/lib/kubelet") not in mounts
    assert "hostPID" not in pod_spec()


def test_the_container_is_not_privileged_and_has_no_capability() -> None:
    """Root is needed for the kubelet's files, nothing beyond."""
    (container,) = pod_spec()["containers"]
    context = container["securityContext"]
    assert not context.get("privileged")
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert pod_spec()["priorityClassName"] == "system-node-critical"
    assert pod_spec()["enableServiceLinks"] is False


def test_the_roles_have_no_wildcard_and_exactly_the_rights_that_check_asks_for() -> None:
    """What `gpushare-agent check` calls needed is given, and nothing else."""
    assert all("*" not in rule[part] for rule in rules() for part in ("apiGroups", "resources", "verbs"))
    given = {(verb, resource) for rule in rules() for verb in rule["verbs"] for resource in rule["resources"]}
    assert given == {*NEEDED_RIGHTS, CLEANUP_RIGHT}


def test_every_binding_names_a_role_and_the_pods_account() -> None:
    """The roles reach the pods."""
    found = documents("base/rbac.yaml")
    roles = {item["metadata"]["name"] for item in found if item["kind"] == "ClusterRole"}
    bindings = [item for item in found if item["kind"] == "ClusterRoleBinding"]
    assert {item["roleRef"]["name"] for item in bindings} == roles
    for binding in bindings:
        (subject,) = binding["subjects"]
        assert subject["name"] == pod_spec()["serviceAccountName"]
        assert subject["namespace"] == daemon_set()["metadata"]["namespace"]


def test_every_file_of_the_base_and_the_overlay_is_listed() -> None:
    """kustomize applies what is there, and nothing is forgotten."""
    (base,) = documents("base/kustomization.yaml")
    listed = {*base["resources"], *base["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert listed == {path.name for path in (MANIFESTS / "base").iterdir()}
    (overlay,) = documents("overlays/simulated/kustomization.yaml")
    assert (MANIFESTS / "overlays/simulated" / overlay["resources"][0]).resolve() == MANIFESTS / "base"
    assert all((MANIFESTS / "overlays/simulated" / patch["path"]).exists() for patch in overlay["patches"])
    for mount in ("settings",):
        (volume,) = [v for v in pod_spec()["volumes"] if v["name"] == mount]
        assert volume["configMap"]["name"] == base["configMapGenerator"][0]["name"]


def test_every_file_of_a_component_is_listed_and_patches_what_the_base_has() -> None:
    """A patch for an object that is not there would be an error of kustomize."""
    base = {
        (item["kind"], item["metadata"]["name"])
        for file in ("daemonset.yaml", "rbac.yaml")
        for item in documents(f"base/{file}")
    }
    components = sorted((MANIFESTS / "components").iterdir())
    assert [path.name for path in components] == ["cgroup-v1", "whole-kubelet-directory", "without-cleanup"]
    for directory in components:
        (component,) = documents(f"components/{directory.name}/kustomization.yaml")
        assert component["kind"] == "Component"
        files = {patch["path"] for patch in component["patches"]}
        assert files | {"kustomization.yaml"} == {path.name for path in directory.iterdir()}
        for file in files:
            (patch,) = documents(f"components/{directory.name}/{file}")
            assert (patch["kind"], patch["metadata"]["name"]) in base


def test_without_cleanup_takes_the_right_and_the_setting_away_together() -> None:
    """One without the other would be a warning of `check`, or a right that nothing uses."""
    role, binding, setting = (
        documents(f"components/without-cleanup/{name}.yaml")[0] for name in ("no-role", "no-binding", "setting")
    )
    assert role["$patch"] == binding["$patch"] == "delete"
    given = [item for item in documents("base/rbac.yaml") if item["kind"] == "ClusterRole"]
    (removed,) = [item for item in given if item["metadata"]["name"] == role["metadata"]["name"]]
    rights = [(verb, resource) for rule in removed["rules"] for verb in rule["verbs"] for resource in rule["resources"]]
    assert rights == [CLEANUP_RIGHT]
    (container,) = setting["spec"]["template"]["spec"]["containers"]
    assert load_settings([], variables(container)).settings.allocation.cleanup_rejected_pods is False


def test_the_whole_directory_component_replaces_every_mount_below_it() -> None:
    """Nothing of the narrow mounts stays behind the wide one."""
    (patch,) = documents("components/whole-kubelet-directory/mounts.yaml")
    spec = patch["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    removed = {mount["mountPath"] for mount in container["volumeMounts"] if mount.get("$patch") == "delete"}
    (agent,) = pod_spec()["containers"]
    assert removed == {m["mountPath"] for m in agent["volumeMounts"] if m["mountPath"].startswith("/var/lib/kubelet/")}
    gone = {volume["name"] for volume in spec["volumes"] if volume.get("$patch") == "delete"}
    assert gone == {m["name"] for m in agent["volumeMounts"] if m["mountPath"] in removed}


def test_the_check_job_is_the_daemon_sets_pod() -> None:
    """What it finds holds for the agent: same account, runtime, rights, host paths and cgroup root."""
    (job,) = documents("check/job.yaml")
    spec = job["spec"]["template"]["spec"]
    (checker,), (agent,) = spec["containers"], pod_spec()["containers"]
    for name in ("serviceAccountName", "runtimeClassName", "tolerations", "enableServiceLinks"):
        assert spec[name] == pod_spec()[name]
    assert (checker["image"], checker["securityContext"]) == (agent["image"], agent["securityContext"])
    assert all(item in agent["env"] for item in checker["env"])
    assert all(mount in agent["volumeMounts"] for mount in checker["volumeMounts"])
    assert spec["volumes"] == [volume for volume in pod_spec()["volumes"] if "configMap" not in volume]
    program, command, *flags = checker["command"]
    assert (program, command) == ("gpushare-agent", "check")
    deployed = load_settings([], {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}).settings
    assert load_settings(flags, {}).settings.runtime == deployed.runtime
    (kustomization,) = documents("check/kustomization.yaml")
    assert kustomization["images"] == documents("base/kustomization.yaml")[0]["images"]


def test_the_simulated_overlay_needs_no_driver() -> None:
    """It sets the simulated driver with settings that exist, on the same container, without NVIDIA's runtime."""
    (patch,) = documents("overlays/simulated/simulated.yaml")
    spec = patch["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] is None
    (container,) = spec["containers"]
    assert container["name"] == pod_spec()["containers"][0]["name"]
    assert load_settings([], variables(container)).settings.driver == "simulated"


@pytest.mark.parametrize("path", sorted((MANIFESTS / "samples").glob("*.yaml")), ids=lambda path: path.name)
def test_a_sample_is_a_pod_that_fits_the_default_simulated_node(path: Path) -> None:
    """All samples together run on the sandbox's default node, so that applying them exits 0."""
    settings = Settings()
    blocks_per_card = settings.simulated.card_memory_mib[0] // settings.resources.memory_block_mib
    for pod in documents(f"samples/{path.name}"):
        assert pod["kind"] == "Pod"
        assert pod["spec"]["runtimeClassName"] == "nvidia", "without it there is neither nvidia-smi nor libcuda"
        for container in pod["spec"]["containers"]:
            limits = container["resources"]["limits"]
            cores = limits[VCORE_RESOURCE]
            assert 0 < cores < CORES_PER_CARD or cores % CORES_PER_CARD == 0
            assert (0 < limits.get(VMEMORY_RESOURCE, 0) <= blocks_per_card) or cores >= CORES_PER_CARD


def test_sample_pods_have_names_of_their_own() -> None:
    """They can be applied together."""
    names = [pod["metadata"]["name"] for path in (MANIFESTS / "samples").glob("*.yaml") for pod in documents(str(path))]
    assert len(names) == len(set(names)) >= 4
