"""The manifests agree with the code: settings exist, rights suffice and are no more, samples are pods that fit."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.commands.check_api import CLEANUP_RIGHT, FACTS_RIGHT, NEEDED_RIGHTS, RUNTIME_CLASSES_RIGHT
from gpushare_agent.agent.delivery.volume_config import read_volume_config
from gpushare_agent.agent.delivery.volume_plan import VolumeName
from gpushare_agent.agent.runtime.node_probes import RUNTIME_SOCKETS
from gpushare_agent.core.model.names import CORES_PER_GPU, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.settings.settings import Settings, load_settings
from tests.manifests.support_manifests import (
    MANIFESTS,
    by_name,
    daemon_set,
    deployed,
    documents,
    host_mounts,
    mount_of,
    pod_spec,
    rendered,
    variables,
    volumes_are_those_mounted,
)

KUSTOMIZATIONS = sorted(
    str(path.parent.relative_to(MANIFESTS))
    for path in MANIFESTS.rglob("kustomization.yaml")
    if "components" not in path.parts
)
CONTAINERFILE = (MANIFESTS.parent / "Containerfile").read_text(encoding="utf-8")


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
    assert loaded.settings.web.addr == ""
    assert container["ports"][0]["containerPort"] == loaded.settings.web.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60, "a restart rejects pods: not for a busy node"


def test_every_path_that_the_agent_uses_is_mounted_from_the_host() -> None:
    """Each directory of the settings lies below a host path, writable where the agent writes, and no other is mounted."""
    (container,) = pod_spec()["containers"]
    settings, mounts = deployed(), host_mounts(container, pod_spec())
    assert settings.isolation == "gpushare" and settings.state_directory is not None
    of_containers = {settings.libgpushare.directory, settings.virtual_manager.path}
    writable = {*of_containers, settings.kubelet.device_plugin_path, settings.state_directory}
    only_read = {settings.kubelet.pod_resources_socket, settings.runtime.cgroup_root}
    assert all(not mount_of(path, mounts).get("readOnly") for path in writable)
    assert all(mount_of(path, mounts)["readOnly"] for path in only_read)
    for mount in (mount_of(path, mounts) for path in of_containers):
        assert mount["host"] == mount["mountPath"], "the answer to an Allocate names the host's paths"
    used = {mount_of(path, mounts)["mountPath"] for path in writable | only_read}
    assert used == {str(path) for path in mounts}, "mounted for nothing"
    assert Path("/var/lib/kubelet") not in mounts


def test_the_agents_own_sockets_lie_in_a_directory_of_the_pod() -> None:
    """Nothing of the host's /var/run is mounted for them, and the root file system is read-only."""
    (container,) = pod_spec()["containers"]
    settings, mounts = deployed(), {Path(m["mountPath"]): m["name"] for m in container["volumeMounts"]}
    for socket in (settings.control.socket, settings.display.socket):
        assert socket is not None
        volume = by_name(pod_spec()["volumes"])[mounts[socket.parent]]
        assert volume["emptyDir"]["medium"] == "Memory"


def test_the_debug_pages_are_for_the_pod_alone() -> None:
    """On its loopback, for `kubectl port-forward`: no file has a token, and the pod has a network of its own."""
    assert deployed().web.debug_token_file is None
    assert not pod_spec().get("hostNetwork")


