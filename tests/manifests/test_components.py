"""The manifests' components and overlay fit the base, with settings that exist, and take away or add all that they say."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.commands.check_api import CLEANUP_RIGHT, FACTS_RIGHT
from gpushare_agent.agent.delivery.volume_config import read_volume_config
from gpushare_agent.agent.isolation.mps.control import COMMAND_TIMEOUT_S
from gpushare_agent.agent.runtime.node_probes import RUNTIME_SOCKETS
from gpushare_agent.core.formats.mig_profiles import profile_names
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.resources import NvidiaNames
from gpushare_agent.core.placement.first_fit import Device
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.sandbox.scheduler.cel import parse_selector
from tests.manifests.support_manifests import (
    MANIFESTS,
    SETTINGS_DIRECTORY,
    by_name,
    daemon_set,
    documents,
    effective_settings,
    host_mounts,
    in_sources,
    kustomized,
    merged,
    mount_of,
    patched,
    pod_spec,
    rendered,
    variables,
    volumes_are_those_mounted,
)

VCUDA = "components/vcuda/vcuda.yaml"
BEFORE = {
    "driver-container": (VCUDA,),
    "prune-driver-volume": (VCUDA,),
    "read-only-etc": (VCUDA, "components/cdi/cdi.yaml"),
    "kubelet-directory": ("components/dra/daemonset.yaml", "components/static-pods-self-signed/certificate.yaml"),
}
"""Those of which a component changes something. Without them its volumes are mounted by nothing, and so never made."""


def test_every_file_of_a_component_is_listed_and_patches_what_the_base_has() -> None:
    """A patch for an object that is not there would be an error of kustomize."""
    base = {
        (item["kind"], item["metadata"]["name"])
        for file in ("daemonset.yaml", "rbac.yaml")
        for item in documents(f"base/{file}")
    }
    for directory in sorted((MANIFESTS / "components").iterdir()):
        (component,) = documents(f"components/{directory.name}/kustomization.yaml")
        assert component["kind"] == "Component"
        files = {patch["path"] for patch in component.get("patches", ())}
        added = set(component.get("resources", ()))
        assert files | added | {"kustomization.yaml"} == {path.name for path in directory.iterdir()}
        for one in component.get("patches", ()):
            (patch,) = documents(f"components/{directory.name}/{one['path']}")
            target = one.get("target", {})
            # kustomize passes over a target that is not there.
            assert "name" in target or (patch["kind"], patch["metadata"]["name"]) in base


@pytest.mark.parametrize(
    ("component", "right", "setting"),
    [
        ("without-cleanup", CLEANUP_RIGHT, "allocation.cleanup_rejected_pods"),
        ("without-node-facts", FACTS_RIGHT, "facts.is_written"),
    ],
)
def test_a_component_takes_a_right_and_its_setting_away_together(
    component: str, right: tuple[str, str], setting: str
) -> None:
    """One without the other would be a warning of `check`, or a right that nothing uses."""
    role, binding, patch = (
        documents(f"components/{component}/{name}.yaml")[0] for name in ("no-role", "no-binding", "setting")
    )
    assert role["$patch"] == binding["$patch"] == "delete"
    assert (role["kind"], binding["kind"]) == ("ClusterRole", "ClusterRoleBinding")
    assert role["metadata"] == binding["metadata"]
    (removed,) = [
        item for item in documents("base/rbac.yaml") if item["metadata"] == role["metadata"] and "rules" in item
    ]
    rights = [(verb, resource) for rule in removed["rules"] for verb in rule["verbs"] for resource in rule["resources"]]
    assert rights == [right]
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert attrgetter(setting)(load_settings([], variables(container)).settings) is False


def test_mig_on_demand_adds_no_capability_and_the_device_node_with_driver_from_host_alone(tmp_path: Path) -> None:
    """Of what kustomize renders: without that component nobody gives the node, and its patch changes nothing."""
    (tmp_path / "from-host").mkdir()
    found = kustomized(
        tmp_path / "from-host", ["base"], map("components/{}".format, ("cdi", "driver-from-host", "mig-on-demand"))
    )
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found if one["kind"] == "DaemonSet"}
    assert set(pods) == {"gpushare-agent", "gpushare-driver-devices"}
    for spec in pods.values():
        (container,) = spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"name": "GPUSHARE_MIG__ON_DEMAND", "value": "all"} in container["env"]
    agent = _agent_of(tmp_path / "alone", "dra", "mig-on-demand")
    assert effective_settings(agent).mig.on_demand == ("all",)


def test_each_mig_profile_has_one_class_and_the_resource_of_nvidias_device_plugin() -> None:
    """The scheduler takes one of two classes with one resource, the newer."""
    classes = documents("components/dra-mig-profiles/classes.yaml")
    resources = [one["spec"]["extendedResourceName"] for one in classes]
    assert resources == [NvidiaNames(sharing=Sharing.SHARES).mig_resource(profile) for profile in profile_names()]
    assert len(set(resources)) == len(resources) > 70
    device = {"gpushare-agent/type": "mig", "gpushare-agent/profile": "1g.10gb+me"}
    selecting = [one["metadata"]["name"] for one in classes if _selects(one, device)]
    assert selecting == ["mig-1g.10gb.me.gpushare-agent"]
    assert not any(_selects(one, {"gpushare-agent/type": "gpu"}) for one in classes), (
        "nor an error, which stops the scheduler"
    )
    for one in (*classes, *documents("components/dra/classes.yaml")):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", one["metadata"]["name"])


def _selects(device_class: dict[str, Any], attributes: dict[str, str]) -> bool:
    (selector,) = device_class["spec"]["selectors"]
    device = Device(key=("gpushare-agent", "a-node", "a-device"), attributes=attributes)
    return parse_selector(selector["cel"]["expression"])(device)


def test_the_component_nvidia_turns_the_names_of_nvidias_plugin_on(tmp_path: Path) -> None:
    """And changes nothing else; nvidia-config mounts its file, of which the agent takes the settings. Of what kustomize
    renders: the agent tolerates what the plugin's chart does."""
    plain, named, configured = (_agent_of(tmp_path / str(n), *names) for n, names in enumerate(
        ([], ["nvidia"], ["nvidia", "nvidia-config"])
    ))  # fmt: skip
    before, after = variables(plain["containers"][0]), variables(named["containers"][0])
    assert after == before | {"GPUSHARE_NVIDIA__ENABLED": "true"}
    assert effective_settings(named).nvidia.enabled and not effective_settings(plain).nvidia.enabled
    assert {"operator": "Exists"} in named["tolerations"]  # so CriticalAddonsOnly and nvidia.com/gpu, the chart's, too
    (container,) = configured["containers"]
    path = Path(variables(container)["CONFIG_FILE"])
    (mount,) = [mount for mount in container["volumeMounts"] if Path(mount["mountPath"]) == path.parent]
    (volume,) = [volume for volume in configured["volumes"] if volume["name"] == mount["name"]]
    assert mount["readOnly"] and volume["configMap"] == {"name": "nvidia-plugin-config"} and path.name == "config.yaml"