def test_the_service_finds_the_pods_and_their_port_and_has_no_address() -> None:
    """Each agent speaks for its node alone; one that is not ready is found too."""
    (service,) = documents("base/service.yaml")
    labels = daemon_set()["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,), (container,) = service["spec"]["ports"], pod_spec()["containers"]
    assert port["targetPort"] in [own["name"] for own in container["ports"]]
    assert port["port"] == deployed().web.port
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_no_base_container_can_reach_the_runtimes_socket() -> None:
    """Whoever can is root on the node; the component runtime-socket is for who wants it."""
    for container in (*pod_spec().get("initContainers", []), *pod_spec()["containers"]):
        for mount in host_mounts(container, pod_spec()).values():
            reached = [socket for socket in RUNTIME_SOCKETS if socket.is_relative_to(mount["host"])]
            assert not reached, f"{mount['host']} holds {reached}"


def test_every_image_has_the_projects_own_library() -> None:
    """Built as the tests build it."""
    assert "python -m native.build_gpushare" in CONTAINERFILE
    library = deployed().libgpushare.library
    assert f"COPY --from=gpushare /gpushare/ /parts{library.parent}/\n" in CONTAINERFILE
    assert f"--output /gpushare/{library.name}" in CONTAINERFILE


def test_the_image_has_all_bytecode() -> None:
    """Nothing is written there later, and the official Python image has none of Python's own library."""
    last = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert "python -m compileall" in last and "PYTHONDONTWRITEBYTECODE=1" in last


def test_every_package_of_the_image_is_installed_by_its_hash() -> None:
    """Or from the wheel that the stage has just made, with no index to look into."""
    installs = re.findall(r"pip install .*", CONTAINERFILE)
    assert len(installs) == 4
    assert all("--require-hashes" in command or "--no-index --no-deps" in command for command in installs)


def test_what_is_no_python_package_is_in_the_list_of_the_images_parts(tmp_path: Path) -> None:
    """With its digest and its licence; what an image was built without is left out."""
    library = tmp_path / "root/usr/local/gpushare/libgpushare.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    (tmp_path / "python.json").write_text('{"bomFormat": "CycloneDX", "components": [{"name": "aiohttp"}]}')
    script = MANIFESTS.parent / "native/sbom.py"
    arguments = [tmp_path / "python.json", tmp_path / "root", tmp_path / "share/parts.json"]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=60)
    parts = json.loads((tmp_path / "share/parts.json").read_text())["components"]
    assert [part["name"] for part in parts] == ["aiohttp", "libgpushare"]
    assert parts[1]["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"library").hexdigest()}]
    assert parts[1]["licenses"] == [{"expression": "Apache-2.0"}]


def test_the_image_has_its_licences() -> None:
    """Both files of the repository, with the words that musl's licence asks for: gpu-client is linked with it."""
    root = MANIFESTS.parent
    assert "COPY LICENSE NOTICE /parts/usr/local/share/licenses/gpushare-agent/" in CONTAINERFILE
    assert {"!LICENSE", "!NOTICE"} <= set((root / ".containerignore").read_text().split())
    assert "Rich Felker" in (root / "NOTICE").read_text()


def test_the_images_compiler_is_the_tests_compiler() -> None:
    """Another version may compile other code."""
    root = MANIFESTS.parent
    pinned = re.findall(r"^(\S+==\S+)", (root / "requirements/compiler.txt").read_text(encoding="utf-8"), flags=re.M)
    assert len(pinned) == 3
    assert not [pin for pin in pinned if f'"{pin}"' not in (root / "pyproject.toml").read_text(encoding="utf-8")]


def test_the_image_has_the_control_library_where_the_settings_look() -> None:
    """The Containerfile takes it from the same place of the image that it is given, and puts it there."""
    path = deployed().driver_volume.control_library
    assert f"COPY --from=vcuda {path}* /parts{path.parent}/" in CONTAINERFILE
    assert "COPY --from=build /parts/ /\n" in CONTAINERFILE


def test_the_image_has_gpu_client_where_the_settings_look() -> None:
    """Built from this project's source; both volumes of volume.conf that containers with shares get name it."""
    assert "COPY native/gpu-client.c" in CONTAINERFILE
    assert f"COPY --from=gpu-client /gpu-client /parts{deployed().driver_volume.gpu_client}" in CONTAINERFILE
    volumes = {volume.name: volume for volume in read_volume_config(MANIFESTS / "base" / "volume.conf")}
    assert "gpu-client" in volumes[VolumeName.SHARED].binaries
    assert "gpu-client" not in volumes[VolumeName.ORIGIN].binaries


def test_the_agent_sees_the_hosts_processes_and_not_its_network() -> None:
    """NVML and the cgroups name processes by host PIDs."""
    assert pod_spec()["hostPID"] is True
    assert not {"hostNetwork", "hostIPC"} & pod_spec().keys()
    assert deployed().runtime.proc_root == Path("/proc")


def test_the_containers_are_not_privileged_and_have_no_capability() -> None:
    """Root is needed for the kubelet's files, nothing beyond."""
    for container in (*pod_spec().get("initContainers", []), *pod_spec()["containers"]):
        context = container["securityContext"]
        assert not context.get("privileged")
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_spec()["priorityClassName"] == "system-node-critical"
    assert pod_spec()["enableServiceLinks"] is False


@pytest.mark.parametrize("path", ["base", "overlays/vcuda", "extender", "mps-daemon", "check"])
def test_why_a_container_ended_is_in_the_status_of_its_pod(path: str) -> None:
    """Its last lines are: `kubectl describe pod` names the setting that is wrong, or the library that is missing."""
    pods = [one["spec"]["template"]["spec"] for one in rendered(path) if "template" in one.get("spec", {})]
    containers = [one for pod in pods for one in (*pod.get("initContainers", []), *pod["containers"])]
    assert containers
    assert {one.get("terminationMessagePolicy") for one in containers} == {"FallbackToLogsOnError"}


def test_the_roles_have_no_wildcard_and_exactly_the_rights_that_check_asks_for() -> None:
    """What `gpushare-agent check` calls needed is given, and nothing else."""
    assert all("*" not in rule[part] for rule in rules() for part in ("apiGroups", "resources", "verbs"))
    given = {
        (verb, ".".join(filter(None, (resource, group))))
        for rule in rules()
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for group in rule["apiGroups"]
    }
    of_policies = {("use", "annotations.gpushare-agent"), ("use", "driver.gpushare-agent")}
    assert given == {*NEEDED_RIGHTS, CLEANUP_RIGHT, FACTS_RIGHT, RUNTIME_CLASSES_RIGHT, *of_policies}


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
    files = base["configMapGenerator"][0]["files"]
    listed = {*base["resources"], *base["configurations"], *files, "kustomization.yaml"}
    assert listed == {path.name for path in (MANIFESTS / "base").iterdir()}
    for directory in sorted((MANIFESTS / "overlays").iterdir()):
        (overlay,) = documents(f"overlays/{directory.name}/kustomization.yaml")
        assert [(directory / path).resolve() for path in overlay["resources"]] == [MANIFESTS / "base"]
        patches = {patch["path"] for patch in overlay.get("patches", ())}
        assert patches | {"kustomization.yaml"} == {path.name for path in directory.iterdir()}
        for component in overlay.get("components", ()):
            assert (directory / component).resolve().parent == MANIFESTS / "components"
            assert (directory / component / "kustomization.yaml").exists()
    (volume,) = [v for v in pod_spec()["volumes"] if v["name"] == "settings"]
    assert volume["configMap"]["name"] == base["configMapGenerator"][0]["name"]


@pytest.mark.parametrize("directory", KUSTOMIZATIONS)
def test_kustomize_renames_nothing_but_references_to_what_it_generates(directory: str) -> None:
    """It adds a hash to a generated ConfigMap's name, and to the same name wherever a ConfigMap could be meant: a Role's
    resourceNames among them, though they name a Lease."""
    found = rendered(directory)
    hashed = {
        item["metadata"]["name"]
        for item in found
        if item["kind"] in ("ConfigMap", "Secret") and re.search(r"-[a-z0-9]{10}$", item["metadata"]["name"])
    }
    places = {(path, text) for item in found for path, text in _texts(item) if text in hashed}
    assert {text for path, text in places if path[-2:] == ("configMap", "name")} == hashed, "each is mounted"
    assert {path[-2:] for path, _ in places} <= {("metadata", "name"), ("configMap", "name")}


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, path)
    elif isinstance(value, str):
        yield path, value