def _agent_of(folder: Path, *components: str) -> dict[str, Any]:
    """The agent's pod of the base with these components, as kustomize renders it."""
    folder.mkdir(exist_ok=True)
    found = kustomized(folder, ["base"], [f"components/{name}" for name in components])
    named_so = ("DaemonSet", "gpushare-agent")
    (agent,) = [item for item in found if (item["kind"], item["metadata"]["name"]) == named_so]
    spec: dict[str, Any] = agent["spec"]["template"]["spec"]
    return spec


def test_the_component_display_socket_opens_a_directory_of_its_own_on_the_host() -> None:
    """And not the host's /var/run, where the runtime's socket lies."""
    spec = patched("components/display-socket/socket.yaml")
    socket = effective_settings(spec).display.socket
    assert socket is not None
    mount = mount_of(socket, host_mounts(spec["containers"][0], spec))
    assert mount["host"] == mount["mountPath"] == str(socket.parent)
    assert not [runtime for runtime in RUNTIME_SOCKETS if runtime.is_relative_to(mount["host"])]


def test_the_component_network_policy_admits_one_namespace_to_the_agents_port(tmp_path: Path) -> None:
    """Of what kustomize renders, as a network plugin reads it: Prometheus' namespace reaches each port that the agent's pods
    and their Service name; no pod of the product nor of a tenant does; pods of other kinds are not concerned."""
    objects = {item["kind"]: item for item in kustomized(tmp_path, ["base"], ["components/network-policy"])}
    policy, service, agent = (objects[kind] for kind in ("NetworkPolicy", "Service", "DaemonSet"))
    own = objects["Namespace"]["metadata"]
    prometheus, tenant = ({"name": name, "labels": {}} for name in ("monitoring", "team-a"))
    pods = [
        item["spec"]["template"]
        for folder in ("extender", "extender/second-scheduler", "mps-daemon", "check")
        for item in rendered(folder)
        if item["kind"] in ("Deployment", "DaemonSet", "Job")
    ]
    assert len(pods) >= 4
    target = agent["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for one in target["spec"]["containers"] for port in one["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    for port in ports:
        assert _admits(policy, target, prometheus, port)
        assert not _admits(policy, target, tenant, port)
        assert not _admits(policy, target, own, port)
    assert all(_admits(policy, pod, tenant, "http") for pod in pods), "they have policies of their own, or none"


def _admits(policy: dict[str, Any], target: dict[str, Any], source: dict[str, Any], port: str) -> bool:
    """Whether any pod of the namespace `source` reaches the port of that name, by this policy alone:
    the API server labels each namespace with its name."""
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    if not spec["podSelector"]["matchLabels"].items() <= target["metadata"]["labels"].items():
        return True
    labels = {**source.get("labels", {}), "kubernetes.io/metadata.name": source["name"]}
    return any(
        peer["namespaceSelector"]["matchLabels"].items() <= labels.items()
        and {"protocol": "TCP", "port": port} in rule["ports"]
        for rule in spec["ingress"]
        for peer in rule["from"]
    )


def test_the_component_prometheus_operator_scrapes_the_port_that_the_pods_have_once() -> None:
    """The series keep the labels of the containers that they are about."""
    (monitor,) = documents("components/prometheus-operator/podmonitor.yaml")
    template = daemon_set()["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert endpoint["honorLabels"] is True
    (patch,) = documents("components/prometheus-operator/no-annotations.yaml")
    after = merged(daemon_set(), patch)["spec"]["template"]["metadata"]["annotations"]
    assert not [name for name in after if name.startswith("prometheus.io/")]


@pytest.mark.parametrize(
    ("overlay", "isolation", "strategy"),
    [
        ("vcuda", "vcuda", ("envvar", "device-nodes")),
        ("mps", "mps", ("envvar", "device-nodes")),
        ("cdi", "gpushare", ("cdi-cri",)),
    ],
)
def test_an_overlay_is_what_its_name_says(overlay: str, isolation: str, strategy: tuple[str, ...]) -> None:
    """With the base, its components and its own patches, in kustomize's order."""
    spec = patched(*files_of(f"overlays/{overlay}"))
    settings = effective_settings(spec)
    assert (settings.isolation, settings.driver) == (isolation, "nvml")
    assert tuple(map(str, settings.device_list_strategy)) == strategy
    assert volumes_are_those_mounted(spec)
    # gpu-manager's clusters have no RuntimeClass: a pod that named one would not be made.
    assert spec.get("runtimeClassName") == (None if overlay != "mps" else "nvidia")


def files_of(directory: str) -> list[str]:
    """The DaemonSet's patches of a kustomization: those of its components, then its own."""
    (found,) = documents(f"{directory}/kustomization.yaml")
    components = [f"components/{Path(name).name}" for name in found.get("components", ())]
    own = [f"{directory}/{patch['path']}" for patch in found.get("patches", ())]
    nested = [file for component in components for file in files_of(component)]
    return [*nested, *(file for file in own if documents(file)[0]["kind"] == "DaemonSet")]


def test_every_volume_is_mounted_and_every_mount_has_its_volume() -> None:
    """In the base and with each component: the API server refuses the one, the other is forgotten."""
    assert volumes_are_those_mounted(pod_spec())
    for file in sorted(path.relative_to(MANIFESTS) for path in MANIFESTS.glob("components/*/*.yaml")):
        found = documents(str(file))[0]
        if found["kind"] == "DaemonSet" and file.name != "driver-devices.yaml":
            assert volumes_are_those_mounted(patched(*BEFORE.get(file.parent.name, ()), str(file))), file


def test_the_component_isolation_none_takes_away_all_that_isolation_brought() -> None:
    """The setting, the host's PID namespace and /etc/gpu-manager."""
    spec = patched("components/isolation-none/none.yaml")
    assert effective_settings(spec).isolation == "none"
    assert "hostPID" not in spec
    mounts = host_mounts(spec["containers"][0], spec)
    kubelets = ("/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources")
    assert set(mounts) == {Path(one) for one in (*kubelets, "/host/sys/fs/cgroup", "/var/lib/gpushare-agent")}


def test_the_component_vcuda_mounts_what_its_settings_name() -> None:
    """The containers' directories for writing, the driver directory for reading, both under the host's paths, which Allocate
    answers name."""
    spec = patched(VCUDA)
    settings = effective_settings(spec)
    assert settings.isolation == "vcuda" and settings.volume_config is not None
    assert spec["hostPID"] is True
    mounts = host_mounts(spec["containers"][0], spec)
    assert not mount_of(settings.virtual_manager.path, mounts).get("readOnly")
    directories = [volume.directory for volume in read_volume_config(in_sources(settings.volume_config))]
    assert all(mount_of(path, mounts)["readOnly"] for path in directories)
    for container in (*spec["initContainers"], *spec["containers"]):
        mounts = host_mounts(container, spec)
        paths = [settings.virtual_manager.path, *directories]
        for mount in (mounts[parent] for path in paths for parent in path.parents if parent in mounts):
            assert mount["host"] == mount["mountPath"]


def test_the_component_read_only_etc_moves_mounts_and_settings_together() -> None:
    """With the directory that the init container of vcuda fills; containers find the same paths as before."""
    spec = patched(*BEFORE["read-only-etc"], "components/read-only-etc/directories.yaml")
    settings = effective_settings(spec)
    assert settings.volume_config is not None
    volumes = read_volume_config(in_sources(settings.volume_config), settings.host_directory)
    directories = [settings.virtual_manager.path, settings.libgpushare.directory, *(one.directory for one in volumes)]
    mounts = host_mounts(spec["containers"][0], spec)
    for path in (*directories, *settings.cdi.spec_directories):
        assert mount_of(path, mounts)["host"] == mount_of(path, mounts)["mountPath"]
    (init,) = spec["initContainers"]
    made = {volume.base for volume in volumes}
    filled = host_mounts(init, spec)[Path("/etc/gpu-manager/vdriver")]
    assert {Path(filled["host"])} == made and not filled.get("readOnly")
    assert not [one for one in (*mounts.values(), *host_mounts(init, spec).values()) if one["host"].startswith("/etc")]


def test_the_component_nvidia_mig_monitor_adds_two_variables_and_one_capability() -> None:
    """For NVML lists no MIG instances with one alone; nothing else of the base is weaker."""
    spec = patched("components/nvidia-mig-monitor/mig-monitor.yaml")
    (agent,), (before,) = spec["containers"], pod_spec()["containers"]
    added = [one for one in agent["env"] if one not in before["env"]]
    assert added == [{"name": f"NVIDIA_MIG_{right}_DEVICES", "value": "all"} for right in ("MONITOR", "CONFIG")]
    context = before["securityContext"] | {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}
    assert agent["securityContext"] == context


def test_the_component_driver_limits_gives_the_right_and_the_cgroups_together() -> None:
    """One without the other would be a share that is refused; nothing else of the pod's rights changes."""
    spec = patched("components/driver-limits/driver-limits.yaml")
    settings = effective_settings(spec)
    assert settings.driver_limits.set_by_agent and "driver" in settings.isolation_parts_in_use
    (agent,) = spec["containers"]
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    mount = host_mounts(agent, spec)[settings.runtime.cgroup_root]
    assert mount["host"] == "/sys/fs/cgroup" and not mount.get("readOnly")


def test_the_component_end_unlimited_gives_the_setting_and_the_right_together() -> None:
    """To signal processes of any user, and nothing else; an agent without it ends nobody."""
    spec = patched("components/end-unlimited/end-unlimited.yaml")
    (agent,), (before,) = spec["containers"], pod_spec()["containers"]
    assert effective_settings(spec).libgpushare.unlimited == "end"
    assert effective_settings(pod_spec()).libgpushare.unlimited == "warn"
    assert agent["securityContext"] == before["securityContext"] | {"capabilities": {"drop": ["ALL"], "add": ["KILL"]}}


def test_the_init_container_of_vcuda_makes_every_driver_volume_from_the_hosts_files() -> None:
    """It runs the command with the agent's settings; what it reads is below driver_volume.root, what it writes is not."""
    spec = patched(VCUDA)
    (container,) = spec["initContainers"]
    environ = variables(container) | {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}
    settings, mounts = load_settings([], environ).settings, host_mounts(container, spec)
    assert container["command"] == ["gpushare-agent", "driver-volume"]
    assert variables(container)["GPUSHARE_CONFIG"] == str(SETTINGS_DIRECTORY / "settings.yaml")
    assert settings.volume_config == effective_settings(spec).volume_config
    for volume in read_volume_config(in_sources(settings.volume_config)):
        assert not mount_of(volume.directory, mounts).get("readOnly")
    below = {path for path in mounts if path.is_relative_to(settings.driver_volume.root)}
    assert all(mounts[path]["readOnly"] for path in below)
    assert all(path == settings.driver_volume.root / mounts[path]["host"].lstrip("/") for path in below)
    assert settings.driver_volume.root / "etc" not in mounts, "root reads keys and passwords there"
    assert len(mounts) == len(below) + 1
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(container), "NVIDIA's runtime would add a second driver"
    (agent,) = spec["containers"]
    assert container["securityContext"] == agent["securityContext"]
    (component,), (base,) = documents("components/vcuda/kustomization.yaml"), documents("base/kustomization.yaml")
    assert component["images"] == base["images"]


def test_the_component_without_host_pid_changes_nothing_else() -> None:
    """Shares are kept all the same."""
    spec = patched("components/without-host-pid/no-host-pid.yaml")
    assert spec == {key: value for key, value in pod_spec().items() if key != "hostPID"}


def test_the_component_mps_mounts_the_daemons_directory_and_takes_that_of_the_libraries_away() -> None:
    """Under the host's path, which Allocate answers name."""
    spec = patched("components/mps/mps.yaml")
    settings = effective_settings(spec)
    assert settings.isolation == "mps"
    assert "hostPID" not in spec
    mounts = host_mounts(spec["containers"][0], spec)
    directory = settings.mps.pipe_directory.parent
    assert mount_of(settings.mps.pipe_directory, mounts)["host"] == str(directory) and directory in mounts
    assert not [path for path in mounts if path.is_relative_to("/etc/gpu-manager")]


@pytest.mark.parametrize("path", ["mps-daemon/daemonset.yaml", "components/driver-from-host/driver-devices.yaml"])
def test_what_serves_the_agents_runs_on_every_node_that_an_agent_may_have(path: str) -> None:
    """With the component gpushare also those of GPUShare's label: an agent without it beside would refuse every share."""
    spec = documents(path)[0]["spec"]["template"]["spec"]
    agent = patched("components/gpushare/setting.yaml")
    assert (spec["affinity"], spec["tolerations"]) == (agent["affinity"], agent["tolerations"])
    assert "nodeSelector" not in spec


def test_the_mps_daemon_is_at_the_place_where_the_component_looks_for_it() -> None:
    """Same directories, the host's shared memory, the user and the PIDs that it needs, and no update that ends clients."""
    (found,) = documents("mps-daemon/daemonset.yaml")
    spec = found["spec"]["template"]["spec"]
    assert found["spec"]["updateStrategy"] == {"type": "OnDelete"} and spec["hostPID"] is True
    (container,) = spec["containers"]
    environ = {name: value for name, value in variables(container).items() if name.startswith("GPUSHARE_")}
    settings = load_settings([], environ).settings
    mounts = host_mounts(container, spec)
    for path in (settings.mps.pipe_directory, settings.mps.pipe_directory.parent / "log", settings.mps.shm_directory):
        mount = mount_of(path, mounts)
        assert mount["mountPath"] == mount["host"] and not mount.get("readOnly")
    assert settings.mps == effective_settings(patched("components/mps/mps.yaml")).mps
    assert spec["terminationGracePeriodSeconds"] >= settings.mps.drain_timeout_s + 3 * COMMAND_TIMEOUT_S
    assert volumes_are_those_mounted(spec)
    (own,) = documents("mps-daemon/kustomization.yaml")
    (base,) = documents("base/kustomization.yaml")
    assert own["images"] == base["images"] and own["namespace"] == base["namespace"]


def test_the_component_driver_container_collects_from_the_drivers_own_root() -> None:
    """The init container's setting names the only place of the host that it still reads; the agent is as before."""
    spec = patched(VCUDA, "components/driver-container/driver-root.yaml")
    (init,), (agent,) = spec["initContainers"], spec["containers"]
    environ = variables(init) | {"GPUSHARE_CONFIG": str(MANIFESTS / "base/settings.yaml")}
    root = load_settings([], environ).settings.driver_volume.root
    mounts = host_mounts(init, spec)
    assert set(mounts) == {root, Path("/etc/gpu-manager/vdriver")}
    assert (mounts[root]["host"], mounts[root]["readOnly"]) == ("/run/nvidia/driver", True)
    assert agent == patched(VCUDA)["containers"][0]


def test_the_component_runtime_socket_mounts_the_directory_of_a_socket_that_the_agent_knows() -> None:
    """No setting is needed, and a socket that the runtime makes anew is seen."""
    spec = patched("components/runtime-socket/socket.yaml")
    mounts = host_mounts(spec["containers"][0], spec)
    (directory,) = mounts.keys() - host_mounts(pod_spec()["containers"][0], pod_spec()).keys()
    assert RUNTIME_SOCKETS[0].parent == directory
    assert mounts[directory]["host"] == str(directory)
    assert effective_settings(spec).runtime.endpoint == ""
    comment = (MANIFESTS / "components/runtime-socket/kustomization.yaml").read_text(encoding="utf-8")
    for socket in RUNTIME_SOCKETS[1:]:
        assert str(socket) in comment or f" {socket.parent}\n" in comment, socket


def test_the_component_prune_gives_one_capability_to_the_init_container_alone() -> None:
    """The agent, which lives long and listens, has none."""
    spec = patched(VCUDA, "components/prune-driver-volume/prune.yaml")
    (init,), (agent,) = spec["initContainers"], spec["containers"]
    assert init["command"] == ["gpushare-agent", "driver-volume", "--prune"]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert agent == patched(VCUDA)["containers"][0]


def test_the_simulated_overlay_needs_no_driver() -> None:
    """It sets the simulated driver on the same container, without NVIDIA's runtime, a driver directory or what makes one."""
    spec = patched("overlays/simulated/simulated.yaml")
    settings = effective_settings(spec)
    assert (settings.driver, settings.isolation, settings.volume_config) == ("simulated", "gpushare", None)
    assert "runtimeClassName" not in spec
    assert "initContainers" not in spec
    assert volumes_are_those_mounted(spec)
    found = {name: value for name, value in variables(spec["containers"][0]).items() if name.startswith("NVIDIA_")}
    assert found == {"NVIDIA_VISIBLE_DEVICES": "void"}, "the image's own is all"
    mounts = host_mounts(spec["containers"][0], spec)
    for path in (settings.virtual_manager.path, settings.libgpushare.directory):
        assert not mount_of(path, mounts).get("readOnly"), "containers find /etc/vcuda all the same"


@pytest.mark.parametrize(
    "components",
    [
        (),
        ("isolation-none", "runtime-socket"),
        ("vcuda", "runtime-socket", "prune-driver-volume"),
        ("vcuda", "driver-container", "prune-driver-volume"),
        ("vcuda", "driver-from-host"),
        ("vcuda", "cdi", "read-only-etc"),
        ("dra", "static-pods-self-signed", "kubelet-directory"),
    ],
)
def test_kustomize_makes_the_pod_that_these_tests_looked_at(components: tuple[str, ...], tmp_path: Path) -> None:
    """The merge above is the sandbox's; where kustomize is at hand it must say the same."""
    patches = [
        f"components/{name}/{patch['path']}"
        for name in components
        for patch in documents(f"components/{name}/kustomization.yaml")[0]["patches"]
    ]
    expected = patched(*patches)
    spec = _agent_of(tmp_path, *components)
    assert without_order(spec, is_rendered=True) == without_order(expected, is_rendered=False)


def without_order(spec: dict[str, Any], *, is_rendered: bool) -> dict[str, Any]:
    """kustomize orders lists in its own way, gives images their tag and ConfigMaps their hash."""
    tag = documents("base/kustomization.yaml")[0]["images"][0]["newTag"]
    result = spec | {"volumes": by_name(spec["volumes"])}
    for kind in {"initContainers", "containers"} & spec.keys():
        result[kind] = by_name(
            container
            | {
                "env": by_name(container["env"]),
                "volumeMounts": {mount["mountPath"]: mount for mount in container["volumeMounts"]},
                "image": container["image"] if is_rendered else f"{container['image']}:{tag}",
            }
            for container in spec[kind]
        )
    name = result["volumes"]["settings"]["configMap"]["name"]
    result["volumes"]["settings"] = name.rpartition("-")[0] if is_rendered else name
    return result