def test_the_check_job_is_the_daemon_sets_pod() -> None:
    """What it finds holds for the agent: same account, runtime, rights, settings, and mounts."""
    (job,) = documents("check/job.yaml")
    spec = job["spec"]["template"]["spec"]
    (checker,), (agent,) = spec["containers"], pod_spec()["containers"]
    for name in ("serviceAccountName", "runtimeClassName", "tolerations", "enableServiceLinks", "hostPID"):
        assert spec[name] == pod_spec()[name]
    assert (checker["image"], checker["securityContext"]) == (agent["image"], agent["securityContext"])
    assert checker["env"] == agent["env"]
    expected = {m["mountPath"]: m for m in agent["volumeMounts"]}
    assert {m["mountPath"]: m for m in checker["volumeMounts"]} == expected
    assert checker["command"] == ["gpushare-agent", "check"]
    volumes, deployed_volumes = by_name(spec["volumes"]), by_name(pod_spec()["volumes"])
    config_map = volumes["settings"].pop("configMap")["name"]
    deployed_volumes["settings"].pop("configMap")
    assert volumes == deployed_volumes
    base_map, check_map = documents("base/kustomization.yaml")[0]["configMapGenerator"]
    assert config_map == check_map["name"], "one whose name does not change with its content"
    assert check_map["options"] == {"disableNameSuffixHash": True}
    assert check_map["files"] == base_map["files"]
    (kustomization,) = documents("check/kustomization.yaml")
    assert kustomization["images"] == documents("base/kustomization.yaml")[0]["images"]


def test_the_check_job_of_simulated_gpus_is_that_overlays_pod() -> None:
    """Of what kustomize renders: it starts where there is no RuntimeClass nvidia, and checks the isolation that is there."""
    (job,) = rendered("check-simulated")
    agent = next(item for item in rendered("overlays/simulated") if item["kind"] == "DaemonSet")
    checker_spec, agent_spec = (item["spec"]["template"]["spec"] for item in (job, agent))
    (checker,), (container,) = checker_spec["containers"], agent_spec["containers"]
    assert "runtimeClassName" not in {*checker_spec, *agent_spec}
    assert by_name(checker["env"]) == by_name(container["env"])
    assert checker["image"] == container["image"]
    mounts = [{mount["mountPath"] for mount in one["volumeMounts"]} for one in (checker, container)]
    assert mounts[0] == mounts[1]
    assert volumes_are_those_mounted(checker_spec)


@pytest.mark.parametrize("path", sorted((MANIFESTS / "samples").glob("*.yaml")), ids=lambda path: path.name)
def test_a_sample_is_a_pod_that_fits_the_default_simulated_node(path: Path) -> None:
    """All samples together run on the sandbox's default node, so that applying them exits 0."""
    settings = Settings()
    blocks_per_gpu = settings.simulated.gpu_memory_mib[0] // settings.resources.memory_block_mib
    for pod in documents(f"samples/{path.name}"):
        assert pod["kind"] == "Pod"
        assert "runtimeClassName" not in pod["spec"], "a node without GPUs has no such class"
        for container in pod["spec"]["containers"]:
            limits = container["resources"]["limits"]
            cores = limits[VCORE_RESOURCE]
            assert 0 < cores < CORES_PER_GPU or cores % CORES_PER_GPU == 0
            assert (0 < limits.get(VMEMORY_RESOURCE, 0) <= blocks_per_gpu) or cores >= CORES_PER_GPU


def test_sample_pods_have_names_of_their_own() -> None:
    """They can be applied together."""
    names = [pod["metadata"]["name"] for path in (MANIFESTS / "samples").glob("*.yaml") for pod in documents(str(path))]
    assert len(names) == len(set(names)) >= 4


def test_the_agent_runs_on_the_nodes_with_gpu_managers_label() -> None:
    """And on no others, whatever other programs label theirs with; no taint keeps it away, nvidia.com/gpu's neither."""
    assert pod_spec()["nodeSelector"] == {"nvidia-device-enable": "enable"}
    assert pod_spec()["tolerations"] == [{"operator": "Exists"}]


def test_the_driver_volume_has_what_programs_without_a_screen_had_of_gpu_managers() -> None:
    """By its volume.conf, v1.1.5 and its master; what is left out of it is for screens, MPS, or not in today's drivers."""
    volumes = json.loads((MANIFESTS / "base/volume.conf").read_text(encoding="utf-8"))["volume"]
    here = {name for volume in volumes for names in volume["components"].values() for name in names}
    libraries = ["ml", "ptxjitcompiler", "opencl", "encode", "opticalflow", "gpucomp"]
    taken = {"nvidia-debugdump", "nvidia-smi", "gpu-client", "libcuda.so", "libnvcuvid.so"}
    assert taken | {f"libnvidia-{name}.so" for name in libraries} <= here
